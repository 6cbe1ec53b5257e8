# SPDX-License-Identifier: Apache-2.0
"""The profile model: what a capture holds and every report reads.

A profile is plain data. Bulk columns (stacks, samples) are numpy arrays, so that a capture of a
million samples is summed without a Python loop; things that are few (processes, functions) are
tuples of frozen dataclasses. Nothing here needs root, bcc or a GPU.

Every id is an index into the tuple or array of that name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.accounts import Accounts
from aiflame.agent.model.gpu import GpuProfile

if TYPE_CHECKING:
    from aiflame.agent.model.batch import Labels


# A fact of captures whose losses are not of what they have alone: its title, and what it says.
LOSSES_FACT, OF_HOST = "losses", "of the whole host"


# The target of recordings of the whole machine.
ALL_PROCESSES = "all processes"


class FrameKind(enum.IntEnum):
    """What executes a frame; it decides the colour and the folded suffix."""

    NATIVE = 0  # machine code of a user-space binary
    KERNEL = 1  # kernel, kernel module or BPF program
    PYTHON = 2  # a Python function
    MARKER = 3  # made by aiflame, in square brackets: [truncated: ...], [blocked: lock]
    INTERPRETER = 4  # an interpreter's machine code that only hands calls on; hidden by default


class GilState(enum.IntEnum):
    """What a thread had to do with its interpreter's lock when a stack was taken."""

    NO_PYTHON = 0  # on this stack
    HELD = 1
    WAITING = 2  # wants it: another thread has it
    RELEASED = 3  # gave it up, for a system call or for native code that needs no interpreter
    UNKNOWN = 4  # Python on this stack, and a lock that could not be read


class SampleClass(enum.IntEnum):
    """Where a thread's nanoseconds went. Values are shared with bpf/aiflame.h."""

    ON_CPU = 0
    BLOCKED = 1  # asleep: from switch-out to the wake-up
    WAITING_TO_RUN = 2  # awake, without a CPU: from the wake-up to the switch-in
    PREEMPTED = 3  # switched out while runnable, to the switch-in

    @property
    def label(self) -> str:
        """The words used in every report, for instance "waiting to run"."""
        return self.name.lower().replace("_", " ").replace("on cpu", "on-CPU")


class StopReason(enum.IntEnum):
    """Why the walk of a user stack stopped. Values are shared with bpf/aiflame.h."""

    ROOTED = 0  # reached the outermost frame
    KERNEL_ONLY = 1  # a kernel thread, or exec between two programs: there is no user stack
    NO_FRAME_POINTER = 2  # the frame-pointer chain stopped short of the thread's start
    UNREADABLE = 3  # stack memory could not be read (paged out, or a wild pointer)
    TOO_DEEP = 4  # more frames than are kept
    NOT_WALKED = 5  # woken up before its stack could be read
    LOST = 6  # the stack store was full: only the time is known
    EXCLUDED = 7  # not asked for (--kernel-only)
    ROOTED_BY_TABLE = 8  # as ROOTED, by the unwind table; a capture says ROOTED
    NO_TABLE = 9  # code without unwind information, and without frame pointers
    UNSUPPORTED_RULE = 10  # unwind information that no rule expresses
    ROOTED_BY_HEURISTIC = 11  # as ROOTED, with a caller found by a checked heuristic
    NO_TABLE_YET = 12  # code whose unwind information was still being read
    NOT_RUN_YET = 13  # a new thread that waits for its first CPU: it has no stack
    NOT_SAMPLED = 14  # waits of a thread none of whose waits was chosen to have a stack

    @property
    def label(self) -> str:
        """The reason in words, for instance "no frame pointer"."""
        return self.name.lower().replace("_", " ")

    @property
    def marker(self) -> str:
        """What stands in a flame graph for the frames that are missing."""
        if self is StopReason.NOT_SAMPLED:
            return f"[off CPU: {self.label}]"
        return f"[truncated: {self.label}]"

    @property
    def meaning(self) -> str:
        """What the reason says to who has not met it, with the cure where there is one.

        Without parentheses: in the tips of an SVG they enclose what follows the name.
        """
        return _MEANINGS[self]


