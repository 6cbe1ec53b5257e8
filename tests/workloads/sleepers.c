/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that sleep since before the recording, each at the end of a known chain of calls:
 * run_sleeper, then call_deeper as often as the thread's name says, then what it waits in.
 *
 *   sleepers            they sleep for ever
 *   sleepers wake       "go" sends each a signal that ends its wait; then they sleep elsewhere
 *   sleepers crowd N    N threads, all in the same place
 *
 * To be built without frame pointers: the callers are to be found without. "ready" is said once
 * all threads are asleep.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <ucontext.h>
#include "truth.h"

/* No clones with other names, and no knowledge of what a callee leaves alone. */
#define FRAME __attribute__((noipa))

enum {
	ALTERNATE_STACK_BYTES = 65536,
	LARGE_LOCALS_BYTES = 100000,
	CROWD_STACK_BYTES = 65536,
	CROWD_DEPTH = 5,
	UD2_BYTES = 2,
	MAX_SLEEPERS = 64,
};

static int silent[2], silent_epoll;
static sem_t never;
static atomic_int asleep_soon;
static atomic_int tids[MAX_SLEEPERS];

/* trap_at_entry stops at its very first instruction: one byte before is another function. */
void trap_at_entry(void);
__asm__(".text\n"
	".type before_trap, @function\n"
	"before_trap: .cfi_startproc\n nop\n ret\n .cfi_endproc\n"
	".size before_trap, . - before_trap\n"
	".type trap_at_entry, @function\n"
	"trap_at_entry: .cfi_startproc\n ud2\n ret\n .cfi_endproc\n"
	".size trap_at_entry, . - trap_at_entry\n");

static FRAME void wait_on_futex(void)
{
	int word = 1;

	system_call(SYS_futex, (long)&word, FUTEX_WAIT_PRIVATE, 1, 0);
}

static FRAME void wait_in_nanosleep(void)
{
	sleep_ns(LONGEST_LIFE_S * 1000000000LL);
}

static FRAME void wait_in_read(void)
{
	char byte;

	system_call(SYS_read, silent[0], (long)&byte, 1, 0);
}

static FRAME void wait_in_poll(void)
{
	struct pollfd one = { .fd = silent[0], .events = POLLIN };

	system_call(SYS_poll, (long)&one, 1, -1, 0);
}

static FRAME void wait_in_epoll(void)
{
	struct epoll_event event;

	system_call(SYS_epoll_wait, silent_epoll, (long)&event, 1, -1);
}

/* Its caller is far above the stack pointer. */
static FRAME void wait_with_large_locals(void)
{
	char large[LARGE_LOCALS_BYTES];

	system_call(SYS_read, silent[0], (long)large, 1, 0);
	__asm__ volatile("" : : "r"(large) : "memory");
}

static FRAME void wait_in_libc(void)
{
	while (sem_wait(&never) && errno != EINTR)
		;
	__asm__ volatile("");
}

/* The handler sleeps, on a stack of its own. */
static FRAME void wait_in_handler(void)
{
	stack_t stack = { .ss_sp = malloc(ALTERNATE_STACK_BYTES),
			  .ss_size = ALTERNATE_STACK_BYTES };

	if (sigaltstack(&stack, NULL))
		fail("sigaltstack");
	trap_at_entry();
	__asm__ volatile("");
}

static void handle_trap(int number, siginfo_t *info, void *context)
{
	ucontext_t *interrupted = context;
	char byte;

	system_call(SYS_read, silent[0], (long)&byte, 1, 0);
	interrupted->uc_mcontext.gregs[REG_RIP] += UD2_BYTES;
	(void)number, (void)info;
}

static void end_wait(int number)
{
	(void)number;
}

static FRAME void sleep_elsewhere(void)
{
	for (;;)
		system_call(SYS_pause, 0, 0, 0, 0);
}

