/* SPDX-License-Identifier: Apache-2.0 */
/* How long kernels ran: CUPTI's records of them, in buffers that it is lent. */
#define _GNU_SOURCE
#include "helper.h"

#include <sys/mman.h>

#include "control.h"
#include "graphs.h"
#include "library.h"
#include "memory.h"
#include "names.h"

/*
 * Records have some 200 bytes: 40,000 kernels between two times that they are taken. Pages of buffers
 * that are never used take no memory. CUPTI keeps a buffer in which a kernel still runs until it is
 * full, and a busy device always has one: with 300 kernels in each that is soon. Tests have fewer.
 */
#ifndef BUFFERS
#define BUFFERS 128
#endif
#define BUFFER_BYTES (64u << 10)
/* Rows of one record: 14 KB. */
#define MOST_ROWS 256
/* Of the two clocks' readings the closest of so many. */
#define CLOCK_READINGS 5
/* One that took longer was interrupted: it takes less than one, where no thread waits. */
#define MOST_READING_NS 100000
/*
 * There is one client of V1's buffers, the last that registered, and nobody tells the others: PyTorch's
 * profiler takes them, and ends all kernel times when it ends. So long without any they are asked for
 * anew: longer than others profile at a stretch, or kernels run. Tests have less.
 */
#ifndef QUIET_NS
#define QUIET_NS 30000000000ull
#endif
/* Longer than readings are off, shorter than any step that somebody sets the clock by. */
#define MOST_CLOCK_STEP_NS 1000000

enum owner {
	OWNER_NOBODY,
	OWNER_CUPTI,
	OWNER_READER, /* it has records */
};

static uint8_t *buffers;
static _Atomic int owners[BUFFERS];
static _Atomic uint32_t times_lent[BUFFERS];
static size_t valid_bytes[BUFFERS];

struct batch {
	struct kernel_time rows[MOST_ROWS];
	uint32_t count;
};

static struct batch batch;
static uint64_t told;
/* How many were told when the last came, or no launch had come; the newest launch then, and when. */
static uint64_t told_by_then, launch_by_then, then_ns;
/* What was added to CUPTI's times at the last read-out; 0: there was none. */
static int64_t last_add_ns;

static void lend(uint8_t **buffer, size_t *size, size_t *most)
{
	*buffer = NULL;
	*size = 0;
	*most = 0;
	if (!memory_is_ours())
		return;
	for (int at = 0; at < BUFFERS && !*buffer; at++) {
		int nobody = OWNER_NOBODY;

		if (atomic_compare_exchange_strong(&owners[at], &nobody, OWNER_CUPTI)) {
			atomic_fetch_add(&times_lent[at], 1);
			*buffer = buffers + (size_t)at * BUFFER_BYTES;
			*size = BUFFER_BYTES;
		}
	}
}

static void take_back(uint8_t *buffer, size_t valid)
{
	size_t at = (size_t)(buffer - buffers) / BUFFER_BYTES;

	if (!buffer || !memory_is_ours() || at >= BUFFERS)
		return;
	valid_bytes[at] = valid < BUFFER_BYTES ? valid : BUFFER_BYTES;
	atomic_store_explicit(&owners[at], OWNER_READER, memory_order_release);
	control_wake();
}

static void complete(cu_context context, uint32_t stream, uint8_t *buffer, size_t size,
		     size_t valid)
{
	(void)context, (void)stream, (void)size;
	take_back(buffer, valid);
}

static void lend_v2(uint8_t **buffer, size_t *size, size_t *most, void *more)
{
	(void)more;
	lend(buffer, size, most);
}

static void complete_v2(uint8_t *buffer, size_t size, size_t valid, void *more)
{
	(void)size, (void)more;
	take_back(buffer, valid);
}

static cupti_result make_buffers(void)
{
	void *memory;

	if (buffers)
		return CUPTI_OK;
	memory = mmap(NULL, (size_t)BUFFERS * BUFFER_BYTES, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED)
		return CUPTI_OUT_OF_MEMORY;
	buffers = memory;
	return CUPTI_OK;
}

