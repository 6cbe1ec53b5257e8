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
#include "host.h"
#include "task.h"
#include "walk.h"

BPF_ARRAY(settings, u64, SETTING_MAX);
BPF_TABLE("hash", u32, struct process_state, processes, SIZED_BY_HOST);
BPF_TABLE("hash", u64, struct stack_record, stacks, SIZED_BY_HOST);
/* Two of them: programs write one while the host half empties the other. */
BPF_TABLE("hash", struct sum_key, struct sum_value, sums0, SIZED_BY_HOST);
BPF_TABLE("hash", struct sum_key, struct sum_value, sums1, SIZED_BY_HOST);
/*
 * Processes that run a device's kernels on CPUs, by process id: their samples are sent with their
 * times, and their launches have an order. Written by the host half.
 */
BPF_TABLE("hash", u32, u32, timed_processes, SIZED_BY_HOST);
BPF_RINGBUF_OUTPUT(ring, SIZED_BY_HOST);
BPF_CGROUP_ARRAY(cgroups, 1);
/* Ids of cgroups of v2 that are not recorded, each for itself. Written by the host half. */
BPF_TABLE("hash", u64, u32, excluded_cgroups, SIZED_BY_HOST);

static __always_inline u64 setting(u32 slot)
{
	u64 *value = settings.lookup(KEY(slot));

	return value ? *value : 0;
}

/* Whether what happens now is recorded: the recording has begun, and its end is not yet there. */
static __always_inline bool is_recorded(u64 now_ns)
{
	return now_ns < setting(SETTING_END_NS);
}

static __always_inline void send(void *event, u64 size, u64 flags)
{
	if (ring.ringbuf_output(event, size, flags))
		count(LOST_RING_FULL);
}

#define NS_PER_S 1000000000ull

/*
 * Whether there may be one more of what a budget allows so many of each second. CPUs may share it:
 * one of them may have read the clock before another one began the second.
 */
static __always_inline bool spend(struct event_budget *budget, u64 now_ns, u64 most)
{
	if (!budget)
		return false;
	if ((s64)(now_ns - budget->second_ns) >= (s64)NS_PER_S) {
		budget->second_ns = now_ns;
		budget->sent = 0;
	}
	__sync_fetch_and_add(&budget->sent, 1);
	return budget->sent <= most;
}

/*
 * Whether the current process is in a cgroup that is not to be recorded. It is asked of the cgroup
 * each time and kept for no process: processes move, and which cgroups are excluded changes.
 */
static __always_inline bool is_excluded(void)
{
	u64 id;

	if (!host(WITH_EXCLUDED))
		return false;
	id = bpf_get_current_cgroup_id();
	return excluded_cgroups.lookup(&id) != NULL;
}

/*
 * Whether a process is left out by itself: the host half marks those in groups of v1, of which
 * programs know no id.
 */
static __always_inline bool is_left_out(u32 tgid)
{
	struct process_state *process;

	if (!host(WITH_EXCLUDED))
		return false;
	process = processes.lookup(KEY(tgid));
	return process && process->flags & PROCESS_LEFT_OUT;
}

/* As current_target, of a process that is in no excluded cgroup. */
static __always_inline struct process_state *current_included(u32 tgid)
{
	struct process_state *process = processes.lookup(KEY(tgid));
	struct process_state created = {};
	u64 is_target;

	if (process) {
		is_target = process->flags & PROCESS_TARGET;
		/* Else the compiler masks the pointer instead of branching, which verifiers refuse. */
		asm volatile("" : "+r"(is_target));
		return is_target ? process : NULL;
	}
	if (host(FILTER) == FILTER_PIDS || task_is_exiting(current_task()))
		return NULL;
	if (host(FILTER) == FILTER_CGROUP && cgroups.check_current_task(0) <= 0)
		return NULL;
	created.image = bpf_ktime_get_ns();
	created.flags = PROCESS_TARGET;
	if (processes.insert(&tgid, &created)) {
		process =
			processes.lookup(KEY(tgid)); /* another CPU was first, or the map is full */
		if (!process)
			count(LOST_PROCESSES_FULL);
		return process;
	}
	return processes.lookup(KEY(tgid));
}

/* The current process if it is to be recorded, else NULL. Runs before anything dearer. */
static __always_inline struct process_state *current_target(u32 tgid)
{
	return is_excluded() ? NULL : current_included(tgid);
}

/* By then the loader has mapped a program's libraries, with room for a slow disk. */
#define SETTLE_NS 20000000ull

static __always_inline void send_seen(struct process_state *process, u32 tgid, u64 now_ns)
{
	struct process_event event = {};

	event.type = EVENT_PROCESS_SEEN;
	event.tgid = tgid;
	event.parent_tgid = task_parent_tgid(current_task());
	event.image = process->image;
	event.ns = now_ns;
	if (host(HAS_CGROUP_ID))
		event.cgroup_id = bpf_get_current_cgroup_id();
	task_process_name(current_task(), event.comm, sizeof(event.comm));
	send(&event, sizeof(event), BPF_RB_FORCE_WAKEUP);
}

