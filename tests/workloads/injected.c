/* SPDX-License-Identifier: Apache-2.0 */
/* A library that tests load into programs: it counts how often its function is called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef STATIC_TLS
/* More than the dynamic loader keeps for libraries that want it at once. */
__thread char large[1 << 16] __attribute__((tls_model("initial-exec")));
#endif

static volatile int begun;

/* But for those that an instruction raises, and for the two that glibc sends to all threads. */
static int blocks_signals(void)
{
	uint64_t mask = 0;

	syscall(SYS_rt_sigprocmask, SIG_BLOCK, NULL, &mask, sizeof mask);
	return mask >> (SIGTERM - 1) & 1 && mask >> (SIGALRM - 1) & 1 &&
	       !(mask >> (SIGSEGV - 1) & 1) && !(mask >> 31 & 3);
}

/* Each time that it is loaded, in the file that the environment names. */
static void note(void)
{
	const char *path = getenv("INJECTED_NOTES");
	int fd = path ? open(path, O_WRONLY | O_APPEND | O_CLOEXEC) : -1;

	if (fd >= 0) {
		(void)!write(fd, blocks_signals() ? "loaded\n" : "signals\n",
			     blocks_signals() ? 7 : 8);
		close(fd);
	}
}

__attribute__((constructor)) static void begin(void)
{
	begun = 1;
	note();
#ifdef SLOW
	usleep(3000000);
#endif
#ifdef STATIC_TLS
	large[0] = 1;
#endif
}

/* The number of the call, over 1,000 where something is not as it has to be. */
int injected_entry(void)
{
	static int calls;

	calls++;
	if (!begun || !blocks_signals() || ((uintptr_t)__builtin_frame_address(0) & 15))
		return 1000 + calls;
	return calls;
}

int injected_sleep(void)
{
	return usleep(200000);
}
