/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that compute in functions with known shares, and at known depths.
 *
 *   shares    three quarters of its CPU time in spend_three(), one in spend_one()
 *   shallow   at the bottom of descend() called 200 times deep
 *   deep      the same, 400 times: deeper than a stack is kept
 *   main      computes in main() itself
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include "truth.h"
#include "spend.h"

enum { SHARES_CPU_NS = 1500 * MS, OTHERS_CPU_NS = 300 * MS, SHALLOW = 200, DEEP = 400 };

SPENDER(spend_three, +=)
SPENDER(spend_one, -=)

/* Turns of random length (xorshift, same seed): the sampling clock cannot fall in step. */
static void *shares(void *spent_ns)
{
	long long *spent = spent_ns;
	unsigned random = 2463534242u;

	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < SHARES_CPU_NS) {
		long long unit_ns;

		random ^= random << 13;
		random ^= random >> 17;
		random ^= random << 5;
		unit_ns = MS + random % (4 * MS);
		spent[0] += spend_three(clock_ns(CLOCK_THREAD_CPUTIME_ID) + 3 * unit_ns);
		spent[1] += spend_one(clock_ns(CLOCK_THREAD_CPUTIME_ID) + unit_ns);
	}
	return NULL;
}

static NOINLINE void descend(int levels)
{
	if (levels > 1) {
		descend(levels - 1);
		sink += levels;
		return;
	}
	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < OTHERS_CPU_NS)
		COMPUTE(+=);
}

static void *diver(void *levels)
{
	descend(*(int *)levels);
	return NULL;
}

int main(void)
{
	static long long spent_ns[2];
	static int shallow = SHALLOW, deep = DEEP;
	pthread_t threads[3];

	ready_then_wait();
	threads[0] = start_thread_named("shares", shares, spent_ns);
	threads[1] = start_thread_named("shallow", diver, &shallow);
	threads[2] = start_thread_named("deep", diver, &deep);
	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < OTHERS_CPU_NS)
		COMPUTE(+=);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	say("spend_three", spent_ns[0]);
	say("spend_one", spent_ns[1]);
	done_then_stay();
	return 0;
}
