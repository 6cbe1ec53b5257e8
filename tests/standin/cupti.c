/* SPDX-License-Identifier: Apache-2.0 */
/* CUPTI: libcupti.so.12. A function is left out by -DFUNCTION=absent_FUNCTION. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of CUDA 12.9; another copy has another one. */
#ifndef CUPTI_VERSION
#define CUPTI_VERSION 28
#endif
#include <time.h>
#include <unistd.h>

#define REASONS 4
#define MOST_RUNS (1u << 18)
/* What 12.9 has: CUpti_ActivityKernel9. */
#define KERNEL_BYTES 208
/* Half of those that the helper has. */
#define MOST_REVERSED 16
#define MOST_IDS 1024

static const struct {
	uint32_t index;
	const char *name;
} reasons[REASONS] = {
	/* Numbers as no list has them: they differ by chip. */
	{ 3, "smsp__pcsamp_warps_issue_stalled_long_scoreboard" },
	{ 21, "smsp__pcsamp_warps_issue_stalled_long_scoreboard_not_issued" },
	{ 7, "smsp__pcsamp_warps_issue_stalled_selected" },
	{ 12, "smsp__pcsamp_warps_issue_stalled_wait" },
};

static _Atomic(cupti_callback) callback;
static void *callback_user;
static bool is_v2; /* before there are launches */
static _Atomic uint8_t enabled[8][MOST_IDS];
static _Atomic uint32_t launches, asked, finalized, sessions;

static cupti_buffer_requested request;
static cupti_buffer_completed complete;
static cupti_buffer_requested_v2 request_v2;
static cupti_buffer_completed_v2 complete_v2;
static _Atomic bool times_are_on;
/* Whose records, and whose samples, nobody has seen. */
static struct run runs[MOST_RUNS], sampled[MOST_RUNS];
static uint32_t run_count, sampled_count;
static _Atomic size_t dropped;

static void call(uint32_t domain, uint32_t id, const void *data)
{
	cupti_callback to = callback;

	if (to && id < MOST_IDS && enabled[domain][id])
		to(callback_user, domain, id, data);
}

static void at_api(uint32_t domain, uint32_t id, uint32_t site, const char *name,
		   const void *params, void *result, struct context_of_driver *context,
		   uint32_t correlation)
{
	uint64_t own = 0;
	struct cupti_callback_data data = {
		.site = site,
		.function_name = name,
		.params = params,
		.result = result,
		.symbol = "",
		.context = context,
		.context_uid = context ? context->id : 0,
		.correlation_data = &own,
		.correlation = correlation,
	};

	call(domain, id, &data);
	if (domain == CUPTI_DRIVER && site == CUPTI_EXIT &&
	    ++launches == standin_word("fatal", 0)) {
		struct cupti_state_data state = { 999, "fatal" };

		call(CUPTI_STATE, CUPTI_FATAL, &state);
		finalized = 1;
	}
}

static void at_resource(uint32_t id, struct context_of_driver *context, void *descriptor)
{
	struct cupti_resource_data data = { context, NULL, descriptor };

	call(CUPTI_RESOURCE, id, &data);
}

/* With standin_lock: the number that a kernel of a graph is told by. */
static uint32_t told_of_graph(const struct run *run)
{
	static uint32_t this, before, last_of_first;

	if (run->correlation != this) {
		before = this;
		this = run->correlation;
	}
	if (sessions < 2) {
		last_of_first = this;
		return this;
	}
	return standin_word("old-graphs", 0)	 ? last_of_first
	       : standin_word("other-graphs", 0) ? before
						 : this;
}

/* With standin_lock. */
static void at_run(const struct run *run)
{
	uint32_t told = run->graph ? told_of_graph(run) : run->correlation;

	if (times_are_on && run_count < MOST_RUNS) {
		runs[run_count] = *run;
		runs[run_count++].correlation = told;
	} else if (times_are_on) {
		dropped++;
	}
	if (run->context && run->context->sampler.is_on && !run->context->sampler.is_serialised &&
	    sampled_count < MOST_RUNS)
		sampled[sampled_count++] = *run;
}

