/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The lives of threads and processes: children are followed, ends are reported.
 *
 * Attach: raw tracepoints sched_process_fork, sched_process_exec, sched_process_exit.
 * Needs: BPF_PROG_TYPE_RAW_TRACEPOINT (v4.17) and what store.h needs.
 * Loses: children beyond the process table (LOST_PROCESSES_FULL) and what store.h counts.
 */
#include "offcpu.bpf.c"

/*
 * Two of them, as of sums. The first end of each key goes through the ring, so that the host half
 * hears of its parent and cgroup while they are there; so does what finds no room.
 */
BPF_TABLE("hash", struct short_lived_key, struct short_lived_total, short_lived0, SIZED_BY_HOST);
BPF_TABLE("hash", struct short_lived_key, struct short_lived_total, short_lived1, SIZED_BY_HOST);

/* What neither a child has of its parent, nor a program of what was before it. */
#define OF_ONE_IMAGE (PROCESS_SEEN | PROCESS_SETTLED | PROCESS_GONE | PROCESS_ARGUMENTS_DUE)

/* A child has its parent's interpreter at the same addresses, until it calls exec. */
static __always_inline void inherit_python(u32 parent_tgid, u64 parent_image, u32 tgid, u64 image)
{
	struct python_process *parent = pythons.lookup(KEY(parent_tgid)), child;

	if (!parent || parent->image != parent_image)
		return;
	__builtin_memcpy(&child, parent, sizeof(child));
	child.image = image;
	pythons.update(&tgid, &child);
}

/* A child has its parent's mappings, or those that this one was forked with itself, until exec. */
static __always_inline void inherit_mappings(struct process_state *parent, u32 parent_tgid,
					     struct process_state *child)
{
	u64 id;
	bool is_brought = mappings_of_image(parent_tgid, parent->image, &id);

	child->mappings_tgid = parent_tgid;
	child->mappings_image = parent->image;
	if (!is_brought && parent->mappings_tgid) {
		child->mappings_tgid = parent->mappings_tgid;
		child->mappings_image = parent->mappings_image;
	}
}

/* sched_process_fork(struct task_struct *parent, struct task_struct *child): threads as well */
int on_fork(struct raw_tracepoint *ctx)
{
	void *child = (void *)ctx->args[1];
	u32 parent_tgid = bpf_get_current_pid_tgid() >> 32;
	u32 tgid = task_tgid(child);
	u32 tid = task_tid(child);
	u64 now_ns = bpf_ktime_get_ns();
	struct process_state *parent = processes.lookup(KEY(parent_tgid));
	struct process_state created = {};
	struct thread_state *thread;

	if (!parent || is_excluded())
		return 0;
	if (tgid != parent_tgid) {
		if (!setting(SETTING_FOLLOW_CHILDREN) && parent->flags & PROCESS_TARGET)
			return 0;
		created.image = now_ns;
		created.flags = parent->flags & ~OF_ONE_IMAGE;
		inherit_mappings(parent, parent_tgid, &created);
		if (processes.update(&tgid, &created)) {
			count(LOST_PROCESSES_FULL);
			return 0;
		}
		inherit_python(parent_tgid, parent->image, tgid, created.image);
	}
	if (!host(WITH_OFF_CPU) || !(parent->flags & PROCESS_TARGET) || !is_recorded(now_ns))
		return 0;
	/* From now to its first switch-in the new thread waits for a CPU. */
	thread = thread_of(tid, child, tgid, now_ns);
	if (!thread)
		return 0;
	thread->image = tgid == parent_tgid ? parent->image : created.image;
	thread->off_class = CLASS_BLOCKED;
	thread->switched_ns = now_ns;
	thread->waking_ns = now_ns;
	thread->stack = NOT_RUN_STACK;
	thread->weight = WEIGHT_EXACT;
	return 0;
}

static __always_inline struct short_lived_total *short_lived_of(struct short_lived_key *key,
								u64 boundary_ns)
{
	if (writes_second(boundary_ns))
		return short_lived1.lookup(key);
	return short_lived0.lookup(key);
}

/*
 * Adds the time of a thread that ends to that of others, and returns true; or returns false, as the
 * host half is to be told of it by itself. It is added if the host half was told nothing of its
 * process, which is short-lived, and nothing of the process is in a window before. Then nothing of
 * the thread is in a sum either: none of its waits can have been long (LONG_WAIT_NS).
 *
 * A program that is kept from its CPU past the end of its window adds to the next but one.
 */
static __always_inline bool join(struct thread_state *thread, struct process_state *process,
				 void *task, u32 tid, bool has_name, u64 now_ns, u64 boundary_ns)
{
	struct short_lived_total none = {}, *total;
	struct short_lived_key key = {};

	if (!host(BY_CHANCE) || process->image < boundary_ns || thread->image != process->image ||
	    thread->first_seen_ns < boundary_ns || process->flags & PROCESS_SEEN ||
	    is_told_of(process, now_ns))
		return false;
	key.cgroup_id = host(HAS_CGROUP_ID) ? bpf_get_current_cgroup_id() : 0;
	key.parent_tgid = task_parent_tgid(task);
	if (has_name)
		task_process_name(task, key.comm, sizeof(key.comm));
	total = short_lived_of(&key, boundary_ns);
	if (!total) {
		if (writes_second(boundary_ns))
			short_lived1.insert(&key, &none);
		else
			short_lived0.insert(&key, &none);
		return false;
	}
	__sync_fetch_and_add(&total->images, tid == thread->tgid);
	__sync_fetch_and_add(&total->on_cpu_ns, thread->on_cpu_ns);
	__sync_fetch_and_add(&total->observed_ns, now_ns - thread->first_seen_ns);
	/* Both: it may have begun before it was known that the window has. */
	for (u32 class = 0; class < 4; class++) {
		__sync_fetch_and_add(&total->by_chance.ns[class],
				     thread->by_chance[0].ns[class] +
					     thread->by_chance[1].ns[class]);
		__sync_fetch_and_add(&total->by_chance.count[class],
				     thread->by_chance[0].count[class] +
					     thread->by_chance[1].count[class]);
	}
	return true;
}

