/* SPDX-License-Identifier: Apache-2.0 */
/* Computes in itself and in a library; to be run where its files are hard to find. */
#define _GNU_SOURCE
#include "guestlib.h"
#include "truth.h"

static volatile unsigned long sink;

static NOINLINE void compute_in_program(void)
{
	long long end_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + GUEST_CPU_NS;

	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < end_ns)
		for (int step = 0; step < 100000; step++)
			sink -= step;
}

int main(void)
{
	ready_then_wait();
	compute_in_program();
	compute_in_library();
	say("cpu_ns", GUEST_CPU_NS);
	done_then_stay();
	return 0;
}
