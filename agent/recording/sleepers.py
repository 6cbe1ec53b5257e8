# SPDX-License-Identifier: Apache-2.0
"""Threads that were already there when the recording began.

A context switch shows a thread's stack when it goes to sleep. One that slept before the recording
and does not wake up in it would be missing, and with it most of the wall time of a server. So each
existing thread is entered in the kernel's thread table, and for those asleep the kernel frames are
read from /proc/PID/task/TID/stack (or one frame from wchan), and the user frames are walked from
the thread's registers and a copy of its stack (`snapshots`).

A thread that moves while it is entered is taken out again: its switch count tells. The same count
tells whether a snapshot is of the sleep in which the thread was entered. What cannot be walked at
once, since tables are still being built or the process has not been read, is walked at the end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.kernel.sysbpf import BPF_NOEXIST
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.processes import procfs
from aiflame.agent.processes.kernel_frames import KernelFrame, kernel_addresses, kernel_frames
from aiflame.agent.processes.python_threads import ThreadPython
from aiflame.agent.processes.snapshots import PIECE_BYTES, Snapshot, Snapshots
from aiflame.agent.processes.stack_memory import StackMemory
from aiflame.agent.processes.table import ProcessImage, ProcessTable
from aiflame.agent.processes.thread_walk import StackWalker, WalkedThread
from aiflame.agent.processes.unwind_tables import UnwindTables
from aiflame.agent.recording.pythons import PythonProcesses
from aiflame.agent.recording.stacks import MADE_STACKS, MadeStack, Stacks

_MADE_STACK_BASE = MADE_STACKS << 32

_ASLEEP, _RUNNING = "SDIT", "R"

# Threads whose stacks are copied together: first a few, so that a short recording has them, then
# twice as many each time, since each pass over 10,000 threads takes 10 ms. Their copies take 30 MB
# at most.
_FIRST_BATCH_THREADS, _MAX_BATCH_THREADS = 128, 2048

# Copies of stacks kept until the tables are there; beyond, a stack is read again at the end.
_MAX_KEPT_BYTES = 64 << 20

# While they are few, more is copied of those that may have woken up when they are walked.
_FEW_THREADS, _LARGER_PIECE_BYTES = 256, 1 << 18

# A walk takes 0.2 ms, and a window comes each second.
_MOST_WALKED_AGAIN = 200

# The tables of all of PyTorch's libraries take five seconds; only those on stacks are waited for.
_TABLES_PATIENCE_NS = 15_000_000_000


@dataclass(slots=True)
class Sleeper:
    """What a thread slept in when the recording began.

    Attributes:
        kernel_frames: Leaf first.
        switches: How often it had been switched out by then.
        is_asleep: It was not running.
        snapshot: Of the same sleep, while it is still to be walked.
        walked: Its user half.
        python: Its Python half.
        is_settled: Nothing more will be known of it.
        is_given: Windows have its stack.
    """

    pid: int
    tid: int
    kernel_frames: tuple[KernelFrame, ...]
    switches: int
    is_asleep: bool
    snapshot: Snapshot | None = None
    walked: WalkedThread | None = None
    python: ThreadPython | None = None
    is_settled: bool = False
    is_given: bool = False


class Sleepers:
    """The threads entered at the start, by the id of their made-up stack.

    Args:
        programs: Loaded and running.
        table: Process table; knows when the recording began.
        tables: Unwind tables.
        walker: Walks user stacks; None where they are not asked for.
        pythons: Walks Python stacks.
        kernel_stacks: Whether kernel frames are asked for.

    Attributes:
        losses: What is missing.
    """

    def __init__(
        self,
        programs: Programs,
        table: ProcessTable,
        tables: UnwindTables,
        walker: StackWalker | None,
        pythons: PythonProcesses,
        kernel_stacks: bool,
    ) -> None:
        self._programs = programs
        self._table = table
        self._tables = tables
        self._walker = walker
        self._pythons = pythons
        self._kernel_stacks = kernel_stacks
        self._snapshots = (
            Snapshots(programs.thread_iterator_fd, table.memory) if walker is not None else None
        )
        self._batches: Iterator[list[tuple[int, int]]] = iter(())
        self._left: list[tuple[int, int]] = []
        self._refused: list[tuple[int, int]] = []
        self._kept_bytes = 0
        self._lacking: set[int] = set()
        self._kernel_addresses: dict[tuple[str, str], int] = {}
        self._kernel_functions: set[tuple[str, str]] = set()
        self.by_stack: dict[int, Sleeper] = {}
        self.losses: Counter[LossKind] = Counter()

    def enter(self, pids: Iterable[int]) -> Iterator[None]:
        """Enters the threads of processes, one at each step."""
        self._batches = _batches(pids)
        for batch in self._batches:
            self._left = batch[::-1]
            yield
            snapshots = self._take(batch)
            asleep = []
            while self._left:
                yield
                sleeper = self._enter(*self._left.pop())
                if sleeper is not None and sleeper.is_asleep:
                    _assign([sleeper], snapshots)
                    asleep.append(sleeper)
            missed = [sleeper for sleeper in asleep if sleeper.snapshot is None]
            _assign(missed, self._take([(sleeper.pid, sleeper.tid) for sleeper in missed]))
            yield from self._walk_python(asleep)
            yield from self._walk(asleep, is_last=False)
            _settle(asleep)
            self._keep([sleeper for sleeper in asleep if sleeper.snapshot is not None])
        if self._walker is not None:
            self._walker.forget()

    def _take(
        self, threads: list[tuple[int, int]], piece_bytes: int = PIECE_BYTES
    ) -> dict[int, Snapshot]:
        return {} if self._snapshots is None else self._snapshots.take(threads, piece_bytes)

    def _enter(self, pid: int, tid: int) -> Sleeper | None:
        """Enters a thread; returns what is known of it if that was possible."""
        programs, table = self._programs, self._table
        before = procfs.thread_stat(pid, tid)
        if before is None or before.state not in _ASLEEP + _RUNNING:
            return None
        stack = _MADE_STACK_BASE + len(self.by_stack) + 1
        state = np.zeros(1, abi.THREAD_STATE_DTYPE)
        state["first_seen_ns"] = state["switched_ns"] = table.start_ns
        state["tgid"], state["image"], state["stack"] = pid, table.first_image, stack
        state["flags"] = abi.THREAD_SEEDED
        is_asleep = before.state in _ASLEEP
        state["off_class"] = SampleClass.BLOCKED if is_asleep else SampleClass.ON_CPU
        has_frames = is_asleep and self._kernel_stacks
        frames = kernel_frames(pid, tid) if has_frames else ()
        try:
            is_new = programs.threads.update(
                tid.to_bytes(4, "little"), state.tobytes(), BPF_NOEXIST
            )
        except OSError:  # the map is full: E2BIG
            self._refused.append((pid, tid))
            return None
        if not is_new:
            return None
        sleeper = Sleeper(pid, tid, frames, before.switches, is_asleep)
        sleeper.is_settled = not is_asleep
        self.by_stack[stack] = sleeper
        return sleeper

    def _walk(self, sleepers: list[Sleeper], is_last: bool) -> Iterator[None]:
        """Walks what can be walked now, a thread at each step; at last, all that there is."""
        late = []
        for sleeper in sleepers:
            yield
            snapshot = sleeper.snapshot
            if self._snapshots is None or snapshot is None:
                continue
            memory = self._snapshots.memory_of(snapshot, is_live=True)
            walked = self._walk_one(sleeper, snapshot, memory)
            if walked is None or (walked.lacks and not is_last):
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

    def _walk_python(self, sleepers: list[Sleeper]) -> Iterator[None]:
        """Walks the Python frames of those that have some, a thread at each step."""
        found = []
        for first in range(0, len(sleepers), _FIRST_BATCH_THREADS):
            batch = []
            for sleeper in sleepers[first : first + _FIRST_BATCH_THREADS]:
                image = self._table.known(sleeper.pid, self._table.first_image)
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
        image = self._table.known(sleeper.pid, self._table.first_image)
        if self._walker is None or image is None or not image.was_read:
            return None
        walked = self._walker.walk_thread(image, snapshot.registers, memory)
        self._lacking |= walked.lacks
        return walked

    def _keep(self, sleepers: list[Sleeper]) -> None:
        """Keeps what is to be walked at the end, within bounds: it may wake up before."""
        if len(sleepers) <= _FEW_THREADS:
            larger = self._take([(s.pid, s.tid) for s in sleepers], _LARGER_PIECE_BYTES)
            _assign(sleepers, larger)
        for sleeper in sleepers:
            if sleeper.snapshot is not None:
                self._kept_bytes += len(sleeper.snapshot.piece)
                if self._kept_bytes > _MAX_KEPT_BYTES:
                    self._kept_bytes -= len(sleeper.snapshot.piece)
                    sleeper.snapshot = sleeper.snapshot.without_piece()

    def walk_again(self) -> None:
        """Walks some of those that could not be walked yet; to be called now and then."""
        left = [s for s in self.by_stack.values() if s.snapshot is not None and not s.is_settled]
        left = left[:_MOST_WALKED_AGAIN]
        _run(self._walk(left, is_last=False))
        _settle(left)

    def kernel_addresses(self) -> dict[tuple[str, str], int]:
        """Returns where the kernel functions are that sleepers are in, by name and module."""
        # Of all at once: to go through the kernel's symbols takes 0.15 s.
        functions = {
            (frame.name, frame.module)
            for sleeper in self.by_stack.values()
            for frame in sleeper.kernel_frames
        }
        if functions - self._kernel_functions:
            self._kernel_functions |= functions
            self._kernel_addresses = kernel_addresses(self._kernel_functions)
        return self._kernel_addresses

    def finish(self, wanted: list[Sleeper]) -> None:
        """Walks what is left of these, once the recording has ended; may wait for tables."""
        left = [sleeper for sleeper in wanted if sleeper.snapshot is not None]
        self._read_processes({sleeper.pid for sleeper in left})
        _run(self._walk_python([sleeper for sleeper in left if sleeper.python is None]))
        deadline_ns = time.monotonic_ns() + _TABLES_PATIENCE_NS
        is_last = False
        while left and not is_last:
            self._lacking.clear()
            _run(self._walk(left, is_last=False))
            left = [sleeper for sleeper in left if sleeper.snapshot is not None]
            is_last = not self._lacking or not self._tables.wait(self._lacking, deadline_ns)
        _run(self._walk(left, is_last=True))
        for sleeper in wanted:
            if sleeper.walked is None:
                is_lost = self._snapshots is not None and not self._snapshots.are_possible
                self.losses[LossKind.SLEEPERS_NOT_WALKED] += is_lost and sleeper.is_asleep
            else:
                is_cut = sleeper.walked.end is StopReason.TOO_DEEP
                self.losses[LossKind.USER_FRAMES_CUT] += is_cut

    def missed(self) -> list[tuple[int, int]]:
        """Counts the threads that are not in the kernel half's table, although they were there.

        Returns:
            (pid, tid) of those that are there still: nothing has observed them from the start on.
        """
        left = [*self._left, *(thread for batch in self._batches for thread in batch)]
        # Of one that has been switched since, or has ended, the kernel half has told the time.
        not_entered = [thread for thread in left if not self._is_observed(*thread)]
        self.losses[LossKind.THREADS_NOT_ENTERED] = len(not_entered)
        self.losses[LossKind.THREAD_TABLE_FULL] = len(self._refused)
        return [
            (pid, tid)
            for pid, tid in (*not_entered, *self._refused)
            if procfs.thread_stat(pid, tid) is not None
        ]

    def _is_observed(self, pid: int, tid: int) -> bool:
        if self._programs.threads.lookup(tid.to_bytes(4, "little")) is not None:
            return True
        image = self._table.known(pid, self._table.first_image)
        thread = None if image is None else self._table.known_thread(image, tid)
        return thread is not None and thread.has_ended

    def _read_processes(self, pids: set[int]) -> None:
        """Reads the mappings of processes that nothing was seen of in the recording."""
        for pid in pids:
            image = self._table.image(pid, self._table.first_image)
            if not image.was_read and self._table.read_mappings(image):
                self._pythons.look(image)  # the kernel half walks no more
        self._pythons.poll()

    def end_of(self, sleeper: Sleeper) -> StopReason:
        """Returns how a thread's user stack ended."""
        if self._walker is None:
            return StopReason.EXCLUDED
        return StopReason.NOT_WALKED if sleeper.walked is None else sleeper.walked.end

    def keep_python(self, stack: int, image: ProcessImage, python: ThreadPython) -> None:
        """Keeps the Python half of a made-up stack under its id."""
        self._pythons.keep(stack, image, python)


