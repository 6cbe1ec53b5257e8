/* SPDX-License-Identifier: Apache-2.0 */
#include "names.h"

#include <stddef.h>
#include <string.h>

#include "memory.h"

/* A power of two. PyTorch with its libraries has some 30,000 kernels, of which few run. */
#define SLOTS (1u << 16)
/* Of CUPTI's pointers; a test has fewer. */
#ifndef POINTER_SLOTS
#define POINTER_SLOTS SLOTS
#endif
#define MOST(slots) ((slots) / 4 * 3)
/*
 * Where CUPTI makes names anew each time, there are as many within so long, of 5 MB. Of a process that
 * compiles kernels for weeks there are after some days. A test has less.
 */
#ifndef COPIES_NS
#define COPIES_NS (24 * 3600 * 1000000000ull)
#endif
/* As long as gpu/protocol.py reads. */
#define MOST_BYTES (60u << 10)

struct known {
	const char *text; /* among the facts */
	uint32_t hash;
	uint32_t name;
};

struct pointer {
	const char *text; /* CUPTI's */
	uint32_t hash; /* of what was there: another module's name may take its place */
	uint32_t name;
};

static struct known known[SLOTS];
static struct pointer pointers[POINTER_SLOTS];
static uint32_t known_count, pointer_count;
static uint64_t pointers_since_ns;

/* FNV-1a. */
static uint32_t hash_of(const char *text, size_t size)
{
	uint32_t hash = 2166136261u;

	for (size_t at = 0; at < size; at++)
		hash = (hash ^ (uint8_t)text[at]) * 16777619u;
	return hash;
}

static uint32_t add(struct known *slot, uint32_t hash, const char *text, size_t size)
{
	struct fact_name fact = { known_count + 1, 0 };
	const char *content = NULL;

	if (known_count < MOST(SLOTS))
		content = fact_put(FACT_NAME,
				   (struct part[]){ PART(fact), { text, size }, { "", 1 } }, 3);
	if (!content) {
		losses_add(LOSS_NAMES, 1);
		return 0;
	}
	*slot = (struct known){ content + sizeof(fact), hash, ++known_count };
	return slot->name;
}

uint32_t name_of(const char *text)
{
	size_t size = text ? strnlen(text, MOST_BYTES) : 0;
	uint32_t hash = hash_of(text, size), at = hash % SLOTS;

	if (!size)
		return 0;
	for (; known[at].name; at = (at + 1) % SLOTS)
		if (known[at].hash == hash && !strncmp(known[at].text, text, size) &&
		    !known[at].text[size])
			return known[at].name;
	return add(&known[at], hash, text, size);
}

uint32_t name_of_function(const char *text, bool *is_too_many)
{
	uint32_t at = (uint32_t)(((uintptr_t)text >> 4) * 2654435761u) % POINTER_SLOTS;

	uint32_t hash;

	if (!text)
		return 0;
	hash = hash_of(text, strnlen(text, MOST_BYTES));
	for (; pointers[at].text; at = (at + 1) % POINTER_SLOTS)
		if (pointers[at].text == text) {
			if (pointers[at].hash != hash)
				pointers[at] = (struct pointer){ text, hash, name_of(text) };
			return pointers[at].name;
		}
	if (pointer_count >= MOST(POINTER_SLOTS)) {
		*is_too_many = now_ns() - pointers_since_ns < COPIES_NS;
		if (*is_too_many)
			return name_of(text);
		memset(pointers, 0, sizeof(pointers));
		pointer_count = 0;
		return name_of_function(text, is_too_many);
	}
	if (!pointer_count++)
		pointers_since_ns = now_ns();
	pointers[at] = (struct pointer){ text, hash, name_of(text) };
	return pointers[at].name;
}
