/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PC sampling, context by context, in continuous mode: it runs from cuptiPCSamplingEnable on, is read
 * out now and then, and nothing is synchronised until it ends.
 *
 * Where that is asked for, there are windows in CUPTI's kernel-serialized mode: kernels run one after
 * the other, and each sample names its launch. cupti_pcsampling.h tells of no change of modes while
 * sampling goes on, so it ends and begins anew at both ends of a window.
 */
#include "helper.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control.h"
#include "graphs.h"
#include "library.h"
#include "memory.h"
#include "names.h"

/* One for each device, mostly. */
#define MOST_CONTEXTS 64
/* PCs that are read out at once: with 38 reasons each, 750 KB. */
#define MOST_PCS 2048
/* PCs that CUPTI may leave in its buffer when it ends. */
#define MOST_LAST_PCS 1024
/*
 * In serialised windows CUPTI moves what each kernel has into that buffer when the kernel ends. What
 * finds no room there loses its launch: 10 ms of kernels with some PCs each; 6 MB. Tests have less.
 */
#ifndef MOST_SERIALISED_PCS
#define MOST_SERIALISED_PCS 16384
#endif
/* Twice as many as Hopper has. */
#define MOST_REASONS 80
/* How often data is asked for in one turn: as much as the largest programs have, and no endless loop. */
#define MOST_READS 64
/* In a window each reading may have one kernel: as many as a device runs in 10 ms, and some. */
#define MOST_SERIALISED_READS 4096
/* Rows of one record: 20 KB. */
#define MOST_ROWS 512
/* cupti_pcsampling.h: periods are 2^5 to 2^31 cycles. */
#define MAX_EXPONENT 31
/* How often sampling is begun anew, where the device's buffer is full or no samples come. */
#define MOST_TRIES 6
/* A device samples each of its multiprocessors some 1,000 times a second at the longest periods in use. */
#define BUSY_WITHOUT_SAMPLES_NS 2000000000ull

enum context_state {
	CONTEXT_NEW,
	CONTEXT_ON,
	/* Of these two sampling is on until no stream is captured; then it begins anew, or ends. */
	CONTEXT_ANEW,
	CONTEXT_ENDS,
	/* A window has ended: it goes on when no stream is captured. */
	CONTEXT_OFF,
	CONTEXT_PAUSED,
	CONTEXT_GIVEN_UP,
};

struct context {
	_Atomic(cu_context) handle; /* NULL: the slot is free */
	_Atomic(cu_context) gone; /* it was destroyed, and nobody waited any longer */
	enum context_state state;
	uint32_t uid, device;
	uint32_t exponent; /* of the period that is set; 0: CUPTI's own */
	uint32_t read_exponent; /* as read back */
	uint64_t enabled_ns; /* when sampling began */
	uint64_t read_ns; /* when it was read out last */
	uint64_t busy_ns; /* of kernels since sampling began */
	uint64_t samples;
	uint32_t tries;
	uint32_t full_in_row;
	uint32_t reason_count;
	bool is_serialised; /* its session, or the one that begins next */
	bool refuses_windows; /* one failed to begin */
	struct cupti_pc_data last; /* what CUPTI fills when it ends, or when a kernel does */
};

static struct context contexts[MOST_CONTEXTS];
static _Atomic bool is_begun;
static uint32_t wanted_exponent;
static struct cupti_pc_data data;
static struct stall rows[MOST_ROWS];
/* The context that has a serialised window, and since when. */
static struct context *window;
static uint64_t window_ns;
/* It has one, or is about to: who begins a capture ends it first. */
static _Atomic bool has_window;
static bool is_capture_told, are_several_told;

#define SWITCH(handle_)                                                                            \
	{                                                                                          \
		.size = CUPTI_SIZE(struct cupti_pc_switch, context),                               \
		.context = (handle_),                                                              \
	}

/* CUPTI may not be called with it any more. */
static bool is_gone(struct context *context, cu_context handle)
{
	return atomic_load(&context->gone) == handle;
}

