# SPDX-License-Identifier: Apache-2.0
"""What processes began as and have mapped, as the kernel told when it happened.

A process of some milliseconds is gone before /proc can be read; this is what is known of it then.
One life is a pid from its fork or exec to the next exec. A child that was forked has what its
parent had mapped. Nothing tells of what is unmapped: what was mapped later lies over it.

What was told of a process that was over when it was read stays as the kernel wrote it: nobody asks
for most of them, and to make it out takes longer than all else.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from aiflame.agent.kernel.life_events import (
    EXIT,
    FORK,
    LOST,
    LifeEvent,
    LifeRecords,
    Lost,
    Mapped,
    Named,
    events_of,
)
from aiflame.agent.processes.procfs import MapsLine
from intervaltree import IntervalTree

# The kernel has room for what 500 processes a second, all on one CPU, do in half a second.
_KEEP_UP_NS = 100_000_000
# Those that have ended, and that a sample may still come of: four seconds at 500 a second. The
# table of processes asks within a second of most of them; of the parent of those that are joined,
# when the first of them ends.
_MAX_ENDED = 2048
# Of one pid: a script is one exec or two, and a sample of what was before them may still come.
_MAX_LIVES = 16
# Of one life: PyTorch maps 300 files to run. A JIT may map without end.
_MAX_MAPPED = 4096
# Of all lives together: 400 bytes each, and less where they share what they inherit.
_MAX_MAPPED_BY_ALL = 1 << 17
_MAPPED_BYTES = 400


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


@dataclass(frozen=True, slots=True)
class _Unread:
    """What was told of a process that was over when it was read.

    Attributes:
        forked: What it began as, None if that was told before.
        data: Records, all later than that.
        count: Of these.
        last_ns: Of the last event.
        has_gap: Events were lost since that may have been about it.
    """

    forked: Life | None
    data: bytes
    count: int
    last_ns: int
    has_gap: bool = False

    @property
    def mapped(self) -> int:
        """How many mappings it counts for: each record may be of one."""
        inherited = 0 if self.forked is None else len(self.forked.mapped)
        return inherited + max(self.count, len(self.data) // _MAPPED_BYTES)


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
        self._unread: dict[int, _Unread] = {}  # by pid, later than its lives
        self._ended: deque[tuple[int, int]] = deque()  # pids, and when
        self._only: set[int] | None = None
        self._mapped = 0

    def follow_only(self, pids: Iterable[int]) -> None:
        """Leaves out all but these processes and those that descend from them from now on."""
        self._only = {*pids}

    def find(self, pid: int, ns: int) -> Life | None:
        """Returns the life that a process had at a monotonic time which is over, None for none."""
        self.update(ns)
        self._take_unread(pid)
        lives = self._lives.get(pid, ())
        return next((life for life in reversed(lives) if life.begun_ns <= ns), None)

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
        # Who descends from whom is only known in order.
        short = _over(records) if self._only is None else {}
        is_left = np.ones(len(records), bool)
        is_left[[at for own in short.values() for at in own]] = False
        at_left = np.flatnonzero(is_left)
        numbers, pids = records.numbers[at_left].tolist(), records.pids[at_left].tolist()
        forked: dict[int, Life] = {}
        inherited = 0
        for at, number, pid in zip(at_left.tolist(), numbers, pids, strict=True):
            if number == LOST:
                self._take(records.event(at))
            elif number == FORK:
                life = self._fork(records.ns[at], pid, int(records.parents[at]))
                if life is not None and pid in short and inherited < _MAX_MAPPED_BY_ALL:
                    inherited += len(life.mapped)
                    forked[pid] = life
                elif life is not None:
                    self._enter(pid, life)
            elif self._only is not None and pid not in self._only:
                continue
            elif number == EXIT:
                if pid in short:
                    self._keep_unread(pid, forked.pop(pid, None), records, short.pop(pid))
                self._end(pid, records.ns[at])
            else:
                self._take(records.event(at))
            self._bound()

    def _keep_unread(
        self, pid: int, forked: Life | None, records: LifeRecords, chosen: Sequence[int]
    ) -> None:
        """Keeps what was told of a process that is over."""
        if not chosen and forked is None:
            return
        self._take_unread(pid)  # of whoever had it before
        begun_ns = 0 if forked is None else forked.begun_ns
        last_ns = records.ns[chosen[-1]] if chosen else begun_ns
        unread = _Unread(forked, records.joined(chosen), len(chosen), last_ns)
        self._unread[pid] = unread
        self._mapped += unread.mapped

    def _take_unread(self, pid: int) -> None:
        """Takes in what was told of a process that has ended since."""
        unread = self._unread.pop(pid, None)
        if unread is None:
            return
        self._mapped -= unread.mapped
        if unread.forked is not None:
            self._enter(pid, unread.forked)
        for event in events_of(unread.data):
            self._take(event)
        if unread.has_gap:
            _note_gap(self._lives.get(pid, ()))

    def _lose(self, event: Lost) -> None:
        """Nobody knows whose events they were."""
        self.lost += event.records
        for pid, unread in self._unread.items():
            self._unread[pid] = replace(unread, has_gap=True)
        for lives in self._lives.values():
            _note_gap(lives)

    def _fork(self, ns: int, pid: int, parent_pid: int) -> Life | None:
        """Returns what a process begins as, None for one that is left out."""
        if self._only is not None:
            if parent_pid not in self._only:
                return None
            self._only.add(pid)
        self._take_unread(pid)  # of whoever had it before
        parent = self._current(parent_pid)
        return Life(ns, "", parent_pid) if parent is None else parent.child(ns, parent_pid)

    def _take(self, event: LifeEvent) -> None:
        if isinstance(event, Lost):
            self._lose(event)
            return
        life = self._current(event.pid)
        if isinstance(event, Named) and event.is_exec:
            parent_pid = 0 if life is None else life.parent_pid
            new = Life(event.ns, event.name, parent_pid, is_exec=True, is_whole=True)
            self._enter(event.pid, new)
        elif isinstance(event, Named):
            if life is not None:
                life.name = event.name
        elif isinstance(event, Mapped):
            if life is None:
                life = Life(0)
                self._enter(event.pid, life)
            self._map(life, event)

    def _map(self, life: Life, event: Mapped) -> None:
        if life.is_lent:
            life.mapped, life.is_lent = life.mapped.copy(), False
        span = event.start, event.end
        before = life.mapped.pop(span, None)  # the new one is to be the last
        self._mapped += before is None
        life.mapped[span] = MapsLine(
            event.start, event.end, event.offset, event.device, event.inode, event.path
        )
        if len(life.mapped) > _MAX_MAPPED:
            # Half of them at once: a dict looks for its first through all that were there before.
            newest = itertools.islice(life.mapped.items(), _MAX_MAPPED // 2, None)
            self._mapped -= _MAX_MAPPED // 2
            life.mapped, life.is_whole = dict(newest), False

    def _current(self, pid: int) -> Life | None:
        self._take_unread(pid)
        lives = self._lives.get(pid)
        return lives[-1] if lives else None

    def _enter(self, pid: int, life: Life) -> None:
        lives = self._lives.setdefault(pid, [])
        lives.append(life)
        self._mapped += len(life.mapped)
        if len(lives) > _MAX_LIVES:
            self._drop(pid, lives[0].begun_ns)

    def _bound(self) -> None:
        """Forgets lives where there is too much of all of them: first of those that have ended."""
        while self._mapped > _MAX_MAPPED_BY_ALL and self._ended:
            self._drop_ended()
        while self._mapped > _MAX_MAPPED_BY_ALL and len(self._lives) > 1:
            oldest = next(iter(self._lives))
            self._drop(oldest, self._lives[oldest][-1].begun_ns)
            self.lost += 1

    def _end(self, pid: int, ns: int) -> None:
        if pid in self._lives or pid in self._unread:
            self._ended.append((pid, ns))
            if len(self._ended) > _MAX_ENDED:
                self._drop_ended()

    def _drop_ended(self) -> None:
        """Forgets the process that ended first."""
        pid, ended_ns = self._ended.popleft()
        self._drop(pid, ended_ns)
        if self._only is not None and pid not in self._lives and pid not in self._unread:
            self._only.discard(pid)

    def _drop(self, pid: int, until_ns: int) -> None:
        """Forgets the lives of a pid that had begun by a time, and what was told of them."""
        unread = self._unread.get(pid)
        if unread is not None and unread.last_ns > until_ns:  # one later may be a child by these
            self._take_unread(pid)
        elif unread is not None:
            self._mapped -= unread.mapped
            del self._unread[pid]
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


def _over(records: LifeRecords) -> dict[int, Sequence[int]]:
    """Returns, by pid, where records are of processes that are over, but for forks and ends.

    Only of those whose records tell of one process to its end, and that made none themselves: what
    they were in between concerns nobody else.
    """
    if (records.numbers == LOST).any():  # nobody knows of whom
        return {}
    order = np.argsort(records.pids, kind="stable")
    pids, numbers = records.pids[order], records.numbers[order]
    begins = np.flatnonzero(np.r_[True, pids[1:] != pids[:-1]])
    ends = np.r_[begins[1:], len(pids)]
    forks = np.add.reduceat(numbers == FORK, begins, dtype=np.int64)
    is_forked = numbers[begins] == FORK
    is_over = (numbers[ends - 1] == EXIT) & (forks == is_forked)
    is_over &= np.add.reduceat(numbers == EXIT, begins, dtype=np.int64) == 1
    is_over &= ~np.isin(pids[begins], records.parents[records.numbers == FORK])
    own = (begins + is_forked)[is_over], ends[is_over] - 1
    at = order.tolist()
    rows = zip(pids[ends[is_over] - 1].tolist(), *(each.tolist() for each in own), strict=True)
    return {pid: at[begin:end] for pid, begin, end in rows}
