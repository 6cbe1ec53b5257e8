/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads and processes that come and go. The first argument says how:
 *
 *   churn    threads are made and joined, one after the other
 *   reuse    threads come and go under one and the same id (needs CAP_SYS_ADMIN)
 *   crowd    two thousand threads
 *   family   a child computes, calls exec, and computes on
 *   storm    500 processes a second, each of which calls exec and ends
 *   briefly  computes for 4 ms; does not wait for anyone
 *   first    computes before main(), then says as whom it runs; does not wait for anyone
 */
#define _GNU_SOURCE
#include <linux/sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include "truth.h"

enum {
	CHURNS = 101,
	LIVES = 41,
	NAPS_A_LIFE = 3,
	NAP_NS = 2 * MS,
	WORK_NS = MS / 2,
	CROWD = 2000,
	CROWD_STACK_BYTES = 64 << 10,
	FAMILY_CPU_NS = 200 * MS,
	BRIEF_CPU_NS = 4 * MS,
	FIRST_CPU_NS = 201 * MS, /* else the compiler makes one function of two */
	STORM = 1000,
	STORM_INTERVAL_NS = 2 * MS,
};

static volatile unsigned long sink;

/* No call of the C library: also for threads that share another's thread-local storage. */
static inline __attribute__((always_inline)) void compute_until(clockid_t clock, long long end_ns)
{
	struct timespec now;

	do {
		for (int step = 0; step < 20000; step++)
			sink += step;
		system_call(SYS_clock_gettime, clock, (long)&now, 0, 0);
	} while (now.tv_sec * 1000000000LL + now.tv_nsec < end_ns);
}

/* One short life. */

static NOINLINE void live_briefly(void)
{
	for (int i = 0; i < NAPS_A_LIFE; i++) {
		sleep_ns(NAP_NS);
		compute_until(CLOCK_THREAD_CPUTIME_ID, (i + 1) * WORK_NS);
	}
}

static void *brief(void *unused)
{
	live_briefly();
	return unused;
}

static void churn(void)
{
	long long start_ns = clock_ns(CLOCK_MONOTONIC);

	for (int i = 0; i < CHURNS; i++)
		pthread_join(start_thread_named("brief", brief, NULL), NULL);
	say("lives", CHURNS);
	say("wall_ns", clock_ns(CLOCK_MONOTONIC) - start_ns);
}

/* Threads made by hand, to choose their id. */

static void end_thread(void)
{
	live_briefly();
	system_call(SYS_exit, 0, 0, 0, 0);
}

static long start_thread_as(pid_t tid, volatile uint32_t *alive)
{
	static char stack[64 << 10] __attribute__((aligned(16)));
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
			 CLONE_SYSVSEM | CLONE_CHILD_CLEARTID,
		.child_tid = (uintptr_t)alive,
		.stack = (uintptr_t)stack,
		.stack_size = sizeof(stack),
		.set_tid = tid ? (uintptr_t)&tid : 0,
		.set_tid_size = tid ? 1 : 0,
	};
	long result = -1;

#ifdef __x86_64__
	__asm__ volatile("syscall\n\t"
			 "test %%rax, %%rax\n\t"
			 "jnz 1f\n\t"
			 "xor %%ebp, %%ebp\n\t"
			 "call *%[run]\n"
			 "1:"
			 : "=a"(result)
			 : "a"(SYS_clone3), "D"(&args), "S"(sizeof(args)), [run] "r"(end_thread)
			 : "rcx", "r11", "memory");
#endif
	return result;
}

static void reuse(void)
{
	volatile uint32_t alive;
	long long wall_ns = 0;
	long tid = 0, made;

	for (int i = 0; i < LIVES; i++) {
		long long start_ns = clock_ns(CLOCK_MONOTONIC);

		alive = 1;
		/* The id is taken until the kernel has buried the one before. */
		do
			made = start_thread_as((pid_t)tid, &alive);
		while (made == -17 /* EEXIST */ && !sched_yield());
		if (made < 0)
			fail("clone3");
		tid = made;
		while (alive)
			system_call(SYS_futex, (long)&alive, 0 /* FUTEX_WAIT */, 1, 0);
		wall_ns += clock_ns(CLOCK_MONOTONIC) - start_ns;
	}
	say("tid", tid);
	say("lives", LIVES);
	say("wall_ns", wall_ns);
}