/* Reports a thread of an image that ends for it, by exit or by exec. */
static __always_inline void end_thread(struct thread_state *thread, struct process_state *process,
				       void *task, u32 tid, bool is_exit, u64 now_ns)
{
	u64 boundary_ns = boundary_at(now_ns);

	see_entered(thread, task, now_ns);
	if (thread->off_class != CLASS_ON_CPU)
		switch_in_unseen(thread, task, tid, now_ns, boundary_ns);
	note_crossing(thread, boundary_ns);
	if (thread->switched_ns)
		thread->on_cpu_ns += now_ns - thread->switched_ns;
	/* An exec has renamed it already. */
	if (!process || !join(thread, process, task, tid, is_exit, now_ns, boundary_ns))
		send_end(thread, task, tid, is_exit, now_ns);
	threads.delete(KEY(tid));
}

/* Reports the end of a process, if anything was reported of it, and forgets it. */
static __always_inline void end_process(struct process_state *process, u32 tgid, u64 now_ns)
{
	struct process_event gone = {};

	if (process->flags & PROCESS_SEEN) {
		gone.type = EVENT_PROCESS_EXIT;
		gone.tgid = tgid;
		gone.image = process->image;
		gone.ns = now_ns;
		bpf_get_current_comm(gone.comm, sizeof(gone.comm));
		send(&gone, sizeof(gone),
		     host(FILTER) == FILTER_ALL ? BPF_RB_NO_WAKEUP : BPF_RB_FORCE_WAKEUP);
	}
	processes.delete(KEY(tgid));
	pythons.delete(KEY(tgid));
}

/*
 * Tells that a process that is left out has called exec: the host half looks at its cgroup again,
 * since engines move the processes of a container there before that.
 */
static __always_inline void send_left_out_exec(struct process_state *process, u32 tgid, u64 now_ns)
{
	struct process_event event = {};

	event.type = EVENT_LEFT_OUT_EXEC;
	event.tgid = tgid;
	event.image = process->image;
	event.ns = now_ns;
	/* Nobody is woken up for what is not recorded. */
	send(&event, sizeof(event), BPF_RB_NO_WAKEUP);
	process->image = now_ns;
	process->flags = PROCESS_LEFT_OUT;
}

/* sched_process_exec(struct task_struct *task, pid_t old_pid, struct linux_binprm *binary) */
int on_exec(struct raw_tracepoint *ctx)
{
	void *task = current_task();
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	/* A thread that is not the leader takes over the leader's id when it calls exec. */
	u32 old_tid = (u32)ctx->args[1];
	u64 now_ns = bpf_ktime_get_ns();
	struct process_state *process = processes.lookup(KEY(tgid));
	struct thread_state *thread = threads.lookup(KEY(old_tid));

	if (thread && is_recorded(now_ns))
		end_thread(thread, process, task, old_tid, false, now_ns);
	/* No call of the old image returns. */
	forget_caller(old_tid);
	forget_caller(tgid);
	if (!process)
		return 0;
	/* Engines start containers so: a child of their own moves to the container's cgroup first. */
	if (is_excluded()) {
		if (process->flags & PROCESS_TARGET)
			end_process(process, tgid, now_ns);
		return 0;
	}
	if (process->flags & PROCESS_LEFT_OUT) {
		send_left_out_exec(process, tgid, now_ns);
		return 0;
	}
	process->image = now_ns;
	process->mappings_tgid = 0;
	if (process->flags & PROCESS_AT_EXEC)
		process->flags = PROCESS_TARGET;
	process->flags &= ~OF_ONE_IMAGE;
	if (!(process->flags & PROCESS_TARGET) || !is_recorded(now_ns))
		return 0;
	/* Of most short-lived programs there is never a sample, or a stack of a wait. */
	if (is_told_of(process, now_ns))
		send_arguments(task, tgid, now_ns);
	else
		process->flags |= PROCESS_ARGUMENTS_DUE;
	if (!host(WITH_OFF_CPU))
		return 0;
	thread = thread_of(tgid, task, tgid, now_ns);
	if (!thread)
		return 0;
	thread->image = now_ns;
	thread->switched_ns = now_ns;
	set_running(tgid);
	return 0;
}

/* sched_process_exit(struct task_struct *task, ...): once a thread, in its own context */
int on_exit(struct raw_tracepoint *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = (u32)id;
	u64 now_ns = bpf_ktime_get_ns();
	struct process_state *process = processes.lookup(KEY(tgid));
	struct thread_state *thread = threads.lookup(KEY(tid));

	/* Once stopped, the host half closes the intervals of all that are there. */
	if (thread && is_recorded(now_ns))
		end_thread(thread, process, current_task(), tid, true, now_ns);
	forget_caller(tid);
	if (!process || !process_is_dead(current_task()))
		return 0;
	end_process(process, tgid, now_ns);
	return 0;
}
