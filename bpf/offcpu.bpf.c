/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Off-CPU time.
 *
 * Attach: raw tracepoints sched_switch and sched_waking. Raw ones cost a quarter of the formatted
 * kind and need no tracefs.
 * Needs: BPF_PROG_TYPE_RAW_TRACEPOINT (v4.17) and what walk.h needs.
 *
 * With BY_CHANCE, most switch-outs take no stack: they are added up by thread alone (`struct
 * chance_total`), and those that were chosen stand for them. Waits of a second and more are exact in
 * any case: of one that was not chosen, the host half reads the stack meanwhile (sweeps.bpf.c).
 *
 * At sched_switch the current task is still `prev`: its stack is taken there, and its interval is
 * closed when it is `next`, on whichever CPU that is, since the state is kept by thread id.
 *
 * Loses: threads that find no room (LOST_THREADS_FULL) and what store.h counts. A wake-up that
 * races with the switch-out on another CPU is missed: that interval is all "blocked".
 */
#include <linux/types.h>
#include "callers.h"

#define WAIT_EVENTS_PER_S 1000 /* on each CPU: 10,000 sleepers must not drown process events */
#define LONGEST_TICK_NS 10000000ull /* CONFIG_HZ=100: how late the scheduler's account can be */

BPF_PERCPU_ARRAY(wait_budgets, struct event_budget, 1);
BPF_TABLE("hash", u32, struct thread_state, threads, SIZED_BY_HOST);

/* The target's thread that each CPU runs, 0 for none; u64 as per-CPU values are padded to that. */
BPF_PERCPU_ARRAY(running, u64, 1);

/* By cgroup id: one switch-out in so many takes a stack. Written by the host half. */
BPF_TABLE("hash", u64, u32, chances, SIZED_BY_HOST);
/* By thread id. Written by the host half. */
BPF_TABLE("hash", u32, struct swept_stack, swept_stacks, SIZED_BY_HOST);

/* struct bpf_raw_tracepoint_args: the tracepoint's own arguments (include/trace/events/sched.h). */
struct raw_tracepoint {
	u64 args[4];
};

/* Whether a state is this task's and not that of an earlier thread with the same id. */
static __always_inline bool same_thread(struct thread_state *thread, void *task)
{
	u64 started_ns = task_started_ns(task);

	if (!thread->started_ns) /* seeded by the host half, which cannot know the exact time */
		thread->started_ns = started_ns;
	return thread->started_ns == started_ns;
}

static __always_inline void set_running(u32 tid)
{
	u64 *here = running.lookup(KEY(0));

	if (here)
		*here = tid;
}

/* The state of a target's thread; made anew when the id belonged to another thread before. */
static __always_inline struct thread_state *thread_of(u32 tid, void *task, u32 tgid, u64 now_ns)
{
	struct thread_state *thread = threads.lookup(KEY(tid));
	struct thread_state fresh = {};

	if (thread && same_thread(thread, task))
		return thread;
	if (task_is_exiting(task))
		return NULL; /* its life was closed at sched_process_exit */
	fresh.started_ns = task_started_ns(task);
	fresh.first_seen_ns = now_ns;
	fresh.tgid = tgid;
	threads.update(&tid, &fresh);
	thread = threads.lookup(KEY(tid));
	if (!thread)
		count(LOST_THREADS_FULL);
	return thread;
}

/* Keeps the interval that ends now for the host half, if it is the first to end past a boundary. */
static __always_inline void note_crossing(struct thread_state *thread, u64 boundary_ns)
{
	struct crossing *crossing = &thread->crossing;

	if (!thread->switched_ns || thread->switched_ns >= boundary_ns ||
	    crossing->boundary_ns == boundary_ns)
		return;
	crossing->on_cpu_ns = thread->on_cpu_ns;
	if (thread->off_class == CLASS_ON_CPU)
		crossing->on_cpu_ns += boundary_ns - thread->switched_ns;
	crossing->stack = thread->stack;
	crossing->switched_ns = thread->switched_ns;
	crossing->waking_ns = thread->waking_ns;
	crossing->off_class = thread->off_class;
	crossing->weight = thread->weight;
	crossing->boundary_ns = boundary_ns;
}

