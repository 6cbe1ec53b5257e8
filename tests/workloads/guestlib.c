/* SPDX-License-Identifier: Apache-2.0 */
/* A library of which the machine outside a guest's namespace knows nothing. */
#define _GNU_SOURCE
#include "guestlib.h"
#include "truth.h"

static volatile unsigned long sink;

NOINLINE void compute_in_library(void)
{
	long long end_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + GUEST_CPU_NS;

	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < end_ns)
		for (int step = 0; step < 100000; step++)
			sink += step;
}
