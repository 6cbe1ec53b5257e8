/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * One step of a user stack walk: from a frame to its caller, by the unwind table of the binary it
 * is in, else by the instructions that are next if they make a frame or return, else by frame
 * pointer, else, for a leaf, by what looks like a return address.
 *
 * Needs: maps in maps whose inner sizes differ (v5.10), bpf_probe_read_user (v5.5).
 * Loses: nothing silently; each way to end has its stop_reason, which is stored with the stack.
 *
 * A table is an array of u64 words, which holds three lists. The pages: for each page of code, the
 * half word of the table at which its rows begin, and one past the last, in halves of 32 bits. The
 * rules, a word each. The rows, in halves: the low 16 bits an offset in the page, the high 16 bits the
 * number of a rule. Each page that has code begins with a row at offset 0.
 * agent/kernel/unwind_tables.py writes it.
 */
#ifndef AIFLAME_UNWIND_H
#define AIFLAME_UNWIND_H

#include "aiflame.h"
#include "arch.h"
#include "host.h"
#include "walk.h"

/* In no table: the rules of generated code, and of code whose table only the host half may have. */
#define RULE_GENERATED 14
#define RULE_TABLE_IS_MISSING 15
#define RULE_OF(slot) ((slot) - TABLE_IS_NONE + RULE_GENERATED) /* of a mapping without a table */

#define F_MMAPABLE (1 << 10) /* BPF_F_MMAPABLE, v5.5 */
#define F_INNER_MAP (1 << 12) /* BPF_F_INNER_MAP, v5.10 */

/* Halvings that find one of 65,535 mappings of a process, and one of 512 rows of a page. */
#define MAPPING_STEPS 17
#define ROW_STEPS 10

/*
 * A piece of the user's stack, read at once: a guarded read costs some 70 ns whether it brings 8
 * bytes or 512, and most frames are smaller than that.
 */
#define WINDOW_WORDS 64 /* a power of two */
/* Callers' registers are saved below the return address, which is read first. */
#define WINDOW_BELOW_BYTES 56

BPF_F_TABLE("array", u32, u64, unwind_table, 1, F_MMAPABLE | F_INNER_MAP);
BPF_ARRAY_OF_MAPS(unwind_tables, "unwind_table", TABLES_MAX);
BPF_F_TABLE("array", u32, struct mapping_slot, mapping_table, 1, F_MMAPABLE | F_INNER_MAP);
BPF_TABLE("hash_of_maps$mapping_table", u32, int, process_mappings, SIZED_BY_HOST);

/*
 * What was found for addresses before: most samples pass through the same callers, and a search in
 * tables of megabytes costs several misses of the processor's cache.
 */
#define KNOWN_ADDRESSES 1024 /* a power of two; 16 KB a CPU */

/*
 * One slot is written by walks that come between each other: in a clock tick, and in uprobes of
 * threads that take turns on a CPU. So a reader may meet the words of two of them, which `check`
 * tells: it is of the address, of whose it is, and of the rule (Hyatt and Mann 2002, "A lock-less
 * transposition table implementation").
 */
struct known_address {
	u64 check;
	u64 rule; /* struct unwind_rule as a word */
};

struct known_addresses {
	struct known_address slots[KNOWN_ADDRESSES];
};

BPF_PERCPU_ARRAY(known_addresses, struct known_addresses, 1);

/* The frame of a walk that is the first in code whose table is not there. */
struct missing_table {
	u64 instruction_pointer;
	u64 stack_pointer;
	u64 frame_pointer;
	u32 is_exact;
	u32 has_frame_pointer;
	u64 depth; /* frames up to that one, and with it; 0: there is none */
};

/* What the frame pointer of a leaf without CFI points at. */
#define LEAF_FRAME_UNKNOWN 0
#define LEAF_FRAME_TRIED 1 /* it looks like a frame, and was followed */
#define LEAF_FRAME_NONE 2 /* and led to no caller */

struct leaf_registers {
	u64 instruction_pointer;
	u64 stack_pointer;
	u64 frame_pointer;
};

