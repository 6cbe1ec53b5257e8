/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * All that a step of a stack walk knows about x86-64: rules, signal frames, call instructions.
 * The host half's counterpart is agent/unwind/x86_64.py. Another processor is another such file.
 *
 * Needs and loses: see unwind.h, the only file that includes this one.
 */
#ifndef AIFLAME_UNWIND_X86_64_H
#define AIFLAME_UNWIND_X86_64_H

/* The thread as it was when a signal came; its stack may be another one. */
static __always_inline u32 step_over_signal(struct walk *walk, struct unwind_rule *rule)
{
	u64 slot = walk->stack_pointer + (s64)rule->cfa_offset;
	u64 saved = walk->stack_pointer + (s64)rule->rbp_offset;
	u64 stack_pointer = 0;

	if (!read_word(walk, saved, &walk->frame_pointer) ||
	    !read_word(walk, slot, &stack_pointer) ||
	    !read_word(walk, slot + 8, &walk->instruction_pointer))
		return end_walk(walk, STOP_UNREADABLE);
	walk->stack_pointer = stack_pointer;
	walk->has_frame_pointer = 1;
	walk->is_exact = 1;
	return STEP_ON;
}

static __always_inline u32 step_by_rule(struct walk *walk, struct unwind_rule *rule)
{
	u64 cfa = walk->stack_pointer + (s64)rule->cfa_offset;
	u64 saved, added = 0;

	if (rule->kind == RULE_PLT) {
		cfa = walk->stack_pointer + 8;
		if ((walk->instruction_pointer & 15) >= (u64)rule->cfa_offset)
			cfa += 8;
	} else if (rule->kind == RULE_RBX) {
		if (walk->depth != 1)
			return end_walk(walk, STOP_UNSUPPORTED_RULE);
		cfa = walk->base_pointer + (s64)rule->cfa_offset;
	} else if (rule->kind == RULE_RSP_SLOT) {
		cfa = walk->stack_pointer + (rule->cfa_offset >> 16 & 0xffff);
		added = rule->cfa_offset & 0xffff;
	} else if (rule->kind != RULE_RSP && rule->kind != RULE_RSP_HEURISTIC) {
		if (!walk->has_frame_pointer)
			return end_walk(walk, STOP_UNSUPPORTED_RULE);
		cfa = walk->frame_pointer + (s64)rule->cfa_offset;
	}
	if ((rule->kind == RULE_RBP_DEREF || rule->kind == RULE_RSP_SLOT) &&
	    !read_word(walk, cfa, &cfa))
		return end_walk(walk, STOP_UNREADABLE);
	cfa += added;
	/*
	 * Each call pushes a word: this is what ends a table that goes round in circles. Where stacks
	 * change the caller's may be the lower one, and the number of frames ends such a table.
	 */
	if ((cfa <= walk->stack_pointer && rule->kind != RULE_OTHER_STACK) || (cfa & 7))
		return end_walk(walk, STOP_NO_TABLE);
	if (!read_word(walk, cfa - 8, &walk->instruction_pointer))
		return end_walk(walk, STOP_UNREADABLE);
	if (rule->rbp_kind == RBP_AT_CFA ||
	    (rule->rbp_kind == RBP_AT_RBP && walk->has_frame_pointer)) {
		saved = rule->rbp_kind == RBP_AT_CFA ? cfa : walk->frame_pointer;
		if (!read_word(walk, saved + (s64)rule->rbp_offset, &walk->frame_pointer))
			return end_walk(walk, STOP_UNREADABLE);
		walk->has_frame_pointer = 1;
	} else if (rule->rbp_kind != RBP_SAME) {
		walk->has_frame_pointer = 0;
	}
	walk->stack_pointer = cfa;
	walk->is_exact = 0;
	return STEP_ON;
}

/*
 * Whether an address follows a call instruction: what tells a return address from other words.
 * Intel SDM volume 2A, CALL: E8 rel32, or FF /2 with its addressing forms (2.1.5, tables 2-2, 2-3).
 */
static __always_inline bool follows_call(u64 address)
{
	u8 code[8] = {};

	if (bpf_probe_read_user(code, sizeof(code), (void *)(address - sizeof(code))))
		return false;
	if (code[3] == 0xe8)
		return true;
	if (code[6] == 0xff && ((code[7] & 0xf8) == 0xd0 || (code[7] & 0xf8) == 0x10))
		return true; /* register, or memory at a register */
	if (code[5] == 0xff && (code[6] == 0x14 || (code[6] & 0xf8) == 0x50))
		return true; /* scaled index, or an 8-bit displacement */
	if (code[4] == 0xff && code[5] == 0x54)
		return true; /* scaled index and an 8-bit displacement */
	if (code[2] == 0xff && (code[3] == 0x15 || (code[3] & 0xf8) == 0x90))
		return true; /* relative to RIP, or a 32-bit displacement */
	return code[1] == 0xff && code[2] == 0x94; /* scaled index and a 32-bit displacement */
}

/*
 * Where the return address is, in code that is about to take its frame down and to return, or that
 * has not made it yet: its next instructions say so. Stubs of JITs return right after their one call,
 * as CPython's of -X perf (v3.12.1, v3.13.0 Python/asm_trampoline.S). 0: other code. `has_link`: the
 * caller's frame pointer is right below.
 * Intel SDM volume 2: ADD r/m64, imm8; PUSH; MOV r64, r/m64; POP; LEAVE; RET; CALL r64, at which a
 * leaf may stand.
 */
static __always_inline u64 return_slot(struct walk *walk, bool *has_link)
{
	u64 code = 0;

	if (bpf_probe_read_user(&code, sizeof(code), (void *)walk->instruction_pointer))
		return 0;
	*has_link = false;
	if (walk->is_exact) {
		if ((u32)code == 0xe5894855 ||
		    (u32)code == 0xec8b4855) /* push %rbp; mov %rsp,%rbp */
			return walk->stack_pointer;
		*has_link = true;
		if ((code & 0xffffff) == 0xe58948 ||
		    (code & 0xffffff) == 0xec8b48) /* mov %rsp,%rbp */
			return walk->stack_pointer + 8;
		*has_link = false;
		if ((code & 0xf8ff) == 0xd0ff)
			code >>= 16;
	}
	if ((code & 0xff87ffffffull) == 0xc300c48348ull) /* add $n, %rsp; ret: n a few words */
		return walk->stack_pointer + (code >> 24 & 0xff);
	if ((code & 0xff) == 0xc3)
		return walk->stack_pointer;
	*has_link = true;
	if ((code & 0xffff) == 0xc35d) /* pop %rbp; ret */
		return walk->stack_pointer + 8;
	if ((code & 0xffff) == 0xc3c9 && walk->has_frame_pointer && /* leave; ret */
	    walk->frame_pointer >= walk->stack_pointer && !(walk->frame_pointer & 7))
		return walk->frame_pointer + 8;
	return 0;
}

#endif
