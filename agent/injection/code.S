/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a target runs to load a library. `code.py` has the bytes, and a test assembles this file
 * and compares: as --64 -o code.o code.S && objcopy -O binary -j .text code.o
 *
 * Position independent, and without data of its own: it is written into the unused end of a page
 * of code, which the target cannot write to, and stays there. Two threads run it.
 *
 * `borrowed` is run by a thread of the target, from a system call instruction on, with registers
 * that one PTRACE_SETREGS has given it: RAX, RDI, RSI, RDX and R10 for rt_sigprocmask(2), which
 * blocks signals; RBX the address of a `Request` (requests.py) on its own stack, below the red
 * zone (x86-64 psABI 3.2.2); RSP below that, aligned. It makes a thread and waits a moment for the
 * tracer, which gives it its registers back. If none does, since it is dead, rt_sigreturn(2) does:
 * all registers, vector registers and the signal mask at once. So whoever dies when: it goes on.
 *
 * `loading` is the new thread, with a `Task` as its argument. Signals stay blocked in it, and in
 * threads that the library makes, but for those that glibc waits for all threads with.
 *
 * System calls: asm/unistd_64.h; they change RAX, RCX and R11 only.
 */
	.equ SYS_MMAP, 9
	.equ SYS_MUNMAP, 11
	.equ SYS_RT_SIGPROCMASK, 14
	.equ SYS_RT_SIGRETURN, 15
	.equ SYS_NANOSLEEP, 35
	.equ SYS_CLOSE, 3
	.equ SYS_MEMFD_CREATE, 319
	.equ SYS_GETTID, 186

	.equ PROT_READ_WRITE, 3
	.equ MAP_PRIVATE_ANONYMOUS, 0x22
	.equ MFD_CLOEXEC, 1
	.equ SIG_UNBLOCK, 1
	.equ SIGSET_BYTES, 8
	.equ FIRST_ERROR, -4095	/* MAX_ERRNO of linux/err.h */

	/* Request */
	.equ STATE, 0
	.equ RESULT, 4
	.equ THREAD, 8
	.equ PTHREAD_CREATE, 16
	.equ TASK_AT, 24
	.equ ERRNO_LOCATION, 40
	.equ TASK, 64
	.equ CONTEXT, 576
	.equ TASK_BYTES, CONTEXT - TASK

	/* Task, also the first words of a page */
	.equ DONE, 0
	.equ GO, 4
	.equ FILE, 8
	.equ HANDLE, 16
	.equ ERROR, 24
	.equ ANSWER, 32
	.equ TID, 40
	.equ PTHREAD_DETACH, 48
	.equ DLOPEN, 56
	.equ DLSYM, 64
	.equ DLERROR, 72
	.equ FLAGS, 80
	.equ PAUSE, 88
	.equ UNBLOCKED, 104
	.equ ENTRY, 128
	.equ NAME, 256
	.equ PATH, 512
	.equ PAGE_BYTES, 4096

	/* 15 to 50 ms: PAUSE takes 40 to 140 cycles. The tracer takes one of them. */
	.equ SPINS, 1 << 20
	/* With pauses of 1 ms: who asked for the library may have to write 100 MB of it. */
	.equ PAUSES, 30000

	.text
borrowed:
	syscall
	movl	$SYS_MMAP, %eax
	xorl	%edi, %edi
	movl	$PAGE_BYTES, %esi
	movl	$PROT_READ_WRITE, %edx
	movl	$MAP_PRIVATE_ANONYMOUS, %r10d
	movq	$-1, %r8
	xorl	%r9d, %r9d
	syscall
	movl	%eax, RESULT(%rbx)
	cmpq	$FIRST_ERROR, %rax
	jae	give_back
	movq	%rax, %rbp
	movq	%rax, TASK_AT(%rbx)
	leaq	TASK(%rbx), %rsi
	movq	%rax, %rdi
	movl	$TASK_BYTES / 8, %ecx
	rep movsq
	call	*ERRNO_LOCATION(%rbx)	/* errno is this thread's, which pthread_create may change */
	movq	%rax, %r12
	movl	(%rax), %r13d
	leaq	THREAD(%rbx), %rdi
	xorl	%esi, %esi
	leaq	loading(%rip), %rdx
	movq	%rbp, %rcx
	call	*PTHREAD_CREATE(%rbx)
	movl	%r13d, (%r12)
	movl	%eax, RESULT(%rbx)
	testl	%eax, %eax
	je	give_back
	movl	$SYS_MUNMAP, %eax
	movq	%rbp, %rdi
	movl	$PAGE_BYTES, %esi
	syscall
give_back:
	movl	$1, STATE(%rbx)
	movl	$SPINS, %ecx
wait_for_tracer:
	pause
	decl	%ecx
	jnz	wait_for_tracer
	leaq	CONTEXT(%rbx), %rsp
	movl	$SYS_RT_SIGRETURN, %eax
	syscall

loading:
	pushq	%rbx
	pushq	%rbp
	pushq	%rbp			/* aligns the stack */
	movq	%rdi, %rbx
	movl	$SYS_RT_SIGPROCMASK, %eax
	movl	$SIG_UNBLOCK, %edi
	leaq	UNBLOCKED(%rbx), %rsi
	xorl	%edx, %edx
	movl	$SIGSET_BYTES, %r10d
	syscall
	movq	%fs:0, %rdi		/* pthread_self(): the thread's control block */
	call	*PTHREAD_DETACH(%rbx)
	movl	$SYS_GETTID, %eax
	syscall
	movl	%eax, TID(%rbx)
	movl	$SYS_MEMFD_CREATE, %eax
	leaq	NAME(%rbx), %rdi
	movl	$MFD_CLOEXEC, %esi
	syscall
	movl	%eax, FILE(%rbx)
ready:
	incl	DONE(%rbx)
	movl	$PAUSES, %ebp
wait_for_word:
	xorl	%eax, %eax
	xchgl	%eax, GO(%rbx)
	testl	%eax, %eax
	jnz	told
	movl	$SYS_NANOSLEEP, %eax
	leaq	PAUSE(%rbx), %rdi
	xorl	%esi, %esi
	syscall
	decl	%ebp
	jnz	wait_for_word
	jmp	leave
told:
	cmpl	$1, %eax
	jne	leave
	leaq	PATH(%rbx), %rdi
	movl	FLAGS(%rbx), %esi
	call	*DLOPEN(%rbx)
	movq	%rax, HANDLE(%rbx)
	testq	%rax, %rax
	jz	failed
	leaq	ENTRY(%rbx), %rsi
	cmpb	$0, (%rsi)
	je	ready
	movq	%rax, %rdi
	call	*DLSYM(%rbx)
	testq	%rax, %rax
	jz	failed
	call	*%rax
	movl	%eax, ANSWER(%rbx)
	jmp	ready
failed:
	movq	DLERROR(%rbx), %rax
	testq	%rax, %rax
	jz	ready
	call	*%rax
	movq	%rax, ERROR(%rbx)
	jmp	ready
leave:
	movl	FILE(%rbx), %edi
	testl	%edi, %edi
	js	unmap
	movl	$SYS_CLOSE, %eax
	syscall
unmap:
	movl	$SYS_MUNMAP, %eax
	movq	%rbx, %rdi
	movl	$PAGE_BYTES, %esi
	syscall
	popq	%rbp
	popq	%rbp
	popq	%rbx
	xorl	%eax, %eax
	ret
	.balign 8, 0xcc			/* it is written in words */