/* Where a walk stands. It lies in per-CPU memory, since a walk goes on over tail calls. */
struct walk {
	u64 instruction_pointer;
	u64 stack_pointer;
	u64 frame_pointer;
	u64 base_pointer; /* of the leaf */
	u64 hash;
	u64 image;
	u64 mappings_id; /* mapping_slot.bias of the process's first slot */
	union {
		struct unwind_rule rule; /* of the frame that is stepped from */
		u64 rule_word;
	};
	struct mapping_slot
		mapping; /* the one the last frame was in: callers are often in it, too */
	u32 depth;
	u32 tgid;
	u32 tid;
	u32 is_exact; /* 0: the instruction pointer is a return address */
	u32 has_frame_pointer; /* 0: a rule said that it is lost */
	u32 is_heuristic; /* 1: some caller was found by a checked heuristic */
	u32 end; /* enum stop_reason, once it has ended */
	u32 eval_frames; /* of CPython's eval loop, among the frames */
	u32 is_eval; /* the frame that is stepped from is one */
	u32 is_by_frame; /* its caller was found by a frame, or by what makes or leaves one */
	u32 leaf_frame; /* LEAF_FRAME_... */
	u64 eval_start[PYTHON_EVAL_RANGES]; /* of the process's interpreter */
	u64 eval_bytes[PYTHON_EVAL_RANGES]; /* 0: no such range */
	u64 eval_cfas[2]; /* of the two leafmost of these; 0: none, or not known */
	u32 is_unmapped; /* 1: it met an address in no mapping that the host half brought */
	struct missing_table missing;
	struct leaf_registers leaf; /* while LEAF_FRAME_TRIED */
	/*
	 * Where a search stands. In memory, and read as volatile: a verifier knows no more of it after
	 * one branch than after the other, and follows the rest once.
	 */
	u32 low, high, rule_number, has_link;
	u64 slot;
	u64 window_start; /* address of window[0] */
	u64 window_words; /* how many are filled; 0: none yet */
	u64 window_at;
	u64 window[WINDOW_WORDS];
};

/* To be called after the step from a frame of CPython's eval loop. */
static __always_inline void note_eval_cfa(struct walk *walk)
{
	if (walk->eval_frames == 1)
		walk->eval_cfas[0] = walk->stack_pointer;
	else if (walk->eval_frames == 2)
		walk->eval_cfas[1] = walk->stack_pointer;
}

/* Results of a step. */
#define STEP_ON 0
#define STEP_END 1
#define STEP_CHECK 2 /* on, if what was found is a caller */
#define STEP_AGAIN 3 /* from the same frame, another way */

static __always_inline u64 word_of(void *table, u32 index)
{
	u64 *word = bpf_map_lookup_elem(table, KEY(index));

	return word ? *word : 0;
}

static __always_inline u32 half_word(void *table, u32 index)
{
	u64 word = word_of(table, index >> 1);

	return word >> (index & 1) * 32;
}

/* Finds the mapping that holds an address; leaves it in walk->mapping. */
static __always_inline bool find_mapping(struct walk *walk, void *mappings, u64 address)
{
	struct mapping_slot *slot;
	volatile struct walk *state = walk;
	u32 middle, i;

	if (address >= walk->mapping.start && address < walk->mapping.end)
		return true;
	slot = bpf_map_lookup_elem(mappings, KEY(0));
	if (!slot)
		return false;
	state->low = 1;
	state->high = slot->end + 1;
#pragma clang loop unroll(disable)
	for (i = 0; i < MAPPING_STEPS; i++) {
		if (state->low >= state->high)
			break;
		middle = (state->low + state->high) >> 1;
		slot = bpf_map_lookup_elem(mappings, KEY(middle));
		if (!slot)
			return false;
		if (address < slot->start) {
			state->high = middle;
		} else if (address >= slot->end) {
			state->low = middle + 1;
		} else {
			walk->mapping = *slot;
			return true;
		}
	}
	return false;
}

/* The rule for an address of the current mapping, as a word; RULE_NO_CFI's without a table or a row. */
static __always_inline u64 find_rule(struct walk *walk, u64 address)
{
	u32 table_slot = walk->mapping.table;
	volatile struct walk *state = walk;
	u32 rules, middle, row, page, i;
	void *table;

	if (table_slot >= TABLE_IS_NONE)
		return RULE_OF(table_slot);
	address -= walk->mapping.bias;
	if (address >> TABLE_PAGE_SHIFT >= walk->mapping.pages)
		return 0;
	/* Mappings may be there before a table that was brought with them: other threads bring it. */
	table = unwind_tables.lookup(KEY(table_slot));
	if (!table)
		return RULE_TABLE_IS_MISSING;
	page = address >> TABLE_PAGE_SHIFT;
	state->low = half_word(table, page);
	state->high = half_word(table, page + 1);
	state->rule_number = 0;
	rules = (walk->mapping.pages + 2) >> 1;
	address &= (1 << TABLE_PAGE_SHIFT) - 1;
	if (state->low >= state->high)
		return 0;
	/* The last row that begins at or before the address. */
#pragma clang loop unroll(disable)
	for (i = 0; i < ROW_STEPS; i++) {
		if (state->low >= state->high)
			break;
		middle = (state->low + state->high) >> 1;
		row = half_word(table, middle);
		if ((row & 0xffff) <= address) {
			state->rule_number = row >> 16;
			state->low = middle + 1;
		} else {
			state->high = middle;
		}
	}
	return word_of(table, rules + state->rule_number);
}

