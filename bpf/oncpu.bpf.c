/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * On-CPU samples.
 *
 * Attach: one software cpu-clock perf event a CPU, every PERIOD_NS of it. Hardware cycles are not
 * used: they stop in idle states and stretch with the clock, so they are no time.
 * Needs: BPF_PROG_TYPE_PERF_EVENT (v4.9) and what walk.h needs.
 * Loses: nothing but what store.h counts; a tick that lands inside another BPF program of the
 * same CPU is skipped by the kernel, which counts it as the program's recursion_misses.
 */
#include <linux/types.h>
#include "store.h"

#ifndef PERIOD_NS
#define PERIOD_NS 10101010ull
#endif

/* struct bpf_perf_event_data (uapi/linux/bpf_perf_event.h). */
struct perf_event_context {
	struct pt_regs regs;
	u64 sample_period;
	u64 addr;
};

int on_cpu_sample(struct perf_event_context *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	struct process_state *process;
	struct user_regs regs = {};
	struct sum_key key = {};
	struct pt_regs *saved = &ctx->regs;

	key.tgid = id >> 32;
	key.tid = (u32)id;
	if (!key.tid)
		return 0; /* the idle task is no target's time */
	process = current_target(key.tgid);
	if (!process || !setting(SETTING_START_NS))
		return 0;
	count(COUNTER_SAMPLES);
	announce(process, key.tgid);
	if (IS_USER_MODE(saved))
		user_regs_from(&regs, saved);
	else
		current_user_regs(&regs);
	key.stack = capture_stack(ctx, &regs, !IS_USER_MODE(saved), key.tgid, process->image);
	key.image = process->image;
	key.sample_class = CLASS_ON_CPU;
	add_sum(&key, PERIOD_NS);
	return 0;
}
