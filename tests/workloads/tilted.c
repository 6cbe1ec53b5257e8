/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two functions that share the CPU time of main as its argument says: the first has so many
 * hundredths. Two runs of it are a program before and after a change.
 */
#define _GNU_SOURCE
#include "truth.h"
#include "spend.h"

/* More seconds than a comparison needs to tell a change from chance. */
#define CPU_NS (10000LL * MS)

SPENDER(spend_first, +=)
SPENDER(spend_second, -=)

int main(int argc, char **argv)
{
	long long percent = argc > 1 ? atoi(argv[1]) : 50, first_ns = 0, second_ns = 0;
	unsigned random = 2463534242u;

	ready_then_wait();
	/* Turns of random length (xorshift, same seed): the sampling clock cannot fall in step. */
	while (first_ns + second_ns < CPU_NS) {
		long long turn_ns;

		random ^= random << 13;
		random ^= random >> 17;
		random ^= random << 5;
		turn_ns = 10 * MS + random % (40 * MS);
		first_ns +=
			spend_first(clock_ns(CLOCK_THREAD_CPUTIME_ID) + turn_ns * percent / 100);
		second_ns += spend_second(clock_ns(CLOCK_THREAD_CPUTIME_ID) +
					  turn_ns * (100 - percent) / 100);
	}
	say("spend_first", first_ns);
	say("spend_second", second_ns);
	done_then_stay();
	return 0;
}
