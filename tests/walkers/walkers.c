/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* The walkers of bpf/ as a library for tests (walkers/__init__.py). One thread at a time. */
#include "kernel.h"

#include "capture.h"

#define IMAGE 7
#define TGID 1

static struct inner_array tables[TABLES_MAX], mappings;
static struct capture capture;

void set_memory(const struct segment *given, u64 count)
{
	segments = given;
	segments_count = count;
}

void set_table(u32 slot, u64 *words, u64 count)
{
	tables[slot] = (struct inner_array){ sizeof(u64), count, (u8 *)words };
	unwind_tables_values[slot] = &tables[slot];
}

void take_tables_out(void)
{
	__builtin_memset(unwind_tables_values, 0, sizeof(unwind_tables_values));
}

/* With slot 0 first. */
void set_mappings(struct mapping_slot *slots, u64 count)
{
	mappings = (struct inner_array){ sizeof(*slots), count, (u8 *)slots };
	process_mappings_key = TGID;
	process_mappings_found = (int *)&mappings;
}

/* What is kept of one address for the next walk. */
u64 *known_address_of(u64 address)
{
	return (u64 *)&AT(known_addresses_values[0].slots, address ^ address >> 12);
}

/* Walks a user stack as a program does that samples it. */
static void walk_from(struct user_regs regs)
{
	host_constants[HOST_WITH_USER_STACKS] = 1;
	begin_capture_in(&capture, NULL, &regs, false, (u64)TGID << 32 | TGID, IMAGE);
	if (capture.walk.depth && mappings_of(&capture.walk))
		while (!walk_some(&capture))
			;
}

void walk_stack(struct stack_record *out, struct user_regs regs)
{
	walk_from(regs);
	finish_capture(&capture);
	*out = capture.record;
}

/* The same, and copies the stack if it has to be walked on; returns whether it has. */
bool copy_stack(struct stack_copy *out, struct user_regs regs)
{
	u64 count = stack_copies_count;

	settings_values[SETTING_STACK_COPIES] = ~0ull;
	processes_key = TGID;
	processes_found = &processes_value;
	walk_from(regs);
	finish_or_copy(&capture);
	__builtin_memcpy(out, stack_copies_record, sizeof(*out));
	return stack_copies_count != count;
}

/* Walks a thread's Python frames, without a native stack. */
void walk_python_frames(struct python_chain *out, struct python_process *python, u64 thread_pointer)
{
	struct python_walk *walk = &capture.python_walk;

	current_thread_pointer = thread_pointer;
	capture.walk.eval_frames = 1;
	if (begin_python(python, &capture.walk, walk, &capture.record))
		while (!walk_python_some(python, walk, out))
			;
	out->depth = walk->depth;
	out->end = walk->end;
}
