/* SPDX-License-Identifier: Apache-2.0 */
/* The driver: libcuda.so.1. */
#define _GNU_SOURCE
#include "standin.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const struct hooks nobody;
EXPORTED const struct hooks *_Atomic standin_hooks = &nobody;
EXPORTED pthread_mutex_t standin_lock = PTHREAD_MUTEX_INITIALIZER;

static void take_lock(void)
{
	pthread_mutex_lock(&standin_lock);
}

static void give_lock(void)
{
	pthread_mutex_unlock(&standin_lock);
}

/* A child has the thread that forked alone: nobody else is to hold the lock in it. */
__attribute__((constructor)) static void watch_forks(void)
{
	pthread_atfork(take_lock, give_lock, give_lock);
}
EXPORTED _Thread_local uint32_t standin_correlation;
EXPORTED _Atomic int64_t standin_step_ns;

#define MOST_STREAMS 64

static _Thread_local struct context_of_driver *current;
static _Thread_local int capture_mode;
static struct stream streams[MOST_STREAMS] = { { .id = 7 } };
static _Atomic uint32_t stream_count = 1, context_ids, module_ids, graph_ids;
static _Atomic uint64_t node_ids = 1000;
static _Atomic uint32_t correlations;
static _Atomic bool is_begun;
EXPORTED _Atomic bool standin_is_used;

EXPORTED uint64_t standin_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

EXPORTED uint64_t standin_word(const char *name, uint64_t otherwise)
{
	const char *text = getenv("STANDIN"), *at = text;
	size_t size = strlen(name);

	for (; at && (at = strstr(at, name)); at += size) {
		bool begins = at == text || at[-1] == ' ';

		if (begins && at[size] == '=')
			return strtoull(at + size + 1, NULL, 10);
		if (begins && (!at[size] || at[size] == ' '))
			return 1;
	}
	return otherwise;
}

EXPORTED uint32_t standin_next_correlation(void)
{
	return (uint32_t)standin_word("first", 1) + atomic_fetch_add(&correlations, 1);
}

EXPORTED void standin_unsafe_call(void)
{
	if (capture_mode == CU_CAPTURE_RELAXED)
		return;
	for (uint32_t at = 0; at < MOST_STREAMS; at++)
		if (streams[at].capture)
			streams[at].is_invalid = true;
}

EXPORTED void standin_synchronise(void)
{
	for (uint32_t at = 0; at < MOST_STREAMS; at++)
		if (streams[at].capture)
			streams[at].is_invalid = true;
}

static void tell(uint32_t id, uint32_t site, const char *name, const void *params,
		 cu_result *result, uint32_t correlation)
{
	if (standin_hooks->api)
		standin_hooks->api(CUPTI_DRIVER, id, site, name, params, result, current,
				   correlation);
}

static void tell_resource(uint32_t id, struct context_of_driver *context, void *descriptor)
{
	if (standin_hooks->resource)
		standin_hooks->resource(id, context, descriptor);
}

EXPORTED cu_result cuInit(uint32_t flags)
{
	const char *path = getenv("CUDA_INJECTION64_PATH");
	int (*begin)(void);
	void *library;

	(void)flags;
	if (is_begun)
		return 0;
	standin_is_used = true;
	library = path ? dlopen(path, RTLD_NOW) : NULL;
	begin = library ? (int (*)(void))dlsym(library, "InitializeInjection") : NULL;
	if (begin)
		begin();
	is_begun = true;
	return 0;
}

EXPORTED cu_result cuDriverGetVersion(int *version)
{
	*version = (int)standin_word("driver", 12090);
	return 0;
}

EXPORTED cu_result cuDeviceGetCount(int *count)
{
	*count = 2;
	return is_begun ? 0 : 3;
}

EXPORTED cu_result cuDeviceGetName(char *name, int size, cu_device device)
{
	strncpy(name, device ? "Standin B" : "Standin A", size);
	return 0;
}