static const struct {
	const char *name;
	void (*wait)(void);
} ways[] = {
	{ "futex", wait_on_futex }, { "nanosleep", wait_in_nanosleep },
	{ "read", wait_in_read },   { "poll", wait_in_poll },
	{ "epoll", wait_in_epoll }, { "large", wait_with_large_locals },
	{ "libc", wait_in_libc },   { "handler", wait_in_handler },
};
static const int depths[] = { 0, 7, 90 };

struct sleeper {
	void (*wait)(void);
	int depth;
	int index;
};

static FRAME void call_deeper(const struct sleeper *sleeper, int depth)
{
	if (depth)
		call_deeper(sleeper, depth - 1);
	else
		sleeper->wait();
	__asm__ volatile("" : : : "memory");
}

static FRAME void *run_sleeper(void *argument)
{
	const struct sleeper *sleeper = argument;

	if (sleeper->index < MAX_SLEEPERS)
		tids[sleeper->index] = (int)syscall(SYS_gettid);
	asleep_soon++;
	if (sleeper->depth)
		call_deeper(sleeper, sleeper->depth - 1);
	else
		sleeper->wait();
	sleep_elsewhere();
	return NULL;
}

static char state_of(int tid)
{
	char path[64], text[256] = "";
	FILE *file;

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", tid);
	file = fopen(path, "r");
	if (!file || !fgets(text, sizeof(text), file))
		fail(path);
	fclose(file);
	return strrchr(text, ')')[2];
}

static void wait_until_asleep(int count)
{
	while (asleep_soon < count)
		sleep_ns(MS);
	for (int i = 0; i < count && i < MAX_SLEEPERS; i++)
		while (state_of(tids[i]) != 'S')
			sleep_ns(MS);
}

static void crowd(int count)
{
	static struct sleeper same = { wait_on_futex, CROWD_DEPTH, MAX_SLEEPERS };
	pthread_attr_t attributes;
	pthread_t thread;

	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, CROWD_STACK_BYTES);
	for (int i = 0; i < count; i++)
		if (pthread_create(&thread, &attributes, run_sleeper, &same))
			fail("pthread_create");
	while (asleep_soon < count)
		sleep_ns(MS);
	ready_then_wait();
	done_then_stay();
}

int main(int argc, char **argv)
{
	static struct sleeper sleepers[MAX_SLEEPERS];
	struct sigaction trap = { .sa_sigaction = handle_trap,
				  .sa_flags = SA_SIGINFO | SA_ONSTACK };
	struct sigaction wake = { .sa_handler = end_wait };
	struct epoll_event event = { .events = EPOLLIN };
	pthread_t threads[MAX_SLEEPERS];
	char name[16];
	int count = 0;

	silent_epoll = epoll_create1(0);
	if (pipe(silent) || epoll_ctl(silent_epoll, EPOLL_CTL_ADD, silent[0], &event))
		fail("pipe");
	sem_init(&never, 0, 0);
	sigaction(SIGILL, &trap, NULL);
	sigaction(SIGUSR1, &wake, NULL);
	if (argc > 2)
		crowd(atoi(argv[2]));
	for (size_t way = 0; way < sizeof(ways) / sizeof(ways[0]); way++)
		for (size_t i = 0; i < sizeof(depths) / sizeof(depths[0]); i++, count++) {
			sleepers[count] = (struct sleeper){ ways[way].wait, depths[i], count };
			snprintf(name, sizeof(name), "%s-%d", ways[way].name, depths[i]);
			threads[count] = start_thread_named(name, run_sleeper, &sleepers[count]);
		}
	wait_until_asleep(count);
	ready_then_wait();
	for (int i = 0; argc > 1 && i < count; i++)
		pthread_kill(threads[i], SIGUSR1);
	for (int i = 0; argc > 1 && i < count; i++)
		while (state_of(tids[i]) != 'S')
			sleep_ns(MS);
	say("threads", count);
	done_then_stay();
	return 0;
}
