/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What bench records: stacks of a known depth, with frame pointers.
 *
 *   busy spin DEPTH STEPS    waits for a line, computes STEPS steps DEPTH calls deep, and prints
 *                            the seconds that took
 *   busy loop DEPTH          the same for ever, at once
 *   busy turns DEPTH US CPU  two processes on one CPU, DEPTH calls deep; each computes for US
 *                            microseconds and hands over to the other through a pipe, for ever
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

static volatile unsigned long sink;

static double now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec * 1e-9;
}

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static __attribute__((noinline)) void compute(long steps)
{
	for (long step = 0; step < steps; step++)
		sink += step;
}

struct job {
	void (*run)(struct job *job);
	long steps;
	double seconds;
	int from;
	int to;
};

static __attribute__((noinline)) void descend(struct job *job, int depth)
{
	if (depth > 1)
		descend(job, depth - 1);
	else
		job->run(job);
	sink++; /* keeps this frame on the stack */
}

static __attribute__((noinline)) void spin(struct job *job)
{
	double start_s = now_s();

	compute(job->steps);
	job->seconds = now_s() - start_s;
}

static __attribute__((noinline)) void turns(struct job *job)
{
	char token = 0;

	while (read(job->from, &token, 1) == 1) {
		double end_s = now_s() + job->seconds;

		while (job->seconds > 0 && now_s() < end_s)
			compute(1000);
		if (write(job->to, &token, 1) != 1)
			return;
	}
}

static void spin_once(int depth, long steps)
{
	struct job job = { .run = spin, .steps = steps };

	puts("ready");
	fflush(stdout);
	getchar();
	descend(&job, depth);
	printf("%.6f\n", job.seconds);
}

static __attribute__((noinline)) void loop(struct job *job)
{
	for (;;)
		compute(job->steps);
}

static void take_turns(int depth, double seconds, int cpu)
{
	struct job job = { .run = turns, .seconds = seconds };
	cpu_set_t cpus;
	int there[2], back[2];

	CPU_ZERO(&cpus);
	CPU_SET(cpu, &cpus);
	if (sched_setaffinity(0, sizeof(cpus), &cpus) || pipe(there) || pipe(back))
		fail("busy turns");
	puts("ready");
	fflush(stdout);
	if (fork()) {
		job.from = back[0];
		job.to = there[1];
		if (write(there[1], "", 1) != 1)
			fail("write");
	} else {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		job.from = there[0];
		job.to = back[1];
	}
	descend(&job, depth);
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "spin"))
		spin_once(atoi(argv[2]), atol(argv[3]));
	else if (argc == 3 && !strcmp(argv[1], "loop"))
		descend(&(struct job){ .run = loop, .steps = 1000000 }, atoi(argv[2]));
	else if (argc == 5 && !strcmp(argv[1], "turns"))
		take_turns(atoi(argv[2]), atof(argv[3]) * 1e-6, atoi(argv[4]));
	else
		return 2;
	return 0;
}
