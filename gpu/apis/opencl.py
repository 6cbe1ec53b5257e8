# SPDX-License-Identifier: Apache-2.0
"""OpenCL: the calls of the ICD loader (CL/cl.h of OpenCL-Headers, v2023.04.17)."""

from __future__ import annotations

from aiflame.agent.model.gpu import Direction, Operation
from aiflame.gpu.apis.base import Api, Argument, Call, Grid, HandleFrom, Naming
from aiflame.gpu.apis.calls import copy

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
        ),
        Call("clEnqueueTask", Operation.LAUNCH, kernel=Argument(1), queue=Argument(0)),
        Call("clFinish", Operation.SYNCHRONIZE, queue=Argument(0)),
        Call("clWaitForEvents", Operation.SYNCHRONIZE),
        # (context, flags, size, host pointer, error)
        Call("clCreateBuffer", Operation.ALLOCATE, bytes=Argument(2)),
        # (context, properties, flags, size, host pointer, error): OpenCL 3.0
        Call("clCreateBufferWithProperties", Operation.ALLOCATE, bytes=Argument(3)),
        # (context, flags, size, alignment)
        Call("clSVMAlloc", Operation.ALLOCATE, bytes=Argument(2)),
        Call("clReleaseMemObject", Operation.FREE),
        Call("clSVMFree", Operation.FREE),
        # (queue, buffer, blocking, offset, size, pointer, ...)
        Call(
            "clEnqueueReadBuffer",
            Operation.COPY,
            queue=Argument(0),
            bytes=Argument(4),
            direction=Direction.FROM_DEVICE,
        ),
        Call(
            "clEnqueueWriteBuffer",
            Operation.COPY,
            queue=Argument(0),
            bytes=Argument(4),
            direction=Direction.TO_DEVICE,
        ),
        # (queue, source, destination, source offset, destination offset, size, ...)
        Call(
            "clEnqueueCopyBuffer",
            Operation.COPY,
            queue=Argument(0),
            bytes=Argument(5),
            direction=Direction.ON_DEVICE,
        ),
        # Of rectangles, regions and images no argument is the size.
        copy("clEnqueueReadBufferRect", Direction.FROM_DEVICE, None, 0),
        copy("clEnqueueWriteBufferRect", Direction.TO_DEVICE, None, 0),
        copy("clEnqueueCopyBufferRect", Direction.ON_DEVICE, None, 0),
        copy("clEnqueueReadImage", Direction.FROM_DEVICE, None, 0),
        copy("clEnqueueWriteImage", Direction.TO_DEVICE, None, 0),
        copy("clEnqueueCopyImage", Direction.ON_DEVICE, None, 0),
        # (queue, buffer, blocking, flags, offset, size, ...): to read, to write or both
        copy("clEnqueueMapBuffer", Direction.UNKNOWN, 5, 0),
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
