/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An OpenCL kernel that is built anew again and again while the program runs, under one name and
 * with other code each time; kernel and program are released before the next one is built.
 *
 * Arguments: how many builds; milliseconds to launch each for.
 * Measures the launches, and the processor time of all threads while they ran, of each build.
 */
#define _GNU_SOURCE
#include "clhost.h"
#include "frames.h"
#include "truth.h"

enum { ITEMS = 4096, ROUNDS = 500, KINDS = 3 };

static const char *const SOURCE = "__kernel void work(__global float *data, int rounds)\n"
				  "{\n"
				  "    float value = data[get_global_id(0)];\n"
				  "    uint number = get_global_id(0);\n"
				  "    for (int i = 0; i < rounds; i++) {\n"
				  "        if (KIND == 0)\n"
				  "            value = value * 0.999f + NUMBER;\n"
				  "        else if (KIND == 1)\n"
				  "            value = (NUMBER + 7.0f) / (value + 1.0f);\n"
				  "        else\n"
				  "            number = number * 1664525u + NUMBER;\n"
				  "    }\n"
				  "    data[get_global_id(0)] = value + number;\n"
				  "}\n";

static NOINLINE void launch_for(cl_kernel kernel, long long length_ms, int number)
{
	long long begun_ns = clock_ns(CLOCK_MONOTONIC);
	long long begun_cpu_ns, launches = 0;

	launch(kernel, ITEMS); /* compiles it */
	begun_cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	do {
		launch(kernel, ITEMS);
		launches++;
	} while (clock_ns(CLOCK_MONOTONIC) < begun_ns + length_ms * MS);
	printf("work%d.launches %lld\nwork%d.cpu_ns %lld\n", number, launches + 1, number,
	       clock_ns(CLOCK_PROCESS_CPUTIME_ID) - begun_cpu_ns);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	int builds = argc > 1 ? atoi(argv[1]) : KINDS;
	long long length_ms = argc > 2 ? atoll(argv[2]) : 500;
	char options[64];

	open_device(ITEMS);
	ready_then_wait();
	for (int number = 0; number < builds; number++) {
		cl_program program;
		cl_kernel kernel;

		snprintf(options, sizeof(options), "-D KIND=%d -D NUMBER=%d", number % KINDS,
			 number);
		program = build(SOURCE, options);
		kernel = kernel_of(program, "work", ROUNDS);
		launch_for(kernel, length_ms, number);
		clReleaseKernel(kernel);
		clReleaseProgram(program);
	}
	done_then_stay();
	return 0;
}
