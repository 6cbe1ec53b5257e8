# SPDX-License-Identifier: Apache-2.0
"""What the kernel accounts itself, read when a recording begins and when it ends.

The scheduler's account is another measurement of what context switches tell here, so that each can
be held against the other; delay accounting tells what waits were for. What threads have that end
within the recording is told when they do, where delays are accounted.
"""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.model.accounts import THREAD_ACCOUNT_DTYPE, Delay
from aiflame.agent.processes.scheduler_accounts import (
    READING_DTYPE,
    interrupted_ns,
    read_accounts,
)
from aiflame.agent.processes.taskstats import (
    TASKSTATS_DTYPE,
    ProcessDelay,
    TaskStats,
    Told,
    delays_between,
)

_TIMES = ("on_cpu_ns", "run_queue_ns", "timeslices", "misaligned_ns", "open_wait_ns")

# Who has a pid and a tid now: the process and the thread, as the recording numbers them, NO_THREAD
# where it does not know the thread; None where it does not know the process.
Finds = Callable[[int, int], tuple[int, int] | None]
NO_THREAD = -1

# Of threads that have ended, whose they are and what was told.
_ENDED_DTYPE = np.dtype([("process", "<u4"), ("thread", "<i8"), ("told", TASKSTATS_DTYPE)])
# For how long an end may be nobody's that is a target's.
_EARLY_NS = 1_000_000_000
# 22 MB, and at 500 ends a second four minutes.
_MOST_ENDED = 1 << 17

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
        ended: THREAD_ACCOUNT_DTYPE, of threads that have ended within the recording.
        ended_delays: Of processes that have.
    """

    threads: npt.NDArray[np.void]
    interrupted_ns: int
    delays: tuple[ProcessDelay, ...]
    ended: npt.NDArray[np.void]
    ended_delays: tuple[Delay, ...]


class KernelAccounts:
    """Reads the accounts of a recording's targets.

    It is made before anything is prepared for the recording.

    Args:
        stats: Tells of delays and of what ends, None where the kernel does not account delays.
    """

    def __init__(self, stats: TaskStats | None = None) -> None:
        self._stats = stats
        self._made_ns = time.monotonic_ns()
        self._first_open: dict[int, int] = {}
        self._last_open: Mapping[int, int] = {}
        self._first: npt.NDArray[np.void] = np.zeros(0, READING_DTYPE)
        self._last: npt.NDArray[np.void] = np.zeros(0, READING_DTYPE)
        self._is_first_whole = True
        self._first_interrupted_ns = self._last_interrupted_ns = 0
        self._delays: list[npt.NDArray[np.void]] = [np.zeros(0, TASKSTATS_DTYPE)]
        self._ended: list[npt.NDArray[np.void]] = [np.zeros(0, _ENDED_DTYPE)]
        self._early: npt.NDArray[np.void] = np.zeros(0, TASKSTATS_DTYPE)
        self._room = _MOST_ENDED
        self._left_out = self._overrun = 0

    @property
    def losses(self) -> Counter[LossKind]:
        """What it lost."""
        return Counter({LossKind.ENDS_NOT_ACCOUNTED: self._left_out + self._overrun})

    @property
    def pids(self) -> list[int]:
        """Processes of its own."""
        return [] if self._stats is None else self._stats.pids

    def begin(self, pids: Collection[int], command_pid: int | None = None) -> None:
        """Reads what is there, right before the recording begins.

        Args:
            pids: The targets that there are.
            command_pid: Of a command that waits to be started, None where there is none.
        """
        if self._stats is not None:
            self._stats.wait()
        there = [*pids, *([] if command_pid is None else [command_pid])]
        self._first, self._is_first_whole = read_accounts(there)
        # Getting ready takes all CPUs for some tenths of a second: as long any may have waited.
        most_ns = time.monotonic_ns() - self._made_ns
        self._first_open = dict.fromkeys(self._first["tid"].tolist(), most_ns)
        self._first_interrupted_ns = interrupted_ns()
        if self._stats is not None:
            # A command has waited for nothing yet, and may have when its turn comes.
            self._stats.read(pids)

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
        if self._stats is not None:
            self._stats.read(sorted(there))

    def take(self, finds: Finds) -> None:
        """Takes what was told of threads that have ended; to be called now and then."""
        if self._stats is not None:
            self._add(self._stats.take(), finds)

    def _add(self, told: npt.NDArray[np.void], finds: Finds, *, is_last: bool = False) -> None:
        if not len(told) and not (is_last and len(self._early)):
            return
        self._delays.append(told[np.isin(told["kind"], (Told.FIRST, Told.LAST))])
        self._overrun = max(self._overrun, int(told["lost"].max(initial=0)))
        is_end = np.isin(told["kind"], (Told.THREAD_ENDED, Told.PROCESS_ENDED))
        ended = np.concatenate([self._early, told[is_end]])
        found = [finds(pid, tid) for pid, tid in ended[["pid", "tid"]].tolist()]
        # Events may be taken in later than ends are told: a target's are known by the next time, or
        # the one after. The kernel tells of an end before it takes down what the process has mapped
        # (do_exit in kernel/exit.c, v6.1), and its event comes after that.
        is_new = ended["read_ns"] + _EARLY_NS > ended["read_ns"].max(initial=0)
        is_early = [
            not is_last and bool(new) and (numbers is None or numbers[1] == NO_THREAD)
            for new, numbers in zip(is_new, found, strict=True)
        ]
        self._early = ended[is_early]
        known = {
            at: numbers
            for at, numbers in enumerate(found)
            if numbers is not None and not is_early[at]
        }
        rows = np.zeros(len(known), _ENDED_DTYPE)
        rows["told"] = ended[[*known]]
        rows["process"], rows["thread"] = np.array([*known.values()], np.int64).reshape(-1, 2).T
        self._ended.append(rows[: self._room])
        self._left_out += max(len(rows) - self._room, 0)
        self._room -= min(len(rows), self._room)

    def growth(self, start_ns: int, end_ns: int, finds: Finds) -> Growth:
        """Returns what is between the two readings; may wait for what is still to be told.

        Args:
            start_ns: When the recording began, monotonic.
            end_ns: When it ended.
            finds: As for `take`.
        """
        if self._stats is not None:
            self._add(self._stats.finish(), finds, is_last=True)
        interrupted = self._last_interrupted_ns - self._first_interrupted_ns
        last = self._last[self._have_begun(self._last)]
        threads = growth_of(self._first, last, start_ns, end_ns)
        for row in threads:
            tid = int(row["tid"])
            row["open_wait_ns"] = self._first_open.get(tid, 0) + self._last_open.get(tid, 0)
        delays = np.concatenate(self._delays)
        first = delays[delays["kind"] == Told.FIRST]
        ended = np.concatenate(self._ended)
        ended = ended[ended["told"]["read_ns"] >= start_ns]
        # Of one process, or of a number that comes again, the last counts.
        ended = ended[np.argsort(ended["told"]["read_ns"], kind="stable")]
        return Growth(
            threads,
            max(interrupted, 0),
            tuple(chain.from_iterable(delays_between(first, delays[delays["kind"] == Told.LAST]))),
            self._ended_threads(ended, start_ns, end_ns),
            _ended_delays(first, ended),
        )

    def _have_begun(self, rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Returns of which threads it is known when they began."""
        if self._is_first_whole:
            return np.ones(len(rows), bool)
        pairs = {*self._first[["pid", "tid"]].tolist()}
        return np.array([pair in pairs for pair in rows[["pid", "tid"]].tolist()], bool)

    def _ended_threads(
        self, ended: npt.NDArray[np.void], start_ns: int, end_ns: int
    ) -> npt.NDArray[np.void]:
        """Returns THREAD_ACCOUNT_DTYPE; a number that came again in a process is one thread."""
        ended = ended[ended["thread"] != NO_THREAD]
        ended = ended[self._have_begun(ended["told"])]
        last = np.zeros(len(ended), READING_DTYPE)
        for name in READING_DTYPE.names or ():
            last[name] = ended["told"][name]
        # It has ended before it was read: within the recording, as far as is known.
        last["read_ns"] = np.maximum(last["read_ns"], end_ns)
        growth = growth_of(self._first, last, start_ns, end_ns)
        growth["open_wait_ns"] = [self._first_open.get(tid, 0) for tid in last["tid"].tolist()]
        threads, row_of = np.unique(ended["thread"], return_inverse=True)
        found = np.zeros(len(threads), THREAD_ACCOUNT_DTYPE)
        found["thread"], found["has_ended"] = threads, 1
        for name in _TIMES:
            np.add.at(found[name], row_of, growth[name])
        return found


