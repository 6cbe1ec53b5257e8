/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * One step of a user stack walk: from a frame to its caller, by the unwind table of the binary it
 * is in, else by frame pointer.
 *
 * Needs: maps in maps whose inner sizes differ (v5.10), bpf_probe_read_user (v5.5).
 * Loses: nothing silently; each way to end has its stack_end, which is stored with the stack.
 *
 * A table is an array of u64 words. Word 0 holds the first page's number and the number of pages;
 * then come, two to a word, the row index at which each page begins and the one past the last; then
 * the rows, two to a word: the low 16 bits an offset in the page, the high 16 bits a rule. Each
 * page that has code begins with a row at offset 0. agent/recording/tables.py writes it.
 */
#ifndef AIFLAME_UNWIND_H
#define AIFLAME_UNWIND_H

#include "aiflame.h"
#include "arch.h"

#define F_MMAPABLE (1 << 10) /* BPF_F_MMAPABLE, v5.5 */
#define F_INNER_MAP (1 << 12) /* BPF_F_INNER_MAP, v5.10 */

/* Halvings that find one of 4,096 mappings of a process, and one of 65,536 rows of a page. */
#define MAPPING_STEPS 13
#define ROW_STEPS 16

BPF_F_TABLE("array", u32, u64, unwind_table, 1, F_MMAPABLE | F_INNER_MAP);
BPF_ARRAY_OF_MAPS(unwind_tables, "unwind_table", TABLES_MAX);
BPF_F_TABLE("array", u32, struct mapping_slot, mapping_table, 1, F_MMAPABLE | F_INNER_MAP);
BPF_TABLE("hash_of_maps$mapping_table", u32, int, process_mappings, PROCESSES_MAX);
BPF_ARRAY(unwind_rules, struct unwind_rule, RULES_MAX);

/* Where a walk stands. It lies in per-CPU memory, since a walk goes on over tail calls. */
struct walk {
	u64 instruction_pointer;
	u64 stack_pointer;
	u64 frame_pointer;
	u64 hash;
	u64 image;
	struct mapping_slot
		mapping; /* the one the last frame was in: callers are often in it, too */
	u32 depth;
	u32 tgid;
	u32 tid;
	u32 is_exact; /* 0: the instruction pointer is a return address */
	u32 has_frame_pointer; /* 0: a rule said that it is lost */
	u32 end; /* enum stack_end, once it has ended */
};

/* Results of a step. */
#define STEP_ON 0
#define STEP_END 1

static __always_inline u32 half_word(void *table, u32 first_word, u32 index)
{
	u32 word_index = first_word + (index >> 1);
	u64 *word = bpf_map_lookup_elem(table, &word_index);

	if (!word)
		return 0;
	return index & 1 ? *word >> 32 : (u32)*word;
}

/* Finds the mapping that holds an address; leaves it in walk->mapping. */
static __always_inline bool find_mapping(struct walk *walk, void *mappings, u64 address)
{
	struct mapping_slot *slot;
	u32 low = 1, high, middle, i;
	u32 zero = 0;

	if (address >= walk->mapping.start && address < walk->mapping.end)
		return true;
	slot = bpf_map_lookup_elem(mappings, &zero);
	if (!slot)
		return false;
	high = slot->end + 1;
#pragma clang loop unroll(disable)
	for (i = 0; i < MAPPING_STEPS; i++) {
		if (low >= high)
			break;
		middle = (low + high) >> 1;
		slot = bpf_map_lookup_elem(mappings, &middle);
		if (!slot)
			return false;
		if (address < slot->start) {
			high = middle;
		} else if (address >= slot->end) {
			low = middle + 1;
		} else {
			walk->mapping = *slot;
			return true;
		}
	}
	return false;
}

/* Finds the rule for an address of the current mapping; NULL without a table or a row. */
static __always_inline struct unwind_rule *find_rule(struct walk *walk, u64 address)
{
	u32 table_slot = walk->mapping.table;
	u32 zero = 0, rows, low, high, middle, row, page, pages, i, rule = 0;
	u64 *head;
	void *table;

	table = unwind_tables.lookup((int *)&table_slot);
	if (!table)
		return NULL;
	head = bpf_map_lookup_elem(table, &zero);
	if (!head)
		return NULL;
	address -= walk->mapping.bias;
	page = (address >> TABLE_PAGE_SHIFT) - (u32)*head;
	pages = *head >> 32;
	if (page >= pages)
		return NULL;
	low = half_word(table, 1, page);
	high = half_word(table, 1, page + 1);
	rows = 1 + ((pages + 2) >> 1);
	address &= (1 << TABLE_PAGE_SHIFT) - 1;
	if (low >= high)
		return NULL;
	/* The last row that begins at or before the address. */
#pragma clang loop unroll(disable)
	for (i = 0; i < ROW_STEPS; i++) {
		if (low >= high)
			break;
		middle = (low + high) >> 1;
		row = half_word(table, rows, middle);
		if ((row & 0xffff) <= address) {
			rule = row >> 16;
			low = middle + 1;
		} else {
			high = middle;
		}
	}
	return unwind_rules.lookup((int *)&rule);
}

