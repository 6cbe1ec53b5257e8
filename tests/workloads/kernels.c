/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernels without CFI that align their stack and keep where it was, as OpenBLAS's for matrices do in
 * RBX, and MKL's in the new stack. They are called from functions of which one needs its caller's RBP
 * to be walked past.
 *
 *   aligned_kernel    some 0.1 ms in its body
 *   slot_kernel       the same, MKL's way
 *   brief_kernel      often in its first and last instructions
 *   borrowing_kernel  uses RBX for something else, half of the time
 *
 * With an argument it calls each once, after a breakpoint each.
 */
#define _GNU_SOURCE
#include "truth.h"

typedef void kernel(long, long, long, long, long, long, long); /* one on the stack */

enum { CPU_NS = 600 * MS, LONG_ROUNDS = 100000, BRIEF_ROUNDS = 20 };

/* OpenBLAS v0.3.30 kernel/x86_64/dgemm_kernel_4x8_haswell.S: its first and last instructions. */
#define BEGIN                                                                                      \
	"	subq $0x60, %rsp\n"                                                                      \
	"	movq %rbx, (%rsp)\n"                                                                     \
	"	movq %rbp, 0x8(%rsp)\n"                                                                  \
	"	movq %r12, 0x10(%rsp)\n"                                                                 \
	"	movq %r13, 0x18(%rsp)\n"                                                                 \
	"	movq %r14, 0x20(%rsp)\n"                                                                 \
	"	movq %r15, 0x28(%rsp)\n"                                                                 \
	"	movq 0x68(%rsp), %r10\n" ALIGN
#define ALIGN                                                                                      \
	"	movq %rsp, %rbx\n"                                                                       \
	"	subq $0x2080, %rsp\n"                                                                    \
	"	andq $-4096, %rsp\n"
#define BACK "	movq %rbx, %rsp\n"
#define END                                                                                        \
	BACK "	movq (%rsp), %rbx\n"                                                                \
	     "	movq 0x8(%rsp), %rbp\n"                                                             \
	     "	movq 0x10(%rsp), %r12\n"                                                            \
	     "	movq 0x18(%rsp), %r13\n"                                                            \
	     "	movq 0x20(%rsp), %r14\n"                                                            \
	     "	movq 0x28(%rsp), %r15\n"                                                            \
	     "	addq $0x60, %rsp\n"                                                                 \
	     "	ret\n"
#define LOOP                                                                                       \
	"	movq %rdi, %rbp\n"                                                                       \
	"1:	imulq $7, %r12, %r12\n"                                                                \
	"	decq %rbp\n"                                                                             \
	"	jnz 1b\n"
#define KERNEL(name, body)                                                                         \
	__asm__(".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n" BEGIN body END \
		".size " #name ", .-" #name "\n");                                                 \
	kernel name

KERNEL(aligned_kernel, LOOP);
KERNEL(brief_kernel, LOOP);
KERNEL(borrowing_kernel,
       LOOP "	movq %rbx, %r13\n	movq $-1, %rbx\n" LOOP "	movq %r13, %rbx\n");

/* MKL 2024.2 mkl_blas_avx512_dgemm_kernel_nocopy_NN_bn: where they differ. */
#undef ALIGN
#undef BACK
#define ALIGN                                                                                      \
	"	movq %rsp, %rbp\n"                                                                       \
	"	leaq 0x1000(, %rsi, 8), %rax\n"                                                          \
	"	subq %rax, %rsp\n"                                                                       \
	"	andq $-4096, %rsp\n"                                                                     \
	"	movq %rbp, 0x78(%rsp)\n"
#define BACK "	movq 0x78(%rsp), %rsp\n"

KERNEL(slot_kernel, LOOP "	movq $-1, %rbx\n" LOOP);

static int is_traced;

__attribute__((noipa)) void inner(kernel *called, long rounds)
{
	if (is_traced)
		__asm__ volatile("int3");
	called(rounds, 2, 3, 4, 5, 6, 7);
	__asm__ volatile("");
}

/* An array of a size that is not known keeps the frame pointer in use. */
__attribute__((noipa)) void with_array(kernel *called, long rounds, int words)
{
	volatile long array[words];

	array[0] = rounds;
	inner(called, array[0]);
}

__attribute__((noipa)) void spend(kernel *called, long rounds)
{
	long long end_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + CPU_NS;
	long done;

	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < end_ns)
		for (done = 0; done < 2 * LONG_ROUNDS; done += rounds)
			with_array(called, rounds, 9);
}

int main(int argc, char **argv)
{
	(void)argv;
	is_traced = argc > 1;
	if (is_traced) {
		with_array(aligned_kernel, BRIEF_ROUNDS, 9);
		with_array(slot_kernel, BRIEF_ROUNDS, 9);
		with_array(borrowing_kernel, BRIEF_ROUNDS, 9);
		return 0;
	}
	ready_then_wait();
	spend(aligned_kernel, LONG_ROUNDS);
	spend(slot_kernel, LONG_ROUNDS);
	spend(brief_kernel, BRIEF_ROUNDS);
	spend(borrowing_kernel, LONG_ROUNDS);
	done_then_stay();
	return 0;
}
