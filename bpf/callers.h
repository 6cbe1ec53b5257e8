/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Threads that call device APIs: what calls.bpf.c keeps of each, and whether a thread is inside of
 * such a call, which the other programs note with its stack. A call that jumps on to its
 * implementation leaves no frame of its own.
 */
#ifndef AIFLAME_CALLERS_H
#define AIFLAME_CALLERS_H

#include "capture.h"

/* Arguments that are in registers (System V psABI for x86-64, 3.2.3); an eighth keeps masks whole. */
#define REGISTER_ARGUMENTS 6
#define REGISTER_SLOTS 8

/* The last call of an API that was counted: one inside it is not. */
struct outer_call {
	u64 stack_pointer; /* where the return address is; 0: none */
	u64 return_address;
	u64 instruction_pointer; /* of the probe */
	u64 code_start; /* who calls from here on, to code_end, was called by it */
	u64 code_end;
	u32 call;
	u32 probe;
};

/* Calls that name kernels inside of each other: the runtime's, the driver's, and two more. */
#define NAMINGS_MAX 4 /* a power of two */

/* A call that names a kernel, from its entry to its return. */
struct naming {
	u64 stack_pointer; /* where the return address is */
	u64 image;
	u64 handle_at;
	u64 name_address;
	u64 alias;
	u64 call; /* slot in `api_calls` */
};

/* A wait that has begun: it is over when its thread makes its next call. */
struct queue_wait {
	u64 queue;
	u64 from_ns; /* what was on the queue then will have ended; 0: no wait */
};

/* A launch whose event a thread may wait for. */
struct launch_event {
	u64 queue;
	u64 ns;
	u64 event_at; /* where its event is, once the launch has returned; 0: it was read */
	u64 event;
};

/* Of a thread; a power of two. */
#define LAUNCH_EVENTS_MAX 4

struct caller {
	struct capture capture;
	struct queue_wait wait;
	struct launch_event launches[LAUNCH_EVENTS_MAX]; /* the last ones */
	u64 launch_count;
	/* The call in work. */
	u64 is_launch;
	u64 has_order; /* its process's launches have one */
	u64 queue; /* DEFAULT_QUEUE for that which has no handle */
	u64 launch_id; /* 0: it has none */
	/* The call in work. */
	struct call_event call;
	u64 work;
	u64 arguments[REGISTER_SLOTS];
	u64 entry_stack_pointer; /* where the return address is */
	struct outer_call outers[APIS_MAX];
	u64 last_api; /* whose call was counted last */
	struct naming namings[NAMINGS_MAX]; /* the outermost first */
	u64 open_namings; /* how many have not returned */
	struct kernel_named_event named; /* what is sent */
};

BPF_TABLE("hash", u32, struct caller, callers, SIZED_BY_HOST);

static __always_inline void forget_caller(u32 tid)
{
	if (host(WITH_CALLS))
		callers.delete(KEY(tid));
}

/* Whether a counted call has not returned: its return address is there. */
static __always_inline bool is_inside(struct outer_call *outer, u64 stack_pointer)
{
	u64 word = 0;

	if (!outer->stack_pointer || stack_pointer > outer->stack_pointer ||
	    bpf_probe_read_user(&word, sizeof(word), (void *)outer->stack_pointer))
		return false;
	return word == outer->return_address;
}

/* Notes with a stack the call that the current thread is inside of, if it is the last it made. */
static __always_inline void note_call(struct capture *capture)
{
	u32 tid = capture->walk.tid;
	struct outer_call *outer;
	struct caller *caller;

	if (!host(WITH_CALLS) || !capture->walk.depth)
		return;
	caller = callers.lookup(KEY(tid));
	if (!caller)
		return;
	outer = &AT(caller->outers, caller->last_api);
	if (!is_inside(outer, capture->walk.stack_pointer))
		return;
	capture->record.call = outer->call;
	capture->record.call_return = outer->return_address;
}

#endif
