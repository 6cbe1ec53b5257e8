/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Calls of device APIs: launches, synchronisation, copies, memory; and what names kernels.
 *
 * Attach: uprobes at the entry of the functions, or a few instructions behind it where that is
 * cheaper and all arguments are still in place; a return probe for functions that make a kernel's
 * handle. The attach cookie is the place's number in `api_probes`.
 * Needs: bpf_get_attach_cookie (v5.15) and what walk.h needs.
 * Loses: what its counters say. Where arguments cannot be read the call counts without them.
 *
 * Uprobe programs may be interrupted by a tick or a switch and by other threads' uprobes, so that
 * nothing per CPU can hold a walk: each calling thread has memory of its own, from its first call
 * to its end.
 */
#include "callers.h"

#ifndef CALLS_MAX
#define CALLS_MAX 16384
#endif

/* Of the same kernel version as bpf_task_pt_regs: where one is missing, nothing can be attached. */
#if HAVE_TASK_PT_REGS
static u64 (*attach_cookie)(void *ctx) = (void *)174; /* bpf_get_attach_cookie, v5.15 */
#else
#define attach_cookie(ctx) 0
#endif

/* The least recently used go where there are more: then a handle is all that is known. */
#define KERNEL_NAMES_MAX 16384
/* Words of a name that its id is made of: longer ones differ in their beginning or in length. */
#define NAME_ID_WORDS 64

BPF_TABLE("lru_hash", struct kernel_name_key, u64, kernel_names, WITH_CALLS ? KERNEL_NAMES_MAX : 1);
BPF_ARRAY(api_calls, struct api_call, API_CALLS_MAX);
BPF_ARRAY(api_probes, struct api_probe, WITH_CALLS ? API_PROBES_MAX : 1);
/* What a thread's memory begins as: it is too large for a program's stack. */
BPF_ARRAY(new_caller, struct caller, 1);
BPF_TABLE("hash", struct call_key, struct call_value, calls0, CALLS_MAX);
BPF_TABLE("hash", struct call_key, struct call_value, calls1, CALLS_MAX);
BPF_PERCPU_ARRAY(call_budgets, struct wait_budget, 1);
/* Slot 0: walk_call, which goes on with a walk; slot 1: walk_call_python. */
BPF_PROG_ARRAY(call_walkers, 2);

static __always_inline struct caller *caller_of(u32 tid)
{
	struct caller *caller = callers.lookup(&tid);
	u32 zero = 0;

	if (caller)
		return caller;
	caller = new_caller.lookup(&zero);
	if (caller)
		callers.insert(&tid, caller);
	caller = callers.lookup(&tid);
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
	u64 value = 0, at = number;

	if (number >= REGISTER_ARGUMENTS) {
		/* The first one on the stack lies above the return address. */
		at = caller->entry_stack_pointer + 8 + (u64)(number - REGISTER_ARGUMENTS) * 8;
		if (bpf_probe_read_user(&value, sizeof(value), (void *)at))
			count(LOST_CALL_ARGUMENTS);
		return value;
	}
	/* In assembly: the compiler knows the bound and would leave it out, verifiers do not. */
	asm volatile("%0 &= %1" : "+r"(at) : "i"(REGISTER_SLOTS - 1));
	return caller->arguments[at];
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
			count(LOST_CALL_ARGUMENTS);
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
	/* One by one: there is no place for constants that an initialiser would be copied from. */
	global[0] = local[0] = 1;
	global[1] = local[1] = 1;
	global[2] = local[2] = 1;
	/* In assembly: the compiler knows the bound and would leave it out, verifiers do not. */
	asm volatile("%0 &= 31" : "+r"(size));
	if (bpf_probe_read_user(global, size, (void *)caller->arguments[4]) ||
	    (local_at && bpf_probe_read_user(local, size, (void *)local_at))) {
		count(LOST_CALL_ARGUMENTS);
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
		count(LOST_CALL_ARGUMENTS);
		return;
	}
	caller->work = times(times(call->grid[0], call->grid[1]), call->grid[2]);
	caller->work = times(times(caller->work, call->block[0]), call->block[1]);
	caller->work = times(caller->work, call->block[2]);
}

