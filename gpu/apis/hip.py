# SPDX-License-Identifier: Apache-2.0
"""HIP: libamdhip64, of which there is no static form.

Read in hip_runtime_api.h and hip_ext.h of ROCm 5.2, functions that came later in those of ROCm 6
and 7. In 5.2 the names of hipExtModuleLaunchKernel and hipHccModuleLaunchKernel are mangled, and so
not found here. Names with `_spt` are what a program calls that was built with a default stream for
each thread. Its dim3 is three 32-bit numbers, as CUDA's, and so are the structures built of it.
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

# hipLaunchConfig_t and HIP_LAUNCH_CONFIG: the stream lies after six numbers and the shared
# memory's size, which is 8 bytes in one, and 4 and padding in the other.
_CONFIG_STREAM = Argument(0, offset=32)


def _on_several_devices(symbol: str) -> Call:
    """(list of hipLaunchParams, devices, flags), of which the first is read.

    It is function, dim3 grid, dim3 block, arguments, shared memory, stream.
    """
    first, stream = Argument(0, offset=0), Argument(0, offset=48)
    return Call(symbol, Operation.LAUNCH, kernel=first, queue=stream)


_LAUNCHES = (
    *with_variants(
        "_spt",
        # (function, dim3 grid, dim3 block, arguments, shared memory, stream)
        launch("hipLaunchKernel", 0, 7, Grid.DIM3),
        launch("hipLaunchCooperativeKernel", 0, 7, Grid.DIM3),
        # (executable graph, stream): the graph stands for the kernels in it
        launch("hipGraphLaunch", 0, 1, Grid.NONE),
    ),
    # the same as hipLaunchKernel, and (start event, stop event, flags)
    launch("hipExtLaunchKernel", 0, 7, Grid.DIM3),
    # (config, function, ...)
    launch("hipLaunchKernelExC", 1, _CONFIG_STREAM, Grid.CONFIG),
    launch("hipDrvLaunchKernelEx", 1, _CONFIG_STREAM, Grid.CONFIG),
    # (function, grid x, y, z, block x, y, z, shared memory, stream, ...)
    launch("hipModuleLaunchKernel", 0, 8, Grid.NUMBERS),
    launch("hipModuleLaunchCooperativeKernel", 0, 8, Grid.NUMBERS),
    # The same order, but the first three numbers count work items, not blocks.
    launch("hipExtModuleLaunchKernel", 0, 8, Grid.NONE),
    launch("hipHccModuleLaunchKernel", 0, 8, Grid.NONE),
    # (function): an earlier call sets the rest
    launch("hipLaunchByPtr", 0, None, Grid.NONE),
    _on_several_devices("hipLaunchCooperativeKernelMultiDevice"),
    _on_several_devices("hipExtLaunchMultiKernelMultiDevice"),
)

_WAITS = (
    wait_for_all("hipDeviceSynchronize"),
    wait("hipEventSynchronize"),
    wait_for_all("hipCtxSynchronize"),
    *with_variants("_spt", wait_for_queue("hipStreamSynchronize", 0)),
)

_MEMORY = (
    # (pointer out, size, ...)
    allocate("hipMalloc", 1),
    allocate("hipExtMallocWithFlags", 1),
    allocate("hipMallocManaged", 1),
    allocate("hipHostMalloc", 1),
    # (handle out, size, ...)
    allocate("hipMemCreate", 1),
    # (pointer out, pitch out, width, height): the pitch is known at the return
    allocate("hipMallocPitch", None),
    # (pointer out, size, pool, stream), without a pool in the shorter name
    allocate("hipMallocAsync", 1, 2),
    allocate("hipMallocFromPoolAsync", 1, 3),
    free("hipFree"),
    free("hipHostFree"),
    free("hipMemRelease"),
    free("hipFreeAsync", 1),
)

_COPIES = (
    *with_variants(
        "_spt",
        # (destination, source, size, kind), and a stream
        copy_of_kind("hipMemcpy", 3, 2),
        copy_of_kind("hipMemcpyAsync", 3, 2, 4),
        # (symbol, source, size, offset, kind), and a stream
        copy_of_kind("hipMemcpyToSymbol", 4, 2),
        copy_of_kind("hipMemcpyToSymbolAsync", 4, 2, 5),
        copy_of_kind("hipMemcpyFromSymbol", 4, 2),
        copy_of_kind("hipMemcpyFromSymbolAsync", 4, 2, 5),
        # (destination, its pitch, source, its pitch, width, height, kind), and a stream
        copy_of_kind("hipMemcpy2D", 6, None),
        copy_of_kind("hipMemcpy2DAsync", 6, None, 7),
    ),
    copy_of_kind("hipMemcpyWithStream", 3, 2, 4),
    # (destination, source, size), and a stream
    copy("hipMemcpyHtoD", Direction.TO_DEVICE, 2),
    copy("hipMemcpyDtoH", Direction.FROM_DEVICE, 2),
    copy("hipMemcpyDtoD", Direction.ON_DEVICE, 2),
    copy("hipMemcpyHtoDAsync", Direction.TO_DEVICE, 2, 3),
    copy("hipMemcpyDtoHAsync", Direction.FROM_DEVICE, 2, 3),
    copy("hipMemcpyDtoDAsync", Direction.ON_DEVICE, 2, 3),
    # (destination, device, source, device, size), and a stream
    copy("hipMemcpyPeer", Direction.ON_DEVICE, 4),
    copy("hipMemcpyPeerAsync", Direction.ON_DEVICE, 4, 5),
)

API = Api(
    name="hip",
    calls=(*_LAUNCHES, *_WAITS, *_MEMORY, *_COPIES),
    namings=(
        # (modules, host function, device function, device name, ...)
        Naming("__hipRegisterFunction", Argument(3), HandleFrom.ARGUMENT, handle=Argument(1)),
        named_by("hipModuleGetFunction"),
        named_by("hipLibraryGetKernel"),
        same_as("hipGetFuncBySymbol"),
    ),
    # hipMemcpyKind in hip_runtime_api.h
    directions=(
        Direction.ON_HOST,
        Direction.TO_DEVICE,
        Direction.FROM_DEVICE,
        Direction.ON_DEVICE,
        Direction.UNKNOWN,
    ),
)
