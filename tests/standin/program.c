/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that does what it is told, a line each on standard input, and answers "ok NUMBER":
 *
 *   init                      cuInit
 *   context D                 a context on a device, current from then on
 *   use N                     the Nth context is current
 *   destroy N                 ... and is gone
 *   module SIZE               loads a module of so many bytes
 *   again N                   loads the bytes of the Nth module once more
 *   unload N
 *   function M NAME           a kernel of the Mth module
 *   stream
 *   launch F BLOCKS TIMES S   the Fth function on the Sth stream, 0 for the default one
 *   runtime F BLOCKS TIMES    the same through the runtime, in one of its calls each
 *   dense F BLOCKS TIMES N    the Fth function in blocks of so many warps, from elsewhere
 *   capture S, end S          answers with what the driver returned
 *   instantiate               the last graph that was captured
 *   graph S                   launches it
 *   replay N S                launches the Nth that was instantiated
 *   elsewhere N S             ... from elsewhere
 *   threads N TIMES           as many threads that launch function 0
 *   fork TIMES                a child launches as often, and ends; answers with its exit status
 *   load PATH                 loads a library, in a thread of its own
 *   sync
 *   profile, unprofile        as PyTorch's profiler: takes the kernel times of who has subscribed, and
 *                             ends them; answers with how many came
 *   step NS                   somebody sets CLOCK_REALTIME
 *   close                     what it did not open, as some daemons do
 *   exit CODE, crash
 */
#define _GNU_SOURCE
#include "standin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Of each kind: a test makes 250 contexts. */
#define MOST 256

cu_result cuInit(uint32_t flags);
cu_result cuCtxCreate_v2(void **context, uint32_t flags, cu_device device);
cu_result cuCtxSetCurrent(void *context);
cu_result cuCtxDestroy_v2(void *context);
cu_result standin_load(void **module, const void *image, size_t size);
cu_result cuModuleUnload(void *module);
cu_result cuModuleGetFunction(void **function, void *module, const char *name);
cu_result cuStreamCreate(void **stream, uint32_t flags);
cu_result cuLaunchKernel(void *function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z,
			 uint32_t block_x, uint32_t block_y, uint32_t block_z, uint32_t shared,
			 void *stream, void **arguments, void **extra);
cu_result cuStreamBeginCapture_v2(void *stream, int mode);
cu_result cuStreamEndCapture(void *stream, void **graph);
cu_result cuGraphInstantiateWithFlags(void **executable, void *graph, uint64_t flags);
cu_result cuGraphLaunch(void *executable, void *stream);
cu_result cuCtxSynchronize(void);

static void *contexts[MOST], *modules[MOST], *functions[MOST], *streams[MOST];
static int context_count, module_count, function_count, stream_count = 1;
static void *graph, *executables[MOST];
static int executable_count;
static long times_of_threads;

static void launch(int function, uint32_t blocks, long times, void *stream)
{
	for (long at = 0; at < times; at++)
		cuLaunchKernel(functions[function], blocks, 1, 1, 32, 1, 1, 0, stream, NULL, NULL);
}

/* Not inlined, so that it is another call site. */
__attribute__((noinline)) static void launch_dense(int function, uint32_t blocks, long times,
						   uint32_t warps)
{
	for (long at = 0; at < times; at++)
		cuLaunchKernel(functions[function], blocks, 1, 1, 32 * warps, 1, 1, 0, NULL, NULL,
			       NULL);
	__asm__ volatile("");
}

__attribute__((noinline)) static long replay(long executable, void *stream)
{
	long result = cuGraphLaunch(executables[executable], stream);

	__asm__ volatile("");
	return result;
}

__attribute__((noinline)) static long replay_elsewhere(long executable, void *stream)
{
	long result = cuGraphLaunch(executables[executable], stream);

	__asm__ volatile("" ::"r"(1));
	return result;
}

static void tell_runtime(uint32_t site)
{
	if (standin_hooks->api)
		standin_hooks->api(CUPTI_RUNTIME, RUNTIME_LAUNCH_KERNEL, site, "cudaLaunchKernel",
				   NULL, NULL, standin_context(), standin_correlation);
}

static void launch_by_runtime(int function, uint32_t blocks, long times)
{
	for (long at = 0; at < times; at++) {
		standin_correlation = standin_next_correlation();
		tell_runtime(CUPTI_ENTER);
		launch(function, blocks, 1, NULL);
		tell_runtime(CUPTI_EXIT);
		standin_correlation = 0;
	}
}

static void *run_thread(void *context)
{
	cuCtxSetCurrent(context);
	launch(0, 1, times_of_threads, NULL);
	return NULL;
}

static void run_threads(int count, long times)
{
	pthread_t *threads = calloc(count, sizeof(*threads));

	times_of_threads = times;
	for (int at = 0; at < count; at++)
		pthread_create(&threads[at], NULL, run_thread, standin_context());
	for (int at = 0; at < count; at++)
		pthread_join(threads[at], NULL);
	free(threads);
}

static long run_child(long times)
{
	pid_t child = fork();
	int status = -1;

	if (!child) {
		launch(0, 1, times, NULL);
		exit(0);
	}
	waitpid(child, &status, 0);
	return status;
}

static void *load_library(void *path)
{
	return dlopen(path, RTLD_NOW);
}

static long load(const char *path)
{
	void *library = NULL;
	pthread_t thread;

	pthread_create(&thread, NULL, load_library, (void *)path);
	pthread_join(thread, &library);
	return library != NULL;
}

static uint8_t profiled[1 << 20];
static long profiled_bytes;

