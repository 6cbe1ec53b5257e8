/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The walk along a thread's Python frames, in the same invocation as the native walk, for threads
 * whose native stack has a frame of CPython's eval loop. All that a version decides is data in
 * `pythons`, which the host half fills (agent/python/layouts.py); agent/python/walk.py is the same
 * walk in Python, step by step. Change both together.
 *
 * The thread state is read where the thread keeps it for itself, under a pthread key, so that
 * threads that gave up the GIL show their frames as well. Needs: what walk.h needs.
 *
 * Loses: frames past MAX_FRAMES and chains that cannot be read (enum python_end, stored with the
 * chain), chains that find no room (LOST_PYTHON_STORE_FULL). The native stack stays in any case.
 */
#ifndef AIFLAME_PYTHON_H
#define AIFLAME_PYTHON_H

#include "aiflame.h"
#include "counters.h"
#include "task.h"
#include "walk.h"

/* Frames walked by one program before it calls itself again: what verifiers get through. */
#define PYTHON_STEPS_PER_CALL 24

/* Shims stand between frames, at most one for each. */
#define PYTHON_STEPS_MAX (2 * MAX_FRAMES)

/* User space of x86-64 with four-level page tables; agent/python/memory.py. */
#define LOWEST_ADDRESS 4096ull
#define MAX_ADDRESS ((1ull << 47) - 4096)

/* A position that lies nowhere in its code object. */
#define NO_POSITION (-2147483647 - 1)
#define MAX_CODE_BYTES (1ll << 30)

/* Frames of 3.11 and later take 72 to 80 bytes, PyFrameObject up to 108. */
#define SMALL_FRAME_BYTES 80
#define LARGE_FRAME_BYTES 112

BPF_TABLE("hash", u32, struct python_process, pythons, SIZED_BY_HOST);
BPF_TABLE("hash", u64, struct python_chain, python_chains, SIZED_BY_HOST);

/* Where a walk of Python frames stands; in per-CPU memory, beside the native one. */
struct python_walk {
	u64 frame; /* address of the next one */
	u64 marker; /* set at powers of two: met again inside any loop (Brent) */
	u64 caller_cframe; /* what the walk may begin again at; 0: nothing */
	u64 hash;
	u32 step;
	u32 depth;
	u32 run_is_open;
	u32 runs; /* that have ended */
	u32 calls; /* of the eval loop, in the native stack */
	u32 end; /* enum python_end */
	u64 words[16]; /* the frame as it was read */
};

static __always_inline bool is_in_eval_loop(struct walk *walk, u64 address)
{
	u32 i;

#pragma clang loop unroll(full)
	for (i = 0; i < PYTHON_EVAL_RANGES; i++)
		if (address - walk->eval_start[i] < walk->eval_bytes[i])
			return true;
	return false;
}

static __always_inline bool read_user_word(u64 address, u64 *out)
{
	return !bpf_probe_read_user(out, sizeof(*out), (void *)address);
}

static __always_inline bool is_sound(u64 address)
{
	return address >= LOWEST_ADDRESS && address < MAX_ADDRESS && !(address & 7);
}

/*
 * Whether the current thread, whose state this is, holds the GIL. The GIL's own fields may say so
 * of the thread that had it last, while another one takes it; the thread's flag is its own.
 */
static __always_inline u32 gil_of(struct python_process *python, u64 state)
{
	u64 holder = 0;
	u32 status = 0;

	if (python->gil_kind == PYTHON_GIL_RUNTIME) {
		if (!read_user_word(python->gil, &holder))
			return PYTHON_GIL_UNKNOWN;
		return holder == state ? PYTHON_GIL_HELD : PYTHON_GIL_NOT_HELD;
	}
	if (python->gil_kind != PYTHON_GIL_INTERPRETER ||
	    bpf_probe_read_user(&status, sizeof(status), (void *)(state + python->thread_status)))
		return PYTHON_GIL_UNKNOWN;
	return status & PYTHON_ACTIVE_FLAG ? PYTHON_GIL_HELD : PYTHON_GIL_NOT_HELD;
}

/* A _PyCFrame is a local variable of the eval loop: it is as far below the CFA in each of its calls. */
#define CFRAME_MAX_BYTES 4096
/* At the latest here the eval loop has filled its own: at 0xa6 in v3.12.1 as GCC 12 compiles it. */
#define EVAL_ENTRY_BYTES 192

/* The _PyCFrame of the call of the eval loop before the newest one, whose own is known; 0: none. */
static __always_inline u64 caller_cframe(struct walk *native, u64 newest)
{
	u64 below = native->eval_cfas[0] - newest;

	if (native->eval_frames < 2 || !native->eval_cfas[1] || below > CFRAME_MAX_BYTES)
		return 0;
	return native->eval_cfas[1] - below;
}

