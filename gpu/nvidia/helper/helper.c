/* SPDX-License-Identifier: Apache-2.0 */
/* How the helper begins, is turned on and off, and its thread. */
#define _GNU_SOURCE
#include "old_glibc.h"
#include "helper.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "control.h"
#include "events.h"
#include "graphs.h"
#include "library.h"
#include "memory.h"
#include "names.h"
#include "probes.h"

#define HELPER_VERSION "1"
/* Tests have one that no other recorder looks for. */
#ifndef MEMORY_NAME
#define MEMORY_NAME "aiflame-nvidia"
#endif

#define EXPORTED __attribute__((visibility("default")))

/* CUDA 12.0: kernel records before it are others. From CUDA 13 on it is the toolkit's number. */
#define OLDEST_CUPTI 18
/* CUDA 12.8, as OLDEST_CUPTI_FOR_STALLS. */
#define OLDEST_DRIVER_FOR_STALLS 12080

#define MS 1000000ull
#define SECOND (1000 * MS)
/* From the environment: time enough for a recorder that has heard the bell to find the pipe. */
#define LEASE_NS (10 * SECOND)
/* To look again for what was not there: a driver that is loaded late, a profiler that ends. */
#define RETRY_NS (2 * SECOND)
/* The same for a driver that the program does not use yet: what it launches by then has no times. */
#define UNUSED_NS (SECOND / 4)
/* A time of sampling and a pause: more often would cost more than it spares, as each begins anew. */
#ifndef DUTY_NS
#define DUTY_NS (10 * SECOND)
#endif
/*
 * Serialised windows: one in so long, the first a tenth of that after sampling began, so that short
 * recordings have one. Tests have more.
 */
#ifndef WINDOWS_NS
#define WINDOWS_NS (10 * SECOND)
#endif
#define MOST_SERIALISED_PERMILLE 500
/* In a window CUPTI keeps each kernel's samples by itself, for which it has not much room. */
#define WINDOW_READ_OUT_NS (10 * MS)
#define ALWAYS_PERMILLE 1000
#define DEFAULT_READ_OUT_MS 500
#define MIN_READ_OUT_MS 10
#define MAX_READ_OUT_MS 10000
/* How often it is looked whether a capture has ended: they take milliseconds to seconds. */
#define CAPTURE_LOOK_MS 10
/* New in the ring since somebody was told: a quarter of it. */
#define BELL_BYTES (1u << 20)
/* Of one turning on: the same error may come with every read-out. */
#define MOST_ERRORS 64
/* Who destroys a context waits so long for a read-out, as does who begins. */
#define LOCK_NS (2 * SECOND)
/* An exit waits so long for the last read-out. */
#define EXIT_NS (2 * SECOND)
/*
 * And, where the environment asked, for a recorder that has not come yet: it has to find the process
 * before the process is over, whose memory goes with it. While nobody listens to the bell it may only
 * be that probes are being set.
 */
#define UNHEARD_NS (SECOND / 5)
#define RING_AGAIN_NS (50 * MS)
#define MOST_DEVICES 64
#define MOST_TOLD_CONTEXTS 256
/*
 * Facts that programs may make without end, graphs built anew and modules loaded again: 8 MB, and 3 MB
 * of them. As much as that again is left for contexts, reasons and names. Tests have fewer.
 */
#ifndef MOST_NODES
#define MOST_NODES 200000
#endif
#ifndef MOST_RELOADS
#define MOST_RELOADS 50000
#endif
#define MOST_NODES_A_TURN 65536

/* What was told of a context; of two that have one slot it is the later one. */
struct told_context {
	uint32_t context;
	bool is_told;
	uint64_t period_cycles;
	const struct fact_reasons *reasons; /* among the facts; NULL: none */
};

struct helper {
	struct control asked;
	struct subscription subscription;
	bool has_thread; /* without it nothing would ever be turned off */
	bool is_on; /* somebody asked for it */
	bool is_subscribed;
	bool has_recorder; /* the pipe is open */
	bool had_recorder;
	bool is_expected; /* a recorder, by the environment */
	bool is_final; /* why it is no more: another try would not help */
	bool samples_stalls;
	bool are_devices_told;
	bool is_paused;
	/* Asked for during a capture, which has to end before sampling does. */
	bool has_to_stop, has_to_start;
	enum why stop_why;
	struct control start_asked;
	enum tier reached;
	enum tier told; /* by HELLO, which knows of no duty cycle */
	const char *why; /* as HELLO told it: "" or why no higher */
	char why_text[256];
	uint64_t lease_ns, retry_ns, read_ns, duty_ns;
	uint32_t duty_permille; /* what holds in this cycle, which is what was asked before it */
	uint64_t sampled_ns; /* since duty_ns, until switched_ns, when it paused or went on last */
	uint64_t switched_ns;
	uint64_t window_number, window_end_ns;
	uint64_t bell_head;
	uint32_t errors;
	struct told_context contexts[MOST_TOLD_CONTEXTS];
	uint32_t nodes, reloads;
};

