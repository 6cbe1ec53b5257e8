/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA runtime: libcudart.so.13, as far as programs call it that nvcc 13 built. Each call is one
 * of the runtime's for CUPTI, and has one of the driver's in it.
 */
#include "standin.h"

#include <stdlib.h>
#include <string.h>

struct dim3 {
	uint32_t x, y, z;
};

/* As nvcc's crt/host_runtime.h and fatbinary_section.h have it. */
struct fat_binary {
	int magic, version;
	const void *data;
	void *file;
};

/* What __cudaGetKernel hands out is a pointer to one: no address of code. */
struct registered {
	const void *host;
	const char *name;
	void **module;
	void *function; /* the driver's, once it is loaded */
};

#define MOST_FUNCTIONS 64

static struct registered functions[MOST_FUNCTIONS];
static const struct fat_binary *binaries[MOST_FUNCTIONS];
static void *modules[MOST_FUNCTIONS];
static uint32_t function_count, binary_count;
static void *primary;
static _Thread_local struct {
	struct dim3 grid, block;
	size_t shared;
	void *stream;
} configuration;

cu_result cuInit(uint32_t flags);
cu_result cuCtxCreate_v2(void **context, uint32_t flags, cu_device device);
cu_result cuCtxSetCurrent(void *context);
cu_result cuModuleGetFunction(void **function, void *module, const char *name);
cu_result standin_load(void **module, const void *image, size_t size);
cu_result cuLaunchKernel(void *function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z,
			 uint32_t block_x, uint32_t block_y, uint32_t block_z, uint32_t shared,
			 void *stream, void **arguments, void **extra);
cu_result cuStreamCreate(void **stream, uint32_t flags);
cu_result cuStreamSynchronize(void *stream);
cu_result cuCtxSynchronize(void);
cu_result cuStreamBeginCapture_v2(void *stream, int mode);
cu_result cuStreamEndCapture(void *stream, void **graph);
cu_result cuGraphInstantiateWithFlags(void **executable, void *graph, uint64_t flags);
cu_result cuGraphLaunch(void *executable, void *stream);

/* The first ELF file of a fat binary, which is not compressed; else what is there of its data. */
static const void *cubin_of(const char *data, size_t *size)
{
	/* Magic, version, size of the header, size of what comes after it. */
	uint16_t header = *(const uint16_t *)(data + 6);
	uint64_t all = *(const uint64_t *)(data + 8);

	for (const char *at = data + header; at + 64 < data + header + all; at += 8)
		if (!memcmp(at, "\177ELF", 4)) {
			uint64_t sections = *(const uint64_t *)(at + 40);
			uint64_t programs = *(const uint64_t *)(at + 32);
			uint64_t end = sections +
				       *(const uint16_t *)(at + 58) * *(const uint16_t *)(at + 60);
			uint64_t other = programs + *(const uint16_t *)(at + 54) *
							    *(const uint16_t *)(at + 56);

			*size = end > other ? end : other;
			return at;
		}
	*size = header + all;
	return data;
}

/* Code is loaded with the first call, not when the program begins. */
static void load(void)
{
	for (uint32_t at = 0; at < binary_count; at++) {
		size_t size;
		const void *cubin = cubin_of(binaries[at]->data, &size);

		standin_load(&modules[at], cubin, size);
	}
	for (uint32_t at = 0; at < function_count; at++)
		cuModuleGetFunction(&functions[at].function, *functions[at].module,
				    functions[at].name);
}

static void begin(void)
{
	if (!primary) {
		cuInit(0);
		cuCtxCreate_v2(&primary, 0, 0);
		load();
	}
	if (!standin_context())
		cuCtxSetCurrent(primary);
}

static uint32_t enter(uint32_t id, const char *name)
{
	begin();
	standin_correlation = standin_next_correlation();
	if (standin_hooks->api)
		standin_hooks->api(CUPTI_RUNTIME, id, CUPTI_ENTER, name, NULL, NULL,
				   standin_context(), standin_correlation);
	return standin_correlation;
}

