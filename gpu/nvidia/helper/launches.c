/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CUPTI's callbacks: they run in the target's threads, inside of its calls, and wait for nobody, but
 * for two of which stalls.c tells why.
 */
#include "helper.h"

#include <stdlib.h>
#include <string.h>

#include "control.h"
#include "events.h"
#include "library.h"
#include "memory.h"
#include "probes.h"

/* Copies of modules that wait for the helper's thread: cuBLAS's largest is 50 MB. */
#define MOST_WAITING_BYTES (64u << 20)

/*
 * As long as captures last at most, with much to spare: one whose stream was destroyed has no end.
 * Tests have less.
 */
#ifndef CAPTURE_NS
#define CAPTURE_NS 60000000000ull
#endif

/* Of a thread: what it launches. */
struct launching {
	uint32_t generation; /* of the subscription; what is older is void */
	uint32_t depth; /* calls of the runtime that it is in */
	uint32_t correlation; /* of the outermost one */
	bool is_told;
	uint64_t launch; /* the launch that it is in, 0: none */
	cu_context context; /* the last one */
};

static _Thread_local struct launching launching;

/* 0: nothing is subscribed. */
static _Atomic uint32_t generation;
static _Atomic bool wants_code, was_ended;
/* A launch of a graph found no room among the events, failed, or may be a part of another graph. */
static _Atomic bool lost_graph_launch;
static _Atomic int captures;
/* When the latest began: all are over so long after it. */
static _Atomic uint64_t captures_ns;
static _Atomic size_t waiting_bytes;
/* From where a number below 2^31, and one above, both are near, and above 0. */
static _Atomic uint64_t newest_launch = 1ull << 32;

uint64_t launch_of(uint32_t correlation)
{
	uint64_t newest = atomic_load_explicit(&newest_launch, memory_order_relaxed);
	uint64_t launch = newest + (int32_t)(correlation - (uint32_t)newest);

	return correlation ? launch : 0;
}

static uint64_t new_launch(uint32_t correlation)
{
	uint64_t launch = launch_of(correlation);
	uint64_t newest = atomic_load_explicit(&newest_launch, memory_order_relaxed);

	while (launch > newest &&
	       !atomic_compare_exchange_weak_explicit(&newest_launch, &newest, launch,
						      memory_order_relaxed, memory_order_relaxed))
		;
	return launch;
}

bool launches_capture(void)
{
	if (!atomic_load(&captures))
		return false;
	if (now_ns() - atomic_load(&captures_ns) < CAPTURE_NS)
		return true;
	atomic_store(&captures, 0);
	return false;
}

uint64_t launches_newest(void)
{
	return atomic_load_explicit(&newest_launch, memory_order_relaxed);
}

bool launches_lost_graphs(void)
{
	return atomic_load(&lost_graph_launch);
}

bool launches_were_ended(void)
{
	return atomic_load(&was_ended);
}

/* What a call of the driver launches, and where. */
static void read_params(uint32_t id, const void *params, uint64_t *kernel, uint64_t *queue)
{
	const struct cu_launch_kernel_params *one = params;
	const struct cu_launch_kernel_ex_params *ex = params;
	const struct cu_graph_launch_params *graph = params;

	if (!params)
		return;
	switch (id) {
	case DRIVER_LAUNCH_KERNEL:
	case DRIVER_LAUNCH_KERNEL_PTSZ:
	case DRIVER_LAUNCH_COOPERATIVE:
	case DRIVER_LAUNCH_COOPERATIVE_PTSZ:
		*kernel = (uintptr_t)one->function;
		*queue = (uintptr_t)one->stream;
		break;
	case DRIVER_LAUNCH_KERNEL_EX:
	case DRIVER_LAUNCH_KERNEL_EX_PTSZ:
		*kernel = (uintptr_t)ex->function;
		*queue = ex->config ? (uintptr_t)ex->config->stream : 0;
		break;
	case DRIVER_GRAPH_LAUNCH:
	case DRIVER_GRAPH_LAUNCH_PTSZ:
		*kernel = (uintptr_t)graph->executable;
		*queue = (uintptr_t)graph->stream;
		break;
	default:
		/* cuLaunch and its like: (function, ...) */
		*kernel = (uintptr_t)one->function;
	}
}

static void tell_launch(struct launching *own, uint32_t correlation, uint64_t kernel,
			uint64_t queue)
{
	own->is_told = true;
	own->launch = new_launch(correlation);
	aiflame_gpu_launch(own->launch, kernel, queue);
}

