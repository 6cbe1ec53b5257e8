# SPDX-License-Identifier: Apache-2.0
"""Walks what threads sleep in: native frames from a snapshot, Python frames from their process.

A snapshot is of one moment. What is read after it, pages that were not copied and all that Python
keeps, is believed if the thread still was in the same sleep then.

Not here: which threads are walked, and why (`sleepers`, `cut_sleeps`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from aiflame.agent.model.profile import StopReason
from aiflame.agent.processes.python_threads import ThreadPython
from aiflame.agent.processes.snapshots import PIECE_BYTES, Snapshot, Snapshots
from aiflame.agent.processes.stack_memory import StackMemory
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.processes.thread_walk import StackWalker, WalkedThread
from aiflame.agent.processes.unwind_tables import UnwindTables
from aiflame.agent.recording.pythons import PythonProcesses

# Walked together for Python, so that a walk of many threads goes on step by step.
_BATCH_THREADS = 128

# The tables of all of PyTorch's libraries take five seconds; only those on stacks are waited for.
_TABLES_PATIENCE_NS = 15_000_000_000


@dataclass(slots=True)
class Sleeper:
    """A thread in one sleep.

    Attributes:
        image: Of the process.
        snapshot: Of this sleep, while it is still to be walked.
        lacks: Binaries whose tables were still being built at the last walk.
        walked: Its user half.
        python: Its Python half.
    """

    pid: int
    tid: int
    image: int
    snapshot: Snapshot | None = None
    lacks: frozenset[int] = frozenset()
    walked: WalkedThread | None = None
    python: ThreadPython | None = None


class SleepWalks:
    """Takes snapshots of sleeping threads, and walks them.

    Args:
        table: Process table.
        tables: Unwind tables.
        walker: Walks user stacks; None where they are not asked for.
        pythons: Walks Python stacks.
        program_fd: Returns the iterator program once programs are loaded; None where the kernel has
            none.
    """

    def __init__(
        self,
        table: ProcessTable,
        tables: UnwindTables,
        walker: StackWalker | None,
        pythons: PythonProcesses,
        program_fd: Callable[[], int | None],
    ) -> None:
        self._table = table
        self._tables = tables
        self._walker = walker
        self._pythons = pythons
        self._program_fd = program_fd

    @cached_property
    def _snapshots(self) -> Snapshots | None:
        if self._walker is None:
            return None
        return Snapshots(self._program_fd(), self._table.memory)

    @property
    def are_wanted(self) -> bool:
        """Whether user stacks are asked for."""
        return self._walker is not None

    @property
    def are_possible(self) -> bool:
        """Whether they are, and the kernel tells registers."""
        return self._snapshots is not None and self._snapshots.are_possible

    def take(
        self, threads: Sequence[tuple[int, int]], piece_bytes: int = PIECE_BYTES
    ) -> dict[int, Snapshot]:
        """Returns snapshots as Snapshots.take does, none where nobody asks for user stacks."""
        return {} if self._snapshots is None else self._snapshots.take(threads, piece_bytes)

    def walk(self, sleepers: Sequence[Sleeper], *, is_last: bool = False) -> Iterator[None]:
        """Walks what can be walked now, a thread at each step; at last, all that there is.

        Whoever has been walked has no snapshot any more.
        """
        late = []
        for sleeper in sleepers:
            yield
            snapshot = sleeper.snapshot
            if self._snapshots is None or snapshot is None:
                continue
            memory = self._snapshots.memory_of(snapshot, is_live=True)
            walked = self._walk_one(sleeper, snapshot, memory)
            if walked is None:
                continue
            sleeper.lacks = walked.lacks
            if walked.lacks and not is_last:
                continue
            if memory.late_pages:
                late.append((sleeper, snapshot, walked))
            else:
                sleeper.walked, sleeper.snapshot = walked, None
        if self._snapshots is None or not late:
            return
        asleep = self._snapshots.still_asleep([snapshot for _, snapshot, _ in late])
        for sleeper, snapshot, walked in late:
            sleeper.walked, sleeper.snapshot = walked, None
            if sleeper.tid not in asleep:
                # Its pages may be of another moment: what leads there has to do, if anything does.
                memory = self._snapshots.memory_of(snapshot, is_live=False)
                cut = self._walk_one(sleeper, snapshot, memory)
                sleeper.walked = cut if snapshot.piece else None

    def walk_python(self, sleepers: Sequence[Sleeper]) -> Iterator[None]:
        """Walks the Python frames of those that have some, a thread at each step."""
        found = []
        for first in range(0, len(sleepers), _BATCH_THREADS):
            batch = []
            for sleeper in sleepers[first : first + _BATCH_THREADS]:
                image = self._table.known(sleeper.pid, sleeper.image)
                if image is not None and sleeper.snapshot is not None:
                    batch.append((sleeper, sleeper.snapshot, image))
            self._pythons.prepare(
                (image, snapshot.registers.thread_pointer) for _, snapshot, image in batch
            )
            for sleeper, snapshot, image in batch:
                yield
                python = self._pythons.of_thread(image, snapshot.registers.thread_pointer)
                if python is not None:
                    found.append((sleeper, snapshot, python))
        if self._snapshots is None or not found:
            return
        # Frames are read as they are now: they are of that sleep if the thread still is in it.
        asleep = self._snapshots.still_asleep([snapshot for _, snapshot, _ in found])
        for sleeper, _, python in found:
            if sleeper.tid in asleep:
                sleeper.python = python

    def _walk_one(
        self, sleeper: Sleeper, snapshot: Snapshot, memory: StackMemory
    ) -> WalkedThread | None:
        """Walks a thread; None while too little is known of its process."""
        if not snapshot.registers.has_user_half:
            return WalkedThread((), StopReason.KERNEL_ONLY, frozenset())
        image = self._table.known(sleeper.pid, sleeper.image)
        if self._walker is None or image is None or not image.was_read:
            return None
        return self._walker.walk_thread(image, snapshot.registers, memory)

    def finish(self, sleepers: Sequence[Sleeper]) -> None:
        """Walks all that have a snapshot, once the recording has ended; may wait for tables."""
        left = [sleeper for sleeper in sleepers if sleeper.snapshot is not None]
        self.read_processes(left)
        run(self.walk_python([sleeper for sleeper in left if sleeper.python is None]))
        deadline_ns = time.monotonic_ns() + _TABLES_PATIENCE_NS
        is_last, waited_for = False, frozenset[int]()
        while left and not is_last:
            run(self.walk(left))
            left = [sleeper for sleeper in left if sleeper.snapshot is not None]
            lacking = frozenset[int]().union(*(sleeper.lacks for sleeper in left))
            # What is lacking although it was waited for never comes: its file was let go of.
            is_last = lacking <= waited_for or not self._tables.wait(lacking, deadline_ns)
            waited_for |= lacking
        run(self.walk(left, is_last=True))

    def read_processes(self, sleepers: Sequence[Sleeper]) -> None:
        """Reads the mappings of processes that nothing was seen of so far."""
        for pid, number in {(sleeper.pid, sleeper.image) for sleeper in sleepers}:
            image = self._table.image(pid, number)
            if not image.was_read and self._table.read_mappings(image):
                self._pythons.look(image)
        self._pythons.poll()

    def forget(self) -> None:
        """Lets go of the tables; they are loaded again when they are needed."""
        if self._walker is not None:
            self._walker.forget()


def run(steps: Iterator[None]) -> None:
    """Takes all steps at once."""
    for _ in steps:
        pass
