# SPDX-License-Identifier: Apache-2.0
"""What processes began as and have mapped, as the kernel told when it happened.

A process of some milliseconds is gone before /proc can be read; this is what is known of it then.
One life is a pid from its fork or exec to the next exec. A child that was forked has what its
parent had mapped. Nothing tells of what is unmapped: what was mapped later lies over it.

What was told of processes that began and ended between two reads stays as the kernel wrote it:
nobody asks for most of them, and to make it out takes longer than all else.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel.life_events import (
    EXIT,
    FORK,
    LOST,
    LifeEvent,
    LifeRecords,
    Lost,
    Mapped,
    Named,
)
from aiflame.agent.processes.procfs import MapsLine
from intervaltree import IntervalTree

# The kernel has room for what 500 processes a second, all on one CPU, do in half a second.
_KEEP_UP_NS = 100_000_000
# Those that have ended, and that a sample may still come of: four seconds at 500 a second. The
# table of processes asks within a second of most of them; of the parent of those that are joined,
# when the first of them ends.
_MAX_ENDED = 2048
# Processes that began and ended between two reads are kept as they were told of if they are so many
# at least. So there are some hundred such lots to look through.
_LEAST_TOGETHER = 8
# Of one pid: a script is one exec or two, and a sample of what was before them may still come.
_MAX_LIVES = 16
# Of one life: PyTorch maps 300 files to run. A JIT may map without end.
_MAX_MAPPED = 4096
# Of all lives together: 400 bytes each, and less where they share what they inherit.
_MAX_MAPPED_BY_ALL = 1 << 17
_MAPPED_BYTES = 400
_NEVER_NS = 1 << 63


@dataclass(slots=True)
class Life:
    """One life.

    Attributes:
        begun_ns: When it was forked, or called exec; monotonic. 0: before it was listened to.
        name: From its beginning or since; "" where not known.
        parent_pid: 0 where not known.
        is_exec: It began with an exec.
        is_whole: What it has mapped since the exec that it or an ancestor began with is all there.
        has_gap: Events were lost that may have been about it.
        mapped: Executable mappings by start and end, those that came last at the end.
        is_lent: Children have the same dict, which is copied before it changes.
    """

    begun_ns: int
    name: str = ""
    parent_pid: int = 0
    is_exec: bool = False
    is_whole: bool = False
    has_gap: bool = False
    mapped: dict[tuple[int, int], MapsLine] = field(default_factory=dict)
    is_lent: bool = field(default=False, compare=False)

    @property
    def executable(self) -> str:
        """The path of its program, "" where not known: an exec maps that first."""
        lines = self.mapped.values() if self.is_whole else ()
        return next((line.path for line in lines if line.inode), "")

    def child(self, ns: int, parent_pid: int) -> Life:
        """Returns what a child has that is forked at a time."""
        self.is_lent = True
        return Life(
            *(ns, self.name, parent_pid, False, self.is_whole, self.has_gap, self.mapped, True)
        )

    def lines(self) -> list[MapsLine]:
        """Returns what is mapped, in address order: of two that overlap, what came last."""
        lines = sorted(self.mapped.values(), key=lambda line: line.start)
        if all(line.end <= after.start for line, after in itertools.pairwise(lines)):
            return lines
        space = IntervalTree()
        for line in self.mapped.values():
            space.chop(line.start, line.end)
            space.addi(line.start, line.end, line)
        return [
            MapsLine(
                part.begin,
                part.end,
                part.data.offset + part.begin - part.data.start,
                part.data.device,
                part.data.inode,
                part.data.path,
            )
            for part in sorted(space)
        ]


def _read_nothing() -> tuple[LifeRecords, int]:
    return LifeRecords.of(()), 0


class _End(NamedTuple):
    """A process has ended: as which of all that have, who, and when."""

    number: int
    pid: int
    ns: int


@dataclass(frozen=True, slots=True)
class _Over:
    """Processes of which records tell all, from their beginning to their end, and that made none.

    Attributes:
        at: Where records are, sorted by pid, then in order.
        begins, ends: Of each process in `at`, shape (n,).
        pids: Of each, in order of these.
        parents: Pids as well.
        has_parent_changed: Records tell of its parent as well, by which it matters when it was
            made.
    """

    at: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    pids: npt.NDArray[np.uint32]
    parents: npt.NDArray[np.uint32]
    has_parent_changed: npt.NDArray[np.bool_]

    @property
    def forks(self) -> npt.NDArray[np.int64]:
        """Where each begins."""
        return self.at[self.begins]

    @property
    def forks_in_order(self) -> npt.NDArray[np.int64]:
        """Where those begin that depend on what their parents were just then."""
        return self.forks[self.has_parent_changed]

    @property
    def all_at(self) -> npt.NDArray[np.int64]:
        """Where all records of these are, sorted by pid, then in order."""
        sizes = self.ends - self.begins
        shifts = self.begins - (np.cumsum(sizes) - sizes)
        chosen: npt.NDArray[np.int64] = np.repeat(shifts, sizes) + np.arange(sizes.sum())
        return self.at[chosen]

    def left(self, count: int) -> npt.NDArray[np.int64]:
        """Returns where those of all records are that are to be taken in at once."""
        is_left = np.ones(count, bool)
        is_left[self.all_at] = False
        is_left[self.forks_in_order] = True
        return np.flatnonzero(is_left)

    def chosen(self, which: npt.NDArray[np.bool_]) -> _Over:
        """Returns some of them."""
        return _Over(
            self.at,
            self.begins[which],
            self.ends[which],
            self.pids[which],
            self.parents[which],
            self.has_parent_changed[which],
        )


@dataclass(slots=True)
class _Batch:
    """Processes that began and ended between two reads, decoded when somebody asks for one.

    Attributes:
        records: What was told, of others as well.
        over: Which of it is of these, sorted by pid.
        end_numbers: Of each of these the number of its end.
        members: The pids of those that are still for this batch to tell of.
        parents: What their parents were when they made them, by pid, None where not known: of those
            of which nothing else was told then.
        forked: What the others began as, by pid.
        size: How many mappings this counts for.
        first_ns: Of all that was told.
        last_end: The highest number of an end.
        has_gap: Events were lost since that may have been about them.
        decoded: The lives of those that somebody has asked for, by pid.
    """

    records: LifeRecords
    over: _Over
    end_numbers: npt.NDArray[np.int64]
    members: set[int]
    parents: dict[int, Life | None]
    forked: dict[int, Life]
    size: int
    first_ns: int
    last_end: int
    has_gap: bool = False
    decoded: dict[int, list[Life]] = field(default_factory=dict)

    def end_of(self, pid: int) -> _End:
        """Returns the end of a member."""
        at = self._row(pid)
        ended_ns = int(self.records.ns[self.over.at[self.over.ends[at] - 1]])
        return _End(int(self.end_numbers[at]), pid, ended_ns)

    def lives_of(self, pid: int, forgotten: int) -> list[Life]:
        """Returns the lives of a process, unless the number of its end is one that is forgotten."""
        if pid not in self.members:
            return []
        at = self._row(pid)
        if self.end_numbers[at] <= forgotten:
            return []
        lives = self.decoded.get(pid)
        if lives is None:
            lives = self.decoded[pid] = self._decode(pid, at)
        return lives

    def _row(self, pid: int) -> int:
        return int(np.searchsorted(self.over.pids, pid))

    def _decode(self, pid: int, row: int) -> list[Life]:
        fork, *others = self.over.at[self.over.begins[row] : self.over.ends[row] - 1].tolist()
        forked = self.forked.get(pid)
        if forked is None:
            parent_pid = int(self.over.parents[row])
            ns = int(self.records.ns[fork])
            forked = _child_of(self.parents[parent_pid], ns, parent_pid)
        lives = [forked]
        grown = len(forked.mapped)
        for at in others:
            grown += _live_on(lives, self.records.event(at))
        self.size += max(grown, 0)
        if self.has_gap:
            _note_gap(lives)
        return lives


class Lives:
    """The lives of all processes, or of some and their descendants.

    Args:
        read: Returns what has happened since it was last called, in order, and up to when that is
            all.

    Attributes:
        lost: Events that did not come, and lives that found no room.
    """

    def __init__(self, read: Callable[[], tuple[LifeRecords, int]] = _read_nothing) -> None:
        self._read = read
        self._read_ns = 0
        self.lost = 0
        self._lives: dict[int, list[Life]] = {}  # by pid, in order of their beginnings
        self._batches: deque[_Batch] = deque()  # of a pid that has lives as well, older ones
        self._ends = 0  # that were told of
        self._ended: deque[_End] = deque()
        self._only: set[int] | None = None
        self._mapped = 0

    def follow_only(self, pids: Iterable[int]) -> None:
        """Leaves out all but these processes and those that descend from them from now on."""
        self._only = {*pids}

    def find(self, pid: int, ns: int) -> Life | None:
        """Returns the life that a process had at a monotonic time which is over, None for none."""
        self.update(ns)
        return next((life for life in self._newest_first(pid, ns) if life.begun_ns <= ns), None)

    def is_past(self, pid: int, ns: int) -> bool:
        """Whether the life that a process had at a monotonic time is over by an exec.

        The kernel half hears of an exec at its end only, a millisecond after /proc shows it.
        """
        self.update(time.monotonic_ns())
        life = self._current(pid)
        return life is not None and life.begun_ns > ns

    def keep_up(self) -> None:
        """Takes in what has happened, a few times a second: nobody may ask for long.

        A process that maps without end, 100,000 times a second, fills the kernel's room for that
        and not the recorder's time.
        """
        now_ns = time.monotonic_ns()
        if now_ns - self._read_ns >= _KEEP_UP_NS:
            self.update(now_ns)

    def update(self, ns: int) -> None:
        """Takes in what has happened up to a time, and what is known of later."""
        if ns < self._read_ns:
            return
        records, self._read_ns = self._read()
        if not len(records):
            return
        end_numbers = self._ends + np.cumsum(records.numbers == EXIT)
        over = self._over_of(records)
        if over is None:
            self._take_in(records, np.arange(len(records)), end_numbers)
        else:
            parents = {
                pid: None if (parent := self._current(pid)) is None else parent.child(0, 0)
                for pid in np.unique(over.parents[~over.has_parent_changed]).tolist()
            }
            of_changed = {*records.pids[over.forks_in_order].tolist()}
            forked = self._take_in(records, over.left(len(records)), end_numbers, of_changed)
            self._add(_batch_of(records, over, end_numbers, parents, forked))
        self._forget(self._ends if self._only is not None else int(end_numbers[-1]))
        self._bound()

    def _over_of(self, records: LifeRecords) -> _Over | None:
        """Returns those that are over and can wait to be decoded, None where they are few."""
        # Who descends from whom is only known in order; whom what was lost was about, not at all.
        if self._only is not None or (records.numbers == LOST).any():
            return None
        over = _over(records)
        is_new = [pid not in self._lives for pid in records.pids[over.forks].tolist()]
        over = over.chosen(np.array(is_new, bool))
        return over if len(over.begins) >= _LEAST_TOGETHER else None

    def _take_in(
        self,
        records: LifeRecords,
        chosen: npt.NDArray[np.int64],
        end_numbers: npt.NDArray[np.int64],
        of_batch: Collection[int] = (),
    ) -> dict[int, Life]:
        """Takes in some records in order.

        Args:
            records: All of them.
            chosen: Where those are.
            end_numbers: For each of all, how many processes have ended with it.
            of_batch: Pids that only begin here: the rest of them is for a batch.

        Returns:
            What these began as, of so many as there is room for.
        """
        rows = (records.numbers, records.pids, records.ns, end_numbers)
        forked: dict[int, Life] = {}
        inherited = 0
        for at, number, pid, ns, ends in zip(
            chosen.tolist(), *(each[chosen].tolist() for each in rows), strict=True
        ):
            if self._only is not None:  # others' ends are of no concern
                ends = self._ends + (number == EXIT and pid in self._lives)
            self._forget(ends - (number == EXIT))
            if number == FORK:
                life = self._fork(ns, pid, int(records.parents[at]))
                if life is not None and pid not in of_batch:
                    self._enter(pid, life)
                elif life is not None and inherited < _MAX_MAPPED_BY_ALL:
                    inherited += len(life.mapped)
                    forked[pid] = life
            elif number != LOST and self._only is not None and pid not in self._only:
                continue
            elif number == EXIT:
                if pid in self._lives:
                    self._ended.append(_End(ends, pid, ns))
                self._forget(ends)
            else:
                self._take(records.event(at))
            self._bound()
        return forked

    def _add(self, batch: _Batch) -> None:
        self._batches.append(batch)
        self._mapped += batch.size

    def _newest_first(self, pid: int, until_ns: int) -> Iterator[Life]:
        """Yields the lives of a pid, but for some that begin after a time."""
        yield from reversed(self._lives.get(pid, ()))
        for batch in reversed(self._batches):
            if pid in batch.members and batch.first_ns <= until_ns:
                size = batch.size
                lives = batch.lives_of(pid, self._ends - _MAX_ENDED)
                self._mapped += batch.size - size
                yield from reversed(lives)

    def _lose(self, event: Lost) -> None:
        """Nobody knows whose events they were."""
        self.lost += event.records
        for batch in self._batches:
            batch.has_gap = True
            for lives in batch.decoded.values():
                _note_gap(lives)
        for lives in self._lives.values():
            _note_gap(lives)

    def _fork(self, ns: int, pid: int, parent_pid: int) -> Life | None:
        """Returns what a process begins as, None for one that is left out."""
        if self._only is not None:
            if parent_pid not in self._only:
                return None
            self._only.add(pid)
        return _child_of(self._current(parent_pid), ns, parent_pid)

    def _take(self, event: LifeEvent) -> None:
        if isinstance(event, Lost):
            self._lose(event)
            return
        lives = self._own(event.pid)
        if not lives and isinstance(event, Mapped):
            self._enter(event.pid, Life(0))
        elif not lives and not (isinstance(event, Named) and event.is_exec):
            return
        self._mapped += _live_on(self._lives.setdefault(event.pid, []), event)

    def _own(self, pid: int) -> list[Life]:
        """Returns the lives of a pid to which more is to come, also where it is in a batch.

        Its first thread has ended then, and others go on.
        """
        if pid in self._lives:
            return self._lives[pid]
        for batch in reversed(self._batches):
            size = batch.size
            lives = batch.lives_of(pid, self._ends - _MAX_ENDED)
            if lives:
                self._mapped += batch.size - size
                batch.size -= sum(map(_size, lives))
                bisect.insort(self._ended, batch.end_of(pid))
                batch.members.discard(pid)
                del batch.decoded[pid]
                self._lives[pid] = lives
                return lives
        return []

    def _current(self, pid: int) -> Life | None:
        return next(self._newest_first(pid, _NEVER_NS), None)

    def _enter(self, pid: int, life: Life) -> None:
        self._mapped += _begin(self._lives.setdefault(pid, []), life)

    def _forget(self, ends: int) -> None:
        """Forgets those that have ended before many others, of so many that have ended."""
        self._ends = ends
        while self._ended and self._ended[0].number <= ends - _MAX_ENDED:
            self._drop_ended()
        while self._batches and self._batches[0].last_end <= ends - _MAX_ENDED:
            self._drop_batch()

    def _bound(self) -> None:
        """Forgets lives where there is too much of all of them: first of those that have ended."""
        while self._mapped > _MAX_MAPPED_BY_ALL and (self._ended or self._batches):
            if self._batches and (
                not self._ended or self._batches[0].last_end < self._ended[0].number
            ):
                self._drop_batch()
            else:
                self._drop_ended()
        while self._mapped > _MAX_MAPPED_BY_ALL and len(self._lives) > 1:
            oldest = next(iter(self._lives))
            self._drop(oldest, self._lives[oldest][-1].begun_ns)
            self.lost += 1

    def _drop_batch(self) -> None:
        """Forgets the processes that were read together first."""
        self._mapped -= self._batches.popleft().size

    def _drop_ended(self) -> None:
        """Forgets the process that ended first."""
        _, pid, ended_ns = self._ended.popleft()
        self._drop(pid, ended_ns)
        if self._only is not None and pid not in self._lives:
            self._only.discard(pid)

    def _drop(self, pid: int, until_ns: int) -> None:
        """Forgets the lives of a pid that had begun by a time."""
        lives = self._lives.pop(pid, [])
        left = [life for life in lives if life.begun_ns > until_ns]
        self._mapped -= sum(map(_size, lives)) - sum(map(_size, left))
        if left:
            self._lives[pid] = left


def _size(life: Life) -> int:
    return len(life.mapped)


def _note_gap(lives: Iterable[Life]) -> None:
    for life in lives:
        life.is_whole, life.has_gap = False, True


def _child_of(parent: Life | None, ns: int, parent_pid: int) -> Life:
    return Life(ns, "", parent_pid) if parent is None else parent.child(ns, parent_pid)


def _begin(lives: list[Life], life: Life) -> int:
    """Adds a life to those of a pid; returns by how many mappings all of them have grown."""
    lives.append(life)
    grown = len(life.mapped)
    if len(lives) > _MAX_LIVES:
        grown -= len(lives.pop(0).mapped)
    return grown


def _live_on(lives: list[Life], event: LifeEvent) -> int:
    """Takes in what was told of a pid; returns by how many mappings its lives have grown.

    Args:
        lives: Some, unless it calls exec.
        event: What was told.
    """
    if isinstance(event, Mapped):
        return _map(lives[-1], event)
    if not isinstance(event, Named):
        return 0
    if not event.is_exec:
        lives[-1].name = event.name
        return 0
    parent_pid = lives[-1].parent_pid if lives else 0
    return _begin(lives, Life(event.ns, event.name, parent_pid, is_exec=True, is_whole=True))


def _map(life: Life, event: Mapped) -> int:
    """Adds a mapping; returns by how many there are more."""
    if life.is_lent:
        life.mapped, life.is_lent = life.mapped.copy(), False
    count = len(life.mapped)
    span = event.start, event.end
    life.mapped.pop(span, None)  # the new one is to be the last
    life.mapped[span] = MapsLine(
        event.start, event.end, event.offset, event.device, event.inode, event.path
    )
    if len(life.mapped) > _MAX_MAPPED:
        # Half of them at once: a dict looks for its first through all that were there before.
        newest = itertools.islice(life.mapped.items(), _MAX_MAPPED // 2, None)
        life.mapped, life.is_whole = dict(newest), False
    return len(life.mapped) - count


def _over(records: LifeRecords) -> _Over:
    """Returns the processes that began and ended within records: they concern nobody else."""
    at = np.argsort(records.pids, kind="stable")
    pids, numbers = records.pids[at], records.numbers[at]
    begins = np.flatnonzero(np.r_[True, pids[1:] != pids[:-1]])
    ends = np.r_[begins[1:], len(pids)]
    is_fork = numbers == FORK
    forks = np.add.reduceat(is_fork, begins, dtype=np.int64)
    exits = np.add.reduceat(numbers == EXIT, begins, dtype=np.int64)
    is_over = is_fork[begins] & (numbers[ends - 1] == EXIT) & (forks == 1) & (exits == 1)
    pids, of_forks = pids[begins], records.parents[at]
    # Few, mostly: one makes many.
    is_over &= ~np.isin(pids, np.unique(of_forks[is_fork]))
    parents = of_forks[begins]
    return _Over(at, begins, ends, pids, parents, np.isin(parents, pids)).chosen(is_over)


def _batch_of(
    records: LifeRecords,
    over: _Over,
    end_numbers: npt.NDArray[np.int64],
    parents: dict[int, Life | None],
    forked: dict[int, Life],
) -> _Batch:
    """Makes a batch of processes, but for those whose beginning found no room.

    Args: as of a `_Batch`, and of `Lives._take_in`.
    """
    numbers = end_numbers[over.at[over.ends - 1]]
    first_ns, last_end = int(records.ns[0]), int(numbers.max())
    members = {*over.pids[~over.has_parent_changed].tolist(), *forked}
    sizes = over.ends - over.begins
    # To copy what is of these takes longer than to keep some of others, unless that is most of it.
    if sizes.sum() < len(records) / 2:
        records = records.chosen(over.all_at)
        ends = np.cumsum(sizes)
        over = replace(over, at=np.arange(len(records)), begins=ends - sizes, ends=ends)
    begun = [*forked.values(), *(life for life in parents.values() if life is not None)]
    size = sum(map(_size, begun)) + max(len(records), len(records.data) // _MAPPED_BYTES)
    return _Batch(records, over, numbers, members, parents, forked, size, first_ns, last_end)