static struct helper helper = { .why = "nobody has asked for it" };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool ends, has_ended;
static _Thread_local bool is_helpers_thread;

bool lock_for_a_while(void)
{
	uint64_t until = now_ns() + LOCK_NS;
	struct timespec pause = { .tv_nsec = MS };

	/* pthread_mutex_timedlock goes by CLOCK_REALTIME, which somebody may set. */
	while (pthread_mutex_trylock(&lock)) {
		if (now_ns() > until)
			return false;
		nanosleep(&pause, NULL);
	}
	return true;
}

void unlock(void)
{
	pthread_mutex_unlock(&lock);
}

static void ring_bell(void)
{
	helper.bell_head = ring_head();
	aiflame_gpu_bell();
}

static void put_fact(enum fact kind, const struct part *parts, int count)
{
	if (!fact_put(kind, parts, count))
		losses_add(LOSS_FACTS, 1);
}

/* One of those that may come without end: at most so many. */
static void put_some(enum fact kind, const struct part *part, uint32_t *count, uint32_t most)
{
	if (*count == most) {
		losses_add(LOSS_FACTS, 1);
		return;
	}
	++*count;
	put_fact(kind, part, 1);
}

static const char *text_of(cupti_result code)
{
	const char *text = NULL;

	if (!code || !cupti.cuptiGetResultString || cupti.cuptiGetResultString(code, &text) ||
	    !text)
		return "";
	return text;
}

static void put_error(enum error error, cupti_result code, const char *what, const char *text)
{
	struct passing_error head = { now_ns(), error, code };

	if (helper.errors++ < MOST_ERRORS)
		ring_put(PASSING_ERROR,
			 (struct part[]){ PART(head), part_of_text(what), part_of_text(text) }, 3);
}

void tell_error(enum error error, cupti_result code, const char *what)
{
	put_error(error, code, what, text_of(code));
}

enum error error_of(cupti_result code)
{
	switch (code) {
	case CUPTI_NO_RIGHTS:
	case CUPTI_VIRTUAL_NO_RIGHTS:
		return ERROR_RIGHTS;
	case CUPTI_OUT_OF_MEMORY:
		return ERROR_MEMORY;
	case CUPTI_OLD_PROFILER:
	case CUPTI_TAKEN:
		return ERROR_TAKEN;
	case CUPTI_NOT_SUPPORTED:
	case CUPTI_VIRTUAL_DEVICE:
	case CUPTI_LEGACY_PROFILER:
	case CUPTI_CONFIDENTIAL:
	case CUPTI_CMP:
	case CUPTI_MIG:
	case CUPTI_SLI:
	case CUPTI_WSL:
		return ERROR_UNSUPPORTED;
	default:
		return ERROR_CALL;
	}
}

static void tell_hello(void)
{
	struct fact_hello head = { PROTOCOL_VERSION, getpid(), helper.told, 0 };
	char library[PATH_MAX + 32] = "", driver[32] = "";
	uint32_t version = 0;
	int cuda_version = 0;

	if (cupti.cuptiGetVersion && !cupti.cuptiGetVersion(&version))
		snprintf(library, sizeof(library), "CUPTI %u %s", version, library_path());
	if (cuda.cuDriverGetVersion && !cuda.cuDriverGetVersion(&cuda_version))
		snprintf(driver, sizeof(driver), "%d.%d", cuda_version / 1000,
			 cuda_version % 1000 / 10);
	put_fact(FACT_HELLO,
		 (struct part[]){ PART(head), part_of_text("nvidia"), part_of_text(HELPER_VERSION),
				  part_of_text(library), part_of_text(driver),
				  part_of_text(helper.why) },
		 6);
}

static void put_state(enum why why)
{
	struct passing_state state = { now_ns(), helper.reached, why, helper.duty_permille, 0 };

	ring_put(PASSING_STATE, &PART(state), 1);
}

/* What goes on from here, and why no more does. */
static void reach(enum tier tier, const char *why_no_more, enum why why)
{
	bool is_new = tier != helper.reached;

	helper.reached = tier;
	/* A duty cycle would fill the facts, which stay. */
	if (why != WHY_DUTY && (tier != helper.told || strcmp(why_no_more, helper.why))) {
		snprintf(helper.why_text, sizeof(helper.why_text), "%s", why_no_more);
		helper.why = helper.why_text;
		helper.told = tier;
		tell_hello();
	}
	if (is_new)
		put_state(why);
}

