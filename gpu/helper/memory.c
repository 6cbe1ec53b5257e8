/* SPDX-License-Identifier: Apache-2.0 */
/* The writer of what gpu/ring.py and gpu/protocol.py read. */
#define _GNU_SOURCE
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* As much as gpu/ring.py reads: some seconds of 20,000 kernels each. */
#define RING_BYTES (4ull << 20)
/* Pages that hold nothing take none: this is a limit. Half of cuBLAS's code, all of PyTorch's. */
#define FACTS_BYTES (64ull << 20)
#define MEMORY_BYTES (MEMORY_HEADER_BYTES + RING_BYTES + FACTS_BYTES)

/* Of glibc 2.27 and Linux 4.14; not in the headers of older ones. */
#ifndef MFD_ALLOW_SEALING
#define MFD_CLOEXEC 1u
#define MFD_ALLOW_SEALING 2u
#endif
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

#define PAGE_BYTES 4096

#define NS_PER_S 1000000000ull

#define LOSSES (LOSS_GRAPH_IDS + 1)

static struct memory_header *header;
static uint64_t ring_number, facts_number;
/* Of the facts, in bytes: whole pages that are there. */
static uint64_t facts_there;
/* A page that is all zeros in a child, however it was made. */
static volatile uint32_t *is_parent;
static _Atomic uint64_t losses[LOSSES];
/* How much later this process's clock is than the host's. */
static int64_t namespace_ns;

struct part part_of_text(const char *text)
{
	return (struct part){ text, strlen(text) + 1 };
}

uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + now.tv_nsec - namespace_ns;
}

/*
 * Containers may have a clock of their own, and recorders have the host's: time_namespaces(7). No
 * stream is opened, as closing one makes a call of which filters are not asked.
 */
static void read_time_namespace(void)
{
	int fd = open("/proc/self/timens_offsets", O_RDONLY | O_CLOEXEC);
	long long seconds, nanoseconds;
	char text[256];
	ssize_t size;

	if (fd < 0)
		return; /* Linux before 5.6 */
	size = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (size <= 0)
		return;
	text[size] = 0;
	if (sscanf(text, "monotonic %lld %lld", &seconds, &nanoseconds) == 2)
		namespace_ns = seconds * (int64_t)NS_PER_S + nanoseconds;
}

/*
 * Has the kernel write to each page, and so make it. A write from here would end the target with
 * SIGBUS where there is no more memory (vm.overcommit_memory=2: pages of a memfd are accounted when
 * they are first used); a system call returns EFAULT. fallocate would need the descriptor, whose number
 * a target that closes all of its own may give to another file. The call is one that the helper makes
 * anyway, and that seccomp's filters know.
 */
static bool make_pages(char *from, const char *to)
{
	for (; from < to; from += PAGE_BYTES) {
		if (prlimit(0, RLIMIT_FSIZE, NULL, (struct rlimit *)from))
			return false;
		memset(from, 0, sizeof(struct rlimit));
	}
	return true;
}

static int make_parent_page(void)
{
	void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (page == MAP_FAILED || madvise(page, 4096, MADV_WIPEONFORK))
		return errno;
	is_parent = page;
	*is_parent = 1;
	return 0;
}

bool memory_is_ours(void)
{
	return is_parent && *is_parent;
}

bool memory_is_there(const char *name)
{
	char wanted[64], line[4096];
	FILE *maps = fopen("/proc/self/maps", "re");
	bool is_there = false;

	if (!maps)
		return false;
	snprintf(wanted, sizeof(wanted), " /memfd:%s (deleted)\n", name);
	while (!is_there && fgets(line, sizeof(line), maps))
		is_there = strstr(line, wanted);
	fclose(maps);
	return is_there;
}

static int map_memory(int fd)
{
	void *memory;

	if (ftruncate(fd, MEMORY_BYTES))
		return errno;
	/* So that no one, this process included, can take from under a reader what it reads. */
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		return errno;
	memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		return errno;
	if (madvise(memory, MEMORY_BYTES, MADV_DONTFORK) ||
	    !make_pages(memory, (char *)memory + MEMORY_HEADER_BYTES + RING_BYTES)) {
		int error = errno;

		munmap(memory, MEMORY_BYTES);
		return error;
	}
	header = memory;
	return 0;
}

