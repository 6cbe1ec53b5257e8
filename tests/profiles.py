# SPDX-License-Identifier: Apache-2.0
"""Profiles for tests: small literal ones, hostile ones, and a large generated one.

A test writes its stacks the way it would read them in folded text, and gets a whole Profile:

    profile_of(Sample("main;work;[k]sys_read", 2 * MS, SampleClass.BLOCKED))

Nothing here is random: the large profile comes from arithmetic on the stack's number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from aiflame.agent.model.profile import (
    FRAME_DTYPE,
    NS_PER_S,
    SAMPLE_DTYPE,
    SPAN_DTYPE,
    WAIT_DTYPE,
    Binary,
    FrameKind,
    Function,
    GilState,
    Loss,
    Process,
    Profile,
    Recording,
    SampleClass,
    Stacks,
    StopReason,
    Thread,
)

MS = 1_000_000

RECORDING = Recording(
    aiflame_version="0.1.0",
    started_unix_ns=1_795_000_000_000_000_000,
    duration_ns=2_000 * MS,
    period_ns=10 * MS,
    command="aiflame record -p 100",
    target="server (pid 100)",
    recorder_cpu_ns=15 * MS,
    recorder_peak_rss_bytes=48 << 20,
    facts=(("host", "testhost"), ("kernel", "6.8.0")),
)

_PREFIXES = {
    "[k]": FrameKind.KERNEL,
    "[p]": FrameKind.PYTHON,
    "[i]": FrameKind.INTERPRETER,
    "[m]": FrameKind.MARKER,
}
_BINARIES = {FrameKind.NATIVE: 0, FrameKind.KERNEL: 1, FrameKind.INTERPRETER: 0}


@dataclass(frozen=True, slots=True)
class Sample:
    """One literal row of a profile.

    `stack` is root first, joined by ";"; a frame beginning with "[k]" is the kernel's, one with
    "[p]" is Python's, one with "[i]" the interpreter's, one with "[m]" a marker, and one ending in
    ":12" executes line 12 of its file, which "name@file:12" gives. `frames` replaces
    `stack` where names hold ";" themselves. `thread` counts through `THREADS`. `first_s` is the
    second that the time was in, the first of `seconds` that share it.
    """

    stack: str
    ns: int
    klass: SampleClass = SampleClass.ON_CPU
    thread: int = 0
    end: StopReason = StopReason.ROOTED
    count: int = 1
    frames: tuple[str, ...] | None = None
    gil: GilState = GilState.NO_PYTHON
    first_s: int | None = None
    seconds: int = 1


def process(pid: int = 100, name: str = "server") -> Process:
    """A process that was there before the recording and still is after it."""
    return Process(pid, 1, name, f"/opt/{name}", f"/opt/{name} --fast", "/", "", 0, None)


PROCESSES = (process(), process(200, "client"))
THREADS = (
    Thread(0, 100, "server", 40 * MS, 2_000 * MS),
    Thread(0, 101, "worker", 30 * MS, 2_000 * MS),
    Thread(1, 200, "client", 20 * MS, 2_000 * MS),
)


class _Builder:
    """Collects functions, frames and stacks, each kept once."""

    def __init__(self) -> None:
        self.functions: dict[Function, int] = {}
        self.frames: dict[tuple[int, int], int] = {}
        self.stacks: dict[tuple[tuple[int, ...], StopReason, GilState], int] = {}

    def frame(self, text: str) -> int:
        kind = _PREFIXES.get(text[:3], FrameKind.NATIVE)
        name = text[3:] if text[:3] in _PREFIXES else text
        line = 0
        stem, colon, digits = name.rpartition(":")
        if colon and digits.isdigit() and not stem.endswith(":"):
            name, line = stem, int(digits)
        suffix = ".py" if kind is FrameKind.PYTHON else ".c"
        name, at, file = name.partition("@") if kind is FrameKind.PYTHON else (name, "", "")
        file = file if at else f"src/{name}{suffix}" if line else ""
        function = Function(kind, name, _BINARIES.get(kind), file)
        identity = self.functions.setdefault(function, len(self.functions))
        return self.frames.setdefault((identity, line), len(self.frames))

    def stack(self, sample: Sample) -> int:
        names: Iterable[str] = sample.frames if sample.frames is not None else ()
        if sample.frames is None and sample.stack:
            names = sample.stack.split(";")
        key = (tuple(self.frame(name) for name in names), sample.end, sample.gil)
        return self.stacks.setdefault(key, len(self.stacks))


def profile_of(
    *samples: Sample,
    losses: tuple[Loss, ...] = (),
    recording: Recording = RECORDING,
    processes: tuple[Process, ...] = PROCESSES,
    threads: tuple[Thread, ...] = THREADS,
) -> Profile:
    """Make a profile of literal samples; functions and stacks are numbered as they first occur."""
    builder = _Builder()
    rows = [(builder.stack(s), s.thread, s.klass, s.count, s.ns) for s in samples]
    spans = [
        (i, s.first_s, s.seconds, s.count if s.seconds == 1 else 0, s.ns // s.seconds)
        for i, s in enumerate(samples)
        if s.first_s is not None
    ]
    paths = [path for path, _, _ in builder.stacks]
    return Profile(
        recording=recording,
        processes=processes,
        threads=threads,
        binaries=(Binary("/opt/server", "ab" * 20), Binary("[kernel.kallsyms]", "")),
        functions=tuple(builder.functions),
        frames=np.array(
            [
                (function, line, 0x1000 + 16 * i, False)
                for i, (function, line) in enumerate(builder.frames)
            ],
            dtype=FRAME_DTYPE,
        ),
        stacks=Stacks(
            np.cumsum([0, *(len(path) for path in paths)], dtype=np.uint64),
            np.array([frame for path in paths for frame in path], dtype=np.uint32),
            np.array([end for _, end, _ in builder.stacks], dtype=np.uint8),
            np.array([gil for _, _, gil in builder.stacks], dtype=np.uint8),
        ),
        samples=np.array(rows, dtype=SAMPLE_DTYPE),
        waits=np.zeros(0, dtype=WAIT_DTYPE),
        losses=losses,
        spans=np.array(spans, dtype=SPAN_DTYPE),
    )


def small_profile() -> Profile:
    """Two processes, three threads, every kind of frame, every class of time, and a loss."""
    return profile_of(
        Sample("main:10;parse:21", 300 * MS, count=30),
        Sample("main:10;parse:25", 100 * MS, count=10),
        Sample("main:11;net::Poller::run;[k]do_syscall_64;[k]ep_poll", 20 * MS, count=2),
        Sample(
            "main:11;net::Poller::run;[k]do_syscall_64;[k]ep_poll",
            400 * MS,
            SampleClass.BLOCKED,
            count=40,
        ),
        Sample("start_thread;[p]train:7;[p]step:31;matmul", 500 * MS, thread=1, count=50),
        Sample(
            "start_thread;[p]train:7;[p]step:33;pthread_mutex_lock;[k]futex_wait",
            250 * MS,
            SampleClass.BLOCKED,
            thread=1,
            count=5,
        ),
        Sample(
            "start_thread;[p]train:7;[p]step:31;matmul",
            30 * MS,
            SampleClass.PREEMPTED,
            thread=1,
            count=3,
        ),
        Sample(
            "start_thread;[p]train:7;[p]step:33;pthread_mutex_lock;[k]futex_wait",
            20 * MS,
            SampleClass.WAITING_TO_RUN,
            thread=1,
            count=5,
        ),
        Sample("recv", 80 * MS, thread=2, end=StopReason.NO_FRAME_POINTER, count=8),
        Sample("[k]kthread", 40 * MS, thread=2, end=StopReason.KERNEL_ONLY, count=4),
        losses=(
            Loss("stacks_full", 3, "samples whose stack did not fit; raise --stack-storage-size"),
        ),
    )


_RUN = (
    "_start;[i]_PyEval_EvalFrameDefault;[p]_run_code@<frozen runpy>:88;[p]<module>@/app/train.py:40"
)
_CALL = "[i]_PyObject_Vectorcall;[i]_PyEval_EvalFrameDefault"
_IMPORT = "[p]_find_and_load@<frozen importlib._bootstrap>:1360"


def python_profile() -> Profile:
    """A Python program: a thread that computes, one that waits for its turn, and one without."""
    forward = f"{_RUN};[p]Net.forward@/app/train.py:12;at::matmul"
    waiting = f"clone3;{_CALL};[p]Pool.work@/app/pool.py:7;take_gil;[k]futex_wait"
    sleeping = f"clone3;{_CALL};[p]Pool.work@/app/pool.py:9;time_sleep;[k]hrtimer_nanosleep"
    return profile_of(
        Sample(forward, 500 * MS, count=50, gil=GilState.RELEASED),
        Sample(f"{_RUN};[p]Net.forward@/app/train.py:13", 200 * MS, count=20, gil=GilState.HELD),
        Sample(f"{_RUN};{_IMPORT};[p]<module>@/app/lib.py:1", 40 * MS, count=4, gil=GilState.HELD),
        Sample(
            f"{_RUN};[p]fib@/app/lib.py:5;{_CALL};[p]fib@/app/lib.py:5;[p]fib@/app/lib.py:4",
            60 * MS,
            count=6,
            gil=GilState.HELD,
        ),
        Sample(waiting, 300 * MS, SampleClass.BLOCKED, 1, count=3, gil=GilState.WAITING),
        Sample(sleeping, 700 * MS, SampleClass.BLOCKED, 1, count=7, gil=GilState.RELEASED),
        Sample("clone3;gomp_thread_start;gemm", 90 * MS, thread=2, count=9),
    )


def timed_profile() -> Profile:
    """Five seconds and a half: busy in the first, asleep for three, busy again at the end."""
    profile = profile_of(
        Sample("main:10;load", 700 * MS, count=70, first_s=0),
        Sample("main:11;poll;[k]ep_poll", 3_000 * MS, SampleClass.BLOCKED, first_s=1, seconds=3),
        Sample("main:11;poll;[k]ep_poll", 20 * MS, SampleClass.WAITING_TO_RUN, first_s=4),
        Sample("main:12;save", 300 * MS, count=30, first_s=4),
        Sample("start_thread;[p]step:31", 400 * MS, thread=1, count=40, first_s=5),
    )
    return replace(profile, recording=replace(RECORDING, duration_ns=5_500 * MS))


def empty_profile() -> Profile:
    """A recording in which nothing ran."""
    return profile_of()


HOSTILE_NAMES = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]>",
    "a\"b'c`d&amp;e&f",
    "semi;colon",
    "new\nline\r\ttab\x00nul\x1b[31m",
    "x" * 10_000,
    "\u202egnp.exe\u2069",
    "\u05d0\u05d1\u05d2",
    "lone\ud800surrogate\udcff",
    "\ufffe\uffff",
    "line\u2028separator",
    "__proto__",
    "",
)


def hostile_profile() -> Profile:
    """Every hostile name as a function, a process and a thread."""
    processes = tuple(process(300 + i, name) for i, name in enumerate(HOSTILE_NAMES))
    threads = tuple(Thread(i, 300 + i, name, MS, MS) for i, name in enumerate(HOSTILE_NAMES))
    samples = [
        Sample("", (i + 1) * MS, thread=i, frames=("main", name, "leaf"))
        for i, name in enumerate(HOSTILE_NAMES)
    ]
    return profile_of(
        *samples,
        processes=processes,
        threads=threads,
        recording=replace(RECORDING, command="x </script><b>", target="<i>&"),
        losses=(Loss("<u>loss</u>", 1, "</script>"),),
    )


def deep_profile(depth: int = 10_000) -> Profile:
    """One stack of `depth` frames, each a function of its own."""
    return profile_of(Sample("", 10 * MS, frames=tuple(f"f{i}" for i in range(depth))))


_LARGE_FUNCTIONS = 20_000  # besides those that spell out a stack's number
_LARGE_SECONDS = 3_600
_LARGE_DIGIT = 400  # the last frame is the number's last digit in this base, of at most 1,000 * 400


def large_profile(stacks: int = 100_000, depth: int = 40, samples: int = 1_000_000) -> Profile:
    """A profile of `samples` samples in `stacks` distinct stacks, each `depth` frames deep.

    Stacks branch like those of a program do: little near the root, much near the leaf. The digits
    of a stack's number choose its last frames, so that no two stacks are alike. Each sample is a
    row of its own as far as threads (64, in four processes) allow, and in a second of its own of an
    hour.
    """
    kinds = (FrameKind.NATIVE, FrameKind.PYTHON, FrameKind.NATIVE, FrameKind.KERNEL)
    names = ("lib::Worker<int, float>::call_{}", "train_step_{}", "compute_block_{}", "do_sys_{}")
    n_functions = _LARGE_FUNCTIONS + 1_000 + _LARGE_DIGIT
    frames = np.zeros(n_functions, dtype=FRAME_DTYPE)
    frames["function"] = np.arange(n_functions)
    frames["line"] = np.arange(n_functions) % 900 + 1
    frames["address"] = np.arange(n_functions) * 64
    rows = _large_samples(stacks, samples)
    return Profile(
        recording=replace(RECORDING, duration_ns=_LARGE_SECONDS * NS_PER_S),
        processes=tuple(process(1_000 + i, f"job{i}") for i in range(4)),
        threads=tuple(
            Thread(i // 16, 1_000 + i, f"thread{i}", 10 * MS, 2_000 * MS) for i in range(64)
        ),
        binaries=tuple(Binary(f"/usr/lib/lib{i}.so", f"{i:040x}") for i in range(3)),
        functions=tuple(
            Function(kinds[i % 4], names[i % 4].format(i), i % 3, f"src/module_{i % 50}.cc")
            for i in range(n_functions)
        ),
        frames=frames,
        stacks=_large_stacks(stacks, depth),
        samples=rows,
        waits=np.zeros(0, dtype=WAIT_DTYPE),
        spans=_large_spans(rows),
    )


def _large_spans(rows: np.ndarray) -> np.ndarray:
    spans = np.zeros(len(rows), dtype=SPAN_DTYPE)
    spans["sample"] = np.arange(len(rows))
    spans["first_s"] = spans["sample"] * np.int64(_LARGE_SECONDS) // max(1, len(rows))
    spans["seconds"] = 1
    spans["count"], spans["ns"] = rows["count"], rows["ns"]
    return spans


def _large_stacks(stacks: int, depth: int) -> Stacks:
    number = np.arange(stacks, dtype=np.int64)
    functions = np.empty((stacks, depth), dtype=np.uint32)
    for level in range(depth):
        # The quotient falls from a few values at the root to the whole number at the leaf.
        shift = max(1, int(stacks ** (1 - (level + 1) / depth)))
        functions[:, level] = ((number // shift) * 7_919 + level * 104_729) % _LARGE_FUNCTIONS
    functions[:, -2] = _LARGE_FUNCTIONS + number // _LARGE_DIGIT
    functions[:, -1] = _LARGE_FUNCTIONS + 1_000 + number % _LARGE_DIGIT
    offsets = np.arange(stacks + 1, dtype=np.uint64) * np.uint64(depth)
    return Stacks(offsets, functions.ravel(), np.zeros(stacks, dtype=np.uint8))


def _large_samples(stacks: int, samples: int) -> np.ndarray:
    row = np.arange(samples, dtype=np.int64)
    stack = row % stacks
    rows = np.zeros(samples, dtype=SAMPLE_DTYPE)
    rows["stack"] = stack
    # A stack belongs to one process (addresses do), whose sixteen threads share it.
    rows["thread"] = stack % 4 * 16 + (row // stacks) % 16
    rows["klass"] = stack // 4 % 4
    rows["count"] = 1
    rows["ns"] = np.where(rows["klass"] == 0, 10 * MS, (row * 7_919) % (40 * MS) + 1)
    return rows
