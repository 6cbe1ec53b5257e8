/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A long run queue: so many threads that sleep for some microseconds and spin for some, from "go"
 * until standard input is closed. Nobody measures anything: how much each gets is the scheduler's
 * to say.
 */
#define _GNU_SOURCE
#include "truth.h"

static long long sleep_for_ns, spin_for_ns;
static pthread_barrier_t start;

static void *be_one_of_many(void *unused)
{
	(void)unused;
	pthread_barrier_wait(&start);
	for (;;) {
		long long until = clock_ns(CLOCK_THREAD_CPUTIME_ID) + spin_for_ns;

		while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < until)
			;
		if (sleep_for_ns)
			sleep_ns(sleep_for_ns);
	}
	return NULL;
}

/* Arguments: threads, microseconds of sleep, microseconds of spinning. */
int main(int argc, char **argv)
{
	int threads = argc > 1 ? atoi(argv[1]) : 1;

	sleep_for_ns = argc > 2 ? atoll(argv[2]) * 1000 : 0;
	spin_for_ns = argc > 3 ? atoll(argv[3]) * 1000 : 10;
	pthread_barrier_init(&start, NULL, threads + 1);
	for (int i = 0; i < threads; i++)
		start_thread_named("crowd", be_one_of_many, NULL);
	ready_then_wait();
	pthread_barrier_wait(&start);
	done_then_stay();
	return 0;
}
