/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that wait in every way, and measure themselves how long: their off-CPU time is their
 * wall time less their CPU time, and their sleeps are their voluntary context switches.
 *
 *   naps        clock_nanosleep, a prime number of times
 *   locks       a mutex that another thread holds while it sleeps
 *   reads       a pipe that another thread writes into now and then
 *   polls       poll() with a timeout
 *   pings       a prime number of round trips through two pipes
 *   hops        sleeps after each move to another CPU
 *   rival x2    both compute on one CPU; the gaps in their own clock are what they waited
 *   early       sleeps since before the recording
 *   late        falls asleep in the recording, for good
 */
#define _GNU_SOURCE
#include <poll.h>
#include "truth.h"

enum {
	NAPS = 23,
	NAP_NS = 20 * MS,
	LOCKINGS = 19,
	LOCKED_NS = 20 * MS,
	READS = 29,
	BETWEEN_WRITES_NS = 15 * MS,
	POLLS = 17,
	POLL_MS = 25,
	PINGS = 4999,
	HOPS = 53,
	HOP_NS = 5 * MS,
	RIVALRY_NS = 700 * MS,
	/* A gap this long in a loop of 20 ns steps is no interrupt: another thread had the CPU. */
	GAP_NS = MS,
};

static pthread_mutex_t held = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t locking, rivalry;
static int pipe_of_reads[2], pings[2], pongs[2], never[2];

static NOINLINE void take_naps(struct meter *meter)
{
	*meter = meter_now();
	for (int i = 0; i < NAPS; i++)
		sleep_ns(NAP_NS);
	meter_since(meter);
}

static void *naps(void *meter)
{
	take_naps(meter);
	return NULL;
}

static void *locks(void *meter)
{
	*(struct meter *)meter = meter_now();
	for (int i = 0; i < LOCKINGS; i++) {
		pthread_barrier_wait(&locking); /* the holder has it */
		pthread_mutex_lock(&held);
		pthread_mutex_unlock(&held);
		pthread_barrier_wait(&locking);
	}
	meter_since(meter);
	return NULL;
}

static void *holder(void *unused)
{
	for (int i = 0; i < LOCKINGS; i++) {
		pthread_mutex_lock(&held);
		pthread_barrier_wait(&locking);
		sleep_ns(LOCKED_NS);
		pthread_mutex_unlock(&held);
		pthread_barrier_wait(&locking);
	}
	return unused;
}

static NOINLINE void read_from_pipe(struct meter *meter)
{
	*meter = meter_now();
	for (int i = 0; i < READS; i++)
		read_byte(pipe_of_reads[0]);
	meter_since(meter);
}

static void *reads(void *meter)
{
	read_from_pipe(meter);
	return NULL;
}

static void *writer(void *unused)
{
	for (int i = 0; i < READS; i++) {
		sleep_ns(BETWEEN_WRITES_NS);
		write_byte(pipe_of_reads[1]);
	}
	return unused;
}

static NOINLINE void poll_in_vain(struct meter *meter)
{
	struct pollfd silent = { .fd = never[0], .events = POLLIN };

	*meter = meter_now();
	for (int i = 0; i < POLLS; i++)
		system_call(SYS_poll, (long)&silent, 1, POLL_MS, 0);
	meter_since(meter);
}

static void *polls(void *meter)
{
	poll_in_vain(meter);
	return NULL;
}

static NOINLINE void answer_pings(struct meter *meter)
{
	*meter = meter_now();
	for (int i = 0; i < PINGS; i++) {
		read_byte(pings[0]);
		write_byte(pongs[1]);
	}
	meter_since(meter);
}

static void *answerer(void *meter)
{
	answer_pings(meter);
	return NULL;
}

static void *pinger(void *unused)
{
	for (int i = 0; i < PINGS; i++) {
		write_byte(pings[1]);
		read_byte(pongs[0]);
	}
	return unused;
}

static NOINLINE void hop_between_cpus(struct meter *meter)
{
	int cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);

	*meter = meter_now();
	for (int i = 0; i < HOPS; i++) {
		bind_to_cpu(i % cpus);
		sleep_ns(HOP_NS);
	}
	meter_since(meter);
}

static void *hops(void *meter)
{
	hop_between_cpus(meter);
	return NULL;
}

static NOINLINE long long watch_clock(void)
{
	long long start_ns = clock_ns(CLOCK_MONOTONIC), before_ns = start_ns, gaps_ns = 0, now_ns;

	do {
		now_ns = clock_ns(CLOCK_MONOTONIC);
		if (now_ns - before_ns > GAP_NS)
			gaps_ns += now_ns - before_ns;
		before_ns = now_ns;
	} while (now_ns - start_ns < RIVALRY_NS);
	return gaps_ns;
}

/* One call away from the one that reads the clock, in code that may have no frame pointers. */
static NOINLINE void compete_for_cpu(long long *gaps_ns)
{
	*gaps_ns = watch_clock();
}

static void *rival(void *gaps_ns)
{
	bind_to_cpu(0);
	pthread_barrier_wait(&rivalry);
	compete_for_cpu(gaps_ns);
	return NULL;
}

static NOINLINE void wait_for_ever(void)
{
	read_byte(never[0]);
}

static void *sleeper(void *unused)
{
	wait_for_ever();
	return unused;
}

int main(void)
{
	static struct meter nap, lock, reading, poll_, ping, hop;
	static long long gaps_ns[2];
	pthread_t threads[11];

	if (pipe(pipe_of_reads) || pipe(pings) || pipe(pongs) || pipe(never))
		fail("pipe");
	pthread_barrier_init(&locking, NULL, 2);
	pthread_barrier_init(&rivalry, NULL, 2);
	start_thread_named("early", sleeper, NULL);
	ready_then_wait();
	start_thread_named("late", sleeper, NULL);
	threads[0] = start_thread_named("naps", naps, &nap);
	threads[1] = start_thread_named("locks", locks, &lock);
	threads[2] = start_thread_named("holder", holder, NULL);
	threads[3] = start_thread_named("reads", reads, &reading);
	threads[4] = start_thread_named("writer", writer, NULL);
	threads[5] = start_thread_named("polls", polls, &poll_);
	threads[6] = start_thread_named("answerer", answerer, &ping);
	threads[7] = start_thread_named("pinger", pinger, NULL);
	threads[8] = start_thread_named("hops", hops, &hop);
	threads[9] = start_thread_named("rival-1", rival, &gaps_ns[0]);
	threads[10] = start_thread_named("rival-2", rival, &gaps_ns[1]);
	for (int i = 0; i < 11; i++)
		pthread_join(threads[i], NULL);
	say_meter("take_naps", &nap);
	say_meter("locks", &lock);
	say_meter("read_from_pipe", &reading);
	say_meter("poll_in_vain", &poll_);
	say_meter("answer_pings", &ping);
	say_meter("hop_between_cpus", &hop);
	say("gaps_ns", gaps_ns[0] + gaps_ns[1]);
	done_then_stay();
	return 0;
}
