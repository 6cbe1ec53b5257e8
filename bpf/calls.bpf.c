/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * Calls of device APIs: launches, synchronisation, copies, memory; and what names kernels.
 *
 * Attach: uprobes at the entry of the functions, or a few instructions past it where that is
 * cheaper and all arguments are still in place; a return probe for functions that make a kernel's
 * handle. The attach cookie is the site's number in `api_probes`.
 * Needs: bpf_get_attach_cookie (v5.15) and what walk.h needs.
 * Loses: what its counters say. Where arguments cannot be read the call counts without them.
 *
 * Uprobe programs may be interrupted by a tick or a switch and by other threads' uprobes, so that
 * nothing per CPU can hold a walk: each calling thread has memory of its own, from its first call
 * to its end.
 */
#include "arguments.h"
#include "kernel_names.h"

/* Of one process in a second: what rings on is heard all the same, a second later. */
#define BELLS_MAX 4

BPF_TABLE("hash", struct call_key, struct call_value, calls0, SIZED_BY_HOST);
BPF_TABLE("hash", struct call_key, struct call_value, calls1, SIZED_BY_HOST);
/* Those that have not been used for long make way for others. */
BPF_TABLE("lru_hash", struct queue_key, struct queue_state, queues, SIZED_BY_HOST);
BPF_PERCPU_ARRAY(call_budgets, struct event_budget, 1);
/* How many runs there were in the window that began at a boundary. */
struct run_budget {
	u64 boundary_ns;
	u64 spent;
};
BPF_ARRAY(run_budget, struct run_budget, 1);
/* Slot 0: walk_call, which goes on with a walk; slot 1: walk_call_python. */
BPF_PROG_ARRAY(call_walkers, 2);

/*
 * Whether a call is made by another one of its API that was counted, which is still there if its
 * return address is. That alone is no proof: what a call that has returned left on the stack may lie
 * unwritten in a later frame. So the caller must be the outer function, or in its library.
 *
 * A function that is called at the same address of the stack is one that the outer function has jumped
 * to, or the next call of a caller like libffi, which calls all from one instruction: only one that
 * does the same is taken for the first. And one site may be probed twice, through two mounts of one
 * file: then the probes take turns.
 */
static __always_inline bool is_nested(struct outer_call *outer, struct api_call *api,
				      struct outer_call *now)
{
	struct api_call *last;

