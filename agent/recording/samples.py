# SPDX-License-Identifier: Apache-2.0
"""Turns the kernel's sums of thread time, and its long waits, into rows of windows."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import COLUMNS, NO_CHAIN, NONE, OpenWindow, rows_of
from aiflame.agent.processes.table import ProcessImage, ProcessTable, ThreadInfo
from aiflame.agent.recording.stacks import (
    ENTERED_STACKS,
    NOT_RUN_STACKS,
    NOT_SAMPLED_STACKS,
)

# Of stacks that are none, by the kernel half's id: ids that windows have, and why.
_WITHOUT = {
    abi.NOT_RUN_STACK: (NOT_RUN_STACKS, StopReason.NOT_RUN_YET),
    abi.NOT_SAMPLED_STACK: (NOT_SAMPLED_STACKS, StopReason.NOT_SAMPLED),
}


class ReplacesStacks(Protocol):
    """Whoever knows better stacks of waits than the kernel half does; CutSleeps is one."""

    def take_wait(self, event: np.void) -> int:
        """Takes note of a long wait, by its WAIT_EVENT_DTYPE; returns what its stack is now."""


class Samples:
    """Takes in sums and waits, and keeps the totals for the progress line.

    Args:
        window: Where they go.
        table: Process table.
        sleeps: Has stacks of waits that were walked again.

    Attributes:
        count: On-CPU samples so far.
        ns_by_class: Thread time so far, by SampleClass.
        made: Ids of the stacks of threads that were entered, and that a sample or wait refers to.
    """

    def __init__(self, window: OpenWindow, table: ProcessTable, sleeps: ReplacesStacks) -> None:
        self._window = window
        self._table = table
        self._sleeps = sleeps
        self.count = 0
        self.ns_by_class = [0, 0, 0, 0]
        self.made: set[int] = set()

    def add(self, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Takes in sums of the open window."""
        rows = []
        without: dict[int, tuple[Any, ...]] = {}
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            stack, image_id, tgid, tid, sample_class, _ = key
            count, ns = value
            image = self._table.image(tgid, image_id)
            thread = self._table.thread(image, tid)
            if stack in _WITHOUT:
                stack = _stand_in(stack, image, without)
            rows.append((stack, thread.index, sample_class, count, ns))
            self.ns_by_class[sample_class] += ns
            if sample_class == SampleClass.ON_CPU:
                self.count += count
        if without:
            self._define(without)
        self._window.add("samples", np.array(rows, COLUMNS["samples"].dtype))
        self._note_made(keys["stack"])

    def _define(self, without: dict[int, tuple[Any, ...]]) -> None:
        """Tells windows of stacks that are none, by `_stand_in`."""
        rows = np.array([*without.values()], COLUMNS["stacks"].dtype)
        self._window.define("stacks", rows, np.zeros(0, COLUMNS["addresses"].dtype))

    def _note_made(self, stacks: npt.NDArray[np.uint64]) -> None:
        self.made.update(stacks[(stacks >> np.uint64(30)) == ENTERED_STACKS >> 30].tolist())

    def add_thread_time(self, thread: ThreadInfo, on_cpu_ns: int, observed_ns: int) -> None:
        """Takes in how long a thread was on a CPU, and how long it was observed."""
        times = (thread.index, on_cpu_ns, observed_ns)
        self._window.add("thread_times", rows_of("thread_times", times))

    def add_wait(self, event: Any, *, is_open: bool = False) -> None:
        """Takes in a long wait from its ring-buffer event."""
        image = self._table.image(int(event["tgid"]), int(event["image"]))
        thread = self._table.thread(image, int(event["tid"]))
        stack, without = self._sleeps.take_wait(event), dict[int, tuple[Any, ...]]()
        if stack in _WITHOUT:
            stack = _stand_in(stack, image, without)
            self._define(without)
        start_ns = max(int(event["start_ns"]) - self._table.start_ns, 0)
        times = (start_ns, int(event["blocked_ns"]), int(event["runnable_ns"]))
        row = (stack, thread.index, *times, is_open)
        self._window.add("waits", rows_of("waits", row))
        self._note_made(np.array([stack], np.uint64))


def _stand_in(stack: int, image: ProcessImage, without: dict[int, tuple[Any, ...]]) -> int:
    """Returns the id that windows have of a stack that is none.

    Args:
        stack: One of `_WITHOUT`.
        image: Whose it is.
        without: Gets its row, by the id.
    """
    first, end = _WITHOUT[stack]
    made = first + image.index
    without[made] = (made, NO_CHAIN, image.index, 0, 0, 0, int(end), 0, False, NONE, 0)
    return made


def open_parts(state: Any, end_ns: int) -> list[tuple[SampleClass, int]]:
    """Splits an interval that has not ended by class, as the kernel half would at its end.

    Args:
        state: A thread_state that is off the CPU.
        end_ns: When the recording ended, monotonic.
    """
    switched_ns, waking_ns = int(state["switched_ns"]), int(state["waking_ns"])
    if int(state["off_class"]) == SampleClass.PREEMPTED:
        return [(SampleClass.PREEMPTED, end_ns - switched_ns)]
    if not switched_ns <= waking_ns <= end_ns:
        waking_ns = end_ns
    parts = [
        (SampleClass.BLOCKED, waking_ns - switched_ns),
        (SampleClass.WAITING_TO_RUN, end_ns - waking_ns),
    ]
    return [(sample_class, ns) for sample_class, ns in parts if ns]


def read_counters(counters: Any, possible_cpus: int) -> dict[abi.Counter, int]:
    """Returns the counters that tell of no loss, each added up over the CPUs."""
    return {counter: _total(counters, counter, possible_cpus) for counter in abi.Counter}


def read_losses(counters: Any, possible_cpus: int) -> Counter[LossKind]:
    """Returns what the kernel half has lost so far."""
    return Counter(
        {kind: _total(counters, slot, possible_cpus) for kind, slot in abi.LOSS_SLOTS.items()}
    )


def _total(counters: Any, slot: int, possible_cpus: int) -> int:
    values = counters.lookup(slot.to_bytes(4, "little"), possible_cpus)
    return 0 if values is None else int(values.sum())
