/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A toy model server, to be recorded: every way in which a service spends its time, each under a
 * function that says so.
 *
 *   client      writes a burst of requests into a pipe, then sleeps
 *   tokenizer   waits for the pipe, burns CPU in tokenize(), fills the workers' pipe
 *   worker x2   wait for that pipe, run forward_pass(), then update_statistics() under a lock;
 *               both are bound to one CPU, as in a container with a limit, and so wait for it
 *   checkpoint  holds that lock while it packs, writes and syncs a file
 *   monitor     polls a descriptor on which nothing ever comes
 *
 * usage: serving [SECONDS [INTERVAL_MS]]    (5 without; between two bursts, 40 without: half a CPU)
 */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "frames.h"

enum {
	REQUEST_BYTES = 2048,
	MATRIX_SIZE = 208,
	CHECKPOINT_BYTES = 4 << 20,
	CHUNK_BYTES = 64 << 10,
	BURST_REQUESTS = 4, /* both workers have something to do at once */
	CHECKPOINT_INTERVAL_MS = 150,
	MONITOR_INTERVAL_MS = 250,
};

/* Less than PIPE_BUF: written and read whole, also by two readers of one pipe. */
struct request {
	char text[REQUEST_BYTES];
	unsigned token_sum;
};

static struct {
	pthread_mutex_t lock;
	double histogram[4096];
	unsigned long served;
} statistics = { .lock = PTHREAD_MUTEX_INITIALIZER };

static int request_pipe[2], work_pipe[2], silent_pipe[2];
static atomic_int stopping;
static long burst_interval_ms = 40;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

/*
 * What waits in libc stands alone: libc has no frame pointers, so that a walk along them misses
 * the caller of its functions, which should then be none of those with a telling name.
 */

static NOINLINE void sleep_ms(long ms)
{
	struct timespec interval = { ms / 1000, ms % 1000 * 1000000 };

	nanosleep(&interval, NULL);
}

static NOINLINE long checked_read(int fd, void *bytes, size_t size)
{
	long got = read(fd, bytes, size);

	if (got < 0)
		fail("read");
	return got;
}

static NOINLINE void checked_write(int fd, const void *bytes, size_t size)
{
	if (write(fd, bytes, size) != (long)size)
		fail("write");
}

static NOINLINE void checked_sync(int fd)
{
	if (fdatasync(fd))
		fail("fdatasync");
}

static NOINLINE int readable_within(int fd, int ms)
{
	struct pollfd wanted = { .fd = fd, .events = POLLIN };

	return poll(&wanted, 1, ms) > 0;
}

static NOINLINE void lock(pthread_mutex_t *mutex)
{
	if (pthread_mutex_lock(mutex))
		fail("pthread_mutex_lock");
}

/* The client. */

static NOINLINE void send_request(unsigned number)
{
	char text[REQUEST_BYTES];

	for (unsigned i = 0; i < sizeof(text); i++)
		text[i] = (char)(' ' + (i * 7 + number * 13) % 90);
	checked_write(request_pipe[1], text, sizeof(text));
}

static void *client(void *unused)
{
	for (unsigned number = 1; !stopping; number++) {
		send_request(number);
		if (number % BURST_REQUESTS == 0)
			sleep_ms(burst_interval_ms);
	}
	close(request_pipe[1]);
	return unused;
}

/* The tokenizer. */

static NOINLINE int read_request(struct request *request)
{
	return checked_read(request_pipe[0], request->text, sizeof(request->text)) > 0;
}

static NOINLINE unsigned hash_token(const char *text, unsigned length)
{
	unsigned hash = 2166136261u;

	KEEP_FRAME();
	for (unsigned i = 0; i < length; i++)
		hash = (hash ^ (unsigned char)text[i]) * 16777619u;
	return hash;
}

static NOINLINE void tokenize(struct request *request)
{
	request->token_sum = 0;
	for (unsigned length = 1; length <= 1024; length *= 2)
		for (unsigned start = 0; start + length <= REQUEST_BYTES; start += 2)
			request->token_sum += hash_token(request->text + start, length);
}

static NOINLINE void hand_to_workers(const struct request *request)
{
	checked_write(work_pipe[1], request, sizeof(*request));
}

static void *tokenizer(void *unused)
{
	struct request request;

	while (read_request(&request)) {
		tokenize(&request);
		hand_to_workers(&request);
	}
	close(work_pipe[1]);
	return unused;
}

/* The workers. */

static NOINLINE int wait_for_work(struct request *request)
{
	return checked_read(work_pipe[0], request, sizeof(*request)) > 0;
}

struct layer {
	float weights[MATRIX_SIZE][MATRIX_SIZE];
	float inputs[MATRIX_SIZE][MATRIX_SIZE];
	float outputs[MATRIX_SIZE][MATRIX_SIZE];
};