/* With standin_lock. */
static bool serialises(struct context_of_driver *context)
{
	return context && context->sampler.is_on && context->sampler.is_serialised;
}

static void at_end(const struct run *run);

/* Functions of V1 and of V2 do not mix. */
#define OF_V1(call) (is_v2 ? CUPTI_NOT_COMPATIBLE : (call))
#define OF_V2(call) (is_v2 ? (call) : CUPTI_NOT_COMPATIBLE)

/* After its end nothing of it may be called. */
static void check(void)
{
	if (!finalized)
		return;
	fputs("stand-in: CUPTI was called after its end\n", stderr);
	abort();
}

/* It would initialise the driver, which is the program's to do. */
static void check_use(void)
{
	if (standin_is_used)
		return;
	fputs("stand-in: CUPTI was called before cuInit\n", stderr);
	abort();
}

EXPORTED cupti_result cuptiGetVersion(uint32_t *version)
{
	*version = (uint32_t)standin_word("cupti", CUPTI_VERSION);
	return 0;
}

EXPORTED cupti_result cuptiGetResultString(cupti_result result, const char **text)
{
	*text = result == CUPTI_NO_RIGHTS	? "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
		: result == CUPTI_OUT_OF_MEMORY ? "CUPTI_ERROR_OUT_OF_MEMORY"
						: "CUPTI_ERROR_OTHER";
	return 0;
}

static const struct hooks hooks = { at_api, at_resource, at_run, serialises, at_end };

static void subscribe(cupti_subscriber *subscriber, cupti_callback to, void *user)
{
	callback_user = user;
	callback = to;
	*subscriber = &callback;
	standin_hooks = &hooks;
}

static bool is_taken(void)
{
	uint64_t taken = standin_word("taken", 0);

	/* Without a number it is for ever. */
	return taken == 1 || asked++ < taken;
}

EXPORTED cupti_result cuptiSubscribe(cupti_subscriber *subscriber, cupti_callback to, void *user)
{
	check();
	check_use();
	if (is_taken() || callback)
		return CUPTI_TAKEN;
	if (standin_word("v2", 0))
		return CUPTI_NOT_COMPATIBLE;
	subscribe(subscriber, to, user);
	return 0;
}

EXPORTED cupti_result cuptiSubscribe_v2(cupti_subscriber *subscriber, cupti_callback to, void *user,
					struct cupti_subscriber_params *params)
{
	check();
	if (!standin_word("v2", 0) || !params->allows_others) {
		snprintf(params->old_name, params->old_name_size, "nsys");
		return CUPTI_TAKEN;
	}
	is_v2 = true;
	subscribe(subscriber, to, user);
	return 0;
}

EXPORTED cupti_result cuptiUnsubscribe(cupti_subscriber subscriber)
{
	check();
	if (subscriber != &callback)
		return 1;
	callback = NULL;
	is_v2 = false;
	return 0;
}

EXPORTED cupti_result cuptiEnableCallback(uint32_t enable, cupti_subscriber subscriber,
					  uint32_t domain, uint32_t id)
{
	check();
	if (subscriber != &callback || domain >= 8 || id >= MOST_IDS)
		return 1;
	/* CUPTI 12 knows none of CUDA 13's. */
	if (domain == CUPTI_RUNTIME && id >= RUNTIME_LAUNCH_KERNEL_13)
		return standin_word("cupti", 28) < 130000 ? 1 : 0;
	enabled[domain][id] = (uint8_t)enable;
	return 0;
}