static __always_inline u32 end_walk(struct walk *walk, u32 end)
{
	walk->end = end;
	return STEP_END;
}

static __always_inline bool read_word(u64 address, u64 *out)
{
	return !bpf_probe_read_user(out, sizeof(*out), (void *)address);
}

/* The caller by saved frame pointer, where there is no CFI: generated or hand-written code. */
static __always_inline u32 step_by_frame_pointer(struct walk *walk)
{
	struct frame_link link = {};

	if (!walk->has_frame_pointer || walk->frame_pointer < walk->stack_pointer ||
	    (walk->frame_pointer & 7))
		return end_walk(walk, END_NO_TABLE);
	if (bpf_probe_read_user(&link, sizeof(link), (void *)walk->frame_pointer))
		return end_walk(walk, END_NO_TABLE);
	walk->instruction_pointer = link.return_address;
	walk->stack_pointer = walk->frame_pointer + sizeof(link);
	walk->frame_pointer = link.frame_pointer;
	walk->is_exact = 0;
	return STEP_ON;
}

/* The thread as it was when a signal came; its stack may be another one. */
static __always_inline u32 step_over_signal(struct walk *walk, struct unwind_rule *rule)
{
	u64 slot = walk->stack_pointer + (s64)rule->cfa_offset;
	u64 saved = walk->stack_pointer + (s64)rule->rbp_offset;
	u64 stack_pointer = 0;

	if (!read_word(slot, &stack_pointer) || !read_word(slot + 8, &walk->instruction_pointer) ||
	    !read_word(saved, &walk->frame_pointer))
		return end_walk(walk, END_UNREADABLE);
	walk->stack_pointer = stack_pointer;
	walk->has_frame_pointer = 1;
	walk->is_exact = 1;
	return STEP_ON;
}

static __always_inline u32 step_by_rule(struct walk *walk, struct unwind_rule *rule)
{
	u64 cfa = walk->stack_pointer + (s64)rule->cfa_offset;
	struct frame_link link = {};
	u64 saved;

	if (rule->kind == RULE_PLT) {
		cfa = walk->stack_pointer + 8;
		if ((walk->instruction_pointer & 15) >= (u64)rule->cfa_offset)
			cfa += 8;
	} else if (rule->kind != RULE_RSP) {
		if (!walk->has_frame_pointer)
			return end_walk(walk, END_UNSUPPORTED_RULE);
		cfa = walk->frame_pointer + (s64)rule->cfa_offset;
		if (rule->kind == RULE_RBP_DEREF && !read_word(cfa, &cfa))
			return end_walk(walk, END_UNREADABLE);
	}
	/* Each call pushes a word: this is what ends a table that goes round in circles. */
	if (cfa <= walk->stack_pointer || (cfa & 7))
		return end_walk(walk, END_NO_TABLE);
	if (rule->rbp_kind == RBP_AT_CFA && rule->rbp_offset == -(s16)sizeof(link)) {
		/* As `push %rbp` leaves them: both words in one read, the dearest part of a step. */
		if (bpf_probe_read_user(&link, sizeof(link), (void *)(cfa - sizeof(link))))
			return end_walk(walk, END_UNREADABLE);
		walk->instruction_pointer = link.return_address;
		walk->frame_pointer = link.frame_pointer;
		walk->has_frame_pointer = 1;
		walk->stack_pointer = cfa;
		walk->is_exact = 0;
		return STEP_ON;
	}
	if (!read_word(cfa - 8, &walk->instruction_pointer))
		return end_walk(walk, END_UNREADABLE);
	saved = rule->rbp_kind == RBP_AT_CFA ? cfa : walk->frame_pointer;
	if (rule->rbp_kind == RBP_AT_CFA || rule->rbp_kind == RBP_AT_RBP) {
		if (!read_word(saved + (s64)rule->rbp_offset, &walk->frame_pointer))
			return end_walk(walk, END_UNREADABLE);
		walk->has_frame_pointer = 1;
	} else if (rule->rbp_kind != RBP_SAME) {
		walk->has_frame_pointer = 0;
	}
	walk->stack_pointer = cfa;
	walk->is_exact = 0;
	return STEP_ON;
}

/* From a frame to its caller. */
static __always_inline u32 step(struct walk *walk, void *mappings)
{
	u64 address = walk->instruction_pointer - !walk->is_exact;
	struct unwind_rule *rule;

	if (!walk->instruction_pointer)
		return end_walk(walk, END_ROOTED); /* the host half judges whether it is */
	if (!find_mapping(walk, mappings, address))
		return end_walk(walk, END_NO_TABLE);
	rule = find_rule(walk, address);
	if (!rule || rule->kind == RULE_NO_CFI)
		return step_by_frame_pointer(walk);
	if (rule->kind == RULE_UNDEFINED_RA)
		return end_walk(walk, END_ROOTED_BY_TABLE);
	if (rule->kind == RULE_UNSUPPORTED)
		return end_walk(walk, END_UNSUPPORTED_RULE);
	if (rule->kind == RULE_SIGNAL)
		return step_over_signal(walk, rule);
	return step_by_rule(walk, rule);
}

#endif
