# SPDX-License-Identifier: Apache-2.0
"""Turns the kernel's sums of thread time, and its long waits, into rows of windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import COLUMNS, NO_CHAIN, NONE, OpenWindow, rows_of
from aiflame.agent.processes.table import ProcessTable, ThreadInfo
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


class NumbersThreads(Protocol):
    """Whoever numbers threads in windows; ThreadTimes does."""

    def numbers(
        self, tids: npt.NDArray[Any], tgids: npt.NDArray[Any], images: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns the numbers of threads and of their processes."""


class Samples:
    """Takes in sums and waits, and keeps the totals for the progress line.

    Args:
        window: Where they go.
        table: Process table.
        threads: Numbers threads.
        sleeps: Has stacks of waits that were walked again.

    Attributes:
        count: On-CPU samples so far.
        ns_by_class: Thread time so far, by SampleClass.
        made: Ids of the stacks of threads that were entered, and that a sample or wait refers to.
    """

    def __init__(
        self,
        window: OpenWindow,
        table: ProcessTable,
        threads: NumbersThreads,
        sleeps: ReplacesStacks,
    ) -> None:
        self._window = window
        self._table = table
        self._threads = threads
        self._sleeps = sleeps
        self.count = 0
        self.ns_by_class = [0, 0, 0, 0]
        self.made: set[int] = set()

    def add(self, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Takes in sums of the open window."""
        rows = np.zeros(len(keys), COLUMNS["samples"].dtype)
        rows["stack"], rows["thread"] = self._known(keys, keys["stack"])
        rows["kind"], rows["weight_ns"] = keys["sample_class"], values["ns"]
        rows["count"] = values["count"]
        for sample_class in SampleClass:
            self.ns_by_class[sample_class] += int(values["ns"][rows["kind"] == sample_class].sum())
        self.count += int(values["count"][rows["kind"] == SampleClass.ON_CPU].sum())
        self._window.add("samples", rows)
        self._note_made(keys["stack"])

    def _known(
        self, rows: npt.NDArray[Any], stacks: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns the ids that windows have of stacks, and the numbers of their threads.

        Of a stack that is none the id says why.

        Args:
            rows: Have `tid`, `tgid` and `image`.
            stacks: Of the kernel half, or made by the host half.
        """
        threads, processes = self._threads.numbers(rows["tid"], rows["tgid"], rows["image"])
        found = stacks.copy()
        for stack, (first, end) in _WITHOUT.items():
            of = processes[stacks == stack]
            found[stacks == stack] = of + np.uint64(first)
            self._define(first, end, np.unique(of).tolist())
        return found, threads

    def _define(self, first: int, end: StopReason, processes: Sequence[int]) -> None:
        """Tells windows of stacks that are none, of some processes."""
        rows = [
            (first + process, NO_CHAIN, process, 0, 0, 0, int(end), 0, False, NONE, 0)
            for process in processes
            if not self._window.is_kept("stacks", first + process)
        ]
        if rows:
            addresses = np.zeros(0, COLUMNS["addresses"].dtype)
            self._window.define("stacks", np.array(rows, COLUMNS["stacks"].dtype), addresses)

    def _note_made(self, stacks: npt.NDArray[np.uint64]) -> None:
        self.made.update(stacks[(stacks >> np.uint64(30)) == ENTERED_STACKS >> 30].tolist())

    def add_thread_time(self, thread: ThreadInfo, on_cpu_ns: int, observed_ns: int) -> None:
        """Takes in how long a thread was on a CPU, and how long it was observed."""
        times = (thread.index, on_cpu_ns, observed_ns)
        self._window.add("thread_times", rows_of("thread_times", times))

    def add_waits(self, events: npt.NDArray[Any], *, is_open: bool = False) -> None:
        """Takes in long waits from their ring-buffer events, WAIT_EVENT_DTYPE."""
        stacks = np.array([self._sleeps.take_wait(event) for event in events], np.uint64)
        rows = np.zeros(len(events), COLUMNS["waits"].dtype)
        rows["stack"], rows["thread"] = self._known(events, stacks)
        start_ns = events["start_ns"].astype(np.int64) - self._table.start_ns
        rows["start_ns"], rows["is_open"] = np.maximum(start_ns, 0), is_open
        rows["blocked_ns"], rows["runnable_ns"] = events["blocked_ns"], events["runnable_ns"]
        self._window.add("waits", rows)
        self._note_made(rows["stack"])


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
    return {counter: read_counter(counters, counter, possible_cpus) for counter in abi.Counter}


def read_losses(counters: Any, possible_cpus: int) -> Counter[LossKind]:
    """Returns what the kernel half has lost so far."""
    return Counter(
        {kind: read_counter(counters, slot, possible_cpus) for kind, slot in abi.LOSS_SLOTS.items()}
    )


def read_counter(counters: Any, slot: int, possible_cpus: int) -> int:
    """Returns one counter, added up over the CPUs."""
    values = counters.lookup(slot.to_bytes(4, "little"), possible_cpus)
    return 0 if values is None else int(values.sum())
