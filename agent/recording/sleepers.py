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

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.kernel.sysbpf import BPF_NOEXIST
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.processes import procfs
from aiflame.agent.processes.kernel_frames import KernelFrame, kernel_addresses, kernel_frames
from aiflame.agent.processes.python_threads import ThreadPython
from aiflame.agent.processes.snapshots import Snapshot
from aiflame.agent.processes.table import ProcessImage, ProcessTable
from aiflame.agent.recording.pythons import PythonProcesses
from aiflame.agent.recording.sleep_walks import Sleeper, SleepWalks, run
from aiflame.agent.recording.stacks import ENTERED_STACKS, MadeStack, Stacks

_ASLEEP, _RUNNING = "SDIT", "R"

# Threads whose stacks are copied together: first a few, so that a short recording has them, then
# twice as many each time, since each pass over 10,000 threads takes 10 ms. Their copies take 30 MB
# at most.
_FIRST_BATCH_THREADS, _MAX_BATCH_THREADS = 128, 2048

# Copies of stacks kept until the tables are there; beyond, a stack is read again at the end.
_MAX_KEPT_BYTES = 64 << 20

# While they are few, more is copied of those that may have woken up when they are walked.
_FEW_THREADS, _LARGER_PIECE_BYTES = 256, 1 << 18

# Each second; a walk takes 0.2 ms.
_MOST_WALKED_AGAIN = 200
# Mappings of a process take 1 to 2 ms to read.
_MOST_READ = 20


@dataclass(slots=True, kw_only=True)
class EnteredThread(Sleeper):
    """What a thread slept in when the recording began.

    Attributes:
        kernel_frames: Leaf first.
        switches: How often it had been switched out by then.
        is_asleep: It was not running.
        is_settled: Nothing more will be known of it.
        is_given: Windows have its stack.
    """

    kernel_frames: tuple[KernelFrame, ...]
    switches: int
    is_asleep: bool
    is_settled: bool = False
    is_given: bool = False

    def drop_frames(self) -> None:
        """Lets go of what windows have been given; how the stack ends is still asked for."""
        self.kernel_frames, self.python = (), None
        if self.walked is not None:
            self.walked = replace(self.walked, addresses=())