/* Has CUPTI fill our buffers. */
static cupti_result enable(const struct subscription *subscription, const char **what)
{
	cupti_result result;

	*what = "cuptiActivityRegisterCallbacks";
	if (subscription->is_v2)
		result = cupti.cuptiActivityRegisterCallbacks_v2(subscription->handle, lend_v2,
								 complete_v2);
	else
		result = cupti.cuptiActivityRegisterCallbacks(lend, complete);
	if (result)
		return result;
	*what = "cuptiActivityEnable";
	if (subscription->is_v2)
		return cupti.cuptiActivityEnable_v2(subscription->handle,
						    CUPTI_ACTIVITY_CONCURRENT_KERNEL, NULL);
	return cupti.cuptiActivityEnable(CUPTI_ACTIVITY_CONCURRENT_KERNEL);
}

static void note_heard(void)
{
	told_by_then = told;
	launch_by_then = launches_newest();
	then_ns = now_ns();
}

cupti_result kernels_begin(const struct subscription *subscription, const char **what)
{
	cupti_result result = make_buffers();

	last_add_ns = 0;
	note_heard();
	*what = "mmap";
	return result ? result : enable(subscription, what);
}

/* Whether some kernel time came, or may not be expected. */
static bool hears(void)
{
	if (told == told_by_then && launches_newest() != launch_by_then)
		return now_ns() - then_ns < QUIET_NS;
	note_heard();
	return true;
}

/*
 * Buffers that CUPTI had when somebody else took its buffers go to them, who know nothing of these.
 * Once it has given back what it has, those that are lent since before are nobody's.
 */
static cupti_result enable_anew(const struct subscription *subscription, const char **what)
{
	uint32_t before[BUFFERS];
	cupti_result result;

	for (int at = 0; at < BUFFERS; at++)
		before[at] =
			atomic_load(&owners[at]) == OWNER_CUPTI ? atomic_load(&times_lent[at]) : 0;
	result = enable(subscription, what);
	if (result)
		return result;
	*what = "cuptiActivityFlushAll";
	result = cupti.cuptiActivityFlushAll(CUPTI_FLUSH_FORCED);
	for (int at = 0; !result && at < BUFFERS; at++) {
		int lent = OWNER_CUPTI;

		if (before[at] && before[at] == atomic_load(&times_lent[at]))
			atomic_compare_exchange_strong(&owners[at], &lent, OWNER_NOBODY);
	}
	return result;
}

static void ask_anew(const struct subscription *subscription)
{
	const char *what;
	cupti_result result = enable_anew(subscription, &what);

	note_heard();
	graphs_miss_kernels();
	if (result)
		tell_error(ERROR_CALL, result, what);
	else
		tell_error(ERROR_QUIET, 0, "CUPTI");
}

uint64_t kernels_told(void)
{
	return told;
}

static void put_batch(void)
{
	told += batch.count;
	if (batch.count)
		ring_put(PASSING_TIMES,
			 &(struct part){ batch.rows, batch.count * sizeof(*batch.rows) }, 1);
	batch.count = 0;
}

/*
 * CUPTI's clock is CLOCK_REALTIME unless somebody gave it another one, which this does not do: it
 * would be that of every other tool in the process. Finds what to add to its times, unless all
 * readings were interrupted: kernels would be that much too late.
 */
static bool find_clock(const struct subscription *subscription, int64_t *add_ns)
{
	uint64_t best_ns = MOST_READING_NS + 1;

	for (int reading = 0; reading < CLOCK_READINGS; reading++) {
		uint64_t before = now_ns(), theirs, after;
		cupti_result result =
			subscription->is_v2
				? cupti.cuptiGetTimestamp_v2(subscription->handle, &theirs)
				: cupti.cuptiGetTimestamp(&theirs);

		after = now_ns();
		if (result) {
			tell_error(ERROR_CALL, result, "cuptiGetTimestamp");
			return false;
		}
		if (after - before >= best_ns)
			continue;
		best_ns = after - before;
		*add_ns = (int64_t)(before + best_ns / 2 - theirs);
	}
	return best_ns <= MOST_READING_NS;
}

