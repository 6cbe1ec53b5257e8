# SPDX-License-Identifier: Apache-2.0
"""What the kernel accounts itself, read when a recording begins and when it ends.

The scheduler's account is another measurement of what context switches tell here, so that each can
be held against the other; delay accounting tells what waits were for. Of threads that end within
the recording nothing is left to be read.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.processes.delays import Delays, ProcessDelay
from aiflame.agent.processes.scheduler_accounts import (
    READING_DTYPE,
    interrupted_ns,
    read_accounts,
)

# Of a thread that was there at the end, as model/accounts.py has it.
GROWTH_DTYPE = np.dtype(
    [
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("on_cpu_ns", "<u8"),
        ("run_queue_ns", "<u8"),
        ("timeslices", "<u8"),
        ("misaligned_ns", "<u8"),
        ("open_wait_ns", "<u8"),
    ]
)


@dataclass(frozen=True, slots=True)
class Growth:
    """By how much the kernel's accounts grew in a recording.

    Attributes:
        threads: GROWTH_DTYPE.
        interrupted_ns: As of model/accounts.py.
        delays: Of processes that were there at the end.
    """

    threads: npt.NDArray[np.void]
    interrupted_ns: int
    delays: tuple[ProcessDelay, ...]


class KernelAccounts:
    """Reads the accounts of a recording's targets.

    It is made before anything is prepared for the recording.

    Args:
        delays: Reads delays, None where the kernel does not account them.
    """

    def __init__(self, delays: Delays | None = None) -> None:
        self._delays = delays
        self._made_ns = time.monotonic_ns()
        self._first_open: dict[int, int] = {}
        self._last_open: Mapping[int, int] = {}
        self._first: npt.NDArray[np.void] = np.zeros(0, READING_DTYPE)
        self._last: npt.NDArray[np.void] = np.zeros(0, READING_DTYPE)
        self._is_first_whole = True
        self._first_interrupted_ns = self._last_interrupted_ns = 0

    @property
    def pids(self) -> list[int]:
        """Processes of its own."""
        return [] if self._delays is None else self._delays.pids

    def begin(self, pids: Collection[int], command_pid: int | None = None) -> None:
        """Reads what is there, right before the recording begins.

        Args:
            pids: The targets that there are.
            command_pid: Of a command that waits to be started, None where there is none.
        """
        there = [*pids, *([] if command_pid is None else [command_pid])]
        self._first, self._is_first_whole = read_accounts(there)
        # Getting ready takes all CPUs for some tenths of a second: as long any may have waited.
        most_ns = time.monotonic_ns() - self._made_ns
        self._first_open = dict.fromkeys(self._first["tid"].tolist(), most_ns)
        self._first_interrupted_ns = interrupted_ns()
        if self._delays is not None:
            # A command has waited for nothing yet, and may have when its turn comes.
            self._delays.read(pids)

    def end(self, pids: Iterable[int], queued: Mapping[int, int]) -> None:
        """Reads it again, when the recording ends.

        Args:
            pids: The targets that began since; those of before are read as well.
            queued: For how long threads have waited for a CPU, by tid, in ns.
        """
        self._last_open = queued
        there = {*self._first["pid"].tolist(), *pids}
        self._last, _ = read_accounts(sorted(there))
        self._last_interrupted_ns = interrupted_ns()
        if self._delays is not None:
            self._delays.read(sorted(there))

    def growth(self, start_ns: int, end_ns: int) -> Growth:
        """Returns what is between the two readings; may wait for the one of delays.

        Args:
            start_ns: When the recording began, monotonic.
            end_ns: When it ended.
        """
        delays = () if self._delays is None else tuple(self._delays.finish())
        interrupted = self._last_interrupted_ns - self._first_interrupted_ns
        first, last = self._first, self._last
        if not self._is_first_whole:
            # Which of the others began since is not known.
            pairs = {*first[["pid", "tid"]].tolist()}
            last = last[[pair in pairs for pair in last[["pid", "tid"]].tolist()]]
        threads = growth_of(first, last, start_ns, end_ns)
        for row in threads:
            tid = int(row["tid"])
            row["open_wait_ns"] = self._first_open.get(tid, 0) + self._last_open.get(tid, 0)
        return Growth(threads, max(interrupted, 0), delays)


def growth_of(
    first: npt.NDArray[np.void], last: npt.NDArray[np.void], start_ns: int, end_ns: int
) -> npt.NDArray[np.void]:
    """Returns by how much counters grew between two readings, GROWTH_DTYPE without open waits.

    Args:
        first: READING_DTYPE; threads that are not in it have begun since, at 0.
        last: READING_DTYPE.
        start_ns: When the recording began, monotonic.
        end_ns: When it ended.
    """
    before = {(pid, tid): (times, ns) for pid, tid, *times, ns in first.tolist()}
    rows = []
    for pid, tid, *times, read_ns in last.tolist():
        misaligned_ns = abs(read_ns - end_ns)
        then, then_ns = before.get((pid, tid), (None, 0))
        # Less of anything: another thread has the number now.
        if then is not None and all(map(operator.ge, times, then)):
            times = [*map(operator.sub, times, then)]
            misaligned_ns += abs(start_ns - then_ns)
        rows.append((pid, tid, *times, misaligned_ns, 0))
    return np.array(rows, GROWTH_DTYPE)
