/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * What the headers of bpf/ find in the kernel and in BCC, for user space: maps that lie in this
 * process, helpers that read a memory which a test describes. Stands for bpf/host.h, too.
 */
#ifndef WALKERS_KERNEL_H
#define WALKERS_KERNEL_H
#define AIFLAME_HOST_H

#include <linux/types.h>

#include "aiflame.h"

/* A piece of the target's memory; what is in none cannot be read. */
struct segment {
	u64 address;
	u64 size;
	const u8 *bytes;
};

static const struct segment *segments;
static u64 segments_count;

/* As the kernel, which fills what it could not read with zeroes (v5.5 kernel/trace/bpf_trace.c). */
static long bpf_probe_read_user(void *out, u64 size, const void *from)
{
	u64 address = (u64)from, i;

	for (i = 0; i < segments_count; i++) {
		const struct segment *segment = &segments[i];
		u64 offset = address - segment->address;

		if (offset < segment->size && size <= segment->size - offset) {
			__builtin_memcpy(out, segment->bytes + offset, size);
			return 0;
		}
	}
	__builtin_memset(out, 0, size);
	return -14;
}

/* The kernel's own memory is this process's. */
static long bpf_probe_read_kernel(void *out, u64 size, const void *from)
{
	__builtin_memcpy(out, from, size);
	return 0;
}

/* Where the current thread's task_struct would be: its thread pointer, at offset 0. */
static u64 current_thread_pointer;

static u64 bpf_get_current_task(void)
{
	return (u64)&current_thread_pointer;
}

static u64 bpf_ktime_get_ns(void)
{
	return 1;
}

static u64 bpf_get_current_cgroup_id(void)
{
	return 0;
}

static long bpf_get_stack(void *ctx, void *out, u64 size, u64 flags)
{
	(void)ctx, (void)out, (void)size, (void)flags;
	return -1;
}

#define BPF_RB_NO_WAKEUP 1
#define BPF_RB_FORCE_WAKEUP 2

/* Constants of the host. */
static u64 host_constants[HOST_MAX];
#define host(name) host_constants[HOST_##name]
#define SIZED_BY_HOST 1
#define OPAQUE(value) asm volatile("" : "+r"(value))
#define KEY(number) (&(u32){ (u32)(number) })
#define AT(array, index) ((array)[(index) & (sizeof(array) / sizeof((array)[0]) - 1)])

/* An inner array. */
struct inner_array {
	u64 value_bytes;
	u64 entries;
	u8 *values;
};

static void *bpf_map_lookup_elem(void *map, const u32 *index)
{
	struct inner_array *array = map;

	return *index < array->entries ? array->values + *index * array->value_bytes : NULL;
}

/* Inner arrays are made by tests. */
#define BPF_F_TABLE(kind, key, value, name, entries, flags) struct name##_is_made_by_tests

#define BPF_ARRAY_OF_MAPS(name, inner, entries)                                                    \
	static struct inner_array *name##_values[entries];                                         \
	static void *name##_lookup(const void *slot)                                               \
	{                                                                                          \
		u32 index = *(const u32 *)slot;                                                    \
		return index < (entries) ? name##_values[index] : NULL;                            \
	}                                                                                          \
	static struct {                                                                            \
		void *(*lookup)(const void *slot);                                                 \
	} name = { name##_lookup }

#define BPF_ARRAY(name, value, entries)                                                            \
	static value name##_values[entries];                                                       \
	static value *name##_lookup(const void *slot)                                              \
	{                                                                                          \
		u32 index = *(const u32 *)slot;                                                    \
		return index < (entries) ? &name##_values[index] : NULL;                           \
	}                                                                                          \
	static struct {                                                                            \
		value *(*lookup)(const void *slot);                                                \
	} name = { name##_lookup }
#define BPF_PERCPU_ARRAY BPF_ARRAY

/* A hash has room for one entry, or holds the one inner array that its process has. */
#define BPF_TABLE(kind, key, value, name, entries)                                                 \
	static key name##_key;                                                                     \
	static value name##_value;                                                                 \
	static value *name##_found;                                                                \
	static value *name##_lookup(const void *asked)                                             \
	{                                                                                          \
		return __builtin_memcmp(asked, &name##_key, sizeof(key)) ? NULL : name##_found;    \
	}                                                                                          \
	static long name##_insert(const void *asked, const void *given)                            \
	{                                                                                          \
		__builtin_memcpy(&name##_key, asked, sizeof(key));                                 \
		__builtin_memcpy(&name##_value, given, sizeof(value));                             \
		name##_found = &name##_value;                                                      \
		return 0;                                                                          \
	}                                                                                          \
	static struct {                                                                            \
		value *(*lookup)(const void *asked);                                               \
		long (*insert)(const void *asked, const void *given);                              \
	} name = { name##_lookup, name##_insert }

/* A ring has room for one record, which the next one is written over. */
#define BPF_RINGBUF_OUTPUT(name, pages)                                                            \
	static u64 name##_record[sizeof(struct stack_copy) / sizeof(u64)], name##_count;           \
	static long name##_output(void *event, u64 size, u64 flags)                                \
	{                                                                                          \
		(void)event, (void)size, (void)flags;                                              \
		return 0;                                                                          \
	}                                                                                          \
	static void *name##_reserve(u64 size)                                                      \
	{                                                                                          \
		return size <= sizeof(name##_record) ? name##_record : NULL;                       \
	}                                                                                          \
	static void name##_submit(void *record, u64 flags)                                         \
	{                                                                                          \
		(void)record, (void)flags;                                                         \
		name##_count += 1;                                                                 \
	}                                                                                          \
	static struct {                                                                            \
		long (*ringbuf_output)(void *event, u64 size, u64 flags);                          \
		void *(*ringbuf_reserve)(u64 size);                                                \
		void (*ringbuf_submit)(void *record, u64 flags);                                   \
	} name = { name##_output, name##_reserve, name##_submit }

#define BPF_CGROUP_ARRAY(name, entries)                                                            \
	static long name##_check(int slot)                                                         \
	{                                                                                          \
		return slot;                                                                       \
	}                                                                                          \
	static struct {                                                                            \
		long (*check_current_task)(int slot);                                              \
	} name = { name##_check }

#endif
