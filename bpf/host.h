/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * What differs between hosts and recordings, as constants: offsets of the running kernel's
 * structures, which helpers it has, which parts of the programs are wanted.
 *
 * The programs are compiled once for all hosts. A constant is compiled to a 64-bit load of a marked
 * number, and the loader puts the host's value in its place (agent/kernel/bytecode.py), as it
 * does with the descriptors of maps. To verifiers it is as constant as a macro's value: they follow
 * only the branches that this host takes, so that a helper which a kernel lacks may stand in others.
 *
 * Not a frozen read-only array, whose values verifiers take for constants, too (v5.5): each use of
 * it is a look-up that may fail, for all that older verifiers know. Linux 6.1 followed paths on
 * which a constant was 0 at one use and 1 at the next, and refused a program for that.
 */
#ifndef AIFLAME_HOST_H
#define AIFLAME_HOST_H

#include "aiflame.h"

/* High half of each marked number: "aifl"; no other 64-bit constant of bpf/ has it. */
#define HOST_MARK 0x6169666c00000000ull

/* Not volatile: the compiler may load a constant once for several uses, or not at all. */
#define host(name)                                                                                 \
	({                                                                                         \
		u64 value_;                                                                        \
		asm("%0 = %1 ll" : "=r"(value_) : "i"(HOST_MARK | HOST_##name));                   \
		value_;                                                                            \
	})

/* Entries of a map whose size the loader decides: compiled programs do not depend on it. */
#define SIZED_BY_HOST 1

/*
 * Hides what the compiler knows of a value: it would leave out a bound that follows from another
 * one, or compute an address anew where the bound is out of sight. Verifiers need to see it there.
 */
#define OPAQUE(value) asm volatile("" : "+r"(value))

/*
 * The address of a map's key of four bytes, which fills its slot of eight on the stack. Verifiers hold
 * a slot that was written in part for one that is read later as well: paths that differed in nothing
 * but what an earlier key had left there were followed each on its own (a third of all
 * instructions, Linux 6.18).
 */
#define KEY(number)                                                                                \
	(&((union {                                                                                \
		  u64 slot;                                                                        \
		  u32 key;                                                                         \
	  }){ .slot = (u32)(number) })                                                             \
		  .key)

/*
 * An element of an array of a power of two, at an index that is masked to it.
 *
 * Verifiers before Linux 6.2 need the bound in the instructions directly before the access. The mask
 * is in assembly, since the compiler would leave out one that it can prove to be needless, and turn
 * an index that it knows into a moving pointer, of which these verifiers know no bound.
 */
#define AT(array, index)                                                                           \
	(*({                                                                                       \
		u64 at_ = (index);                                                                 \
		typeof(&(array)[0]) element_;                                                      \
		_Static_assert((sizeof(array) / sizeof((array)[0]) &                               \
				(sizeof(array) / sizeof((array)[0]) - 1)) == 0,                    \
			       "masking needs a power of two");                                    \
		asm volatile("%0 &= %1"                                                            \
			     : "+r"(at_)                                                           \
			     : "i"(sizeof(array) / sizeof((array)[0]) - 1));                       \
		element_ = &(array)[at_];                                                          \
		OPAQUE(element_);                                                                  \
		element_;                                                                          \
	}))

#endif
