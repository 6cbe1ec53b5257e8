/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The capture of a stack, as every program takes it: kernel frames, native frames, Python frames,
 * over as many tail calls as it needs; then it is stored.
 *
 * Needs: what walk.h, unwind.h and python.h need.
 * Loses: what they and store.h count; how each walk ended is stored with its stack.
 */
#ifndef AIFLAME_CAPTURE_H
#define AIFLAME_CAPTURE_H

#include "store.h"
#include "unwind.h"
#include "python.h"

/* Frames walked by one program before it calls itself again: what verifiers get through. */
#ifndef STEPS_PER_CALL
#define STEPS_PER_CALL 12
#endif

/* Apart from other events, which copies would leave no room for. */
BPF_RINGBUF_OUTPUT(stack_copies, SIZED_BY_HOST);

struct capture {
	struct walk walk;
	struct python_walk python_walk;
	struct stack_record record;
	struct python_chain chain;
	u64 begun_ns; /* of an on-CPU sample: when it was taken */
};

BPF_PERCPU_ARRAY(scratch, struct capture, 1);

/* The interpreter of the process that is being walked, NULL for none. */
static __always_inline struct python_process *python_of(struct walk *walk)
{
	u32 tgid = walk->tgid;
	struct python_process *python = pythons.lookup(KEY(tgid));

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
	walk->base_pointer = regs->base_pointer;
	walk->mapping.start = walk->mapping.end = 0;
	walk->window_words = 0;
	walk->is_heuristic = walk->eval_frames = walk->is_unmapped = 0;
	walk->missing.depth = 0;
	walk->leaf_frame = LEAF_FRAME_UNKNOWN;
	walk->eval_cfas[0] = walk->eval_cfas[1] = 0;
	record->python = 0;
	record->gil = PYTHON_GIL_NONE;
	record->call = 0;
	record->call_return = 0;
	walk->depth = 0;
	walk->is_exact = walk->has_frame_pointer = 1;
	walk->end = host(WITH_USER_STACKS) ? STOP_KERNEL_ONLY : STOP_EXCLUDED;
	if (!host(WITH_USER_STACKS) || !regs->instruction_pointer)
		return;
	note_eval_loop(walk);
	walk->end = STOP_TOO_DEEP;
	walk->depth = 1;
	AT(record->frames, record->kernel_depth) = regs->instruction_pointer;
	walk->hash = hash_step(walk->hash, regs->instruction_pointer);
	if (!regs->return_address)
		return;
	/* The caller is one frame further, and has the stack pointer as it is. */
	walk->instruction_pointer = regs->return_address;
	walk->is_exact = 0;
	walk->depth = 2;
	AT(record->frames, record->kernel_depth + 1) = regs->return_address;
	walk->hash = hash_step(walk->hash, regs->return_address);
}

/*
 * The same in this CPU's own memory; NULL if there is none. One capture a CPU at a time: a clock
 * tick cannot come between, since sched_switch runs with interrupts off.
 */
static __always_inline struct capture *begin_capture(void *ctx, struct user_regs *regs,
						     bool in_kernel, u64 id, u64 image)
{
	struct capture *capture = scratch.lookup(KEY(0));

	if (capture)
		begin_capture_in(capture, ctx, regs, in_kernel, id, image);
	else
		count(LOST_NO_SCRATCH);
	return capture;
}

/* The mappings of a process image, NULL if the host half has not brought them. */
static __always_inline void *mappings_of_image(u32 tgid, u64 image, u64 *id)
{
	void *mappings = process_mappings.lookup(&tgid);
	struct mapping_slot *slot;

	if (!mappings)
		return NULL;
	slot = bpf_map_lookup_elem(mappings, KEY(0));
	/* After an exec the old image's mappings are there for a moment: better none. */
	if (!slot || slot->start != image)
		return NULL;
	*id = slot->bias;
	return mappings;
}

/*
 * The mappings of the process that is being walked, NULL if there are none. Until the host half
 * brings a child's own, those that it was forked with are at the same addresses.
 */
static __always_inline void *mappings_of(struct walk *walk)
{
	void *mappings = mappings_of_image(walk->tgid, walk->image, &walk->mappings_id);
	struct process_state *process;

	if (mappings)
		return mappings;
	process = processes.lookup(KEY(walk->tgid));
	if (!process || process->image != walk->image || !process->mappings_tgid)
		return NULL;
	return mappings_of_image(process->mappings_tgid, process->mappings_image,
				 &walk->mappings_id);
}