/* What a known address has to say of itself, to be that one. */
static __always_inline u64 check_of(struct walk *walk, u64 address, u64 rule)
{
	return address ^ walk->mappings_id ^ rule * HASH_MULTIPLIER;
}

/*
 * The same for any address, from what is known if it can be; leaves it in walk->rule. False if the
 * address is in no mapping.
 */
static __always_inline bool find_rule_of(struct walk *walk, void *mappings, u64 address)
{
	struct known_addresses *known = known_addresses.lookup(KEY(0));
	volatile struct known_address *slot;
	u64 rule;

	if (!known)
		return false;
	slot = &AT(known->slots, address ^ address >> 12);
	rule = slot->rule;
	if (slot->check != check_of(walk, address, rule)) {
		if (!find_mapping(walk, mappings, address))
			return false;
		rule = find_rule(walk, address);
		if (rule != RULE_TABLE_IS_MISSING) { /* which it may not be at the next look */
			slot->rule = rule;
			slot->check = check_of(walk, address, rule);
		}
	}
	walk->rule_word = rule;
	return true;
}

/* Notes that a table is not there for the frame that the walk is at. */
static __always_inline void note_missing_table(struct walk *walk)
{
	struct missing_table *missing = &walk->missing;

	if (missing->depth)
		return;
	missing->instruction_pointer = walk->instruction_pointer;
	missing->stack_pointer = walk->stack_pointer;
	missing->frame_pointer = walk->frame_pointer;
	missing->is_exact = walk->is_exact;
	missing->has_frame_pointer = walk->has_frame_pointer;
	missing->depth = walk->depth;
}

static __always_inline u32 end_walk(struct walk *walk, u32 end)
{
	walk->end = end;
	return STEP_END;
}

/*
 * Reads a word of the user's stack through the window. Its state is volatile, so that the verifier
 * sees the same whether a word needed a read or not; else it would follow both ways at each word.
 */
static __always_inline bool read_word(struct walk *walk, u64 address, u64 *out)
{
	volatile struct walk *state = walk;

	if (address & 7)
		return !bpf_probe_read_user(out, sizeof(*out), (void *)address);
	state->window_at = (address - state->window_start) >> 3;
	if (state->window_at >= state->window_words) {
		state->window_start = address - WINDOW_BELOW_BYTES;
		state->window_words = WINDOW_WORDS;
		state->window_at = WINDOW_BELOW_BYTES >> 3;
		if (bpf_probe_read_user(walk->window, sizeof(walk->window),
					(void *)(address - WINDOW_BELOW_BYTES))) {
			/* Near the end of a mapping, or beside a page that is not there. */
			state->window_start = address;
			state->window_at = 0;
			state->window_words = 1;
			if (bpf_probe_read_user(walk->window, sizeof(u64), (void *)address)) {
				state->window_words = 0;
				return false;
			}
		}
	}
	*out = AT(walk->window, state->window_at);
	return true;
}

#include "unwind_x86_64.h"

/*
 * Whether what was found is code that was called from just before it; leaves its mapping in walk.
 * Generated code that a frame leads to need not have been: HotSpot's interpreter pushes where its
 * callees return to, and jumps (jdk-17 src/hotspot/cpu/x86/templateTable_x86.cpp, prepare_invoke).
 */
static __always_inline bool is_caller(struct walk *walk, void *mappings)
{
	return find_mapping(walk, mappings, walk->instruction_pointer - 1) &&
	       ((walk->is_by_frame && walk->mapping.table == TABLE_IS_NONE) ||
		follows_call(walk->instruction_pointer));
}

/* The caller of code that begins, or that returns now or when its callee has; false for other code. */
static __always_inline bool step_by_instructions(struct walk *walk)
{
	volatile struct walk *state = walk;
	u64 address = 0, saved = walk->frame_pointer, slot;
	bool has_link = false;

	state->slot = return_slot(walk, &has_link);
	state->has_link = has_link;
	slot = state->slot;
	if (!slot || !read_word(walk, slot, &address) ||
	    (state->has_link && !read_word(walk, slot - 8, &saved)))
		return false;
	walk->instruction_pointer = address;
	walk->stack_pointer = slot + 8;
	walk->frame_pointer = saved;
	walk->has_frame_pointer |= state->has_link;
	walk->is_heuristic = 1;
	walk->is_by_frame = 1;
	return true;
}

