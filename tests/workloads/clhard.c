/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An OpenCL program that makes it hard to count its calls. Arguments: how, and how often.
 *
 * stale: a function that leaves much of its frame unwritten waits after each launch, so that what
 *     the launch left on the stack is still there.
 * reuse: makes and releases a kernel for each launch, of two names in turns; the library uses the
 *     memory again.
 * refused: launches with arguments that cannot be; none gets as far as a driver.
 * wrapped: launches twice from inside of another API's launch.
 * threads: a thread of its own for each launch.
 * Measures its launches, and in `stale` and `reuse` how often it waited.
 */
#define _GNU_SOURCE
#include <string.h>

#include "clhost.h"
#include "frames.h"
#include "truth.h"

static const char *const SOURCE = "__kernel void more(__global float *data, int rounds)\n"
				  "{\n"
				  "    data[get_global_id(0)] += rounds;\n"
				  "}\n"
				  "\n"
				  "__kernel void less(__global float *data, int rounds)\n"
				  "{\n"
				  "    data[get_global_id(0)] -= rounds;\n"
				  "}\n";

static cl_program program;
static cl_kernel more;
static long long launches, waits;

static NOINLINE void enqueue(cl_kernel kernel, size_t items)
{
	clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &items, NULL, 0, NULL, NULL);
	launches++;
}

static NOINLINE void wait_below_much(void)
{
	volatile char unwritten[4096];

	__asm__ volatile("" : : "r"(unwritten) : "memory");
	clFinish(queue);
	waits++;
	__asm__ volatile("" : : "r"(unwritten) : "memory");
}

static void reuse(int round)
{
	cl_kernel kernel = kernel_of(program, round % 2 ? "more" : "less", 1);

	enqueue(kernel, 1 + round % 2);
	clFinish(queue);
	waits++;
	clReleaseKernel(kernel);
}

static NOINLINE void refused(void)
{
	static const cl_uint dimensions[] = { 0, 1, 3, 4, 0xffffffff };
	const size_t most[3] = { -1, -1, -1 };
	const size_t *nowhere = (const size_t *)8;

	for (size_t at = 0; at < sizeof(dimensions) / sizeof(*dimensions); at++) {
		clEnqueueNDRangeKernel(NULL, more, dimensions[at], NULL, most, most, 0, NULL, NULL);
		clEnqueueNDRangeKernel(NULL, more, dimensions[at], NULL, nowhere, NULL, 0, NULL,
				       NULL);
		launches += 2;
	}
}

/* As of a library that runs one API's programs by another one. */
NOINLINE int cudaLaunchKernel(const void *function, long grid, int grid_z, long block, int block_z)
{
	KEEP_FRAME();
	enqueue(more, grid + grid_z + block + block_z - 3);
	enqueue(more, 1);
	return function == NULL;
}

static void *once(void *unused)
{
	enqueue(more, 1);
	return unused;
}

int main(int argc, char **argv)
{
	int rounds = argc > 2 ? atoi(argv[2]) : 1000;

	open_device(64);
	program = build(SOURCE, "");
	more = kernel_of(program, "more", 1);
	enqueue(more, 1);
	clFinish(queue);
	launches = 0;
	ready_then_wait();
	for (int round = 0; round < rounds; round++) {
		pthread_t thread;

		if (!strcmp(argv[1], "stale")) {
			enqueue(more, 1);
			wait_below_much();
		} else if (!strcmp(argv[1], "reuse")) {
			reuse(round);
		} else if (!strcmp(argv[1], "refused")) {
			refused();
		} else if (!strcmp(argv[1], "wrapped")) {
			waits += cudaLaunchKernel(cudaLaunchKernel, 1, 1, 1, 1) == 0;
			clFinish(queue);
		} else {
			if (pthread_create(&thread, NULL, once, NULL))
				fail("pthread_create");
			pthread_join(thread, NULL);
		}
	}
	printf("launches %lld\nwaits %lld\n", launches, waits);
	done_then_stay();
	return 0;
}
