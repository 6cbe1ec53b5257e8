# SPDX-License-Identifier: Apache-2.0
"""Charges the time of threads to windows, so that on and off CPU add up in each.

Programs charge an interval off the CPU when it ends, as far as it is past the last boundary. What
is before the boundary is charged here, once for each boundary: from the state of a thread that is
still in the interval, or from what the first program to see its end has kept of it (`struct
crossing` in bpf/aiflame.h). The same tells how long a thread had been on a CPU at the boundary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.model.window import COLUMNS, OpenWindow
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.rows import join_rows, take_rows

Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_KNOWN_DTYPE = np.dtype(
    [
        ("tid", "<u4"),
        ("tgid", "<u4"),
        ("image", "<u8"),
        ("started_ns", "<u8"),  # 0 while it is not known
        ("thread", "<u4"),
        ("process", "<u4"),
        ("on_cpu_ns", "<i8"),  # at the last boundary
        ("by_chance", abi.CHANCE_TOTAL_DTYPE, (2,)),  # as far as it was told
    ]
)


# Of a thread whose number windows do not know any more; there are never so many.
_NO_NUMBER = np.iinfo(np.uint32).max

# Ends of threads in a window, of 20,000: they are copied to be looked at.
_MOST_ENDS_BYTES = 1 << 22

# Keys and values of sums.
Part = tuple[Array, Array]


@dataclass(frozen=True, slots=True)
class Charged:
    """What a boundary has charged.

    Attributes:
        keys, values: Time off the CPU, as the kernel's sums have it; of an interval by chance with
            its weight, WEIGHT_NOT_CHOSEN where it has no stack. Where stacks are taken by chance,
            also waits to run for the first time that have ended.
        unseen: Threads that went off the CPU in a way that the kernel hides.
        totals: Intervals by chance that have ended, chosen or not, by thread and kind: keys and
            values of sums.
    """

    keys: Array
    values: Array
    unseen: int
    totals: Part


@dataclass(frozen=True, slots=True)
class _Charged:
    parts: list[Part]
    unseen: int


class ThreadTimes:
    """The threads of a recording, from boundary to boundary.

    Args:
        window: Gets how long threads were on a CPU, and how long they were there.
        table: Process table; knows when the recording began.
    """

    def __init__(self, window: OpenWindow, table: ProcessTable) -> None:
        self._window = window
        self._table = table
        self._boundary_ns = 0
        self._known: Array = np.zeros(0, _KNOWN_DTYPE)  # in the order of tids
        self._ends = bytearray()  # THREAD_EVENT_DTYPE, one after the other
        self._totals: list[Part] = []
        self._not_run: list[Part] = []

    def start(self, boundary_ns: int) -> None:
        """Begins the first window, at a monotonic time."""
        self._boundary_ns = boundary_ns

    def end(self, event: bytes) -> None:
        """Takes note that a thread has ended, by its THREAD_EVENT_DTYPE."""
        self._ends += event

    @property
    def is_filling(self) -> bool:
        """Whether many threads have ended in the open window."""
        return len(self._ends) > _MOST_ENDS_BYTES

    def join(self, boundary_ns: int, keys: Array, totals: Array) -> None:
        """Takes in what short-lived processes had in the window that is open.

        Args:
            boundary_ns: Where it ends, monotonic.
            keys: Of which cgroups, parents and names they were, SHORT_LIVED_KEY_DTYPE.
            totals: What their threads had, SHORT_LIVED_TOTAL_DTYPE.
        """
        each = (keys[name].tolist() for name in ("parent_tgid", "comm", "cgroup_id"))
        threads = [
            self._table.join_all(
                images, boundary_ns, parent, name.decode(errors="replace"), cgroup_id
            )
            for images, parent, name, cgroup_id in zip(
                totals["images"].tolist(), *each, strict=True
            )
        ]
        rows = np.zeros(len(threads), COLUMNS["thread_times"].dtype)
        rows["thread"] = [thread.index for thread in threads]
        rows["on_cpu_ns"], rows["observed_ns"] = totals["on_cpu_ns"], totals["observed_ns"]
        self._window.add("thread_times", rows)
        nobody = np.zeros(len(threads), np.uint32)
        images = np.array([thread.image.image for thread in threads], np.uint64)
        self._add_totals(nobody, nobody, images, totals["by_chance"])

    def _ended(self) -> Array:
        """Returns the ends that no window has told of, THREAD_EVENT_DTYPE."""
        return np.frombuffer(bytes(self._ends), abi.THREAD_EVENT_DTYPE)

    def unaccounted(self, keys: Array, tids: Array, states: Array) -> int:
        """Returns of how many threads there are sums, but neither a state nor an end as yet.

        Args:
            keys: Of the sums, SUM_KEY_DTYPE.
            tids: Of the threads that have a state.
            states: These.
        """
        ended = self._ended()
        known = np.concatenate(
            [name_of(tids, states["image"]), name_of(ended["tid"], ended["image"])]
        )
        return len(np.setdiff1d(name_of(keys["tid"], keys["image"]), known))

    def close(
        self,
        boundary_ns: int,
        tids: Array,
        states: Array,
        running: set[int],
        *,
        written: int = 0,
        is_last: bool = False,
    ) -> Charged:
        """Charges what lies before a boundary and is not charged yet.

        Args:
            boundary_ns: Monotonic. Programs know it, and it is over.
            tids: Of all threads, shape (n,).
            states: Of these, THREAD_STATE_DTYPE, read after the boundary.
            running: Threads that CPUs run, as far as their switches were seen.
            written: Which of the two totals by chance programs wrote until then.
            is_last: The recording ends there: the other one is taken as well.
        """
        ended = self._ended()
        is_over = ended["ns"] < boundary_ns
        since_entered = self._end_before(ended[is_over])
        # Whoever has ended since is at the boundary as its last event has it.
        late = ended[~is_over]
        # Also those that ended after their state was read.
        is_late = np.isin(name_of(tids, states["image"]), name_of(late["tid"], late["image"]))
        tids = np.concatenate([tids[~is_late], late["tid"]])
        states = join_rows([take_rows(states, ~is_late), _states_of(late)], abi.THREAD_STATE_DTYPE)
        is_there = states["first_seen_ns"] < boundary_ns
        is_unseen = _are_unseen(states)
        if is_last:
            states["off_class"][is_unseen] = SampleClass.PREEMPTED
        else:
            is_there &= ~is_unseen
        slots = (0, 1) if is_last else (written,)
        states = take_rows(states, is_there)
        charged = self._charge(boundary_ns, tids[is_there], states, running, slots)
        self._boundary_ns = boundary_ns
        self._ends = bytearray(late.tobytes())
        keys, values = concatenated([*since_entered, *charged.parts, *self._not_run])
        totals = concatenated(self._totals)
        self._not_run, self._totals = [], []
        return Charged(keys, values, charged.unseen, totals)

    def _total(
        self, tids: Array, rows: Array, at: I64, is_same: Bools, slots: tuple[int, ...]
    ) -> Array:
        """Takes what threads have more in their totals by chance; returns what was told of these.

        Args:
            tids, rows: Threads, with `image`, `tgid` and `by_chance`.
            at: Where they are in `_known`.
            is_same: Whether they are these.
            slots: Which totals are over.
        """
        before = np.zeros(len(rows), (abi.CHANCE_TOTAL_DTYPE, (2,)))
        if len(self._known):
            before[is_same] = self._known["by_chance"][at[is_same]]
        told = before.copy()
        for slot in slots:
            told[:, slot] = rows["by_chance"][:, slot]
            more = np.zeros(len(rows), abi.CHANCE_TOTAL_DTYPE)
            for name in ("ns", "count"):
                now, earlier = told[name], before[name]
                more[name] = now[:, slot] - earlier[:, slot]
            self._add_totals(tids, rows["tgid"], rows["image"], more)
        return told

    def _add_totals(self, tids: Array, tgids: Array, images: Array, more: Array) -> None:
        """Takes what threads have more in their totals, CHANCE_TOTAL_DTYPE."""
        # Programs may have been between the two when they were read.
        which, kind = np.nonzero((more["ns"] > 0) | (more["count"] > 0))
        keys = np.zeros(len(which), abi.SUM_KEY_DTYPE)
        keys["stack"], keys["weight"] = abi.NOT_SAMPLED_STACK, abi.WEIGHT_NOT_CHOSEN
        keys["tid"], keys["sample_class"] = tids[which], kind
        keys["image"], keys["tgid"] = images[which], tgids[which]
        values = np.zeros(len(which), abi.SUM_VALUE_DTYPE)
        values["ns"], values["count"] = more["ns"][which, kind], more["count"][which, kind]
        is_first = kind == abi.TOTAL_NOT_RUN
        self._totals.append((keys[~is_first], values[~is_first]))
        first = keys[is_first]
        first["stack"], first["weight"] = abi.NOT_RUN_STACK, abi.WEIGHT_EXACT
        first["sample_class"] = SampleClass.WAITING_TO_RUN
        self._not_run.append((first, values[is_first]))

    def _end_before(self, ended: Array) -> list[Part]:
        """Takes in threads that have ended; returns what is to be charged for them."""
        at = self._find(ended["tid"], ended["tgid"], ended["image"])
        is_late = (at < 0) & (ended["first_seen_ns"] < self._boundary_ns)
        is_same = (at >= 0) & self._have_grown(at, ended["by_chance"])
        before_ns = np.where(is_same, self._on_cpu_ns(at), 0)
        on_cpu_ns = ended["on_cpu_ns"].astype(np.int64) - before_ns
        self._total(ended["tid"], ended, at, is_same, (0, 1))
        rows = np.zeros(len(ended), COLUMNS["thread_times"].dtype)
        rows["thread"], _ = self._numbers(ended["tid"], ended["tgid"], ended["image"], at)
        rows["on_cpu_ns"] = np.maximum(on_cpu_ns, 0)
        rows["observed_ns"] = self._observed_ns(ended["first_seen_ns"], ended["ns"], is_late)
        self._window.add("thread_times", rows)
        # Its id may come again in the same process.
        self._known = self._known[~np.isin(np.arange(len(self._known)), at)]
        return self._before_entered(ended["tid"], ended, is_late)

    def _before_entered(self, tids: Array, rows: Array, is_late: Bools) -> list[Part]:
        """Charges intervals that began before the last boundary, of threads entered after it.

        Those that slept when the recording began are entered one by one: no window before has
        theirs, and programs have charged what is past the boundary only.
        """
        crossing = rows["crossing"]
        is_crossed = is_late & (crossing["boundary_ns"] == self._boundary_ns)
        is_crossed &= crossing["off_class"] != SampleClass.ON_CPU
        found = crossing[is_crossed]
        return _parts(
            self._boundary_ns, found["switched_ns"], tids[is_crossed], rows[is_crossed], found
        )

    def _charge(
        self,
        boundary_ns: int,
        tids: Array,
        states: Array,
        running: set[int],
        slots: tuple[int, ...],
    ) -> _Charged:
        crossing = states["crossing"]
        switched_ns = states["switched_ns"]
        is_open = (switched_ns > 0) & (switched_ns < boundary_ns)
        is_crossed = ~is_open & (crossing["boundary_ns"] == boundary_ns)
        is_on = is_open & (states["off_class"] == SampleClass.ON_CPU)
        # Others went off it in a way that the kernel hides: until when is not known.
        is_seen = np.isin(tids, list(running)) | (states["flags"] & abi.THREAD_SEEDED > 0)

        at = self._find(tids, states["tgid"], states["image"])
        is_late = (at < 0) & (states["first_seen_ns"] < self._boundary_ns)
        # An id may have come again without a word of its first thread's end.
        is_same = (at >= 0) & self._are_same(at, states["started_ns"])
        is_same &= self._have_grown(at, states["by_chance"])
        before_ns = np.where(is_same, self._on_cpu_ns(at), 0)
        on_cpu_ns = np.where(
            is_open,
            states["on_cpu_ns"].astype(np.int64),
            np.where(is_crossed, crossing["on_cpu_ns"].astype(np.int64), before_ns),
        )
        on_cpu_ns += np.where(is_on & is_seen, boundary_ns - switched_ns.astype(np.int64), 0)
        on_cpu_ns = np.maximum(on_cpu_ns, before_ns)

        threads, processes = self._numbers(tids, states["tgid"], states["image"], at)
        rows = np.zeros(len(tids), COLUMNS["thread_times"].dtype)
        rows["thread"], rows["on_cpu_ns"] = threads, on_cpu_ns - before_ns
        ends_ns = np.full(len(tids), boundary_ns, np.uint64)
        rows["observed_ns"] = self._observed_ns(states["first_seen_ns"], ends_ns, is_late)
        self._window.add("thread_times", rows)

        known = np.zeros(len(tids), _KNOWN_DTYPE)
        known["tid"], known["thread"], known["on_cpu_ns"] = tids, threads, on_cpu_ns
        known["process"] = processes
        known["by_chance"] = self._total(tids, states, at, is_same, slots)
        for name in ("tgid", "image", "started_ns"):
            known[name] = states[name]
        self._known = take_rows(known, np.argsort(tids, kind="stable"))

        interval = _interval_of(states)
        interval[is_crossed] = crossing[is_crossed]
        is_off = (is_open | is_crossed) & (interval["off_class"] != SampleClass.ON_CPU)
        begin_ns = np.where(
            is_late, interval["switched_ns"], np.maximum(interval["switched_ns"], self._boundary_ns)
        )
        parts = _parts(
            *(boundary_ns, begin_ns[is_off], tids[is_off]),
            *(take_rows(states, is_off), take_rows(interval, is_off)),
        )
        parts += self._before_entered(tids, states, is_late)
        return _Charged(parts, int((is_on & ~is_seen).sum()))

    def _observed_ns(self, first_seen_ns: Array, ends_ns: Array, is_late: Bools) -> Array:
        begin_ns = np.where(
            is_late, first_seen_ns, np.maximum(first_seen_ns, np.uint64(self._boundary_ns))
        )
        return np.maximum(ends_ns.astype(np.int64) - begin_ns.astype(np.int64), 0)

    def _find(self, tids: Array, tgids: Array, images: Array) -> I64:
        """Returns where threads are in `_known`, -1 for those that are not."""
        if not len(self._known):
            return np.full(len(tids), -1, np.int64)
        at = np.minimum(np.searchsorted(self._known["tid"], tids), len(self._known) - 1)
        found = take_rows(self._known, at)
        is_there = (found["tid"] == tids) & (found["tgid"] == tgids) & (found["image"] == images)
        return np.where(is_there, at, -1).astype(np.int64)

    def _on_cpu_ns(self, at: I64) -> I64:
        if not len(self._known):
            return np.zeros(len(at), np.int64)
        found: I64 = self._known["on_cpu_ns"][at]
        return found

    def _are_same(self, at: I64, started_ns: Array) -> Bools:
        if not len(self._known):
            return np.zeros(len(at), bool)
        known_ns = self._known["started_ns"][at]
        found: Bools = (known_ns == 0) | (started_ns == 0) | (known_ns == started_ns)
        return found

    def _have_grown(self, at: I64, by_chance: Array) -> Bools:
        """Tells whose totals are no less than what was told: those of states made anew are."""
        if not len(self._known):
            return np.ones(len(at), bool)
        is_less: Bools = by_chance["ns"] < self._known["by_chance"]["ns"][at]
        found: Bools = ~np.any(is_less, axis=(1, 2))
        return found

    def forget(self, threads: Collection[int]) -> None:
        """Forgets the numbers of threads: those that are there all the same get others."""
        gone = np.isin(self._known["thread"], np.fromiter(threads, np.uint32, len(threads)))
        self._known["thread"][gone] = _NO_NUMBER

    def numbers(self, tids: Array, tgids: Array, images: Array) -> tuple[Array, Array]:
        """Returns the numbers that windows have of threads and of their processes.

        Those that are new are entered now.
        """
        return self._numbers(tids, tgids, images, self._find(tids, tgids, images))

    def _numbers(self, tids: Array, tgids: Array, images: Array, at: I64) -> tuple[Array, Array]:
        """Returns these of threads that are in `_known` there."""
        threads, processes = np.zeros(len(tids), np.uint32), np.zeros(len(tids), np.uint32)
        if len(self._known):
            threads[:], processes[:] = self._known["thread"][at], self._known["process"][at]
        is_new = (at < 0) | (threads == _NO_NUMBER)
        names = zip(*(each[is_new].tolist() for each in (tids, tgids, images)), strict=True)
        entered = [
            self._table.thread(self._table.image(tgid, image), tid) for tid, tgid, image in names
        ]
        threads[is_new] = [thread.index for thread in entered]
        processes[is_new] = [thread.image.index for thread in entered]
        return threads, processes


def concatenated(parts: Sequence[Part]) -> Part:
    """Returns the rows of all parts, one after the other."""
    return (
        join_rows([keys for keys, _ in parts], abi.SUM_KEY_DTYPE),
        join_rows([values for _, values in parts], abi.SUM_VALUE_DTYPE),
    )


def _interval_of(states: Array) -> Array:
    """Returns the intervals that threads are in, as CROSSING_DTYPE."""
    found = np.zeros(len(states), abi.CROSSING_DTYPE)
    for name in ("stack", "switched_ns", "waking_ns", "off_class", "weight"):
        found[name] = states[name]
    return found


def _parts(end_ns: int, begin_ns: Array, tids: Array, rows: Array, intervals: Array) -> list[Part]:
    """Splits intervals at the wake-up, as the kernel half would if they ended now.

    Args:
        end_ns: Until when they are charged.
        begin_ns: From when on.
        tids: Whose they are.
        rows: Of the same threads, with `image` and `tgid`.
        intervals: CROSSING_DTYPE.
    """
    switched_ns = intervals["switched_ns"].astype(np.int64)
    waking_ns = intervals["waking_ns"].astype(np.int64)
    begin_ns = begin_ns.astype(np.int64)
    is_woken = (switched_ns <= waking_ns) & (waking_ns <= end_ns)
    waking_ns = np.maximum(np.where(is_woken, waking_ns, end_ns), begin_ns)
    # As the kernel half decides of what is past the boundary.
    is_long = end_ns - switched_ns >= abi.OPEN_WAIT_NS
    weights = np.where(is_long, abi.WEIGHT_EXACT, intervals["weight"])
    is_preempted = intervals["off_class"] == SampleClass.PREEMPTED
    found: list[Part] = []
    for sample_class, ns in (
        (SampleClass.PREEMPTED, np.where(is_preempted, end_ns - begin_ns, 0)),
        (SampleClass.BLOCKED, np.where(is_preempted, 0, waking_ns - begin_ns)),
        (SampleClass.WAITING_TO_RUN, np.where(is_preempted, 0, end_ns - waking_ns)),
    ):
        chosen = ns > 0
        keys = np.zeros(int(chosen.sum()), abi.SUM_KEY_DTYPE)
        keys["stack"], keys["tid"] = intervals["stack"][chosen], tids[chosen]
        keys["image"], keys["tgid"] = rows["image"][chosen], rows["tgid"][chosen]
        keys["sample_class"], keys["weight"] = sample_class, weights[chosen]
        values = np.zeros(len(keys), abi.SUM_VALUE_DTYPE)
        values["ns"] = ns[chosen]
        found.append((keys, values))
    return found


def name_of(tid: Array, image: Array) -> Array:
    """Returns one number for a thread or process of an image, which is a time: few bits tell."""
    return (image.astype(np.uint64) << np.uint64(22)) + tid  # tids end below 2^22 (PID_MAX_LIMIT)


def _are_unseen(states: Array) -> Bools:
    """Tells which threads were ready to run when they were entered, and were not seen since.

    They wait for a CPU: on one, a sample would have seen them within a period. Until it is known
    for how long, they are left out of windows; their next switch tells, and with it they come into
    the one that is open then, with all their time.
    """
    is_entered = states["flags"] & abi.THREAD_SEEDED > 0
    found: Bools = is_entered & (states["off_class"] == SampleClass.ON_CPU)
    return found


def _states_of(ended: Array) -> Array:
    """Returns the states in which threads ended."""
    states = np.zeros(len(ended), abi.THREAD_STATE_DTYPE)
    for name in ("first_seen_ns", "on_cpu_ns", "image", "tgid", "crossing", "by_chance"):
        states[name] = ended[name]
    # Its last interval began at the end.
    states["switched_ns"] = ended["ns"]
    return states