/* As without a callback for it: CLOCK_REALTIME. */
static int64_t realtime_ns(uint64_t monotonic_ns)
{
	struct timespec real;
	uint64_t now = standin_now_ns();

	clock_gettime(CLOCK_REALTIME, &real);
	return (int64_t)real.tv_sec * 1000000000 + real.tv_nsec - (int64_t)(now - monotonic_ns) +
	       standin_step_ns;
}

static cupti_result get_timestamp(uint64_t *timestamp)
{
	static _Atomic uint64_t readings;

	check();
	*timestamp = (uint64_t)realtime_ns(standin_now_ns());
	if (++readings <= standin_word("interrupted", 0))
		usleep(5000);
	return 0;
}

EXPORTED cupti_result cuptiGetTimestamp(uint64_t *timestamp)
{
	return OF_V1(get_timestamp(timestamp));
}

EXPORTED cupti_result cuptiGetTimestamp_v2(cupti_subscriber subscriber, uint64_t *timestamp)
{
	(void)subscriber;
	return OF_V2(get_timestamp(timestamp));
}

EXPORTED cupti_result cuptiActivityRegisterCallbacks(cupti_buffer_requested requested,
						     cupti_buffer_completed completed)
{
	check();
	request = requested;
	complete = completed;
	return is_v2 ? CUPTI_NOT_COMPATIBLE : 0;
}

EXPORTED cupti_result cuptiActivityRegisterCallbacks_v2(cupti_subscriber subscriber,
							cupti_buffer_requested_v2 requested,
							cupti_buffer_completed_v2 completed)
{
	(void)subscriber;
	request_v2 = requested;
	complete_v2 = completed;
	return OF_V2(0);
}

EXPORTED cupti_result cuptiActivityEnable(uint32_t kind)
{
	check();
	if (is_v2)
		return CUPTI_NOT_COMPATIBLE;
	sessions++;
	times_are_on = kind == CUPTI_ACTIVITY_CONCURRENT_KERNEL;
	return 0;
}

EXPORTED cupti_result cuptiActivityEnable_v2(cupti_subscriber subscriber, uint32_t kind,
					     void *config)
{
	(void)subscriber, (void)config;
	sessions++;
	times_are_on = kind == CUPTI_ACTIVITY_CONCURRENT_KERNEL;
	return OF_V2(0);
}

static cupti_result disable_times(void)
{
	check();
	times_are_on = false;
	return 0;
}

EXPORTED cupti_result cuptiActivityDisable(uint32_t kind)
{
	(void)kind;
	return OF_V1(disable_times());
}

EXPORTED cupti_result cuptiActivityDisable_v2(cupti_subscriber subscriber, uint32_t kind,
					      void *config)
{
	(void)subscriber, (void)kind, (void)config;
	return OF_V2(disable_times());
}

/* With the word "holds": a buffer that it asked for before there was anything for it. */
static uint8_t *held;
static size_t held_bytes;

static void ask_for_buffer(uint8_t **buffer, size_t *size)
{
	size_t most;

	if (is_v2)
		request_v2(buffer, size, &most, NULL);
	else
		request(buffer, size, &most);
}

static void give_buffer(uint8_t *buffer, size_t size, size_t valid)
{
	if (is_v2)
		complete_v2(buffer, size, valid, NULL);
	else
		complete(NULL, 0, buffer, size, valid);
}

/* Whoever has registered last gets it, whosever it is. */
static void give_held(void)
{
	uint8_t *buffer = held;

	held = NULL;
	if (buffer)
		give_buffer(buffer, held_bytes, 0);
}

/* As when a module is loaded where another one was. */
static const char *name_in_one_place(char *place, const char *name)
{
	return standin_word("reloads", 0) ? strcpy(place, name) : name;
}

