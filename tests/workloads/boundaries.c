/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads whose intervals cross the boundaries of windows in every way, until its input ends: some
 * sleep through all of them, some switch a thousand times a second, one computes, and threads and
 * processes come and go.
 */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static volatile int is_over;
static pthread_barrier_t begun;

static void sleep_ns(long ns)
{
	struct timespec left = { ns / 1000000000, ns % 1000000000 };

	nanosleep(&left, NULL);
}

static void *sleeper(void *unused)
{
	prctl(PR_SET_NAME, "sleeper");
	pthread_barrier_wait(&begun);
	for (;;)
		pause();
	return unused;
}

static void *switcher(void *unused)
{
	prctl(PR_SET_NAME, "switcher");
	pthread_barrier_wait(&begun);
	while (!is_over)
		sleep_ns(700000);
	return unused;
}

static void *burner(void *unused)
{
	prctl(PR_SET_NAME, "burner");
	while (!is_over)
		;
	return unused;
}

static void *brief(void *unused)
{
	sleep_ns(3000000);
	return unused;
}

int main(void)
{
	struct pollfd input = { .fd = 0, .events = POLLIN };
	pthread_t thread;
	char line[16];
	int n;

	pthread_barrier_init(&begun, NULL, 5);
	for (n = 0; n < 4; n++)
		pthread_create(&thread, NULL, n < 2 ? sleeper : switcher, NULL);
	pthread_barrier_wait(&begun);
	pthread_create(&thread, NULL, burner, NULL);
	puts("ready");
	fflush(stdout);
	if (read(0, line, sizeof(line)) <= 0)
		return 1;
	while (!poll(&input, 1, 0)) {
		pid_t child = fork();

		if (!child) {
			sleep_ns(2000000);
			_exit(0);
		}
		waitpid(child, NULL, 0);
		pthread_create(&thread, NULL, brief, NULL);
		pthread_join(thread, NULL);
	}
	is_over = 1;
	return 0;
}
