/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A library of plugins.c. NUMBER tells it from others: its functions end with it, and it goes so
 * many calls deep. STACK_BYTES is the size of a local array between them.
 */
#define _GNU_SOURCE
#include <string.h>

#include "truth.h"

#define JOIN(name, number) name##_##number
#define NUMBERED(name, number) JOIN(name, number)

static volatile unsigned long sink;

static NOINLINE void NUMBERED(spin, NUMBER)(void)
{
	long long end_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + PLUGIN_CPU_NS;

	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < end_ns)
		for (int step = 0; step < 10000; step++)
			sink += step;
}

static NOINLINE void NUMBERED(deeper, NUMBER)(int calls)
{
	volatile char array[STACK_BYTES];

	memset((void *)array, calls, sizeof(array));
	if (calls)
		NUMBERED(deeper, NUMBER)(calls - 1);
	else
		NUMBERED(spin, NUMBER)();
	sink += array[calls];
}

void plugin(void);

void plugin(void)
{
	NUMBERED(deeper, NUMBER)(NUMBER % 5);
	__asm__ volatile("");
}