void stalls_reached(const char *why)
{
	if (*why)
		reach(TIER_TIMES, why, WHY_ERROR);
	else
		reach(TIER_STALLS, "", WHY_ASKED);
}

void stalls_wait(void)
{
	/* Where they were sampled before, it is for a moment. */
	if (helper.told < TIER_STALLS)
		reach(TIER_TIMES, "PC sampling: waits until no stream is captured", WHY_ASKED);
}

static struct told_context *told_of(uint32_t context)
{
	struct told_context *told = &helper.contexts[context % MOST_TOLD_CONTEXTS];

	if (told->context != context)
		*told = (struct told_context){ .context = context };
	return told;
}

void tell_context(uint32_t context, uint32_t device, uint64_t period_cycles)
{
	struct fact_context fact = { context, device, period_cycles };
	struct told_context *told = told_of(context);

	/* Kernel times know of no period. */
	if (told->is_told && (!period_cycles || told->period_cycles == period_cycles))
		return;
	told->is_told = true;
	told->period_cycles = period_cycles;
	put_fact(FACT_CONTEXT, &PART(fact), 1);
}

void tell_reasons(uint32_t context, const struct reason *reasons, uint32_t count)
{
	struct fact_reasons head = { context, count };
	struct part parts[] = { PART(head), { reasons, count * sizeof(*reasons) } };
	struct told_context *told = told_of(context);

	/* CUPTI is asked for them whenever sampling begins: with each turn of a duty cycle. */
	if (told->reasons && told->reasons->count == count &&
	    !memcmp(told->reasons + 1, reasons, parts[1].size))
		return;
	told->reasons = fact_put(FACT_REASONS, parts, 2);
	if (!told->reasons)
		losses_add(LOSS_FACTS, 1);
}

static int attribute_of(int which, cu_device device)
{
	int value = 0;

	if (!cuda.cuDeviceGetAttribute || cuda.cuDeviceGetAttribute(&value, which, device))
		return 0;
	return value;
}

/* Where cuInit has ended: before that it is the driver's to tell nothing. */
static void tell_devices(void)
{
	int count = 0;

	if (helper.are_devices_told || !cuda.cuDeviceGetCount || cuda.cuDeviceGetCount(&count))
		return;
	helper.are_devices_told = true;
	for (int device = 0; device < count && device < MOST_DEVICES; device++) {
		struct fact_device fact = {
			.device = device,
			.multiprocessors = attribute_of(CU_MULTIPROCESSORS, device),
			.clock_khz = attribute_of(CU_CLOCK_KHZ, device),
			.major = attribute_of(CU_MAJOR, device),
			.minor = attribute_of(CU_MINOR, device),
		};
		char name[256] = "";

		if (cuda.cuDeviceGetName)
			cuda.cuDeviceGetName(name, sizeof(name) - 1, device);
		/* Of an instance of a device (MIG) the first tells the whole's: cuda.h. */
		if ((!cuda.cuDeviceGetUuid_v2 || cuda.cuDeviceGetUuid_v2(fact.uuid, device)) &&
		    cuda.cuDeviceGetUuid)
			cuda.cuDeviceGetUuid(fact.uuid, device);
		put_fact(FACT_DEVICE, (struct part[]){ PART(fact), part_of_text(name) }, 2);
	}
}

static void end_at_exit(void);

static void begin_duty(void)
{
	helper.duty_permille = helper.asked.duty_permille;
	helper.duty_ns = helper.switched_ns = now_ns();
	helper.sampled_ns = 0;
	helper.window_number = 0;
}

