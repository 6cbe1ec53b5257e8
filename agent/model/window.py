# SPDX-License-Identifier: Apache-2.0
"""The window: one stretch of a recording, as the collector closes it and every sink takes it.

A window is plain data: columns of numpy rows, and texts that columns refer to by index. It is

* self-contained: whatever a row refers to is in the same window;
* exact: for each thread, time on and off CPU is the time that it existed in the window;
* final when it is closed: nothing of it comes later, but what a stack is that was lost, or that
  waited for a table (StopReason.NO_TABLE_YET);
* bounded: `Bounds` says how much it may hold, and what goes past that is in its losses.

Numbers (process, thread, binary, function, kernel, code, device, reason, cgroup) are given out by
the collector, mean the same in all windows of a recording, and are never used again. So are the ids
of stacks and chains, 64-bit hashes of the kernel half. Times are nanoseconds since the recording's
start. `check` and `check_wall` tell whether all of this holds, `concatenate` what several windows
say together.
"""

from __future__ import annotations

import enum
import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import (
    BUSY_UNKNOWN,
    MOST_PERMILLE,
    NO_SIZE,
    Direction,
    Operation,
    Tier,
)
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.rows import join_rows, take_rows

Rows = npt.NDArray[np.void]

# Stands in a column of numbers where there is nothing to refer to.
NONE = 0xFFFF_FFFF
# The stack of a row of which only the time is known, and the chain of a stack without Python.
NO_STACK = NO_CHAIN = 0
# Bits 63..32 of the ids of stacks that the host half makes: outside the kernel's hash in all
# likelihood.
MADE_STACKS = 0x51EE_9E55
# Stands in a column of times for "not yet" or "not known".
NO_TIME = -1

# Of enum python_gil.
_GIL_VALUES = 4

# On and off CPU come from one clock, but a thread's switch and the boundary of a window from
# different processors: what they may differ by.
_WALL_REL, _WALL_SLACK_NS = 0.001, 100_000


class BadWindow(ValueError):
    """A window that is not what this module promises. The message names the column."""


class Timing(enum.IntEnum):
    """What is known of when a device sample was taken."""

    NONE = 0  # in this window
    INSTANT = 1  # at begin_ns
    INTERVAL = 2  # between begin_ns and end_ns


