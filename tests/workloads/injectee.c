/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program into which libraries are loaded, and which notices if that changes anything for it.
 *
 * injectee [alone] [ANSWER=CALL] KIND [KIND[:COUNT]...]: each kind is so many threads that do one thing again and
 * again, and check it; the first kind is the main thread's. Prints "ready", and "OK" with the rounds
 * of each kind once its input ends, or "BAD" and what was not as it has to be.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what)                                                                                \
	do {                                                                                       \
		if (!(what))                                                                       \
			bad(__func__, #what, __LINE__);                                            \
	} while (0)
#define MS 1000000LL

extern char **environ;
static volatile int ending;
static long rounds[32];

static void bad(const char *where, const char *what, int line)
{
	printf("BAD %s: %s (line %d), errno %d\n", where, what, line, errno);
	fflush(stdout);
	_exit(3);
}

static int64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 * MS + t.tv_nsec;
}

/* All registers that calls may change, over a long loop: each has its own value. */
static void registers(void)
{
	unsigned char in[16][64], out[16][64];
	uint64_t sum = 0, loops = 300000;
	unsigned int old;
	double x87 = 1.25, x87_out;
	unsigned int mxcsr = 0x7f80, mxcsr_out; /* rounds towards zero */

	for (int i = 0; i < 16; i++)
		for (int j = 0; j < 64; j++)
			in[i][j] = 16 * i + j;
	__asm__("stmxcsr %0" : "=m"(old));
	if (__builtin_cpu_supports("avx512f")) {
		__asm__ volatile("ldmxcsr %[mxcsr]\n\t"
				 "fldl %[x87]\n\t"
				 "vmovdqu64 (%[in]), %%zmm0\n\t"
				 "vmovdqu64 64(%[in]), %%zmm7\n\t"
				 "vmovdqu64 128(%[in]), %%zmm15\n\t"
				 "vmovdqu64 192(%[in]), %%zmm31\n\t"
				 "movl $0x5a5a, %%eax\n\t"
				 "kmovw %%eax, %%k3\n\t"
				 "movq $-77, -128(%%rsp)\n\t"
				 "1: addq %[loops], %[sum]\n\t"
				 "decq %[loops]\n\t"
				 "jnz 1b\n\t"
				 "addq -128(%%rsp), %[sum]\n\t"
				 "kmovw %%k3, %%eax\n\t"
				 "addq %%rax, %[sum]\n\t"
				 "vmovdqu64 %%zmm0, (%[out])\n\t"
				 "vmovdqu64 %%zmm7, 64(%[out])\n\t"
				 "vmovdqu64 %%zmm15, 128(%[out])\n\t"
				 "vmovdqu64 %%zmm31, 192(%[out])\n\t"
				 "fstpl %[x87_out]\n\t"
				 "stmxcsr %[mxcsr_out]\n\t"
				 "ldmxcsr %[old]"
				 : [sum] "+r"(sum), [loops] "+r"(loops), [x87_out] "=m"(x87_out),
				   [mxcsr_out] "=m"(mxcsr_out)
				 : [in] "r"(in), [out] "r"(out), [x87] "m"(x87), [mxcsr] "m"(mxcsr),
				   [old] "m"(old)
				 : "rax", "memory", "cc", "xmm0", "xmm7", "xmm15");
		CHECK(sum == 45000150000ull - 77 + 0x5a5a);
		CHECK(!memcmp(in, out, 4 * 64));
	} else {
		__asm__ volatile("ldmxcsr %[mxcsr]\n\t"
				 "fldl %[x87]\n\t"
				 "movdqu (%[in]), %%xmm0\n\t"
				 "movdqu 64(%[in]), %%xmm15\n\t"
				 "movq $-77, -128(%%rsp)\n\t"
				 "1: addq %[loops], %[sum]\n\t"
				 "decq %[loops]\n\t"
				 "jnz 1b\n\t"
				 "addq -128(%%rsp), %[sum]\n\t"
				 "movdqu %%xmm0, (%[out])\n\t"
				 "movdqu %%xmm15, 64(%[out])\n\t"
				 "fstpl %[x87_out]\n\t"
				 "stmxcsr %[mxcsr_out]\n\t"
				 "ldmxcsr %[old]"
				 : [sum] "+r"(sum), [loops] "+r"(loops), [x87_out] "=m"(x87_out),
				   [mxcsr_out] "=m"(mxcsr_out)
				 : [in] "r"(in), [out] "r"(out), [x87] "m"(x87), [mxcsr] "m"(mxcsr),
				   [old] "m"(old)
				 : "memory", "cc", "xmm0", "xmm15");
		CHECK(sum == 45000150000ull - 77);
		CHECK(!memcmp(in[0], out[0], 16) && !memcmp(in[1], out[1], 16));
	}
	CHECK(x87_out == x87);
	CHECK((mxcsr_out & 0xffc0) == (mxcsr & 0xffc0));
}