/*
 * Whether a call is made by another one of its API that was counted, which is still there if its
 * return address is. That alone is no proof: what a call that has returned left on the stack may lie
 * unwritten in a later frame. So the caller must be the outer function, or in its library.
 *
 * A function that is called in the same place of the stack is one that the outer function has jumped
 * to, or the next call of a caller like libffi, which calls all from one instruction: only one that
 * does the same is taken for the first. And one place may be probed twice, through two mounts of one
 * file: then the probes take turns.
 */
static __always_inline bool is_nested(struct outer_call *outer, struct api_call *api,
				      struct outer_call *now)
{
	struct api_call *last;
	u64 word = 0;

	if (!outer->stack_pointer || now->stack_pointer > outer->stack_pointer ||
	    bpf_probe_read_user(&word, sizeof(word), (void *)outer->stack_pointer) ||
	    word != outer->return_address)
		return false;
	if (now->stack_pointer < outer->stack_pointer)
		return now->return_address >= outer->code_start &&
		       now->return_address < outer->code_end;
	if (now->call == outer->call)
		return now->probe != outer->probe &&
		       now->instruction_pointer == outer->instruction_pointer;
	last = api_calls.lookup((int *)&outer->call);
	return last && last->operation == api->operation;
}

/* Fills in what is_nested asks of the call that begins now. */
static __always_inline void begin_call(struct outer_call *now, struct caller *caller,
				       struct api_probe *probe, struct pt_regs *ctx, u32 number)
{
	now->stack_pointer = caller->entry_stack_pointer;
	now->return_address = 0;
	if (bpf_probe_read_user(&now->return_address, 8, (void *)caller->entry_stack_pointer))
		now->stack_pointer = 0;
	now->instruction_pointer = ctx->ip;
	now->code_start = ctx->ip - probe->before_bytes;
	now->code_end = ctx->ip + probe->after_bytes;
	now->call = probe->call;
	now->probe = number;
}

static __always_inline bool may_send_call(u64 now_ns, u64 most)
{
	u32 zero = 0;
	struct wait_budget *budget = call_budgets.lookup(&zero);

	if (!budget)
		return false;
	if (now_ns - budget->window_ns >= NS_PER_S) {
		budget->window_ns = now_ns;
		budget->sent = 0;
	}
	budget->sent += 1;
	return budget->sent <= most;
}

static __always_inline void add_call(struct caller *caller)
{
	struct call_event *call = &caller->call;
	struct call_key key = {};
	struct call_value first = { .count = 1 };
	struct call_value *value;

	key.stack = call->stack;
	key.image = call->image;
	key.kernel = call->kernel;
	key.tgid = call->tgid;
	key.tid = call->tid;
	key.call = call->call;
	key.kind = call->kind;
	first.work = caller->work;
	first.bytes = call->bytes;
	if (setting(SETTING_EPOCH))
		value = calls1.lookup(&key);
	else
		value = calls0.lookup(&key);
	if (value) {
		__sync_fetch_and_add(&value->count, 1);
		__sync_fetch_and_add(&value->work, first.work);
		__sync_fetch_and_add(&value->bytes, first.bytes);
		return;
	}
	if (setting(SETTING_EPOCH) ? calls1.insert(&key, &first) : calls0.insert(&key, &first))
		count(LOST_CALLS_FULL);
	else
		count_stored(COUNTER_CALLS_STORED, SETTING_CALLS_DRAIN);
}

static __always_inline void finish_call(struct caller *caller)
{
	u64 most;

	caller->call.stack = finish_capture(&caller->capture);
	add_call(caller);
	most = setting(SETTING_CALL_EVENTS);
	if (!most)
		return;
	if (may_send_call(caller->call.ns, most))
		send(&caller->call, sizeof(caller->call), 0);
	else
		count(LOST_CALL_EVENTS);
}

/* Tail-called with a capture in the thread's memory. */
int walk_call(struct pt_regs *ctx)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct caller *caller = callers.lookup(&tid);

	if (!caller)
		return 0;
	if (!walk_some(&caller->capture))
		call_walkers.call(ctx, 0);
	if (begin_python_of(&caller->capture))
		call_walkers.call(ctx, 1);
	finish_call(caller);
	return 0;
}

