/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A service that switches often: ten threads, each of which waits in one of two functions, chosen at
 * random, in one of them twice as long as in the other.
 *
 *   switches SECONDS
 */
#define _GNU_SOURCE
#include <sys/prctl.h>
#include "../workloads/truth.h"

enum { THREADS = 10, US = 1000 };

/* Some 12,000 waits a second in all. */
static const long waits_ns[THREADS] = {
	250 * US, 300 * US, 400 * US, 500 * US, 700 * US, 1 * MS, 1500 * US, 2 * MS, 3 * MS, 5 * MS,
};
static long long end_ns;

#define WAITING(name)                                                                              \
	static __attribute__((noipa)) void name(long ns)                                           \
	{                                                                                          \
		sleep_ns(ns);                                                                      \
	}
#define PAIR(n) WAITING(short_##n) WAITING(long_##n)

PAIR(0) PAIR(1) PAIR(2) PAIR(3) PAIR(4) PAIR(5) PAIR(6) PAIR(7) PAIR(8) PAIR(9)

#define WAITS(n) { short_##n, long_##n }

static void (*const waits[THREADS][2])(long) = {
	WAITS(0), WAITS(1), WAITS(2), WAITS(3), WAITS(4),
	WAITS(5), WAITS(6), WAITS(7), WAITS(8), WAITS(9),
};

static void *work(void *number)
{
	long own = (long)number;
	unsigned seed = own + 1;

	while (clock_ns(CLOCK_MONOTONIC) < end_ns) {
		int is_long = rand_r(&seed) >> 8 & 1;

		waits[own][is_long](waits_ns[own] << is_long);
	}
	return NULL;
}

int main(int count, char **words)
{
	pthread_t threads[THREADS];

	if (count != 2)
		fail("switches SECONDS");
	ready_then_wait();
	alarm(0); /* it may run for longer than tests */
	if (prctl(PR_SET_TIMERSLACK, 1L)) /* in ns; threads that it makes have the same */
		fail("prctl");
	end_ns = clock_ns(CLOCK_MONOTONIC) + atoll(words[1]) * 1000LL * MS;
	for (long i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, work, (void *)i))
			fail("pthread_create");
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	return 0;
}
