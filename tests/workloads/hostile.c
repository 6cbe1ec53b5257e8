/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program with odd things in its address space.
 *
 *   hostile loads MILLISECONDS LIBRARY...   calls `enter` of each library (twin.c) in turn
 *   hostile maps MILLISECONDS FILE          computes with the first page of a file mapped MAPPINGS
 *                                           times, executable
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include "truth.h"

/* vm.max_map_count is 65,530 unless it was raised; libraries and stacks take some. */
enum { MAPPINGS = 65000, LIBRARIES_MAX = 8, PAGE_BYTES = 4096 };

static long (*enter[LIBRARIES_MAX])(long);
static volatile long sink;

static void load(int count, char **paths)
{
	void *library;
	int i;

	for (i = 0; i < count && i < LIBRARIES_MAX; i++) {
		library = dlopen(paths[i], RTLD_NOW | RTLD_LOCAL);
		enter[i] = library ? (long (*)(long))dlsym(library, "enter") : NULL;
		if (!enter[i])
			fail(dlerror());
	}
}

/* Each mapping begins at the same offset, so that none can be joined with its neighbour. */
static void map(const char *path)
{
	int fd = open(path, O_RDONLY), i;

	for (i = 0; i < MAPPINGS; i++)
		if (mmap(NULL, PAGE_BYTES, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0) == MAP_FAILED)
			fail("mmap");
}

NOINLINE void visit(long until_ns)
{
	long x = 1;
	int i;

	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < until_ns)
		for (i = 0; enter[i]; i++)
			x += enter[i](x);
	sink = x;
}

NOINLINE void compute(long until_ns)
{
	long i, x = 1;

	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < until_ns)
		for (i = 0; i < 100000; i++)
			sink = x = x * 3 + i;
}

int main(int count, char **words)
{
	long ns;

	if (count < 4)
		return 2;
	if (!strcmp(words[1], "loads"))
		load(count - 3, words + 3);
	else
		map(words[3]);
	ns = atol(words[2]) * MS;
	ready_then_wait();
	ns += clock_ns(CLOCK_THREAD_CPUTIME_ID);
	if (enter[0])
		visit(ns);
	else
		compute(ns);
	say("cpu_ns", clock_ns(CLOCK_THREAD_CPUTIME_ID));
	done_then_stay();
	return 0;
}
