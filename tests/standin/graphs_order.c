/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu/nvidia/helper/graphs.c alone: kernels of a newer launch are read before those of an older one, as
 * buffers may come out of order. First where numbers are believed, then in a session in which they are
 * not, of which the third launch's kernel is read before the second's, and before the last one somebody
 * sets the clock back. Prints the launch of each, and what is told.
 */
#include <stdio.h>

#include "graphs.h"
#include "helper.h"
#include "memory.h"

uint64_t now_ns(void)
{
	return 1000000000;
}

void tell_error(enum error error, int32_t code, const char *why)
{
	printf("error %d %d: %s\n", error, code, why);
}

void losses_add(enum loss loss, uint64_t count)
{
	printf("loss %d: %llu\n", loss, (unsigned long long)count);
}

uint64_t launch_of(uint32_t correlation)
{
	return correlation;
}

static int64_t clock_ahead_ns;

static void run(uint32_t correlation, uint64_t node, uint64_t begin_ns)
{
	struct cupti_kernel kernel = { 0 };

	kernel.graph = 5;
	kernel.node = node;
	kernel.correlation = correlation;
	kernel.start = begin_ns + clock_ahead_ns;
	printf("%llu\n", (unsigned long long)graphs_launch_of(&kernel, begin_ns));
}

int main(void)
{
	graphs_begin(130200, 0);
	graphs_see(101, 99, 5, 2000000000);
	graphs_see(102, 99, 5, 3000000000);
	run(102, 1, 3100000000);
	run(101, 1, 2100000000);
	run(101, 2, 2200000000);
	graphs_begin(130100, 102);
	for (uint64_t turn = 1; turn <= 5; turn++)
		graphs_see(200 + turn, 99, 5, turn * 1000000000);
	run(0, 1, 1100000000);
	run(0, 1, 3100000000);
	run(0, 1, 2100000000);
	run(0, 1, 4100000000);
	clock_ahead_ns = -2000000000;
	graphs_clock_was_set();
	run(0, 1, 5100000000);
}
