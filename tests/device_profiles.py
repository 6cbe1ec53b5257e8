# SPDX-License-Identifier: Apache-2.0
"""Profiles with a device half, for tests; see profiles.py.

device_profile_of(
    launches=[Launch("main;run", "vadd", 3)],
    runs=[Ran("vadd", 0x10, 30, "long_scoreboard")],
    code={"vadd": (Place(0x10, "LDG.E R2", "k.cl", 7),)},
)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import (
    CALL_DTYPE,
    DEVICE_SAMPLE_DTYPE,
    KERNEL_TIME_DTYPE,
    NONE,
    ApiFunction,
    Device,
    Direction,
    GpuProfile,
    Instruction,
    Kernel,
    KernelCode,
    Operation,
    StallReason,
    Tier,
)
from aiflame.agent.model.profile import (
    NS_PER_S,
    Loss,
    Process,
    Profile,
    SampleClass,
    StopReason,
    Thread,
)
from profiles import HOSTILE_NAMES, MS, PROCESSES, THREADS, Sample, process, profile_of


def device_samples(rows: Iterable[tuple[int, ...]]) -> npt.NDArray[np.void]:
    """Samples of which only the second is known.

    Args:
        rows: Interval, device, code, offset, reason, stack, count.
    """
    found = [
        (second, *what, second * NS_PER_S, (second + 1) * NS_PER_S, count)
        for second, *what, count in rows
    ]
    return np.array(found, DEVICE_SAMPLE_DTYPE)


DEVICE = Device("nvidia", "Test 100", Tier.STALLS, "", 0)

_FUNCTIONS = {
    Operation.LAUNCH: ApiFunction("opencl", "clEnqueueNDRangeKernel", Operation.LAUNCH),
    Operation.SYNCHRONIZE: ApiFunction("opencl", "clFinish", Operation.SYNCHRONIZE),
    Operation.ALLOCATE: ApiFunction("opencl", "clCreateBuffer", Operation.ALLOCATE),
    Operation.FREE: ApiFunction("opencl", "clReleaseMemObject", Operation.FREE),
    Operation.COPY: ApiFunction("opencl", "clEnqueueWriteBuffer", Operation.COPY),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """Calls from one stack. `kernel` is "" for what is no launch."""

    stack: str
    kernel: str
    count: int
    work: int = 0
    thread: int = 0
    operation: Operation = Operation.LAUNCH
    bytes: int = 0
    direction: Direction = Direction.UNKNOWN
    end: StopReason = StopReason.ROOTED
    interval: int = 0


@dataclass(frozen=True, slots=True)
class Ran:
    """Samples of one instruction; `process` counts through the profile's processes."""

    kernel: str
    offset: int
    count: int
    reason: str = "selected"
    process: int = 0
    interval: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """One instruction."""

    offset: int
    text: str
    file: str = ""
    line: int = 0


def device_profile_of(
    launches: Sequence[Launch] = (),
    runs: Sequence[Ran] = (),
    code: Mapping[str, Sequence[Place]] | None = None,
    *,
    cpu: Sequence[Sample] = (),
    devices: tuple[Device, ...] = (DEVICE,),
    losses: tuple[Loss, ...] = (),
    processes: tuple[Process, ...] = PROCESSES,
    threads: tuple[Thread, ...] = THREADS,
) -> Profile:
    """Make a profile whose launches' stacks are stacks of it without time, if nothing ran there."""
    samples = [*cpu, *(Sample(x.stack, 0, thread=x.thread, end=x.end, count=0) for x in launches)]
    profile = profile_of(*samples, losses=losses, processes=processes, threads=threads)
    process_of = [thread.process for thread in threads]
    # As in captures: what was launched and what was sampled are numbered apart.
    launched = list(dict.fromkeys((process_of[x.thread], x.kernel) for x in launches if x.kernel))
    sampled = list(dict.fromkeys((run.process, run.kernel) for run in runs))
    kernels = [
        Kernel(process, "opencl", name, "" if name else "never named")
        for process, name in (*launched, *sampled)
    ]
    reasons = list(dict.fromkeys(run.reason for run in runs))
    functions = list(dict.fromkeys(_FUNCTIONS[x.operation] for x in launches))
    stacks = profile.samples["stack"][len(cpu) :].tolist()
    calls = [
        (
            *(x.interval, stack, x.thread, functions.index(_FUNCTIONS[x.operation])),
            launched.index((process_of[x.thread], x.kernel)) if x.kernel else NONE,
            *(x.direction, x.count, x.work, x.bytes),
        )
        for x, stack in zip(launches, stacks, strict=True)
    ]
    gpu = GpuProfile(
        devices=devices,
        functions=tuple(functions),
        kernels=tuple(kernels),
        codes=tuple(KernelCode(len(launched) + i, None, 4_096) for i in range(len(sampled))),
        instructions=tuple(
            Instruction(i, line.offset, line.text, line.file, line.line)
            for i, (_, name) in enumerate(sampled)
            for line in (code or {}).get(name, ())
        ),
        reasons=tuple(StallReason("nvidia", name) for name in reasons),
        calls=np.array(calls, CALL_DTYPE),
        samples=device_samples(
            (
                *(x.interval, 0, sampled.index((x.process, x.kernel)), x.offset),
                *(reasons.index(x.reason), NONE, x.count),
            )
            for x in runs
        ),
    )
    kept = profile.samples[profile.samples["count"] > 0]
    return replace(profile, samples=kept, gpu=gpu)