	if (!is_inside(outer, now->stack_pointer))
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
static __always_inline void begin_call(struct outer_call *now, struct fired *fired,
				       struct pt_regs *ctx)
{
	now->stack_pointer = fired->caller->entry_stack_pointer;
	now->return_address = 0;
	if (bpf_probe_read_user(&now->return_address, 8, (void *)now->stack_pointer))
		now->stack_pointer = 0;
	now->instruction_pointer = ctx->ip;
	now->code_start = ctx->ip - fired->probe->before_bytes;
	now->code_end = ctx->ip + fired->probe->after_bytes;
	now->call = fired->probe->call;
	now->probe = fired->number;
}

/* Returns what is known of a queue, made where nothing is; NULL where there is no room. */
static __always_inline struct queue_state *queue_of(struct call_event *call, u64 queue)
{
	struct queue_key key = { .image = call->image, .queue = queue, .tgid = call->tgid };
	struct queue_state *state = queues.lookup(&key);
	struct queue_state none = {};

	if (state)
		return state;
	queues.insert(&key, &none);
	return queues.lookup(&key);
}

/* A thread that makes a call has returned from the wait that it was in. */
static __always_inline void end_wait(struct caller *caller, struct call_event *call, u64 now_ns)
{
	struct queue_state *state;

	if (!caller->wait.from_ns)
		return;
	state = queue_of(call, caller->wait.queue);
	if (state && caller->wait.from_ns > state->waited_from_ns) {
		/* In this order: who reads in between finds an end that is too late, not too early. */
		state->waited_until_ns = now_ns;
		state->waited_from_ns = caller->wait.from_ns;
	}
	caller->wait.from_ns = 0;
}

/* Notes the launch, of those that a thread knows the event of, which it waits for by an event. */
static __always_inline void wait_for_event(struct caller *caller)
{
	u64 count = caller->arguments[0], list[LAUNCH_EVENTS_MAX], event, i, j, known;
	struct launch_event *launch;

	/* One by one: there is no section for constants that an initialiser would be copied from. */
	list[0] = list[1] = list[2] = list[3] = 0;
	if (count > LAUNCH_EVENTS_MAX)
		count = LAUNCH_EVENTS_MAX;
	count *= 8;
	/* In assembly: the compiler knows the bound and would leave it out, verifiers do not. */
	asm volatile("%0 &= 63" : "+r"(count));
	if (count > sizeof(list) || !count ||
	    bpf_probe_read_user(list, count, (void *)caller->arguments[1]))
		return;
#pragma clang loop unroll(full)
	for (i = 1; i <= LAUNCH_EVENTS_MAX; i++) {
		known = caller->launch_count - i;
		launch = &AT(caller->launches, known);
		event = launch->event;
		if (known >= caller->launch_count || !event)
			continue;
#pragma clang loop unroll(full)
		for (j = 0; j < LAUNCH_EVENTS_MAX; j++) {
			if (list[j] != event)
				continue;
			caller->wait.queue = launch->queue;
			caller->wait.from_ns = launch->ns;
			return;
		}
	}
}

/* Notes what the call that begins will have waited for when it returns. */
static __always_inline void begin_wait(struct caller *caller, struct api_call *api)
{
	u32 waits_for = api->waits_for;

	if (waits_for == WAITS_FOR_NOTHING)
		return;
	if (api->blocking.is_used && !value_of(caller, &api->blocking))
		return;
	if (waits_for == WAITS_FOR_EVENTS) {
		wait_for_event(caller);
		return;
	}
	caller->wait.queue = waits_for == WAITS_FOR_QUEUE ? caller->queue : ALL_QUEUES;
	caller->wait.from_ns = caller->call.ns;
}

/*
 * Reads the event of the thread's last launch, at its next call: that may be the last time that it is
 * where the launch has put it.
 */
static __always_inline void read_event(struct caller *caller)
{
	u64 last = caller->launch_count - 1;
	struct launch_event *launch = &AT(caller->launches, last);

	if (!caller->launch_count || !launch->event_at)
		return;
	if (bpf_probe_read_user(&launch->event, 8, (void *)launch->event_at))
		launch->event = 0;
	launch->event_at = 0;
}

/* Keeps where the event of a launch will be. */
static __always_inline void note_event(struct caller *caller, struct api_call *api)
{
	struct launch_event *launch = &AT(caller->launches, caller->launch_count);

	if (!api->event.is_used)
		return;
	launch->queue = caller->queue;
	launch->ns = caller->call.ns;
	launch->event_at = argument(caller, api->event.number);
	launch->event = 0;
	caller->launch_count += 1;
}

/*
 * Whether the window that is open has room for another run. From a window to the next it has all of it
 * again, so that launches without a run are the last ones of theirs.
 */
static __always_inline bool spend_run(u64 most)
{
	u64 boundary_ns = boundary_at(bpf_ktime_get_ns());
	struct run_budget *budget = run_budget.lookup(KEY(0));

	if (!budget)
		return false;
	if (boundary_ns > budget->boundary_ns) {
		budget->boundary_ns = boundary_ns;
		budget->spent = 0;
	}
	__sync_fetch_and_add(&budget->spent, 1);
	return budget->spent <= most;
}

/* Finds the run that a launch is of, and what had ended on its queue before. */
static __always_inline void note_launch(struct call_key *key, struct call_value *value,
					struct call_event *call, u64 most_runs)
{
	struct queue_key all_key = { .image = call->image,
				     .queue = ALL_QUEUES,
				     .tgid = call->tgid };
	struct queue_state *state = queue_of(call, key->queue), *all = queues.lookup(&all_key);
	u64 hash = hash_step(hash_step(key->stack, key->kernel), (u64)key->tid << 32 | key->call);