static void put_kernel(uint8_t *at, const struct run *run, int64_t add_ns, uint64_t now)
{
	static char place[256];
	struct cupti_kernel kernel = {
		.kind = CUPTI_ACTIVITY_CONCURRENT_KERNEL,
		.start = run->begin_ns <= now ? run->begin_ns + add_ns : 0,
		.end = run->end_ns <= now ? run->end_ns + add_ns : 0,
		.device = run->context ? run->context->device : 0,
		.context = run->context ? run->context->id : 0,
		.stream = run->stream,
		.grid = { run->blocks, 1, 1 },
		.correlation = run->correlation,
		.name = name_in_one_place(place, run->function->name),
		.node = run->node,
		.graph = run->graph,
	};

	if (!kernel.end && standin_word("held", 0))
		kernel.kind = 0;
	memset(at, 0xee, KERNEL_BYTES);
	memcpy(at, &kernel, sizeof(kernel));
}

/* In as many buffers as there may be, each of which has what ran before those of the one before it. */
static void give_reversed(const struct run *ended, uint32_t count, int64_t add_ns, uint64_t now)
{
	uint32_t of_each = (count + MOST_REVERSED - 1) / MOST_REVERSED, left = count;
	uint8_t *buffer;
	size_t size;

	while (left) {
		uint32_t first = (left - 1) / of_each * of_each;

		ask_for_buffer(&buffer, &size);
		if (!buffer) {
			dropped += left;
			return;
		}
		for (uint32_t at = first; at < left; at++)
			put_kernel(buffer + (at - first) * KERNEL_BYTES, &ended[at], add_ns, now);
		give_buffer(buffer, size, (left - first) * KERNEL_BYTES);
		left = first;
	}
}

static void give(const struct run *ended, uint32_t count, int64_t add_ns, uint64_t now)
{
	size_t most = standin_word("held", UINT32_MAX), size = 0, valid = 0;
	uint8_t *buffer = NULL;

	for (uint32_t at = 0; at < count; at++) {
		if (!buffer)
			ask_for_buffer(&buffer, &size);
		if (!buffer) {
			dropped++;
			continue;
		}
		put_kernel(buffer + valid, &ended[at], add_ns, now);
		valid += KERNEL_BYTES;
		if (valid + KERNEL_BYTES > size || valid / KERNEL_BYTES >= most) {
			give_buffer(buffer, size, valid);
			buffer = NULL;
			valid = 0;
		}
	}
	if (buffer)
		give_buffer(buffer, size, valid);
}

/* With standin_lock: moves runs that are told by now, by buffers if they are held; returns how many. */
static uint32_t take_ended(struct run *ended, uint64_t now, bool is_forced)
{
	uint32_t most = (uint32_t)standin_word("held", 1), count = 0, kept = 0;

	for (uint32_t first = 0; first < run_count; first += most) {
		uint32_t next = run_count - first < most ? run_count : first + most;
		bool is_told = true;

		for (uint32_t at = first; at < next; at++)
			is_told &= is_forced || runs[at].end_ns <= now;
		for (uint32_t at = first; at < next; at++)
			*(is_told ? &ended[count++] : &runs[kept++]) = runs[at];
	}
	run_count = kept;
	return count;
}

EXPORTED cupti_result cuptiActivityFlushAll(uint32_t flag)
{
	struct run *ended = malloc(sizeof(runs));
	uint64_t now = standin_now_ns();
	int64_t add_ns = realtime_ns(now) - (int64_t)now;
	uint32_t count;

	check();
	pthread_mutex_lock(&standin_lock);
	count = take_ended(ended, now, flag == CUPTI_FLUSH_FORCED);
	pthread_mutex_unlock(&standin_lock);
	if (standin_word("reversed", 0))
		give_reversed(ended, count, add_ns, now);
	else
		give(ended, count, add_ns, now);
	if (flag == CUPTI_FLUSH_FORCED)
		give_held();
	else if (standin_word("holds", 0) && !held && times_are_on)
		ask_for_buffer(&held, &held_bytes);
	free(ended);
	return 0;
}