int memory_make(const char *name)
{
	struct rlimit limit;
	int fd, error = make_parent_page();

	if (error)
		return error;
	read_time_namespace();
	/* A file that grows past the limit ends the process with SIGXFSZ: setrlimit(2). */
	if (getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur < MEMORY_BYTES)
		return EFBIG;
	fd = syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return errno;
	error = map_memory(fd);
	/* The mapping is what readers find. */
	close(fd);
	return error;
}

void memory_publish(int control_fd)
{
	header->version = MEMORY_VERSION;
	header->ring_bytes = RING_BYTES;
	header->facts_bytes = FACTS_BYTES;
	header->control_fd = control_fd;
	header->pid = getpid();
	atomic_thread_fence(memory_order_release);
	*(volatile uint64_t *)header->magic = *(const uint64_t *)"aiflame";
}

static uint64_t size_of(const struct part *parts, int count)
{
	uint64_t size = sizeof(struct record_header);

	for (int at = 0; at < count; at++)
		size += parts[at].size;
	return (size + 7) & ~7ull;
}

static char *ring_bytes(void)
{
	return (char *)header + MEMORY_HEADER_BYTES;
}

/* Copies into the ring at a position of all bytes; returns the position after it. */
static uint64_t copy_round(uint64_t position, const void *bytes, uint64_t size)
{
	uint64_t at = position % RING_BYTES;
	uint64_t first = size < RING_BYTES - at ? size : RING_BYTES - at;

	memcpy(ring_bytes() + at, bytes, first);
	memcpy(ring_bytes(), (const char *)bytes + first, size - first);
	return position + size;
}

void ring_put(uint32_t kind, const struct part *parts, int count)
{
	static const char zeros[8];
	uint64_t head = atomic_load_explicit(&header->ring_head, memory_order_relaxed), at;
	struct record_header record = { size_of(parts, count), kind, ring_number++ };

	at = copy_round(head, &record, sizeof(record));
	for (int part = 0; part < count; part++)
		at = copy_round(at, parts[part].bytes, parts[part].size);
	copy_round(at, zeros, head + record.size - at);
	atomic_store_explicit(&header->ring_head, head + record.size, memory_order_release);
}

uint64_t ring_head(void)
{
	return atomic_load_explicit(&header->ring_head, memory_order_relaxed);
}

uint64_t facts_room(void)
{
	return FACTS_BYTES - atomic_load_explicit(&header->facts_head, memory_order_relaxed);
}

/* Whether the facts may be written up to there. */
static bool make_facts_pages(uint64_t end)
{
	char *facts = ring_bytes() + RING_BYTES, *from = facts + facts_there;
	uint64_t wanted = (end + PAGE_BYTES - 1) & ~(uint64_t)(PAGE_BYTES - 1);

	if (wanted <= facts_there)
		return true;
	if (!make_pages(from, facts + wanted)) {
		/* What was there is for the target, which needs it more. */
		madvise(from, wanted - facts_there, MADV_REMOVE);
		return false;
	}
	facts_there = wanted;
	return true;
}

const void *fact_put(uint32_t kind, const struct part *parts, int count)
{
	uint64_t head = atomic_load_explicit(&header->facts_head, memory_order_relaxed);
	uint64_t size = size_of(parts, count);
	char *content = ring_bytes() + RING_BYTES + head + sizeof(struct record_header);
	char *at = content;

	if (size > facts_room() || !make_facts_pages(head + size))
		return NULL;
	*(struct record_header *)(content - sizeof(struct record_header)) =
		(struct record_header){ size, kind, facts_number++ };
	for (int part = 0; part < count; part++) {
		memcpy(at, parts[part].bytes, parts[part].size);
		at += parts[part].size;
	}
	atomic_store_explicit(&header->facts_head, head + size, memory_order_release);
	return content;
}

void losses_add(enum loss loss, uint64_t count)
{
	atomic_fetch_add_explicit(&losses[loss], count, memory_order_relaxed);
}

void losses_put(void)
{
	struct loss_count counts[LOSSES];
	uint32_t found = 0;

	for (uint32_t loss = 0; loss < LOSSES; loss++) {
		uint64_t count = atomic_exchange_explicit(&losses[loss], 0, memory_order_relaxed);

		if (count)
			counts[found++] = (struct loss_count){ loss, 0, count };
	}
	if (found)
		ring_put(PASSING_LOSSES, &(struct part){ counts, found * sizeof(*counts) }, 1);
}
