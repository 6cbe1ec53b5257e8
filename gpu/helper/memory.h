/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory that a helper shares (gpu/PROTOCOL.md). All but losses_add is for one thread at a time.
 */
#ifndef AIFLAME_MEMORY_H
#define AIFLAME_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol.h"

/* A piece of a record. */
struct part {
	const void *bytes;
	size_t size;
};

#define PART(value)                                                                                \
	(struct part)                                                                              \
	{                                                                                          \
		&(value), sizeof(value)                                                            \
	}

/* With its zero. */
struct part part_of_text(const char *text);

/*
 * Whether another copy of the library has made it in this process; false where that cannot be known.
 * A child that was forked has its parent's library, and no memory: there another copy is the first.
 */
bool memory_is_there(const char *name);

/* Makes it, without a magic: returns 0, or an errno. */
int memory_make(const char *name);

/* From here on it is one: its magic is written. */
void memory_publish(int control_fd);

/* Whether this process is the one that made it: a child that was forked is not. */
bool memory_is_ours(void);

void ring_put(uint32_t kind, const struct part *parts, int count);

/* How many bytes were put into the ring in all. */
uint64_t ring_head(void);

/* Returns where the record's content is, which stays there; NULL where there is no room. */
const void *fact_put(uint32_t kind, const struct part *parts, int count);

/* Room for facts, in bytes. */
uint64_t facts_room(void);

/* Counts what was lost, from any thread; losses_put tells it. */
void losses_add(enum loss loss, uint64_t count);
void losses_put(void);

uint64_t now_ns(void);

#endif