# A process between two execs. exec_ns: the kernel half's name of it, monotonic; exited_ns: NO_TIME
# while it lives; cgroup, name, executable, command_line: see `Window`; namespaced_pid: its pid in
# its own pid namespace.
PROCESS_DTYPE = np.dtype(
    [
        ("process", "<u4"),
        ("pid", "<u4"),
        ("parent_pid", "<u4"),
        ("namespaced_pid", "<u4"),
        ("exec_ns", "<u8"),
        ("started_ns", "<i8"),
        ("exited_ns", "<i8"),
        ("cgroup", "<u4"),
        ("name", "<u4"),
        ("executable", "<u4"),
        ("command_line", "<u4"),
    ]
)
THREAD_DTYPE = np.dtype([("thread", "<u4"), ("process", "<u4"), ("tid", "<u4"), ("name", "<u4")])
# Exact, by context switches, and how long the thread existed; both inside the window.
THREAD_TIME_DTYPE = np.dtype([("thread", "<u4"), ("on_cpu_ns", "<u8"), ("observed_ns", "<u8")])
# kernel_id: as bpf_get_current_cgroup_id() says, 0 where that is not told, and of groups of v1.
# container_id: 64 hex digits or "".
CGROUP_DTYPE = np.dtype(
    [
        ("cgroup", "<u4"),
        ("kernel_id", "<u8"),
        ("path", "<u4"),
        ("container_id", "<u4"),
        ("engine", "<u4"),
        ("unit", "<u4"),
    ]
)
BINARY_DTYPE = np.dtype([("binary", "<u4"), ("path", "<u4"), ("build_id", "<u4")])
# [start, end) of a process shows the binary from file_offset on; bias is what to subtract from an
# address to get the binary's own. binary NONE: anonymous memory, code that a JIT made.
MAPPING_DTYPE = np.dtype(
    [
        ("process", "<u4"),
        ("binary", "<u4"),
        ("start", "<u8"),
        ("end", "<u8"),
        ("file_offset", "<u8"),
        ("bias", "<u8"),
    ]
)
# `kernel_depth` and then `user_depth` addresses from `addresses[first]` on, each half leaf first.
# stop_reason: a StopReason; is_kernel_cut: kernel frames are missing between the halves; gil: enum
# python_gil of bpf/aiflame.h; call, call_return: the device API function that the stack is inside
# of, whose address is among the others, and where it returns to; NONE and 0 where it is in none.
STACK_DTYPE = np.dtype(
    [
        ("stack", "<u8"),
        ("chain", "<u8"),
        ("process", "<u4"),
        ("first", "<u4"),
        ("kernel_depth", "<u2"),
        ("user_depth", "<u2"),
        ("stop_reason", "u1"),
        ("gil", "u1"),
        ("is_kernel_cut", "?"),
        ("call", "<u4"),
        ("call_return", "<u8"),
    ]
)
ADDRESS_DTYPE = np.dtype([("address", "<u8")])
# `depth` Python frames from `chain_frames[first]` on, leaf first; end: an abi.PythonEnd.
CHAIN_DTYPE = np.dtype(
    [("chain", "<u8"), ("process", "<u4"), ("first", "<u4"), ("depth", "<u2"), ("end", "u1")]
)
# position: of the instruction, as the interpreter's version counts it; ends_run: the frame was
# entered from C, so a native frame of the eval loop belongs to it.
CHAIN_FRAME_DTYPE = np.dtype([("code", "<u8"), ("position", "<i4"), ("ends_run", "?")])
# What a witness read of Python code while its process lived. code: the object's address, and above
# its 48 bits a count that tells objects apart which had the same one.
CODE_OBJECT_DTYPE = np.dtype(
    [("process", "<u4"), ("code", "<u8"), ("name", "<u4"), ("file", "<u4"), ("first_line", "<u4")]
)
CODE_LINE_DTYPE = np.dtype(
    [("process", "<u4"), ("code", "<u8"), ("position", "<i4"), ("line", "<u4")]
)
# What a perf map says of an address of a stack. The collector leaves it empty: who names windows
# reads perf maps, and keeps what it found (`sinks.jit_symbols`).
JIT_SYMBOL_DTYPE = np.dtype([("process", "<u4"), ("address", "<u8"), ("name", "<u4")])
# Thread time by (stack, thread, kind). kind: a SampleClass. On CPU, count samples that weigh
# weight_ns together; off CPU, the parts of count intervals that lie inside the window, exact.
SAMPLE_DTYPE = np.dtype(
    [
        ("stack", "<u8"),
        ("thread", "<u4"),
        ("kind", "u1"),
        ("count", "<u8"),
        ("weight_ns", "<u8"),
    ]
)
# Long waits, each whole and in the window in which it ended; is_open: the recording ended first.
WAIT_DTYPE = np.dtype(
    [
        ("stack", "<u8"),
        ("thread", "<u4"),
        ("start_ns", "<i8"),
        ("blocked_ns", "<u8"),
        ("runnable_ns", "<u8"),
        ("is_open", "?"),
    ]
)
# A function of a device API; operation: an Operation.
FUNCTION_DTYPE = np.dtype(
    [("function", "<u4"), ("api", "<u4"), ("name", "<u4"), ("operation", "u1")]
)
# name "": unknown, and unnamed says why.
KERNEL_DTYPE = np.dtype(
    [("kernel", "<u4"), ("process", "<u4"), ("api", "<u4"), ("name", "<u4"), ("unnamed", "<u4")]
)
# Machine code of a kernel, which may be built more than once. binary NONE: in no file.
CODE_DTYPE = np.dtype([("code", "<u4"), ("kernel", "<u4"), ("binary", "<u4")])
# tier: a Tier; period_ns: what a sample stands for on one worker, 0 where it is no time.
DEVICE_DTYPE = np.dtype(
    [
        ("device", "<u4"),
        ("family", "<u4"),
        ("name", "<u4"),
        ("tier", "u1"),
        ("limit", "<u4"),
        ("details", "<u4"),
        ("period_ns", "<u8"),
    ]
)
# In the vendor's own words.
REASON_DTYPE = np.dtype([("reason", "<u4"), ("family", "<u4"), ("name", "<u4")])
# Calls that are no launch, by (function, stack, thread, direction); direction: a Direction.
CALL_DTYPE = np.dtype(
    [
        ("function", "<u4"),
        ("thread", "<u4"),
        ("stack", "<u8"),
        ("direction", "u1"),
        ("count", "<u8"),
        ("bytes", "<u8"),
    ]
)
# Launches on one queue: `count` that follow each other and are equal but for their time, with no
# other launch and no return of a wait between them; the first enqueued at enqueued_ns, the last at
# last_enqueued_ns. queue: the handle of the stream or queue, unique in a process; 0 where it is not
# known: then they are all equal ones between the two times. launch_id: number of the first, 0 where
# they are not numbered; work: work items of all. A row of count 0 tells the number of a launch that
# is in another row.
LAUNCH_DTYPE = np.dtype(
    [
        ("process", "<u4"),
        ("thread", "<u4"),
        ("queue", "<u8"),
        ("stack", "<u8"),
        ("function", "<u4"),
        ("kernel", "<u4"),
        ("launch_id", "<u8"),
        ("enqueued_ns", "<i8"),
        ("last_enqueued_ns", "<i8"),
        ("count", "<u8"),
        ("work", "<u8"),
    ]
)
# Calls of a device API one by one, where these are asked for (record --trace).
CALL_EVENT_DTYPE = np.dtype(
    [
        ("start_ns", "<i8"),
        ("stack", "<u8"),
        ("thread", "<u4"),
        ("function", "<u4"),
        ("kernel", "<u4"),
        ("direction", "u1"),
        ("queue", "<u8"),
        ("grid_x", "<u4"),
        ("grid_y", "<u4"),
        ("grid_z", "<u4"),
        ("block_x", "<u4"),
        ("block_y", "<u4"),
        ("block_z", "<u4"),
        ("bytes", "<u8"),
    ]
)
# Calls that returned at end_ns, after all had ended that was on the queue at begin_ns: the end of a
# launch is known by the first of them that began after it. queue 0: all queues of the process.
# Rows of their own, since such a call may return windows after the launch.
QUEUE_WAIT_DTYPE = np.dtype(
    [
        ("process", "<u4"),
        ("queue", "<u8"),
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)
# Samples of kernels. offset: bytes from the kernel's first instruction; launch_id: 0 where the
# hardware tells none; timing: a Timing; begin_ns, end_ns: as it says, else NO_TIME.
DEVICE_SAMPLE_DTYPE = np.dtype(
    [
        ("device", "<u4"),
        ("code", "<u4"),
        ("offset", "<u8"),
        ("reason", "<u4"),
        ("launch_id", "<u8"),
        ("timing", "u1"),
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("count", "<u8"),
    ]
)
# How long a device ran a kernel: count executions between begin_ns and end_ns, of duration_ns in
# all. launch_id as in device samples; queue 0 where it is not known; built_id: of a kernel that a
# graph ran, the launch by whose capture its node was built, 0 where that is not known.
KERNEL_TIME_DTYPE = np.dtype(
    [
        ("device", "<u4"),
        ("kernel", "<u4"),
        ("queue", "<u8"),
        ("launch_id", "<u8"),
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("count", "<u8"),
        ("duration_ns", "<u8"),
        ("built_id", "<u8"),
    ]
)
# How busy a device was from begin_ns to end_ns, of all that runs on it, and what of its memory was
# in use at the end of that. Where the device does not tell: busy_permille is BUSY_UNKNOWN;
# used_bytes NO_SIZE, and total_bytes 0.
DEVICE_READING_DTYPE = np.dtype(
    [
        ("device", "<u4"),
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("busy_permille", "<u2"),
        ("used_bytes", "<u8"),
        ("total_bytes", "<u8"),
    ]
)
# name: of an entry of the list of losses; thread_ns: the thread time that is missing for it, 0
# where that is not known.
LOSS_DTYPE = np.dtype([("name", "<u4"), ("count", "<u8"), ("thread_ns", "<u8")])


@dataclass(frozen=True, slots=True)
class Cost:
    """What recording took in a window.

    Attributes:
        cpu_ns: CPU time of the recorder's process; of an agent, of all its processes but those that
            make captures.
        bpf_ns: CPU time in threads of targets, of programs in the kernel and of helpers, as an
            agent's cost controller accounts it: events times what each takes. 0 where none does,
            and of an agent's last window.
        rss_bytes: The most memory that the recorder's process had; of an agent, what all of those
            had when it looked last, each minute.
    """

    cpu_ns: int = 0
    bpf_ns: int = 0
    rss_bytes: int = 0

    @property
    def all_ns(self) -> int:
        """CPU time in all."""
        return self.cpu_ns + self.bpf_ns


NO_COST = Cost()


@dataclass(frozen=True, slots=True)
class Column:
    """What the rows of a column are.

    Attributes:
        dtype: Of a row.
        key: Fields that tell rows apart; where there are none, rows are events.
        adds: Fields of measures: rows of one key are added up. Of a column with a key and without
            measures, the newest row of a key counts.
        refers: Fields that hold the first key field of another column, by its name.
        texts: Fields that hold the index of a text.
        parts: The column that each row owns a stretch of, from `first` on.
        depths: Fields that add up to the length of the stretch.
    """

    dtype: np.dtype[np.void]
    key: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    refers: Mapping[str, str] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    parts: str = ""
    depths: tuple[str, ...] = ()


COLUMNS: Mapping[str, Column] = {
    "processes": Column(
        PROCESS_DTYPE,
        key=("process",),
        refers={"cgroup": "cgroups"},
        texts=("name", "executable", "command_line"),
    ),
    "threads": Column(
        THREAD_DTYPE, key=("thread",), refers={"process": "processes"}, texts=("name",)
    ),
    "thread_times": Column(
        THREAD_TIME_DTYPE,
        key=("thread",),
        adds=("on_cpu_ns", "observed_ns"),
        refers={"thread": "threads"},
    ),
    "cgroups": Column(
        CGROUP_DTYPE, key=("cgroup",), texts=("path", "container_id", "engine", "unit")
    ),
    "binaries": Column(BINARY_DTYPE, key=("binary",), texts=("path", "build_id")),
    "mappings": Column(
        MAPPING_DTYPE,
        # One that was replaced stays, for the stacks of before: the newest that has an address
        # counts.
        key=("process", "start", "end", "file_offset", "binary"),
        refers={"process": "processes", "binary": "binaries"},
    ),
    "stacks": Column(
        STACK_DTYPE,
        key=("stack",),
        refers={"process": "processes", "chain": "chains", "call": "functions"},
        parts="addresses",
        depths=("kernel_depth", "user_depth"),
    ),
    "addresses": Column(ADDRESS_DTYPE),
    "chains": Column(
        CHAIN_DTYPE,
        key=("chain",),
        refers={"process": "processes"},
        parts="chain_frames",
        depths=("depth",),
    ),
    "chain_frames": Column(CHAIN_FRAME_DTYPE),
    "code_objects": Column(
        CODE_OBJECT_DTYPE,
        key=("process", "code"),
        refers={"process": "processes"},
        texts=("name", "file"),
    ),
    "code_lines": Column(
        CODE_LINE_DTYPE, key=("process", "code", "position"), refers={"process": "processes"}
    ),
    "jit_symbols": Column(
        JIT_SYMBOL_DTYPE,
        key=("process", "address"),
        refers={"process": "processes"},
        texts=("name",),
    ),
    "samples": Column(
        SAMPLE_DTYPE,
        key=("stack", "thread", "kind"),
        adds=("count", "weight_ns"),
        refers={"stack": "stacks", "thread": "threads"},
    ),
    "waits": Column(WAIT_DTYPE, refers={"stack": "stacks", "thread": "threads"}),
    "functions": Column(FUNCTION_DTYPE, key=("function",), texts=("api", "name")),
    "kernels": Column(
        KERNEL_DTYPE,
        key=("kernel",),
        refers={"process": "processes"},
        texts=("api", "name", "unnamed"),
    ),
    "codes": Column(CODE_DTYPE, key=("code",), refers={"kernel": "kernels", "binary": "binaries"}),
    "devices": Column(DEVICE_DTYPE, key=("device",), texts=("family", "name", "limit", "details")),
    "reasons": Column(REASON_DTYPE, key=("reason",), texts=("family", "name")),
    "calls": Column(
        CALL_DTYPE,
        key=("function", "thread", "stack", "direction"),
        adds=("count", "bytes"),
        refers={"function": "functions", "thread": "threads", "stack": "stacks"},
    ),
    "launches": Column(
        LAUNCH_DTYPE,
        refers={
            "process": "processes",
            "thread": "threads",
            "stack": "stacks",
            "function": "functions",
            "kernel": "kernels",
        },
    ),
    "call_events": Column(
        CALL_EVENT_DTYPE,
        refers={
            "stack": "stacks",
            "thread": "threads",
            "function": "functions",
            "kernel": "kernels",
        },
    ),
    "queue_waits": Column(QUEUE_WAIT_DTYPE, refers={"process": "processes"}),
    "device_samples": Column(
        DEVICE_SAMPLE_DTYPE,
        key=("device", "code", "offset", "reason", "launch_id", "timing", "begin_ns", "end_ns"),
        adds=("count",),
        refers={"device": "devices", "code": "codes", "reason": "reasons"},
    ),
    "kernel_times": Column(KERNEL_TIME_DTYPE, refers={"device": "devices", "kernel": "kernels"}),
    "device_readings": Column(DEVICE_READING_DTYPE, refers={"device": "devices"}),
    "losses": Column(LOSS_DTYPE, key=("name",), adds=("count", "thread_ns"), texts=("name",)),
}


def rows_of(column: str, *rows: tuple[Any, ...]) -> Rows:
    """Makes rows of a column, each with its fields in their order."""
    return np.array(list(rows), COLUMNS[column].dtype)


# What a reference holds where there is nothing to refer to: ids are never 0, numbers never NONE.
_NOTHING = {"stacks": NO_STACK, "chains": NO_CHAIN}
# Whatever has a thread knows which.
_ALWAYS_KNOWN = frozenset({"threads"})


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One window. Columns are described beside their dtypes.

    Attributes:
        number: Counts from 0; none is left out.
        start_ns: Where the window before ended.
        end_ns: Its boundary.
        is_last: The recording ended with it.
        texts: What columns of texts refer to; the first is empty.
        cost: Of the recorder.
    """

    number: int
    start_ns: int
    end_ns: int
    is_last: bool
    texts: tuple[str, ...]
    cost: Cost
    processes: Rows
    threads: Rows
    thread_times: Rows
    cgroups: Rows
    binaries: Rows
    mappings: Rows
    stacks: Rows
    addresses: Rows
    chains: Rows
    chain_frames: Rows
    code_objects: Rows
    code_lines: Rows
    jit_symbols: Rows
    samples: Rows
    waits: Rows
    functions: Rows
    kernels: Rows
    codes: Rows
    devices: Rows
    reasons: Rows
    calls: Rows
    launches: Rows
    call_events: Rows
    queue_waits: Rows
    device_samples: Rows
    kernel_times: Rows
    device_readings: Rows
    losses: Rows

    @classmethod
    def of(
        cls,
        number: int,
        start_ns: int,
        end_ns: int,
        columns: Mapping[str, Rows],
        *,
        texts: tuple[str, ...] = ("",),
        is_last: bool = False,
        cost: Cost = NO_COST,
    ) -> Window:
        """Makes a window of columns by name; those that are not given are empty."""
        rows = {
            name: columns[name] if name in columns else np.zeros(0, column.dtype)
            for name, column in COLUMNS.items()
        }
        return cls(number, start_ns, end_ns, is_last, texts, cost, **rows)

    def rows(self, column: str) -> Rows:
        """Returns a column by its name in `COLUMNS`."""
        found: Rows = getattr(self, column)
        return found


class FactsTaker(Protocol):
    """Where facts go that hold for more than one window."""

    def text(self, words: str) -> int:
        """Returns what stands for a text in the rows that are added here."""

    def define(self, column: str, rows: Rows, parts: Rows | None = None) -> None:
        """Adds facts, or what they have become.

        Args:
            column: Its name.
            rows: Of it.
            parts: For stacks and chains, the addresses or frames that `first` counts in.
        """


class OpenWindow(FactsTaker, Protocol):
    """Where those who learn something of a recording put it, for the window that is open."""

    def define(
        self, column: str, rows: Rows, parts: Rows | None = None, *, is_late: bool = False
    ) -> None:
        """Adds facts, or what they have become.

        Args:
            column, rows, parts: As `FactsTaker.define` has them.
            is_late: Earlier windows mentioned them as lost, or as less than is known now: they are
                given although no row does.
        """

    def is_kept(self, column: str, number: int) -> bool:
        """Whether a stack or a chain (the column) was defined, and is still known."""

    def stack(self, stack: int) -> tuple[np.void, npt.NDArray[np.uint64]] | None:
        """Returns the STACK_DTYPE row and the addresses of a stack; None for one not known."""

    def user_addresses(self, stack: int) -> npt.NDArray[np.uint64]:
        """Returns the user half of a stack that was defined, leaf first; none for another."""

    def drop(self, column: str, numbers: Collection[int]) -> None:
        """Drops facts of windows before, by number: no row or fact will refer to them again."""

    def add(self, column: str, rows: Rows) -> None:
        """Adds measures or events."""

    def lose(self, kind: LossKind, count: int, thread_ns: int = 0) -> None:
        """Counts a loss, and the thread time that is missing for it."""


def lengths(column: str, rows: Rows) -> npt.NDArray[np.int64]:
    """Returns how much of its column of parts each row owns, shape (rows,)."""
    found = np.zeros(len(rows), np.int64)
    for name in COLUMNS[column].depths:
        found += rows[name]
    return found


def check(window: Window) -> None:
    """Checks that a window keeps to this module's promises.

    Raises:
        BadWindow: It does not.
    """
    if not 0 <= window.start_ns <= window.end_ns:
        raise BadWindow(f"ends at {window.end_ns} ns, begins at {window.start_ns}")
    if window.texts[:1] != ("",):
        raise BadWindow("the first text is not empty")
    for name, column in COLUMNS.items():
        rows = window.rows(name)
        if rows.dtype != column.dtype or rows.ndim != 1:
            raise BadWindow(f"{name}: {rows.dtype} of {rows.ndim} dimensions")
        _check_references(window, name)
        keys = rows[column.key[0]] if len(column.key) == 1 else key_numbers(rows, column)
        if column.key and len(np.unique(keys)) != len(rows):
            raise BadWindow(f"{name}: several rows of one key")
        if column.parts:
            ends = rows["first"].astype(np.int64) + lengths(name, rows)
            if len(rows) and int(ends.max()) > len(window.rows(column.parts)):
                raise BadWindow(f"{name}: a row goes past the end of {column.parts}")
    _check_values(window)


def _check_references(window: Window, name: str) -> None:
    rows, column = window.rows(name), COLUMNS[name]
    for text in column.texts:
        if len(rows) and int(rows[text].max()) >= len(window.texts):
            raise BadWindow(f"{name}: {text} is no text")
    for reference, other in column.refers.items():
        known = window.rows(other)[COLUMNS[other].key[0]]
        values = rows[reference]
        if other not in _ALWAYS_KNOWN:
            values = values[values != _NOTHING.get(other, NONE)]
        missing = values[~np.isin(values, known)]
        if len(missing):
            raise BadWindow(f"{name}: {reference} {missing[0]} is not in {other}")


def _check_values(window: Window) -> None:
    known: dict[tuple[str, str], Iterable[int]] = {
        ("stacks", "stop_reason"): StopReason,
        ("stacks", "gil"): range(_GIL_VALUES),
        ("samples", "kind"): SampleClass,
        ("functions", "operation"): Operation,
        ("devices", "tier"): Tier,
        ("calls", "direction"): Direction,
        ("call_events", "direction"): Direction,
        ("device_samples", "timing"): Timing,
    }
    for (name, value), values in known.items():
        if not np.isin(window.rows(name)[value], [int(v) for v in values]).all():
            raise BadWindow(f"{name}: an unknown {value}")
    for name, last in (
        ("launches", "last_enqueued_ns"),
        ("queue_waits", "end_ns"),
        ("device_samples", "end_ns"),
        ("kernel_times", "end_ns"),
        ("device_readings", "end_ns"),
    ):
        if (window.rows(name)[last] > window.end_ns).any():
            raise BadWindow(f"{name}: {last} is after the window's end")
    readings = window.device_readings
    if (readings["begin_ns"] > readings["end_ns"]).any():
        raise BadWindow("device_readings: one ends before it begins")
    busy, used = readings["busy_permille"], readings["used_bytes"]
    if ((busy > MOST_PERMILLE) & (busy != BUSY_UNKNOWN)).any():
        raise BadWindow("device_readings: busier than all the time")
    if ((used > readings["total_bytes"]) & (used != NO_SIZE)).any():
        raise BadWindow("device_readings: more memory in use than there is")


def check_wall(window: Window) -> None:
    """Checks that for each thread time on and off CPU is all the time that it existed.

    Apart from `check`, since a kernel that hides switches breaks it, and what it tells otherwise is
    as good as ever.

    Raises:
        BadWindow: It is not.
    """
    off = window.samples[window.samples["kind"] != SampleClass.ON_CPU]
    order = np.argsort(window.thread_times["thread"])
    threads = window.thread_times["thread"][order]
    at = np.searchsorted(threads, off["thread"])
    if len(off) and not np.isin(off["thread"], threads).all():
        raise BadWindow("thread_times: a thread with time off CPU is not there")
    whole_ns = window.thread_times["on_cpu_ns"][order].astype(np.int64)
    np.add.at(whole_ns, at, off["weight_ns"].astype(np.int64))
    observed_ns = window.thread_times["observed_ns"][order].astype(np.int64)
    wrong = np.abs(whole_ns - observed_ns) > _WALL_REL * observed_ns + _WALL_SLACK_NS
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise BadWindow(
            f"thread_times: thread {threads[first]} was {whole_ns[first]} ns on and off CPU, of"
            f" {observed_ns[first]}"
        )


def concatenate(windows: Sequence[Window]) -> Window:
    """Returns what one long window would have held.

    Args:
        windows: At least one, each beginning where the one before ended.

    Raises:
        BadWindow: One is missing between them.
    """
    first, last = windows[0], windows[-1]
    for one, following in itertools.pairwise(windows):
        if following.start_ns != one.end_ns:
            raise BadWindow(f"nothing tells of {one.end_ns} to {following.start_ns} ns")
    texts = _Texts()
    translated = [texts.translation(window.texts) for window in windows]
    columns: dict[str, Rows] = {}
    for name, column in COLUMNS.items():
        if name in _PARTS:
            continue
        parts = [
            with_texts(w.rows(name), column, t) for w, t in zip(windows, translated, strict=True)
        ]
        if column.parts:
            columns[name], columns[column.parts] = _newest_with_parts(name, parts, windows)
        elif column.adds:
            columns[name] = added_up(join_rows(parts, column.dtype), column)
        elif column.key:
            columns[name] = newest(join_rows(parts, column.dtype), column)
        else:
            columns[name] = join_rows(parts, column.dtype)
    columns["launches"] = join_runs(columns["launches"], columns["queue_waits"])
    return Window.of(
        first.number,
        first.start_ns,
        last.end_ns,
        columns,
        is_last=last.is_last,
        texts=tuple(texts.index),
        cost=Cost(
            sum(window.cost.cpu_ns for window in windows),
            sum(window.cost.bpf_ns for window in windows),
            max(window.cost.rss_bytes for window in windows),
        ),
    )


_PARTS = frozenset(column.parts for column in COLUMNS.values())


class _Texts:
    """Texts of several windows, each once."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {"": 0}

    def translation(self, texts: Sequence[str]) -> npt.NDArray[np.uint32]:
        """Returns the index here of each text of a window."""
        found = (self.index.setdefault(text, len(self.index)) for text in texts)
        return np.fromiter(found, np.uint32, len(texts))


def with_texts(rows: Rows, column: Column, translation: npt.NDArray[np.uint32]) -> Rows:
    """Returns rows with other indexes of texts: `translation[old]` is the new one."""
    if not column.texts or not len(rows):
        return rows
    copy = rows.copy()
    for name in column.texts:
        copy[name] = translation[rows[name]]
    return copy


def key_numbers(rows: Rows, column: Column) -> npt.NDArray[np.int64]:
    """Returns a number for each row: the same for rows of one key, and different for others.

    numpy compares rows of several fields a hundred times as slowly as it does numbers.
    """
    numbers = np.zeros(len(rows), np.int64)
    distinct = 1
    for name in column.key:
        values, which = np.unique(rows[name], return_inverse=True)
        numbers = numbers * len(values) + which
        distinct *= len(values)
        if distinct > len(rows):
            values, numbers = np.unique(numbers, return_inverse=True)
            distinct = len(values)
    return numbers


def _newest_at(rows: Rows, column: Column) -> npt.NDArray[np.int64]:
    """Returns where the newest row of each key is, in the order in which the keys came."""
    keys = key_numbers(rows, column)
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    newest = np.zeros(len(first), np.int64)
    np.maximum.at(newest, which, np.arange(len(rows)))
    found: npt.NDArray[np.int64] = newest[np.argsort(first)]
    return found


def newest(rows: Rows, column: Column) -> Rows:
    """Returns the newest row of each key, in the order in which the keys came."""
    return take_rows(rows, _newest_at(rows, column))


def _newest_with_parts(
    name: str, parts: Sequence[Rows], windows: Sequence[Window]
) -> tuple[Rows, Rows]:
    column = COLUMNS[name]
    moved, at = [], 0
    for rows, window in zip(parts, windows, strict=True):
        copy = rows.copy()
        copy["first"] += np.uint32(at)
        at += len(window.rows(column.parts))
        moved.append(copy)
    rows = newest(join_rows(moved, column.dtype), column)
    owned = [window.rows(column.parts) for window in windows]
    return packed(name, rows, join_rows(owned, COLUMNS[column.parts].dtype))


def packed(name: str, rows: Rows, owned: Rows) -> tuple[Rows, Rows]:
    """Returns rows, and of what they own only what they own, in their order."""
    count = lengths(name, rows)
    ends = np.cumsum(count)
    inside = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - count, count)
    kept = take_rows(owned, np.repeat(rows["first"].astype(np.int64), count) + inside)
    moved = rows.copy()
    moved["first"] = ends - count
    return moved, kept