/* How much of what lasted from begin_ns to end_ns is past a boundary. */
static __always_inline u64 past(u64 boundary_ns, u64 begin_ns, u64 end_ns)
{
	if (begin_ns < boundary_ns)
		begin_ns = boundary_ns;
	return begin_ns < end_ns ? end_ns - begin_ns : 0;
}

/* What the host half has read of a thread in a wait that was not chosen. */
static __always_inline u64 swept_stack_of(u32 tid, u64 switched_ns)
{
	struct swept_stack *swept = swept_stacks.lookup(KEY(tid));

	return swept && swept->switched_ns == switched_ns ? swept->stack : NOT_SAMPLED_STACK;
}

/* Adds a part of the interval that ends now. */
static __always_inline void charge(struct thread_state *thread, struct sum_key *key, u32 class,
				   u64 ns, u64 boundary_ns)
{
	key->sample_class = class;
	if (host(BY_CHANCE) && key->stack == NOT_RUN_STACK) {
		struct chance_total *total = &AT(thread->by_chance, boundary_ns & 1);

		total->ns[TOTAL_NOT_RUN] += ns;
		total->count[TOTAL_NOT_RUN] += 1;
		/* Not merged with what follows: old verifiers refuse a computed index. */
		asm volatile("");
		return;
	}
	if (host(BY_CHANCE) && key->weight != WEIGHT_EXACT) {
		struct chance_total *total = &AT(thread->by_chance, boundary_ns & 1);

		total->ns[class] += ns;
		total->count[class] += 1;
		if (key->weight == WEIGHT_NOT_CHOSEN)
			return;
	}
	add_sum(key, ns, boundary_ns);
}

/* Adds the interval that ends now to the sums, as far as it is past a boundary. */
static __always_inline void close_interval(struct thread_state *thread, u32 tid, u64 now_ns,
					   u64 boundary_ns)
{
	struct sum_key key = {
		.stack = thread->stack, .image = thread->image, .tgid = thread->tgid, .tid = tid
	};
	u64 waking_ns = thread->waking_ns;
	struct wait_event event = {};

	if (host(BY_CHANCE)) {
		key.weight = thread->weight;
		if (key.weight != WEIGHT_EXACT &&
		    (now_ns - thread->switched_ns >= LONG_WAIT_NS ||
		     thread->switched_ns + OPEN_WAIT_NS <= boundary_ns)) {
			if (key.weight == WEIGHT_NOT_CHOSEN)
				key.stack = swept_stack_of(tid, thread->switched_ns);
			key.weight = WEIGHT_EXACT;
		}
	}
	if (thread->off_class == CLASS_PREEMPTED) {
		charge(thread, &key, CLASS_PREEMPTED,
		       past(boundary_ns, thread->switched_ns, now_ns), boundary_ns);
		return;
	}
	if (waking_ns < thread->switched_ns || waking_ns > now_ns)
		waking_ns = now_ns;
	event.blocked_ns = waking_ns - thread->switched_ns;
	event.runnable_ns = now_ns - waking_ns;
	if (event.blocked_ns)
		charge(thread, &key, CLASS_BLOCKED,
		       past(boundary_ns, thread->switched_ns, waking_ns), boundary_ns);
	if (event.runnable_ns)
		charge(thread, &key, CLASS_WAITING_TO_RUN, past(boundary_ns, waking_ns, now_ns),
		       boundary_ns);
	if (now_ns - thread->switched_ns < setting(SETTING_WAIT_EVENT_NS))
		return;
	if (now_ns - thread->switched_ns < setting(SETTING_WAIT_LISTED_NS) ||
	    !spend(wait_budgets.lookup(KEY(0)), now_ns, WAIT_EVENTS_PER_S)) {
		count(LOST_WAITS_NOT_LISTED);
		return;
	}
	event.type = EVENT_WAIT;
	event.tgid = thread->tgid;
	event.tid = tid;
	event.stack = key.stack;
	event.image = thread->image;
	event.start_ns = thread->switched_ns;
	send(&event, sizeof(event), BPF_RB_NO_WAKEUP);
}

