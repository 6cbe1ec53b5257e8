/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A helper as gpu/ring.py describes one, of a device that does not exist: built as a shared library.
 * Its functions are probed; what the device is to have done goes into the ring.
 */
#define _GNU_SOURCE
#include "toyhelper.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HEADER_BYTES 4096
#define CAPACITY (1 << 20)

/* What a profiler sees: arguments in their registers at an instruction that is cheap to probe. */
#define SITE __attribute__((noipa, visibility("default")))

struct header {
	char magic[8];
	uint32_t version, unused;
	uint64_t capacity;
	_Atomic uint64_t head;
};

static struct header *ring;
static uint64_t next_number;
static int ring_fd, is_shrunk;

SITE void toy_kernel(uint64_t handle, const char *name)
{
	__asm__ volatile("nop" : : "r"(handle), "r"(name));
}

SITE void toy_launch(uint64_t id, uint64_t handle, uint64_t queue)
{
	__asm__ volatile("nop" : : "r"(id), "r"(handle), "r"(queue));
}

SITE void toy_enqueue(uint64_t handle, uint64_t queue, uint64_t id)
{
	/* Deeper, as the runtime's call to a profiler is. */
	volatile char frame[256];

	frame[0] = 0;
	toy_launch(id, handle, queue + frame[0]);
	__asm__ volatile("");
}

SITE void toy_bell(void)
{
	__asm__ volatile("nop");
}

SITE void toy_put(uint32_t kind, const void *data, uint32_t size)
{
	uint64_t head = atomic_load(&ring->head);
	struct {
		uint32_t size, kind;
		uint64_t number;
	} record = { sizeof(record) + ((size + 7) & ~7u), kind, next_number++ };
	char *bytes = (char *)ring + HEADER_BYTES;

	for (uint32_t at = 0; at < sizeof(record) && !is_shrunk; at++)
		bytes[(head + at) % CAPACITY] = ((char *)&record)[at];
	for (uint32_t at = 0; at < size && !is_shrunk; at++)
		bytes[(head + sizeof(record) + at) % CAPACITY] = ((const char *)data)[at];
	atomic_store_explicit(&ring->head, head + record.size, memory_order_release);
}

SITE void toy_lie(enum lie lie)
{
	switch (lie) {
	case LIE_SIZE:
		ring->capacity = 1ull << 62;
		break;
	case LIE_HEAD:
		atomic_store(&ring->head, ~7ull);
		break;
	case LIE_MAGIC:
		memset(ring, 0xff, 8);
		break;
	case LIE_RECORD:
		memset((char *)ring + HEADER_BYTES, 0xff, CAPACITY);
		atomic_fetch_add(&ring->head, 4096);
		break;
	case LIE_SHRINK:
		/* The head stays as it was, in a page that is still there. */
		if (ftruncate(ring_fd, HEADER_BYTES))
			return;
		is_shrunk = 1;
		atomic_fetch_add(&ring->head, 4096);
		break;
	case LIE_NUMBERS:
		next_number += 1ull << 40;
		break;
	case LIE_NONE:
		break;
	}
}

SITE void toy_begin(void)
{
	void *memory;

	ring_fd = memfd_create("aiflame-toy", MFD_CLOEXEC);
	if (ring_fd < 0 || ftruncate(ring_fd, HEADER_BYTES + CAPACITY))
		return;
	memory =
		mmap(NULL, HEADER_BYTES + CAPACITY, PROT_READ | PROT_WRITE, MAP_SHARED, ring_fd, 0);
	if (memory == MAP_FAILED)
		return;
	madvise(memory, HEADER_BYTES + CAPACITY, MADV_DONTFORK);
	ring = memory;
	ring->version = 1;
	ring->capacity = CAPACITY;
	atomic_thread_fence(memory_order_release);
	memcpy(ring->magic, "aiflame", 8);
	toy_bell();
}

__attribute__((constructor)) static void begin(void)
{
	if (!getenv("TOY_LATE"))
		toy_begin();
}
