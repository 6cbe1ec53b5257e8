/* SPDX-License-Identifier: Apache-2.0 */
/* What toyhelper.c has for the program that it is in. */
#ifndef TOYHELPER_H
#define TOYHELPER_H

#include <stdint.h>

/* Kinds of records. */
enum { TOY_KERNEL = 1, TOY_TIMES = 2 };

/* Of TOY_KERNEL. */
struct toy_kernel {
	uint64_t handle;
	char name[56];
};

/* TOY_TIMES has many: when the device ran a kernel, monotonic ns. */
struct toy_time {
	uint64_t launch_id, handle, begin_ns, end_ns;
};

/* What the helper does to its ring. */
enum lie { LIE_NONE, LIE_SIZE, LIE_HEAD, LIE_MAGIC, LIE_RECORD, LIE_SHRINK, LIE_NUMBERS };

void toy_kernel(uint64_t handle, const char *name);
void toy_launch(uint64_t id, uint64_t handle, uint64_t queue);
/* The API's own function: it calls toy_launch. */
void toy_enqueue(uint64_t handle, uint64_t queue, uint64_t id);
void toy_begin(void);
void toy_bell(void);
void toy_put(uint32_t kind, const void *data, uint32_t size);
void toy_lie(enum lie lie);

#endif
