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

#include "unwind.h"
#include "python.h"

/* Frames walked by one program before it calls itself again: what verifiers get through. */
#ifndef STEPS_PER_CALL
#define STEPS_PER_CALL 8
#endif

struct capture {
	struct walk walk;
	struct python_walk python_walk;
	struct stack_record record;
	struct python_chain chain;
};

BPF_PERCPU_ARRAY(scratch, struct capture, 1);
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
	event.cgroup_id = bpf_get_current_cgroup_id();
	task_process_name(current_task(), event.comm, sizeof(event.comm));
	send(&event, sizeof(event), BPF_RB_FORCE_WAKEUP);
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
	struct process_state *process = processes.lookup(&tgid);
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

/* The interpreter of the process that is being walked, NULL for none. */
static __always_inline struct python_process *python_of(struct walk *walk)
{
	u32 tgid = walk->tgid;
	struct python_process *python = pythons.lookup(&tgid);

	return python && python->image == walk->image ? python : NULL;
}

/*
 * Notes where CPython's eval loop is, which is nowhere without an interpreter. In the walk itself: a
 * verifier would follow each frame's way once with a pointer to an interpreter and once without.
 */
static __always_inline void note_eval_loop(struct walk *walk)
{
	struct python_process *python = python_of(walk);

	if (python) {
		__builtin_memcpy(walk->eval_start, python->eval_start, sizeof(walk->eval_start));
		__builtin_memcpy(walk->eval_bytes, python->eval_bytes, sizeof(walk->eval_bytes));
	} else {
		__builtin_memset(walk->eval_bytes, 0, sizeof(walk->eval_bytes));
	}
}

/*
 * Begins a capture of the current task's stack in the memory given for it: its kernel half and the
 * user leaf.
 */
static __always_inline void begin_capture_in(struct capture *capture, void *ctx,
					     struct user_regs *regs, bool in_kernel, u64 id,
					     u64 image)
{
	struct stack_record *record = &capture->record;
	struct walk *walk = &capture->walk;

	record->image = walk->image = image;
	record->tgid = walk->tgid = id >> 32;
	walk->tid = (u32)id;
	walk->hash =
		walk_kernel(ctx, record, in_kernel, hash_step(hash_step(0, image), walk->tgid));
	walk->instruction_pointer = regs->instruction_pointer;
	walk->stack_pointer = regs->stack_pointer;
	walk->frame_pointer = regs->frame_pointer;
	walk->mapping.start = walk->mapping.end = 0;
	walk->window_words = 0;
	walk->is_guessed = walk->eval_frames = walk->is_unmapped = 0;
	walk->eval_cfas[0] = walk->eval_cfas[1] = 0;
	record->python = 0;
	record->gil = PYTHON_GIL_NONE;
	record->call = 0;
	record->call_return = 0;
	walk->depth = 0;
	walk->is_exact = walk->has_frame_pointer = 1;
	walk->end = WITH_USER_STACKS ? END_KERNEL_ONLY : END_EXCLUDED;
	if (!WITH_USER_STACKS || !regs->instruction_pointer)
		return;
	note_eval_loop(walk);
	walk->end = END_TOO_DEEP;
	walk->depth = 1;
	record->user[0] = regs->instruction_pointer;
	walk->hash = hash_step(walk->hash, regs->instruction_pointer);
}

/*
 * The same in this CPU's own memory; NULL if there is none. One capture a CPU at a time: a clock
 * tick cannot come between, since sched_switch runs with interrupts off.
 */
static __always_inline struct capture *begin_capture(void *ctx, struct user_regs *regs,
						     bool in_kernel, u64 id, u64 image)
{
	u32 zero = 0;
	struct capture *capture = scratch.lookup(&zero);

	if (capture)
		begin_capture_in(capture, ctx, regs, in_kernel, id, image);
	else
		count(LOST_SCRATCH);
	return capture;
}

/* The mappings of the process that is being walked, NULL if the host half has not brought them. */
static __always_inline void *mappings_of(struct walk *walk)
{
	u32 tgid = walk->tgid, zero = 0;
	void *mappings = process_mappings.lookup(&tgid);
	struct mapping_slot *slot;

	if (!mappings)
		return NULL;
	slot = bpf_map_lookup_elem(mappings, &zero);
	/* After an exec the old image's mappings are there for a moment: better none. */
	if (!slot || slot->start != walk->image)
		return NULL;
	walk->serial = slot->table;
	return mappings;
}

