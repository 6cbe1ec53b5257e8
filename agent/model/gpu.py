# SPDX-License-Identifier: Apache-2.0
"""The device half of a profile: API calls with their CPU stacks, and samples of kernels.

Device samples are counts of a profile of their own, never mixed with CPU nanoseconds. What a
vendor calls a stall reason is kept as it is; the common category is derived when it is shown.
Which launch a sample belongs to is not stored: attribution is a pure function of what is here.

Every id is an index into the tuple or array of that name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# Stands in an index column where there is nothing to refer to.
NONE = 0xFFFFFFFF


class Operation(enum.IntEnum):
    """What a call of a device API does. Values stand in windows and captures."""

    LAUNCH = 0
    SYNCHRONIZE = 1
    ALLOCATE = 2
    FREE = 3
    COPY = 4


class Direction(enum.IntEnum):
    """Where a copy goes, as far as its arguments tell."""

    UNKNOWN = 0
    TO_DEVICE = 1
    FROM_DEVICE = 2
    ON_DEVICE = 3
    ON_HOST = 4


class Tier(enum.IntEnum):
    """How much a device lets be known of it."""

    LAUNCHES = 0
    TIMES = 1  # and how long each kernel ran
    STALLS = 2  # and where in a kernel, and why it waited there

    @property
    def label(self) -> str:
        """What is known at it, in a reader's words."""
        return ("launches", "launches and times", "launches, and samples with reasons")[self]


@dataclass(frozen=True, slots=True)
class Device:
    """One device, or one family that was looked for and not found."""

    family: str  # "opencl", "nvidia", ...
    name: str  # as its driver calls it, "" where there is none
    tier: Tier
    limit: str  # what is missing for the next tier, "" at the highest
    period_ns: int  # what one sample stands for on one worker; 0 where it is no time
    details: str = ""  # versions of its driver and libraries, how it was sampled

    @property
    def reached(self) -> str:
        """Which tier it reached, and what is missing for the next; it may have a target's words."""
        limit = self.limit
        if not limit and self.tier is not Tier.STALLS:
            limit = "what is missing for the next tier was not told"
        return f"tier {int(self.tier)}, {self.tier.label}" + (f"; {limit}" if limit else "")


@dataclass(frozen=True, slots=True)
class ApiFunction:
    """A function of a device API that was probed in the recorded processes."""

    api: str  # "opencl", "cuda", ...
    name: str
    operation: Operation


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel by name, in one process image."""

    process: int
    api: str
    name: str  # linkage name, as the API or its code gives it; "" where unknown
    unnamed: str  # why the name is unknown, "" where it is known


@dataclass(frozen=True, slots=True)
class KernelCode:
    """Machine code of a kernel: one kernel may be built several times."""

    kernel: int
    binary: int | None  # the file that holds it; of CUDA's, where it was found by its name
    size_bytes: int  # offsets of samples are below it; 0 where unknown
    object: int | None = None  # what it can be listed from, where it is not listed


@dataclass(frozen=True, slots=True)
class CodeObject:
    """Machine code that kernels can be listed from, in its family's own form, compressed (zlib)."""

    family: str
    size_bytes: int  # when it is not compressed
    content: bytes


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a kernel's code."""

    code: int
    offset: int  # bytes from the kernel's first instruction
    text: str
    file: str  # source file, "" where unknown
    line: int  # 0: unknown


@dataclass(frozen=True, slots=True)
class StallReason:
    """What a sampled instruction waited for, in the vendor's own words."""

    family: str
    name: str


# Calls summed by (interval, stack, thread, function, kernel, direction). `interval` is seconds
# since the start of the recording; `work` the sum of work items (threads) launched, 0 where the API
# does not say; `bytes` what was copied or allocated; `kernel` NONE where it is no launch.
CALL_DTYPE = np.dtype(
    [
        ("interval", "<u4"),
        ("stack", "<u4"),
        ("thread", "<u4"),
        ("function", "<u4"),
        ("kernel", "<u4"),
        ("direction", "u1"),
        ("count", "<u8"),
        ("work", "<u8"),
        ("bytes", "<u8"),
    ]
)

# Calls one by one, where that was asked for. Times are ns since the start of the recording; `queue`
# is the stream's or queue's handle, `grid` and `block` are in the API's own order.
CALL_EVENT_DTYPE = np.dtype(
    [
        ("start_ns", "<u8"),
        ("stack", "<u4"),
        ("thread", "<u4"),
        ("function", "<u4"),
        ("kernel", "<u4"),
        ("direction", "u1"),
        ("queue", "<u8"),
        ("grid", "<u4", (3,)),
        ("block", "<u4", (3,)),
        ("bytes", "<u8"),
    ]
)