/* Turns everything on that may be; says why not. */
static void subscribe(void)
{
	const char *what = "", *lacks = NULL;
	char rival[CUPTI_OLD_NAME_BYTES] = "", why[128];
	uint32_t version = 0;
	int driver = 0;
	cupti_result result;

	helper.retry_ns = now_ns() + RETRY_NS;
	*why = 0;
	switch (library_find(!is_helpers_thread, &what, &lacks)) {
	case LIBRARY_NO_CUDA:
		reach(TIER_LAUNCHES, "there is no CUDA driver in this process, or not yet",
		      WHY_ASKED);
		return;
	case LIBRARY_UNUSED:
		helper.retry_ns = now_ns() + UNUSED_NS;
		reach(TIER_LAUNCHES, "the process does not use CUDA yet", WHY_ASKED);
		return;
	case LIBRARY_NO_CUPTI:
		if (strcmp(helper.why, "there is no libcupti"))
			put_error(ERROR_NO_LIBRARY, 0, "libcupti", "");
		reach(TIER_LAUNCHES, "there is no libcupti", WHY_ERROR);
		return;
	case LIBRARY_LACKS:
		put_error(ERROR_SYMBOL, 0, what, "");
		snprintf(why, sizeof(why), "libcupti has no %s", what);
		reach(TIER_LAUNCHES, why, WHY_ERROR);
		helper.is_final = true;
		return;
	case LIBRARY_FOUND:
		break;
	}
	if (is_helpers_thread)
		stalls_relax_captures();
	result = cupti.cuptiGetVersion(&version);
	if (result) {
		tell_error(error_of(result), result, "cuptiGetVersion");
		reach(TIER_LAUNCHES, "cuptiGetVersion failed: CUPTI does not go with the driver",
		      WHY_ERROR);
		helper.is_final = true;
		return;
	}
	if (version < OLDEST_CUPTI) {
		put_error(ERROR_TOO_OLD, 0, "CUPTI", "");
		reach(TIER_LAUNCHES, "CUPTI is too old: kernel times need CUDA 12.0", WHY_ERROR);
		helper.is_final = true;
		return;
	}
	result = launches_subscribe(&helper.subscription, rival, &what);
	if (result == CUPTI_TAKEN) {
		rival[sizeof(rival) - 1] = 0;
		snprintf(why, sizeof(why), "another profiler uses CUPTI%s%s", *rival ? ": " : "",
			 rival);
		if (strcmp(helper.why, why))
			put_error(ERROR_TAKEN, result, what, rival);
		reach(TIER_LAUNCHES, why, WHY_ERROR);
		return;
	}
	if (result) {
		tell_error(error_of(result), result, what);
		snprintf(why, sizeof(why), "%s failed: %s", what, text_of(result));
		reach(TIER_LAUNCHES, why, WHY_ERROR);
		helper.is_final = true;
		return;
	}
	helper.samples_stalls = false;
	if (cuda.cuDriverGetVersion)
		cuda.cuDriverGetVersion(&driver);
	if (helper.asked.tier < TIER_STALLS)
		snprintf(why, sizeof(why), "%s", "");
	else if (lacks)
		snprintf(why, sizeof(why), "PC sampling: libcupti has no %s", lacks);
	else if (version < OLDEST_CUPTI_FOR_STALLS)
		snprintf(why, sizeof(why), "PC sampling needs CUPTI of CUDA 12.8");
	else if (driver < OLDEST_DRIVER_FOR_STALLS)
		snprintf(why, sizeof(why), "PC sampling needs a driver of CUDA 12.8");
	else
		helper.samples_stalls = true;
	if (lacks && helper.asked.tier >= TIER_STALLS)
		put_error(ERROR_SYMBOL, 0, lacks, "");
	else if (*why)
		put_error(ERROR_TOO_OLD, 0, "PC sampling", "");
	if (helper.samples_stalls) {
		snprintf(why, sizeof(why), "PC sampling: no context yet");
		stalls_begin(helper.asked.period_exponent);
	}
	result = kernels_begin(&helper.subscription, &what);
	if (!result)
		result = launches_begin(&helper.subscription, helper.samples_stalls, &what);
	if (result) {
		tell_error(error_of(result), result, what);
		kernels_end(&helper.subscription);
		launches_end(&helper.subscription);
		stalls_end();
		snprintf(why, sizeof(why), "%s failed: %s", what, text_of(result));
		reach(TIER_LAUNCHES, why, WHY_ERROR);
		helper.is_final = true;
		return;
	}
	graphs_begin(version, launches_newest());
	helper.is_subscribed = true;
	helper.is_paused = false;
	begin_duty();
	end_at_exit();
	reach(TIER_TIMES, why, WHY_ASKED);
}

static void unsubscribe(void)
{
	stalls_end();
	kernels_end(&helper.subscription);
	launches_end(&helper.subscription);
	helper.is_subscribed = false;
	/* Those of this session. */
	take_events();
}

/* Whether CUPTI has called cuptiFinalize by itself: nothing of it is touched any more. */
static bool is_ended_by_driver(void)
{
	if (!launches_were_ended())
		return false;
	if (helper.is_subscribed) {
		put_error(ERROR_DRIVER, 0, "CUPTI", "");
		stalls_drop();
		launches_drop();
		helper.is_subscribed = false;
	}
	helper.is_final = true;
	if (helper.is_on)
		reach(TIER_LAUNCHES, "CUPTI has met a fatal error and ended itself", WHY_ERROR);
	return true;
}

/* Whether sampling may not end yet: that synchronises, and would end the capture of a stream. */
static bool waits_for_capture(void)
{
	return helper.is_subscribed && helper.samples_stalls && !launches_were_ended() &&
	       launches_capture();
}