/* Walks some frames; returns whether the walk has ended. */
static __always_inline bool walk_some(struct capture *capture)
{
	struct walk *walk = &capture->walk;
	void *mappings = mappings_of(walk);
	volatile struct walk *state = walk;
	u64 frame, depth;
	u32 i;

	if (!mappings) {
		walk->end = END_NO_TABLE;
		return true;
	}
#pragma clang loop unroll(disable)
	for (i = 0; i < STEPS_PER_CALL; i++) {
		/* Kept in memory: a verifier would follow the step below once for each of its values. */
		state->is_eval = is_in_eval_loop(walk, walk->instruction_pointer - !walk->is_exact);
		walk->eval_frames += state->is_eval;
		depth = walk->depth;
		if (depth >= MAX_FRAMES)
			return true; /* walk->end is END_TOO_DEEP since the beginning */
		if (step(walk, mappings) != STEP_ON)
			return true;
		if (state->is_eval)
			note_eval_cfa(walk);
		/* The host half looks callers up one byte before: an exact one is put there. */
		frame = walk->instruction_pointer + walk->is_exact;
		/* Shown to verifiers once more: they forget a bound that was copied. */
		asm volatile("" : "+r"(depth));
		if (depth >= MAX_FRAMES)
			return true;
		capture->record.user[depth] = frame;
		walk->hash = hash_step(walk->hash, frame);
		walk->depth = depth + 1;
	}
	return false;
}

/* Begins the walk of Python frames, once the native one has ended; false if there is none. */
static __always_inline bool begin_python_of(struct capture *capture)
{
	struct python_process *python;

	if (!capture->walk.eval_frames)
		return false;
	python = python_of(&capture->walk);
	if (!python)
		return false;
	if (begin_python(python, &capture->walk, &capture->python_walk, &capture->record))
		return true;
	if (capture->python_walk.end != PYTHON_COMPLETE)
		capture->record.python =
			store_python(&capture->python_walk, &capture->chain, &capture->record);
	return false;
}

/* Goes on with it; returns whether it has ended, and is stored. */
static __always_inline bool walk_python_of(struct capture *capture)
{
	struct python_process *python = python_of(&capture->walk);

	if (python && !walk_python_some(python, &capture->python_walk, &capture->chain))
		return false;
	capture->record.python =
		store_python(&capture->python_walk, &capture->chain, &capture->record);
	return true;
}

/* Ends a capture; returns the stack's id. */
static __always_inline u64 finish_capture(struct capture *capture)
{
	struct stack_record *record = &capture->record;
	u64 hash = capture->walk.hash;

	record->end = capture->walk.end;
	if (record->end == END_ROOTED_BY_TABLE && capture->walk.is_guessed)
		record->end = END_ROOTED_BY_GUESS;
	record->user_depth = capture->walk.depth;
	if (record->end == END_TOO_DEEP)
		count(LOST_USER_FRAMES);
	if (capture->walk.is_unmapped)
		ask_for_mappings(record->tgid);
	hash = hash_step(hash, record->python ^ record->gil);
	hash = hash_step(hash, record->call_return ^ record->call);
	hash = hash_step(hash, record->end | (u64)record->kernel_depth << 16);
	store_stack(record, hash);
	return hash;
}

/* The walk by frame pointer, while there are no tables; `depth` frames are known, of a constant. */
static __always_inline void walk_without_tables(struct capture *capture, u32 depth)
{
	struct walk *walk = &capture->walk;
	struct user_regs regs = {
		.instruction_pointer = walk->instruction_pointer,
		.stack_pointer = walk->stack_pointer,
		.frame_pointer = walk->frame_pointer,
	};

	if (!walk->depth)
		return;
	count(COUNTER_WITHOUT_TABLES);
	walk->hash = walk_frame_pointers(&capture->record, &regs, depth, walk->hash);
	walk->depth = capture->record.user_depth;
	walk->end = capture->record.end;
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
