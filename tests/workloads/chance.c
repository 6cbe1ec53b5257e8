/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that wait often, seldom, for long and in turns, and measure themselves how long each
 * function was off the CPU: its wall time less its CPU time.
 *
 *   pinger, answerer   pass a byte to and fro through two pipes, at a pace
 *   passer x2          pass a turn to and fro by a futex, at a pace
 *   mixer              sleeps in two functions by turns, ten times as long in one as in the other
 *   rester             many short sleeps in one function, and three of over a second in another
 *   seldom             five waits a second
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include "truth.h"

enum {
	RUN_S = 5,
	/* And the timer's slack, of 50 us (PR_SET_TIMERSLACK): some 8,000 turns a second. */
	PACE_NS = MS / 20,
	SHORT_NS = MS / 5,
	MIDDLE_NS = 2 * MS,
	LONG_NS = 1300 * MS,
	SELDOM_NS = 200 * MS,
	RESTS = 3,
	NAPS_BETWEEN = 100,
};

static long long end_ns;
static int pings[2], pongs[2];
static _Atomic unsigned turn, have_pings_ended;

static inline bool is_over(void)
{
	return clock_ns(CLOCK_MONOTONIC) >= end_ns;
}

static inline __attribute__((always_inline)) void futex_wait_turn(long own)
{
	while (atomic_load(&turn) != (unsigned)own)
		system_call(SYS_futex, (long)&turn, FUTEX_WAIT_PRIVATE, 1 - own, 0);
}

/* A function that only waits, and what it waited in all. */
#define WAITING(name, wait)                                                                        \
	static long long name##_ns, name##_count;                                                  \
	static __attribute__((noipa)) void name(long value)                                        \
	{                                                                                          \
		long long wall_ns = clock_ns(CLOCK_MONOTONIC);                                     \
		long long cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);                              \
                                                                                                   \
		(void)value;                                                                       \
		wait;                                                                              \
		name##_ns += clock_ns(CLOCK_MONOTONIC) - wall_ns -                                 \
			     (clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_ns);                         \
		name##_count++;                                                                    \
	}

WAITING(await_pong, read_byte(pongs[0]))
WAITING(await_ping, read_byte(pings[0]))
WAITING(await_turn, futex_wait_turn(value))
WAITING(pace_pings, sleep_ns(value))
WAITING(pace_turns, sleep_ns(value))
WAITING(mix_short, sleep_ns(value))
WAITING(mix_middle, sleep_ns(value))
WAITING(rest_short, sleep_ns(value))
WAITING(rest_long, sleep_ns(value))
WAITING(wait_seldom, sleep_ns(value))

static void *pinger(void *unused)
{
	while (!is_over()) {
		write_byte(pings[1]);
		await_pong(0);
		pace_pings(PACE_NS);
	}
	/* By this, and not by the clock: a ping may be sent before the end and be found after it. */
	atomic_store(&have_pings_ended, 1);
	write_byte(pings[1]);
	return unused;
}

static void *answerer(void *unused)
{
	do {
		await_ping(0);
		write_byte(pongs[1]);
	} while (!atomic_load(&have_pings_ended));
	return unused;
}

static void *passer(void *number)
{
	unsigned own = (unsigned)(long)number;

	while (!is_over()) {
		await_turn(own);
		if (!own)
			pace_turns(PACE_NS);
		atomic_store(&turn, 1 - own);
		system_call(SYS_futex, (long)&turn, FUTEX_WAKE_PRIVATE, 1, 0);
	}
	atomic_store(&turn, 1 - own);
	system_call(SYS_futex, (long)&turn, FUTEX_WAKE_PRIVATE, 1, 0);
	return NULL;
}

static void *mixer(void *unused)
{
	while (!is_over()) {
		mix_short(SHORT_NS);
		mix_middle(MIDDLE_NS);
	}
	return unused;
}

static void *rester(void *unused)
{
	for (int i = 0; i < RESTS; i++) {
		for (int n = 0; n < NAPS_BETWEEN; n++)
			rest_short(MIDDLE_NS);
		rest_long(LONG_NS);
	}
	return unused;
}

static void *seldom(void *unused)
{
	while (!is_over())
		wait_seldom(SELDOM_NS);
	return unused;
}

static void start(pthread_t *thread, const char *name, void *(*run)(void *), long argument)
{
	if (pthread_create(thread, NULL, run, (void *)argument))
		fail("pthread_create");
	pthread_setname_np(*thread, name);
}

static void tell(const char *name, long long ns, long long count)
{
	printf("%s.ns %lld\n%s.count %lld\n", name, ns, name, count);
	fflush(stdout);
}

int main(void)
{
	pthread_t threads[7];

	if (pipe(pings) || pipe(pongs))
		fail("pipe");
	ready_then_wait();
	end_ns = clock_ns(CLOCK_MONOTONIC) + RUN_S * 1000LL * MS;
	start(&threads[0], "pinger", pinger, 0);
	start(&threads[1], "answerer", answerer, 0);
	start(&threads[2], "passer-0", passer, 0);
	start(&threads[3], "passer-1", passer, 1);
	start(&threads[4], "mixer", mixer, 0);
	start(&threads[5], "rester", rester, 0);
	start(&threads[6], "seldom", seldom, 0);
	for (int i = 0; i < 7; i++)
		pthread_join(threads[i], NULL);
	tell("pace_pings", pace_pings_ns, pace_pings_count);
	tell("mix_short", mix_short_ns, mix_short_count);
	tell("mix_middle", mix_middle_ns, mix_middle_count);
	tell("rest_short", rest_short_ns, rest_short_count);
	tell("rest_long", rest_long_ns, rest_long_count);
	tell("wait_seldom", wait_seldom_ns, wait_seldom_count);
	done_then_stay();
	return 0;
}