static cupti_result next_record(uint8_t *buffer, size_t valid, void **record)
{
	uint8_t *next = *record ? (uint8_t *)*record + KERNEL_BYTES : buffer;

	check();
	if (next + KERNEL_BYTES > buffer + valid)
		return CUPTI_NO_MORE;
	if (!*(uint32_t *)next)
		return CUPTI_INVALID_KIND;
	*record = next;
	return 0;
}

EXPORTED cupti_result cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, void **record)
{
	return OF_V1(next_record(buffer, valid, record));
}

EXPORTED cupti_result cuptiActivityGetNextRecord_v2(cupti_subscriber subscriber, uint8_t *buffer,
						    size_t valid, void **record)
{
	(void)subscriber;
	return OF_V2(next_record(buffer, valid, record));
}

static cupti_result take_dropped(size_t *count)
{
	*count = dropped;
	dropped = 0;
	return 0;
}

EXPORTED cupti_result cuptiActivityGetNumDroppedRecords(cu_context context, uint32_t stream,
							size_t *count)
{
	(void)context, (void)stream;
	return OF_V1(take_dropped(count));
}

EXPORTED cupti_result cuptiActivityGetNumDroppedRecords_v2(cupti_subscriber subscriber,
							   cu_context context, uint32_t stream,
							   size_t *count)
{
	(void)subscriber, (void)context, (void)stream;
	return OF_V2(take_dropped(count));
}

/* One that is gone: what real CUPTI would read has been given to others. */
static struct context_of_driver *alive(cu_context context)
{
	struct context_of_driver *found = context;

	check();
	if (found->is_gone) {
		fputs("stand-in: a context was used after its end\n", stderr);
		abort();
	}
	return found;
}

EXPORTED cupti_result cuptiGetContextId(cu_context context, uint32_t *id)
{
	*id = alive(context)->id;
	return 0;
}

EXPORTED cupti_result cuptiGetDeviceId(cu_context context, uint32_t *id)
{
	*id = alive(context)->device;
	return 0;
}

EXPORTED cupti_result cuptiGetGraphNodeId(cu_node node, uint64_t *id)
{
	*id = ((struct node *)node)->id;
	return 0;
}

EXPORTED cupti_result cuptiGetGraphExecId(void *executable, uint32_t *id)
{
	*id = ((struct graph *)executable)->id;
	return 0;
}

EXPORTED cupti_result cuptiGetCubinCrc(struct cupti_cubin_crc *ask)
{
	const uint8_t *bytes = ask->cubin;

	check();
	if (ask->size != CUPTI_SIZE(struct cupti_cubin_crc, crc) || !bytes)
		return 1;
	ask->crc = 14695981039346656037ull;
	for (size_t at = 0; at < ask->cubin_size; at++)
		ask->crc = (ask->crc ^ bytes[at]) * 1099511628211ull;
	return 0;
}

EXPORTED cupti_result cuptiPCSamplingEnable(struct cupti_pc_switch *ask)
{
	struct sampler *sampler = &alive(ask->context)->sampler;

	if (ask->size != CUPTI_SIZE(struct cupti_pc_switch, context) || sampler->is_on)
		return 1;
	if (standin_context() != ask->context)
		return CUPTI_INVALID_CONTEXT;
	if (standin_word("no-rights", 0))
		return CUPTI_NO_RIGHTS;
	/* It allocates the device's buffer. */
	standin_unsafe_call();
	pthread_mutex_lock(&standin_lock);
	sampler->is_on = true;
	sampler->sessions++;
	sampler->is_wedged = sampler->sessions <= standin_word("full", 0);
	sampler->exponent = DEFAULT_EXPONENT;
	sampler->is_period_set = false;
	sampler->has_mode = sampler->is_serialised = sampler->overflows = false;
	sampler->buffer = NULL;
	sampler->count = 0;
	pthread_mutex_unlock(&standin_lock);
	return 0;
}

