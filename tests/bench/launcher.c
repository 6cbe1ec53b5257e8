/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls a device API many times from a stack of a known depth.
 *
 *   launcher DEPTH CALLS   says "ready", waits for a line, makes the calls, prints the seconds that
 *                          they took, and so on
 *
 * The call is a real one, of the OpenCL loader, without a queue: it is refused at once, so that
 * what is measured is the call and not what a device does.
 */
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static volatile int sink;

static double now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec * 1e-9;
}

static __attribute__((noinline)) void launch(long calls)
{
	size_t global[1] = { 4096 }, local[1] = { 64 };

	for (long call = 0; call < calls; call++)
		sink += clEnqueueNDRangeKernel(NULL, NULL, 1, NULL, global, local, 0, NULL, NULL);
}

static __attribute__((noinline)) void descend(int depth, long calls)
{
	if (depth > 0)
		descend(depth - 1, calls);
	else
		launch(calls);
	sink++;
}

int main(int argc, char **argv)
{
	char line[16];
	int depth = argc > 2 ? atoi(argv[1]) : 0;
	long calls = argc > 2 ? atol(argv[2]) : 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (fgets(line, sizeof(line), stdin)) {
		double begin_s = now_s();

		descend(depth, calls);
		printf("%.6f\n", now_s() - begin_s);
	}
	return 0;
}
