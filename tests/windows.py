# SPDX-License-Identifier: Apache-2.0
"""Recordings of which everything is known, to be cut into windows anywhere.

Threads live in intervals on and off CPU, each in a stack; processes launch kernels and wait
for them; devices are sampled. Whatever has a time goes to the window of that time, clipped
at its boundaries, as the collector does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import Operation
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import (
    COLUMNS,
    NO_TIME,
    NONE,
    Cost,
    Timing,
    Window,
    rows_of,
)
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from aiflame.agent.sinks.jit_symbols import jit_window, with_jit_symbols

_END_NS = 10_000_000_000
_PERIOD_NS = 10_000_000

# What a recorder says of a recording.
FACTS: dict[str, str | int] = {
    "aiflame_version": "0",
    "started_unix_ns": 5,
    "period_ns": _PERIOD_NS,
    "command": "aiflame record",
    "target": "all",
}


@dataclass(frozen=True)
class Interval:
    """A stretch of a thread's life."""

    thread: int
    kind: SampleClass
    stack: int
    begin_ns: int
    end_ns: int


class RandomRecording:
    """A recording made of a seed."""

    def __init__(self, seed: int, bounds: Bounds | None = None) -> None:
        self._random = np.random.default_rng(seed)
        self._bounds = bounds or Bounds()
        draw = self._random.integers
        self._processes = int(draw(1, 4))
        self._process_of = draw(0, self._processes, int(draw(1, 8))).tolist()
        self._stacks = {
            (process, number): int(draw(1, 1 << 62))
            for process in range(self._processes)
            for number in range(int(draw(1, 6)))
        }
        self._contents = {
            stack: draw(1, 1 << 47, int(draw(1, 12))).tolist() for stack in self._stacks.values()
        }
        self._intervals = [
            interval for thread in range(len(self._process_of)) for interval in self._life(thread)
        ]
        self._launches = sorted(draw(0, _END_NS, int(draw(0, 40))).tolist())
        self._queue_waits = sorted(draw(0, _END_NS, int(draw(0, 6))).tolist())
        self._device_times = sorted(draw(0, _END_NS, int(draw(0, 40))).tolist())

    def _life(self, thread: int) -> list[Interval]:
        at_ns, end_ns = sorted(self._random.integers(0, _END_NS, 2).tolist())
        process = self._process_of[thread]
        stacks = [stack for (owner, _), stack in self._stacks.items() if owner == process]
        found = []
        while at_ns < end_ns:
            until_ns = min(at_ns + int(self._random.integers(1, 2_000_000_000)), end_ns)
            kind = SampleClass(int(self._random.integers(0, 4)))
            stack = stacks[int(self._random.integers(0, len(stacks)))]
            found.append(Interval(thread, kind, stack, at_ns, until_ns))
            at_ns = until_ns
        return found

    def windows(self, count: int) -> list[Window]:
        """Cuts the recording at random boundaries."""
        if not count:
            return []
        inner = self._random.choice(np.arange(1, _END_NS, 1_000_003), count - 1, replace=False)
        return self.cut(sorted(inner.tolist()))

    def cut(self, boundaries: list[int]) -> list[Window]:
        """Cuts the recording at given boundaries, its end aside."""
        builder = WindowBuilder(self._bounds)
        found = []
        begin_ns = 0
        for end_ns in [*boundaries, _END_NS]:
            self._define(builder, begin_ns)
            self._fill(builder, begin_ns, end_ns)
            cost = Cost(end_ns - begin_ns, 1, 1 << 20)
            found.append(builder.close(end_ns, is_last=end_ns == _END_NS, cost=cost))
            begin_ns = end_ns
        names = [jit_window(window, _jit_symbols(window)) for window in found]
        return [*with_jit_symbols(iter(found), iter(names))]

    def repeated(self, count: int) -> list[Window]:
        """Returns windows in which nothing is new after the first."""
        builder = WindowBuilder(self._bounds)
        self._define(builder, 0)
        found = []
        for number in range(count):
            for thread, process in enumerate(self._process_of):
                stack = self._stacks[process, 0]
                builder.add("samples", rows_of("samples", (stack, thread, 0, 1, number + 1)))
            found.append(builder.close((number + 1) * 1_000_000_000))
        return found

    def _define(self, builder: WindowBuilder, begin_ns: int) -> None:
        """Says what is known: all at the start, but for what a witness sees later."""
        if begin_ns:
            return
        text = builder.text
        builder.define("cgroups", rows_of("cgroups", (0, 77, text("/x.slice"), 0, 0, text("x"))))
        builder.define("binaries", rows_of("binaries", (0, text("/lib/\udcff.so"), text("abc"))))
        builder.define(
            "devices", rows_of("devices", (0, text("opencl"), text("PoCL"), 2, 0, 0, 10))
        )
        builder.define("reasons", rows_of("reasons", (0, text("opencl"), text("memory"))))
        for number, (name, operation) in enumerate(
            (("launch", Operation.LAUNCH), ("finish", Operation.SYNCHRONIZE))
        ):
            row = (number, text("opencl"), text(name), operation)
            builder.define("functions", rows_of("functions", row))
        for process in range(self._processes):
            name = text(f"process {process}")
            row = (process, 100 + process, 1, 0, 5, 0, NO_TIME, 0, name, 0, name)
            builder.define("processes", rows_of("processes", row))
            builder.define("mappings", rows_of("mappings", (process, 0, 4096, 8192, 0, 0)))
            builder.define("code_objects", rows_of("code_objects", (process, 9, name, 0, 3)))
            builder.define("code_lines", rows_of("code_lines", (process, 9, 2, 4)))
            builder.define("kernels", rows_of("kernels", (process, process, 0, name, 0)))
            builder.define("codes", rows_of("codes", (process, process, 0)))
            frames = rows_of("chain_frames", (9, 2, True), (9, 4, False))
            builder.define("chains", rows_of("chains", (process + 1, process, 0, 2, 0)), frames)
        for thread, process in enumerate(self._process_of):
            row = (thread, process, 1000 + thread, text(f"thread {thread}"))
            builder.define("threads", rows_of("threads", row))
        for (process, number), stack in self._stacks.items():
            content = self._contents[stack]
            chain = process + 1 if number % 2 else 0
            row = (stack, chain, process, 0, 0, len(content), StopReason.ROOTED, 0, False, NONE, 0)
            addresses = np.array(content, "<u8").view(COLUMNS["addresses"].dtype)
            builder.define("stacks", rows_of("stacks", row), addresses)

    def _fill(self, builder: WindowBuilder, begin_ns: int, end_ns: int) -> None:
        for interval in self._intervals:
            self._spend(builder, interval, begin_ns, end_ns)
        stack, thread = next(iter(self._stacks.values())), 0
        process = next(owner for (owner, _), s in self._stacks.items() if s == stack)
        for number, at_ns in enumerate(self._launches):
            if begin_ns <= at_ns < end_ns:
                times = (at_ns, at_ns)
                queue = 1 + number // 5 % 2
                row = (process, thread, queue, stack, 0, process, number + 1, *times, 1, 64)
                builder.add("launches", rows_of("launches", row))
                builder.add("calls", rows_of("calls", (1, thread, stack, 0, 1, 8)))
                row = (at_ns, stack, thread, 0, process, 0, queue, *(1, 2, 3), *(4, 5, 6), 0)
                builder.add("call_events", rows_of("call_events", row))
        for number, at_ns in enumerate(self._queue_waits):
            if begin_ns <= at_ns < end_ns:
                row = (process, number % 3, at_ns - 1, at_ns)
                builder.add("queue_waits", rows_of("queue_waits", row))
        for number, at_ns in enumerate(self._device_times):
            if begin_ns <= at_ns < end_ns:
                timing = Timing(number % 3)
                times = (NO_TIME, NO_TIME) if timing is Timing.NONE else (at_ns, at_ns)
                row = (0, process, number % 4, 0, 0, timing, *times, 1)
                builder.add("device_samples", rows_of("device_samples", row))
                row = (0, process, 1, 0, at_ns, at_ns, 1, 5, 0)
                builder.add("kernel_times", rows_of("kernel_times", row))
                row = (0, at_ns - 1, at_ns, number * 25, number, 80)
                builder.add("device_readings", rows_of("device_readings", row))
                builder.lose(LossKind.RING_FULL, 1, 3)

    def _spend(
        self, builder: WindowBuilder, interval: Interval, begin_ns: int, end_ns: int
    ) -> None:
        """Charges the part of an interval that lies inside a window."""
        first_ns, last_ns = max(interval.begin_ns, begin_ns), min(interval.end_ns, end_ns)
        if first_ns >= last_ns:
            return
        spent_ns = last_ns - first_ns
        is_on = interval.kind is SampleClass.ON_CPU
        row = (interval.thread, spent_ns if is_on else 0, spent_ns)
        builder.add("thread_times", rows_of("thread_times", row))
        key = (interval.stack, interval.thread, interval.kind)
        if is_on:
            ticks = last_ns // _PERIOD_NS - first_ns // _PERIOD_NS
            if ticks:
                builder.add("samples", rows_of("samples", (*key, ticks, ticks * _PERIOD_NS)))
            return
        ends_here = interval.end_ns <= end_ns
        builder.add("samples", rows_of("samples", (*key, int(ends_here), spent_ns)))
        if ends_here and interval.kind is SampleClass.BLOCKED:
            lasted_ns = interval.end_ns - interval.begin_ns
            row = (interval.stack, interval.thread, interval.begin_ns, lasted_ns, 0, False)
            builder.add("waits", rows_of("waits", row))


def content(window: Window) -> dict[str, list[tuple[Any, ...]]]:
    """Returns what a window says, without its texts' numbers and its rows' order."""
    found = {}
    for name, column in COLUMNS.items():
        if name in ("addresses", "chain_frames"):
            continue
        rows = []
        for row in window.rows(name):
            values = {field: row[field].item() for field in column.dtype.names or ()}
            values |= {text: window.texts[values[text]] for text in column.texts}
            if column.parts:
                first = values.pop("first")
                count = sum(values[depth] for depth in column.depths)
                values["parts"] = window.rows(column.parts)[first : first + count].tolist()
            rows.append(tuple(values.items()))
        found[name] = sorted(rows, key=repr)
    return found


def _jit_symbols(window: Window) -> dict[tuple[int, int], str]:
    return {(process, 7): f"jitted {process}" for process in window.processes["process"].tolist()}


def same_windows(one: Window, other: Window) -> None:
    """Asserts that two windows say the same."""
    for name in ("start_ns", "end_ns", "is_last"):
        assert getattr(one, name) == getattr(other, name)
    assert one.cost.cpu_ns == other.cost.cpu_ns
    found, expected = content(one), content(other)
    for name in expected:
        assert found[name] == expected[name], name