/* Sums of functions of libm, which keep values in registers across calls. */
static void compute(void)
{
	uint64_t state = 88172645463325252ull, sum = 0;
	double series = 0;

	for (int i = 1; i < 20000; i++) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		sum += state;
		series += 1.0 / i / i;
	}
	CHECK(sum == 17772275080691963606ull);
	CHECK(series > 1.64488 && series < 1.64489);
}

static void nap(void)
{
	struct timespec t = { 0, 20 * MS };
	int64_t begun = now_ns();

	errno = 7;
	CHECK(syscall(SYS_nanosleep, &t, NULL) == 0);
	CHECK(errno == 7);
	CHECK(now_ns() - begun >= 20 * MS);
}

static void polls(void)
{
	struct pollfd none = { .fd = -1 };
	int64_t begun = now_ns();

	CHECK(poll(&none, 1, 20) == 0);
	CHECK(now_ns() - begun >= 20 * MS);
}

static void selects(void)
{
	struct timespec t = { 0, 20 * MS };
	sigset_t mask;
	int64_t begun = now_ns();

	sigfillset(&mask);
	CHECK(pselect(0, NULL, NULL, NULL, &t, &mask) == 0);
	CHECK(now_ns() - begun >= 20 * MS);
	pthread_sigmask(SIG_BLOCK, NULL, &mask);
	CHECK(!sigismember(&mask, SIGUSR1));
}

static void epolls(void)
{
	struct epoll_event event;
	int fd = epoll_create1(0);
	int64_t begun = now_ns();

	CHECK(epoll_wait(fd, &event, 1, 20) == 0);
	CHECK(now_ns() - begun >= 20 * MS);
	close(fd);
}

/* A receive with a timeout ends with EINTR for a signal, whatever that does. */
static void receives(void)
{
	struct timeval timeout = { .tv_usec = 20000 };
	int64_t begun = now_ns();
	int ends[2];
	char byte;

	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
	CHECK(!setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout));
	CHECK(recv(ends[0], &byte, 1, 0) == -1 && errno == EAGAIN);
	CHECK(now_ns() - begun >= 19 * MS); /* jiffies */
	close(ends[0]);
	close(ends[1]);
}

/* glibc has all threads do it, and waits for each of them. */
static void ids(void)
{
	CHECK(!setegid(getegid()));
	usleep(500);
}

/* Memory that is written to for the first time, which a handler hears of. */
static char *guarded;

static void unguard(int number)
{
	(void)number;
	mprotect(guarded, 4096, PROT_READ | PROT_WRITE);
}

static void guard(void)
{
	signal(SIGSEGV, unguard);
	if (!guarded)
		guarded = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(!mprotect(guarded, 4096, PROT_READ));
	*(volatile char *)guarded = 1;
	usleep(500);
}

static void *writes(void *argument)
{
	int fd = (int)(intptr_t)argument;

	for (int i = 0; i < 20; i++) {
		usleep(2000);
		CHECK(write(fd, &i, sizeof i) == sizeof i);
	}
	return NULL;
}

static void reads(void)
{
	int ends[2], number;
	pthread_t writer;

	CHECK(!pipe(ends));
	CHECK(!pthread_create(&writer, NULL, writes, (void *)(intptr_t)ends[1]));
	for (int i = 0; i < 20; i++) {
		CHECK(read(ends[0], &number, sizeof number) == sizeof number);
		CHECK(number == i);
	}
	pthread_join(writer, NULL);
	close(ends[0]);
	close(ends[1]);
}