_MEANINGS = {
    StopReason.ROOTED: "complete, by frame pointers or unwind tables",
    StopReason.KERNEL_ONLY: "complete: a thread of the kernel, or one between two programs",
    StopReason.NO_FRAME_POINTER: (
        "code without unwind table, or whose table was still being made in a first recording, left"
        " no frame pointer to its caller; record again, or build it with -fno-omit-frame-pointer"
    ),
    StopReason.UNREADABLE: (
        "stack memory that could not be read: paged out, or the address of a caller was wrong"
    ),
    StopReason.TOO_DEEP: "more frames than are kept; those nearest to the leaf are there",
    StopReason.NOT_WALKED: (
        "the thread woke up before its stack could be read, or the kernel lets nobody read its"
        " process"
    ),
    StopReason.LOST: (
        "the stack found no room, and only its time is known; raise --stack-storage-size"
    ),
    StopReason.EXCLUDED: "user frames were not asked for",
    StopReason.ROOTED_BY_TABLE: "complete, by unwind tables",
    StopReason.NO_TABLE: (
        "code without frame pointers that has no unwind table, as some compilers at run time make"
        " it, or had none yet in a first recording; record again, and for Java start it with"
        " -XX:+PreserveFramePointer"
    ),
    StopReason.UNSUPPORTED_RULE: (
        "the unwind table has a rule here that is not supported, mostly in the first instructions"
        " of functions that realign their stack"
    ),
    StopReason.ROOTED_BY_HEURISTIC: "complete, with a caller found by a checked heuristic",
    StopReason.NO_TABLE_YET: (
        "the unwind table was still being made; it is kept, so that the next recording has it"
    ),
    StopReason.NOT_RUN_YET: "complete: a new thread that waits for its first CPU has no stack",
    StopReason.NOT_SAMPLED: (
        "none of the waits of this thread was chosen to have a stack; raise --off-cpu-budget"
    ),
}

# What stands in a stack for kernel frames beyond those that are kept.
KERNEL_FRAMES_MARKER = "[truncated: kernel frames]"

# Those of complete stacks.
COMPLETE_REASONS = (StopReason.ROOTED, StopReason.ROOTED_BY_TABLE, StopReason.ROOTED_BY_HEURISTIC)


@dataclass(frozen=True, slots=True)
class Process:
    """One process image: an exec makes a new one under the same pid."""

    pid: int
    parent_pid: int
    name: str  # comm, at most 15 bytes
    executable: str  # path in the process's own mount namespace, "" where unknown
    command_line: str
    cgroup: str
    container_id: str  # 64 hex digits, or ""
    started_ns: int  # since the recording's start; 0 when it was there before
    exited_ns: int | None  # since the recording's start; None when it was still there


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread. The exact times come from the scheduler, not from samples."""

    process: int
    tid: int
    name: str
    on_cpu_ns: int  # exact, between its first and last switch inside the recording; 0: not known
    observed_ns: int  # how long it existed inside the recording; 0: not known


@dataclass(frozen=True, slots=True)
class Binary:
    """A mapped file, the kernel, a kernel module, the vDSO or a JIT's address range."""

    path: str
    build_id: str  # lower-case hex, "" where the file has none


@dataclass(frozen=True, slots=True)
class Function:
    """What a flame graph merges by."""

    kind: FrameKind
    # Demangled; where no symbol covers the address `[module fn@0xstart]`, and where it is not known
    # either where the function begins `[module+0xoffset]`.
    name: str
    binary: int | None
    file: str  # source file, "" where unknown; of Python code, the path that its process knows


# Functions in no binary that are not generated code: of an address in no mapping, and of one in a
# process whose mappings nobody had read.
UNMAPPED, EXITED = "[unmapped memory]", "[exited before it could be read]"
# Of an address in a recording that was killed, which does not say what was mapped there.
UNNAMED_CODE = "[native "