/* How records of a read-out are taken. */
struct reading {
	int64_t add_ns;
	bool is_refused; /* they are counted only: nobody knows their times */
	enum flush flush;
};

static void take_kernel(const struct cupti_kernel *kernel, const struct reading *reading)
{
	uint64_t begin_ns = kernel->start + reading->add_ns;
	uint64_t end_ns = kernel->end + reading->add_ns;
	uint64_t launch;

	/* A kernel that runs at the end belongs to no one. */
	if (reading->flush == FLUSH_ALL && !kernel->end)
		return;
	launch = graphs_launch_of(kernel, begin_ns);
	/* 0 where CUPTI could not tell. */
	if (reading->is_refused || !kernel->start || kernel->end < kernel->start) {
		losses_add(LOSS_TIMES_REFUSED, 1);
		return;
	}
	tell_context(kernel->context, kernel->device, 0);
	batch.rows[batch.count++] = (struct kernel_time){
		.launch = launch,
		.begin_ns = begin_ns,
		.end_ns = end_ns,
		.queue = kernel->stream,
		.node = kernel->node,
		.name = name_of(kernel->name),
		.device = kernel->device,
		.context = kernel->context,
		.graph = kernel->graph,
	};
	stalls_ran(kernel->context, begin_ns, end_ns - begin_ns);
	if (batch.count == MOST_ROWS)
		put_batch();
}

static cupti_result next_record(const struct subscription *subscription, int at, void **record)
{
	uint8_t *buffer = buffers + (size_t)at * BUFFER_BYTES;

	return subscription->is_v2
		       ? cupti.cuptiActivityGetNextRecord_v2(subscription->handle, buffer,
							     valid_bytes[at], record)
		       : cupti.cuptiActivityGetNextRecord(buffer, valid_bytes[at], record);
}

/* When the first kernel of a buffer began, by CUPTI's clock; 0: it has none. */
static uint64_t first_start(const struct subscription *subscription, int at)
{
	void *record = NULL;

	if (!valid_bytes[at] || next_record(subscription, at, &record) || !record ||
	    *(uint32_t *)record != CUPTI_ACTIVITY_CONCURRENT_KERNEL)
		return 0;
	return ((const struct cupti_kernel *)record)->start;
}

/*
 * CUPTI ends a buffer at the first record that is incomplete (cupti_activity.h): in the last one it is
 * of a kernel that runs, which belongs to no one. What comes after it in launch order is lost.
 */
static void count_refused(int at, const uint8_t *last, size_t record_bytes,
			  const struct reading *reading)
{
	const uint8_t *buffer = buffers + (size_t)at * BUFFER_BYTES;
	size_t read = last ? (size_t)(last - buffer) + record_bytes : 0;
	size_t refused = 1;

	if (record_bytes && read < valid_bytes[at])
		refused = (valid_bytes[at] - read) / record_bytes;
	if (refused && reading->flush == FLUSH_ALL)
		refused--;
	if (refused)
		losses_add(LOSS_TIMES_REFUSED, refused);
}

static void take_buffer(const struct subscription *subscription, int at,
			const struct reading *reading)
{
	static size_t record_bytes; /* as two that follow one another are apart; 0: not known yet */
	void *record = NULL, *last = NULL;
	cupti_result result = CUPTI_NO_MORE;

	while (valid_bytes[at]) {
		result = next_record(subscription, at, &record);
		if (result || !record)
			break;
		if (last)
			record_bytes = (size_t)((uint8_t *)record - (uint8_t *)last);
		last = record;
		if (*(uint32_t *)record == CUPTI_ACTIVITY_CONCURRENT_KERNEL)
			take_kernel(record, reading);
	}
	if (result == CUPTI_INVALID_KIND)
		count_refused(at, last, record_bytes, reading);
	else if (result && result != CUPTI_NO_MORE)
		tell_error(ERROR_CALL, result, "cuptiActivityGetNextRecord");
	atomic_store_explicit(&owners[at], OWNER_NOBODY, memory_order_release);
}