EXPORTED cu_result cuDeviceGetUuid(uint8_t *uuid, cu_device device)
{
	for (int at = 0; at < 16; at++)
		uuid[at] = (uint8_t)(device * 16 + at);
	return 0;
}

/* Where devices are instances of others (MIG), this one tells theirs: cuda.h. */
EXPORTED cu_result cuDeviceGetUuid_v2(uint8_t *uuid, cu_device device)
{
	cuDeviceGetUuid(uuid, device);
	if (standin_word("mig", 0))
		uuid[15] ^= 0x80;
	return 0;
}

EXPORTED cu_result cuDeviceGetAttribute(int *value, int which, cu_device device)
{
	(void)device;
	*value = which == CU_MULTIPROCESSORS ? 132
		 : which == CU_CLOCK_KHZ     ? 1755000
		 : which == CU_MAJOR	     ? 9
					     : 0;
	return 0;
}

EXPORTED cu_result cuThreadExchangeStreamCaptureMode(int *mode)
{
	int old = capture_mode;

	capture_mode = *mode;
	*mode = old;
	return 0;
}

EXPORTED struct context_of_driver *standin_context(void)
{
	return current;
}

EXPORTED cu_result cuCtxCreate_v2(void **context, uint32_t flags, cu_device device)
{
	struct context_of_driver *made = calloc(1, sizeof(*made));

	(void)flags;
	made->id = atomic_fetch_add(&context_ids, 1) + 1;
	made->device = device;
	current = made;
	*context = made;
	tell_resource(CUPTI_CONTEXT_CREATED, made, NULL);
	return 0;
}

EXPORTED cu_result cuCtxSetCurrent(void *context)
{
	current = context;
	return 0;
}

static _Thread_local struct context_of_driver *below;

EXPORTED cu_result cuCtxPushCurrent_v2(void *context)
{
	below = current;
	current = context;
	return 0;
}

EXPORTED cu_result cuCtxPopCurrent_v2(void **context)
{
	*context = current;
	current = below;
	return 0;
}

static void tell_unloaded(struct context_of_driver *context, const struct module *old)
{
	struct cupti_module_data data = { old->id, old->size, old->cubin };

	tell_resource(CUPTI_MODULE_UNLOADED, context, &data);
}

/* Its memory stays: who reads it after its end is found. Its modules go after it was told of. */
EXPORTED cu_result cuCtxDestroy_v2(void *context)
{
	struct context_of_driver *old = context;

	tell_resource(CUPTI_CONTEXT_DESTROYED, old, NULL);
	for (struct module *module = old->modules; module; module = module->next)
		if (!module->is_unloaded)
			tell_unloaded(old, module);
	pthread_mutex_lock(&standin_lock);
	old->is_gone = true;
	pthread_mutex_unlock(&standin_lock);
	if (current == old)
		current = NULL;
	return 0;
}

/* FNV-1a: real CUPTI's is its own secret, too. */
static uint64_t crc_of(const uint8_t *bytes, size_t size)
{
	uint64_t hash = 14695981039346656037ull;

	for (size_t at = 0; at < size; at++)
		hash = (hash ^ bytes[at]) * 1099511628211ull;
	return hash;
}

/* Unlike the real one, it is told a size: what is loaded need not be a cubin. */
EXPORTED cu_result standin_load(void **module, const void *image, size_t size)
{
	struct module *made = calloc(1, sizeof(*made));
	struct cupti_module_data data;

	*made = (struct module){ .id = atomic_fetch_add(&module_ids, 1) + 1,
				 .cubin = image,
				 .size = size,
				 .crc = crc_of(image, size) };
	data = (struct cupti_module_data){ made->id, size, image };
	*module = made;
	pthread_mutex_lock(&standin_lock);
	if (current) {
		made->next = current->modules;
		current->modules = made;
	}
	pthread_mutex_unlock(&standin_lock);
	tell_resource(CUPTI_MODULE_LOADED, current, &data);
	return 0;
}

