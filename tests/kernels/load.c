/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is recorded in a guest: code without frame pointers that knows what it does. Shares are told
 * in rounds of the same work, not in CPU time: while the host gives an emulated processor no time,
 * the guest's clocks go on.
 *
 *   work      a thread "shares" with three quarters of its work in spend_three(), one in
 *             spend_one(), and a thread "naps" that sleeps in take_naps()
 *   children  children, one after the other: each calls exec and computes
 *
 * Before that it runs and sleeps in settle() until it gets a second line, so that the recorder of a
 * slow machine can see it and read its mappings.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <string.h>
#include <sys/wait.h>
#include "../workloads/truth.h"

enum {
	SHARES_CPU_NS = 2000 * MS,
	NAPS = 31,
	NAP_NS = 60 * MS,
	CHILDREN = 12,
	CHILD_CPU_NS = 60 * MS,
	SETTLE_MS = 20,
};

static volatile unsigned long sink;

/* Some 15 us on hardware, a millisecond under emulation. */
#define COMPUTE(operator)                                                                          \
	do {                                                                                       \
		for (int step = 0; step < 50000; step++)                                           \
			sink operator step;                                                        \
	} while (0)

/* Two functions of the same code would be made one by the compiler. */
static NOINLINE void spend_three(long long *rounds, unsigned count)
{
	*rounds += count;
	for (; count; count--)
		COMPUTE(+=);
}

static NOINLINE void spend_one(long long *rounds, unsigned count)
{
	*rounds += count;
	for (; count; count--)
		COMPUTE(-=);
}

/* A frame of variable size and one of many saved registers, for the unwinder to get through. */
static NOINLINE void take_turn(long long *rounds, unsigned count)
{
	char room[1 + (count & 127)];

	__asm__ volatile("" : : "r"(room) : "memory");
	spend_three(&rounds[0], 3 * count);
	spend_one(&rounds[1], count);
}

/* Turns of random length (xorshift, same seed): the sampling clock cannot fall in step. */
static void *shares(void *rounds)
{
	unsigned random = 2463534242u;

	say("shares.tid", gettid());
	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < SHARES_CPU_NS) {
		random ^= random << 13;
		random ^= random >> 17;
		random ^= random << 5;
		take_turn(rounds, 2 + random % 5);
	}
	return NULL;
}

static NOINLINE void settle(void)
{
	struct pollfd told = { .fd = STDIN_FILENO, .events = POLLIN };

	do
		COMPUTE(+=);
	while (system_call(SYS_poll, (long)&told, 1, SETTLE_MS, 0) == 0);
	while (getchar() != '\n')
		;
}

static NOINLINE void take_naps(struct meter *meter)
{
	*meter = meter_now();
	for (int i = 0; i < NAPS; i++)
		sleep_ns(NAP_NS);
	meter_since(meter);
}

static void *naps(void *meter)
{
	say("naps.tid", gettid());
	take_naps(meter);
	return NULL;
}

static void work(void)
{
	static long long rounds[2];
	static struct meter nap;
	pthread_t threads[2];

	threads[0] = start_thread_named("shares", shares, rounds);
	threads[1] = start_thread_named("naps", naps, &nap);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	say("spend_three", rounds[0]);
	say("spend_one", rounds[1]);
	say("naps", NAPS);
	say_meter("take_naps", &nap);
}

static NOINLINE void work_of_child(void)
{
	/* From here on: to start a program is dear under emulation. */
	long long end_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + CHILD_CPU_NS;

	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < end_ns)
		COMPUTE(+=);
}

static void children(void)
{
	for (int i = 0; i < CHILDREN; i++) {
		pid_t child = fork();

		if (!child) {
			execl("/proc/self/exe", "load", "child", NULL);
			fail("exec");
		}
		waitpid(child, NULL, 0);
	}
	say("children", CHILDREN);
	say("cpu_ns", (long long)CHILDREN * CHILD_CPU_NS);
}

int main(int count, char **words)
{
	const char *how = count > 1 ? words[1] : "";

	if (!strcmp(how, "child")) {
		work_of_child();
		return 0;
	}
	/* A line is read whole by stdio: poll() would not see what it keeps. */
	setvbuf(stdin, NULL, _IONBF, 0);
	ready_then_wait();
	alarm(3 * LONGEST_LIFE_S); /* guests are slow, and slower on a busy machine */
	while (getchar() != '\n')
		;
	settle();
	if (!strcmp(how, "children"))
		children();
	else
		work();
	done_then_stay();
	return 0;
}
