# SPDX-License-Identifier: Apache-2.0
"""OpenCL: the calls of the ICD loader (CL/cl.h of OpenCL-Headers, v2023.04.17)."""

from __future__ import annotations

from dataclasses import replace

from aiflame.agent.model.gpu import Direction, Operation
from aiflame.gpu.apis.base import Api, Argument, Call, Grid, HandleFrom, Naming, WaitsFor
from aiflame.gpu.apis.calls import copy, wait, wait_for_queue


def _blocking(call: Call) -> Call:
    """Returns a call that waits for its queue, where its third argument (cl_bool) says so.

    What is on a queue that is not in order may not have ended, which nothing tells. A blocking
    write only waits until its memory may be used again.
    """
    return replace(call, waits_for=WaitsFor.QUEUE, blocking=Argument(2, size_bytes=4))


API = Api(
    name="opencl",
    calls=(
        # (queue, kernel, work_dim, global offset, global size, local size, ...)
        Call(
            "clEnqueueNDRangeKernel",
            Operation.LAUNCH,
            kernel=Argument(1),
            queue=Argument(0),
            grid=Grid.OPENCL,
            event=Argument(8),
        ),
        # (queue, kernel, number of events to wait for, these, event)
        Call(
            "clEnqueueTask",
            Operation.LAUNCH,
            kernel=Argument(1),
            queue=Argument(0),
            event=Argument(4),
        ),
        wait_for_queue("clFinish", 0),
        wait("clWaitForEvents", waits_for=WaitsFor.EVENTS),
        # (context, flags, size, host pointer, error)
        Call("clCreateBuffer", Operation.ALLOCATE, bytes=Argument(2)),
        # (context, properties, flags, size, host pointer, error): OpenCL 3.0
        Call("clCreateBufferWithProperties", Operation.ALLOCATE, bytes=Argument(3)),
        # (context, flags, size, alignment)
        Call("clSVMAlloc", Operation.ALLOCATE, bytes=Argument(2)),
        Call("clReleaseMemObject", Operation.FREE),
        Call("clSVMFree", Operation.FREE),
        # (queue, buffer, blocking, offset, size, pointer, ...)
        _blocking(copy("clEnqueueReadBuffer", Direction.FROM_DEVICE, 4, 0)),
        copy("clEnqueueWriteBuffer", Direction.TO_DEVICE, 4, 0),
        # (queue, source, destination, source offset, destination offset, size, ...)
        copy("clEnqueueCopyBuffer", Direction.ON_DEVICE, 5, 0),
        # Of rectangles, regions and images no argument is the size.
        _blocking(copy("clEnqueueReadBufferRect", Direction.FROM_DEVICE, None, 0)),
        copy("clEnqueueWriteBufferRect", Direction.TO_DEVICE, None, 0),
        copy("clEnqueueCopyBufferRect", Direction.ON_DEVICE, None, 0),
        _blocking(copy("clEnqueueReadImage", Direction.FROM_DEVICE, None, 0)),
        copy("clEnqueueWriteImage", Direction.TO_DEVICE, None, 0),
        copy("clEnqueueCopyImage", Direction.ON_DEVICE, None, 0),
        # (queue, buffer, blocking, flags, offset, size, ...): to read, to write or both
        _blocking(copy("clEnqueueMapBuffer", Direction.UNKNOWN, 5, 0)),
        # (queue, blocking, destination, source, size, ...)
        copy("clEnqueueSVMMemcpy", Direction.UNKNOWN, 4, 0),
    ),
    namings=(
        # (program, name, error)
        Naming("clCreateKernel", Argument(1), HandleFrom.RETURNED),
        # (kernel, error): OpenCL 2.1
        Naming("clCloneKernel", None, HandleFrom.RETURNED, alias=Argument(0)),
    ),
    libraries=("libOpenCL.so",),
    # The implementations below the loader export the same names, or are called by table.
    skip_files=r"libpocl\.so|libnvidia-opencl|libamdocl|libigdrcl|libintelocl",
)
