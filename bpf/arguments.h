/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * What a probe on a function of a device API begins with: which function it is, the thread's memory,
 * and the function's arguments, read as the tables of gpu/apis describe them.
 *
 * Needs: bpf_get_attach_cookie (v5.15).
 * Loses: arguments that cannot be read (LOST_CALL_ARGUMENTS_UNREADABLE), threads without memory
 * (LOST_CALLERS_FULL).
 */
#ifndef AIFLAME_ARGUMENTS_H
#define AIFLAME_ARGUMENTS_H

#include "callers.h"

static u64 (*attach_cookie)(void *ctx) = (void *)174; /* bpf_get_attach_cookie, v5.15 */

BPF_ARRAY(api_calls, struct api_call, API_CALLS_MAX);
BPF_ARRAY(api_probes, struct api_probe, SIZED_BY_HOST);
/* What a thread's memory begins as: it is too large for a program's stack. */
BPF_ARRAY(new_caller, struct caller, 1);

static __always_inline struct caller *caller_of(u32 tid)
{
	struct caller *caller = callers.lookup(KEY(tid));

	if (caller)
		return caller;
	caller = new_caller.lookup(KEY(0));
	if (caller)
		callers.insert(&tid, caller);
	caller = callers.lookup(KEY(tid));
	if (!caller)
		count(LOST_CALLERS_FULL);
	return caller;
}

static __always_inline void keep_arguments(struct caller *caller, struct pt_regs *ctx, u64 pushed)
{
	caller->arguments[0] = ctx->di;
	caller->arguments[1] = ctx->si;
	caller->arguments[2] = ctx->dx;
	caller->arguments[3] = ctx->cx;
	caller->arguments[4] = ctx->r8;
	caller->arguments[5] = ctx->r9;
	caller->entry_stack_pointer = ctx->sp + pushed;
}

static __always_inline u64 argument(struct caller *caller, u32 number)
{
	u64 value = 0, at;

	if (number >= REGISTER_ARGUMENTS) {
		/* The first one on the stack lies above the return address. */
		at = caller->entry_stack_pointer + 8 + (u64)(number - REGISTER_ARGUMENTS) * 8;
		if (bpf_probe_read_user(&value, sizeof(value), (void *)at))
			count(LOST_CALL_ARGUMENTS_UNREADABLE);
		return value;
	}
	return AT(caller->arguments, number);
}

static __always_inline u64 value_of(struct caller *caller, struct api_argument *where)
{
	u64 value, pointed = 0;
	long failed;

	if (!where->is_used)
		return 0;
	value = argument(caller, where->number);
	if (where->is_pointer) {
		if (where->size_bytes == 4)
			failed = bpf_probe_read_user(&pointed, 4, (void *)(value + where->offset));
		else
			failed = bpf_probe_read_user(&pointed, 8, (void *)(value + where->offset));
		if (failed)
			count(LOST_CALL_ARGUMENTS_UNREADABLE);
		return pointed;
	}
	return where->size_bytes == 4 ? (u32)value : value;
}

/* The product of two sizes that are at most CALL_SIZE_MAX, no more than that. */
static __always_inline u64 times(u64 one, u64 other)
{
	if (!one || !other)
		return 0;
	return one > CALL_SIZE_MAX / other ? CALL_SIZE_MAX : one * other;
}

static __always_inline u64 capped(u64 size)
{
	return size > CALL_SIZE_MAX ? CALL_SIZE_MAX : size;
}

static __always_inline u32 limited(u64 size)
{
	return size > 0xffffffff ? 0xffffffff : size;
}

