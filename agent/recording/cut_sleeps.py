# SPDX-License-Identifier: Apache-2.0
"""Sleeps whose stack was cut as its tables came too late: read again, and walked, while they last.

A context switch walks a stack with what is there at that moment. A thread that goes to sleep before
the tables, the mappings or the interpreter of its process are known would keep its truncated stack
for as long as it sleeps. It is looked for when tables have come for its process, and at each
boundary of windows. From then on its wait has a stack of the host half's own, which windows are
told at once as it is, and again when it has been walked: so a recording that is killed shows the
truncated stack, and one that goes on the complete one, also in windows that were closed before.

A thread may wake up before its tables come: then the copy of its stack is walked when they do. A
snapshot is of that sleep if the thread has not run since the switch (task_struct.se.
sum_exec_runtime, which the kernel half kept). Kernel frames stay those of the switch.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import NO_CHAIN
from aiflame.agent.processes.snapshots import Snapshot
from aiflame.agent.processes.table import NO_BINARY, ProcessImage, ProcessTable
from aiflame.agent.processes.threads import ThreadRegisters
from aiflame.agent.processes.unwind_tables import UnwindTables
from aiflame.agent.recording.cut_stacks import CutStack
from aiflame.agent.recording.pythons import PythonProcesses
from aiflame.agent.recording.sleep_walks import Sleeper, SleepWalks, run
from aiflame.agent.recording.stacks import LATE_SLEEPS, LateWalk, Stacks, digest
from aiflame.agent.rows import join_rows, take_rows

Array = npt.NDArray[np.void]

# Shorter sleeps are not worth the 0.2 ms of a walk; most end meanwhile.
_LEAST_SLEEP_NS = 20_000_000
# Between two looks at processes whose tables are coming: a look takes a millisecond.
_PAUSE_NS = 50_000_000
# Read again in each window: 500 walks take 0.1 s.
_MOST_READ = 500
# Each waits with a stack of its own until it has been walked: a window has room for 8,192 of one
# process.
_MOST_WAITING = 2048
# All that are replaced in waits that go on, 400 bytes each.
_MOST_SLEEPS = 1 << 14
# Once for its mappings, once for the tables of each library on the way: by then it stays as it is.
_MOST_TRIES = 10
# The tables of all of PyTorch's libraries take five seconds.
_PATIENCE_NS = 15_000_000_000
# Of stacks that several threads share.
_MOST_SHARED = 1 << 12
# Copies of stacks, of 16 KiB, that wait for tables, and those when the recording has ended.
_MOST_COPIES, _MOST_LAST_COPIES = 1 << 9, 1 << 12

_WAITING = (SampleClass.BLOCKED, SampleClass.WAITING_TO_RUN)
_COMPLETE = (StopReason.ROOTED_BY_TABLE, StopReason.ROOTED_BY_HEURISTIC, StopReason.KERNEL_ONLY)


@dataclass(slots=True, kw_only=True)
class CutSleep(Sleeper):
    """A thread in a sleep whose stack was cut. Times are monotonic ns.

    Attributes:
        switched_ns: When it fell asleep.
        started_ns, ran_ns: As the kernel half had them then: they tell the thread and the sleep.
        stack: As the kernel half took it.
        cut: What is known of that.
        made: Id of what replaces it.
        tries: How often it was walked.
        is_deferred: It had to wait for others.
        is_settled: It will not be walked again.
        is_told: Windows know `made`, as it was cut.
        is_whole: They know it, and more of it than was before.
        wait_ns: How long it was blocked, and then waited to run, if it was told.
        ended_ns: The boundary after its end.
        is_charged: A window that is closed has time in it.
        ns: What was charged to it.
    """

    switched_ns: int
    started_ns: int
    ran_ns: int
    stack: int
    cut: CutStack
    made: int
    tries: int = 0
    is_deferred: bool = False
    is_settled: bool = False
    is_told: bool = False
    is_whole: bool = False
    wait_ns: tuple[int, int] | None = None
    ended_ns: int = 0
    is_charged: bool = False
    ns: int = 0

    @property
    def is_copied(self) -> bool:
        """Whether it can be walked later, even if the thread wakes up."""
        return self.snapshot is not None and not self.is_settled

    def is_shown_by(self, registers: ThreadRegisters) -> bool:
        """Whether the thread's registers are of this sleep."""
        return (registers.pid, registers.started_ns, registers.ran_ns) == (
            self.pid,
            self.started_ns,
            self.ran_ns,
        )


