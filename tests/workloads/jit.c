/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs generated code, and says its names in a perf map. That which keeps frame pointers, as JITs do:
 *
 * main -> spend_* -> entry -> interpreter -> compiled
 *
 *   entry        in this program, without CFI: makes its frame after a jump, and of a size that only
 *                it knows, as V8's Builtins_InterpreterEntryTrampoline does
 *   interpreter  generated: pushes where its callee returns to, and jumps, as HotSpot's does
 *   compiled     generated: computes; where it keeps a return address that is none of its frames is
 *                on top of its stack
 *
 * In spend_long it stays in its body, in spend_brief it is often in its first and last instructions.
 *
 * And a leaf that has no frame, in which a caller's RBP is what it was:
 *
 * main -> spend_beside_data | spend_beside_code | spend_with_frame -> leaf
 *
 * In the first two it points at words on the stack that look like a frame, whose return address is
 * none: no code, or code after no call. In the third it is the frame of the leaf's caller.
 */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "truth.h"

enum { CPU_NS = 800 * MS, LONG_ROUNDS = 100000, BRIEF_ROUNDS = 4, CODE_BYTES = 4096 };

extern const char generated[], compiled[], leaf[], generated_end[];
extern const char stale[], after_no_call[];
typedef void leaf_function(const void *, long rounds);
void entry(const void *code, long rounds, const void *stale_return, long words);

__asm__(".text\n"
	".globl entry\n"
	".type entry, @function\n"
	"entry:	testq %rdi, %rdi\n"
	"	je 1f\n"
	"	pushq %rbp\n"
	"	movq %rsp, %rbp\n"
	"	shlq $4, %rcx\n"
	"	subq %rcx, %rsp\n"
	"after_no_call:\n"
	"	call *%rdi\n"
	"	nop\n"
	"	leave\n"
	"1:	ret\n"
	".size entry, .-entry\n"
	".type never_called, @function\n"
	"never_called:\n"
	"	call entry\n"
	"stale:	ret\n"
	".size never_called, .-never_called\n"
	/* Copied to where it runs. */
	".section .rodata\n"
	"generated:\n"
	"	pushq %rbp\n"
	"	movq %rsp, %rbp\n"
	"	subq $0x20, %rsp\n"
	"	leaq 1f(%rip), %rax\n"
	"	pushq %rax\n"
	"	jmp compiled\n"
	"	.fill 8, 1, 0xcc\n"
	"1:	movq -8(%rbp), %rax\n"
	"	leave\n"
	"	ret\n"
	"compiled:\n"
	"	pushq %rbp\n"
	"	movq %rsp, %rbp\n"
	"	subq $0x20, %rsp\n"
	"	movq %rdx, (%rsp)\n"
	"2:	decq %rsi\n"
	"	jnz 2b\n"
	"	addq $0x20, %rsp\n"
	"	popq %rbp\n"
	"	ret\n"
	"leaf:\n"
	"	decq %rsi\n"
	"	jnz leaf\n"
	"	ret\n"
	"generated_end:\n"
	".text\n");

#define SPEND(name)                                                                                \
	__attribute__((noipa)) void name(const void *code, long rounds)                            \
	{                                                                                          \
		long long end_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + CPU_NS;                     \
		long done;                                                                         \
                                                                                                   \
		while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < end_ns)                                 \
			for (done = 0; done < 2 * LONG_ROUNDS; done += rounds)                     \
				entry(code, rounds, stale, 9);                                     \
	}
SPEND(spend_long)
SPEND(spend_brief)

#define SPEND_BESIDE(name, word)                                                                   \
	__attribute__((noipa)) void name(leaf_function *run_leaf)                                  \
	{                                                                                          \
		unsigned long words[4] = { (unsigned long)&words[2], (unsigned long)(word) };      \
		register unsigned long *plain __asm__("rbp") = words;                              \
		long long end_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + CPU_NS;                     \
                                                                                                   \
		while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < end_ns) {                               \
			__asm__ volatile("" : "+r"(plain) : : "memory");                           \
			run_leaf(NULL, LONG_ROUNDS);                                               \
			__asm__ volatile("" : "+r"(plain) : : "memory");                           \
		}                                                                                  \
	}
SPEND_BESIDE(spend_beside_data, 12345)
SPEND_BESIDE(spend_beside_code, after_no_call)

__attribute__((noipa, optimize("no-omit-frame-pointer"))) void
spend_with_frame(leaf_function *run_leaf)
{
	long long end_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) + CPU_NS;

	while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < end_ns)
		run_leaf(NULL, LONG_ROUNDS);
}

static void write_names(const char *code)
{
	char path[64];
	FILE *map;

	snprintf(path, sizeof(path), "/tmp/perf-%d.map", (int)getpid());
	map = fopen(path, "w");
	if (!map)
		fail(path);
	fprintf(map, "%lx %lx interpreter\n", (long)code, (long)(compiled - generated));
	fprintf(map, "%lx %lx compiled\n", (long)(code + (compiled - generated)),
		(long)(leaf - compiled));
	fprintf(map, "%lx %lx leaf\n", (long)(code + (leaf - generated)),
		(long)(generated_end - leaf));
	fclose(map);
}

int main(void)
{
	char *code = mmap(NULL, CODE_BYTES, PROT_READ | PROT_WRITE | PROT_EXEC,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	leaf_function *run_leaf = (leaf_function *)(code + (leaf - generated));

	if (code == MAP_FAILED)
		fail("mmap");
	memcpy(code, generated, generated_end - generated);
	write_names(code);
	ready_then_wait();
	spend_long(code, LONG_ROUNDS);
	spend_brief(code, BRIEF_ROUNDS);
	spend_beside_data(run_leaf);
	spend_beside_code(run_leaf);
	spend_with_frame(run_leaf);
	done_then_stay();
	return 0;
}
