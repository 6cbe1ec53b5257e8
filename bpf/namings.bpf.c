/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * What kernels are called: ties the handles by which launches know them to names.
 *
 * Attach: as calls.bpf.c, to functions that make kernels; a return probe where the handle is known
 * only then.
 * Needs: what arguments.h needs.
 * Loses: names that find no room in the ring buffer, and those of calls inside of NAMINGS_MAX others
 * (LOST_KERNEL_NAMES_LOST). A name that cannot be read here is left to the host half.
 */
#include "arguments.h"
#include "kernel_names.h"

/* An id that is the same for the same name; the name lies in zeroes. */
static __always_inline u64 name_id_of(struct kernel_named_event *named)
{
	u64(*words)[KERNEL_NAME_BYTES / 8] = (void *)named->name;
	u64 hash = named->name_bytes;
	u32 i;

#pragma clang loop unroll(disable)
	for (i = 0; i < NAME_ID_WORDS; i++) {
		OPAQUE(i);
		if (i * 8 >= named->name_bytes)
			break;
		hash = hash_step(hash, AT(*words, i));
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
	count(LOST_KERNEL_NAMES_LOST);
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

/* Begins what is told of a kernel. */
static __always_inline struct kernel_named_event *begin_named(struct caller *caller, u32 tgid,
							      u64 image, u64 call)
{
	struct kernel_named_event *named = &caller->named;

	named->type = EVENT_KERNEL_NAMED;
	named->tgid = tgid;
	named->image = image;
	named->call = call;
	return named;
}

/* Forgets calls that were left by other ways than a return, as exceptions: their frames are gone. */
static __always_inline u64 open_namings(struct caller *caller, u64 stack_pointer)
{
	u64 open = caller->open_namings;
	u32 i;

	if (open > NAMINGS_MAX)
		open = NAMINGS_MAX;
#pragma clang loop unroll(full)
	for (i = 0; i < NAMINGS_MAX; i++)
		if (open && AT(caller->namings, open - 1).stack_pointer < stack_pointer)
			open -= 1;
	return open;
}

/* Keeps the call that begins now until its return. */
static __always_inline void push_naming(struct caller *caller, struct naming *now)
{
	u64 open = open_namings(caller, now->stack_pointer);
	struct naming *last = &AT(caller->namings, open - 1);

	/* What another program left before this thread's exec. */
	if (caller->namings[0].image != now->image)
		open = 0;
	/* One site may be probed twice, through two mounts of one file. */
	if (open && last->stack_pointer == now->stack_pointer && last->call == now->call)
		open -= 1;
	if (open >= NAMINGS_MAX) {
		count(LOST_KERNEL_NAMES_LOST);
		return;
	}
	AT(caller->namings, open) = *now;
	caller->open_namings = open + 1;
}

/* At the entry of a function that ties a name to a kernel's handle. */
int on_naming(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32, tid = (u32)id;
	struct process_state *process = current_target(tgid);
	struct kernel_named_event *named;
	struct naming now = {};
	struct fired fired = {};
	struct api_call *api;
	struct caller *caller;

	if (!process || !find_fired(&fired, ctx, tid))
		return 0;
	api = fired.api;
	caller = fired.caller;
	now.stack_pointer = caller->entry_stack_pointer;
	now.image = process->image;
	now.handle_at = value_of(caller, &api->kernel);
	now.name_address = value_of(caller, &api->name);
	now.alias = value_of(caller, &api->alias);
	now.call = fired.probe->call;
	if (api->handle_from != HANDLE_ARGUMENT) {
		push_naming(caller, &now);
		return 0;
	}
	named = begin_named(caller, tgid, now.image, now.call);
	named->name_address = now.name_address;
	named->alias = now.alias;
	named->handle = now.handle_at;
	note_name(named);
	return 0;
}

/* At its return, where the handle is known only then. */
int on_named(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid(), stack_pointer = ctx->sp - 8, open;
	u32 tgid = id >> 32, tid = (u32)id, slot;
	struct caller *caller = callers.lookup(KEY(tid));
	struct kernel_named_event *named;
	struct naming *naming;
	struct api_call *api;

	if (!caller)
		return 0;
	open = open_namings(caller, stack_pointer);
	caller->open_namings = open;
	naming = &AT(caller->namings, open - 1);
	if (!open || naming->stack_pointer != stack_pointer)
		return 0;
	caller->open_namings = open - 1;
	slot = naming->call;
	api = api_calls.lookup((int *)&slot);
	if (!api)
		return 0;
	named = begin_named(caller, tgid, naming->image, naming->call);
	named->name_address = naming->name_address;
	named->alias = naming->alias;
	if (api->handle_from == HANDLE_RETURNED)
		named->handle = ctx->ax;
	else if (bpf_probe_read_user(&named->handle, 8, (void *)naming->handle_at))
		named->handle = 0;
	if (named->handle)
		note_name(named);
	return 0;
}
