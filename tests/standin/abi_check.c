/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compares what gpu/nvidia/helper/cupti.h declares with NVIDIA's headers: it compiles, or it does not.
 * KERNEL is the kernel record of the version: CUpti_ActivityKernel9 and later.
 */
#include <cuda.h>
#include <cupti.h>
#include <cupti_pcsampling.h>

#include "../../gpu/nvidia/helper/cupti.h"

#define SAME(ours, theirs) _Static_assert((long)(ours) == (long)(theirs), #ours " is " #theirs)
#define SIZE(ours, theirs) SAME(sizeof(struct ours), sizeof(theirs))
#define AT(ours, field, theirs, their_field)                                                       \
	SAME(offsetof(struct ours, field), offsetof(theirs, their_field));                         \
	SAME(sizeof(((struct ours *)0)->field), sizeof(((theirs *)0)->their_field))

SAME(CUPTI_OK, CUPTI_SUCCESS);
SAME(CUPTI_INVALID_CONTEXT, CUPTI_ERROR_INVALID_CONTEXT);
SAME(CUPTI_OUT_OF_MEMORY, CUPTI_ERROR_OUT_OF_MEMORY);
SAME(CUPTI_NO_MORE, CUPTI_ERROR_MAX_LIMIT_REACHED);
SAME(CUPTI_INVALID_KIND, CUPTI_ERROR_INVALID_KIND);
SAME(CUPTI_NOT_COMPATIBLE, CUPTI_ERROR_NOT_COMPATIBLE);
SAME(CUPTI_NOT_SUPPORTED, CUPTI_ERROR_NOT_SUPPORTED);
SAME(CUPTI_VIRTUAL_DEVICE, CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED);
SAME(CUPTI_NO_RIGHTS, CUPTI_ERROR_INSUFFICIENT_PRIVILEGES);
SAME(CUPTI_OLD_PROFILER, CUPTI_ERROR_OLD_PROFILER_API_INITIALIZED);
SAME(CUPTI_LEGACY_PROFILER, CUPTI_ERROR_LEGACY_PROFILER_NOT_SUPPORTED);
SAME(CUPTI_TAKEN, CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED);
SAME(CUPTI_VIRTUAL_NO_RIGHTS, CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES);
SAME(CUPTI_CONFIDENTIAL, CUPTI_ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED);
SAME(CUPTI_CMP, CUPTI_ERROR_CMP_DEVICE_NOT_SUPPORTED);
#if CUPTI_API_VERSION >= 26 /* of CUDA 12.8; that of 12.4 has no such numbers */
SAME(CUPTI_MIG, CUPTI_ERROR_MIG_DEVICE_NOT_SUPPORTED);
SAME(CUPTI_SLI, CUPTI_ERROR_SLI_DEVICE_NOT_SUPPORTED);
SAME(CUPTI_WSL, CUPTI_ERROR_WSL_DEVICE_NOT_SUPPORTED);
#endif

