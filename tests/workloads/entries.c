/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Functions named like those of a device API, each with another first instruction; all are called
 * as often as the argument says, each from a line of its own.
 */
#define _GNU_SOURCE
#include "truth.h"

/* A function of a size, as linkers and profilers know it. */
#define FUNCTION(name, body)                                                                       \
	__asm__(".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n" body           \
		"ret\n.size " #name ", . - " #name "\n");                                          \
	void name(void)

FUNCTION(clFinish, ".byte 0x0f, 0x1f, 0x44, 0, 0\n");
FUNCTION(clSVMAlloc, ".byte 0x66, 0x90\nmov $1, %eax\n");
FUNCTION(clReleaseMemObject, "push %rbp\npop %rbp\n");
FUNCTION(clCreateBuffer, "lea 1(%rdi), %rax\npush %rbx\npop %rbx\n");
/* No uprobe on a segment prefix: is_prefix_bad of arch/x86/kernel/uprobes.c. */
FUNCTION(clSVMFree, ".byte 0x2e, 0x0f, 0x1f, 0x40, 0\n");
FUNCTION(clWaitForEvents, "push %rbx\n.byte 0x2e, 0x0f, 0x1f, 0x40, 0\npop %rbx\n");

int main(int argc, char **argv)
{
	int calls = argc > 1 ? atoi(argv[1]) : 1;

	ready_then_wait();
	for (int call = 0; call < calls; call++) {
		clFinish();
		clSVMAlloc();
		clReleaseMemObject();
		clCreateBuffer();
		clSVMFree();
		clWaitForEvents();
	}
	done_then_stay();
	return 0;
}
