/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * What all programs share: settings, counters, the process filter, the de-duplicated stack store,
 * the sums and the ring buffer.
 *
 * Hash maps are preallocated: programs run in interrupt context, where kernels before v6.1 refuse
 * or dead-lock on run-time allocation. Each failed update bumps its own counter.
 */
#ifndef AIFLAME_STORE_H
#define AIFLAME_STORE_H

#include "aiflame.h"
#include "counters.h"
#include "task.h"
#include "walk.h"

/* Which processes are recorded: -p, --cgroup or -a. */
#define FILTER_PIDS 0
#define FILTER_CGROUP 1
#define FILTER_ALL 2
#ifndef FILTER
#define FILTER FILTER_ALL
#endif

/* Entries. Each of these is a command-line option or derived from one; see agent/recording. */
#ifndef STACKS_MAX
#define STACKS_MAX 16384
#endif
#ifndef SUMS_MAX
#define SUMS_MAX 65536
#endif
#ifndef PROCESSES_MAX
#define PROCESSES_MAX 16384
#endif
#ifndef RING_PAGES
#define RING_PAGES 256
#endif

BPF_ARRAY(settings, u64, SETTING_MAX);
BPF_TABLE("hash", u32, struct process_state, processes, PROCESSES_MAX);
BPF_TABLE("hash", u64, struct stack_record, stacks, STACKS_MAX);
/* Two of them: programs write one while the host half empties the other. */
BPF_TABLE("hash", struct sum_key, struct sum_value, sums0, SUMS_MAX);
BPF_TABLE("hash", struct sum_key, struct sum_value, sums1, SUMS_MAX);
BPF_RINGBUF_OUTPUT(ring, RING_PAGES);
#if FILTER == FILTER_CGROUP
BPF_CGROUP_ARRAY(cgroups, 1);
#endif

static __always_inline u64 setting(u32 slot)
{
	u64 *value = settings.lookup(&slot);

	return value ? *value : 0;
}

static __always_inline void send(void *event, u64 size, u64 flags)
{
	if (ring.ringbuf_output(event, size, flags))
		count(LOST_RING_FULL);
}

/* The current process if it is to be recorded, else NULL. Runs before anything dearer. */
static __always_inline struct process_state *current_target(u32 tgid)
{
	struct process_state *process = processes.lookup(&tgid);
	struct process_state created = {};
	u64 is_target;

	if (process) {
		is_target = process->flags & PROCESS_TARGET;
		/* Else the compiler masks the pointer instead of branching, which verifiers refuse. */
		asm volatile("" : "+r"(is_target));
		return is_target ? process : NULL;
	}
	if (FILTER == FILTER_PIDS || task_is_exiting(current_task()))
		return NULL;
#if FILTER == FILTER_CGROUP
	if (cgroups.check_current_task(0) <= 0)
		return NULL;
#endif
	created.image = bpf_ktime_get_ns();
	created.flags = PROCESS_TARGET;
	if (processes.insert(&tgid, &created)) {
		process = processes.lookup(&tgid); /* another CPU was first, or the map is full */
		if (!process)
			count(LOST_PROCESSES_FULL);
		return process;
	}
	return processes.lookup(&tgid);
}

/* Tells the host half of a process image at its first capture, while it still has mappings. */
static __always_inline void announce(struct process_state *process, u32 tgid)
{
	struct process_event event = {};

	if (process->flags & PROCESS_SEEN)
		return;
	process->flags |= PROCESS_SEEN;
	event.type = EVENT_PROCESS_SEEN;
	event.tgid = tgid;
	event.parent_tgid = task_parent_tgid(current_task());
	event.image = process->image;
	event.ns = bpf_ktime_get_ns();
	event.cgroup_id = bpf_get_current_cgroup_id();
	bpf_get_current_comm(event.comm, sizeof(event.comm));
	send(&event, sizeof(event), BPF_RB_FORCE_WAKEUP);
}

/*
 * Counts a new entry, and asks to be drained each time this CPU has used its share of half the
 * map. Counts and shares are per CPU: no shared cache line is touched.
 */
static __always_inline void count_stored(u32 slot, u32 share_slot)
{
	u32 event = EVENT_DRAIN;
	u64 *stored = counters.lookup(&slot);
	u64 share = setting(share_slot);

	if (!stored)
		return;
	*stored += 1;
	if (share && *stored % share == 0)
		send(&event, sizeof(event), BPF_RB_FORCE_WAKEUP);
}

/* Stores the record under its hash unless it is there already. */
static __always_inline void store_stack(struct stack_record *record, u64 hash)
{
	if (stacks.lookup(&hash))
		return;
	/* -EEXIST would mean that another CPU stored the same stack just now; -E2BIG a full store. */
	if (stacks.insert(&hash, record) && !stacks.lookup(&hash))
		count(LOST_STACKS_FULL);
	else
		count_stored(COUNTER_STACKS_STORED, SETTING_STACKS_DRAIN);
}

/* Captures the current task's stack; returns its id, 0 if there was no room to work in. */
static __always_inline u64 capture_stack(void *ctx, struct user_regs *regs, bool in_kernel,
					 u32 tgid, u64 image)
{
	u32 zero = 0;
	struct stack_record *record = scratch.lookup(&zero);
	u64 hash;

	if (!record) {
		count(LOST_SCRATCH);
		return 0;
	}
	record->image = image;
	record->tgid = tgid;
	hash = hash_step(hash_step(0, image), tgid);
	hash = walk_kernel(ctx, record, in_kernel, hash);
	hash = walk_user(record, regs, hash);
	hash = hash_step(hash, record->end | (u64)record->kernel_depth << 16);
	store_stack(record, hash);
	return hash;
}

static __always_inline void add_sum(struct sum_key *key, u64 ns)
{
	struct sum_value first = { .count = 1, .ns = ns };
	struct sum_value *value;

	if (setting(SETTING_EPOCH))
		value = sums1.lookup(key);
	else
		value = sums0.lookup(key);
	if (value) {
		__sync_fetch_and_add(&value->count, 1);
		__sync_fetch_and_add(&value->ns, ns);
		return;
	}
	if (setting(SETTING_EPOCH) ? sums1.insert(key, &first) : sums0.insert(key, &first))
		count(LOST_SUMS_FULL);
	else
		count_stored(COUNTER_SUMS_STORED, SETTING_SUMS_DRAIN);
}

#endif
