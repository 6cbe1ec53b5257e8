# SPDX-License-Identifier: Apache-2.0
"""CUDA: the runtime (libcudart, shared or linked into a program) and the driver (libcuda).

They are one API here, since the runtime calls the driver, and a call inside another one is not to
be counted again. Libraries such as cuBLAS and compilers such as Triton call the driver alone.

Read in cuda_runtime_api.h, crt/host_runtime.h, crt/device_functions.h, driver_types.h and cuda.h
of CUDA 13.0. Names with `_ptsz` or `_ptds` are what a program calls that was built with a default
stream for each thread. Before CUDA 13 there is cudaLaunchCooperativeKernelMultiDevice as well.

A kernel is told by its host function's address, or by a handle: since CUDA 13, compiled launches
get one from __cudaGetKernel. Copies of rectangles and fills of memory have no sizes here, or are
left out.
"""

from __future__ import annotations

from aiflame.agent.model.gpu import Direction, Operation
from aiflame.gpu.apis.base import Api, Argument, Call, Grid, HandleFrom, Naming
from aiflame.gpu.apis.calls import (
    allocate,
    copy,
    copy_of_kind,
    free,
    launch,
    named_by,
    same_as,
    wait,
    wait_for_all,
    wait_for_queue,
    with_variants,
)

# cudaLaunchConfig_t and CUlaunchConfig: the stream lies after six numbers and the shared memory's
# size, which is 8 bytes in one, and 4 and padding in the other.
_CONFIG_STREAM = Argument(0, offset=32)

_LAUNCHES = (
    *with_variants(
        "_ptsz",
        # (function, dim3 grid, dim3 block, arguments, shared memory, stream)
        launch("cudaLaunchKernel", 0, 7, Grid.DIM3),
        launch("__cudaLaunchKernel", 0, 7, Grid.DIM3),
        launch("cudaLaunchCooperativeKernel", 0, 7, Grid.DIM3),
        # (config, function, arguments)
        launch("cudaLaunchKernelExC", 1, _CONFIG_STREAM, Grid.CONFIG),
        # (executable graph, stream): the graph stands for the kernels in it
        launch("cudaGraphLaunch", 0, 1, Grid.NONE),
        # (function, grid x, y, z, block x, y, z, shared memory, stream, ...)
        launch("cuLaunchKernel", 0, 8, Grid.NUMBERS),
        launch("cuLaunchCooperativeKernel", 0, 8, Grid.NUMBERS),
        # (config, function, ...)
        launch("cuLaunchKernelEx", 1, _CONFIG_STREAM, Grid.CONFIG),
        # (executable graph, stream)
        launch("cuGraphLaunch", 0, 1, Grid.NONE),
    ),
    # (list of cudaLaunchParams, devices, flags), of which the first is read: function, dim3 grid,
    # dim3 block, arguments, shared memory, stream
    Call(
        "cudaLaunchCooperativeKernelMultiDevice",
        Operation.LAUNCH,
        kernel=Argument(0, offset=0),
        queue=Argument(0, offset=48),
    ),
    # (list of CUDA_LAUNCH_PARAMS, devices, flags): function, seven numbers, stream
    Call(
        "cuLaunchCooperativeKernelMultiDevice",
        Operation.LAUNCH,
        kernel=Argument(0, offset=0),
        queue=Argument(0, offset=40),
    ),
    # (function), (function, width, height), (function, width, height, stream): an earlier call
    # sets the block
    launch("cuLaunch", 0, None, Grid.NONE),
    launch("cuLaunchGrid", 0, None, Grid.NONE),
    launch("cuLaunchGridAsync", 0, 3, Grid.NONE),
)

_WAITS = (
    wait_for_all("cudaDeviceSynchronize"),
    wait("cudaEventSynchronize"),
    wait_for_all("cuCtxSynchronize"),
    wait_for_all("cuCtxSynchronize_v2"),
    wait("cuEventSynchronize"),
    *with_variants(
        "_ptsz",
        wait_for_queue("cudaStreamSynchronize", 0),
        wait_for_queue("cuStreamSynchronize", 0),
    ),
)