void stalls_see(cu_context context)
{
	if (!context || !atomic_load_explicit(&is_begun, memory_order_relaxed))
		return;
	for (int at = 0; at < MOST_CONTEXTS; at++)
		if (atomic_load_explicit(&contexts[at].handle, memory_order_relaxed) == context &&
		    !is_gone(&contexts[at], context))
			return;
	for (int at = 0; at < MOST_CONTEXTS; at++) {
		cu_context nobody = NULL;

		if (atomic_compare_exchange_strong(&contexts[at].handle, &nobody, context)) {
			control_wake();
			return;
		}
		/* Another thread was first. */
		if (nobody == context)
			return;
	}
	losses_add(LOSS_CONTEXTS, 1);
}

void stalls_relax_captures(void)
{
	static bool is_relaxed;
	int mode = CU_CAPTURE_RELAXED;

	/* Else what CUPTI allocates on this thread's behalf ends others' captures: cuda.h. */
	if (!is_relaxed && cuda.cuThreadExchangeStreamCaptureMode)
		is_relaxed = !cuda.cuThreadExchangeStreamCaptureMode(&mode);
}

static bool make_data(struct cupti_pc_data *made, size_t pcs, size_t reasons)
{
	struct cupti_pc *pc = calloc(pcs, sizeof(*pc) + reasons * sizeof(struct cupti_pc_reason));
	struct cupti_pc_reason *reason = (struct cupti_pc_reason *)(pc + pcs);

	if (!pc)
		return false;
	for (size_t at = 0; at < pcs; at++) {
		pc[at].size = CUPTI_PC_SIZE;
		pc[at].reasons = reason + at * reasons;
	}
	*made = (struct cupti_pc_data){ .size = sizeof(*made), .wanted_pcs = pcs, .pc = pc };
	return true;
}

static void put_rows(const struct context *context, uint64_t end_ns, uint32_t count)
{
	struct passing_stalls head = { context->read_ns, end_ns, context->uid, context->device,
				       1ull << context->read_exponent };

	if (count)
		ring_put(PASSING_STALLS,
			 (struct part[]){ PART(head), { rows, count * sizeof(*rows) } }, 2);
}

/* Whether CUPTI's buffer has lost the launches of what is read out next: they all have one number. */
static bool has_overflown(const struct context *context)
{
	const struct cupti_pc_data *last = &context->last;

	/* CUPTI writes it meanwhile. */
	return context->is_serialised &&
	       (__atomic_load_n(&last->remaining_pcs, __ATOMIC_RELAXED) ||
		__atomic_load_n(&last->pcs, __ATOMIC_RELAXED) >= last->wanted_pcs);
}

/* Tells what was read out; false: CUPTI makes names anew each time. */
static bool take_pcs(const struct context *context, const struct cupti_pc_data *found,
		     uint64_t end_ns, bool are_unnumbered)
{
	size_t pcs = found->pcs < found->wanted_pcs ? found->pcs : found->wanted_pcs;
	bool is_too_many = false;
	uint32_t count = 0;

	for (size_t at = 0; at < pcs && !is_too_many; at++) {
		const struct cupti_pc *pc = &found->pc[at];
		uint32_t name = name_of_function(pc->function_name, &is_too_many);
		uint64_t launch = launch_of(pc->correlation);
		bool is_unknown = are_unnumbered || graphs_doubt(launch);

		for (size_t reason = 0; reason < pc->reason_count && reason < context->reason_count;
		     reason++) {
			if (!pc->reasons[reason].samples)
				continue;
			rows[count++] = (struct stall){
				.code = pc->cubin_crc,
				.offset = pc->offset,
				.launch = is_unknown ? 0 : launch,
				.name = name,
				.function = pc->function,
				.reason = pc->reasons[reason].reason,
				.count = pc->reasons[reason].samples,
			};
			if (is_unknown)
				losses_add(LOSS_UNNUMBERED, pc->reasons[reason].samples);
			if (count == MOST_ROWS) {
				put_rows(context, end_ns, count);
				count = 0;
			}
		}
	}
	put_rows(context, end_ns, count);
	if (found->dropped_samples)
		losses_add(LOSS_SAMPLES_DROPPED, found->dropped_samples);
	if (found->foreign_samples)
		losses_add(LOSS_SAMPLES_FOREIGN, found->foreign_samples);
	return !is_too_many;
}