# Launches in their order on each queue: `count` equal ones that follow each other, the first
# enqueued at first_ns, the last at last_ns, all ended by ended_ns, NO_END where nothing tells. Of
# queue 0 are those whose order was not kept: others may lie between them. Only those that may have
# run when a device was sampled; none in captures of old, which `calls` stand in for.
NO_END = np.iinfo(np.int64).max
LAUNCH_DTYPE = np.dtype(
    [
        ("stack", "<u4"),
        ("thread", "<u4"),
        ("function", "<u4"),
        ("kernel", "<u4"),
        ("queue", "<u8"),
        ("first_ns", "<i8"),
        ("last_ns", "<i8"),
        ("ended_ns", "<i8"),
        ("count", "<u8"),
        ("work", "<u8"),
    ]
)

# Samples of kernels, taken between begin_ns and end_ns, which are the same where the moment is
# known. `stack` is that of the launch where the device named it by its number, else NONE.
DEVICE_SAMPLE_DTYPE = np.dtype(
    [
        ("interval", "<u4"),
        ("device", "<u4"),
        ("code", "<u4"),
        ("offset", "<u8"),
        ("reason", "<u4"),
        ("stack", "<u4"),
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("count", "<u8"),
    ]
)

# How long a device ran a kernel: `count` executions between two times, in ns since the start of the
# recording, of `duration_ns` in all. `stack` as in samples: those of one stack are one row for a
# window of the recording. `built`: of a kernel that a graph ran, the stack of the call by whose
# capture its node was built, NONE where that is not known or it is no graph's.
KERNEL_TIME_DTYPE = np.dtype(
    [
        ("device", "<u4"),
        ("kernel", "<u4"),
        ("queue", "<u8"),
        ("stack", "<u4"),
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("count", "<u8"),
        ("duration_ns", "<u8"),
        ("built", "<u4"),
    ]
)


# How busy a device was between two times, in ns since the start of the recording, of all that ran
# on it, also of others than the recorded processes; and what of its memory was in use at the end of
# that. A device may tell the one and not the other: BUSY_UNKNOWN, and NO_SIZE with a total of 0.
BUSY_UNKNOWN = 0xFFFF
MOST_PERMILLE = 1000
# Devices are read once a second, and given up when they are silent for some.
LONGEST_READING_NS = 10_000_000_000
NO_SIZE = 0xFFFF_FFFF_FFFF_FFFF
DEVICE_READING_DTYPE = np.dtype(
    [
        ("device", "<u4"),
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("busy_permille", "<u2"),
        ("used_bytes", "<u8"),
        ("total_bytes", "<u8"),
    ]
)


def _empty(dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    return np.zeros(0, dtype)


@dataclass(frozen=True, slots=True)
class MeasuredError:
    """What sharing gave in windows in which a device named the launch of each sample.

    Attributes:
        windows: How many of them had samples of kernels that several stacks launch.
        samples: How many samples of such kernels they had.
        off: Which part of these sharing gave to another stack, all in all, 0 to 1; where windows
            correct it, of those that had no part in that.
        uncorrected: The same of sharing without what windows correct, None where they do not.
    """

    windows: int
    samples: int
    off: float
    uncorrected: float | None = None


@dataclass(frozen=True, slots=True)
class SharingError:
    """How much of all samples is probably with another stack than its own, all in all, 0 to 1.

    Attributes:
        expected: If launches of equal work take equal time, wherever nothing told what they take.
        if_unequal: If they do not.
        measured: What was measured of it, None where nothing was.
    """

    expected: float
    if_unequal: float
    measured: MeasuredError | None = None


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """All that a capture holds of devices; of code objects, those of kernels that are not listed.

    `attributed`, `error` and `attributed_times` are set in a time range of a recording: what
    attribution made of the whole one (see gpu/attribution), since a launch may come before the
    range that its samples are in. And where kernels of graphs have stacks of both who launched and
    who built them (reports/graph_nodes.py).
    """

    devices: tuple[Device, ...] = ()
    functions: tuple[ApiFunction, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    codes: tuple[KernelCode, ...] = ()
    objects: tuple[CodeObject, ...] = ()
    instructions: tuple[Instruction, ...] = ()
    reasons: tuple[StallReason, ...] = ()
    calls: npt.NDArray[np.void] = field(default_factory=lambda: _empty(CALL_DTYPE))
    events: npt.NDArray[np.void] = field(default_factory=lambda: _empty(CALL_EVENT_DTYPE))
    launches: npt.NDArray[np.void] = field(default_factory=lambda: _empty(LAUNCH_DTYPE))
    samples: npt.NDArray[np.void] = field(default_factory=lambda: _empty(DEVICE_SAMPLE_DTYPE))
    times: npt.NDArray[np.void] = field(default_factory=lambda: _empty(KERNEL_TIME_DTYPE))
    readings: npt.NDArray[np.void] = field(default_factory=lambda: _empty(DEVICE_READING_DTYPE))
    attributed: npt.NDArray[np.void] | None = None
    error: SharingError | None = None
    attributed_times: npt.NDArray[np.void] | None = None

    def calls_of(self, operation: Operation) -> npt.NDArray[np.void]:
        """Returns the rows of `calls` that do something."""
        does = np.array([function.operation == operation for function in self.functions], np.bool_)
        function = self.calls["function"]
        found: npt.NDArray[np.void] = self.calls[does[function]]
        return found
