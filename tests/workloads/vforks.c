// SPDX-License-Identifier: Apache-2.0
// Begins children by vfork, which hold it up for two milliseconds each: as glibc does it, or as musl.
#define _GNU_SOURCE
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// musl 1.2.3, src/process/x86_64/vfork.s, but for errno. Like that one without CFI.
pid_t vfork_of_musl(void) __attribute__((returns_twice));
__asm__(".text\n"
	".globl vfork_of_musl\n"
	".type vfork_of_musl, @function\n"
	"vfork_of_musl:\n"
	"	pop %rdx\n"
	"	mov $58, %eax\n"
	"	syscall\n"
	"	push %rdx\n"
	"	ret\n"
	".size vfork_of_musl, . - vfork_of_musl\n");

static void hold_up(void)
{
	struct timespec two_ms = { .tv_nsec = 2000000 };

	nanosleep(&two_ms, NULL);
}

__attribute__((noinline)) static void begin_as_glibc(void)
{
	if (vfork() == 0) {
		hold_up();
		_exit(0);
	}
	wait(NULL);
}

__attribute__((noinline)) static void begin_as_musl(void)
{
	if (vfork_of_musl() == 0) {
		hold_up();
		_exit(0);
	}
	wait(NULL);
}

int main(int argc, char **argv)
{
	for (int i = 0; i < 400; i++) {
		if (argc > 1 && strcmp(argv[1], "musl") == 0)
			begin_as_musl();
		else
			begin_as_glibc();
	}
	return 0;
}