static void waits(void)
{
	pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
	pthread_cond_t never = PTHREAD_COND_INITIALIZER;
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_nsec += 20 * MS;
	until.tv_sec += until.tv_nsec / (1000 * MS);
	until.tv_nsec %= 1000 * MS;
	pthread_mutex_lock(&mutex);
	CHECK(pthread_cond_timedwait(&never, &mutex, &until) == ETIMEDOUT);
	pthread_mutex_unlock(&mutex);
}

static void mallocs(void)
{
	static __thread unsigned int seed;
	unsigned char *blocks[64];
	size_t sizes[64];

	for (int i = 0; i < 64; i++) {
		sizes[i] = 1 + rand_r(&seed) % (i % 8 ? 3000 : 300000);
		blocks[i] = malloc(sizes[i]);
		memset(blocks[i], i, sizes[i]);
	}
	for (int i = 0; i < 64; i++) {
		for (size_t j = 0; j < sizes[i]; j += 97)
			CHECK(blocks[i][j] == i);
		free(blocks[i]);
	}
}

static void loads(void)
{
	void *library = dlopen("libutil.so.1", RTLD_NOW);

	CHECK(library);
	CHECK(dlsym(library, "no such symbol") == NULL);
	CHECK(!dlclose(library));
}

static void forks(void)
{
	int status;
	pid_t child = fork();

	if (!child)
		_exit(7);
	CHECK(child > 0);
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

static void vforks(void)
{
	char *arguments[] = { "sleep", "0.02", NULL };
	int status;
	pid_t child;

	CHECK(!posix_spawnp(&child, "sleep", NULL, NULL, arguments, environ));
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void *nothing(void *argument)
{
	return argument;
}

static void threads(void)
{
	pthread_t thread;
	void *answer;

	CHECK(!pthread_create(&thread, NULL, nothing, &thread));
	CHECK(!pthread_join(thread, &answer));
	CHECK(answer == &thread);
}

/* With stacks that are too large to be kept: to join it is to unmap one. */
static void stacks(void)
{
	pthread_attr_t attributes;
	pthread_t thread;
	void *answer;

	CHECK(!pthread_attr_init(&attributes));
	CHECK(!pthread_attr_setstacksize(&attributes, 64 << 20));
	CHECK(!pthread_create(&thread, &attributes, nothing, &thread));
	usleep(500);
	CHECK(!pthread_join(thread, &answer));
	CHECK(answer == &thread);
}

/* Has the process's memory locked most of the time. */
static void map(void)
{
	void *memory = mmap(NULL, 8 << 20, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	CHECK(memory != MAP_FAILED);
	CHECK(!munmap(memory, 8 << 20));
}

static void handle(int number)
{
	(void)number;
	for (int64_t until = now_ns() + 5 * MS; now_ns() < until && !ending;)
		;
}

/* In a signal handler nearly all of the time. */
static void handler(void)
{
	signal(SIGUSR2, handle);
	pthread_kill(pthread_self(), SIGUSR2);
}

static volatile sig_atomic_t ticks;

static void tick(int number)
{
	(void)number;
	ticks++;
}

/* Signals that end a read: each of them has to. */
static void interrupted(void)
{
	static int ends[2];
	struct sigaction action = { .sa_handler = tick };
	char byte;

	if (!ends[1]) {
		CHECK(!pipe(ends));
		sigaction(SIGRTMIN, &action, NULL);
	}
	struct sigevent event = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN };
	struct itimerspec when = { .it_value.tv_nsec = 3 * MS, .it_interval.tv_nsec = 50 * MS };
	timer_t timer;

	event._sigev_un._tid = gettid();
	CHECK(!timer_create(CLOCK_MONOTONIC, &event, &timer));
	CHECK(!timer_settime(timer, 0, &when, NULL));
	CHECK(read(ends[0], &byte, 1) == -1 && errno == EINTR);
	timer_delete(timer);
}

static void rests(void)
{
	usleep(1000);
}

/* A child that uses the memory of this process for a while, in which its parent waits. */
static void lends(void)
{
	pid_t child = vfork();

	if (!child) {
		usleep(500000);
		_exit(0);
	}
	CHECK(waitpid(child, NULL, 0) == child);
}

/* With stuckmalloc.c it never comes back. */
static void stuck(void)
{
	void *volatile block = malloc(77777);

	free(block);
}

static void strict(void)
{
	CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT));
	for (;;)
		;
}