EXPORTED cu_result cuModuleUnload(void *module)
{
	struct module *old = module;

	old->is_unloaded = true;
	tell_unloaded(current, old);
	return 0;
}

EXPORTED cu_result cuModuleGetFunction(void **function, void *module, const char *name)
{
	struct module *home = module;
	struct function *made;

	pthread_mutex_lock(&standin_lock);
	made = &home->functions[home->function_count++];
	*made = (struct function){ strdup(name), home, home->function_count };
	pthread_mutex_unlock(&standin_lock);
	*function = made;
	return 0;
}

EXPORTED cu_result cuStreamCreate(void **stream, uint32_t flags)
{
	struct stream *made = &streams[atomic_fetch_add(&stream_count, 1)];

	(void)flags;
	made->id = (uint32_t)(made - streams) + 7;
	*stream = made;
	return 0;
}

static struct stream *stream_of(void *stream)
{
	return stream ? stream : &streams[0];
}

static void sleep_until(uint64_t until)
{
	uint64_t now = standin_now_ns();

	if (until > now)
		usleep((until - now) / 1000 + 1);
}

static uint64_t all_idle_ns(void)
{
	uint64_t found = 0;

	for (uint32_t at = 0; at < MOST_STREAMS; at++)
		if (streams[at].busy_until_ns > found)
			found = streams[at].busy_until_ns;
	return found;
}

static void run(const struct node *what, struct stream *stream, uint32_t correlation, uint64_t node,
		uint32_t graph)
{
	struct run run = { .context = current,
			   .function = what->function,
			   .node = node,
			   .graph = graph,
			   .stream = stream->id,
			   .correlation = correlation,
			   .blocks = what->blocks,
			   .warps = what->warps };
	uint64_t now = standin_now_ns(), free_ns;
	bool is_serial;

	pthread_mutex_lock(&standin_lock);
	is_serial = standin_hooks->serialises && standin_hooks->serialises(current);
	free_ns = is_serial ? all_idle_ns() : stream->busy_until_ns;
	run.begin_ns = free_ns > now ? free_ns : now;
	run.end_ns = run.begin_ns + what->blocks * BLOCK_NS;
	stream->busy_until_ns = run.end_ns;
	if (standin_hooks->ran)
		standin_hooks->ran(&run);
	pthread_mutex_unlock(&standin_lock);
	if (!is_serial)
		return;
	standin_synchronise();
	sleep_until(run.end_ns);
	standin_hooks->ended(&run);
}

/* What is launched while its stream is captured becomes a node. */
static void capture(struct graph *graph, const struct node *what)
{
	struct node *node = calloc(1, sizeof(*node));
	struct cupti_graph_data data = { .graph = graph, .node = node };

	*node = *what;
	node->id = atomic_fetch_add(&node_ids, 1);
	graph->nodes[graph->count++] = node;
	tell_resource(CUPTI_NODE_CREATED, current, &data);
}

static uint32_t correlation_of_call(void)
{
	if (!standin_correlation || standin_word("two-ids", 0))
		return standin_next_correlation();
	return standin_correlation;
}

/* By what kernels are told: the outermost call's. */
static uint32_t correlation_of_kernel(uint32_t of_call)
{
	return standin_correlation ? standin_correlation : of_call;
}

EXPORTED cu_result cuLaunchKernel(void *function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z,
				  uint32_t block_x, uint32_t block_y, uint32_t block_z,
				  uint32_t shared, void *stream, void **arguments, void **extra)
{
	struct cu_launch_kernel_params params = {
		function, { grid_x, grid_y, grid_z }, { block_x, block_y, block_z }, shared, stream,
	};
	struct node what = { 0, function, grid_x, block_x > 32 ? block_x / 32 : 1 };
	struct stream *on = stream_of(stream);
	uint32_t correlation = correlation_of_call();
	cu_result result = 0;

	(void)arguments, (void)extra;
	tell(DRIVER_LAUNCH_KERNEL, CUPTI_ENTER, "cuLaunchKernel", &params, &result, correlation);
	if (on->capture)
		capture(on->capture, &what);
	else
		run(&what, on, correlation_of_kernel(correlation), 0, 0);
	tell(DRIVER_LAUNCH_KERNEL, CUPTI_EXIT, "cuLaunchKernel", &params, &result, correlation);
	return result;
}

