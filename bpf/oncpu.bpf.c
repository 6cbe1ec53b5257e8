/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * On-CPU samples.
 *
 * Attach: one software cpu-clock perf event a CPU, every so many nanoseconds of it. Hardware cycles are not
 * used: they stop in idle states and stretch with the clock, so they are no time.
 * Needs: BPF_PROG_TYPE_PERF_EVENT (v4.9) and what walk.h needs.
 * Loses: nothing but what store.h counts; a tick that lands inside another BPF program of the
 * same CPU is skipped by the kernel, which counts it as the program's recursion_misses.
 */
#include <linux/types.h>
#include "offcpu.bpf.c"

/* struct bpf_perf_event_data (uapi/linux/bpf_perf_event.h). */
struct perf_event_context {
	struct pt_regs regs;
	u64 sample_period;
	u64 addr;
};

/* Slot 0: walk_sample, which goes on with a walk; slot 1: walk_sample_python. */
BPF_PROG_ARRAY(sample_walkers, 2);
BPF_PERCPU_ARRAY(sample_budgets, struct event_budget, 1);

/* Tells when a sample was taken, of processes of which that is asked. */
static __always_inline void send_sample(struct sum_key *key, u64 now_ns)
{
	struct sample_event event = { .type = EVENT_SAMPLE, .tid = key->tid, .ns = now_ns };
	u64 most = setting(SETTING_TIMED_SAMPLES);

	if (!most || !timed_processes.lookup(KEY(key->tgid)))
		return;
	event.stack = key->stack;
	/* They are read with the next event that wakes the host half, or with the window. */
	if (spend(sample_budgets.lookup(KEY(0)), now_ns, most))
		send(&event, sizeof(event), BPF_RB_NO_WAKEUP);
	else
		count(LOST_SAMPLES_NOT_TIMED);
}

/* Whether the sample of now is one of those that stand for the others. */
static __always_inline bool is_drawn(void)
{
	u64 one_in = setting(SETTING_SAMPLES_ONE_IN);

	return one_in <= 1 || !((u64)bpf_get_prandom_u32() * one_in >> 32);
}

static __always_inline void finish_sample(struct capture *capture)
{
	struct sum_key key = { .tgid = capture->walk.tgid, .tid = capture->walk.tid };
	u64 one_in = setting(SETTING_SAMPLES_ONE_IN);

	key.image = capture->walk.image;
	key.stack = finish_or_copy(capture);
	key.sample_class = CLASS_ON_CPU;
	add_sum(&key, setting(SETTING_PERIOD_NS) * (one_in ? one_in : 1),
		boundary_at(bpf_ktime_get_ns()));
	send_sample(&key, capture->begun_ns);
}

/* Tail-called with a capture in per-CPU memory. */
int walk_sample(struct perf_event_context *ctx)
{
	struct capture *capture = scratch.lookup(KEY(0));

	if (!capture)
		return 0;
	if (!walk_some(capture))
		sample_walkers.call(ctx, 0);
	if (begin_python_of(capture))
		sample_walkers.call(ctx, 1);
	finish_sample(capture);
	return 0;
}

/* Likewise, for its Python frames. */
int walk_sample_python(struct perf_event_context *ctx)
{
	struct capture *capture = scratch.lookup(KEY(0));

	if (!capture)
		return 0;
	if (!walk_python_of(capture))
		sample_walkers.call(ctx, 1);
	finish_sample(capture);
	return 0;
}

static __always_inline void see_running(u32 tid, u64 now_ns)
{
	struct thread_state *thread = threads.lookup(KEY(tid));
	void *task = current_task();

	if (!thread || !(thread->flags & THREAD_SEEDED))
		return;
	see_entered(thread, task, now_ns);
	if (thread->off_class != CLASS_ON_CPU)
		switch_in_unseen(thread, task, tid, now_ns, boundary_at(now_ns));
	set_running(tid);
}

int on_cpu_sample(struct perf_event_context *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32;
	struct process_state *process;
	struct user_regs regs = {};
	struct capture *capture;
	struct pt_regs *saved = &ctx->regs;
	u64 now_ns;

	if (!(u32)id)
		return 0; /* the idle task is no target's time */
	now_ns = bpf_ktime_get_ns();
	if (!is_recorded(now_ns))
		return 0;
	if (is_excluded() || is_left_out(tgid)) {
		count(LOST_EXCLUDED);
		return 0;
	}
	process = current_included(tgid);
	if (!process)
		return 0;
	count(COUNTER_SAMPLES);
	announce(process, tgid);
	if (host(WITH_OFF_CPU))
		see_running((u32)id, now_ns);
	if (!is_drawn()) {
		count(LOST_SAMPLES_LEFT_OUT);
		return 0;
	}
	if (IS_USER_MODE(saved))
		user_regs_from(&regs, saved);
	else
		current_user_regs(&regs);
	capture = begin_capture(ctx, &regs, !IS_USER_MODE(saved), id, process->image);
	if (!capture)
		return 0;
	capture->begun_ns = now_ns;
	note_call(capture);
	if (capture->walk.depth && mappings_of(&capture->walk))
		sample_walkers.call(ctx, 0);
	walk_without_tables(capture, 1);
	if (begin_python_of(capture))
		sample_walkers.call(ctx, 1);
	finish_sample(capture);
	return 0;
}
