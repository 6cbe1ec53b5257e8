# SPDX-License-Identifier: Apache-2.0
"""Loads a family's helper into processes that run on its devices and have none.

A process of its own does that (agent/injection/load_worker.py), one for all that are due, so that
the recording goes on. It may be killed at any moment: the target goes on, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from aiflame.agent.losses import LossKind
from aiflame.agent.process_group import OWN_PROCESS_GROUP
from aiflame.agent.processes import procfs
from aiflame.agent.processes.table import ProcessImage
from aiflame.gpu.base import HelperLibrary

# A process that has just begun may have been started with a helper, which is there once the driver
# has been initialised.
_BEGINNING_NS = 3_000_000_000
# In an hour: each takes a second of one CPU.
_MOST_LOADS, _LOADS_NS = 256, 3_600_000_000_000
# From a try that failed to the next, and then twice as long each time: what was short is short for
# minutes, and a process may run for weeks.
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 300_000_000_000, 14_400_000_000_000
_MAX_ANSWER_BYTES = 1 << 16
# What one process takes at most: to ask CPython 61 s (remote_exec), a table of a huge file 60
# (table_builder), a thread that can be lent 10, the new one's beginning 30, and to load from memory
# and then from a file 30 each (inject), 221 in all. A loader that is silent for longer waits for a
# file system of the process.
_LONGEST_LOAD_S = 240
# Loaders that were killed there and do not end, since no signal gets through: each has 40 MB.
_MOST_STUCK = 4
_LOADER = (sys.executable, "-m", "aiflame.agent.injection.load_worker")
# It removes what it has put into a target's directory, at once.
_ENDING_S = 2.0
# At the end of a recording, for what has been loaded by then and was not said yet.
_LAST_ANSWER_S = 1.0
_LAST_ANSWER_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class _Due:
    """A process that is to have a helper, from a monotonic time on.

    Attributes:
        image: It.
        started: As procfs.start_ticks has it: its number may be another's by then.
        due_ns: That time.
        tries: How many have failed.
        is_lost: It is counted.
    """

    image: ProcessImage
    started: int
    due_ns: int
    tries: int = 0
    is_lost: bool = False

    @property
    def who(self) -> str:
        """It, in words."""
        return f"{self.image.name} ({self.image.pid})"


@dataclass(slots=True)
class _Worker:
    """A loader at work.

    Attributes:
        process: It.
        answers_fd: What it says.
        loads: By pid, those that it has said nothing of; it is at the first.
        heard_ns: When it began, or said something last; monotonic.
        said: The beginning of a line.
    """

    process: subprocess.Popen[bytes]
    answers_fd: int
    loads: dict[int, _Due]
    heard_ns: int
    said: bytes = b""

    @property
    def at(self) -> int:
        """The pid of the process that it is at, 0 for none."""
        return next(iter(self.loads), 0)

    @property
    def is_awaited(self) -> bool:
        """Whether there is a process of which nothing was said before."""
        return any(not one.tries for one in self.loads.values())


class HelperLoads:
    """Loads one family's helper where it is missing.

    Args:
        library: The helper.
        cache: Directory of unwind tables, None for none.
        first_image: The identity of process images that were there before the recording.
        begun_ns: Tells when that began; monotonic.

    Attributes:
        losses: Processes into which it was not loaded, without those into which it was later: what
            a window has told of them stays told.
    """

    def __init__(
        self,
        library: HelperLibrary,
        cache: Path | None,
        first_image: int,
        begun_ns: Callable[[], int],
    ) -> None:
        self._library = library
        self._cache = cache
        self._first_image = first_image
        self._begun_ns = begun_ns
        self._asked: set[int] = set()  # by index of the image, of those that have not ended
        self._loads = self._loads_since_ns = 0
        self._due: dict[int, _Due] = {}
        self._there: list[ProcessImage] = []
        self._worker: _Worker | None = None
        self._killed: list[_Worker] = []
        self.losses: Counter[LossKind] = Counter()

    def ask(self, image: ProcessImage) -> None:
        """Has the helper loaded into a process that runs on its devices, once."""
        if image.index in self._asked or not (started := procfs.start_ticks(image.pid)):
            return
        self._asked.add(image.index)
        due_ns = 0 if self._was_there(image) else time.monotonic_ns() + _BEGINNING_NS
        self._due[image.index] = _Due(image, started, due_ns)

    def has_helper(self, index: int) -> None:
        """Leaves out a process that has a helper."""
        if (one := self._due.pop(index, None)) is not None:
            self._found(one)

    def forget(self, index: int) -> None:
        """Forgets a process that has ended."""
        self._due.pop(index, None)
        self._asked.discard(index)

    def look(self) -> list[str]:
        """Goes on, and never waits; returns what is to be said."""
        said = self._answers()
        self._killed = [one for one in self._killed if one.process.poll() is None]
        if self._worker is None and (due := self._those_due()):
            said += self._start(due)
        return said

    def _those_due(self) -> list[_Due]:
        """Returns those that a loader may begin with now; those that are too many wait."""
        now_ns = time.monotonic_ns()
        if now_ns - self._loads_since_ns >= _LOADS_NS:
            self._loads, self._loads_since_ns = 0, now_ns
        stuck = {one.at for one in self._killed}
        due = [
            one for one in self._due.values() if one.due_ns <= now_ns and one.image.pid not in stuck
        ]
        room = _MOST_LOADS - self._loads
        for one in due[room:]:
            self._due[one.image.index] = self._counted(one)
        return due[:room]

    def finish(self) -> list[str]:
        """Returns what is still to be said at the end: waits a moment for a loader at work."""
        self._due.clear()
        said, until_s = self._answers(), time.monotonic() + _LAST_ANSWER_S
        while self._worker is not None and self._worker.is_awaited and time.monotonic() < until_s:
            time.sleep(_LAST_ANSWER_PAUSE_S)
            said += self._answers()
        for one in self._due.values():  # what a loader that has ended meanwhile had not begun
            self._counted(one)
        self._due.clear()
        return said

    def _start(self, due: list[_Due]) -> list[str]:
        for one in due:
            del self._due[one.image.index]
        if len(self._killed) >= _MOST_STUCK:
            return self._failed(due, "no helper was loaded: too many loaders do not end")
        loads = {one.image.pid: one for one in due}
        calls = ",".join(self._library.calls)
        processes = (f"{pid}:{one.started}" for pid, one in loads.items())
        arguments = [str(self._library.path), str(self._cache or ""), calls, *processes]
        try:
            answers_fd, writing_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            return self._failed(due, f"no helper was loaded: {error.strerror}")
        os.set_blocking(writing_fd, True)
        try:
            process = subprocess.Popen(  # noqa: S603 - a module of our own
                [*_LOADER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=writing_fd,
                cwd="/",  # python -m would import from the working directory first
                **OWN_PROCESS_GROUP,
            )
        except OSError as error:
            os.close(answers_fd)
            return self._failed(due, f"no helper was loaded: {error.strerror}")
        finally:
            os.close(writing_fd)
        self._worker = _Worker(process, answers_fd, loads, time.monotonic_ns())
        return []

    def _answers(self) -> list[str]:
        """Returns what the worker says; sees to the end of one that has ended, or gets nowhere."""
        worker = self._worker
        if worker is None:
            return []
        is_over = worker.process.poll() is not None  # before the last of what it said is read
        with contextlib.suppress(BlockingIOError):
            while data := os.read(worker.answers_fd, _MAX_ANSWER_BYTES):
                worker.said += data
        *lines, worker.said = worker.said.split(b"\n")
        if lines:
            worker.heard_ns = time.monotonic_ns()
        said = [words for line in lines for words in self._words(worker, line)]
        if is_over:
            return said + self._leave(worker, "its loader ended")
        if time.monotonic_ns() - worker.heard_ns > _LONGEST_LOAD_S * 1_000_000_000:
            worker.process.kill()
            self._killed.append(worker)
            return said + self._leave(worker, f"its loader got nowhere in {_LONGEST_LOAD_S} s")
        return said

    def _leave(self, worker: _Worker, why: str) -> list[str]:
        """Goes on without a loader: what it had not begun is for the next one."""
        os.close(worker.answers_fd)
        self._worker = None
        if not worker.loads:
            return []
        at, *others = worker.loads.values()
        for one in others:
            if one.image.index in self._asked:
                self._due[one.image.index] = one
        self._loads += 1
        return self._failed([at], f"no helper was loaded into {at.who}: {why}")

    def _words(self, worker: _Worker, line: bytes) -> list[str]:
        answer = json.loads(line)
        one = worker.loads.pop(answer["pid"])
        image, who = one.image, one.who
        self._loads += 1
        if "why" in answer:
            hint = f": {answer['hint']}" if answer["hint"] else ""
            words = f"no helper was loaded into {who}: {answer['why']}{hint}"
            return self._failed([one], words, is_final=answer["is_final"])
        self._found(one)
        if answer["was_there"]:
            self._there.append(image)
            return []
        held = f"a thread was held for {answer['stopped_ns'] / 1e6:.1f} ms"
        if not answer["tries"]:
            held = "its main thread ran a script (sys.remote_exec), and none was held"
        elif answer["why_held"]:
            held += f", as sys.remote_exec does not work there: {answer['why_held']}"
        after_s = (time.monotonic_ns() - self._begun_ns()) / 1e9
        # What it launched by then has no times, which nothing else tells.
        is_late = self._was_there(image) or one.tries
        late = f", {after_s:.1f} s after the recording began" if is_late else ""
        return [f"loaded {self._library.path.name} into {who}{late}: {held}"]

    def _was_there(self, image: ProcessImage) -> bool:
        return image.image == self._first_image

    def take_there(self) -> list[ProcessImage]:
        """Returns processes that have mapped the helper already, since last."""
        there, self._there = self._there, []
        return there

    def lose_forked(self, image: ProcessImage) -> list[str]:
        """Counts a process that has mapped the helper, and shares nothing by it; says so."""
        name = self._library.path.name
        self.losses[LossKind.HELPERS_NOT_LOADED] += 1
        return [
            f"{image.name} ({image.pid}) has {name} from the process that forked it, where it goes"
            " on telling: of this one launches alone are known, until it is started anew"
        ]

    def _failed(self, loads: list[_Due], words: str, *, is_final: bool = False) -> list[str]:
        """Has processes tried again later, unless that changes nothing; says the first failure."""
        now_ns = time.monotonic_ns()
        for one in map(self._counted, loads):
            if not is_final and one.image.index in self._asked:
                pause_ns = min(_FIRST_PAUSE_NS << one.tries, _LONGEST_PAUSE_NS)
                again = replace(one, due_ns=now_ns + pause_ns, tries=one.tries + 1)
                self._due[one.image.index] = again
        return [words] if any(not one.tries for one in loads) else []

    def _counted(self, one: _Due) -> _Due:
        """Counts a process that has no helper, once."""
        self.losses[LossKind.HELPERS_NOT_LOADED] += not one.is_lost
        return replace(one, is_lost=True)

    def _found(self, one: _Due) -> None:
        """Counts a process no more that has a helper; windows tell what becomes more."""
        self.losses[LossKind.HELPERS_NOT_LOADED] -= one.is_lost

    def close(self) -> None:
        """Ends the loader if there is one; what it is at goes on, or is undone by itself."""
        for killed in self._killed:
            killed.process.poll()
        if self._worker is None:
            return
        process = self._worker.process
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
        process.kill()
        # A target may have it wait for a file system of its own, where no signal gets through.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
        os.close(self._worker.answers_fd)
        self._worker = None
