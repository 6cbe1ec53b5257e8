/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that take CPU time, for programs that know how much each had. After truth.h. */
#ifndef AIFLAME_TESTS_SPEND_H
#define AIFLAME_TESTS_SPEND_H

static volatile unsigned long sink;

/* Some 200 us without a call, so that hardly a sample hits the clock. */
#define COMPUTE(operator)                                                                          \
	do {                                                                                       \
		for (int step = 0; step < 100000; step++)                                          \
			sink operator step;                                                        \
	} while (0)

/*
 * A function that computes until its thread has had so much CPU time, and returns how much of that
 * was its own. Two of the same operator would be made one by the compiler.
 */
#define SPENDER(name, operator)                                                                    \
	static NOINLINE long long name(long long end_ns)                                           \
	{                                                                                          \
		long long start_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID), now_ns;                    \
                                                                                                   \
		do {                                                                               \
			COMPUTE(operator);                                                         \
			now_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);                                \
		} while (now_ns < end_ns);                                                         \
		return now_ns - start_ns;                                                          \
	}

#endif