_MATMUL = (
    Place(0x00, "MOV R1, c[0x0][0x28]", "/src/kernels.cl", 10),
    Place(0x10, "LDG.E R2, [R4.64]", "/src/kernels.cl", 12),
    Place(0x20, "FFMA R6, R2, R3, R6", "/src/kernels.cl", 13),
    Place(0x30, "BAR.SYNC 0x0", "/src/kernels.cl", 15),
    Place(0x40, "EXIT"),
)
_TRAIN = (
    "_start;[p]<module>@/app/train.py:40;[p]step@/app/train.py:{};launch;clEnqueueNDRangeKernel"
)
_FILL = "main:10;fill_all;clEnqueueNDRangeKernel"


def small_device_profile() -> Profile:
    """Two processes, a kernel of two stacks, one of one stack, one that nobody launched."""
    mangled = "_Z7scale_bIfLi4EEvPT_i"
    return device_profile_of(
        [
            Launch(_TRAIN.format(12), "matmul", 30, 30_000),
            Launch(_TRAIN.format(19), "matmul", 10, 10_000),
            Launch(_TRAIN.format(21), mangled, 40, 4_000),
            Launch(_FILL, "fill", 8, 800, thread=2),
            Launch("memcpy_in;clEnqueueWriteBuffer", "", 5, 0, 0, Operation.COPY, 5 << 20,
                   Direction.TO_DEVICE),
            Launch("alloc;clCreateBuffer", "", 3, 0, 0, Operation.ALLOCATE, 3 << 20),
            Launch("alloc;clReleaseMemObject", "", 2, 0, 0, Operation.FREE),
            Launch("main:11;clFinish", "", 9, 0, 2, Operation.SYNCHRONIZE),
        ],
        [
            Ran("matmul", 0x10, 400, "long_scoreboard"),
            Ran("matmul", 0x20, 120, "selected"),
            Ran("matmul", 0x20, 80, "math_pipe_throttle"),
            Ran("matmul", 0x30, 200, "barrier"),
            Ran(mangled, 0x8, 60, "selected"),
            Ran(mangled, 0x8, 40, "no_instructions"),
            Ran("fill", 0x4, 50, "lg_throttle", 1),
            Ran("ghost", 0x0, 50, "unheard_of"),
        ],
        {"matmul": _MATMUL, "fill": (Place(0x4, "STG.E [R2.64], R5"),)},
        cpu=[
            Sample(_TRAIN.format(12), 40 * MS, count=4),
            Sample("main:11;clFinish;[k]futex_wait", 300 * MS, SampleClass.BLOCKED, 2, count=9),
        ],
        losses=(Loss("kernel_not_opened", 7, "samples in kernels whose file could not be read"),),
    )  # fmt: skip


def hostile_device_profile() -> Profile:
    """Every hostile name as a kernel, an instruction, a source file, a reason and a device."""
    names = (*HOSTILE_NAMES, "y" * 1_000_000)
    processes = (process(300, "</script>"),)
    threads = (Thread(0, 300, "<b>", MS, MS),)
    return device_profile_of(
        [Launch("main", name, 1) for name in names if name],
        [Ran(name, i, 1 + i, name) for i, name in enumerate(names)],
        {name: (Place(i, name, name, i),) for i, name in enumerate(names)},
        devices=(Device("<i>", "<script>", Tier.STALLS, "</script>", 0),),
        processes=processes,
        threads=threads,
    )


@dataclass(frozen=True, slots=True)
class Timed:
    """How long a kernel ran. `launch`: by which of the profile's launches, None: nobody knows."""

    kernel: str
    ns: int
    launch: int | None = None
    count: int = 1
    end_ns: int = 0
    process: int = 0
    built: int | None = None  # the launch by whose capture its node was built


def with_times(profile: Profile, times: Sequence[Timed]) -> Profile:
    """Give a profile kernel times; kernels that it has not are added."""
    gpu = profile.gpu
    known = {(kernel.process, kernel.name): i for i, kernel in enumerate(gpu.kernels)}
    new = dict.fromkeys((x.process, x.kernel) for x in times if (x.process, x.kernel) not in known)
    known |= {key: len(gpu.kernels) + i for i, key in enumerate(new)}
    rows = np.zeros(len(times), KERNEL_TIME_DTYPE)
    for row, x in zip(rows, times, strict=True):
        row["kernel"] = known[x.process, x.kernel]
        row["stack"] = NONE if x.launch is None else gpu.calls["stack"][x.launch]
        row["built"] = NONE if x.built is None else gpu.calls["stack"][x.built]
        row["count"], row["duration_ns"], row["end_ns"] = x.count, x.ns, x.end_ns
        row["begin_ns"] = max(0, x.end_ns - x.ns)
    kernels = (*gpu.kernels, *(Kernel(process, "opencl", name, "") for process, name in new))
    return replace(profile, gpu=replace(gpu, times=rows, kernels=kernels))


def small_timed_profile() -> Profile:
    """That of `small_device_profile`: times of named launches, and of some that nobody named."""
    return with_times(
        small_device_profile(),
        [
            Timed("matmul", 6 * MS, 0, 30, 500 * MS),
            Timed("matmul", 9 * MS, 1, 10, 900 * MS),
            # Shared by what launches of each stack took: 30 of 0.2 ms, 10 of 0.9 ms.
            Timed("matmul", 5 * MS, None, 7, 1_100 * MS),
            Timed("fill", 3 * MS, None, 8, 1_200 * MS, process=1),
            Timed("ghost", 2 * MS, None, 1, 1_300 * MS),
        ],
    )