static __always_inline void switch_in(struct thread_state *thread, void *task, u32 tid, u64 now_ns,
				      u64 boundary_ns)
{
	if (!same_thread(thread, task))
		return; /* the id of one that is gone */
	/* Entered as runnable at the start: since it comes in only now, it was waiting for a CPU. */
	if (thread->flags & THREAD_SEEDED && thread->off_class == CLASS_ON_CPU)
		thread->off_class = CLASS_PREEMPTED;
	note_crossing(thread, boundary_ns);
	if (thread->off_class != CLASS_ON_CPU)
		close_interval(thread, tid, now_ns, boundary_ns);
	thread->off_class = CLASS_ON_CPU;
	thread->switched_ns = now_ns;
	thread->flags = 0;
}

/*
 * Closes the interval of a thread that is on the CPU though it was never seen to come back: kernels
 * that hide a process from tracing, as those of some hosted machines do, hide its switch to the
 * next thread with it; and one that slept when it was looked at may have come back before the host
 * half entered it. How long it has run is the scheduler's to say.
 */
static __always_inline void switch_in_unseen(struct thread_state *thread, void *task, u32 tid,
					     u64 now_ns, u64 boundary_ns)
{
	u64 off_cpu_ns = now_ns - thread->switched_ns;
	u64 came_ns, ran_ns = 0;

	if (!(thread->flags & THREAD_SEEDED))
		ran_ns = task_ran_ns(task) - thread->ran_ns;
	else if (task_is_fair(task))
		ran_ns = task_ran_since_ns(task);
	came_ns = now_ns - (ran_ns < off_cpu_ns ? ran_ns : off_cpu_ns);
	/* What is before the boundary was charged as off the CPU. */
	switch_in(thread, task, tid, came_ns < boundary_ns ? boundary_ns : came_ns, boundary_ns);
}

/*
 * The first time that a thread is seen on the CPU since the host half entered it as ready: it may
 * have come from a sleep that nobody saw, after the start, and is known from there on only. One that
 * was entered as asleep is left to switch_in_unseen(), which is to follow: each copy of that would
 * cost verifiers a third of the program.
 */
static __always_inline void see_entered(struct thread_state *thread, void *task, u64 now_ns)
{
	u64 ran_ns;

	if (!(thread->flags & THREAD_SEEDED) || thread->off_class != CLASS_ON_CPU ||
	    !same_thread(thread, task))
		return;
	if (task_is_fair(task)) {
		ran_ns = task_ran_since_ns(task);
		if (ran_ns + LONGEST_TICK_NS < now_ns - thread->switched_ns)
			thread->first_seen_ns = thread->switched_ns = now_ns - ran_ns;
	}
	thread->flags = 0;
}

/* Reports that a thread is over for the host half, by exit, by exec, or since it is excluded now. */
static __always_inline void send_end(struct thread_state *thread, void *task, u32 tid,
				     bool has_name, u64 now_ns)
{
	struct thread_event *event = ring.ringbuf_reserve(sizeof(*event));

	if (!event) {
		count(LOST_RING_FULL);
		return;
	}
	event->type = EVENT_THREAD_EXIT;
	event->tgid = thread->tgid;
	event->tid = tid;
	event->parent_tgid = task_parent_tgid(task);
	event->image = thread->image;
	event->ns = now_ns;
	event->first_seen_ns = thread->first_seen_ns;
	event->on_cpu_ns = thread->on_cpu_ns;
	event->crossing = thread->crossing;
	__builtin_memcpy(event->by_chance, thread->by_chance, sizeof(event->by_chance));
	event->cgroup_id = host(HAS_CGROUP_ID) ? bpf_get_current_cgroup_id() : 0;
	__builtin_memset(event->comm, 0, sizeof(event->comm));
	if (has_name)
		bpf_get_current_comm(event->comm, sizeof(event->comm));
	ring.ringbuf_submit(event, BPF_RB_NO_WAKEUP);
}

/*
 * Ends the account of a thread that goes off the CPU and is no target's, if it has one: it was moved
 * to an excluded cgroup, or is excluded only now. How it came to the CPU unseen is not asked, as
 * in end_thread(): a copy of that here would cost verifiers more than such moments are worth.
 */