/* A context is sampled no more; `failed` is what did. */
static void give_up(struct context *context, enum error error, cupti_result code,
		    const char *failed)
{
	const char *text = NULL;
	char why[200];

	context->state = CONTEXT_GIVEN_UP;
	tell_error(error, code, failed);
	for (int at = 0; at < MOST_CONTEXTS; at++)
		if (contexts[at].state == CONTEXT_ON || contexts[at].state == CONTEXT_ANEW)
			return;
	if (code && cupti.cuptiGetResultString)
		cupti.cuptiGetResultString(code, &text);
	snprintf(why, sizeof(why), "PC sampling: %s%s%s", failed, text ? ": " : " failed",
		 text ? text : "");
	stalls_reached(why);
}

/* The same of one that is sampled, as soon as no stream is captured. */
static void end_sampling(struct context *context, enum error error, cupti_result code,
			 const char *failed)
{
	give_up(context, error, code, failed);
	context->state = CONTEXT_ENDS;
}

/* Ends sampling; CUPTI leaves what it has in the buffer that it was given. */
static void disable(struct context *context, cu_context handle)
{
	struct cupti_pc_switch off = SWITCH(handle);
	bool has_overflow = has_overflown(context);
	cupti_result result;

	if (is_gone(context, handle))
		return;
	/* Of a serialised session it may have what kernels left since they were read out. */
	if (!context->is_serialised)
		context->last.pcs = 0;
	context->last.dropped_samples = context->last.foreign_samples = 0;
	result = cupti.cuptiPCSamplingDisable(&off);
	if (result)
		tell_error(error_of(result), result, "cuptiPCSamplingDisable");
	else if (context->last.pc)
		take_pcs(context, &context->last, now_ns(), has_overflow);
	context->last.pcs = 0;
	context->read_ns = now_ns();
}

/* The names of a chip's reasons: CUPTI tells them only once sampling is enabled. */
static cupti_result read_reasons(struct context *context, cu_context handle, const char **what)
{
	static char names[MOST_REASONS][CUPTI_REASON_BYTES];
	char *pointers[MOST_REASONS];
	uint32_t indices[MOST_REASONS];
	struct reason reasons[MOST_REASONS];
	size_t count = 0;
	struct cupti_pc_count_reasons ask_count = {
		.size = CUPTI_SIZE(struct cupti_pc_count_reasons, count),
		.context = handle,
		.count = &count,
	};
	struct cupti_pc_get_reasons ask = {
		.size = CUPTI_SIZE(struct cupti_pc_get_reasons, names),
		.context = handle,
		.reasons = indices,
		.names = pointers,
	};
	cupti_result result = cupti.cuptiPCSamplingGetNumStallReasons(&ask_count);

	*what = "cuptiPCSamplingGetNumStallReasons";
	if (result)
		return result;
	if (!count || count > MOST_REASONS)
		return CUPTI_NOT_SUPPORTED;
	for (size_t at = 0; at < count; at++)
		pointers[at] = names[at];
	ask.count = count;
	*what = "cuptiPCSamplingGetStallReasons";
	result = cupti.cuptiPCSamplingGetStallReasons(&ask);
	if (result)
		return result;
	for (size_t at = 0; at < count; at++) {
		names[at][CUPTI_REASON_BYTES - 1] = 0;
		reasons[at] = (struct reason){ indices[at], name_of(names[at]) };
	}
	context->reason_count = count;
	tell_reasons(context->uid, reasons, count);
	return CUPTI_OK;
}