/* Likewise, for its Python frames. */
int walk_call_python(struct pt_regs *ctx)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct caller *caller = callers.lookup(&tid);

	if (!caller)
		return 0;
	if (!walk_python_of(&caller->capture))
		call_walkers.call(ctx, 1);
	finish_call(caller);
	return 0;
}

/* Puts the id of its name in the place of a kernel's handle, where it was told. */
static __always_inline void name_kernel(struct call_event *call)
{
	struct kernel_name_key key = { .image = call->image, .tgid = call->tgid };
	u64 *name_id;

	key.handle = call->kernel;
	name_id = call->kernel ? kernel_names.lookup(&key) : NULL;
	if (name_id) {
		call->kernel = *name_id;
		call->kind |= CALL_KERNEL_IS_NAMED;
	}
}

/* The first step of a walk needs no table: where a call returns to is known at its entry. */
static __always_inline void step_to_caller(struct caller *caller)
{
	struct walk *walk = &caller->capture.walk;

	if (walk->depth != 1 || !caller->outer_stack_pointer)
		return;
	walk->instruction_pointer = caller->outer_return_address;
	walk->stack_pointer = caller->entry_stack_pointer + 8;
	walk->is_exact = 0;
	walk->depth = 2;
	caller->capture.record.user[1] = caller->outer_return_address;
	walk->hash = hash_step(walk->hash, caller->outer_return_address);
}

int on_call(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid(), api_number;
	u32 tgid = id >> 32, tid = (u32)id, slot, number;
	struct process_state *process = current_target(tgid);
	struct user_regs regs = {};
	struct outer_call now = {};
	struct api_probe *probe;
	struct api_call *api;
	struct caller *caller;

	if (!process || !setting(SETTING_START_NS))
		return 0;
	number = attach_cookie(ctx);
	probe = api_probes.lookup((int *)&number);
	if (!probe)
		return 0;
	slot = probe->call;
	api = api_calls.lookup((int *)&slot);
	caller = caller_of(tid);
	if (!api || !caller)
		return 0;
	keep_arguments(caller, ctx, probe->stack_bytes);
	begin_call(&now, caller, probe, ctx, number);
	api_number = api->api;
	/* In assembly: a bound that verifiers see. */
	asm volatile("%0 &= %1" : "+r"(api_number) : "i"(APIS_MAX - 1));
	if (is_nested(&caller->outers[api_number], api, &now))
		return 0;
	count(COUNTER_CALLS);
	announce(process, tgid);
	caller->outers[api_number] = now;
	caller->outer_call = slot;
	caller->outer_stack_pointer = now.stack_pointer;
	caller->outer_return_address = now.return_address;
	__builtin_memset(&caller->call, 0, sizeof(caller->call));
	caller->work = 0;
	caller->call.type = EVENT_CALL;
	caller->call.tgid = tgid;
	caller->call.tid = tid;
	caller->call.call = slot;
	caller->call.image = process->image;
	caller->call.ns = bpf_ktime_get_ns();
	caller->call.kernel = value_of(caller, &api->kernel);
	caller->call.queue = value_of(caller, &api->queue);
	caller->call.bytes = capped(value_of(caller, &api->bytes));
	caller->call.kind = value_of(caller, &api->kind);
	name_kernel(&caller->call);
	read_grid(caller, api->grid);
	user_regs_from(&regs, ctx);
	begin_capture_in(&caller->capture, ctx, &regs, false, id, process->image);
	step_to_caller(caller);
	if (caller->capture.walk.depth && mappings_of(&caller->capture.walk))
		call_walkers.call(ctx, 0);
	if (caller->capture.walk.depth == 2)
		walk_without_tables(&caller->capture, 2);
	else
		walk_without_tables(&caller->capture, 1);
	finish_call(caller);
	return 0;
}

/* An id that is the same for the same name; the name lies in zeroes. */
static __always_inline u64 name_id_of(struct kernel_named_event *named)
{
	u64 *words = (u64 *)named->name;
	u64 hash = named->name_bytes;
	u32 i;

#pragma clang loop unroll(disable)
	for (i = 0; i < NAME_ID_WORDS; i++) {
		if (i * 8 >= named->name_bytes)
			break;
		hash = hash_step(hash, words[i]);
	}
	return hash;
}