class Sleepers:
    """The threads entered at the start, by the id of their made-up stack.

    Args:
        programs: Loaded and running.
        table: Process table; knows when the recording began.
        walks: Walks user stacks.
        pythons: Keeps Python stacks.
        kernel_stacks: Whether kernel frames are asked for.

    Attributes:
        losses: What is missing.
    """

    def __init__(
        self,
        programs: Programs,
        table: ProcessTable,
        walks: SleepWalks,
        pythons: PythonProcesses,
        kernel_stacks: bool,
    ) -> None:
        self._programs = programs
        self._table = table
        self._walks = walks
        self._pythons = pythons
        self._kernel_stacks = kernel_stacks
        self._batches: Iterator[list[tuple[int, int]]] = iter(())
        self._left: list[tuple[int, int]] = []
        self._refused: list[tuple[int, int]] = []
        self._kept_bytes = 0
        self._kernel_addresses: dict[tuple[str, str], int] = {}
        self._kernel_functions: set[tuple[str, str]] = set()
        # Processes whose mappings were asked for here, by pid and image.
        self._read: set[tuple[int, int]] = set()
        self.by_stack: dict[int, EnteredThread] = {}
        self.losses: Counter[LossKind] = Counter()

    def enter(self, pids: Iterable[int]) -> Iterator[None]:
        """Enters the threads of processes, one at each step."""
        self._batches = _batches(pids)
        for batch in self._batches:
            self._left = batch[::-1]
            before = len(self.by_stack)
            yield
            snapshots = self._walks.take(batch)
            asleep = []
            while self._left:
                yield
                sleeper = self._enter(*self._left.pop())
                if sleeper is not None and sleeper.is_asleep:
                    _assign([sleeper], snapshots)
                    asleep.append(sleeper)
            missed = [sleeper for sleeper in asleep if sleeper.snapshot is None]
            _assign(missed, self._walks.take([(sleeper.pid, sleeper.tid) for sleeper in missed]))
            yield from self._walks.walk_python(asleep)
            yield from self._walks.walk(asleep)
            _settle(asleep)
            self._keep([sleeper for sleeper in asleep if sleeper.snapshot is not None])
            self._take_out_gone(itertools.islice(self.by_stack.items(), before, None))
        self._walks.forget()

    def _take_out_gone(self, entered: Iterable[tuple[int, EnteredThread]]) -> None:
        """Takes threads out of the kernel half's table that ended while they were entered.

        Their end may have been told before, and nobody would tell of another: they would be there
        to the end of the recording. A snapshot is of one that was there after it was entered.
        """
        threads = self._programs.threads
        for stack, sleeper in entered:
            if sleeper.snapshot is not None or procfs.thread_stat(sleeper.pid, sleeper.tid):
                continue
            key = sleeper.tid.to_bytes(4, "little")
            state = threads.lookup(key)
            # Not what came after it: the id may be another's by now.
            if state is not None and int(state[0]["stack"]) == stack:
                threads.delete(key)

    def _enter(self, pid: int, tid: int) -> EnteredThread | None:
        """Enters a thread; returns what is known of it if that was possible."""
        programs, table = self._programs, self._table
        before = procfs.thread_stat(pid, tid)
        if before is None or before.state not in _ASLEEP + _RUNNING:
            return None
        stack = ENTERED_STACKS + len(self.by_stack) + 1
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
        sleeper = EnteredThread(
            pid=pid,
            tid=tid,
            image=table.first_image,
            kernel_frames=frames,
            switches=before.switches,
            is_asleep=is_asleep,
            is_settled=not is_asleep,
        )
        self.by_stack[stack] = sleeper
        return sleeper

    def _keep(self, sleepers: list[EnteredThread]) -> None:
        """Keeps what is to be walked at the end, within bounds: it may wake up before."""
        if len(sleepers) <= _FEW_THREADS:
            larger = self._walks.take([(s.pid, s.tid) for s in sleepers], _LARGER_PIECE_BYTES)
            _assign(sleepers, larger)
        for sleeper in sleepers:
            if sleeper.snapshot is not None:
                self._kept_bytes += len(sleeper.snapshot.piece)
                if self._kept_bytes > _MAX_KEPT_BYTES:
                    self._kept_bytes -= len(sleeper.snapshot.piece)
                    sleeper.snapshot = sleeper.snapshot.without_piece()

    def walk_again(self) -> None:
        """Walks some of those that could not be walked yet; to be called each second."""
        left = [s for s in self.by_stack.values() if s.snapshot is not None and not s.is_settled]
        walkable = [s for s in left if (s.pid, s.image) in self._read][:_MOST_WALKED_AGAIN]
        run(self._walks.walk_python([s for s in walkable if s.python is None]))
        run(self._walks.walk(walkable))
        for sleeper in walkable:
            image = self._table.known(sleeper.pid, sleeper.image)
            if image is None or not image.was_read:  # it is gone
                sleeper.snapshot = None
        _settle(walkable)
        self._read_some(left)

    def _read_some(self, sleepers: list[EnteredThread]) -> None:
        """Has the mappings of some processes read, for the next time.

        Nobody else asks for those of a process in which nothing happens.
        """
        unread = dict.fromkeys((s.pid, s.image) for s in sleepers)
        chosen = {*[key for key in unread if key not in self._read][:_MOST_READ]}
        self._walks.read_processes([s for s in sleepers if (s.pid, s.image) in chosen])
        self._read |= chosen

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

    def finish(self, wanted: list[EnteredThread]) -> None:
        """Walks what is left of these, once the recording has ended; may wait for tables."""
        self._walks.finish(wanted)
        for sleeper in wanted:
            if sleeper.walked is None:
                is_lost = self._walks.are_wanted and not self._walks.are_possible
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

    def end_of(self, sleeper: EnteredThread) -> StopReason:
        """Returns how a thread's user stack ended."""
        if not self._walks.are_wanted:
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


def _assign(sleepers: list[EnteredThread], snapshots: dict[int, Snapshot]) -> None:
    """Gives sleepers the snapshots that are of the sleep in which they were entered."""
    for sleeper in sleepers:
        snapshot = snapshots.get(sleeper.tid)
        if (
            snapshot is not None
            and snapshot.registers.pid == sleeper.pid
            and snapshot.registers.switches == sleeper.switches
        ):
            sleeper.snapshot = snapshot


def _settle(sleepers: list[EnteredThread]) -> None:
    for sleeper in sleepers:
        sleeper.is_settled = sleeper.is_settled or sleeper.snapshot is None


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
        sleeper.drop_frames()


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
