/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Functions named like those of CUDA that make handles of kernels, which call each other as the
 * runtime's call the driver's. Arguments: how, and how often. Each kernel is launched as often.
 *
 * nested: a call in a call in a call, each with a kernel of its own.
 * deep: calls in calls, more of them than any library makes.
 * thrown: calls that are left by a jump, as by an exception, and then one that returns.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdint.h>
#include <string.h>

#include "truth.h"

#define LEVELS 12

struct dim3 {
	unsigned int x, y, z;
};

static void *handles[LEVELS];
static int made;
static jmp_buf start;

/* Called as it stands, as by another library. */
#define SEEN __attribute__((noipa))

/* Handles are numbers that lead to nothing, as far as a profiler can tell. */
static int leave(void **out)
{
	*out = (void *)(uintptr_t)(0x1000 + 16 * made);
	handles[made++] = *out;
	return 0;
}

SEEN int cuModuleGetFunction(void **function, void *module, const char *name)
{
	void *other;
	static const char *const names[LEVELS] = { "level_0", "level_1", "level_2",  "level_3",
						   "level_4", "level_5", "level_6",  "level_7",
						   "level_8", "level_9", "level_10", "level_11" };
	intptr_t level = (intptr_t)module;

	if (level < 0)
		longjmp(start, 1);
	if (level && level + 1 < LEVELS)
		cuModuleGetFunction(&other, (void *)(level + 1), names[level + 1]);
	return leave(function) + !name;
}

SEEN int cuLibraryGetKernel(void **kernel, void *library, const char *name)
{
	void *function;

	cuModuleGetFunction(&function, library, "inner");
	return leave(kernel) + !name;
}

SEEN int cudaLibraryGetKernel(void **kernel, void *library, const char *name)
{
	void *other;

	cuLibraryGetKernel(&other, library, "middle");
	return leave(kernel) + !name;
}

SEEN int cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments,
			  size_t shared_bytes, void *stream)
{
	return !kernel + !grid.x + !block.x + !!arguments + !!shared_bytes + !!stream;
}

int main(int argc, char **argv)
{
	int rounds = argc > 2 ? atoi(argv[2]) : 1;
	volatile int throws = 10;
	struct dim3 one = { 1, 1, 1 };
	void *kernel;

	ready_then_wait();
	if (!strcmp(argv[1], "nested")) {
		cudaLibraryGetKernel(&kernel, NULL, "outer");
	} else if (!strcmp(argv[1], "deep")) {
		cuModuleGetFunction(&kernel, (void *)1, "level_1");
	} else {
		setjmp(start);
		if (throws-- > 0)
			cudaLibraryGetKernel(&kernel, (void *)-1, "thrown");
		cudaLibraryGetKernel(&kernel, NULL, "outer");
	}
	for (int round = 0; round < rounds; round++)
		for (int i = 0; i < made; i++)
			cudaLaunchKernel(handles[i], one, one, NULL, 0, NULL);
	say("launches", (long long)made * rounds);
	done_then_stay();
	return 0;
}