def is_generated(function: Function) -> bool:
    """Whether a function is code that a compiler made at run time, as those of Java and Node do."""
    return (
        function.kind is FrameKind.NATIVE
        and function.binary is None
        and function.name not in (UNMAPPED, EXITED)
        and not function.name.startswith(UNNAMED_CODE)
    )


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that was seen but could not be kept."""

    name: str  # stable, snake_case
    count: int
    meaning: str  # one sentence: what was lost, and the cure


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A part of a recording: whole seconds, the last one as far as the recording goes.

    Times are nanoseconds since the start of the recording.
    """

    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """How long it is."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Recording:
    """The facts about a recording that every report shows under its flame graph.

    `duration_ns`, `started_unix_ns` and the recorder's own cost are what they say; `facts` holds
    further lines for the reader (kernel, host, command, limits), in order. `time_range` is set
    where a profile holds a part of the recording only; all others stay those of the whole one.
    `window_s` is the longest time of which it is known what was in it, and not when in it.
    """

    aiflame_version: str
    started_unix_ns: int
    duration_ns: int
    period_ns: int  # weight of one on-CPU sample
    command: str  # the recorded command line of aiflame
    target: str  # what was recorded, in words
    recorder_cpu_ns: int
    recorder_peak_rss_bytes: int
    facts: tuple[tuple[str, str], ...]
    time_range: TimeRange | None = None
    window_s: int = 1

    @property
    def shown_range(self) -> TimeRange:
        """What the profile is of: the chosen part, or the whole recording."""
        return self.time_range or TimeRange(0, self.duration_ns)


# One row per (frame): indexes into Profile.functions, the executing line (0 unknown), the
# address relative to the binary's own virtual addresses, and whether the compiler inlined it.
FRAME_DTYPE = np.dtype([("function", "<u4"), ("line", "<u4"), ("address", "<u8"), ("inlined", "?")])

# One row per (stack, thread, class), summed over the recording. `stack` and `thread` are indexes.
SAMPLE_DTYPE = np.dtype(
    [("stack", "<u4"), ("thread", "<u4"), ("klass", "u1"), ("count", "<u8"), ("ns", "<u8")]
)

# When the time of samples was: `ns` and `count` in each of `seconds` seconds from `first_s` on,
# counted from the start of the recording. `sample` is an index; the spans of a sample add up to it.
# A wait that is known one by one lies in the seconds it was in, and is counted where it ended.
SPAN_DTYPE = np.dtype(
    [("sample", "<u4"), ("first_s", "<u4"), ("seconds", "<u4"), ("count", "<u8"), ("ns", "<u8")]
)

NS_PER_S = 1_000_000_000

# One row per long off-CPU wait; times are nanoseconds since the start of the recording.
WAIT_DTYPE = np.dtype(
    [
        ("stack", "<u4"),
        ("thread", "<u4"),
        ("start_ns", "<u8"),
        ("blocked_ns", "<u8"),
        ("runnable_ns", "<u8"),
    ]
)


def _no_gil() -> npt.NDArray[np.uint8]:
    return np.zeros(0, np.uint8)


def _no_spans() -> npt.NDArray[np.void]:
    return np.zeros(0, SPAN_DTYPE)


@dataclass(frozen=True, slots=True)
class Stacks:
    """All distinct stacks, root first, in compressed rows.

    The frames of stack `i` are `frames[offsets[i]:offsets[i + 1]]`, indexes into `Profile.frames`.
    Inlined functions are expanded. `ends[i]` is a `StopReason`, `gil[i]` a `GilState`.

    The frames that a Python evaluation loop was in stand right after the frame of that loop,
    which is of kind INTERPRETER, as is the glue around it: every view leaves out what it does not
    show.
    """

    offsets: npt.NDArray[np.uint64]  # shape (stacks + 1,)
    frames: npt.NDArray[np.uint32]  # shape (offsets[-1],)
    ends: npt.NDArray[np.uint8]  # shape (stacks,)
    gil: npt.NDArray[np.uint8] = field(default_factory=_no_gil)  # shape (stacks,); empty: NO_PYTHON

    def __post_init__(self) -> None:
        if not len(self.gil):
            object.__setattr__(self, "gil", np.zeros(len(self.ends), np.uint8))

    def __len__(self) -> int:
        return len(self.ends)


@dataclass(frozen=True, slots=True)
class FleetLabel:
    """A label of what a fleet runs.

    Attributes:
        name: Of the label: "service", "pod".
        values: Those that are told apart, most time first.
        others: How many more there are, which are one value, after all of `values`; 0: none.
        of_thread: Index of the value of each thread, -1 where the label is not of it; shape
            (threads,).
    """

    name: str
    values: tuple[str, ...]
    others: int
    of_thread: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a profile of many hosts has besides.

    Its spans are of whole buckets. A thread stands for all that is alike in its process, class and
    labels.

    Attributes:
        when: From when to when it is, in words.
        begin_s: When its recording starts, in seconds of Unix.
        bucket_s: How long a bucket is; spans name its first second.
        labels: Those with several values; a thread has one value of each.
        thread_of_kernel: Whose what devices did with a kernel was; shape (kernels,).
    """

    when: str
    begin_s: int
    bucket_s: int
    labels: tuple[FleetLabel, ...]
    thread_of_kernel: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Difference:
    """What a profile of two captures, or parts of a store, that are compared has besides.

    Attributes:
        base: What is compared with, in words.
        new: What is compared, in words.
        is_new: Of which of the two each thread is; shape (threads,).
        time: What is compared, in words.
    """

    base: str
    new: str
    is_new: npt.NDArray[np.bool_]
    time: str = "CPU time"


@dataclass(frozen=True, slots=True)
class Profile:
    """A capture in memory, or a time range of one, or a part of a fleet's.

    Without `spans`, it is not known when its time was.
    """

    recording: Recording
    processes: tuple[Process, ...]
    threads: tuple[Thread, ...]
    binaries: tuple[Binary, ...]
    functions: tuple[Function, ...]
    frames: npt.NDArray[np.void]  # FRAME_DTYPE
    stacks: Stacks
    samples: npt.NDArray[np.void]  # SAMPLE_DTYPE
    waits: npt.NDArray[np.void]  # WAIT_DTYPE
    losses: tuple[Loss, ...] = field(default=())
    gpu: GpuProfile = field(default_factory=GpuProfile)
    spans: npt.NDArray[np.void] = field(default_factory=_no_spans)  # SPAN_DTYPE
    fleet: Fleet | None = None
    difference: Difference | None = None
    # Of each process, of what an agent recorded; None for one that is nobody's, () for all others.
    labels: tuple[Labels | None, ...] = ()
    accounts: Accounts = field(default_factory=Accounts)

    def with_samples(self, are_kept: npt.NDArray[np.bool_]) -> Profile:
        """Returns the same with some of the samples, and their spans; shape (samples,)."""
        sample = self.spans["sample"]
        spans = self.spans[are_kept[sample]]
        numbers = np.cumsum(are_kept) - 1
        sample = spans["sample"]
        spans["sample"] = numbers[sample]
        return replace(self, samples=self.samples[are_kept], spans=spans)
