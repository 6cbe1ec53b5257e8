/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 300 threads that rest for 1.1 s again and again, until the program is ended: half of them, named
 * "here", in one call, and the others, named "there", in another.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum {
	THREADS = 300,
	REST_MS = 1100,
};

static void *rest_here(void *unused)
{
	struct timespec rest = { REST_MS / 1000, REST_MS % 1000 * 1000000L };

	(void)unused;
	for (;;)
		nanosleep(&rest, NULL);
}

static void *rest_there(void *unused)
{
	(void)unused;
	for (;;)
		poll(NULL, 0, REST_MS);
}

int main(void)
{
	for (int number = 0; number < THREADS; number++) {
		pthread_t thread;
		int is_there = number % 2;

		if (pthread_create(&thread, NULL, is_there ? rest_there : rest_here, NULL))
			return 1;
		pthread_setname_np(thread, is_there ? "there" : "here");
		usleep(REST_MS * 1000 / THREADS); /* not all at once */
	}
	for (;;)
		pause();
}
