/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What of NVML's ABI the stand-in has, as nvidia-ml-py declares it; tests/unit/test_nvml.py compares
 * sizes and offsets.
 */
#ifndef STANDIN_NVML_H
#define STANDIN_NVML_H

#include <stdint.h>

typedef int nvml_result;
typedef struct nvml_device *nvml_device;

enum {
	NVML_SUCCESS = 0,
	NVML_INVALID_ARGUMENT = 2,
	NVML_NOT_SUPPORTED = 3,
	NVML_NOT_FOUND = 6,
	NVML_DRIVER_NOT_LOADED = 9,
	NVML_FUNCTION_NOT_FOUND = 13,
	NVML_GPU_IS_LOST = 15,
	NVML_VERSION_MISMATCH = 25,
	NVML_UNKNOWN = 999,
};

/* nvmlSamplingType_t, nvmlValueType_t */
enum { NVML_GPU_UTILIZATION_SAMPLES = 1, NVML_VALUE_UNSIGNED_INT = 1 };

struct nvml_utilization {
	unsigned int gpu, memory;
};

struct nvml_memory {
	unsigned long long total, free, used;
};

#define NVML_MEMORY_V2 (sizeof(struct nvml_memory_v2) | 2u << 24)
struct nvml_memory_v2 {
	unsigned int version;
	unsigned long long total, reserved, free, used;
};

union nvml_value {
	double d;
	unsigned int ui;
	unsigned long ul;
	unsigned long long ull;
	long long sll;
	int si;
	unsigned short us;
};

struct nvml_sample {
	unsigned long long time_us;
	union nvml_value value;
};

#endif
