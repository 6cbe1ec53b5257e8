# SPDX-License-Identifier: Apache-2.0
"""Level Zero: the calls of the loader, libze_loader.

Read in ze_api.h of level-zero v1.8, functions that came later in its driver's source.

A kernel is launched by a command in a list. An immediate list runs it at once, and then the call
is the launch; another list runs when a queue executes it, as often as it does. So both are
recorded: the append with its kernel, the execution without one.
"""

from __future__ import annotations

from aiflame.agent.model.gpu import Direction, Operation
from aiflame.gpu.apis.base import Api, Argument, Call, Grid, HandleFrom, Naming
from aiflame.gpu.apis.calls import allocate, copy, free, launch, wait

API = Api(
    name="level_zero",
    calls=(
        # (list, kernel, group counts, ...)
        launch("zeCommandListAppendLaunchKernel", 1, 0, Grid.COUNTS),
        launch("zeCommandListAppendLaunchCooperativeKernel", 1, 0, Grid.COUNTS),
        launch("zeCommandListAppendLaunchKernelWithParameters", 1, 0, Grid.COUNTS),
        # (list, kernel, group counts by value, group sizes by value, ...)
        launch("zeCommandListAppendLaunchKernelWithArguments", 1, 0, Grid.NONE),
        # (list, kernel, buffer): the counts may not have been computed yet
        launch("zeCommandListAppendLaunchKernelIndirect", 1, 0, Grid.NONE),
        # (list, number of kernels, kernels, ...), of which the first is read
        Call(
            "zeCommandListAppendLaunchMultipleKernelsIndirect",
            Operation.LAUNCH,
            kernel=Argument(2, offset=0),
            queue=Argument(0),
        ),
        # (queue, number of lists, lists, fence)
        Call("zeCommandQueueExecuteCommandLists", Operation.LAUNCH, queue=Argument(0)),
        # (queue or list, timeout)
        wait("zeCommandQueueSynchronize", 0),
        wait("zeCommandListHostSynchronize", 0),
        wait("zeEventHostSynchronize"),
        wait("zeFenceHostSynchronize"),
        wait("zeDeviceSynchronize"),
        # (context, descriptor, size, ...)
        allocate("zeMemAllocDevice", 2),
        allocate("zeMemAllocHost", 2),
        # (context, descriptor, descriptor, size, ...)
        allocate("zeMemAllocShared", 3),
        free("zeMemFree"),
        free("zeMemFreeExt"),
        # (list, destination, source, size, ...)
        copy("zeCommandListAppendMemoryCopy", Direction.UNKNOWN, 3, 0),
        copy("zeCommandListAppendMemoryCopyRegion", Direction.UNKNOWN, None, 0),
    ),
    namings=(
        # (module, descriptor, kernel out); ze_kernel_desc_t: type, next, flags, name
        Naming("zeKernelCreate", Argument(1, offset=24), HandleFrom.POINTED, handle=Argument(2)),
    ),
    # Drivers and layers below the loader export the same names, or are called by table.
    skip_files=r"libze_intel_|libze_tracing_layer|libze_validation_layer|libze_null",
)