/* Global sizes of 1 to 3 dimensions, and local ones, NULL where the runtime is to choose. */
static __always_inline void read_opencl_grid(struct caller *caller)
{
	struct call_event *call = &caller->call;
	u32 dimensions = (u32)caller->arguments[2];
	u64 global[3], local[3];
	u64 local_at = caller->arguments[5];
	u64 size = (u64)dimensions * 8;

	if (dimensions < 1 || dimensions > 3)
		return;
	/* One by one: there is no section for constants that an initialiser would be copied from. */
	global[0] = local[0] = 1;
	global[1] = local[1] = 1;
	global[2] = local[2] = 1;
	/* In assembly: the compiler knows the bound and would leave it out, verifiers do not. */
	asm volatile("%0 &= 31" : "+r"(size));
	if (bpf_probe_read_user(global, size, (void *)caller->arguments[4]) ||
	    (local_at && bpf_probe_read_user(local, size, (void *)local_at))) {
		count(LOST_CALL_ARGUMENTS_UNREADABLE);
		return;
	}
	call->grid[0] = limited(global[0]);
	call->grid[1] = limited(global[1]);
	call->grid[2] = limited(global[2]);
	if (local_at) {
		call->block[0] = limited(local[0]);
		call->block[1] = limited(local[1]);
		call->block[2] = limited(local[2]);
	}
	caller->work = times(times(capped(global[0]), capped(global[1])), capped(global[2]));
}

static __always_inline void read_grid(struct caller *caller, u32 kind)
{
	struct call_event *call = &caller->call;
	u64 failed = 0;
	u32 *six = call->grid; /* block follows grid */

	if (kind == GRID_OPENCL) {
		read_opencl_grid(caller);
		return;
	}
	if (kind == GRID_DIM3) {
		call->grid[0] = (u32)caller->arguments[1];
		call->grid[1] = caller->arguments[1] >> 32;
		call->grid[2] = (u32)caller->arguments[2];
		call->block[0] = (u32)caller->arguments[3];
		call->block[1] = caller->arguments[3] >> 32;
		call->block[2] = (u32)caller->arguments[4];
	} else if (kind == GRID_NUMBERS) {
		call->grid[0] = (u32)caller->arguments[1];
		call->grid[1] = (u32)caller->arguments[2];
		call->grid[2] = (u32)caller->arguments[3];
		call->block[0] = (u32)caller->arguments[4];
		call->block[1] = (u32)caller->arguments[5];
		call->block[2] = (u32)argument(caller, 6);
	} else if (kind == GRID_CONFIG) {
		failed = bpf_probe_read_user(six, 24, (void *)caller->arguments[0]);
	} else if (kind == GRID_COUNTS) {
		failed = bpf_probe_read_user(six, 12, (void *)caller->arguments[2]);
		call->block[0] = call->block[1] = call->block[2] = 1;
	} else {
		return;
	}
	if (failed) {
		count(LOST_CALL_ARGUMENTS_UNREADABLE);
		return;
	}
	caller->work = times(times(call->grid[0], call->grid[1]), call->grid[2]);
	caller->work = times(times(caller->work, call->block[0]), call->block[1]);
	caller->work = times(caller->work, call->block[2]);
}

/* What a probe that fired belongs to. */
struct fired {
	struct api_probe *probe;
	struct api_call *api;
	struct caller *caller;
	u32 number; /* of the probe */
};

/* Finds which probe fired, and its function; false where something is missing. */
static __always_inline bool find_function(struct fired *fired, struct pt_regs *ctx)
{
	u32 slot;

	/* Where it is missing nothing can be attached. */
	if (!host(HAS_ATTACH_COOKIE))
		return false;
	fired->number = attach_cookie(ctx);
	fired->probe = api_probes.lookup((int *)&fired->number);
	if (!fired->probe)
		return false;
	slot = fired->probe->call;
	fired->api = api_calls.lookup((int *)&slot);
	return fired->api != NULL;
}

/* Finds that of the current thread as well, and keeps the arguments. */
static __always_inline bool find_fired(struct fired *fired, struct pt_regs *ctx, u32 tid)
{
	if (!find_function(fired, ctx))
		return false;
	fired->caller = caller_of(tid);
	if (!fired->caller)
		return false;
	keep_arguments(fired->caller, ctx, fired->probe->stack_bytes);
	return true;
}

#endif