/* By which its kernels' records are checked; `executable` is 0 where the driver's call was not seen. */
static void tell_graph_launch(const struct launching *own, uint64_t executable)
{
	struct event event = { .kind = EVENT_GRAPH_LAUNCH,
			       .launch = own->launch,
			       .at_ns = now_ns(),
			       .executable = executable };

	if (executable && cupti.cuptiGetGraphExecId &&
	    cupti.cuptiGetGraphExecId((void *)(uintptr_t)executable, &event.graph))
		event.graph = 0;
	/* In a capture it may become a node, and run nothing. */
	if (!event_push(&event) || launches_capture())
		atomic_store(&lost_graph_launch, true);
}

/*
 * A launch is told once: inside of the driver's call, so that probes of the runtime's and of the
 * driver's function both have it inside; by the number of the outermost call, which is that of the
 * kernel's record.
 */
static void at_driver_call(struct launching *own, uint32_t id,
			   const struct cupti_callback_data *data)
{
	bool is_graph = id == DRIVER_GRAPH_LAUNCH || id == DRIVER_GRAPH_LAUNCH_PTSZ;
	uint64_t kernel = 0, queue = 0;

	if (data->site == CUPTI_EXIT) {
		/* It runs nothing, and has no turn. */
		if (is_graph && data->result && *(const cu_result *)data->result)
			atomic_store(&lost_graph_launch, true);
		if (!own->depth)
			own->launch = 0;
		return;
	}
	if (data->context && data->context != own->context) {
		own->context = data->context;
		stalls_see(data->context);
	}
	if (own->depth && data->correlation != own->correlation)
		losses_add(LOSS_LAUNCH_IDS, 1);
	if (own->depth && own->is_told)
		return;
	read_params(id, data->params, &kernel, &queue);
	tell_launch(own, own->depth ? own->correlation : data->correlation, kernel, queue);
	if (is_graph)
		tell_graph_launch(own, kernel);
}

static void at_runtime_call(struct launching *own, uint32_t id,
			    const struct cupti_callback_data *data)
{
	if (data->site == CUPTI_ENTER) {
		if (own->depth++)
			return;
		own->correlation = data->correlation;
		own->is_told = false;
		return;
	}
	if (!own->depth || --own->depth)
		return;
	/* The driver's call was not seen. */
	if (!own->is_told) {
		tell_launch(own, own->correlation, 0, 0);
		if (id == RUNTIME_GRAPH_LAUNCH || id == RUNTIME_GRAPH_LAUNCH_PTSZ)
			tell_graph_launch(own, 0);
	}
	own->launch = 0;
}

static bool is_begin_of_capture(uint32_t id)
{
	return id == DRIVER_BEGIN_CAPTURE || id == DRIVER_BEGIN_CAPTURE_PTSZ ||
	       id == DRIVER_BEGIN_CAPTURE_V2 || id == DRIVER_BEGIN_CAPTURE_V2_PTSZ ||
	       id == DRIVER_BEGIN_CAPTURE_TO_GRAPH || id == DRIVER_BEGIN_CAPTURE_TO_GRAPH_PTSZ;
}

static bool is_end_of_capture(uint32_t id)
{
	return id == DRIVER_END_CAPTURE || id == DRIVER_END_CAPTURE_PTSZ;
}

static void let_capture_go(void)
{
	int open = atomic_load(&captures);

	while (open > 0 && !atomic_compare_exchange_weak(&captures, &open, open - 1))
		;
}

/* From before it begins until after it has ended; whoever ends what was not seen to begin is let go. */
static void at_capture(uint32_t id, const struct cupti_callback_data *data)
{
	bool failed = data->site == CUPTI_EXIT && data->result && *(const cu_result *)data->result;

	if (is_begin_of_capture(id)) {
		if (data->site == CUPTI_ENTER) {
			atomic_store(&captures_ns, now_ns());
			atomic_fetch_add(&captures, 1);
			stalls_before_capture();
		} else if (failed) {
			let_capture_go();
		}
	} else if (data->site == CUPTI_EXIT) {
		let_capture_go();
	}
}

static void at_module(uint32_t id, const struct cupti_resource_data *data)
{
	const struct cupti_module_data *module = data->descriptor;
	struct event event = { .at_ns = now_ns() };

	if (!module || !atomic_load_explicit(&wants_code, memory_order_relaxed))
		return;
	/* A destroyed context's modules go with it: it may be no more when the event is taken. */
	if (cupti.cuptiGetContextId(data->context, &event.context))
		event.context = 0;
	event.kind = id == CUPTI_MODULE_LOADED ? EVENT_MODULE_LOADED : EVENT_MODULE_UNLOADED;
	event.module = module->module;
	event.size = module->cubin_size;
	if (event.kind == EVENT_MODULE_LOADED && module->cubin && event.size) {
		/* CUPTI's copy lives as long as this callback. */
		if (atomic_fetch_add(&waiting_bytes, event.size) + event.size <= MOST_WAITING_BYTES)
			event.bytes = malloc(event.size);
		if (event.bytes)
			memcpy(event.bytes, module->cubin, event.size);
		else
			atomic_fetch_sub(&waiting_bytes, event.size);
	}
	if (!event_push(&event) && event.bytes)
		launches_free(event.bytes, event.size);
}

