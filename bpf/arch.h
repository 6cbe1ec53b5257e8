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
}

#endif