static const struct {
	const char *name;
	void (*act)(void);
} kinds[] = {
	{ "registers", registers }, { "compute", compute }, { "nap", nap },
	{ "poll", polls },	    { "select", selects },  { "epoll", epolls },
	{ "read", reads },	    { "wait", waits },	    { "malloc", mallocs },
	{ "load", loads },	    { "fork", forks },	    { "vfork", vforks },
	{ "thread", threads },	    { "handler", handler }, { "interrupted", interrupted },
	{ "rest", rests },	    { "stuck", stuck },	    { "strict", strict },
	{ "lend", lends },	    { "stacks", stacks },   { "map", map },
	{ "receive", receives },    { "ids", ids },	    { "guard", guard },
};

#define KINDS (sizeof kinds / sizeof *kinds)

static void *repeat(void *argument)
{
	size_t kind = (size_t)argument;

	while (!ending) {
		kinds[kind].act();
		__atomic_fetch_add(&rounds[kind], 1, __ATOMIC_RELAXED);
	}
	return NULL;
}

static size_t kind_of(const char *name)
{
	for (size_t kind = 0; kind < KINDS; kind++)
		if (!strncmp(name, kinds[kind].name, strcspn(name, ":")))
			return kind;
	bad("main", name, __LINE__);
	return 0;
}

/* ANSWER=CALL: a filter that answers one call so. */
static void filter(const char *rule)
{
	static const struct {
		const char *name;
		unsigned int value;
	} answers[] = { { "kill=", SECCOMP_RET_KILL_PROCESS },
			{ "trap=", SECCOMP_RET_TRAP },
			{ "refuse=", SECCOMP_RET_ERRNO | EPERM },
			{ "nosys=", SECCOMP_RET_ERRNO | ENOSYS } },
	  calls[] = { { "clone3", SYS_clone3 },
		      { "memfd_create", SYS_memfd_create },
		      { "madvise", SYS_madvise },
		      { "mprotect", SYS_mprotect },
		      { "ftruncate", SYS_ftruncate },
		      { "reboot", SYS_reboot },
		      { "restart_syscall", SYS_restart_syscall } };
	unsigned int answer = 0, call = 0;

	for (size_t i = 0; i < sizeof answers / sizeof *answers; i++)
		if (!strncmp(rule, answers[i].name, strlen(answers[i].name)))
			answer = answers[i].value;
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
		if (!strcmp(strchr(rule, '=') + 1, calls[i].name))
			call = calls[i].value;
	CHECK(answer && call);
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, answer),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof code / sizeof *code, code };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program));
}

static void *await_end(void *argument)
{
	char byte;

	while (read(0, &byte, 1) == -1 && errno == EINTR)
		;
	ending = 1;
	return argument;
}

int main(int count, char **arguments)
{
	pthread_t thread;
	int first = 1;
	int alone = count > 1 && !strcmp(arguments[1], "alone");

	first += alone;
	if (first < count && strchr(arguments[first], '='))
		filter(arguments[first++]);
	for (int i = first + 1; i < count; i++) {
		const char *times = strchr(arguments[i], ':');

		for (int n = times ? atoi(times + 1) : 1; n > 0; n--)
			CHECK(!pthread_create(&thread, NULL, repeat,
					      (void *)kind_of(arguments[i])));
	}
	if (alone)
		fcntl(0, F_SETFL, O_NONBLOCK);
	else
		CHECK(!pthread_create(&thread, NULL, await_end, NULL));
	puts("ready");
	fflush(stdout);
	for (size_t kind = kind_of(arguments[first]); !ending;) {
		char byte;

		kinds[kind].act();
		rounds[kind]++;
		if (alone && read(0, &byte, 1) == 0)
			ending = 1;
	}
	printf("OK");
	for (size_t kind = 0; kind < KINDS; kind++)
		if (rounds[kind])
			printf(" %s=%ld", kinds[kind].name, rounds[kind]);
	puts("");
	fflush(stdout);
	_exit(0);
}