def _batches(pids: Iterable[int]) -> Iterator[list[tuple[int, int]]]:
    """Yields (pid, tid) of all threads, some at a time."""
    batch: list[tuple[int, int]] = []
    limit = _FIRST_BATCH_THREADS
    for pid in pids:
        for tid in procfs.thread_ids(pid):
            batch.append((pid, tid))
            if len(batch) == limit:
                yield batch
                batch, limit = [], min(2 * limit, _MAX_BATCH_THREADS)
    yield batch


def _assign(sleepers: list[Sleeper], snapshots: dict[int, Snapshot]) -> None:
    """Gives sleepers the snapshots that are of the sleep in which they were entered."""
    for sleeper in sleepers:
        snapshot = snapshots.get(sleeper.tid)
        if (
            snapshot is not None
            and snapshot.registers.pid == sleeper.pid
            and snapshot.registers.switches == sleeper.switches
        ):
            sleeper.snapshot = snapshot


def _settle(sleepers: list[Sleeper]) -> None:
    for sleeper in sleepers:
        sleeper.is_settled = sleeper.is_settled or sleeper.snapshot is None


def _run(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def give_sleepers(
    sleepers: Sleepers, made: Collection[int], stacks: Stacks, table: ProcessTable
) -> None:
    """Gives windows the stacks of sleepers of which all is known.

    Args:
        sleepers: All.
        made: Ids of their stacks that any sample or wait refers to.
        stacks: Where they go.
        table: Process table.
    """
    found = {
        stack: sleeper
        for stack in made
        if (sleeper := sleepers.by_stack[stack]).is_settled and not sleeper.is_given
    }
    addresses = sleepers.kernel_addresses() if found else {}
    for stack, sleeper in found.items():
        sleeper.is_given = True
        # The offset is that of a return address, or 0 where only a name was to be had.
        kernel = [
            addresses[frame.name, frame.module] + max(frame.offset, 1)
            for frame in sleeper.kernel_frames
            if (frame.name, frame.module) in addresses
        ]
        lost = len(sleeper.kernel_frames) - len(kernel)
        # One without an offset is the only one that the kernel told, of some.
        lost += any(not frame.offset for frame in sleeper.kernel_frames)
        sleepers.losses[LossKind.SLEEPERS_KERNEL_FRAMES_LOST] += lost
        user = [] if sleeper.walked is None else list(sleeper.walked.addresses)
        image = table.image(sleeper.pid, table.first_image)
        end, python = sleepers.end_of(sleeper), sleeper.python
        if python is None:
            stacks.add_made(stack, MadeStack(image, kernel, user, end))
        else:
            sleepers.keep_python(stack, image, python)
            stacks.add_made(stack, MadeStack(image, kernel, user, end, stack, int(python.gil)))


def give_all_sleepers(
    sleepers: Sleepers, made: Collection[int], stacks: Stacks, table: ProcessTable
) -> None:
    """Gives windows the stacks of all sleepers, once the recording has ended; may take a while.

    Args: as for give_sleepers.
    """
    wanted = [sleepers.by_stack[stack] for stack in made]
    sleepers.finish(wanted)
    for sleeper in wanted:
        sleeper.is_settled = True
    give_sleepers(sleepers, made, stacks, table)