def added_up(rows: Rows, column: Column) -> Rows:
    """Returns one row of each key with its measures added up, in the order of the keys' coming."""
    keys = key_numbers(rows, column)
    keys, first, which = np.unique(keys, return_index=True, return_inverse=True)
    found = take_rows(rows, first)
    for name in column.adds:
        total = np.zeros(len(keys), np.uint64)
        np.add.at(total, which, rows[name])
        found[name] = total
    return take_rows(found, np.argsort(first))


# What launches of one run have in common.
_RUN = ("process", "queue", "thread", "stack", "function", "kernel")


def join_runs(launches: Rows, waits: Rows) -> Rows:
    """Returns launches with those joined that make one run, as LAUNCH_DTYPE says.

    Args:
        launches: Of all queues, in any order; single launches, or runs that a boundary has cut.
        waits: All QUEUE_WAIT_DTYPE rows of the same time.
    """
    returned: dict[tuple[int, int], list[int]] = {}
    for process, queue, end_ns in waits[["process", "queue", "end_ns"]].tolist():
        returned.setdefault((process, queue), []).append(end_ns)
    for ends in returned.values():
        ends.sort()
    open_runs: dict[tuple[int, int], np.void] = {}
    found: list[np.void] = []
    for launch in launches[np.argsort(launches["enqueued_ns"], kind="stable")]:
        queue = (int(launch["process"]), int(launch["queue"]))
        run = open_runs.get(queue)
        of_queue, of_all = returned.get(queue, []), returned.get((queue[0], 0), [])
        if run is not None and _continues(run, launch, (of_queue, of_all)):
            run["last_enqueued_ns"] = launch["last_enqueued_ns"]
            run["count"] += launch["count"]
            run["work"] += launch["work"]
        else:
            open_runs[queue] = launch.copy()
            found.append(open_runs[queue])
    return np.array(found, LAUNCH_DTYPE)


def _continues(run: np.void, launch: np.void, returned: Iterable[Sequence[int]]) -> bool:
    if any(run[name] != launch[name] for name in _RUN):
        return False
    is_numbered = bool(run["launch_id"] or launch["launch_id"])
    follows = run["launch_id"] and launch["launch_id"] == run["launch_id"] + run["count"]
    if is_numbered and not (follows and run["count"] and launch["count"]):
        return False
    after_ns, until_ns = int(run["last_enqueued_ns"]), int(launch["enqueued_ns"])
    return all(bisect_right(ends, after_ns) == bisect_right(ends, until_ns) for ends in returned)
