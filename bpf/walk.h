/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * The one stack walker that every probe uses: kernel frames, then user frames.
 *
 * Needs: bpf_get_stack (v4.18), bpf_probe_read_user (v5.5). User registers come from the
 * interrupted context when it was in user mode, else from the pt_regs that the kernel saved at its
 * entry: bpf_task_pt_regs (v5.15), or the top of the kernel stack where that helper is missing.
 *
 * Loses: frames past MAX_FRAMES (STOP_TOO_DEEP) and MAX_KERNEL_FRAMES (kernel_cut), frames after an unreadable or
 * non-monotonic frame pointer (STOP_UNREADABLE, STOP_NO_FRAME_POINTER). The end is stored with the
 * stack, so that nothing is cut silently.
 *
 * Loops are bounded, not unrolled: BCC has neither subprograms nor bpf_loop.
 */
#ifndef AIFLAME_WALK_H
#define AIFLAME_WALK_H

#include "aiflame.h"
#include "arch.h"
#include "counters.h"
#include "host.h"

/* splitmix64's multiplier: odd, well mixed bits. */
#define HASH_MULTIPLIER 0xbf58476d1ce4e5b9ull

static __always_inline u64 hash_step(u64 hash, u64 word)
{
	hash = (hash ^ word) * HASH_MULTIPLIER;
	return hash ^ (hash >> 29);
}

/* Follows saved frame pointers from `regs` on, past `depth` user frames; sets the end. */
static __always_inline u64 walk_frame_pointers(struct stack_record *record, struct user_regs *regs,
					       u32 depth, u64 hash)
{
	struct frame_link link = {};
	u64 frame_pointer = regs->frame_pointer;
	u64 stack_pointer = regs->stack_pointer;
	u64 at;

	record->end = STOP_TOO_DEEP;
#pragma clang loop unroll(disable)
	for (; depth < MAX_FRAMES; depth++) {
		OPAQUE(depth);
		at = record->kernel_depth + depth;
		if (at >= MAX_FRAMES)
			break;
		if (!frame_pointer) {
			record->end = STOP_ROOTED;
			break;
		}
		/* The stack grows down: a caller's frame lies above. Anything else is no frame pointer. */
		if (frame_pointer < stack_pointer || (frame_pointer & 7)) {
			record->end = STOP_NO_FRAME_POINTER;
			break;
		}
		if (bpf_probe_read_user(&link, sizeof(link), (void *)frame_pointer)) {
			record->end = STOP_UNREADABLE;
			break;
		}
		if (!link.return_address) {
			record->end = STOP_ROOTED;
			break;
		}
		AT(record->frames, at) = link.return_address;
		hash = hash_step(hash, link.return_address);
		stack_pointer = frame_pointer + sizeof(link);
		frame_pointer = link.frame_pointer;
	}
	record->user_depth = depth;
	return hash;
}

static __always_inline u64 walk_kernel(void *ctx, struct stack_record *record, bool in_kernel,
				       u64 hash)
{
	/* Verifiers would follow the loop once for each range of the number that they know. */
	volatile u16 *frames_count = &record->kernel_depth;
	u32 depth, i;
	long bytes;

	record->kernel_depth = 0;
	record->kernel_cut = 0;
	if (!host(WITH_KERNEL_STACKS) || !in_kernel)
		return hash;
	bytes = bpf_get_stack(ctx, record->frames, MAX_KERNEL_FRAMES * sizeof(u64), 0);
	if (bytes < 0) {
		count(LOST_NO_KERNEL_STACK);
		return hash;
	}
	depth = (u32)bytes / sizeof(u64);
	if (depth > MAX_KERNEL_FRAMES)
		depth = MAX_KERNEL_FRAMES;
	if (depth >= host(KERNEL_FRAMES_MAX)) {
		count(LOST_KERNEL_FRAMES_CUT);
		record->kernel_cut = 1;
	}
	*frames_count = depth;
#pragma clang loop unroll(disable)
	for (i = 0; i < MAX_KERNEL_FRAMES; i++) {
		OPAQUE(i);
		if (i >= *frames_count)
			break;
		hash = hash_step(hash, AT(record->frames, i));
	}
	return hash;
}

#endif