/* With standin_lock. */
static cupti_result set_mode(struct sampler *sampler, uint32_t mode)
{
	bool is_serialised = mode == CUPTI_MODE_SERIALIZED;

	if (!is_serialised && mode != CUPTI_MODE_CONTINUOUS)
		return 1;
	if (is_serialised && standin_word("no-serialized", 0))
		return CUPTI_NOT_SUPPORTED;
	if (is_serialised != sampler->is_serialised && sampler->has_mode)
		return 7;
	sampler->has_mode = true;
	sampler->is_serialised = is_serialised;
	return 0;
}

EXPORTED cupti_result cuptiPCSamplingGetNumStallReasons(struct cupti_pc_count_reasons *ask)
{
	/* As drivers of 13.1: none before sampling is enabled. */
	*ask->count = alive(ask->context)->sampler.is_on ? REASONS : 0;
	return 0;
}

EXPORTED cupti_result cuptiPCSamplingGetStallReasons(struct cupti_pc_get_reasons *ask)
{
	for (size_t at = 0; at < ask->count && at < REASONS; at++) {
		ask->reasons[at] = reasons[at].index;
		snprintf(ask->names[at], CUPTI_REASON_BYTES, "%s", reasons[at].name);
	}
	return alive(ask->context)->sampler.is_on ? 0 : 7;
}

EXPORTED cupti_result cuptiPCSamplingSetConfigurationAttribute(struct cupti_pc_settings *ask)
{
	struct sampler *sampler = &alive(ask->context)->sampler;

	if (!sampler->is_on || ask->size != CUPTI_SIZE(struct cupti_pc_settings, settings))
		return 7;
	for (size_t at = 0; at < ask->count; at++) {
		struct cupti_pc_setting *setting = &ask->settings[at];

		if (setting->attribute == CUPTI_PERIOD) {
			if (setting->number < 5 || setting->number > 31)
				return 1;
			sampler->exponent = setting->number;
			sampler->is_period_set = true;
		} else if (setting->attribute == CUPTI_DATA_BUFFER) {
			sampler->buffer = setting->pointer;
		} else if (setting->attribute == CUPTI_MODE) {
			cupti_result result;

			pthread_mutex_lock(&standin_lock);
			result = set_mode(sampler, setting->number);
			pthread_mutex_unlock(&standin_lock);
			if (result)
				return result;
		} else {
			return 1;
		}
	}
	return 0;
}

EXPORTED cupti_result cuptiPCSamplingGetConfigurationAttribute(struct cupti_pc_settings *ask)
{
	struct sampler *sampler = &alive(ask->context)->sampler;

	if (ask->count != 1 || ask->settings->attribute != CUPTI_PERIOD)
		return 1;
	ask->settings->number = sampler->exponent;
	return 0;
}

static void count(struct sampler *sampler, struct function *function, uint64_t offset,
		  uint32_t reason, uint32_t more)
{
	uint32_t at = 0;

	if (!more)
		return;
	while (at < sampler->count &&
	       (sampler->counts[at].function != function || sampler->counts[at].offset != offset ||
		sampler->counts[at].reason != reason))
		at++;
	if (at == sampler->count)
		sampler->counts[sampler->count++] =
			(struct count){ function, offset, reason, 0, 0 };
	sampler->counts[at].count += more;
}

static uint64_t samples_of(const struct sampler *sampler, const struct run *run)
{
	uint64_t samples = (uint64_t)run->blocks * run->warps * SAMPLES_OF_BLOCK;

	return (samples << DEFAULT_EXPONENT) >> sampler->exponent;
}

static bool is_mute(const struct sampler *sampler)
{
	return sampler->sessions <= standin_word("mute", 0) ||
	       (sampler->is_period_set && standin_word("mute-period", 0));
}