def _ended_delays(first: npt.NDArray[np.void], ended: npt.NDArray[np.void]) -> tuple[Delay, ...]:
    rows = ended[ended["told"]["kind"] == Told.PROCESS_ENDED]
    # A main thread that ends before others does not tell all.
    last = {process: at for at, process in enumerate(rows["process"].tolist())}
    told = rows["told"][[*last.values()]]
    return tuple(
        Delay(process, delay.cause, delay.count, delay.ns)
        for process, delays in zip(last, delays_between(first, told), strict=True)
        for delay in delays
    )


def growth_of(
    first: npt.NDArray[np.void], last: npt.NDArray[np.void], start_ns: int, end_ns: int
) -> npt.NDArray[np.void]:
    """Returns by how much counters grew between two readings, GROWTH_DTYPE without open waits.

    Args:
        first: READING_DTYPE; threads that are not in it have begun since, at 0.
        last: READING_DTYPE, in the order of time: a pair of numbers may come again.
        start_ns: When the recording began, monotonic.
        end_ns: When it ended.
    """
    before = {(pid, tid): (times, ns) for pid, tid, *times, ns in first.tolist()}
    rows = []
    for pid, tid, *times, read_ns in last.tolist():
        misaligned_ns = abs(read_ns - end_ns)
        then, then_ns = before.pop((pid, tid), (None, 0))
        # Less of anything: another thread has the number now.
        if then is not None and all(map(operator.ge, times, then)):
            times = [*map(operator.sub, times, then)]
            misaligned_ns += abs(start_ns - then_ns)
        rows.append((pid, tid, *times, misaligned_ns, 0))
    return np.array(rows, GROWTH_DTYPE)