static __always_inline bool send_named(struct kernel_named_event *named, u64 bytes)
{
	/* In assembly: a bound that verifiers see. */
	asm volatile("%0 &= %1" : "+r"(bytes) : "i"(0x7ff));
	if (bytes > sizeof(*named))
		bytes = sizeof(*named);
	if (!ring.ringbuf_output(named, bytes, 0))
		return true;
	count(LOST_KERNEL_NAMES);
	return false;
}

/* Ties a handle to its name; sends the name if the process had none such before. */
static __always_inline void note_name(struct kernel_named_event *named)
{
	struct kernel_name_key key = { .image = named->image, .tgid = named->tgid };
	u64 head = sizeof(*named) - sizeof(named->name);
	u64 *known = NULL;
	long bytes;

	named->name_bytes = 0;
	if (!named->name_address) {
		key.handle = named->alias;
		known = kernel_names.lookup(&key);
		key.handle = named->handle;
		named->name_id = 0;
		if (!known) {
			kernel_names.delete(&key);
			send_named(named, head);
			return;
		}
		named->name_id = *known;
		kernel_names.update(&key, &named->name_id);
		return;
	}
	__builtin_memset(named->name, 0, NAME_ID_WORDS * 8);
	bytes = bpf_probe_read_user_str(named->name, sizeof(named->name),
					(void *)named->name_address);
	if (bytes <= 0) {
		/* A page that was not touched yet: the host half can read it, which may sleep. */
		key.handle = named->handle;
		kernel_names.delete(&key);
		send_named(named, head);
		return;
	}
	named->name_bytes = bytes;
	named->name_id = name_id_of(named);
	key.handle = named->handle;
	kernel_names.update(&key, &named->name_id);
	key.handle = named->name_id;
	if (kernel_names.lookup(&key))
		return;
	kernel_names.update(&key, &named->name_id);
	if (send_named(named, head + named->name_bytes))
		return;
	/* An id that nobody knows the name of is worse than the handle, which may still lead to it. */
	kernel_names.delete(&key);
	key.handle = named->handle;
	kernel_names.delete(&key);
}

/* At the entry of a function that ties a name to a kernel's handle. */
int on_naming(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = (u32)id, slot, number;
	struct process_state *process = current_target(tgid);
	struct kernel_named_event *named;
	struct api_probe *probe;
	struct api_call *api;
	struct caller *caller;

	if (!process)
		return 0;
	number = attach_cookie(ctx);
	probe = api_probes.lookup((int *)&number);
	if (!probe)
		return 0;
	slot = probe->call;
	api = api_calls.lookup((int *)&slot);
	caller = caller_of(tid);
	if (!api || !caller)
		return 0;
	keep_arguments(caller, ctx, probe->stack_bytes);
	named = &caller->named;
	named->type = EVENT_KERNEL_NAMED;
	named->tgid = tgid;
	named->image = process->image;
	named->call = slot;
	named->handle = 0;
	named->name_address = value_of(caller, &api->name);
	named->alias = value_of(caller, &api->alias);
	caller->handle_at = value_of(caller, &api->kernel);
	if (api->handle_from != HANDLE_ARGUMENT)
		return 0;
	named->handle = caller->handle_at;
	note_name(named);
	return 0;
}

/* At its return, where the handle is known only then. */
int on_named(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = (u32)id, slot;
	struct caller *caller = callers.lookup(&tid);
	struct kernel_named_event *named;
	struct api_call *api;

	if (!caller || !caller->named.type)
		return 0;
	named = &caller->named;
	slot = named->call;
	api = api_calls.lookup((int *)&slot);
	if (!api || named->tgid != tgid)
		return 0;
	if (api->handle_from == HANDLE_RETURNED)
		named->handle = ctx->ax;
	else if (bpf_probe_read_user(&named->handle, 8, (void *)caller->handle_at))
		named->handle = 0;
	if (named->handle)
		note_name(named);
	named->type = 0;
	return 0;
}