_MEMORY = (
    # (pointer out, size, ...)
    allocate("cudaMalloc", 1),
    allocate("cudaMallocManaged", 1),
    allocate("cudaMallocHost", 1),
    allocate("cudaHostAlloc", 1),
    allocate("cuMemAlloc_v2", 1),
    allocate("cuMemAllocManaged", 1),
    allocate("cuMemAllocHost_v2", 1),
    allocate("cuMemHostAlloc", 1),
    # (handle out, size, ...): memory without an address, which PyTorch's allocator may use
    allocate("cuMemCreate", 1),
    # (pointer out, pitch out, width, height): the pitch is known at the return
    allocate("cudaMallocPitch", None),
    allocate("cuMemAllocPitch_v2", None),
    *with_variants(
        "_ptsz",
        # (pointer out, size, pool, stream), without a pool in the shorter names
        allocate("cudaMallocAsync", 1, 2),
        allocate("cudaMallocFromPoolAsync", 1, 3),
        allocate("cuMemAllocAsync", 1, 2),
        allocate("cuMemAllocFromPoolAsync", 1, 3),
        free("cudaFreeAsync", 1),
        free("cuMemFreeAsync", 1),
    ),
    free("cudaFree"),
    free("cudaFreeHost"),
    free("cuMemFree_v2"),
    free("cuMemFreeHost"),
    free("cuMemRelease"),
)

_COPIES = (
    *with_variants(
        "_ptds",
        # (destination, source, count, kind)
        copy_of_kind("cudaMemcpy", 3, 2),
        # (symbol, source, count, offset, kind)
        copy_of_kind("cudaMemcpyToSymbol", 4, 2),
        copy_of_kind("cudaMemcpyFromSymbol", 4, 2),
        # (destination, its pitch, source, its pitch, width, height, kind)
        copy_of_kind("cudaMemcpy2D", 6, None),
        # (destination, source, count)
        copy("cuMemcpy", Direction.UNKNOWN, 2),
        copy("cuMemcpyHtoD_v2", Direction.TO_DEVICE, 2),
        copy("cuMemcpyDtoH_v2", Direction.FROM_DEVICE, 2),
        copy("cuMemcpyDtoD_v2", Direction.ON_DEVICE, 2),
        # (destination, context, source, context, count)
        copy("cuMemcpyPeer", Direction.ON_DEVICE, 4),
    ),
    # The same with a stream as the last argument.
    *with_variants(
        "_ptsz",
        copy_of_kind("cudaMemcpyAsync", 3, 2, 4),
        copy_of_kind("cudaMemcpyToSymbolAsync", 4, 2, 5),
        copy_of_kind("cudaMemcpyFromSymbolAsync", 4, 2, 5),
        copy_of_kind("cudaMemcpy2DAsync", 6, None, 7),
        copy("cuMemcpyAsync", Direction.UNKNOWN, 2, 3),
        copy("cuMemcpyHtoDAsync_v2", Direction.TO_DEVICE, 2, 3),
        copy("cuMemcpyDtoHAsync_v2", Direction.FROM_DEVICE, 2, 3),
        copy("cuMemcpyDtoDAsync_v2", Direction.ON_DEVICE, 2, 3),
        copy("cuMemcpyPeerAsync", Direction.ON_DEVICE, 4, 5),
    ),
    # (destination, device, source, device, count, stream)
    copy("cudaMemcpyPeer", Direction.ON_DEVICE, 4),
    copy("cudaMemcpyPeerAsync", Direction.ON_DEVICE, 4, 5),
)

API = Api(
    name="cuda",
    calls=(*_LAUNCHES, *_WAITS, *_MEMORY, *_COPIES),
    namings=(
        # (fat binary, host function, device function, device name, ...)
        Naming("__cudaRegisterFunction", Argument(3), HandleFrom.ARGUMENT, handle=Argument(1)),
        same_as("__cudaGetKernel"),
        same_as("cudaGetKernel"),
        same_as("cudaGetFuncBySymbol"),
        named_by("cudaLibraryGetKernel"),
        named_by("cuModuleGetFunction"),
        named_by("cuLibraryGetKernel"),
        same_as("cuKernelGetFunction"),
    ),
    # enum cudaMemcpyKind in driver_types.h
    directions=(
        Direction.ON_HOST,
        Direction.TO_DEVICE,
        Direction.FROM_DEVICE,
        Direction.ON_DEVICE,
        Direction.UNKNOWN,
    ),
)