/* Many at once. */

static int gate[2], passed[2], never[2];

static NOINLINE void sleep_in_crowd(void)
{
	for (int i = 0; i < NAPS_A_LIFE; i++)
		sleep_ns(NAP_NS);
}

static void *member(void *unused)
{
	read_byte(gate[0]);
	sleep_in_crowd();
	write_byte(passed[1]);
	read_byte(never[0]);
	return unused;
}

static void make_crowd(void)
{
	pthread_attr_t attributes;
	pthread_t thread;

	if (pipe(gate) || pipe(passed) || pipe(never))
		fail("pipe");
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, CROWD_STACK_BYTES);
	for (int i = 0; i < CROWD; i++)
		if (pthread_create(&thread, &attributes, member, NULL))
			fail("pthread_create");
}

static void crowd(void)
{
	for (int i = 0; i < CROWD; i++)
		write_byte(gate[1]);
	for (int i = 0; i < CROWD; i++)
		read_byte(passed[0]);
	say("threads", CROWD);
	say("sleeps", CROWD * NAPS_A_LIFE);
}

/* Processes. */

static NOINLINE void work_of_child(void)
{
	compute_until(CLOCK_THREAD_CPUTIME_ID, FAMILY_CPU_NS);
}

static NOINLINE void work_after_exec(void)
{
	compute_until(CLOCK_THREAD_CPUTIME_ID, 2LL * FAMILY_CPU_NS);
}

static void family(void)
{
	pid_t child = fork();

	if (!child) {
		work_of_child();
		execl("/proc/self/exe", "lives", "after-exec", NULL);
		fail("exec");
	}
	waitpid(child, NULL, 0);
	say("child", child);
	say("cpu_ns", FAMILY_CPU_NS);
}

static NOINLINE void spawn_nothing(void)
{
	pid_t child = vfork();

	if (!child) {
		execl("/proc/self/exe", "lives", "nothing", NULL);
		_exit(1);
	}
	waitpid(child, NULL, 0);
}

static void storm(void)
{
	struct timespec due;

	clock_gettime(CLOCK_MONOTONIC, &due);
	for (int i = 0; i < STORM; i++) {
		spawn_nothing();
		due.tv_nsec += STORM_INTERVAL_NS;
		if (due.tv_nsec >= 1000000000) {
			due.tv_nsec -= 1000000000;
			due.tv_sec++;
		}
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
	}
	say("processes", STORM);
}

static NOINLINE void work_briefly(void)
{
	compute_until(CLOCK_THREAD_CPUTIME_ID, BRIEF_CPU_NS);
}

static NOINLINE void work_before_main(void)
{
	/* Before its exec, the thread ran in somebody else's name. */
	compute_until(CLOCK_THREAD_CPUTIME_ID, clock_ns(CLOCK_THREAD_CPUTIME_ID) + FIRST_CPU_NS);
}

__attribute__((constructor)) static void before_main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "first"))
		work_before_main();
}

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "";

	if (!strcmp(how, "nothing"))
		return 0;
	if (!strcmp(how, "briefly")) {
		work_briefly();
		return 0;
	}
	if (!strcmp(how, "after-exec")) {
		work_after_exec();
		return 0;
	}
	if (!strcmp(how, "first")) {
		printf("uid %d gid %d home %s\n", getuid(), getgid(), getenv("HOME"));
		return argc > 2 ? atoi(argv[2]) : 0;
	}
	if (!strcmp(how, "crowd"))
		make_crowd();
	ready_then_wait();
	if (!strcmp(how, "churn"))
		churn();
	if (!strcmp(how, "reuse"))
		reuse();
	if (!strcmp(how, "crowd"))
		crowd();
	if (!strcmp(how, "family"))
		family();
	if (!strcmp(how, "storm"))
		storm();
	done_then_stay();
	return 0;
}