static __always_inline void leave(u32 tid)
{
	struct thread_state *thread = threads.lookup(KEY(tid));
	u64 now_ns;

	if (!thread)
		return;
	now_ns = bpf_ktime_get_ns();
	if (!is_recorded(now_ns))
		return;
	note_crossing(thread, boundary_at(now_ns));
	if (thread->off_class == CLASS_ON_CPU && thread->switched_ns)
		thread->on_cpu_ns += now_ns - thread->switched_ns;
	send_end(thread, current_task(), tid, true, now_ns);
	threads.delete(KEY(tid));
}

/* Slot 0: walk_switch, which goes on with a walk; slot 1: walk_switch_python. */
BPF_PROG_ARRAY(switch_walkers, 2);

static __always_inline void finish_switch(struct capture *capture)
{
	u32 tid = capture->walk.tid;
	u64 stack = finish_capture(capture);
	struct thread_state *thread = threads.lookup(KEY(tid));

	if (thread)
		thread->stack = stack;
}

/* Tail-called with a capture in per-CPU memory. */
int walk_switch(struct raw_tracepoint *ctx)
{
	struct capture *capture = scratch.lookup(KEY(0));

	if (!capture)
		return 0;
	if (!walk_some(capture))
		switch_walkers.call(ctx, 0);
	if (begin_python_of(capture))
		switch_walkers.call(ctx, 1);
	finish_switch(capture);
	return 0;
}

/* Likewise, for its Python frames. */
int walk_switch_python(struct raw_tracepoint *ctx)
{
	struct capture *capture = scratch.lookup(KEY(0));

	if (!capture)
		return 0;
	if (!walk_python_of(capture))
		switch_walkers.call(ctx, 1);
	finish_switch(capture);
	return 0;
}

/* Of how many switch-outs of the current process's cgroup one takes a stack. */
static __always_inline u32 one_in_of(struct process_state *process)
{
	u32 number = setting(SETTING_CHANCES_NUMBER);
	u64 cgroup_id = 0;
	u32 *one_in = NULL;

	if (process->chances_number == number && process->one_in)
		return process->one_in;
	if (host(HAS_CGROUP_ID)) {
		cgroup_id = bpf_get_current_cgroup_id();
		one_in = chances.lookup(&cgroup_id);
	}
	process->one_in = one_in ? *one_in : setting(SETTING_ONE_IN);
	process->chances_number = number;
	return process->one_in;
}

/*
 * Whether the current process is told of by itself: it is old enough, or the host half does not
 * know its cgroup yet, which may be gone with it.
 */
static __always_inline bool is_told_of(struct process_state *process, u64 now_ns)
{
	u64 cgroup_id;

	if (!host(BY_CHANCE) || now_ns - process->image >= setting(SETTING_DETAILS_AFTER_NS))
		return true;
	if (!host(HAS_CGROUP_ID))
		return false;
	cgroup_id = bpf_get_current_cgroup_id();
	return !chances.lookup(&cgroup_id);
}

/* Of how many gaps a moving average is, and of how many bits its weights are. */
#define GAPS_SHIFT 3

/*
 * Whether the switch-out of now takes a stack, as its weight. How likely that is depends on what was
 * before, never on the wait that begins: so sums of weights are right on average.
 */
static __always_inline u32 drawn_weight(struct thread_state *thread, struct process_state *process,
					u64 now_ns)
{
	u64 one_in = one_in_of(process), gap_ns = thread->gap_ns, most;

	if (thread->out_ns)
		gap_ns += ((now_ns - thread->out_ns) >> GAPS_SHIFT) - (gap_ns >> GAPS_SHIFT);
	else
		gap_ns = now_ns - thread->first_seen_ns; /* not since boot: most end soon */
	thread->gap_ns = gap_ns;
	thread->out_ns = now_ns;
	if (one_in <= 1)
		return 1;
	/* A thread that waits less often has more of its waits taken; few weights, since each is a key. */
	most = setting(SETTING_SPACING_NS) / (gap_ns | 1);
	if (most < one_in) {
		most |= most >> 1;
		most |= most >> 2;
		most |= most >> 4;
		most |= most >> 8;
		one_in = (most + 1) >> 1;
		if (one_in <= 1)
			return 1;
	}
	return (u64)bpf_get_prandom_u32() * one_in >> 32 ? WEIGHT_NOT_CHOSEN : (u32)one_in;
}