SAME(CUDA_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(CU_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(CU_CLOCK_KHZ, CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
SAME(CU_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(CU_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(CU_NODE_KERNEL, CU_GRAPH_NODE_TYPE_KERNEL);
SAME(CU_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(sizeof(int), sizeof(CUstreamCaptureMode));
SAME(16, sizeof(CUuuid));
AT(cu_launch_config, stream, CUlaunchConfig, hStream);

SAME(CUPTI_DRIVER, CUPTI_CB_DOMAIN_DRIVER_API);
SAME(CUPTI_RUNTIME, CUPTI_CB_DOMAIN_RUNTIME_API);
SAME(CUPTI_RESOURCE, CUPTI_CB_DOMAIN_RESOURCE);
#if CUPTI_API_VERSION >= 22 /* of CUDA 12.4; that of 12.1 tells no such state */
SAME(CUPTI_STATE, CUPTI_CB_DOMAIN_STATE);
#endif
SAME(CUPTI_CONTEXT_CREATED, CUPTI_CBID_RESOURCE_CONTEXT_CREATED);
SAME(CUPTI_CONTEXT_DESTROYED, CUPTI_CBID_RESOURCE_CONTEXT_DESTROY_STARTING);
SAME(CUPTI_MODULE_LOADED, CUPTI_CBID_RESOURCE_MODULE_LOADED);
SAME(CUPTI_MODULE_UNLOADED, CUPTI_CBID_RESOURCE_MODULE_UNLOAD_STARTING);
SAME(CUPTI_NODE_CREATED, CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED);
SAME(CUPTI_NODE_CLONED, CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED);
#if CUPTI_API_VERSION >= 22 /* of CUDA 12.4; that of 12.1 tells no such state */
SAME(CUPTI_FATAL, CUPTI_CBID_STATE_FATAL_ERROR);
#endif
SAME(CUPTI_ENTER, CUPTI_API_ENTER);
SAME(CUPTI_EXIT, CUPTI_API_EXIT);

SIZE(cupti_callback_data, CUpti_CallbackData);
AT(cupti_callback_data, site, CUpti_CallbackData, callbackSite);
AT(cupti_callback_data, params, CUpti_CallbackData, functionParams);
AT(cupti_callback_data, result, CUpti_CallbackData, functionReturnValue);
AT(cupti_callback_data, context, CUpti_CallbackData, context);
AT(cupti_callback_data, correlation, CUpti_CallbackData, correlationId);
SIZE(cupti_resource_data, CUpti_ResourceData);
AT(cupti_resource_data, context, CUpti_ResourceData, context);
AT(cupti_resource_data, descriptor, CUpti_ResourceData, resourceDescriptor);
SIZE(cupti_module_data, CUpti_ModuleResourceData);
AT(cupti_module_data, module, CUpti_ModuleResourceData, moduleId);
AT(cupti_module_data, cubin_size, CUpti_ModuleResourceData, cubinSize);
AT(cupti_module_data, cubin, CUpti_ModuleResourceData, pCubin);
SIZE(cupti_graph_data, CUpti_GraphData);
AT(cupti_graph_data, node, CUpti_GraphData, node);
AT(cupti_graph_data, original_node, CUpti_GraphData, originalNode);
AT(cupti_graph_data, node_type, CUpti_GraphData, nodeType);
#if CUPTI_API_VERSION >= 22 /* of CUDA 12.4; that of 12.1 tells no such state */
AT(cupti_state_data, message, CUpti_StateData, notification.message);
#endif

SAME(DRIVER_LAUNCH, CUPTI_DRIVER_TRACE_CBID_cuLaunch);
SAME(DRIVER_LAUNCH_GRID, CUPTI_DRIVER_TRACE_CBID_cuLaunchGrid);
SAME(DRIVER_LAUNCH_GRID_ASYNC, CUPTI_DRIVER_TRACE_CBID_cuLaunchGridAsync);
SAME(DRIVER_LAUNCH_KERNEL, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel);
SAME(DRIVER_LAUNCH_KERNEL_PTSZ, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz);
SAME(DRIVER_LAUNCH_COOPERATIVE, CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel);
SAME(DRIVER_LAUNCH_COOPERATIVE_PTSZ, CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel_ptsz);
SAME(DRIVER_LAUNCH_COOPERATIVE_MULTI, CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernelMultiDevice);
SAME(DRIVER_BEGIN_CAPTURE, CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCapture);
SAME(DRIVER_BEGIN_CAPTURE_PTSZ, CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCapture_ptsz);
SAME(DRIVER_END_CAPTURE, CUPTI_DRIVER_TRACE_CBID_cuStreamEndCapture);
SAME(DRIVER_END_CAPTURE_PTSZ, CUPTI_DRIVER_TRACE_CBID_cuStreamEndCapture_ptsz);
SAME(DRIVER_GRAPH_LAUNCH, CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch);
SAME(DRIVER_GRAPH_LAUNCH_PTSZ, CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch_ptsz);
SAME(DRIVER_BEGIN_CAPTURE_V2, CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCapture_v2);
SAME(DRIVER_BEGIN_CAPTURE_V2_PTSZ, CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCapture_v2_ptsz);
SAME(DRIVER_LAUNCH_KERNEL_EX, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx);
SAME(DRIVER_LAUNCH_KERNEL_EX_PTSZ, CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz);
#if CUPTI_API_VERSION >= 22 /* of CUDA 12.4; that of 12.1 has no such calls */
SAME(DRIVER_BEGIN_CAPTURE_TO_GRAPH, CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCaptureToGraph);
SAME(DRIVER_BEGIN_CAPTURE_TO_GRAPH_PTSZ, CUPTI_DRIVER_TRACE_CBID_cuStreamBeginCaptureToGraph_ptsz);
#endif
SAME(RUNTIME_LAUNCH_KERNEL, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000);
SAME(RUNTIME_LAUNCH_KERNEL_PTSZ, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_ptsz_v7000);
SAME(RUNTIME_LAUNCH_COOPERATIVE, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchCooperativeKernel_v9000);
SAME(RUNTIME_LAUNCH_COOPERATIVE_PTSZ,
     CUPTI_RUNTIME_TRACE_CBID_cudaLaunchCooperativeKernel_ptsz_v9000);
SAME(RUNTIME_LAUNCH_COOPERATIVE_MULTI,
     CUPTI_RUNTIME_TRACE_CBID_cudaLaunchCooperativeKernelMultiDevice_v9000);
SAME(RUNTIME_GRAPH_LAUNCH, CUPTI_RUNTIME_TRACE_CBID_cudaGraphLaunch_v10000);
SAME(RUNTIME_GRAPH_LAUNCH_PTSZ, CUPTI_RUNTIME_TRACE_CBID_cudaGraphLaunch_ptsz_v10000);
SAME(RUNTIME_LAUNCH_KERNEL_EXC, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernelExC_v11060);
SAME(RUNTIME_LAUNCH_KERNEL_EXC_PTSZ, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernelExC_ptsz_v11060);
#if CUPTI_API_VERSION >= 130000
SAME(RUNTIME_LAUNCH_KERNEL_13, CUPTI_RUNTIME_TRACE_CBID___cudaLaunchKernel_v13000);
SAME(RUNTIME_LAUNCH_KERNEL_13_PTSZ, CUPTI_RUNTIME_TRACE_CBID___cudaLaunchKernel_ptsz_v13000);
#endif

AT(cu_launch_kernel_params, function, cuLaunchKernel_params, f);
AT(cu_launch_kernel_params, stream, cuLaunchKernel_params, hStream);
AT(cu_launch_kernel_params, stream, cuLaunchCooperativeKernel_params, hStream);
AT(cu_launch_kernel_params, stream, cuLaunchCooperativeKernel_ptsz_params, hStream);
AT(cu_launch_kernel_params, stream, cuLaunchKernel_ptsz_params, hStream);
AT(cu_launch_kernel_params, function, cuLaunch_params, f);
AT(cu_launch_kernel_params, function, cuLaunchGridAsync_params, f);
AT(cu_launch_kernel_ex_params, config, cuLaunchKernelEx_params, config);
AT(cu_launch_kernel_ex_params, function, cuLaunchKernelEx_params, f);
AT(cu_graph_launch_params, executable, cuGraphLaunch_params, hGraph);
AT(cu_graph_launch_params, stream, cuGraphLaunch_params, hStream);

SAME(CUPTI_ACTIVITY_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
SAME(CUPTI_FLUSH_FORCED, CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
AT(cupti_kernel, kind, KERNEL, kind);
AT(cupti_kernel, start, KERNEL, start);
AT(cupti_kernel, end, KERNEL, end);
AT(cupti_kernel, device, KERNEL, deviceId);
AT(cupti_kernel, context, KERNEL, contextId);
AT(cupti_kernel, stream, KERNEL, streamId);
AT(cupti_kernel, correlation, KERNEL, correlationId);
AT(cupti_kernel, name, KERNEL, name);
AT(cupti_kernel, node, KERNEL, graphNodeId);
AT(cupti_kernel, graph, KERNEL, graphId);

SIZE(cupti_pc_reason, CUpti_PCSamplingStallReason);
AT(cupti_pc_reason, reason, CUpti_PCSamplingStallReason, pcSamplingStallReasonIndex);
AT(cupti_pc_reason, samples, CUpti_PCSamplingStallReason, samples);
#if CUPTI_API_VERSION >= 22 /* of CUDA 12.4; that of 12.1 has no id in it, and is not asked */
SIZE(cupti_pc, CUpti_PCSamplingPCData);
AT(cupti_pc, correlation, CUpti_PCSamplingPCData, correlationId);
#endif
AT(cupti_pc, cubin_crc, CUpti_PCSamplingPCData, cubinCrc);
AT(cupti_pc, offset, CUpti_PCSamplingPCData, pcOffset);
AT(cupti_pc, function, CUpti_PCSamplingPCData, functionIndex);
AT(cupti_pc, function_name, CUpti_PCSamplingPCData, functionName);
AT(cupti_pc, reason_count, CUpti_PCSamplingPCData, stallReasonCount);
AT(cupti_pc, reasons, CUpti_PCSamplingPCData, stallReason);
SIZE(cupti_pc_data, CUpti_PCSamplingData);
AT(cupti_pc_data, wanted_pcs, CUpti_PCSamplingData, collectNumPcs);
AT(cupti_pc_data, samples, CUpti_PCSamplingData, totalSamples);
AT(cupti_pc_data, dropped_samples, CUpti_PCSamplingData, droppedSamples);
AT(cupti_pc_data, pcs, CUpti_PCSamplingData, totalNumPcs);
AT(cupti_pc_data, remaining_pcs, CUpti_PCSamplingData, remainingNumPcs);
AT(cupti_pc_data, range, CUpti_PCSamplingData, rangeId);
AT(cupti_pc_data, pc, CUpti_PCSamplingData, pPcData);
AT(cupti_pc_data, foreign_samples, CUpti_PCSamplingData, nonUsrKernelsTotalSamples);
AT(cupti_pc_data, is_full, CUpti_PCSamplingData, hardwareBufferFull);
SAME(CUPTI_PERIOD, CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_SAMPLING_PERIOD);
SAME(CUPTI_MODE, CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_COLLECTION_MODE);
SAME(CUPTI_DATA_BUFFER, CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_SAMPLING_DATA_BUFFER);
SAME(CUPTI_MODE_CONTINUOUS, CUPTI_PC_SAMPLING_COLLECTION_MODE_CONTINUOUS);
SAME(CUPTI_MODE_SERIALIZED, CUPTI_PC_SAMPLING_COLLECTION_MODE_KERNEL_SERIALIZED);
SIZE(cupti_pc_setting, CUpti_PCSamplingConfigurationInfo);
AT(cupti_pc_setting, status, CUpti_PCSamplingConfigurationInfo, attributeStatus);
AT(cupti_pc_setting, words, CUpti_PCSamplingConfigurationInfo, attributeData);
SAME(CUPTI_SIZE(struct cupti_pc_settings, settings), CUpti_PCSamplingConfigurationInfoParamsSize);
AT(cupti_pc_settings, count, CUpti_PCSamplingConfigurationInfoParams, numAttributes);
AT(cupti_pc_settings, settings, CUpti_PCSamplingConfigurationInfoParams,
   pPCSamplingConfigurationInfo);
SAME(CUPTI_SIZE(struct cupti_pc_switch, context), CUpti_PCSamplingEnableParamsSize);
SAME(CUPTI_SIZE(struct cupti_pc_switch, context), CUpti_PCSamplingDisableParamsSize);
AT(cupti_pc_switch, context, CUpti_PCSamplingEnableParams, ctx);
AT(cupti_pc_switch, context, CUpti_PCSamplingDisableParams, ctx);
SAME(CUPTI_SIZE(struct cupti_pc_get_data, data), CUpti_PCSamplingGetDataParamsSize);
AT(cupti_pc_get_data, context, CUpti_PCSamplingGetDataParams, ctx);
AT(cupti_pc_get_data, data, CUpti_PCSamplingGetDataParams, pcSamplingData);
SAME(CUPTI_SIZE(struct cupti_pc_count_reasons, count),
     CUpti_PCSamplingGetNumStallReasonsParamsSize);
AT(cupti_pc_count_reasons, count, CUpti_PCSamplingGetNumStallReasonsParams, numStallReasons);
SAME(CUPTI_REASON_BYTES, CUPTI_STALL_REASON_STRING_SIZE);
SAME(CUPTI_SIZE(struct cupti_pc_get_reasons, names), CUpti_PCSamplingGetStallReasonsParamsSize);
AT(cupti_pc_get_reasons, count, CUpti_PCSamplingGetStallReasonsParams, numStallReasons);
AT(cupti_pc_get_reasons, reasons, CUpti_PCSamplingGetStallReasonsParams, stallReasonIndex);
AT(cupti_pc_get_reasons, names, CUpti_PCSamplingGetStallReasonsParams, stallReasons);
SAME(CUPTI_SIZE(struct cupti_cubin_crc, crc), CUpti_GetCubinCrcParamsSize);
AT(cupti_cubin_crc, cubin_size, CUpti_GetCubinCrcParams, cubinSize);
AT(cupti_cubin_crc, cubin, CUpti_GetCubinCrcParams, cubin);
AT(cupti_cubin_crc, crc, CUpti_GetCubinCrcParams, cubinCrc);

#if CUPTI_API_VERSION >= 130300
SAME(CUPTI_SIZE(struct cupti_subscriber_params, padding), CUpti_SubscriberParams_STRUCT_SIZE);
AT(cupti_subscriber_params, name, CUpti_SubscriberParams, subscriberName);
AT(cupti_subscriber_params, old_name, CUpti_SubscriberParams, oldSubscriberName);
AT(cupti_subscriber_params, old_name_size, CUpti_SubscriberParams, oldSubscriberSize);
AT(cupti_subscriber_params, allows_others, CUpti_SubscriberParams, allowMultipleSubscribers);
SAME(CUPTI_OLD_NAME_BYTES, CUPTI_OLD_SUBSCRIBER_NAME_MIN_LEN);
#endif

/* How functions are called: what they take has to be what they are given. */
#define TAKES(name, type, ...)                                                                     \
	_Static_assert(_Generic(&name, type (*)(__VA_ARGS__): 1, default: 0), #name)

TAKES(cuptiGetVersion, CUptiResult, uint32_t *);
TAKES(cuptiSubscribe, CUptiResult, CUpti_SubscriberHandle *, CUpti_CallbackFunc, void *);
TAKES(cuptiUnsubscribe, CUptiResult, CUpti_SubscriberHandle);
TAKES(cuptiEnableCallback, CUptiResult, uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain,
      CUpti_CallbackId);
TAKES(cuptiGetTimestamp, CUptiResult, uint64_t *);
TAKES(cuptiActivityEnable, CUptiResult, CUpti_ActivityKind);
TAKES(cuptiActivityDisable, CUptiResult, CUpti_ActivityKind);
TAKES(cuptiActivityFlushAll, CUptiResult, uint32_t);
TAKES(cuptiActivityGetNextRecord, CUptiResult, uint8_t *, size_t, CUpti_Activity **);
TAKES(cuptiActivityGetNumDroppedRecords, CUptiResult, CUcontext, uint32_t, size_t *);
TAKES(cuptiGetContextId, CUptiResult, CUcontext, uint32_t *);
TAKES(cuptiGetDeviceId, CUptiResult, CUcontext, uint32_t *);
TAKES(cuptiGetGraphNodeId, CUptiResult, CUgraphNode, uint64_t *);
#if CUPTI_API_VERSION >= 22
TAKES(cuptiGetGraphExecId, CUptiResult, CUgraphExec, uint32_t *);
#endif
TAKES(cuptiGetResultString, CUptiResult, CUptiResult, const char **);
TAKES(cuptiPCSamplingEnable, CUptiResult, CUpti_PCSamplingEnableParams *);
TAKES(cuptiPCSamplingDisable, CUptiResult, CUpti_PCSamplingDisableParams *);
TAKES(cuptiPCSamplingGetData, CUptiResult, CUpti_PCSamplingGetDataParams *);
TAKES(cuptiGetCubinCrc, CUptiResult, CUpti_GetCubinCrcParams *);
SAME(sizeof(uint32_t), sizeof(CUpti_CallbackDomain));
SAME(sizeof(cupti_result), sizeof(CUptiResult));
#ifdef CUPTI_OLD_SUBSCRIBER_NAME_MIN_LEN
TAKES(cuptiSubscribe_v2, CUptiResult, CUpti_SubscriberHandle *, CUpti_CallbackFunc, void *,
      CUpti_SubscriberParams *);
#endif
#if CUPTI_API_VERSION >= 130300
TAKES(cuptiActivityRegisterCallbacks_v2, CUptiResult, CUpti_SubscriberHandle,
      CUpti_BuffersCallbackRequestFunc_v2, CUpti_BuffersCallbackCompleteFunc_v2);
TAKES(cuptiActivityEnable_v2, CUptiResult, CUpti_SubscriberHandle, CUpti_ActivityKind,
      CUpti_ActivityConfig *);
TAKES(cuptiActivityGetNextRecord_v2, CUptiResult, CUpti_SubscriberHandle, uint8_t *, size_t,
      CUpti_Activity **);
TAKES(cuptiActivityGetNumDroppedRecords_v2, CUptiResult, CUpti_SubscriberHandle, CUcontext,
      uint32_t, size_t *);
TAKES(cuptiGetTimestamp_v2, CUptiResult, CUpti_SubscriberHandle, uint64_t *);
#endif