static void leave(uint32_t id, const char *name, cu_result *result, uint32_t correlation)
{
	if (standin_hooks->api)
		standin_hooks->api(CUPTI_RUNTIME, id, CUPTI_EXIT, name, NULL, result,
				   standin_context(), correlation);
	standin_correlation = 0;
}

EXPORTED void **__cudaRegisterFatBinary(void *binary)
{
	binaries[binary_count] = binary;
	return &modules[binary_count++];
}

EXPORTED void __cudaRegisterFatBinaryEnd(void **module)
{
	(void)module;
}

EXPORTED void __cudaUnregisterFatBinary(void **module)
{
	(void)module;
}

EXPORTED char __cudaInitModule(void **module)
{
	(void)module;
	return 0;
}

EXPORTED void __cudaRegisterFunction(void **module, const char *host, char *device,
				     const char *name, int limit, void *thread_id, void *block_id,
				     void *block_dim, void *grid_dim, int *warp_size)
{
	struct registered *made = &functions[function_count++];

	(void)device, (void)limit, (void)thread_id, (void)block_id, (void)block_dim;
	(void)grid_dim, (void)warp_size;
	*made = (struct registered){ host, name, module, NULL };
}

EXPORTED int __cudaGetKernel(void **kernel, const void *host)
{
	for (uint32_t at = 0; at < function_count; at++)
		if (functions[at].host == host) {
			*kernel = &functions[at];
			return 0;
		}
	return 98;
}

EXPORTED uint32_t __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared,
					      void *stream)
{
	configuration.grid = grid;
	configuration.block = block;
	configuration.shared = shared;
	configuration.stream = stream;
	return 0;
}

EXPORTED int __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared,
					void **stream)
{
	*grid = configuration.grid;
	*block = configuration.block;
	*shared = configuration.shared;
	*stream = configuration.stream;
	return 0;
}

EXPORTED int cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block,
			      void **arguments, size_t shared, void *stream)
{
	uint32_t correlation = enter(RUNTIME_LAUNCH_KERNEL, "cudaLaunchKernel");
	const struct registered *registered = kernel;
	cu_result result;
	void *found;

	/* A handle of CUDA 13, or a host function of what was built before. */
	if (!__cudaGetKernel(&found, kernel))
		registered = found;
	result = cuLaunchKernel(registered->function, grid.x, grid.y, grid.z, block.x, block.y,
				block.z, (uint32_t)shared, stream, arguments, NULL);
	leave(RUNTIME_LAUNCH_KERNEL, "cudaLaunchKernel", &result, correlation);
	return result;
}

EXPORTED int __cudaLaunchKernel(void *kernel, struct dim3 grid, struct dim3 block, void **arguments,
				size_t shared, void *stream)
{
	return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

EXPORTED int cudaMalloc(void **memory, size_t size)
{
	*memory = malloc(size);
	return *memory ? 0 : 2;
}

EXPORTED int cudaGetLastError(void)
{
	return 0;
}

EXPORTED int cudaStreamCreate(void **stream)
{
	begin();
	return cuStreamCreate(stream, 0);
}

EXPORTED int cudaStreamSynchronize(void *stream)
{
	return cuStreamSynchronize(stream);
}

EXPORTED int cudaDeviceSynchronize(void)
{
	return cuCtxSynchronize();
}

EXPORTED int cudaStreamBeginCapture(void *stream, int mode)
{
	return cuStreamBeginCapture_v2(stream, mode);
}

EXPORTED int cudaStreamEndCapture(void *stream, void **graph)
{
	return cuStreamEndCapture(stream, graph);
}

EXPORTED int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags)
{
	return cuGraphInstantiateWithFlags(executable, graph, flags);
}

EXPORTED int cudaGraphLaunch(void *executable, void *stream)
{
	uint32_t correlation = enter(RUNTIME_GRAPH_LAUNCH, "cudaGraphLaunch");
	cu_result result = cuGraphLaunch(executable, stream);

	leave(RUNTIME_GRAPH_LAUNCH, "cudaGraphLaunch", &result, correlation);
	return result;
}
