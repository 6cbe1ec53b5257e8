/* SPDX-License-Identifier: Apache-2.0 */
/* NVIDIA's libraries in this process: which, and their functions. */
#ifndef AIFLAME_LIBRARY_H
#define AIFLAME_LIBRARY_H

#include <stdbool.h>

#include "cupti.h"

/* V is needed for kernel times, S for stalls, O is done without. */
#define CUPTI_FUNCTIONS(V, S, O)                                                                   \
	V(cuptiGetVersion, (uint32_t *))                                                           \
	V(cuptiSubscribe, (cupti_subscriber *, cupti_callback, void *))                            \
	V(cuptiUnsubscribe, (cupti_subscriber))                                                    \
	V(cuptiEnableCallback, (uint32_t, cupti_subscriber, uint32_t, uint32_t))                   \
	V(cuptiGetTimestamp, (uint64_t *))                                                         \
	V(cuptiActivityRegisterCallbacks, (cupti_buffer_requested, cupti_buffer_completed))        \
	V(cuptiActivityEnable, (uint32_t))                                                         \
	V(cuptiActivityDisable, (uint32_t))                                                        \
	V(cuptiActivityFlushAll, (uint32_t))                                                       \
	V(cuptiActivityGetNextRecord, (uint8_t *, size_t, void **))                                \
	S(cuptiGetContextId, (cu_context, uint32_t *))                                             \
	S(cuptiGetDeviceId, (cu_context, uint32_t *))                                              \
	S(cuptiPCSamplingEnable, (struct cupti_pc_switch *))                                       \
	S(cuptiPCSamplingDisable, (struct cupti_pc_switch *))                                      \
	S(cuptiPCSamplingGetNumStallReasons, (struct cupti_pc_count_reasons *))                    \
	S(cuptiPCSamplingGetStallReasons, (struct cupti_pc_get_reasons *))                         \
	S(cuptiPCSamplingSetConfigurationAttribute, (struct cupti_pc_settings *))                  \
	S(cuptiPCSamplingGetConfigurationAttribute, (struct cupti_pc_settings *))                  \
	S(cuptiPCSamplingGetData, (struct cupti_pc_get_data *))                                    \
	S(cuptiGetCubinCrc, (struct cupti_cubin_crc *))                                            \
	O(cuptiGetResultString, (cupti_result, const char **))                                     \
	O(cuptiGetGraphNodeId, (cu_node, uint64_t *))                                              \
	O(cuptiGetGraphExecId, (void *, uint32_t *))                                               \
	O(cuptiActivityGetNumDroppedRecords, (cu_context, uint32_t, size_t *))                     \
	O(cuptiSubscribe_v2,                                                                       \
	  (cupti_subscriber *, cupti_callback, void *, struct cupti_subscriber_params *))          \
	O(cuptiGetTimestamp_v2, (cupti_subscriber, uint64_t *))                                    \
	O(cuptiActivityRegisterCallbacks_v2,                                                       \
	  (cupti_subscriber, cupti_buffer_requested_v2, cupti_buffer_completed_v2))                \
	O(cuptiActivityEnable_v2, (cupti_subscriber, uint32_t, void *))                            \
	O(cuptiActivityDisable_v2, (cupti_subscriber, uint32_t, void *))                           \
	O(cuptiActivityGetNextRecord_v2, (cupti_subscriber, uint8_t *, size_t, void **))           \
	O(cuptiActivityGetNumDroppedRecords_v2, (cupti_subscriber, cu_context, uint32_t, size_t *))

/* Of the driver; it is done without any of them. */
#define CUDA_FUNCTIONS(O)                                                                          \
	O(cuDriverGetVersion, (int *))                                                             \
	O(cuDeviceGetCount, (int *))                                                               \
	O(cuDeviceGetName, (char *, int, cu_device))                                               \
	O(cuDeviceGetUuid, (uint8_t *, cu_device))                                                 \
	O(cuDeviceGetUuid_v2, (uint8_t *, cu_device))                                              \
	O(cuDeviceGetAttribute, (int *, int, cu_device))                                           \
	O(cuCtxPushCurrent_v2, (cu_context))                                                       \
	O(cuCtxPopCurrent_v2, (cu_context *))                                                      \
	O(cuThreadExchangeStreamCaptureMode, (int *))

#define DECLARE(name, arguments) cupti_result(*name) arguments;
struct cupti {
	CUPTI_FUNCTIONS(DECLARE, DECLARE, DECLARE)
};
struct cuda {
	CUDA_FUNCTIONS(DECLARE)
};
#undef DECLARE

extern struct cupti cupti;
extern struct cuda cuda;

/* CUDA 12.8: since its first update PC sampling and kernel times go together. */
#define OLDEST_CUPTI_FOR_STALLS 26

enum library_found {
	LIBRARY_FOUND,
	LIBRARY_NO_CUDA, /* no driver in this process, not yet */
	LIBRARY_UNUSED, /* there is one, and cuInit was not called */
	LIBRARY_NO_CUPTI,
	LIBRARY_LACKS, /* a function for kernel times: what */
};

/*
 * Finds both, and binds their functions, once. The loader's lock is taken: not from a callback. Where
 * `is_in_init`, the driver calls from cuInit; else it has to be over, before CUPTI is touched.
 * `lacks` is the name of a function that stalls need and that is not there, else NULL.
 */
enum library_found library_find(bool is_in_init, const char **what, const char **lacks);

/* Where libcupti was found. */
const char *library_path(void);

#endif
