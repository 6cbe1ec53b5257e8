# SPDX-License-Identifier: Apache-2.0
"""What processes began as and have mapped, as the kernel told when it happened.

A process of some milliseconds is gone before /proc can be read; this is what is known of it then.
One life is a pid from its fork or exec to the next exec. A child that was forked has what its
parent had mapped. Nothing tells of what is unmapped: what was mapped later lies over it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from aiflame.agent.kernel.life_events import Ended, Forked, LifeEvent, Lost, Mapped, Named
from aiflame.agent.processes.procfs import MapsLine
from intervaltree import IntervalTree

# The kernel has room for what 500 processes a second, all on one CPU, do in half a second.
_KEEP_UP_NS = 100_000_000
# Those that have ended, and that a sample may still come of: four seconds at 500 a second. The
# table of processes asks within a second of most of them.
_MAX_ENDED = 2048
# Of one pid: a script is one exec or two, and a sample of what was before them may still come.
_MAX_LIVES = 16
# Of one life: PyTorch maps 300 files to run. A JIT may map without end.
_MAX_MAPPED = 4096
# Of all lives together. They share what they inherit: 100 bytes each, and 400 for a new one.
_MAX_MAPPED_BY_ALL = 1 << 17


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
    """

    begun_ns: int
    name: str = ""
    parent_pid: int = 0
    is_exec: bool = False
    is_whole: bool = False
    has_gap: bool = False
    mapped: dict[tuple[int, int], MapsLine] = field(default_factory=dict)

    @property
    def executable(self) -> str:
        """The path of its program, "" where not known: an exec maps that first."""
        lines = self.mapped.values() if self.is_whole else ()
        return next((line.path for line in lines if line.inode), "")

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


class Lives:
    """The lives of all processes, or of some and their descendants.

    Args:
        read: Returns what has happened since it was last called, in order, and up to when that is
            all.

    Attributes:
        lost: Events that did not come, and lives that found no room.
    """

    def __init__(self, read: Callable[[], tuple[list[LifeEvent], int]] = lambda: ([], 0)) -> None:
        self._read = read
        self._read_ns = 0
        self.lost = 0
        self._lives: dict[int, list[Life]] = {}  # by pid, in order of their beginnings
        self._ended: deque[tuple[int, Life]] = deque()
        self._only: set[int] | None = None
        self._mapped = 0

    def follow_only(self, pids: Iterable[int]) -> None:
        """Leaves out all but these processes and those that descend from them from now on."""
        self._only = {*pids}

    def find(self, pid: int, ns: int) -> Life | None:
        """Returns the life that a process had at a monotonic time which is over, None for none."""
        self.update(ns)
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
        events, self._read_ns = self._read()
        for event in events:
            if isinstance(event, Lost):
                self._lose(event)
            elif isinstance(event, Forked):
                self._fork(event)
            elif self._only is None or event.pid in self._only:
                self._take(event)

    def _lose(self, event: Lost) -> None:
        """Nobody knows whose events they were."""
        self.lost += event.records
        for lives in self._lives.values():
            for life in lives:
                life.is_whole, life.has_gap = False, True

    def _fork(self, event: Forked) -> None:
        if self._only is not None:
            if event.parent_pid not in self._only:
                return
            self._only.add(event.pid)
        parent = self._current(event.parent_pid)
        life = Life(event.ns, parent_pid=event.parent_pid)
        if parent is not None:
            life.name, life.is_whole, life.has_gap = parent.name, parent.is_whole, parent.has_gap
            life.mapped = parent.mapped.copy()
        self._enter(event.pid, life)

    def _take(self, event: Named | Mapped | Ended) -> None:
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
        elif life is not None:
            self._end(event.pid, life)

    def _map(self, life: Life, event: Mapped) -> None:
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
        lives = self._lives.get(pid)
        return lives[-1] if lives else None

    def _enter(self, pid: int, life: Life) -> None:
        lives = self._lives.setdefault(pid, [])
        lives.append(life)
        self._mapped += len(life.mapped)
        if len(lives) > _MAX_LIVES:
            self._drop(pid, lives[0])
        while self._mapped > _MAX_MAPPED_BY_ALL and self._ended:
            self._drop_ended()
        while self._mapped > _MAX_MAPPED_BY_ALL and len(self._lives) > 1:
            oldest = next(iter(self._lives))
            self._drop(oldest, self._lives[oldest][-1])
            self.lost += 1

    def _end(self, pid: int, life: Life) -> None:
        self._ended.append((pid, life))
        if len(self._ended) > _MAX_ENDED:
            self._drop_ended()

    def _drop_ended(self) -> None:
        """Forgets the life that ended first."""
        pid, last = self._ended.popleft()
        self._drop(pid, last)
        if self._only is not None and pid not in self._lives:
            self._only.discard(pid)

    def _drop(self, pid: int, last: Life) -> None:
        """Forgets a life of a pid, and those before it."""
        lives = self._lives.get(pid, [])
        left = [life for life in lives if life.begun_ns > last.begun_ns]
        self._mapped -= sum(len(life.mapped) for life in lives) - sum(map(_size, left))
        if left:
            self._lives[pid] = left
        else:
            self._lives.pop(pid, None)


def _size(life: Life) -> int:
    return len(life.mapped)
