/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * All that the kernel half knows about the processor: the saved registers and the shape of a
 * frame-pointer frame. Porting means adding a branch here and in agent/kernel/arch.py.
 *
 * x86-64 layouts: arch/x86/include/uapi/asm/ptrace.h (stable ABI), System V psABI 3.2.2.
 */
#ifndef AIFLAME_ARCH_H
#define AIFLAME_ARCH_H

#if !defined(__x86_64__) && !defined(__TARGET_ARCH_x86)
#error "aiflame: this processor is not supported yet (see bpf/arch.h)"
#endif

struct pt_regs {
	u64 r15, r14, r13, r12, bp, bx;
	u64 r11, r10, r9, r8, ax, cx, dx, si, di;
	u64 orig_ax, ip, cs, flags, sp, ss;
};

/* What a walk starts from. instruction_pointer is 0 for a thread that has no user half. */
struct user_regs {
	u64 instruction_pointer;
	u64 stack_pointer;
	u64 frame_pointer;
	u64 base_pointer; /* RBX, in which code that aligns its stack keeps where that was */
	u64 return_address; /* of the leaf, where it is in a register; 0: it is on the stack */
};

/* What the frame pointer points at. */
struct frame_link {
	u64 frame_pointer; /* the caller's */
	u64 return_address;
};

/* The two low bits of CS are the privilege level: 3 is user mode. */
#define IS_USER_MODE(regs) (((regs)->cs & 3) == 3)

static __always_inline void user_regs_from(struct user_regs *out, struct pt_regs *regs)
{
	out->instruction_pointer = regs->ip;
	out->stack_pointer = regs->sp;
	out->frame_pointer = regs->bp;
	out->base_pointer = regs->bx;
	out->return_address = 0;
}

#define NR_VFORK 58 /* arch/x86/entry/syscalls/syscall_64.tbl */

/*
 * The current thread's return address while it is in vfork(2), 0 while it is not. Parent and child
 * return from it on one stack, so C libraries take the address off before the call, and put it back
 * after: glibc by `pop %rdi; syscall; push %rdi` (sysdeps/unix/sysv/linux/x86_64/vfork.S, 2.36), musl
 * by RDX (src/process/x86_64/vfork.s, 1.2.3).
 */
static __always_inline u64 return_address_of_vfork(struct pt_regs *regs)
{
	u8 code[3] = {};

	if (regs->orig_ax != NR_VFORK ||
	    bpf_probe_read_user(code, sizeof(code), (void *)(regs->ip - 2)) || code[0] != 0x0f ||
	    code[1] != 0x05)
		return 0;
	if (code[2] == 0x57)
		return regs->di;
	return code[2] == 0x52 ? regs->dx : 0;
}

#endif