/*
 * Only what has to be set: on some chips an explicit period or size of the device's buffer leaves no
 * samples at all.
 */
static cupti_result configure(struct context *context, cu_context handle, const char **what)
{
	size_t last_pcs = context->is_serialised ? MOST_SERIALISED_PCS : MOST_LAST_PCS;
	struct cupti_pc_setting settings[] = {
		{ .attribute = CUPTI_DATA_BUFFER, .pointer = &context->last },
		{ .attribute = CUPTI_MODE,
		  .number =
			  context->is_serialised ? CUPTI_MODE_SERIALIZED : CUPTI_MODE_CONTINUOUS },
		{ .attribute = CUPTI_PERIOD, .number = context->exponent },
	};
	struct cupti_pc_setting period = { .attribute = CUPTI_PERIOD };
	struct cupti_pc_settings all = {
		.size = CUPTI_SIZE(struct cupti_pc_settings, settings),
		.context = handle,
		.count = context->exponent ? 3 : 2,
		.settings = settings,
	};
	cupti_result result;

	*what = "malloc";
	free(context->last.pc);
	context->last.pc = NULL;
	if (!make_data(&context->last, last_pcs, context->reason_count))
		return CUPTI_OUT_OF_MEMORY;
	if (!data.pc && !make_data(&data, MOST_PCS, MOST_REASONS))
		return CUPTI_OUT_OF_MEMORY;
	*what = "cuptiPCSamplingSetConfigurationAttribute";
	result = cupti.cuptiPCSamplingSetConfigurationAttribute(&all);
	if (result)
		return result;
	*what = "cuptiPCSamplingGetConfigurationAttribute";
	all.count = 1;
	all.settings = &period;
	result = cupti.cuptiPCSamplingGetConfigurationAttribute(&all);
	if (result)
		return result;
	if (period.number > MAX_EXPONENT)
		return CUPTI_NOT_SUPPORTED;
	context->read_exponent = period.number;
	return CUPTI_OK;
}

/* CUPTI is told the context, and NVIDIA's own tools call it where that is current as well. */
static bool make_current(cu_context handle)
{
	return cuda.cuCtxPushCurrent_v2 && cuda.cuCtxPopCurrent_v2 &&
	       !cuda.cuCtxPushCurrent_v2(handle);
}

static void make_others_current(void)
{
	cu_context gone;

	cuda.cuCtxPopCurrent_v2(&gone);
}

/* After the last of its samples. */
static void tell_window_end(void)
{
	struct passing_serialised record = { .begin_ns = window_ns, .end_ns = now_ns() };

	if (!window)
		return;
	record.context = window->uid;
	record.device = window->device;
	ring_put(PASSING_SERIALISED, &PART(record), 1);
	window->is_serialised = false;
	window = NULL;
	atomic_store(&has_window, false);
}

/* Returns what CUPTI says; *what is which call. Where it fails, sampling is off. */
static cupti_result begin_session(struct context *context, cu_context handle, const char **what)
{
	struct cupti_pc_switch on = SWITCH(handle);
	cupti_result result = cupti.cuptiPCSamplingEnable(&on);

	*what = "cuptiPCSamplingEnable";
	if (result)
		return result;
	if (!is_gone(context, handle))
		result = read_reasons(context, handle, what);
	if (!result && !is_gone(context, handle))
		result = configure(context, handle, what);
	if (result)
		disable(context, handle);
	return result;
}

static void enable_current(struct context *context, cu_context handle)
{
	const char *what;
	cupti_result result = begin_session(context, handle, &what);

	if (result && context->is_serialised && !is_gone(context, handle)) {
		tell_error(ERROR_SERIALISED, result, what);
		if (context == window)
			tell_window_end();
		context->is_serialised = false;
		context->refuses_windows = true;
		result = begin_session(context, handle, &what);
	}
	if (is_gone(context, handle))
		return;
	if (result) {
		give_up(context, error_of(result), result, what);
		return;
	}
	context->state = CONTEXT_ON;
	context->read_ns = context->enabled_ns = now_ns();
	context->busy_ns = context->samples = 0;
	tell_context(context->uid, context->device, 1ull << context->read_exponent);
	stalls_reached("");
}