static void lend(uint8_t **buffer, size_t *size, size_t *most)
{
	*buffer = profiled;
	*size = sizeof(profiled);
	*most = 0;
}

static void complete(cu_context context, uint32_t stream, uint8_t *buffer, size_t size,
		     size_t valid)
{
	(void)context, (void)stream, (void)size;
	/* Not all are its own. */
	if (buffer == profiled)
		profiled_bytes += (long)valid;
}

/* A function of the libcupti that is in the process. */
static void *find_in_cupti(const char *name)
{
	return dlsym(dlopen("libcupti.so.12", RTLD_LAZY | RTLD_NOLOAD), name);
}

static long profile(bool begins)
{
	cupti_result (*take)(cupti_buffer_requested, cupti_buffer_completed) =
		find_in_cupti("cuptiActivityRegisterCallbacks");
	cupti_result (*turn_on)(uint32_t) = find_in_cupti("cuptiActivityEnable");
	cupti_result (*turn_off)(uint32_t) = find_in_cupti("cuptiActivityDisable");
	cupti_result (*flush)(uint32_t) = find_in_cupti("cuptiActivityFlushAll");

	if (begins) {
		profiled_bytes = 0;
		take(lend, complete);
		return turn_on(CUPTI_ACTIVITY_CONCURRENT_KERNEL);
	}
	flush(CUPTI_FLUSH_FORCED);
	turn_off(CUPTI_ACTIVITY_CONCURRENT_KERNEL);
	return profiled_bytes;
}

static long make_module(long size)
{
	uint8_t *bytes = malloc(size);

	for (long at = 0; at < size; at++)
		bytes[at] = (uint8_t)(at * 7 + module_count);
	return standin_load(&modules[module_count++], bytes, size);
}

static long load_again(long module)
{
	static void *again;
	const struct module *first = modules[module];

	return standin_load(&again, first->cubin, first->size);
}

static long make_context(long device)
{
	return cuCtxCreate_v2(&contexts[context_count++], 0, (cu_device)device);
}

/* Also called by a Python program: workloads/pycuda.py. */
__attribute__((visibility("default"))) long obey(const char *verb, const char *text, long a, long b,
						 long c, long d)
{
	if (!strcmp(verb, "init"))
		return cuInit(0);
	if (!strcmp(verb, "context"))
		return make_context(a);
	if (!strcmp(verb, "use"))
		return cuCtxSetCurrent(contexts[a]);
	if (!strcmp(verb, "destroy"))
		return cuCtxDestroy_v2(contexts[a]);
	if (!strcmp(verb, "module"))
		return make_module(a);
	if (!strcmp(verb, "again"))
		return load_again(a);
	if (!strcmp(verb, "unload"))
		return cuModuleUnload(modules[a]);
	if (!strcmp(verb, "function"))
		return cuModuleGetFunction(&functions[function_count++], modules[a], text);
	if (!strcmp(verb, "stream"))
		return cuStreamCreate(&streams[stream_count++], 0);
	if (!strcmp(verb, "capture"))
		return cuStreamBeginCapture_v2(streams[a], 0);
	if (!strcmp(verb, "end"))
		return cuStreamEndCapture(streams[a], &graph);
	if (!strcmp(verb, "instantiate"))
		return cuGraphInstantiateWithFlags(&executables[executable_count++ % MOST], graph,
						   0);
	if (!strcmp(verb, "graph"))
		return replay((executable_count - 1) % MOST, streams[a]);
	if (!strcmp(verb, "replay"))
		return replay(a, streams[b]);
	if (!strcmp(verb, "elsewhere"))
		return replay_elsewhere(a, streams[b]);
	if (!strcmp(verb, "fork"))
		return run_child(a);
	if (!strcmp(verb, "load"))
		return load(text);
	if (!strcmp(verb, "sync"))
		return cuCtxSynchronize();
	if (!strcmp(verb, "profile") || !strcmp(verb, "unprofile"))
		return profile(*verb == 'p');
	if (!strcmp(verb, "step"))
		standin_step_ns += a;
	else if (!strcmp(verb, "launch"))
		launch((int)a, (uint32_t)b, c, streams[d]);
	else if (!strcmp(verb, "runtime"))
		launch_by_runtime((int)a, (uint32_t)b, c);
	else if (!strcmp(verb, "dense"))
		launch_dense((int)a, (uint32_t)b, c, (uint32_t)d);
	else if (!strcmp(verb, "threads"))
		run_threads((int)a, b);
	else if (!strcmp(verb, "close"))
		closefrom(STDERR_FILENO + 1);
	else if (!strcmp(verb, "exit"))
		exit((int)a);
	else if (!strcmp(verb, "crash"))
		abort();
	else
		return -1;
	return 0;
}

int main(void)
{
	char line[512], verb[32];
	static char text[512];

	/* A test that fails must not leave this behind. */
	alarm(100);
	while (fgets(line, sizeof(line), stdin)) {
		long a = 0, b = 0, c = 0, d = 0;
		bool has_text = !strncmp(line, "load", 4) || !strncmp(line, "function", 8);

		*verb = *text = 0;
		if (!strncmp(line, "load", 4))
			sscanf(line, "%31s %511s", verb, text);
		else if (has_text)
			sscanf(line, "%31s %ld %511s", verb, &a, text);
		else
			sscanf(line, "%31s %ld %ld %ld %ld", verb, &a, &b, &c, &d);
		printf("ok %ld\n", obey(verb, text, a, b, c, d));
		fflush(stdout);
	}
	return 0;
}