	value->first_ns = value->last_ns = call->ns;
	if (!state)
		return;
	if (all && all->waited_from_ns > state->waited_from_ns) {
		state->waited_until_ns = all->waited_until_ns;
		state->waited_from_ns = all->waited_from_ns;
	}
	if (!state->run || state->run_hash != hash || state->waited_until_ns > state->run) {
		state->run_hash = hash;
		state->run = call->ns;
		if (!spend_run(most_runs)) {
			state->run = 0;
			count(LOST_LAUNCHES_NOT_TIMED);
		}
	}
	key->run = state->run;
	value->waited_from_ns = state->waited_from_ns;
	value->waited_until_ns = state->waited_until_ns;
}

/* Tells a launch that has a number apart from all others: its number tells what is on its queue. */
static __always_inline void number_launch(struct call_key *key, struct call_value *value,
					  struct caller *caller, u64 run)
{
	if (!spend_run(setting(SETTING_LAUNCH_RUNS))) {
		count(LOST_LAUNCHES_NOT_TIMED);
		return;
	}
	value->launch_id = caller->launch_id;
	value->first_ns = value->last_ns = caller->call.ns;
	key->run = run;
}

static __always_inline void fill_key(struct call_key *key, struct caller *caller)
{
	struct call_event *call = &caller->call;

	key->stack = call->stack;
	key->image = call->image;
	key->kernel = call->kernel;
	key->tgid = call->tgid;
	key->tid = call->tid;
	key->call = call->call;
	key->kind = call->kind;
}

static __always_inline void add_to_sums(struct call_key *key, struct call_value *first)
{
	bool is_second = writes_second(boundary_at(bpf_ktime_get_ns()));
	struct call_value *value;

	if (is_second)
		value = calls1.lookup(key);
	else
		value = calls0.lookup(key);
	if (value) {
		__sync_fetch_and_add(&value->count, first->count);
		__sync_fetch_and_add(&value->work, first->work);
		__sync_fetch_and_add(&value->bytes, first->bytes);
		value->last_ns = first->last_ns;
		return;
	}
	if (is_second ? calls1.insert(key, first) : calls0.insert(key, first))
		count(LOST_CALLS_FULL);
	else if (!key->run) /* the others are bounded by their budget, to half of the map */
		count_stored(COUNTER_CALLS_STORED, SETTING_CALLS_DRAIN);
}

static __always_inline void add_call(struct caller *caller)
{
	struct call_value first = { .count = 1 };
	struct call_key key = {};

	fill_key(&key, caller);
	first.work = caller->work;
	first.bytes = caller->call.bytes;
	if (caller->is_launch && (caller->has_order || caller->launch_id)) {
		key.queue = caller->queue;
		if (caller->launch_id)
			number_launch(&key, &first, caller, caller->call.ns);
		else
			note_launch(&key, &first, &caller->call, setting(SETTING_LAUNCH_RUNS));
	}
	add_to_sums(&key, &first);
}

/*
 * Whether a call that tells a number is inside of a launch that was counted without: then it is that
 * one's, and no launch of its own. A launch has one number, so that what a call that has returned left
 * on the stack is not taken for it again.
 */
static __always_inline bool numbers_outer(struct caller *caller, struct api_call *api,
					  struct outer_call *outer, struct outer_call *now,
					  u64 now_ns)
{
	struct call_value first = {};
	struct call_key key = {};

	if (!api->launch_id.is_used || !caller->is_launch || caller->launch_id ||
	    caller->last_api != api->api || !is_inside(outer, now->stack_pointer))
		return false;
	caller->launch_id = value_of(caller, &api->launch_id);
	if (!caller->launch_id)
		return true;
	fill_key(&key, caller);
	key.queue = caller->queue;
	number_launch(&key, &first, caller, now_ns);
	if (key.run)
		add_to_sums(&key, &first);
	return true;
}

static __always_inline void finish_call(struct caller *caller)
{
	u64 most;

	caller->call.stack = finish_or_copy(&caller->capture);
	add_call(caller);
	most = setting(SETTING_CALL_EVENTS);
	if (!most)
		return;
	if (spend(call_budgets.lookup(KEY(0)), caller->call.ns, most))
		send(&caller->call, sizeof(caller->call), 0);
	else
		count(LOST_CALLS_NOT_LISTED);
}

/* Tail-called with a capture in the thread's memory. */
int walk_call(struct pt_regs *ctx)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct caller *caller = callers.lookup(KEY(tid));

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
	struct caller *caller = callers.lookup(KEY(tid));

	if (!caller)
		return 0;
	if (!walk_python_of(&caller->capture))
		call_walkers.call(ctx, 1);
	finish_call(caller);
	return 0;
}

