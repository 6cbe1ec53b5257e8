/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Four threads with names of their own, which rest for a millisecond each and end before the program
 * does.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <unistd.h>

enum {
	THREADS = 4,
	REST_US = 1000,
};

static void *rest(void *name)
{
	pthread_setname_np(pthread_self(), name);
	usleep(REST_US);
	return NULL;
}

int main(void)
{
	static char *names[THREADS] = { "worker-1", "worker-2", "worker-3", "worker-4" };
	pthread_t threads[THREADS];

	for (int number = 0; number < THREADS; number++)
		if (pthread_create(&threads[number], NULL, rest, names[number]))
			return 1;
	for (int number = 0; number < THREADS; number++)
		pthread_join(threads[number], NULL);
	return 0;
}