/*
 * Sends the arguments of the current task's program: a short one is gone before /proc can be read.
 * exec has written them, and they are still in memory mostly.
 */
static __always_inline void send_arguments(void *task, u32 tgid, u64 image)
{
	void *mm = (void *)task_u64(task, host(TASK_MM));
	u64 start = task_u64(mm, host(MM_ARG_START));
	u64 size = task_u64(mm, host(MM_ARG_END)) - start;
	struct exec_event *event = ring.ringbuf_reserve(sizeof(*event));

	if (!event) {
		count(LOST_RING_FULL);
		return;
	}
	event->type = EVENT_EXEC;
	event->tgid = tgid;
	event->image = image;
	event->unused = 0;
	if (size > ARGUMENTS_BYTES - 1)
		size = ARGUMENTS_BYTES - 1;
	OPAQUE(size);
	size &= ARGUMENTS_BYTES - 1; /* the bound, where verifiers see it */
	if (bpf_probe_read_user(event->arguments, size, (void *)start))
		size = 0;
	event->size = size;
	ring.ringbuf_submit(event, BPF_RB_NO_WAKEUP);
}

/*
 * Tells the host half of a process image at its first capture, while it still has mappings, and of
 * a new one again at the first after SETTLE_NS: it may end before an unknown address is noticed.
 */
static __always_inline void announce(struct process_state *process, u32 tgid)
{
	bool is_settled;
	u64 now_ns;

	if (process->flags & PROCESS_SETTLED)
		return;
	now_ns = bpf_ktime_get_ns();
	is_settled = now_ns - process->image >= SETTLE_NS;
	if (process->flags & PROCESS_SEEN && !is_settled)
		return;
	if (process->flags & PROCESS_ARGUMENTS_DUE) {
		process->flags &= ~PROCESS_ARGUMENTS_DUE;
		send_arguments(current_task(), tgid, process->image);
	}
	process->flags |= is_settled ? PROCESS_SEEN | PROCESS_SETTLED : PROCESS_SEEN;
	send_seen(process, tgid, now_ns);
}

/* How long it is not asked again, at first; twice as long each time, up to 64 times. */
#define ASK_AGAIN_NS 20000000ull

/*
 * Asks for a process's mappings to be read again: a library was loaded, or an address is junk, of
 * which there may be no end.
 */
static __always_inline void ask_for_mappings(u32 tgid)
{
	struct process_state *process = processes.lookup(KEY(tgid));
	u64 now_ns = bpf_ktime_get_ns();
	u32 asked;

	if (!process)
		return;
	asked = process->asked < 6 ? process->asked : 6;
	if (now_ns - process->asked_ns < ASK_AGAIN_NS << asked)
		return;
	process->asked_ns = now_ns;
	process->asked += 1;
	send_seen(process, tgid, now_ns);
}

/*
 * Counts a new entry, and asks to be drained each time this CPU has used its share of half the
 * map. Counts and shares are per CPU: no shared cache line is touched.
 */
static __always_inline void count_stored(u32 slot, u32 share_slot)
{
	u32 event = EVENT_DRAIN;
	u64 *stored = counters.lookup(KEY(slot));
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
		count(LOST_STACK_STORE_FULL);
	else
		count_stored(COUNTER_STACKS_STORED, SETTING_STACKS_DRAIN);
}

/* The last boundary of windows at a time, which is now or a moment ago. */
static __always_inline u64 boundary_at(u64 now_ns)
{
	u64 boundary_ns = setting(SETTING_BOUNDARY_NS);

	return now_ns >= boundary_ns ? boundary_ns : setting(SETTING_BOUNDARY_BEFORE_NS);
}

static __always_inline bool writes_second(u64 boundary_ns)
{
	return boundary_ns & 1;
}

/* To the window that begins at a boundary. */
static __always_inline void add_sum(struct sum_key *key, u64 ns, u64 boundary_ns)
{
	struct sum_value first = { .count = 1, .ns = ns };
	struct sum_value *value;

	if (writes_second(boundary_ns))
		value = sums1.lookup(key);
	else
		value = sums0.lookup(key);
	if (value) {
		__sync_fetch_and_add(&value->count, 1);
		__sync_fetch_and_add(&value->ns, ns);
		return;
	}
	if (writes_second(boundary_ns) ? sums1.insert(key, &first) : sums0.insert(key, &first))
		count(LOST_SUMS_FULL);
	else
		count_stored(COUNTER_SUMS_STORED, SETTING_SUMS_DRAIN);
}

#endif