static void enable(struct context *context, cu_context handle)
{
	bool is_current;

	if (is_gone(context, handle))
		return;
	is_current = make_current(handle);
	enable_current(context, handle);
	if (is_current)
		make_others_current();
}

/* What is left of a session after its buffer was full is nothing: it has to be begun anew. */
static void begin_anew(struct context *context, uint32_t exponent)
{
	context->exponent = exponent;
	context->state = CONTEXT_ANEW;
}

static void at_full(struct context *context)
{
	uint32_t longer = context->read_exponent + 1;

	losses_add(LOSS_BUFFER_FULL, 1);
	if (++context->full_in_row > MOST_TRIES) {
		end_sampling(context, ERROR_MEMORY, CUPTI_OUT_OF_MEMORY, "cuptiPCSamplingGetData");
	} else if (context->full_in_row == 1 || longer > MAX_EXPONENT) {
		begin_anew(context, context->exponent);
	} else {
		/* Not even from the beginning: fewer samples. */
		begin_anew(context, longer);
	}
}

static void read_out(struct context *context, cu_context handle)
{
	struct cupti_pc_get_data get = {
		.size = CUPTI_SIZE(struct cupti_pc_get_data, data),
		.context = handle,
		.data = &data,
	};
	uint64_t end_ns = now_ns();
	cupti_result result = CUPTI_OK;
	int most = context->is_serialised ? MOST_SERIALISED_READS : MOST_READS;
	bool has_overflow = false;

	for (int read = 0; read < most; read++) {
		has_overflow |= has_overflown(context);
		data.size = sizeof(data);
		data.wanted_pcs = MOST_PCS;
		data.pcs = data.remaining_pcs = data.samples = 0;
		data.dropped_samples = data.foreign_samples = data.is_full = 0;
		if (is_gone(context, handle))
			return;
		result = cupti.cuptiPCSamplingGetData(&get);
		if (result || data.is_full)
			break;
		context->samples += data.samples;
		if (!take_pcs(context, &data, end_ns, has_overflow)) {
			end_sampling(context, ERROR_NAMES, 0, "cuptiPCSamplingGetData");
			return;
		}
		/* One kernel may tell of no others. */
		if (!data.remaining_pcs && !(context->is_serialised && data.pcs))
			break;
	}
	if (is_gone(context, handle))
		return;
	if (result == CUPTI_OUT_OF_MEMORY || data.is_full) {
		at_full(context);
		return;
	}
	if (result) {
		/* A context that is lost is not touched any more. */
		give_up(context, error_of(result), result, "cuptiPCSamplingGetData");
		return;
	}
	context->read_ns = end_ns;
	if (data.samples)
		context->full_in_row = 0;
}

/*
 * Kernels run, and none is sampled: once more from the beginning, and then no more. At CUPTI's own
 * period: some chips sample nothing at one that was set.
 */
static void look_for_samples(struct context *context)
{
	if (context->samples || context->busy_ns < BUSY_WITHOUT_SAMPLES_NS)
		return;
	if (!context->tries++) {
		/* Nor is it set after a pause of the duty cycle, or for what comes later. */
		wanted_exponent = 0;
		begin_anew(context, 0);
		return;
	}
	end_sampling(context, ERROR_NO_SAMPLES, 0, "kernels run, and no sample comes: it");
}

static void take_new(struct context *context, cu_context handle)
{
	cupti_result result = cupti.cuptiGetContextId(handle, &context->uid);

	if (!result)
		result = cupti.cuptiGetDeviceId(handle, &context->device);
	if (result) {
		give_up(context, error_of(result), result, "cuptiGetContextId");
		return;
	}
	context->exponent = wanted_exponent;
	context->tries = context->full_in_row = 0;
	enable(context, handle);
}

