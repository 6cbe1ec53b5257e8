/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the workloads of the truth tests share. Each says "ready", waits for a line on standard
 * input (the recording is attached by then), does its work, prints what it measured itself as
 * "NAME VALUE" lines and then "done", and stays until its standard input is closed.
 *
 * Where a stack has to lead to a function that waits, the function makes the system call itself:
 * the C library of most distributions has no frame pointers, and hides its callers.
 */
#ifndef TRUTH_H
#define TRUTH_H

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline))

/* A test that fails must not leave this behind. */
enum { LONGEST_LIFE_S = 100, MS = 1000000 };

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static inline long long clock_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline __attribute__((always_inline)) long system_call(long number, long a, long b, long c,
							      long d)
{
#ifdef __x86_64__
	register long fourth __asm__("r10") = d;
	long result;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth)
			 : "rcx", "r11", "memory");
	return result;
#else
	return syscall(number, a, b, c, d);
#endif
}

static inline __attribute__((always_inline)) void sleep_ns(long long ns)
{
	struct timespec interval = { ns / 1000000000, ns % 1000000000 };

	system_call(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, (long)&interval, 0);
}

static inline __attribute__((always_inline)) void read_byte(int fd)
{
	char byte;

	if (system_call(SYS_read, fd, (long)&byte, 1, 0) != 1)
		fail("read");
}

static inline __attribute__((always_inline)) void write_byte(int fd)
{
	if (system_call(SYS_write, fd, (long)"x", 1, 0) != 1)
		fail("write");
}

static inline void say(const char *name, long long value)
{
	printf("%s %lld\n", name, value);
	fflush(stdout);
}

static inline void ready_then_wait(void)
{
	alarm(LONGEST_LIFE_S);
	puts("ready");
	fflush(stdout);
	if (getchar() == EOF)
		exit(0);
}

static inline void done_then_stay(void)
{
	puts("done");
	fflush(stdout);
	while (getchar() != EOF)
		;
}

/* What a thread measures of itself between two points. */
struct meter {
	long long wall_ns, cpu_ns, sleeps;
};

static inline struct meter meter_now(void)
{
	struct rusage usage;

	getrusage(RUSAGE_THREAD, &usage);
	return (struct meter){ clock_ns(CLOCK_MONOTONIC), clock_ns(CLOCK_THREAD_CPUTIME_ID),
			       usage.ru_nvcsw };
}

static inline void meter_since(struct meter *meter)
{
	struct meter now = meter_now();

	*meter = (struct meter){ now.wall_ns - meter->wall_ns, now.cpu_ns - meter->cpu_ns,
				 now.sleeps - meter->sleeps };
}

static inline void say_meter(const char *name, const struct meter *meter)
{
	printf("%s.wall_ns %lld\n%s.cpu_ns %lld\n%s.sleeps %lld\n", name, meter->wall_ns, name,
	       meter->cpu_ns, name, meter->sleeps);
	fflush(stdout);
}

static inline __attribute__((always_inline)) void bind_to_cpu(int cpu)
{
	cpu_set_t one;

	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	if (system_call(SYS_sched_setaffinity, 0, sizeof(one), (long)&one, 0))
		fail("sched_setaffinity");
}

static inline pthread_t start_thread_named(const char *name, void *(*run)(void *), void *argument)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, run, argument))
		fail("pthread_create");
	pthread_setname_np(thread, name);
	return thread;
}

#endif