static void at_node(uint32_t id, const struct cupti_resource_data *data)
{
	const struct cupti_graph_data *graph = data->descriptor;
	struct event event = { .kind = EVENT_NODE };

	if (!graph || graph->node_type != CU_NODE_KERNEL || !cupti.cuptiGetGraphNodeId)
		return;
	if (cupti.cuptiGetGraphNodeId(graph->node, &event.node))
		return;
	if (id == CUPTI_NODE_CLONED &&
	    cupti.cuptiGetGraphNodeId(graph->original_node, &event.original))
		return;
	event.launch = id == CUPTI_NODE_CREATED ? launching.launch : 0;
	event_push(&event);
}

static void at_resource(uint32_t id, const struct cupti_resource_data *data)
{
	switch (id) {
	case CUPTI_CONTEXT_CREATED:
		stalls_see(data->context);
		break;
	case CUPTI_CONTEXT_DESTROYED:
		stalls_forget(data->context);
		break;
	case CUPTI_MODULE_LOADED:
	case CUPTI_MODULE_UNLOADED:
		at_module(id, data);
		break;
	case CUPTI_NODE_CREATED:
	case CUPTI_NODE_CLONED:
		at_node(id, data);
		break;
	}
}

static void at_callback(void *user, uint32_t domain, uint32_t id, const void *data)
{
	uint32_t now = atomic_load_explicit(&generation, memory_order_relaxed);
	struct launching *own;

	(void)user;
	/* In a child that was forked nobody would take what is left. */
	if (!now || !data || !memory_is_ours())
		return;
	own = &launching;
	if (own->generation != now)
		*own = (struct launching){ .generation = now };
	if (domain == CUPTI_RESOURCE)
		at_resource(id, data);
	else if (domain == CUPTI_RUNTIME)
		at_runtime_call(own, id, data);
	else if (domain == CUPTI_DRIVER && (is_begin_of_capture(id) || is_end_of_capture(id)))
		at_capture(id, data);
	else if (domain == CUPTI_DRIVER)
		at_driver_call(own, id, data);
	else if (domain == CUPTI_STATE && id == CUPTI_FATAL) {
		atomic_store(&was_ended, true);
		control_wake();
	}
}

void launches_free(void *bytes, size_t size)
{
	free(bytes);
	atomic_fetch_sub(&waiting_bytes, size);
}

/* V2 tells who is there; it is asked with nothing that it could subscribe to otherwise. */
static cupti_result subscribe_v2(struct subscription *subscription, char *rival)
{
	struct cupti_subscriber_params params = {
		.size = CUPTI_SIZE(struct cupti_subscriber_params, padding),
		.name = "aiflame",
		.old_name = rival,
		.old_name_size = CUPTI_OLD_NAME_BYTES,
		.allows_others = 1,
	};
	bool has_v2 = cupti.cuptiSubscribe_v2 && cupti.cuptiActivityRegisterCallbacks_v2 &&
		      cupti.cuptiActivityEnable_v2 && cupti.cuptiActivityDisable_v2 &&
		      cupti.cuptiActivityGetNextRecord_v2 && cupti.cuptiGetTimestamp_v2;

	if (!has_v2)
		return CUPTI_TAKEN;
	return cupti.cuptiSubscribe_v2(&subscription->handle, at_callback, NULL, &params);
}

cupti_result launches_subscribe(struct subscription *subscription, char *rival, const char **what)
{
	cupti_result result = cupti.cuptiSubscribe(&subscription->handle, at_callback, NULL);

	*what = "cuptiSubscribe";
	subscription->is_v2 = false;
	/* Somebody has it: if by V2, and with room for others, there is a way. */
	if (result == CUPTI_NOT_COMPATIBLE || result == CUPTI_TAKEN || result == CUPTI_NO_MORE) {
		cupti_result second = subscribe_v2(subscription, rival);

		subscription->is_v2 = second == CUPTI_OK;
		result = second == CUPTI_OK ? CUPTI_OK : CUPTI_TAKEN;
	}
	return result;
}

struct callback_id {
	uint32_t domain, id;
	bool is_optional; /* for code, or not in every version */
};

