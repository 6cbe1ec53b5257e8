# SPDX-License-Identifier: Apache-2.0
"""Stacks of long waits that chance did not choose: read while they last.

A wait of a second and more is exact (LONG_WAIT_NS), and one of a tenth of that when a window closes
(OPEN_WAIT_NS): few waits are so long, and no other stands for one. Twice a second and when a window
closes the kernel half names the threads that have slept for so long and have no stack, with the
kernel half of their stacks; the rest is walked from their registers and a copy of their stack. A
wait is of one thread, and began at one time: by that the kernel half finds its stack when it ends,
and here it is found for those that go on when a window closes.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.model.profile import StopReason
from aiflame.agent.model.window import NO_CHAIN
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.processes.threads import swept_threads
from aiflame.agent.recording.pythons import PythonProcesses
from aiflame.agent.recording.sleep_walks import Sleeper, SleepWalks, run
from aiflame.agent.recording.stacks import SWEPT_STACKS, MadeStack, Stacks, digest
from aiflame.agent.rows import take_rows

Array = npt.NDArray[np.void]

# A wait has its stack before it is long.
_PAUSE_NS = abi.LONG_WAIT_NS // 2
# In one sweep, 0.2 ms each: a tenth of a CPU at most.
_MOST_WALKED = 250
# Stacks that several waits share.
_MOST_SHARED = 1 << 14
# A sweep looks at each thread of a host, and walks some. With thrift, each of the two takes at most
# one part in (this ratio * thrift) of a CPU: an eighth of a per cent with the most of it. Looks
# between the ends of windows are as far apart as that takes: half a second beside eight containers,
# half a minute on a host of 10,000 threads. Walks are made of what has been saved up.
_MIN_COST_RATIO = 50
# What is saved up for walks is forgotten: no more of it than for so long.
_MOST_SAVED_NS = 10 * abi.LONG_WAIT_NS
# Of a walk, before one was made.
_FIRST_WALK_NS = 200_000
# What the latest sweep says of that, and what all before it do.
_LATEST_SHARE = 0.2
# Threads of which a long wait is known that other waits may have the stack of, and for how long:
# half of the time after which windows forget it (chance.EarlierStacks), so that it is known again.
_MOST_KNOWN, _KNOWN_NS = 1 << 14, 240 * abi.LONG_WAIT_NS
# How often a wait is walked whose tables are not there yet.
_MOST_TRIES = 3


class LongWaits:
    """Long waits without a stack of the kernel half's.

    Args:
        programs: Loaded.
        table: Process table.
        walks: Walks user stacks.
        pythons: Keeps Python stacks.
        stacks: Takes stacks.

    Attributes:
        due_ns: When to `poll` next, monotonic.
        walked: How many were walked so far.
        thrift: How many times fewer are walked than may be, and sweeps are apart. Waits that are
            over before one have the stack of others of their thread (`chance.fill_in`). So threads
            of which none is known are walked first in each second sweep, and in the others, so that
            nobody keeps others from it by new threads, who has slept longest.
    """

    def __init__(
        self,
        programs: Programs,
        table: ProcessTable,
        walks: SleepWalks,
        pythons: PythonProcesses,
        stacks: Stacks,
    ) -> None:
        self._programs = programs
        self._table = table
        self._walks = walks
        self._pythons = pythons
        self._stacks = stacks
        self.due_ns = 0
        self.walked = 0
        self.thrift = 1
        self._shared: OrderedDict[bytes, int] = OrderedDict()  # ids by digest
        self._made = 0
        self._swept: dict[int, tuple[int, int]] = {}  # when it began, and its stack, by thread
        self._tries: dict[tuple[int, int], int] = {}  # by thread and when it began
        # When one of theirs was walked, by thread and image, the latest last.
        self._known: OrderedDict[tuple[int, int], int] = OrderedDict()
        # Whether they were in the latest sweep, of those at the ends of windows and of all others.
        self._are_new_first = {True: False, False: False}
        self._walk_ns = float(_FIRST_WALK_NS)
        self._saved_ns, self._saved_at_ns = 0.0, time.monotonic_ns()

    def poll(self) -> None:
        """Sweeps once it is due."""
        if time.monotonic_ns() >= self.due_ns:
            # Of younger ones most end before they are long, and others are met the next time.
            self.sweep(_PAUSE_NS)

    def sweep(self, least_ns: int = abi.OPEN_WAIT_NS) -> None:
        """Reads those that are old enough by now.

        Args:
            least_ns: How old, OPEN_WAIT_NS or more.
        """
        now_ns, begun_ns = time.monotonic_ns(), time.thread_time_ns()
        self.due_ns = now_ns + _PAUSE_NS
        looked = self._looked(now_ns - least_ns)
        looked_ns = time.thread_time_ns()
        if self.thrift > 1:
            took_ns = looked_ns - begun_ns
            self.due_ns = max(self.due_ns, now_ns + _MIN_COST_RATIO * self.thrift * took_ns)
        if looked is None:
            return
        found, most = looked, _MOST_WALKED // self.thrift
        is_end = least_ns <= abi.OPEN_WAIT_NS
        if not is_end:
            most = min(most, self._affordable(now_ns))
        self._forget_tries(found)
        if not most or not len(found):
            return
        found = take_rows(found, self._order(found, now_ns, is_end=is_end)[:most])
        self._walk_and_keep(found, now_ns)
        took_ns = time.thread_time_ns() - looked_ns
        self._walk_ns += _LATEST_SHARE * (took_ns / len(found) - self._walk_ns)
        self._saved_ns = max(self._saved_ns - took_ns, -self._most_saved_ns)

    def _forget_tries(self, found: Array) -> None:
        """Forgets how often waits were tried to be walked that are over."""
        tried = np.fromiter((tid for tid, _ in self._tries), np.uint32, len(self._tries))
        found = take_rows(found, np.isin(found["tid"], tried))
        waiting = {*zip(found["tid"].tolist(), found["switched_ns"].tolist(), strict=True)}
        self._tries = {key: n for key, n in self._tries.items() if key in waiting}

    def _looked(self, until_ns: int) -> Array | None:
        """Returns the threads that have slept since then, or since earlier, without a stack."""
        fd = self._programs.sweep_iterator_fd
        if fd is None:
            return None
        try:
            found = swept_threads(fd)
        except OSError:  # no memory for it just now
            return None
        return take_rows(found, found["switched_ns"] <= until_ns)

    def _affordable(self, now_ns: int) -> int:
        """Returns how many may be walked between the ends of windows, of what was saved up."""
        if self.thrift == 1:
            self._saved_ns, self._saved_at_ns = 0.0, now_ns
            return _MOST_WALKED
        most_ns = self._most_saved_ns
        gained_ns = (now_ns - self._saved_at_ns) / (_MIN_COST_RATIO * self.thrift)
        self._saved_ns, self._saved_at_ns = min(self._saved_ns + gained_ns, most_ns), now_ns
        # One in any case where no more can be saved up: however long a walk takes.
        return max(int(self._saved_ns / self._walk_ns), int(self._saved_ns >= most_ns))

    @property
    def _most_saved_ns(self) -> float:
        return _MOST_SAVED_NS / (_MIN_COST_RATIO * self.thrift)

    def _order(self, found: Array, now_ns: int, *, is_end: bool) -> npt.NDArray[np.intp]:
        """Returns in which order to walk: the longest first, each second time the unknown first."""
        self._are_new_first[is_end] = not self._are_new_first[is_end]
        if not self._are_new_first[is_end]:
            return np.argsort(found["switched_ns"], kind="stable")
        least_ns = now_ns - _KNOWN_NS
        threads = found[["tid", "image"]].tolist()
        is_known = np.fromiter(
            (self._known.get(thread, least_ns) > least_ns for thread in threads), bool, len(found)
        )
        order: npt.NDArray[np.intp] = np.lexsort((found["switched_ns"], is_known))
        return order

    def _walk_and_keep(self, found: Array, now_ns: int) -> None:
        sleepers = self._walk_all(found)
        for record, sleeper in zip(found, sleepers, strict=True):
            key = sleeper.tid, int(record["switched_ns"])
            tries = self._tries[key] = self._tries.get(key, 0) + 1
            is_possible = self._walks.are_possible
            if is_possible and sleeper.walked is None and tries < _MOST_TRIES:
                continue
            self._keep(record, sleeper, now_ns)
        self._walks.forget()

    def _walk_all(self, found: Array) -> list[Sleeper]:
        sleepers = [
            Sleeper(int(record["tgid"]), int(record["tid"]), int(record["image"]))
            for record in found
        ]
        for pid, number in {(sleeper.pid, sleeper.image) for sleeper in sleepers}:
            image = self._table.image(pid, number)
            if not image.was_read:
                self._table.read_mappings(image)
        snapshots = self._walks.take([(sleeper.pid, sleeper.tid) for sleeper in sleepers])
        for record, sleeper in zip(found, sleepers, strict=True):
            snapshot = snapshots.get(sleeper.tid)
            if snapshot is None:
                continue
            registers = snapshot.registers
            if (registers.pid, registers.ran_ns) == (sleeper.pid, int(record["ran_ns"])):
                sleeper.snapshot = snapshot  # of this wait
        run(self._walks.walk_python(sleepers))
        run(self._walks.walk(sleepers))
        return sleepers

    def _keep(self, record: np.void, sleeper: Sleeper, now_ns: int) -> None:
        """Tells the kernel half, and windows, what the stack of a wait is."""
        image = self._table.image(sleeper.pid, sleeper.image)
        kernel = record["kernel"][: max(int(record["kernel_bytes"]), 0) // 8].tolist()
        walked, python = sleeper.walked, sleeper.python
        user = () if walked is None else walked.addresses
        end = StopReason.NOT_WALKED if walked is None else walked.end
        if not self._walks.are_wanted:
            end = StopReason.EXCLUDED
        content = digest([image.index, end, len(kernel), *kernel, *user], python)
        stack = self._shared.get(content)
        if stack is None or self._stacks.row(stack) is None:
            self._made += 1
            stack = self._shared[content] = SWEPT_STACKS + self._made
            chain, gil = NO_CHAIN, 0
            if python is not None:
                self._pythons.keep(stack, image, python)
                chain, gil = stack, int(python.gil)
            self._stacks.add_made(stack, MadeStack(image, kernel, list(user), end, chain, gil))
            if len(self._shared) > _MOST_SHARED:
                self._shared.popitem(last=False)
        self.walked += 1
        value = np.array([(record["switched_ns"], stack)], abi.SWEPT_STACK_DTYPE)
        try:
            self._programs.swept_stacks.update(sleeper.tid.to_bytes(4, "little"), value.tobytes())
        except OSError:  # the map is full: the wait stays without a stack
            return
        self._swept[sleeper.tid] = int(record["switched_ns"]), stack
        self._known[sleeper.tid, sleeper.image] = now_ns
        self._known.move_to_end((sleeper.tid, sleeper.image))
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def close(self, tids: npt.NDArray[np.uint32], states: Array) -> None:
        """Puts their stacks into the states of threads that are in long waits at a boundary.

        Args:
            tids: Of all threads.
            states: Of these, THREAD_STATE_DTYPE; stacks are replaced in them.
        """
        if not self._swept:
            return
        over = dict(self._swept)
        wanted = np.fromiter(self._swept, np.uint32, len(self._swept))
        for index in np.flatnonzero(np.isin(tids, wanted)).tolist():
            switched_ns, stack = self._swept[int(tids[index])]
            for interval in (states[index], states[index]["crossing"]):
                if int(interval["switched_ns"]) == switched_ns:
                    if int(interval["stack"]) == abi.NOT_SAMPLED_STACK:
                        interval["stack"] = stack
                    over.pop(int(tids[index]), None)
        for tid, (switched_ns, _) in over.items():
            # It has ended, in this window: what the kernel half has summed has its stack.
            if self._swept[tid][0] == switched_ns:
                del self._swept[tid]
                self._programs.swept_stacks.delete(tid.to_bytes(4, "little"))