@dataclass(frozen=True, slots=True)
class LateWaits:
    """What became of waits whose stacks had been cut.

    Attributes:
        walked: How many were walked.
        walked_ns: How long these lasted.
    """

    walked: int
    walked_ns: int


class CutSleeps:
    """The sleeps that go on, and whose stack was cut.

    Args:
        programs: Loaded.
        table: Process table.
        tables: Unwind tables.
        walks: Walks them.
        pythons: Keeps Python stacks.
        stacks: Knows which were cut, and takes what was walked.

    Attributes:
        losses: What was left out.
        thrift: How many times fewer are read in a window, and looks are apart, than at first.
    """

    def __init__(
        self,
        programs: Programs,
        table: ProcessTable,
        tables: UnwindTables,
        walks: SleepWalks,
        pythons: PythonProcesses,
        stacks: Stacks,
    ) -> None:
        self._programs = programs
        self._table = table
        self._tables = tables
        self._walks = walks
        self._pythons = pythons
        self._stacks = stacks
        self._sleeps: dict[tuple[int, int], CutSleep] = {}  # by thread and when it fell asleep
        self._ended: list[CutSleep] = []  # in the open window
        self._copied: list[CutSleep] = []  # have ended, and wait for tables
        self._over: list[CutSleep] = []  # have ended, and wait no more
        self._made = 0
        self._boundary_ns = 0
        self._shared: OrderedDict[bytes, int] = OrderedDict()  # ids by digest
        self._left_to_read = _MOST_READ
        self._window_ns = 0
        self._read_ns: dict[int, int] = {}  # when mappings were read again, by image
        self._due: dict[int, int] = {}  # by pid
        self._rest_until_ns = 0
        self._most_left_out = 0
        self._whole, self._whole_ns = 0, 0
        self.losses: Counter[LossKind] = Counter()
        self.thrift = 1

    @property
    def due_ns(self) -> int:
        """When to `poll` next, monotonic."""
        return max(min(self._due.values(), default=abi.NEVER_NS), self._rest_until_ns)

    def poll(self) -> None:
        """Reads threads of processes whose tables are coming."""
        now_ns = time.monotonic_ns()
        for pid in self._tables.take_pushed():
            self._due.setdefault(pid, now_ns + _LEAST_SLEEP_NS)
        if not self._walks.are_possible:
            self._due.clear()
        if now_ns < self.due_ns:
            return
        self._rest_until_ns = now_ns + _PAUSE_NS * self.thrift
        due = [pid for pid, at_ns in self._due.items() if at_ns <= now_ns]
        for pid in due:
            del self._due[pid]
        living = [*filter(self._is_there, due)]
        if living:  # where processes are short, there is mostly none
            self._look_at(living, now_ns)
        self._read()

    def _is_there(self, pid: int) -> bool:
        latest = self._table.latest(pid)
        return latest is not None and not latest.is_over

    def _look_at(self, pids: Sequence[int], now_ns: int) -> None:
        """Looks through the threads of processes; later again where tables are still built."""
        found_tids, found_states = [], []
        for some_tids, some_states in self._programs.threads.chunks():
            is_due = np.isin(some_states["tgid"], pids)
            found_tids.append(some_tids[is_due])
            found_states.append(take_rows(some_states, is_due))
        tids = join_rows(found_tids, self._programs.threads.key_dtype)
        states = join_rows(found_states, abi.THREAD_STATE_DTYPE)
        self._bring({*states["stack"][_are_asleep(states, now_ns)].tolist()})
        self._look(tids, states, now_ns)
        for pid, number in {*states[["tgid", "image"]].tolist()}:
            if self._is_incomplete(self._table.known(pid, number)):
                self._due.setdefault(pid, now_ns)

    def _is_incomplete(self, image: ProcessImage | None) -> bool:
        """Whether tables of a process are being built."""
        if image is None:
            return False
        binaries = {mapping.binary for mapping in image.mappings} - {NO_BINARY}
        return any(map(self._tables.is_being_built, binaries))

    def used_images(self) -> set[int]:
        """Returns the process images, by index, whose stacks wait for tables."""
        return {sleep.cut.image.index for sleep in self._copied}

    def _bring(self, stacks: Collection[int]) -> None:
        """Takes in stacks that the next drain would bring."""
        for stack in stacks:
            if not self._stacks.has_come(stack):
                record = self._programs.stacks.lookup(stack.to_bytes(8, "little"))
                if record is not None:
                    self._stacks.add(np.array([stack], np.uint64), record)

    def _look(self, tids: npt.NDArray[np.uint32], states: Array, now_ns: int) -> None:
        """Finds sleeps that are cut."""
        if not self._walks.are_possible:
            return
        is_cut = _are_asleep(states, now_ns)
        is_cut[is_cut] = self._stacks.cut.are_cut(states["stack"][is_cut])
        waiting = sum(not sleep.is_settled for sleep in self._sleeps.values()) + len(self._copied)
        left_out = 0
        for tid, state in zip(tids[is_cut].tolist(), states[is_cut], strict=True):
            name = (tid, int(state["switched_ns"]))
            if name in self._sleeps:
                continue
            if waiting >= _MOST_WAITING or len(self._sleeps) >= _MOST_SLEEPS:
                left_out += 1
                continue
            waiting += 1
            self._made += 1
            self._sleeps[name] = CutSleep(
                pid=int(state["tgid"]),
                tid=tid,
                image=int(state["image"]),
                switched_ns=name[1],
                started_ns=int(state["started_ns"]),
                ran_ns=int(state["ran_ns"]),
                stack=int(state["stack"]),
                cut=self._stacks.cut.by_id[int(state["stack"])],
                made=LATE_SLEEPS + self._made,
            )
        if left_out > self._most_left_out:
            self.losses[LossKind.CUT_SLEEPS_LEFT] += left_out - self._most_left_out
            self._most_left_out = left_out

    def _read(self) -> None:
        """Reads and walks those that may be whole now, as many as may be in a window."""
        self._read_processes()
        unsettled = [*self._sleeps.values(), *self._copied]
        ready = [sleep for sleep in unsettled if self._is_ready(sleep)]
        chosen, rest = ready[: self._left_to_read], ready[self._left_to_read :]
        self._left_to_read -= len(chosen)
        for sleep in rest:
            sleep.is_deferred = True
        if chosen:
            self._walk(chosen)
            if all(sleep.is_settled for sleep in unsettled):
                self._walks.forget()
        self._drop_copies()

    def _walk(self, chosen: Sequence[CutSleep]) -> None:
        """Reads those of which there is no copy, and walks all."""
        fresh = [sleep for sleep in chosen if sleep.snapshot is None]
        self._take_snapshots(fresh)
        run(self._walks.walk_python(fresh))
        snapshots = [sleep.snapshot for sleep in chosen]
        begun_ns = time.monotonic_ns()
        run(self._walks.walk(chosen))
        for sleep, snapshot in zip(chosen, snapshots, strict=True):
            self._take_in(sleep, snapshot, begun_ns)

    def _drop_copies(self) -> None:
        """Keeps a bounded number of copies; threads that sleep on are read again."""
        self._over += [sleep for sleep in self._copied if sleep.is_settled]
        self._copied = [sleep for sleep in self._copied if not sleep.is_settled]
        most = _MOST_COPIES - len(self._copied)
        copies = [sleep for sleep in self._sleeps.values() if sleep.snapshot is not None]
        for sleep in copies[max(most, 0) :]:
            sleep.snapshot = None

    def _read_processes(self) -> None:
        """Reads the mappings of processes that have not been read yet."""
        unsettled = [sleep for sleep in self._sleeps.values() if not sleep.is_settled]
        for pid, number in {(sleep.pid, sleep.image) for sleep in unsettled}:
            image = self._table.image(pid, number)
            if not image.was_read:
                self._table.read_mappings(image)

    def _is_ready(self, sleep: CutSleep) -> bool:
        if sleep.is_settled:
            return False
        image = self._table.known(sleep.pid, sleep.image)
        if image is None or not image.was_read:
            sleep.tries += 1
            sleep.is_settled = sleep.tries >= _MOST_TRIES
            return False
        return not any(map(self._tables.is_being_built, sleep.lacks))

    def _take_snapshots(self, sleeps: Sequence[CutSleep]) -> None:
        found = self._walks.take([(sleep.pid, sleep.tid) for sleep in sleeps])
        for sleep in sleeps:
            snapshot = found.get(sleep.tid)
            if snapshot is not None and sleep.is_shown_by(snapshot.registers):
                sleep.snapshot = snapshot
            else:
                sleep.is_settled = True  # it has woken up

    def _take_in(self, sleep: CutSleep, snapshot: Snapshot | None, begun_ns: int) -> None:
        """Uses what a walk of a snapshot has found that began at a monotonic time."""
        if sleep.is_settled:
            return
        image = self._table.known(sleep.pid, sleep.image)
        sleep.tries += 1
        is_last = sleep.tries >= _MOST_TRIES
        if sleep.walked is None or image is None:
            sleep.is_settled = is_last
            return
        is_cut = sleep.walked.end not in _COMPLETE
        if is_cut and not is_last and self._may_be_mapped(image, sleep.switched_ns, begun_ns):
            sleep.walked, sleep.snapshot = None, snapshot
            return
        if sleep.python is None and self._pythons.is_starting(image) and not is_last:
            return
        self._define(sleep)
        sleep.is_settled = True
        if not sleep.is_whole and sleep.walked.end is not StopReason.UNREADABLE:
            self._stacks.cut.forget(sleep.stack)

    def _may_be_mapped(self, image: ProcessImage, switched_ns: int, begun_ns: int) -> bool:
        """Whether a walk may have met a library that was loaded since mappings were read.

        They are read again, once in a window: a process may have 65,530.

        Args:
            image: Of the process.
            switched_ns: When the thread fell asleep: what is on its stack was mapped by then.
            begun_ns: When it was walked.
        """
        read_ns = self._read_ns.get(image.index, 0)
        if read_ns > switched_ns:
            return read_ns > begun_ns
        if read_ns > self._window_ns:
            return True
        self._read_ns[image.index] = time.monotonic_ns()
        return self._table.read_mappings(image)

    def _define(self, sleep: CutSleep) -> None:
        """Gives windows what was walked, if it says more than what is known."""
        base = sleep.made if sleep.is_told else sleep.stack
        known, walked, python = self._stacks.row(base), sleep.walked, sleep.python
        if known is None or walked is None or sleep.is_whole:
            return
        was_complete = int(known["stop_reason"]) in _COMPLETE
        is_longer = len(walked.addresses) > int(known["user_depth"])
        has_user = not was_complete and (walked.end in _COMPLETE or is_longer)
        has_python = python is not None and int(known["chain"]) == NO_CHAIN
        if not has_user and not has_python:
            if sleep.is_told:  # it is cut for good
                final = LateWalk(None, sleep.cut.end, NO_CHAIN, 0, sleep.cut)
                self._stacks.copy(base, sleep.made, final, is_late=True)
            return
        user, end = (walked.addresses, walked.end) if has_user else (None, sleep.cut.end)
        if not sleep.is_told:
            whose = (sleep.image, sleep.pid, sleep.stack)
            content = digest([*whose, end, user is None, *(user or ())], python)
            shared = self._shared.setdefault(content, sleep.made)
            if shared != sleep.made and self._stacks.row(shared) is not None:
                sleep.made, sleep.is_whole = shared, True
                return
            self._shared[content] = sleep.made
            if len(self._shared) > _MOST_SHARED:
                self._shared.popitem(last=False)
        chain, gil = NO_CHAIN, 0
        if has_python and python is not None:
            self._pythons.keep(sleep.made, sleep.cut.image, python)
            chain, gil = sleep.made, int(python.gil)
        late = LateWalk(user, end, chain, gil, sleep.cut)
        sleep.is_whole = self._stacks.copy(base, sleep.made, late, is_late=sleep.is_told)

    def _tell(self, sleep: CutSleep) -> bool:
        """Gives windows the stack of a sleep as it is; returns whether they know one."""
        row = self._stacks.row(sleep.stack)
        is_final = sleep.is_told or sleep.is_whole or sleep.is_settled
        # One that only lacks Python is better than none that may come.
        if not is_final and row is not None and int(row["stop_reason"]) not in _COMPLETE:
            early = LateWalk(None, StopReason.NO_TABLE_YET, NO_CHAIN, 0, sleep.cut)
            sleep.is_told = self._stacks.copy(sleep.stack, sleep.made, early)
        return sleep.is_told or sleep.is_whole

    def take_wait(self, event: np.void) -> int:
        """Takes note of a long wait, by its WAIT_EVENT_DTYPE; returns what its stack is now."""
        stack = int(event["stack"])
        sleep = self._sleeps.get((int(event["tid"]), int(event["start_ns"])))
        if sleep is not None:
            sleep.wait_ns = int(event["blocked_ns"]), int(event["runnable_ns"])
        if sleep is None or not (sleep.is_charged or sleep.is_whole or sleep.is_copied):
            return stack
        return sleep.made if self._tell(sleep) else stack

    def close(
        self,
        boundary_ns: int,
        tids: npt.NDArray[np.uint32],
        states: Array,
        keys: Array,
        values: Array,
        *,
        is_last: bool = False,
    ) -> tuple[Array, Array]:
        """Replaces stacks at a boundary of windows.

        Args:
            boundary_ns: Monotonic.
            tids: Of all threads.
            states: Of these, THREAD_STATE_DTYPE, read after the boundary; stacks are replaced in
                them.
            keys, values: What the kernel half summed before the boundary.
            is_last: The recording ends there.

        Returns:
            The sums, with the stacks of sleeps that have ended replaced.
        """
        self._left_to_read = _MOST_READ // self.thrift
        self._window_ns = time.monotonic_ns()
        self._read_ns = {i: ns for i, ns in self._read_ns.items() if i in self._table.images}
        self._look(tids, states, boundary_ns)
        wanted = {tid for tid, _ in self._sleeps}
        at = {tid: index for index, tid in enumerate(tids.tolist()) if tid in wanted}
        places = {
            name: place
            for name, sleep in self._sleeps.items()
            if (place := _place(sleep, states, at.get(sleep.tid), boundary_ns)) is not None
        }
        ended = [self._sleeps.pop(name) for name in [*self._sleeps] if name not in places]
        self._ended = ended
        self._copied += [sleep for sleep in ended if sleep.is_copied]
        for sleep in ended:
            sleep.ended_ns = boundary_ns
        for sleep in self._copied:
            sleep.is_settled |= boundary_ns - sleep.ended_ns > _PATIENCE_NS
        self._over += [sleep for sleep in ended if not sleep.is_copied]
        self._read()
        for sleep in self._over:
            self._define(sleep)  # it was kept back until there would be Python frames
        for name, place in places.items():
            sleep = self._sleeps[name]
            if self._tell(sleep):
                sleep.is_charged = True
                place["stack"] = sleep.made
            elif sleep.is_settled:
                del self._sleeps[name]
        if is_last:
            self._keep()
        told = [sleep for sleep in ended if self._tell(sleep)]
        keys, values = _renamed(keys, values, told, self._boundary_ns)
        self._boundary_ns = boundary_ns
        return keys, values

    def note(self, keys: Array, values: Array) -> None:
        """Adds up what the window that closes has of them: all its rows."""
        sleeps = {(s.made, s.tid): s for s in (*self._sleeps.values(), *self._ended)}
        is_made = keys["stack"] >> np.uint64(31) == LATE_SLEEPS >> 31
        for key, value in zip(keys[is_made], values[is_made], strict=True):
            sleep = sleeps.get((int(key["stack"]), int(key["tid"])))
            if sleep is not None:
                sleep.ns += int(value["ns"])
        for sleep in self._over:
            self._count(sleep)
        self._ended, self._over = [], []

    def _count(self, sleep: CutSleep) -> None:
        """Takes note of how a sleep ended."""
        if sleep.is_whole:
            self._whole += 1
            self._whole_ns += sleep.ns
        else:
            self.losses[LossKind.CUT_SLEEPS_LEFT] += sleep.is_deferred and not sleep.tries

    def _keep(self) -> None:
        """Takes snapshots of those that wait for tables when the recording ends."""
        left = [s for s in self._sleeps.values() if not (s.is_settled or s.is_copied)]
        self._take_snapshots(left[:_MOST_LAST_COPIES])

    def finish(self) -> LateWaits:
        """Walks what is left, once the recording has ended; may wait for tables."""
        sleeps = [*self._sleeps.values(), *self._copied]
        left = [sleep for sleep in sleeps if sleep.is_copied]
        if left:
            self._walks.finish(left)
        for sleep in sleeps:
            self._define(sleep)
            self._count(sleep)
        self._sleeps.clear()
        self._copied.clear()
        return LateWaits(self._whole, self._whole_ns)

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets the cut stacks of process images that have ended."""
        known = self._stacks.cut.by_id
        gone = [stack for stack, cut in known.items() if cut.image.index in images]
        for stack in gone:
            del known[stack]


def _are_asleep(states: Array, now_ns: int) -> npt.NDArray[np.bool_]:
    """Tells which threads have been asleep for so long that they are worth a look."""
    began_ns = states["switched_ns"]
    found: npt.NDArray[np.bool_] = (
        (states["off_class"] == SampleClass.BLOCKED)
        & (states["waking_ns"] == 0)
        & (began_ns > 0)
        & (began_ns + np.uint64(_LEAST_SLEEP_NS) <= now_ns)
    )
    return found


def _place(sleep: CutSleep, states: Array, index: int | None, boundary_ns: int) -> np.void | None:
    """Returns where a sleep that went on at a boundary is: a state, or what one says of that."""
    if index is None:
        return None
    state = states[index]
    if int(state["image"]) != sleep.image:
        return None
    if int(state["switched_ns"]) == sleep.switched_ns:
        found: np.void = state
        return found
    crossing: np.void = state["crossing"]
    went_on = int(crossing["boundary_ns"]) == boundary_ns
    return crossing if went_on and int(crossing["switched_ns"]) == sleep.switched_ns else None


def _renamed(
    keys: Array, values: Array, ended: Sequence[CutSleep], begin_ns: int
) -> tuple[Array, Array]:
    """Replaces the stacks of sleeps that have ended in what was summed meanwhile.

    A thread may have slept with the same cut stack several times: its sum is split by the events of
    long waits. Where there was none it stays as it is, and the sleep ends in a row of no time.

    Args:
        keys, values: Sums of a window.
        ended: Sleeps that ended in it.
        begin_ns: Where it begins, monotonic: programs summed what is past that.
    """
    if not ended:
        return keys, values
    keys, values = keys.copy(), values.copy()
    rows: dict[tuple[int, ...], int] = {}
    stacks = np.array([sleep.stack for sleep in ended], np.uint64)
    is_one = np.isin(keys["stack"], stacks) & (keys["sample_class"] != SampleClass.ON_CPU)
    names = keys[["stack", "tid", "image", "sample_class", "weight"]]
    for row in np.flatnonzero(is_one).tolist():
        *name, weight = names[row].item()
        name.append(int(weight == abi.WEIGHT_EXACT))
        rows[tuple(name)] = row
    more: list[tuple[np.void, int]] = []
    for sleep in ended:
        ends_ns = np.cumsum([sleep.switched_ns, *(sleep.wait_ns or (0, 0))]).tolist()
        parts_ns = [max(end - max(begin, begin_ns), 0) for begin, end in pairwise(ends_ns)]
        for kind, part_ns in zip(_WAITING, parts_ns, strict=True):
            name = (sleep.stack, sleep.tid, sleep.image, int(kind))
            # Of a recording by chance, waits that are not long have weights.
            is_long = sum(sleep.wait_ns or ()) >= abi.LONG_WAIT_NS
            row = rows.get((*name, int(is_long)), rows.get((*name, 1)))
            if row is not None and int(values[row]["count"]) == 1:
                keys[row]["stack"] = sleep.made
            elif row is not None and sleep.wait_ns and part_ns <= int(values[row]["ns"]):
                values[row]["count"] -= np.uint64(1)
                values[row]["ns"] -= np.uint64(part_ns)
                more.append((_key(sleep, kind, int(keys[row]["weight"])), part_ns))
            elif sleep.is_charged and kind is SampleClass.BLOCKED:
                more.append((_key(sleep, kind, abi.WEIGHT_EXACT), 0))
    more_keys = np.array([key for key, _ in more], abi.SUM_KEY_DTYPE)
    more_values = np.array([(1, ns) for _, ns in more], abi.SUM_VALUE_DTYPE)
    return np.concatenate([keys, more_keys]), np.concatenate([values, more_values])


def _key(sleep: CutSleep, kind: SampleClass, weight: int) -> np.void:
    """Returns the key of a sum of a sleep's time."""
    key: np.void = np.zeros(1, abi.SUM_KEY_DTYPE)[0]
    key["stack"], key["image"], key["sample_class"] = sleep.made, sleep.image, kind
    key["tgid"], key["tid"], key["weight"] = sleep.pid, sleep.tid, weight
    return key