EXPORTED cu_result cuStreamBeginCapture_v2(void *stream, int mode)
{
	struct stream *on = stream_of(stream);
	uint32_t correlation = correlation_of_call();
	cu_result result = 0;

	(void)mode;
	tell(DRIVER_BEGIN_CAPTURE_V2, CUPTI_ENTER, "cuStreamBeginCapture_v2", NULL, &result,
	     correlation);
	on->capture = calloc(1, sizeof(*on->capture));
	on->capture->id = atomic_fetch_add(&graph_ids, 1) + 1;
	on->is_invalid = false;
	tell(DRIVER_BEGIN_CAPTURE_V2, CUPTI_EXIT, "cuStreamBeginCapture_v2", NULL, &result,
	     correlation);
	return result;
}

EXPORTED cu_result cuStreamEndCapture(void *stream, void **graph)
{
	struct stream *on = stream_of(stream);
	uint32_t correlation = correlation_of_call();
	cu_result result = 0;

	tell(DRIVER_END_CAPTURE, CUPTI_ENTER, "cuStreamEndCapture", NULL, &result, correlation);
	*graph = on->capture;
	on->capture = NULL;
	if (on->is_invalid)
		result = STREAM_CAPTURE_INVALIDATED;
	tell(DRIVER_END_CAPTURE, CUPTI_EXIT, "cuStreamEndCapture", NULL, &result, correlation);
	return result;
}

EXPORTED cu_result cuGraphInstantiateWithFlags(void **executable, void *graph, uint64_t flags)
{
	struct graph *from = graph, *made = calloc(1, sizeof(*made));

	(void)flags;
	made->id = atomic_fetch_add(&graph_ids, 1) + 1;
	for (uint32_t at = 0; at < from->count; at++) {
		struct node *node = calloc(1, sizeof(*node));
		struct cupti_graph_data data = { .graph = made,
						 .original_graph = from,
						 .node = node,
						 .original_node = from->nodes[at] };

		*node = *from->nodes[at];
		node->id = atomic_fetch_add(&node_ids, 1);
		made->nodes[made->count++] = node;
		tell_resource(CUPTI_NODE_CLONED, current, &data);
	}
	*executable = made;
	return 0;
}

EXPORTED cu_result cuGraphLaunch(void *executable, void *stream)
{
	struct cu_graph_launch_params params = { executable, stream };
	struct graph *graph = executable;
	uint32_t correlation = correlation_of_call();
	cu_result result = 0;

	tell(DRIVER_GRAPH_LAUNCH, CUPTI_ENTER, "cuGraphLaunch", &params, &result, correlation);
	for (uint32_t at = 0; at < graph->count; at++)
		run(graph->nodes[at], stream_of(stream), correlation_of_kernel(correlation),
		    graph->nodes[at]->id, graph->id);
	tell(DRIVER_GRAPH_LAUNCH, CUPTI_EXIT, "cuGraphLaunch", &params, &result, correlation);
	return result;
}

EXPORTED cu_result cuStreamSynchronize(void *stream)
{
	struct stream *on = stream_of(stream);
	uint64_t until;

	pthread_mutex_lock(&standin_lock);
	until = on->busy_until_ns;
	pthread_mutex_unlock(&standin_lock);
	sleep_until(until);
	return 0;
}

EXPORTED cu_result cuCtxSynchronize(void)
{
	standin_unsafe_call();
	for (uint32_t at = 0; at < MOST_STREAMS; at++)
		cuStreamSynchronize(&streams[at]);
	return 0;
}
