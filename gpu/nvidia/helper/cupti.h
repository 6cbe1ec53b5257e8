/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What NVIDIA has published of CUPTI and of the CUDA driver, as far as the helper needs it: no toolkit
 * is needed to build it. From the headers of nvidia-cuda-cupti-cu12 12.9.79 and nvidia-cuda-cupti
 * 13.5.25; tests/standin/abi_check.c compares every size, offset and number with them.
 */
#ifndef AIFLAME_CUPTI_H
#define AIFLAME_CUPTI_H

#include <stddef.h>
#include <stdint.h>

typedef int cupti_result;

/* cupti_result.h */
enum {
	CUPTI_OK = 0,
	CUPTI_INVALID_CONTEXT = 3,
	CUPTI_OUT_OF_MEMORY = 8,
	CUPTI_NO_MORE = 12, /* MAX_LIMIT_REACHED: of records in a buffer, of subscribers */
	CUPTI_NOT_COMPATIBLE = 14,
	CUPTI_INVALID_KIND = 21, /* also of a record that is incomplete */
	CUPTI_NOT_SUPPORTED = 27,
	CUPTI_VIRTUAL_DEVICE = 33,
	CUPTI_NO_RIGHTS = 35,
	CUPTI_OLD_PROFILER = 36,
	CUPTI_LEGACY_PROFILER = 38,
	CUPTI_TAKEN = 39, /* MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED */
	CUPTI_VIRTUAL_NO_RIGHTS = 40,
	CUPTI_CONFIDENTIAL = 41,
	CUPTI_CMP = 42,
	CUPTI_MIG = 43,
	CUPTI_SLI = 44,
	CUPTI_WSL = 45,
};

/* cuda.h; the handles are pointers to what nobody sees. */
typedef void *cu_context;
typedef void *cu_stream;
typedef void *cu_function;
typedef void *cu_node;
typedef int cu_device;
typedef int cu_result;

enum {
	CUDA_NOT_INITIALIZED = 3,
	CU_MULTIPROCESSORS = 16,
	CU_CLOCK_KHZ = 13,
	CU_MAJOR = 75,
	CU_MINOR = 76,
	CU_NODE_KERNEL = 0,
	CU_CAPTURE_RELAXED = 2,
};

struct cu_launch_config {
	uint32_t grid[3], block[3], shared_bytes;
	cu_stream stream;
};

/* cupti_callbacks.h */
enum {
	CUPTI_DRIVER = 1,
	CUPTI_RUNTIME = 2,
	CUPTI_RESOURCE = 3,
	CUPTI_STATE = 6,
};

enum {
	CUPTI_CONTEXT_DESTROYED = 2, /* is about to be */
	CUPTI_CONTEXT_CREATED = 1,
	CUPTI_MODULE_LOADED = 6,
	CUPTI_MODULE_UNLOADED = 7, /* is about to be */
	CUPTI_NODE_CREATED = 13,
	CUPTI_NODE_CLONED = 20,
	CUPTI_FATAL = 1, /* of CUPTI_STATE */
};

enum {
	CUPTI_ENTER = 0,
	CUPTI_EXIT = 1,
};

struct cupti_callback_data {
	uint32_t site;
	const char *function_name;
	const void *params;
	void *result;
	const char *symbol;
	cu_context context;
	uint32_t context_uid;
	uint64_t *correlation_data;
	uint32_t correlation;
};

struct cupti_resource_data {
	cu_context context;
	void *handle;
	void *descriptor;
};

struct cupti_module_data {
	uint32_t module;
	size_t cubin_size;
	const char *cubin;
};

struct cupti_graph_data {
	void *graph, *original_graph;
	cu_node node, original_node;
	uint32_t node_type;
	cu_node dependency;
	void *executable;
};

struct cupti_state_data {
	cupti_result result;
	const char *message;
};

typedef void *cupti_subscriber;
typedef void (*cupti_callback)(void *user, uint32_t domain, uint32_t id, const void *data);

struct cupti_subscriber_params {
	size_t size;
	const char *name;
	char *old_name;
	size_t old_name_size;
	uint8_t allows_others;
	uint8_t padding[7];
};

/* CUPTI_OLD_SUBSCRIBER_NAME_MIN_LEN */
#define CUPTI_OLD_NAME_BYTES 64

/* cupti_driver_cbid.h */
enum {
	DRIVER_LAUNCH = 115,
	DRIVER_LAUNCH_GRID = 116,
	DRIVER_LAUNCH_GRID_ASYNC = 117,
	DRIVER_LAUNCH_KERNEL = 307,
	DRIVER_LAUNCH_KERNEL_PTSZ = 442,
	DRIVER_LAUNCH_COOPERATIVE = 477,
	DRIVER_LAUNCH_COOPERATIVE_PTSZ = 478,
	DRIVER_LAUNCH_COOPERATIVE_MULTI = 480,
	DRIVER_BEGIN_CAPTURE = 495,
	DRIVER_BEGIN_CAPTURE_PTSZ = 496,
	DRIVER_END_CAPTURE = 497,
	DRIVER_END_CAPTURE_PTSZ = 498,
	DRIVER_GRAPH_LAUNCH = 514,
	DRIVER_GRAPH_LAUNCH_PTSZ = 515,
	DRIVER_BEGIN_CAPTURE_V2 = 539,
	DRIVER_BEGIN_CAPTURE_V2_PTSZ = 540,
	DRIVER_LAUNCH_KERNEL_EX = 652,
	DRIVER_LAUNCH_KERNEL_EX_PTSZ = 653,
	DRIVER_BEGIN_CAPTURE_TO_GRAPH = 720,
	DRIVER_BEGIN_CAPTURE_TO_GRAPH_PTSZ = 721,
};