static void start(const struct control *asked)
{
	bool is_other = helper.is_on && (asked->tier != helper.asked.tier ||
					 asked->period_exponent != helper.asked.period_exponent);

	helper.has_to_stop = false;
	helper.has_to_start = is_other && waits_for_capture();
	if (helper.has_to_start) {
		helper.start_asked = *asked;
		return;
	}
	/* Who asks for something else puts this back in the end: another recorder may want it. */
	if (helper.is_on && helper.is_subscribed)
		put_state(WHY_ASKED);
	if (is_other && !is_ended_by_driver() && helper.is_subscribed)
		unsubscribe();
	helper.asked = *asked;
	if (helper.asked.read_out_ms < MIN_READ_OUT_MS)
		helper.asked.read_out_ms = DEFAULT_READ_OUT_MS;
	if (helper.asked.read_out_ms > MAX_READ_OUT_MS)
		helper.asked.read_out_ms = MAX_READ_OUT_MS;
	if (helper.asked.duty_permille > ALWAYS_PERMILLE)
		helper.asked.duty_permille = ALWAYS_PERMILLE;
	if (helper.asked.serialised_permille > MOST_SERIALISED_PERMILLE)
		helper.asked.serialised_permille = MOST_SERIALISED_PERMILLE;
	if (!helper.is_on || is_other) {
		helper.is_final = false;
		helper.errors = 0;
	}
	helper.is_on = true;
	if (!is_ended_by_driver() && !helper.is_subscribed && !helper.is_final)
		subscribe();
	ring_bell();
}

static void stop_now(enum why why)
{
	helper.has_to_stop = helper.has_to_start = false;
	if (!helper.is_on)
		return;
	take_events();
	if (!is_ended_by_driver() && helper.is_subscribed)
		unsubscribe();
	helper.is_on = false;
	losses_put();
	reach(TIER_LAUNCHES,
	      why == WHY_RECORDER_GONE ? "the recorder is gone" : "nobody has asked for it", why);
	ring_bell();
}

static void stop(enum why why)
{
	if (!helper.is_on || !waits_for_capture()) {
		stop_now(why);
		return;
	}
	helper.has_to_start = false;
	if (helper.has_to_stop)
		return;
	helper.has_to_stop = true;
	helper.stop_why = why;
	/* What there is now is what was asked for. */
	helper.read_ns = 0;
}

/* What had to wait for the end of a capture. */
static void take_waiting(void)
{
	struct control asked = helper.start_asked;

	if (waits_for_capture())
		return;
	if (helper.has_to_stop)
		stop_now(helper.stop_why);
	else if (helper.has_to_start)
		start(&asked);
}

static void take_messages(void)
{
	struct control message;
	enum control_found found;

	while ((found = control_read(&message)) == CONTROL_MESSAGE || found == CONTROL_BAD) {
		helper.has_recorder = true;
		if (found == CONTROL_MESSAGE && message.verb == VERB_START)
			start(&message);
		else if (found == CONTROL_MESSAGE && message.verb == VERB_STOP)
			stop(WHY_ASKED);
		else
			put_error(ERROR_CONTROL, 0, "control", "");
	}
	if (found == CONTROL_NOTHING)
		helper.has_recorder = true;
	helper.had_recorder |= helper.has_recorder;
	if (found == CONTROL_NOBODY && (helper.has_recorder || now_ns() > helper.lease_ns)) {
		helper.has_recorder = false;
		stop(WHY_RECORDER_GONE);
	}
}

/* Which code a module is; of two that have one slot the later one is known. */
#define MOST_LOADED (1u << 14)

struct loaded {
	uint32_t module;
	uint64_t code;
};

static struct loaded loaded[MOST_LOADED];

/* The bytes of a module are told once, and kept while there is room for other facts. */
static void take_module(const struct event *event)
{
	static uint64_t kept[1 << 12]; /* codes whose bytes are among the facts; 0: free */
	struct cupti_cubin_crc ask = {
		.size = CUPTI_SIZE(struct cupti_cubin_crc, crc),
		.cubin_size = event->size,
		.cubin = event->bytes,
	};
	struct fact_code fact = { .loaded_ns = event->at_ns,
				  .code_bytes = event->size,
				  .context = event->context,
				  .module = event->module };
	struct part parts[] = { PART(fact), { event->bytes, event->size } };
	uint32_t at, tries = 0;

	/* Without its bytes nobody knows what samples call it. */
	if (!event->bytes || launches_were_ended() || cupti.cuptiGetCubinCrc(&ask)) {
		losses_add(LOSS_CODE_BYTES, 1);
		return;
	}
	fact.code = ask.crc;
	loaded[event->module % MOST_LOADED] = (struct loaded){ event->module, ask.crc };
	at = ask.crc % (sizeof(kept) / sizeof(*kept));
	while (kept[at] && kept[at] != ask.crc && tries++ < 64)
		at = (at + 1) % (sizeof(kept) / sizeof(*kept));
	if (kept[at] == ask.crc) {
		put_some(FACT_CODE, parts, &helper.reloads, MOST_RELOADS);
		return;
	}
	/* A quarter of the room is for names, nodes and the like. */
	if (kept[at] || facts_room() < event->size + (16u << 20) ||
	    !fact_put(FACT_CODE, parts, 2)) {
		losses_add(LOSS_CODE_BYTES, 1);
		put_some(FACT_CODE, parts, &helper.reloads, MOST_RELOADS);
		return;
	}
	kept[at] = ask.crc;
}