/* With standin_lock: what has ended is decoded. */
static void decode(struct context_of_driver *context)
{
	struct sampler *sampler = &context->sampler;
	uint64_t now = standin_now_ns();
	uint32_t kept = 0;

	for (uint32_t at = 0; at < sampled_count; at++) {
		const struct run *run = &sampled[at];
		uint64_t samples = samples_of(sampler, run);

		if (run->context != context || run->end_ns > now) {
			sampled[kept++] = *run;
			continue;
		}
		if (is_mute(sampler))
			continue;
		count(sampler, run->function, 0x10, reasons[0].index, samples / 2);
		count(sampler, run->function, 0x10, reasons[1].index, samples / 4);
		count(sampler, run->function, 0x20, reasons[2].index, samples / 4);
		count(sampler, run->function, 0x40, reasons[3].index, samples / 4);
	}
	sampled_count = kept;
}

static void put_pc(struct cupti_pc *pc, const struct count *from)
{
	static char place[256];

	if (pc->size != CUPTI_PC_SIZE)
		abort();
	pc->cubin_crc = from->function->module->crc;
	pc->offset = from->offset;
	pc->function = from->function->index;
	pc->function_name = standin_word("copies", 0)
				    ? strdup(from->function->name)
				    : (char *)name_in_one_place(place, from->function->name);
	pc->reason_count = 1;
	pc->reasons[0] = (struct cupti_pc_reason){ from->reason, from->count };
	pc->correlation = from->correlation;
}

/* With standin_lock; whoever has given the buffer may look how full it is. */
static void tell_fill(struct cupti_pc_data *buffer, size_t pcs, size_t remaining)
{
	__atomic_store_n(&buffer->pcs, pcs, __ATOMIC_RELAXED);
	__atomic_store_n(&buffer->remaining_pcs, remaining, __ATOMIC_RELAXED);
}

/* With standin_lock. */
static void keep(struct sampler *sampler, const struct count *what)
{
	struct cupti_pc_data *buffer = sampler->buffer;

	if (!what->count)
		return;
	if (buffer && buffer->pcs < buffer->wanted_pcs && !sampler->overflows) {
		put_pc(&buffer->pc[buffer->pcs], what);
		tell_fill(buffer, buffer->pcs + 1, 0);
	} else {
		uint32_t before = sampler->count;

		sampler->overflows = true;
		count(sampler, what->function, what->offset, what->reason, what->count);
		if (sampler->count > before)
			sampler->counts[before].correlation =
				before ? sampler->counts[0].correlation : what->correlation;
		if (buffer)
			tell_fill(buffer, buffer->pcs, sampler->count);
	}
}

/* Of a kernel that ran alone. */
static void at_end(const struct run *run)
{
	struct sampler *sampler = &run->context->sampler;
	struct count all = { run->function, 0, 0, 0, run->correlation };
	uint32_t samples;

	pthread_mutex_lock(&standin_lock);
	samples = is_mute(sampler) ? 0 : (uint32_t)samples_of(sampler, run);
	for (uint32_t at = 0; at < REASONS && sampler->is_on && sampler->is_serialised; at++) {
		static const uint64_t offsets[REASONS] = { 0x10, 0x10, 0x20, 0x40 };

		all.offset = offsets[at];
		all.reason = reasons[at].index;
		all.count = at ? samples / 4 : samples / 2;
		keep(sampler, &all);
	}
	pthread_mutex_unlock(&standin_lock);
}

/* With standin_lock: what one kernel left, then the next ones. */
static void move(struct sampler *sampler, struct cupti_pc_data *data, size_t most)
{
	struct cupti_pc_data *buffer = sampler->buffer;
	size_t pcs = 0, left = buffer->pcs;

	while (pcs < most && pcs < left && buffer->pc[pcs].correlation == buffer->pc->correlation) {
		struct cupti_pc_reason *own = data->pc[pcs].reasons;

		data->pc[pcs] = buffer->pc[pcs];
		data->pc[pcs].reasons = own;
		*own = *buffer->pc[pcs].reasons;
		data->samples += own->samples;
		pcs++;
	}
	for (size_t at = pcs; at < left; at++) {
		struct cupti_pc_reason *own = buffer->pc[at - pcs].reasons;

		*own = *buffer->pc[at].reasons;
		buffer->pc[at - pcs] = buffer->pc[at];
		buffer->pc[at - pcs].reasons = own;
	}
	tell_fill(buffer, left - pcs, sampler->overflows ? sampler->count : 0);
	data->pcs = pcs;
	data->remaining_pcs = 0;
}