static NOINLINE void matrix_multiply(struct layer *layer)
{
	KEEP_FRAME();
	for (int row = 0; row < MATRIX_SIZE; row++)
		for (int column = 0; column < MATRIX_SIZE; column++) {
			float sum = 0;

			for (int i = 0; i < MATRIX_SIZE; i++)
				sum += layer->weights[row][i] * layer->inputs[i][column];
			layer->outputs[row][column] = sum;
		}
}

static NOINLINE void layer_norm(struct layer *layer)
{
	KEEP_FRAME();
	for (int pass = 0; pass < 12; pass++)
		for (int row = 0; row < MATRIX_SIZE; row++) {
			float sum = 1e-6f;

			for (int column = 0; column < MATRIX_SIZE; column++)
				sum += layer->outputs[row][column] * layer->outputs[row][column];
			for (int column = 0; column < MATRIX_SIZE; column++)
				layer->inputs[row][column] = layer->outputs[row][column] / sum;
		}
}

static NOINLINE void forward_pass(struct layer *layer, const struct request *request)
{
	for (int i = 0; i < MATRIX_SIZE; i++)
		layer->inputs[i][i] = (float)((request->token_sum >> i % 24) & 255);
	matrix_multiply(layer);
	layer_norm(layer);
	matrix_multiply(layer);
}

static NOINLINE void update_statistics(const struct layer *layer)
{
	lock(&statistics.lock);
	for (int pass = 0; pass < 20; pass++)
		for (int i = 0; i < 4096; i++)
			statistics.histogram[i] += layer->outputs[i % MATRIX_SIZE][i / MATRIX_SIZE];
	statistics.served++;
	pthread_mutex_unlock(&statistics.lock);
}

static void *worker(void *unused)
{
	struct layer *layer = calloc(1, sizeof(*layer));
	struct request request;
	cpu_set_t one;

	if (!layer)
		fail("calloc");
	/* Not bound where CPU 0 is not ours to use: then there is less waiting for it to be seen. */
	CPU_ZERO(&one);
	CPU_SET(0, &one);
	pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
	for (int i = 0; i < MATRIX_SIZE * MATRIX_SIZE; i++)
		layer->weights[i / MATRIX_SIZE][i % MATRIX_SIZE] = (float)(i % 17) / 17;
	while (wait_for_work(&request)) {
		forward_pass(layer, &request);
		update_statistics(layer);
	}
	free(layer);
	return unused;
}

/* The checkpoint writer and the monitor. */

static NOINLINE void write_checkpoint(int fd, const char *bytes)
{
	if (lseek(fd, 0, SEEK_SET))
		fail("lseek");
	for (int written = 0; written < CHECKPOINT_BYTES; written += CHUNK_BYTES)
		checked_write(fd, bytes + written, CHUNK_BYTES);
	checked_sync(fd);
}

static NOINLINE void pack_statistics(char *bytes)
{
	unsigned state = 1;

	KEEP_FRAME();
	for (int i = 0; i < CHECKPOINT_BYTES; i++) {
		state = state * 1664525u + (unsigned)statistics.histogram[i % 4096];
		bytes[i] = (char)(state >> 24);
	}
}

static NOINLINE void save_under_lock(int fd, char *bytes)
{
	lock(&statistics.lock);
	pack_statistics(bytes);
	write_checkpoint(fd, bytes);
	pthread_mutex_unlock(&statistics.lock);
}

static void *checkpoint(void *unused)
{
	char *bytes = calloc(1, CHECKPOINT_BYTES);
	FILE *file = tmpfile();

	if (!bytes || !file)
		fail("checkpoint");
	while (!stopping) {
		sleep_ms(CHECKPOINT_INTERVAL_MS);
		save_under_lock(fileno(file), bytes);
	}
	fclose(file);
	free(bytes);
	return unused;
}

static NOINLINE void wait_for_alert(void)
{
	if (readable_within(silent_pipe[0], MONITOR_INTERVAL_MS))
		fail("monitor");
}

static void *monitor(void *unused)
{
	while (!stopping)
		wait_for_alert();
	return unused;
}

static const struct {
	const char *name;
	void *(*run)(void *);
} roles[] = {
	{ "worker-1", worker },	      { "worker-2", worker }, { "tokenizer", tokenizer },
	{ "checkpoint", checkpoint }, { "monitor", monitor }, { "client", client },
};

int main(int argc, char **argv)
{
	enum { ROLES = sizeof(roles) / sizeof(roles[0]) };
	long seconds = argc > 1 ? atol(argv[1]) : 5;
	pthread_t threads[ROLES];

	if (argc > 2)
		burst_interval_ms = atol(argv[2]);
	if (pipe(request_pipe) || pipe(work_pipe) || pipe(silent_pipe))
		fail("pipe");
	for (int i = 0; i < ROLES; i++) {
		if (pthread_create(&threads[i], NULL, roles[i].run, NULL))
			fail("pthread_create");
		pthread_setname_np(threads[i], roles[i].name);
	}
	sleep_ms(seconds * 1000);
	stopping = 1;
	for (int i = 0; i < ROLES; i++)
		pthread_join(threads[i], NULL);
	printf("served %lu requests in %ld s\n", statistics.served, seconds);
	return 0;
}