/* Notes that a leaf is left by its frame pointer, and where it was. */
static __always_inline void try_leaf_frame(struct walk *walk)
{
	volatile struct walk *state = walk;
	u64 top = 0;

	walk->leaf.instruction_pointer = walk->instruction_pointer;
	walk->leaf.stack_pointer = walk->stack_pointer;
	walk->leaf.frame_pointer = walk->frame_pointer;
	state->leaf_frame = LEAF_FRAME_TRIED;
	/* There a leaf without a frame has its return address; RBP may be its caller's. */
	if (read_word(walk, walk->stack_pointer, &top) && follows_call(top))
		state->is_heuristic = 1;
}

/* Back to a leaf whose frame pointer led to no caller. */
static __always_inline u32 give_up_leaf_frame(struct walk *walk)
{
	walk->instruction_pointer = walk->leaf.instruction_pointer;
	walk->stack_pointer = walk->leaf.stack_pointer;
	walk->frame_pointer = walk->leaf.frame_pointer;
	walk->is_exact = 1;
	walk->leaf_frame = LEAF_FRAME_NONE;
	walk->eval_frames = 0; /* it is counted again */
	return STEP_AGAIN;
}

/*
 * The caller where there is no CFI: generated or hand-written code. By what the code does next; else
 * by saved frame pointer; else, for a leaf, by what is on top of the stack. Which it is decides
 * without a look at the mappings, which the caller takes once: verifiers follow each search anew.
 * Where that finds that a leaf's frame pointer led to no caller, the whole step is taken again.
 */
static __always_inline u32 step_without_cfi(struct walk *walk)
{
	volatile struct walk *state = walk;
	u64 caller = 0, saved = 0;
	bool has_link = walk->has_frame_pointer && walk->frame_pointer >= walk->stack_pointer &&
			!(walk->frame_pointer & 7);

	/* Before frame pointers: where they are none, RBP may still point into the stack. */
	if (step_by_instructions(walk))
		return STEP_CHECK;
	if (has_link)
		has_link = read_word(walk, walk->frame_pointer, &saved) &&
			   read_word(walk, walk->frame_pointer + 8, &caller);
	/* A leaf's RBP may be anything, unless what it points at looks like a frame. */
	if (has_link && state->depth == 1)
		has_link = state->leaf_frame != LEAF_FRAME_NONE &&
			   (follows_call(caller) || (walk->rule.kind == RULE_GENERATED &&
						     saved > walk->frame_pointer && !(saved & 7)));
	state->is_by_frame = has_link;
	if (state->is_by_frame) {
		if (state->depth == 1)
			try_leaf_frame(walk);
		walk->instruction_pointer = caller;
		walk->stack_pointer = walk->frame_pointer + sizeof(struct frame_link);
		walk->frame_pointer = saved;
		return state->depth == 1 ? STEP_CHECK : STEP_ON;
	}
	if (state->depth != 1 || !read_word(walk, walk->stack_pointer, &caller))
		return end_walk(walk, STOP_NO_TABLE);
	walk->instruction_pointer = caller;
	walk->stack_pointer += 8;
	walk->is_heuristic = 1;
	return STEP_CHECK;
}

/* From a frame to its caller. */
static __always_inline u32 step(struct walk *walk, void *mappings)
{
	u64 address = walk->instruction_pointer - !walk->is_exact;
	struct unwind_rule *rule = &walk->rule;
	u32 result;

	walk->is_by_frame = 0;
	if (!walk->instruction_pointer)
		return end_walk(walk, STOP_ROOTED); /* the host half judges whether it is */
	if (!find_rule_of(walk, mappings, address)) {
		walk->is_unmapped = 1;
		note_missing_table(walk);
		return end_walk(walk, STOP_NO_TABLE);
	}
	if (rule->kind == RULE_UNDEFINED_RA)
		return end_walk(walk, STOP_ROOTED_BY_TABLE);
	if (rule->kind == RULE_UNSUPPORTED)
		return end_walk(walk, STOP_UNSUPPORTED_RULE);
	if (rule->kind == RULE_SIGNAL)
		return step_over_signal(walk, rule);
	if (rule->kind == RULE_TABLE_IS_MISSING)
		note_missing_table(walk);
	if (rule->kind == RULE_NO_CFI || rule->kind >= RULE_GENERATED) {
		result = step_without_cfi(walk);
		walk->is_exact = 0;
	} else {
		result = step_by_rule(walk, rule);
		if (result == STEP_ON && rule->kind >= RULE_RSP_HEURISTIC) {
			walk->is_heuristic = 1;
			result = STEP_CHECK;
		}
	}
	if (result != STEP_CHECK)
		return result;
	if (is_caller(walk, mappings))
		return STEP_ON;
	if (walk->depth == 1 && walk->leaf_frame == LEAF_FRAME_TRIED)
		return give_up_leaf_frame(walk);
	return end_walk(walk, STOP_NO_TABLE);
}

#endif