/* Finds the leaf frame of the current thread; false if there is nothing to walk. */
static __always_inline bool begin_python(struct python_process *python, struct walk *native,
					 struct python_walk *walk, struct stack_record *record)
{
	u64 thread_pointer = task_u64(current_task(), host(TASK_THREAD_POINTER));
	u64 state = 0, leaf = 0;
	bool is_entering;

	walk->depth = walk->step = walk->run_is_open = walk->runs = 0;
	walk->calls = native->eval_frames;
	walk->frame = walk->marker = walk->caller_cframe = 0;
	walk->end = PYTHON_UNREADABLE;
	record->gil = PYTHON_GIL_UNKNOWN;
	if (!read_user_word(thread_pointer + python->state_slot, &state))
		return false;
	if (!state) {
		walk->end = PYTHON_COMPLETE; /* a thread that Python knows nothing of */
		record->gil = PYTHON_GIL_NONE;
		return false;
	}
	record->gil = gil_of(python, state);
	if (!read_user_word(state + python->thread_frame, &leaf))
		return false;
	if (python->has_cframe && leaf) {
		walk->caller_cframe = caller_cframe(native, leaf);
		is_entering = AT(record->frames, record->kernel_depth) - python->eval_start[0] <
			      EVAL_ENTRY_BYTES;
		if (!read_user_word(leaf + python->cframe_frame, &leaf))
			return false;
		/* What an earlier call left there may even look sound. */
		if (walk->caller_cframe && is_entering)
			leaf = 0;
	}
	walk->frame = leaf;
	walk->end = PYTHON_TOO_DEEP;
	return true;
}

/* A word of the frame that was read; offsets of words are multiples of 8. */
static __always_inline u64 frame_word(struct python_walk *walk, u32 offset)
{
	return AT(walk->words, offset >> 3);
}

static __always_inline u32 frame_byte(struct python_walk *walk, u32 offset)
{
	return frame_word(walk, offset) >> ((offset & 7) * 8) & 0xff;
}

/* struct _PyCodeArray of free-threaded builds: how many copies of the instructions, then these. */
#define FIRST_COPY 8
#define COPY_BYTES 8

/* Where the instructions that a frame runs begin; 0 where that cannot be read. */
static __always_inline u64 instructions_of(struct python_process *python, struct python_walk *walk,
					   u64 code)
{
	u64 copies = 0, begin = 0;
	u32 index;

	if (!python->code_copies)
		return code + python->code_instructions;
	index = frame_word(walk, python->frame_copy) >> ((python->frame_copy & 7) * 8);
	if (!read_user_word(code + python->code_copies, &copies) || !is_sound(copies) ||
	    !read_user_word(copies + FIRST_COPY + COPY_BYTES * (u64)index, &begin))
		return 0;
	return is_sound(begin) ? begin : 0;
}

static __always_inline s32 position_of(struct python_process *python, struct python_walk *walk,
				       u64 code)
{
	s64 value = frame_word(walk, python->frame_position);
	u64 begin;

	if (python->position_kind == PYTHON_POSITION_POINTER) {
		begin = instructions_of(python, walk, code);
		if (!begin)
			return NO_POSITION;
		value -= begin;
	} else {
		value = (s32)value;
		if (python->position_kind == PYTHON_POSITION_UNITS && value >= 0)
			value *= 2;
	}
	return value >= -2 && value < MAX_CODE_BYTES ? value : NO_POSITION;
}

static __always_inline bool end_python(struct python_walk *walk, u32 end)
{
	walk->end = end;
	return true;
}

static __always_inline void begin_with_empty_run(struct python_walk *walk,
						 struct python_chain *chain)
{
	chain->codes[0] = PYTHON_ENDS_RUN;
	chain->positions[0] = NO_POSITION;
	walk->depth = walk->runs = 1;
}

/* What is left of other calls leads to an end within a few frames. */
#define STALE_FRAMES_MAX 4

/*
 * 3.11 and 3.12 link the _PyCFrame of a call of the eval loop before they fill it (v3.12.1
 * Python/ceval.c): for a few instructions it holds what an earlier call left, or anything. A walk
 * that fails soon, or is over before there is a run for each call but the newest, begins again at
 * the caller's, after a run without frames.
 */
static __always_inline bool begin_again(struct python_process *python, struct python_walk *walk,
					struct python_chain *chain)
{
	u64 cframe = walk->caller_cframe, frame = 0;

	walk->caller_cframe = 0;
	if (!cframe || walk->end == PYTHON_TOO_DEEP || walk->depth > STALE_FRAMES_MAX ||
	    (walk->end == PYTHON_COMPLETE && walk->runs + 1 >= walk->calls) ||
	    !read_user_word(cframe + python->cframe_frame, &frame) || !frame)
		return false;
	begin_with_empty_run(walk, chain);
	walk->run_is_open = walk->marker = 0;
	walk->frame = frame;
	walk->end = PYTHON_TOO_DEEP;
	return true;
}