static void take_unloaded(const struct event *event)
{
	struct passing_code_unloaded record = { .unloaded_ns = event->at_ns,
						.context = event->context,
						.module = event->module };
	const struct loaded *slot = &loaded[event->module % MOST_LOADED];

	if (slot->module == event->module)
		record.code = slot->code;
	ring_put(PASSING_CODE_UNLOADED, &PART(record), 1);
}

void take_events(void)
{
	struct event event;

	for (int taken = 0; taken < MOST_NODES_A_TURN && event_take(&event); taken++) {
		struct fact_node node = { event.node, event.original, event.launch };

		switch (event.kind) {
		case EVENT_MODULE_LOADED:
			take_module(&event);
			launches_free(event.bytes, event.bytes ? event.size : 0);
			break;
		case EVENT_MODULE_UNLOADED:
			/* Its samples first, before other code is where it was. */
			if (!is_ended_by_driver() && helper.is_subscribed &&
			    helper.samples_stalls && !helper.is_paused)
				stalls_turn(true);
			take_unloaded(&event);
			break;
		case EVENT_NODE:
			put_some(FACT_NODE, &PART(node), &helper.nodes, MOST_NODES);
			break;
		case EVENT_GRAPH_LAUNCH:
			graphs_see(event.launch, event.executable, event.graph, event.at_ns);
			break;
		}
	}
}

/* Whether it pauses within each cycle. */
static bool has_duty_cycle(void)
{
	return helper.samples_stalls && helper.duty_permille &&
	       helper.duty_permille < ALWAYS_PERMILLE;
}

/* How much longer it has sampled than its share of the time since duty_ns. */
static int64_t duty_ahead_ns(uint64_t now)
{
	uint64_t sampled_ns = helper.sampled_ns;

	if (!helper.is_paused)
		sampled_ns += now - helper.switched_ns;
	return (int64_t)(sampled_ns - (now - helper.duty_ns) / 1000 * helper.duty_permille);
}

/* So much of it is the first part of a cycle, after which it pauses until it is none. */
static int64_t duty_most_ahead_ns(void)
{
	return DUTY_NS / 1000 * helper.duty_permille / 1000 * (1000 - helper.duty_permille);
}

/* When it pauses or goes on. */
static uint64_t duty_until_ns(uint64_t now)
{
	int64_t ahead_ns = duty_ahead_ns(now), left_ns = duty_most_ahead_ns() - ahead_ns;

	if (!has_duty_cycle())
		return UINT64_MAX;
	if (helper.is_paused)
		return now + (ahead_ns > 0 ? ahead_ns / helper.duty_permille * 1000 : 0);
	return now + (left_ns > 0 ? left_ns / (1000 - helper.duty_permille) * 1000 : 0);
}

/* Whether it has to pause now. Where it came too late the next pause, or part, is that much longer. */
static bool has_to_pause(uint64_t now)
{
	int64_t ahead_ns = duty_ahead_ns(now);

	if (!has_duty_cycle())
		return !helper.duty_permille;
	return helper.is_paused ? ahead_ns > 0 : ahead_ns >= duty_most_ahead_ns();
}

/*
 * What is asked for holds from the end of a cycle on, with all samples read out by then: who reads
 * them knows how much of the time they stand for.
 */
static void take_duty(uint64_t now)
{
	int64_t ahead_ns = duty_ahead_ns(now);

	if (helper.asked.duty_permille != helper.duty_permille &&
	    (!has_duty_cycle() || (helper.is_paused && !has_to_pause(now)))) {
		if (!helper.is_paused)
			stalls_turn(true);
		begin_duty();
		put_state(WHY_ASKED);
	} else if (ahead_ns > (int64_t)DUTY_NS || ahead_ns < -(int64_t)DUTY_NS) {
		/* The process was stopped: that is not made up for. */
		begin_duty();
	}
}

static void keep_duty(void)
{
	uint64_t now;
	bool pauses;

	if (!helper.samples_stalls)
		return;
	take_duty(now_ns());
	now = now_ns();
	pauses = has_to_pause(now);
	/* In the midst of a capture sampling does not end. */
	if (pauses == helper.is_paused || (pauses && launches_capture()))
		return;
	if (pauses)
		helper.sampled_ns += now - helper.switched_ns;
	helper.switched_ns = now;
	helper.is_paused = pauses;
	if (!pauses) {
		stalls_resume();
		return;
	}
	stalls_pause();
	if (helper.reached == TIER_STALLS)
		reach(TIER_TIMES, "", WHY_DUTY);
}