/* cupti_runtime_cbid.h */
enum {
	RUNTIME_LAUNCH_KERNEL = 211,
	RUNTIME_LAUNCH_KERNEL_PTSZ = 214,
	RUNTIME_LAUNCH_COOPERATIVE = 269,
	RUNTIME_LAUNCH_COOPERATIVE_PTSZ = 270,
	RUNTIME_LAUNCH_COOPERATIVE_MULTI = 272,
	RUNTIME_GRAPH_LAUNCH = 311,
	RUNTIME_GRAPH_LAUNCH_PTSZ = 312,
	RUNTIME_LAUNCH_KERNEL_EXC = 430,
	RUNTIME_LAUNCH_KERNEL_EXC_PTSZ = 431,
	/* Of CUDA 13 on. */
	RUNTIME_LAUNCH_KERNEL_13 = 505,
	RUNTIME_LAUNCH_KERNEL_13_PTSZ = 506,
};

/* generated_cuda_meta.h: cuLaunchKernel, the cooperative one, and their _ptsz */
struct cu_launch_kernel_params {
	cu_function function;
	uint32_t grid[3], block[3], shared_bytes;
	cu_stream stream;
};

/* cuLaunchKernelEx */
struct cu_launch_kernel_ex_params {
	const struct cu_launch_config *config;
	cu_function function;
};

/* cuGraphLaunch */
struct cu_graph_launch_params {
	void *executable;
	cu_stream stream;
};

/* cupti_activity.h */
enum {
	CUPTI_ACTIVITY_CONCURRENT_KERNEL = 10,
	CUPTI_FLUSH_FORCED = 1,
};

/*
 * The beginning of CUpti_ActivityKernel9 (CUDA 12.8) to 13 (13.5), which has not changed in between;
 * packed with an alignment of 8, by which nothing moves.
 */
struct cupti_kernel {
	uint32_t kind;
	uint8_t cache_config, shared_config;
	uint16_t registers;
	uint32_t partitioned[2];
	uint64_t start, end, completed;
	uint32_t device, context, stream;
	int32_t grid[3], block[3];
	int32_t static_shared, dynamic_shared;
	uint32_t local_per_thread, local_total;
	uint32_t correlation;
	int64_t grid_id;
	const char *name;
	void *reserved;
	uint64_t queued, submitted;
	uint8_t launch_type, carveout_requested, carveout, padding;
	uint32_t shared_executed;
	uint64_t node;
	uint32_t shared_limit;
	uint32_t graph;
};

typedef void (*cupti_buffer_requested)(uint8_t **buffer, size_t *size, size_t *most);
typedef void (*cupti_buffer_completed)(cu_context context, uint32_t stream, uint8_t *buffer,
				       size_t size, size_t valid);
/* Of V2: with structures of what is not needed. */
typedef void (*cupti_buffer_requested_v2)(uint8_t **buffer, size_t *size, size_t *most, void *more);
typedef void (*cupti_buffer_completed_v2)(uint8_t *buffer, size_t size, size_t valid, void *more);

/* cupti_pcsampling.h: CUPTI 26 (CUDA 12.8) and later, in which a PC has a correlation id. */
struct cupti_pc_reason {
	uint32_t reason;
	uint32_t samples;
};

struct cupti_pc {
	size_t size;
	uint64_t cubin_crc;
	uint64_t offset;
	uint32_t function;
	uint32_t padding;
	char *function_name;
	size_t reason_count;
	struct cupti_pc_reason *reasons;
	uint32_t correlation;
};

/* What CUPTI is told of a size ends with the last field. */
#define CUPTI_SIZE(type, last) (offsetof(type, last) + sizeof(((type *)0)->last))
#define CUPTI_PC_SIZE sizeof(struct cupti_pc)

struct cupti_pc_data {
	size_t size;
	size_t wanted_pcs;
	uint64_t samples;
	uint64_t dropped_samples;
	size_t pcs;
	size_t remaining_pcs;
	uint64_t range;
	struct cupti_pc *pc;
	uint64_t foreign_samples;
	uint8_t is_full;
};

enum {
	CUPTI_PERIOD = 1,
	CUPTI_MODE = 5,
	CUPTI_DATA_BUFFER = 8,
	CUPTI_MODE_CONTINUOUS = 1,
	CUPTI_MODE_SERIALIZED = 2,
};

struct cupti_pc_setting {
	uint32_t attribute;
	cupti_result status;
	union {
		uint64_t words[3];
		uint32_t number;
		void *pointer;
	};
};

struct cupti_pc_settings {
	size_t size;
	void *private;
	cu_context context;
	size_t count;
	struct cupti_pc_setting *settings;
};

/* cuptiPCSamplingEnable, Disable */
struct cupti_pc_switch {
	size_t size;
	void *private;
	cu_context context;
};

struct cupti_pc_get_data {
	size_t size;
	void *private;
	cu_context context;
	struct cupti_pc_data *data;
};

struct cupti_pc_count_reasons {
	size_t size;
	void *private;
	cu_context context;
	size_t *count;
};

/* CUPTI_STALL_REASON_STRING_SIZE */
#define CUPTI_REASON_BYTES 128

struct cupti_pc_get_reasons {
	size_t size;
	void *private;
	cu_context context;
	size_t count;
	uint32_t *reasons;
	char **names;
};

struct cupti_cubin_crc {
	size_t size;
	size_t cubin_size;
	const void *cubin;
	uint64_t crc;
};

#endif