/* Does not return while the stack is walked: nothing may follow it. */
static __always_inline void switch_out(void *ctx, void *task, struct process_state *process, u64 id,
				       bool is_asleep, u64 now_ns, u64 boundary_ns)
{
	u32 tgid = id >> 32, tid = (u32)id;
	struct user_regs regs = {};
	struct thread_state *thread;
	struct capture *capture;
	bool has_details;

	count(COUNTER_SWITCHES);
	has_details = is_told_of(process, now_ns);
	if (has_details)
		announce(process, tgid);
	thread = thread_of(tid, task, tgid, now_ns);
	if (!thread)
		return;
	see_entered(thread, task, now_ns);
	if (thread->off_class != CLASS_ON_CPU)
		switch_in_unseen(thread, task, tid, now_ns, boundary_ns);
	note_crossing(thread, boundary_ns);
	if (thread->switched_ns)
		thread->on_cpu_ns += now_ns - thread->switched_ns;
	thread->image = process->image;
	thread->tgid = tgid;
	thread->waking_ns = 0;
	thread->flags = 0;
	thread->switched_ns = now_ns;
	thread->ran_ns = task_ran_ns(task);
	thread->off_class = is_asleep ? CLASS_BLOCKED : CLASS_PREEMPTED;
	thread->stack = 0;
	if (host(BY_CHANCE)) {
		thread->weight =
			has_details ? drawn_weight(thread, process, now_ns) : WEIGHT_NOT_CHOSEN;
		if (thread->weight == WEIGHT_NOT_CHOSEN) {
			thread->stack = NOT_SAMPLED_STACK;
			return;
		}
		count(COUNTER_WAITS_CHOSEN);
	}
	current_user_regs(&regs);
	capture = begin_capture(ctx, &regs, true, id, process->image);
	if (!capture)
		return;
	note_call(capture);
	if (capture->walk.depth && mappings_of(&capture->walk))
		switch_walkers.call(ctx, 0);
	walk_without_tables(capture, 1);
	if (begin_python_of(capture))
		switch_walkers.call(ctx, 1);
	finish_switch(capture);
}

/* sched_switch(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned state) */
int on_switch(struct raw_tracepoint *ctx)
{
	void *prev = (void *)ctx->args[1];
	void *next = (void *)ctx->args[2];
	u64 id = bpf_get_current_pid_tgid();
	u32 next_tid = task_tid(next);
	struct process_state *process = NULL;
	struct thread_state *thread = NULL;
	bool is_asleep = false;
	u64 now_ns, boundary_ns;

	/* Two look-ups decide about a switch between foreign threads; the clock is read after them. */
	if ((u32)id) {
		if (!is_excluded())
			process = current_included(id >> 32);
		if (!process && host(WITH_EXCLUDED))
			leave((u32)id);
	}
	if (next_tid)
		thread = threads.lookup(KEY(next_tid));
	if (!process) {
		asm volatile(""); /* else the compiler ors the pointers, which verifiers refuse */
		if (!thread)
			return 0;
	}
	now_ns = bpf_ktime_get_ns();
	if (!is_recorded(now_ns))
		return 0;
	boundary_ns = boundary_at(now_ns);
	/* One that was preempted on its way to sleep stays runnable. */
	if (!(bool)ctx->args[0])
		/* task->state may have changed since the one that decided. */
		is_asleep = host(SWITCH_HAS_STATE) ? (u32)ctx->args[3]
						   : task_u32(prev, host(TASK_STATE));
	if (thread)
		switch_in(thread, next, next_tid, now_ns, boundary_ns);
	set_running(thread ? next_tid : 0);
	if (process)
		switch_out(ctx, prev, process, id, is_asleep, now_ns, boundary_ns);
	return 0;
}

/* sched_waking(struct task_struct *task), in the waker's context */
int on_waking(struct raw_tracepoint *ctx)
{
	u32 tid = task_tid((void *)ctx->args[0]);
	struct thread_state *thread = threads.lookup(KEY(tid));
	u64 now_ns;

	if (!thread || thread->off_class != CLASS_BLOCKED || thread->waking_ns)
		return 0;
	now_ns = bpf_ktime_get_ns();
	if (is_recorded(now_ns))
		thread->waking_ns = now_ns;
	return 0;
}