static const struct callback_id ids[] = {
	/* First: of a context that a launch tells of it has to be known when it goes. */
	{ CUPTI_RESOURCE, CUPTI_CONTEXT_CREATED, false },
	{ CUPTI_RESOURCE, CUPTI_CONTEXT_DESTROYED, false },
	{ CUPTI_DRIVER, DRIVER_LAUNCH_KERNEL, false },
	{ CUPTI_DRIVER, DRIVER_LAUNCH_KERNEL_PTSZ, false },
	{ CUPTI_DRIVER, DRIVER_LAUNCH_KERNEL_EX, false },
	{ CUPTI_DRIVER, DRIVER_LAUNCH_KERNEL_EX_PTSZ, false },
	{ CUPTI_DRIVER, DRIVER_LAUNCH_COOPERATIVE, false },
	{ CUPTI_DRIVER, DRIVER_LAUNCH_COOPERATIVE_PTSZ, false },
	{ CUPTI_DRIVER, DRIVER_GRAPH_LAUNCH, false },
	{ CUPTI_DRIVER, DRIVER_GRAPH_LAUNCH_PTSZ, false },
	{ CUPTI_DRIVER, DRIVER_LAUNCH, true },
	{ CUPTI_DRIVER, DRIVER_LAUNCH_GRID, true },
	{ CUPTI_DRIVER, DRIVER_LAUNCH_GRID_ASYNC, true },
	{ CUPTI_DRIVER, DRIVER_LAUNCH_COOPERATIVE_MULTI, true },
	{ CUPTI_DRIVER, DRIVER_BEGIN_CAPTURE, true },
	{ CUPTI_DRIVER, DRIVER_BEGIN_CAPTURE_PTSZ, true },
	{ CUPTI_DRIVER, DRIVER_BEGIN_CAPTURE_V2, true },
	{ CUPTI_DRIVER, DRIVER_BEGIN_CAPTURE_V2_PTSZ, true },
	{ CUPTI_DRIVER, DRIVER_BEGIN_CAPTURE_TO_GRAPH, true },
	{ CUPTI_DRIVER, DRIVER_BEGIN_CAPTURE_TO_GRAPH_PTSZ, true },
	{ CUPTI_DRIVER, DRIVER_END_CAPTURE, true },
	{ CUPTI_DRIVER, DRIVER_END_CAPTURE_PTSZ, true },
	{ CUPTI_RUNTIME, RUNTIME_LAUNCH_KERNEL, false },
	{ CUPTI_RUNTIME, RUNTIME_LAUNCH_KERNEL_PTSZ, false },
	{ CUPTI_RUNTIME, RUNTIME_LAUNCH_KERNEL_EXC, false },
	{ CUPTI_RUNTIME, RUNTIME_LAUNCH_KERNEL_EXC_PTSZ, false },
	{ CUPTI_RUNTIME, RUNTIME_LAUNCH_COOPERATIVE, false },
	{ CUPTI_RUNTIME, RUNTIME_LAUNCH_COOPERATIVE_PTSZ, false },
	{ CUPTI_RUNTIME, RUNTIME_GRAPH_LAUNCH, false },
	{ CUPTI_RUNTIME, RUNTIME_GRAPH_LAUNCH_PTSZ, false },
	{ CUPTI_RUNTIME, RUNTIME_LAUNCH_COOPERATIVE_MULTI, true },
	{ CUPTI_RUNTIME, RUNTIME_LAUNCH_KERNEL_13, true },
	{ CUPTI_RUNTIME, RUNTIME_LAUNCH_KERNEL_13_PTSZ, true },
	{ CUPTI_RESOURCE, CUPTI_MODULE_LOADED, true },
	{ CUPTI_RESOURCE, CUPTI_MODULE_UNLOADED, true },
	{ CUPTI_RESOURCE, CUPTI_NODE_CREATED, true },
	{ CUPTI_RESOURCE, CUPTI_NODE_CLONED, true },
	{ CUPTI_STATE, CUPTI_FATAL, true },
};

#define IDS (sizeof(ids) / sizeof(*ids))

cupti_result launches_begin(const struct subscription *subscription, bool with_code,
			    const char **what)
{
	static uint32_t generations;

	*what = "cuptiEnableCallback";
	atomic_store(&wants_code, with_code);
	atomic_store(&captures, 0);
	atomic_store(&lost_graph_launch, false);
	/* 0 is none, also after four billion of them. */
	generations += generations + 1 ? 1 : 2;
	atomic_store(&generation, generations);
	for (size_t at = 0; at < IDS; at++) {
		cupti_result result = cupti.cuptiEnableCallback(1, subscription->handle,
								ids[at].domain, ids[at].id);

		if (result && !ids[at].is_optional)
			return result;
	}
	return CUPTI_OK;
}

void launches_drop(void)
{
	atomic_store(&generation, 0);
}

void launches_end(const struct subscription *subscription)
{
	for (size_t at = 0; at < IDS; at++)
		cupti.cuptiEnableCallback(0, subscription->handle, ids[at].domain, ids[at].id);
	launches_drop();
	cupti.cuptiUnsubscribe(subscription->handle);
}
