/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Walks through a tree of functions that tests/chains.py has written, for so many milliseconds of
 * CPU time. At each tick of that time a signal comes, whose handler walks through another tree on a
 * stack of its own.
 *
 * chains MILLISECONDS
 */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/time.h>
#include "truth.h"

/* Written into by every function, so that none is empty. */
volatile long here;

/* The roots of the two trees. The first never returns, so that its call is the caller's end. */
__attribute__((noreturn)) void f_root(long milliseconds);
long f_main(long x);
long f_signal(long x);

/* The kernel's ticks come every 1 to 10 ms; the trees take some ten microseconds. */
enum { SIGNAL_ROUNDS = 150, SIGNAL_STACK_BYTES = 1 << 20, TICK_US = 1000 };

/* At the first sample of a process its tables are brought; until they are there, stacks are cut. */
enum { FIRST_MS = 100, FIRST_STEPS = 1 << 20 };

NOINLINE void settle(void)
{
	long i;

	do
		for (i = 0; i < FIRST_STEPS; i++)
			here = i;
	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < FIRST_MS * MS);
}

static void on_signal(int number)
{
	long x = number;
	int round;

	for (round = 0; round < SIGNAL_ROUNDS; round++)
		x += f_signal(x);
	here = x;
}

static void begin_signals(void)
{
	stack_t stack = { .ss_sp = malloc(SIGNAL_STACK_BYTES), .ss_size = SIGNAL_STACK_BYTES };
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_ONSTACK | SA_RESTART };
	struct itimerval every = { { 0, TICK_US }, { 0, TICK_US } };

	if (!stack.ss_sp || sigaltstack(&stack, NULL) || sigaction(SIGPROF, &action, NULL) ||
	    setitimer(ITIMER_PROF, &every, NULL))
		fail("signals");
}

NOINLINE void f_root(long milliseconds)
{
	struct itimerval none = { { 0, 0 }, { 0, 0 } };
	long rounds = 0;

	settle();
	begin_signals();
	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < milliseconds * MS) {
		here = f_main(rounds);
		rounds++;
	}
	setitimer(ITIMER_PROF, &none, NULL);
	say("rounds", rounds);
	done_then_stay();
	exit(0);
}

int main(int count, char **words)
{
	ready_then_wait();
	f_root(count > 1 ? atol(words[1]) : MS);
}