static void count_dropped(const struct subscription *subscription)
{
	size_t dropped = 0;

	if (subscription->is_v2 && cupti.cuptiActivityGetNumDroppedRecords_v2)
		cupti.cuptiActivityGetNumDroppedRecords_v2(subscription->handle, NULL, 0, &dropped);
	else if (!subscription->is_v2 && cupti.cuptiActivityGetNumDroppedRecords)
		cupti.cuptiActivityGetNumDroppedRecords(NULL, 0, &dropped);
	if (!dropped)
		return;
	losses_add(LOSS_TIMES_DROPPED, dropped);
	graphs_miss_kernels();
}

/* A buffer with records, and when the first of its kernels began. */
struct filled {
	int at;
	uint64_t start;
};

/* Finds them in the order of time, by which graphs.c may have to tell launches; returns how many. */
static int find_filled(const struct subscription *subscription, struct filled *filled)
{
	int count = 0;

	for (int at = 0; at < BUFFERS; at++) {
		struct filled one = { .at = at };
		int place = count;

		if (atomic_load_explicit(&owners[at], memory_order_acquire) != OWNER_READER)
			continue;
		one.start = first_start(subscription, at);
		for (; place && filled[place - 1].start > one.start; place--)
			filled[place] = filled[place - 1];
		filled[place] = one;
		count++;
	}
	return count;
}

void kernels_read(const struct subscription *subscription, enum flush flush)
{
	struct reading reading = { .flush = flush };
	struct filled filled[BUFFERS];
	int64_t step_ns;
	int count;
	cupti_result result = CUPTI_OK;

	if (flush != FLUSH_NOTHING) {
		result = cupti.cuptiActivityFlushAll(flush == FLUSH_ALL ? CUPTI_FLUSH_FORCED : 0);
		count_dropped(subscription);
	}
	if (result)
		tell_error(ERROR_CALL, result, "cuptiActivityFlushAll");
	count = find_filled(subscription, filled);
	/* Each subscriber of V2 has buffers of its own. */
	if (!count && flush == FLUSH_ENDED && !subscription->is_v2 && !hears())
		ask_anew(subscription);
	if (!count)
		return;
	if (find_clock(subscription, &reading.add_ns)) {
		/* Somebody set the clock since the last time: nobody knows by which these are. */
		step_ns = last_add_ns ? reading.add_ns - last_add_ns : 0;
		reading.is_refused = step_ns > MOST_CLOCK_STEP_NS || step_ns < -MOST_CLOCK_STEP_NS;
		last_add_ns = reading.add_ns;
		if (reading.is_refused)
			graphs_clock_was_set();
	} else if (flush == FLUSH_ALL) {
		reading.is_refused = true;
	} else {
		/* They stay in their buffers until the next time. */
		return;
	}
	for (int at = 0; at < count; at++) {
		/* What was launched before these ran. */
		take_events();
		if (launches_lost_graphs())
			graphs_miss_launches();
		take_buffer(subscription, filled[at].at, &reading);
	}
	put_batch();
}

void kernels_end(const struct subscription *subscription)
{
	if (subscription->is_v2)
		cupti.cuptiActivityDisable_v2(subscription->handle,
					      CUPTI_ACTIVITY_CONCURRENT_KERNEL, NULL);
	else
		cupti.cuptiActivityDisable(CUPTI_ACTIVITY_CONCURRENT_KERNEL);
	kernels_read(subscription, FLUSH_ALL);
}