/* How far the time between two windows has gone; a window begins a tenth after its beginning. */
static uint64_t windows_phase_ns(uint64_t now)
{
	return (now - helper.duty_ns) % WINDOWS_NS;
}

static uint64_t window_length_ns(void)
{
	return WINDOWS_NS / 1000 * helper.asked.serialised_permille;
}

/* When windows have to be looked after. */
static uint64_t windows_until_ns(uint64_t now)
{
	uint64_t phase = windows_phase_ns(now), first = WINDOWS_NS / 10;

	if (stalls_have_window() || (phase >= first && phase < first + window_length_ns()))
		return now + WINDOW_READ_OUT_NS;
	if (!helper.samples_stalls || !helper.asked.serialised_permille)
		return UINT64_MAX;
	return now - phase + first + (phase < first ? 0 : WINDOWS_NS);
}

/* One in each of these times, however short a capture made it: switching costs the target. */
static void keep_windows(uint64_t now)
{
	uint64_t phase = windows_phase_ns(now), first = WINDOWS_NS / 10;
	uint64_t number = (now - helper.duty_ns) / WINDOWS_NS + 1;
	bool is_wanted =
		helper.asked.serialised_permille && !helper.is_paused && !helper.has_to_stop;

	if (stalls_have_window()) {
		stalls_close_window(is_wanted && now < helper.window_end_ns);
	} else if (is_wanted && number != helper.window_number && phase >= first &&
		   phase < first + window_length_ns()) {
		stalls_open_window();
		if (!stalls_have_window())
			return;
		helper.window_number = number;
		helper.window_end_ns = now_ns() + window_length_ns();
	}
}

static void take_turn(void)
{
	uint64_t now = now_ns();
	bool is_time = now >= helper.read_ns;

	if (is_ended_by_driver())
		return;
	if (!helper.is_subscribed) {
		if (!helper.is_final && now >= helper.retry_ns)
			subscribe();
		return;
	}
	tell_devices();
	/* Before cuInit it was in vain. */
	stalls_relax_captures();
	take_events();
	if (!helper.has_to_stop)
		keep_duty();
	if (helper.samples_stalls)
		keep_windows(now);
	if (helper.samples_stalls && !helper.is_paused)
		stalls_turn(is_time || stalls_have_window());
	if (is_time)
		helper.read_ns = now + helper.asked.read_out_ms * MS;
	kernels_read(&helper.subscription, is_time ? FLUSH_ENDED : FLUSH_NOTHING);
	losses_put();
	if (ring_head() - helper.bell_head >= BELL_BYTES)
		ring_bell();
}

/* Whether it would pause if no stream were captured. */
static bool pause_waits(uint64_t now)
{
	return !helper.is_paused && has_to_pause(now) && waits_for_capture();
}

static int timeout_ms(void)
{
	uint64_t now = now_ns(), until = helper.is_subscribed ? helper.read_ns : helper.retry_ns;

	if (!helper.is_subscribed && helper.is_final)
		until = UINT64_MAX;
	if (helper.is_on && (helper.has_to_stop || helper.has_to_start || pause_waits(now)))
		return CAPTURE_LOOK_MS;
	if (helper.is_subscribed && windows_until_ns(now) < until)
		until = windows_until_ns(now);
	if (helper.is_subscribed && duty_until_ns(now) < until)
		until = duty_until_ns(now);
	if (!helper.is_on || (until == UINT64_MAX && helper.has_recorder))
		return -1;
	/* What waits for a recorder looks at its lease. */
	if (!helper.has_recorder && helper.lease_ns < until)
		until = helper.lease_ns;
	return until <= now ? 1 : (int)((until - now) / MS) + 1;
}

static void *run(void *unused)
{
	(void)unused;
	is_helpers_thread = true;
	prctl(PR_SET_NAME, "aiflame-nvidia", 0, 0, 0);
	for (;;) {
		int wait_ms;

		pthread_mutex_lock(&lock);
		/* After the exit has begun, CUPTI may go at any time. */
		if (!atomic_load(&has_ended)) {
			take_messages();
			if (helper.is_on)
				take_turn();
			take_waiting();
		}
		if (atomic_load(&ends)) {
			stop_now(WHY_ASKED);
			atomic_store(&has_ended, true);
		}
		wait_ms = atomic_load(&has_ended) ? -1 : timeout_ms();
		pthread_mutex_unlock(&lock);
		if (!control_wait(wait_ms))
			break;
	}
	/* The program has closed what it did not open: nothing can be asked for any more. */
	pthread_mutex_lock(&lock);
	stop_now(WHY_ERROR);
	atomic_store(&has_ended, true);
	pthread_mutex_unlock(&lock);
	return NULL;
}