/* What a shim means: the frame before it ends its run; a leaf run may be empty. */
static __always_inline void pass_shim(struct python_walk *walk, struct python_chain *chain)
{
	u64 last = walk->depth - 1;

	if (walk->run_is_open) {
		if (last < MAX_FRAMES)
			AT(chain->codes, last) |= PYTHON_ENDS_RUN;
		walk->run_is_open = 0;
		walk->runs += 1;
	} else if (!walk->depth) {
		begin_with_empty_run(walk, chain);
	}
}

/* Adds the frame that was read; true if the walk ends there. */
static __always_inline bool add_frame(struct python_process *python, struct python_walk *walk,
				      struct python_chain *chain)
{
	u64 code = frame_word(walk, python->frame_code) & ~(u64)python->code_tags;
	u64 depth = walk->depth;
	bool ends_run;

	if (!is_sound(code))
		return end_python(walk, PYTHON_BAD_POINTER);
	if (depth >= MAX_FRAMES)
		return true; /* walk->end is PYTHON_TOO_DEEP since the beginning */
	ends_run =
		python->run_end == PYTHON_RUN_EVERY_FRAME ||
		(python->run_end == PYTHON_RUN_ENTRY_BYTE && frame_byte(walk, python->frame_mark));
	AT(chain->codes, depth) = ends_run ? code | PYTHON_ENDS_RUN : code;
	AT(chain->positions, depth) = position_of(python, walk, code);
	walk->run_is_open = !ends_run;
	walk->runs += ends_run;
	walk->depth = depth + 1;
	return false;
}

/* One frame; returns whether the walk has ended. */
static __always_inline bool step_python(struct python_process *python, struct python_walk *walk,
					struct python_chain *chain)
{
	u64 frame = walk->frame;

	if (!frame)
		return end_python(walk, PYTHON_COMPLETE);
	if (frame == walk->marker)
		return end_python(walk, PYTHON_LOOP);
	if (walk->step >= PYTHON_STEPS_MAX)
		return true;
	if (!(walk->step & (walk->step - 1)))
		walk->marker = frame;
	walk->step += 1;
	if (!is_sound(frame))
		return end_python(walk, PYTHON_BAD_POINTER);
	if (python->frame_bytes <= SMALL_FRAME_BYTES) {
		if (bpf_probe_read_user(walk->words, SMALL_FRAME_BYTES, (void *)frame))
			return end_python(walk, PYTHON_UNREADABLE);
	} else if (bpf_probe_read_user(walk->words, LARGE_FRAME_BYTES, (void *)frame)) {
		return end_python(walk, PYTHON_UNREADABLE);
	}
	if (python->run_end == PYTHON_RUN_SHIM &&
	    frame_byte(walk, python->frame_mark) >= PYTHON_SHIM_OWNER)
		pass_shim(walk, chain);
	else if (add_frame(python, walk, chain))
		return true;
	walk->frame = frame_word(walk, python->frame_previous);
	return false;
}

/* Walks some frames; returns whether the walk has ended. */
static __always_inline bool walk_python_some(struct python_process *python,
					     struct python_walk *walk, struct python_chain *chain)
{
	u32 i;

#pragma clang loop unroll(disable)
	for (i = 0; i < PYTHON_STEPS_PER_CALL; i++)
		if (step_python(python, walk, chain) && !begin_again(python, walk, chain))
			return true;
	return false;
}

/* Stores the chain under its hash unless it is there already; returns the hash. */
static __always_inline u64 store_python(struct python_walk *walk, struct python_chain *chain,
					struct stack_record *record)
{
	u64 hash = hash_step(hash_step(0, record->image), record->tgid);
	u32 i;

#pragma clang loop unroll(disable)
	for (i = 0; i < MAX_FRAMES; i++) {
		OPAQUE(i);
		if (i >= walk->depth)
			break;
		hash = hash_step(hash, AT(chain->codes, i));
		hash = hash_step(hash, AT(chain->positions, i));
	}
	hash = hash_step(hash, walk->end | walk->depth << 8);
	if (python_chains.lookup(&hash))
		return hash;
	chain->image = record->image;
	chain->tgid = record->tgid;
	chain->depth = walk->depth;
	chain->end = walk->end;
	/* -EEXIST would mean that another CPU stored the same chain just now. */
	if (python_chains.insert(&hash, chain) && !python_chains.lookup(&hash)) {
		count(LOST_PYTHON_STORE_FULL);
		return 0;
	}
	return hash;
}

#endif