static void forget(struct context *context)
{
	if (context == window)
		tell_window_end();
	context->is_serialised = context->refuses_windows = false;
	context->state = CONTEXT_NEW;
	atomic_store(&context->gone, NULL);
	atomic_store(&context->handle, NULL);
}

/* Whether it was: its slot is free then. */
static bool forget_if_gone(struct context *context, cu_context handle)
{
	if (!is_gone(context, handle))
		return false;
	tell_error(ERROR_CALL, 0, "the read-out of a context until it was destroyed");
	forget(context);
	return true;
}

/* It allocates and frees, which a capture may not bear. */
static void switch_sampling(struct context *context, cu_context handle)
{
	switch (context->state) {
	case CONTEXT_NEW:
		take_new(context, handle);
		break;
	case CONTEXT_ANEW:
		disable(context, handle);
		enable(context, handle);
		break;
	case CONTEXT_ENDS:
		disable(context, handle);
		context->state = CONTEXT_GIVEN_UP;
		break;
	case CONTEXT_OFF:
		enable(context, handle);
		break;
	case CONTEXT_ON:
	case CONTEXT_PAUSED:
	case CONTEXT_GIVEN_UP:
		break;
	}
}

/* Whether sampling is on. */
static bool is_enabled(const struct context *context)
{
	return context->state == CONTEXT_ON || context->state == CONTEXT_ANEW ||
	       context->state == CONTEXT_ENDS;
}

void stalls_turn(bool is_time)
{
	bool has_to_wait = false;

	for (int at = 0; at < MOST_CONTEXTS; at++) {
		struct context *context = &contexts[at];
		cu_context handle = atomic_load(&context->handle);

		if (!handle || forget_if_gone(context, handle))
			continue;
		if (context->state == CONTEXT_ON && is_time) {
			read_out(context, handle);
			if (context->state == CONTEXT_ON)
				look_for_samples(context);
		}
		if (launches_capture())
			has_to_wait |= context->state == CONTEXT_NEW;
		else
			switch_sampling(context, handle);
		forget_if_gone(context, handle);
	}
	if (has_to_wait)
		stalls_wait();
}

void stalls_ran(uint32_t uid, uint64_t begin_ns, uint64_t ns)
{
	for (int at = 0; at < MOST_CONTEXTS; at++)
		/* What ran before is told afterwards, and was not to be sampled. */
		if (contexts[at].state == CONTEXT_ON && contexts[at].uid == uid &&
		    begin_ns >= contexts[at].enabled_ns)
			contexts[at].busy_ns += ns;
}

/*
 * One of two callbacks that may wait: CUPTI must not be reading a context that is destroyed. It
 * takes as long as a read-out; where that does not end, the helper's thread is told to call CUPTI
 * with it no more.
 */
void stalls_forget(cu_context handle)
{
	for (int at = 0; at < MOST_CONTEXTS; at++) {
		struct context *context = &contexts[at];

		if (!handle || atomic_load(&context->handle) != handle)
			continue;
		if (!lock_for_a_while()) {
			atomic_store(&context->gone, handle);
			continue;
		}
		if (atomic_load(&context->handle) == handle) {
			if (context->state == CONTEXT_ON)
				read_out(context, handle);
			/*
			 * That synchronises, which others' captures do not bear. It is for contexts
			 * that are not destroyed (cupti_pcsampling.h): CUPTI ends with this one.
			 */
			if (is_enabled(context) && !launches_capture())
				disable(context, handle);
			forget(context);
		}
		unlock();
	}
}

void stalls_begin(uint32_t period_exponent)
{
	/* Some that were seen while it ended, and may be gone. */
	for (int at = 0; at < MOST_CONTEXTS; at++)
		forget(&contexts[at]);
	wanted_exponent = period_exponent;
	is_capture_told = are_several_told = false;
	atomic_store(&is_begun, true);
}