/* With standin_lock: fills a buffer from where it was left, one reason a PC. */
static void fill(struct sampler *sampler, struct cupti_pc_data *data, size_t most)
{
	size_t pcs = data->pcs;

	data->samples = 0;
	for (; pcs < most && sampler->count; pcs++) {
		put_pc(&data->pc[pcs], &sampler->counts[--sampler->count]);
		data->samples += sampler->counts[sampler->count].count;
	}
	tell_fill(data, pcs, sampler->count);
	sampler->overflows &= sampler->count > 0;
	if (sampler->is_serialised && sampler->buffer && data != sampler->buffer)
		tell_fill(sampler->buffer, sampler->buffer->pcs,
			  sampler->overflows ? sampler->count : 0);
	data->dropped_samples = standin_word("drop", 0);
	data->foreign_samples = standin_word("foreign", 0);
}

EXPORTED cupti_result cuptiPCSamplingGetData(struct cupti_pc_get_data *ask)
{
	struct context_of_driver *context = alive(ask->context);
	struct sampler *sampler = &context->sampler;
	cupti_result result = 0;

	if (!sampler->is_on)
		return 7;
	usleep(standin_word("slow", 0) * 1000);
	pthread_mutex_lock(&standin_lock);
	decode(context);
	if (standin_word("lost", 0) && ++sampler->reads > standin_word("lost", 0)) {
		result = CUPTI_INVALID_CONTEXT;
	} else if (sampler->is_wedged) {
		ask->data->is_full = 1;
		ask->data->pcs = 0;
		result = CUPTI_OUT_OF_MEMORY;
	} else if (sampler->is_serialised && sampler->buffer && sampler->buffer->pcs) {
		move(sampler, ask->data, ask->data->wanted_pcs);
	} else {
		fill(sampler, ask->data, standin_word("few", 0) ? 1 : ask->data->wanted_pcs);
	}
	pthread_mutex_unlock(&standin_lock);
	return result;
}

/* Until what runs has ended; what has begun by then is not sampled. */
static void await_runs(const struct context_of_driver *context)
{
	uint64_t until = 0, now = standin_now_ns();

	pthread_mutex_lock(&standin_lock);
	for (uint32_t at = 0; at < sampled_count; at++)
		if (sampled[at].context == context && sampled[at].end_ns > until)
			until = sampled[at].end_ns;
	pthread_mutex_unlock(&standin_lock);
	if (until > now)
		usleep((until - now) / 1000 + 1);
}

/* With standin_lock. */
static void drop_runs(const struct context_of_driver *context)
{
	uint32_t kept = 0;

	for (uint32_t at = 0; at < sampled_count; at++)
		if (sampled[at].context != context)
			sampled[kept++] = sampled[at];
	sampled_count = kept;
}

EXPORTED cupti_result cuptiPCSamplingDisable(struct cupti_pc_switch *ask)
{
	struct context_of_driver *context = alive(ask->context);
	struct sampler *sampler = &context->sampler;

	if (!sampler->is_on)
		return 7;
	standin_synchronise();
	await_runs(context);
	pthread_mutex_lock(&standin_lock);
	if (!sampler->is_wedged)
		decode(context);
	if (sampler->buffer && !sampler->is_wedged)
		fill(sampler, sampler->buffer, sampler->buffer->wanted_pcs);
	drop_runs(context);
	sampler->is_on = false;
	pthread_mutex_unlock(&standin_lock);
	return 0;
}