/* A process that exits as soon as it has begun may be faster than its recorder. */
static void wait_to_be_found(void)
{
	uint64_t now = now_ns(), unheard_ns = now + UNHEARD_NS, until = now + EXIT_NS,
		 ring_ns = now;
	struct timespec pause = { .tv_nsec = MS };
	struct control message;

	if (!helper.is_expected || helper.had_recorder || now > helper.lease_ns)
		return;
	/* The thread reads the pipe no more. */
	while (control_read(&message) == CONTROL_NOBODY && now < until &&
	       (now < unheard_ns || bell_is_probed())) {
		if (now >= ring_ns) {
			aiflame_gpu_bell();
			ring_ns = now + RING_AGAIN_NS;
		}
		nanosleep(&pause, NULL);
		now = now_ns();
	}
	if (control_read(&message) == CONTROL_NOBODY)
		aiflame_gpu_gone(kernels_told());
}

/* The last kernels, of a process that exits; one that is killed has told what was read out. */
static void at_exit(void)
{
	uint64_t until = now_ns() + EXIT_NS;
	struct timespec pause = { .tv_nsec = MS };

	if (!memory_is_ours())
		return;
	atomic_store(&ends, true);
	control_wake();
	while (!atomic_load(&has_ended) && now_ns() < until)
		nanosleep(&pause, NULL);
	if (atomic_load(&has_ended))
		wait_to_be_found();
}

/* Once CUPTI is there: what is registered later is called earlier, and CUPTI ends itself at exit. */
static void end_at_exit(void)
{
	static bool is_registered;

	if (!is_registered)
		is_registered = !atexit(at_exit);
}

/* Returns the number after `name=`, or what it is otherwise. */
static uint32_t number_of(const char *text, const char *name, uint32_t otherwise)
{
	const char *at = strstr(text, name);
	uint32_t number = 0;

	if (!at || at[strlen(name)] < '0' || at[strlen(name)] > '9')
		return otherwise;
	/* Not strtoul: newer headers make it one that older libraries do not have. */
	for (at += strlen(name); *at >= '0' && *at <= '9' && number < 1000000; at++)
		number = number * 10 + (uint32_t)(*at - '0');
	return number;
}

/* What a process that a recorder has started asks for in its environment. */
static bool read_environment(struct control *asked)
{
	const char *text = getenv("AIFLAME_GPU");

	if (!text)
		return false;
	*asked = (struct control){
		.verb = VERB_START,
		.tier = number_of(text, "tier=", TIER_LAUNCHES),
		.duty_permille = number_of(text, "duty=", ALWAYS_PERMILLE),
		.period_exponent = number_of(text, "period=", 0),
		.read_out_ms = number_of(text, "read-out=", DEFAULT_READ_OUT_MS),
		.serialised_permille = number_of(text, "serialised=", 0),
	};
	return asked->tier > TIER_LAUNCHES;
}

static bool begin_thread(void)
{
	sigset_t all, old;
	pthread_t thread;
	pthread_attr_t attributes;
	bool has_begun;

	/* The target's signals are for its own threads. */
	sigfillset(&all);
	if (pthread_sigmask(SIG_BLOCK, &all, &old))
		return false;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	has_begun = !pthread_create(&thread, &attributes, run, NULL);
	pthread_attr_destroy(&attributes);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return has_begun;
}

/* Loaded, however: the memory and the thread, which sleeps. */
__attribute__((constructor)) static void begin(void)
{
	int control_fd;

	/*
	 * Recorders that come at the same time load a copy each: the first is everybody's. None is made
	 * in between, as the loader is locked.
	 */
	if (memory_is_there(MEMORY_NAME) || memory_make(MEMORY_NAME))
		return;
	/* The thread writes as soon as it may: not before there is a memory. */
	pthread_mutex_lock(&lock);
	helper.lease_ns = now_ns() + LEASE_NS;
	control_fd = control_make();
	helper.has_thread = control_fd >= 0 && begin_thread();
	if (!helper.has_thread) {
		control_end();
		control_fd = -1;
		helper.why = "the process may have no more descriptors, or no more threads";
	}
	tell_hello();
	memory_publish(control_fd);
	unlock();
	aiflame_gpu_bell();
}

/*
 * By the driver, in cuInit of a process that has CUDA_INJECTION64_PATH: what the environment asks for
 * is on before its first launch. Returns 1: it may go on.
 */
EXPORTED int InitializeInjection(void)
{
	struct control asked;

	if (!memory_is_ours() || !helper.has_thread || !read_environment(&asked) ||
	    !lock_for_a_while())
		return 1;
	helper.is_expected = true;
	start(&asked);
	unlock();
	control_wake();
	return 1;
}