/* The first step of a walk needs no table: where a call returns to is known at its entry. */
static __always_inline void step_to_caller(struct capture *capture, struct outer_call *now)
{
	struct walk *walk = &capture->walk;

	if (walk->depth != 1 || !now->stack_pointer)
		return;
	walk->instruction_pointer = now->return_address;
	walk->stack_pointer = now->stack_pointer + 8;
	walk->is_exact = 0;
	walk->depth = 2;
	AT(capture->record.frames, capture->record.kernel_depth + 1) = now->return_address;
	walk->hash = hash_step(walk->hash, now->return_address);
}

int on_call(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid(), now_ns = bpf_ktime_get_ns();
	u32 tgid = id >> 32, tid = (u32)id;
	struct process_state *process = current_target(tgid);
	struct user_regs regs = {};
	struct outer_call now = {}, *outer;
	struct fired fired = {};
	struct api_call *api;
	struct caller *caller;

	if (!process || !is_recorded(now_ns) || !find_fired(&fired, ctx, tid))
		return 0;
	api = fired.api;
	caller = fired.caller;
	begin_call(&now, &fired, ctx);
	outer = &AT(caller->outers, api->api);
	if (numbers_outer(caller, api, outer, &now, now_ns) || is_nested(outer, api, &now))
		return 0;
	count(COUNTER_CALLS);
	announce(process, tgid);
	*outer = now;
	caller->last_api = api->api;
	caller->is_launch = api->operation == OPERATION_LAUNCH;
	__builtin_memset(&caller->call, 0, sizeof(caller->call));
	caller->work = 0;
	caller->call.type = EVENT_CALL;
	caller->call.tgid = tgid;
	caller->call.tid = tid;
	caller->call.call = now.call;
	caller->call.image = process->image;
	caller->call.ns = now_ns;
	caller->call.kernel = value_of(caller, &api->kernel);
	caller->call.queue = value_of(caller, &api->queue);
	caller->queue = caller->call.queue;
	if (!caller->queue && api->queue.is_used)
		caller->queue = DEFAULT_QUEUE;
	caller->launch_id = value_of(caller, &api->launch_id);
	caller->call.bytes = capped(value_of(caller, &api->bytes));
	caller->call.kind = value_of(caller, &api->kind);
	name_kernel(&caller->call);
	read_grid(caller, api->grid);
	caller->has_order = timed_processes.lookup(KEY(tgid)) != NULL;
	if (caller->has_order) {
		end_wait(caller, &caller->call, now_ns);
		read_event(caller);
		begin_wait(caller, api);
		note_event(caller, api);
	}
	user_regs_from(&regs, ctx);
	begin_capture_in(&caller->capture, ctx, &regs, false, id, process->image);
	step_to_caller(&caller->capture, &now);
	if (caller->capture.walk.depth && mappings_of(&caller->capture.walk))
		call_walkers.call(ctx, 0);
	if (caller->capture.walk.depth == 2)
		walk_without_tables(&caller->capture, 2);
	else
		walk_without_tables(&caller->capture, 1);
	if (begin_python_of(&caller->capture))
		call_walkers.call(ctx, 1);
	finish_call(caller);
	return 0;
}

/* How often a process may ring: as a bell, or once to tell what is gone with its memory. */
static __always_inline bool may_ring(struct process_state *process, u64 gone, u64 now_ns)
{
	bool is_first = !(process->flags & PROCESS_GONE);

	if (!gone)
		return spend(&process->bells, now_ns, BELLS_MAX);
	process->flags |= PROCESS_GONE;
	return is_first;
}

/* A function by which a helper says that something is in the memory that it shares, or was. */
int on_bell(struct pt_regs *ctx)
{
	u64 now_ns = bpf_ktime_get_ns();
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct process_state *process = current_target(tgid);
	struct bell_event event = { .type = EVENT_BELL, .tgid = tgid };
	struct fired fired = {};

	if (!process || !is_recorded(now_ns) || !find_function(&fired, ctx))
		return 0;
	if (fired.api->bytes.is_used)
		event.kernel_times = ctx->di;
	if (!may_ring(process, event.kernel_times, now_ns))
		return 0;
	announce(process, tgid);
	event.image = process->image;
	send(&event, sizeof(event), 0);
	return 0;
}