/* Walks some frames; returns whether the walk has ended. */
static __always_inline bool walk_some(struct capture *capture)
{
	struct walk *walk = &capture->walk;
	void *mappings = mappings_of(walk);
	volatile struct walk *state = walk;
	u64 frame, at;
	u32 result, i;

	if (!mappings) {
		walk->end = STOP_NO_TABLE;
		return true;
	}
#pragma clang loop unroll(disable)
	for (i = 0; i < STEPS_PER_CALL; i++) {
		/* Kept in memory: a verifier would follow the step below once for each of its values. */
		state->is_eval = is_in_eval_loop(walk, walk->instruction_pointer - !walk->is_exact);
		walk->eval_frames += state->is_eval;
		at = capture->record.kernel_depth + walk->depth;
		if (at >= MAX_FRAMES)
			return true; /* walk->end is STOP_TOO_DEEP since the beginning */
		result = step(walk, mappings);
		if (result == STEP_AGAIN)
			continue;
		if (result != STEP_ON)
			return true;
		if (state->is_eval)
			note_eval_cfa(walk);
		/* The host half looks callers up one byte before: an exact one is put there. */
		frame = walk->instruction_pointer + walk->is_exact;
		AT(capture->record.frames, at) = frame;
		walk->hash = hash_step(walk->hash, frame);
		walk->depth += 1;
	}
	return false;
}

/* Whether a walk has ended before the outermost frame. */
static __always_inline bool is_cut(struct walk *walk)
{
	return walk->end != STOP_ROOTED && walk->end != STOP_ROOTED_BY_TABLE &&
	       walk->end != STOP_KERNEL_ONLY && walk->end != STOP_EXCLUDED;
}

/* Begins the walk of Python frames, once the native one has ended; false if there is none. */
static __always_inline bool begin_python_of(struct capture *capture)
{
	struct python_process *python;

	/* Those of a native stack that was cut before them are its callers. */
	if (!capture->walk.eval_frames && !is_cut(&capture->walk))
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

/* Ends a capture; returns what tells its stack from all others. */
static __always_inline u64 end_capture(struct capture *capture)
{
	struct stack_record *record = &capture->record;
	u64 hash = capture->walk.hash;

	record->end = capture->walk.end;
	if (record->end == STOP_ROOTED_BY_TABLE && capture->walk.is_heuristic)
		record->end = STOP_ROOTED_BY_HEURISTIC;
	record->user_depth = capture->walk.depth;
	if (record->end == STOP_TOO_DEEP)
		count(LOST_USER_FRAMES_CUT);
	if (capture->walk.is_unmapped)
		ask_for_mappings(record->tgid);
	hash = hash_step(hash, record->python ^ record->gil);
	hash = hash_step(hash, record->call_return ^ record->call);
	return hash_step(hash, record->end | (u64)record->kernel_depth << 16);
}

/* Ends a capture, and stores its stack; returns its id. */
static __always_inline u64 finish_capture(struct capture *capture)
{
	u64 stack = end_capture(capture);

	store_stack(&capture->record, stack);
	return stack;
}

/*
 * Sends a stack that met code without a table, to be walked by the host half once that is there;
 * returns its id, 0 if it could not be sent.
 */
static __always_inline u64 send_copy(struct capture *capture, u64 hash)
{
	struct missing_table *missing = &capture->walk.missing;
	u64 now_ns = bpf_ktime_get_ns(), page, i;
	u64 most = setting(SETTING_STACK_COPIES);
	u32 tgid = capture->walk.tgid;
	struct process_state *process = processes.lookup(KEY(tgid));
	struct stack_copy *copy = NULL;

	if (!most || !process)
		return 0;
	if (spend(&process->copies, now_ns, most))
		copy = stack_copies.ringbuf_reserve(sizeof(*copy));
	if (!copy) {
		count(LOST_STACKS_NOT_COPIED);
		return 0;
	}
	/* No thread has two at one time. */
	hash = hash_step(hash_step(hash, now_ns), capture->walk.tid);
	copy->depth = missing->depth;
	copy->stack = hash;
	copy->instruction_pointer = missing->instruction_pointer;
	copy->stack_pointer = missing->stack_pointer;
	copy->frame_pointer = missing->frame_pointer;
	copy->base_pointer = capture->walk.base_pointer;
	copy->is_exact = missing->is_exact;
	copy->has_frame_pointer = missing->has_frame_pointer;
	copy->pages = 0;
	bpf_probe_read_kernel(&copy->record, sizeof(copy->record), &capture->record);
	page = missing->stack_pointer & ~(STACK_PAGE_BYTES - 1ull);
#pragma clang loop unroll(full)
	for (i = 0; i < STACK_COPY_PAGES; i++) {
		if (bpf_probe_read_user(copy->memory + i * STACK_PAGE_BYTES, STACK_PAGE_BYTES,
					(void *)(page + i * STACK_PAGE_BYTES)))
			break;
		copy->pages = i + 1;
	}
	stack_copies.ringbuf_submit(copy, 0);
	return hash;
}

/* The same, but for a stack that met code without a table, which is copied. */
static __always_inline u64 finish_or_copy(struct capture *capture)
{
	u64 stack = end_capture(capture), copy = 0;

	if (capture->walk.missing.depth)
		copy = send_copy(capture, stack);
	if (copy)
		return copy;
	store_stack(&capture->record, stack);
	return stack;
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
	note_missing_table(walk);
	walk->hash = walk_frame_pointers(&capture->record, &regs, depth, walk->hash);
	walk->depth = capture->record.user_depth;
	walk->end = capture->record.end;
}

#endif