/* The only context that there is, if it is sampled. */
static struct context *find_only(void)
{
	struct context *only = NULL;

	for (int at = 0; at < MOST_CONTEXTS; at++) {
		if (!atomic_load(&contexts[at].handle))
			continue;
		if (only) {
			/*
			 * A launch would wait for its kernel, and that perhaps for one in another
			 * context, as collectives do, which the same thread launches next.
			 */
			if (!are_several_told)
				tell_error(ERROR_SERIALISED, 0, "the process has several contexts");
			are_several_told = true;
			return NULL;
		}
		only = &contexts[at];
	}
	return only && only->state == CONTEXT_ON ? only : NULL;
}

bool stalls_have_window(void)
{
	return window;
}

void stalls_open_window(void)
{
	struct context *only = find_only();
	cu_context handle = only ? atomic_load(&only->handle) : NULL;

	if (!handle || only->refuses_windows || is_gone(only, handle))
		return;
	/* Who begins a capture counts it, and then looks: one of both sees the other. */
	atomic_store(&has_window, true);
	if (!launches_capture())
		read_out(only, handle);
	if (!launches_capture() && only->state == CONTEXT_ON && !is_gone(only, handle)) {
		disable(only, handle);
		only->is_serialised = true;
		enable(only, handle);
		window_ns = only->read_ns;
		if (only->is_serialised && only->state == CONTEXT_ON)
			window = only;
		else
			only->is_serialised = false;
	}
	if (!window)
		atomic_store(&has_window, false);
}

/* In a capture's first moment, or out of any. */
static void close_window(void)
{
	struct context *context = window;
	cu_context handle = context ? atomic_load(&context->handle) : NULL;

	if (!handle)
		return;
	if (context->state == CONTEXT_ON)
		read_out(context, handle);
	if (is_enabled(context))
		disable(context, handle);
	tell_window_end();
	if (context->state == CONTEXT_ENDS)
		context->state = CONTEXT_GIVEN_UP;
	else if (context->state != CONTEXT_GIVEN_UP)
		context->state = CONTEXT_OFF;
}

void stalls_close_window(bool is_due)
{
	if (!window || (is_due && find_only()))
		return;
	if (!launches_capture()) {
		close_window();
	} else if (!is_capture_told) {
		/* Whoever began it could not wait for that. */
		tell_error(ERROR_SERIALISED, 0, "a capture has begun meanwhile");
		is_capture_told = true;
	}
}

/*
 * The other callback that may wait: in a window launches synchronise, which a capture does not bear,
 * and in the capture the window could not end. Sampling goes on when it is over.
 */
void stalls_before_capture(void)
{
	if (!atomic_load(&has_window) || !lock_for_a_while())
		return;
	close_window();
	unlock();
}

void stalls_pause(void)
{
	for (int at = 0; at < MOST_CONTEXTS; at++) {
		struct context *context = &contexts[at];
		cu_context handle = atomic_load(&context->handle);

		if (!handle || forget_if_gone(context, handle))
			continue;
		if (context->state == CONTEXT_ON)
			read_out(context, handle);
		if (forget_if_gone(context, handle) || !is_enabled(context))
			continue;
		disable(context, handle);
		if (context == window)
			tell_window_end();
		context->state = context->state == CONTEXT_ENDS ? CONTEXT_GIVEN_UP : CONTEXT_PAUSED;
	}
}

void stalls_resume(void)
{
	for (int at = 0; at < MOST_CONTEXTS; at++)
		if (contexts[at].state == CONTEXT_PAUSED)
			contexts[at].state = CONTEXT_NEW;
}

void stalls_end(void)
{
	stalls_pause();
	stalls_drop();
}

void stalls_drop(void)
{
	atomic_store(&is_begun, false);
	/* While nobody listens they may go, and others come in their place. */
	for (int at = 0; at < MOST_CONTEXTS; at++)
		forget(&contexts[at]);
}
