/* SPDX-License-Identifier: Apache-2.0 */
/* gpu/nvidia/helper/graphs.c alone: the kernels of a newer launch are read before those of an older one,
 * as buffers may come out of order. Prints the launch of each, and what is told. */
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

static void run(uint32_t correlation, uint64_t node, uint64_t begin_ns)
{
	struct cupti_kernel kernel = { 0 };

	kernel.graph = 5;
	kernel.node = node;
	kernel.correlation = correlation;
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
}
