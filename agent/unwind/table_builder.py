# SPDX-License-Identifier: Apache-2.0
"""Has unwind tables built by child processes, without ever waiting for them.

The one that samples need most comes next: a process may map a hundred files and run in three. Small
files have a child of their own, since a large one takes seconds, and may have been begun before it
was known what is needed.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO

from aiflame.agent.inspector.fork_server import ForkRequests, PipedHelper, Program

# libtorch_cpu takes a second; what takes this long on any machine is a file made to.
_TIMEOUT_S = 60.0

# A child and its parser have 10 to 20 MB, and another one is there in 10 ms.
_IDLE_S = 1.0

_MODULE = "aiflame.agent.unwind.worker"
PROGRAM = Program("unwind.worker", f"{_MODULE}:main", (_MODULE,))

# What the child's answer begins with where there is a table; then comes its name.
BUILT = "built "
# And what it says of a file whose table takes more memory than it may.
TOO_LARGE = "takes more memory than there may be for it"

# An interpreter takes 0.1 s; compilers and PyTorch, which take seconds, are larger by far.
_SMALL_FILE_BYTES = 32 << 20


class TableBuilders:
    """A queue for small files and one for large ones.

    Args:
        server: Forks the children.
        cache: Directory in which tables are built.
        watch: Told of descriptors that become readable when `finished` has something to say.
        urgency: Of a binary; the greatest is built next.
        size_bytes: Of a binary's file.
        memory_bytes: What a child may have of its own; 0 for as much as any file takes.
    """

    def __init__(
        self,
        server: ForkRequests,
        cache: Path,
        watch: Callable[[int], None],
        urgency: Callable[[int], float],
        size_bytes: Callable[[int], int],
        memory_bytes: int = 0,
    ) -> None:
        self._size_bytes = size_bytes
        self._small = TableBuilder(server, cache, watch, urgency, memory_bytes)
        self._large = TableBuilder(server, cache, watch, urgency, memory_bytes)

    def ask(self, binary: int, path: str) -> None:
        """Queues a binary, unless it is queued already.

        Args:
            binary: Its index.
            path: An openable path.
        """
        is_small = self._size_bytes(binary) <= _SMALL_FILE_BYTES
        (self._small if is_small else self._large).ask(binary, path)

    def name(self, binary: int) -> str:
        """Returns how the cache calls the table that was built of a binary, "" if there is none."""
        return self._small.names.get(binary) or self._large.names.get(binary, "")

    def finished(self) -> list[int]:
        """Returns the binaries that are done with, whether there is a table now or not."""
        return [*self._small.finished(), *self._large.finished()]

    def forget(self, binaries: Collection[int]) -> None:
        """Builds no tables of binaries that nobody needs any more, and forgets those there were."""
        self._small.forget(binaries)
        self._large.forget(binaries)

    def take_spent_s(self) -> dict[int, float]:
        """Returns how long the binaries took that were done with since last."""
        return {**self._small.take_spent_s(), **self._large.take_spent_s()}

    @property
    def given_up(self) -> set[int]:
        """Those whose builder died twice, or might not take what it needs."""
        return self._small.given_up | self._large.given_up

    @property
    def is_at_work(self) -> bool:
        """Whether there are children: `finished` will have something to say."""
        return any(lane.output is not None for lane in (self._small, self._large))

    def wait(self, timeout_s: float) -> bool:
        """Waits until `finished` has something to say; returns whether it has."""
        lanes = (self._small, self._large)
        if any(lane.is_overdue for lane in lanes):
            return True
        poll = select.poll()  # select() knows no descriptor above 1,023
        outputs = [lane.output for lane in lanes if lane.output is not None]
        for output in outputs:
            poll.register(output, select.POLLIN)
        return bool(outputs) and bool(poll.poll(1000 * timeout_s))

    def close(self) -> None:
        """Ends the children."""
        self._small.close()
        self._large.close()


class TableBuilder:
    """A queue of binaries, and the child that works on its head.

    Args:
        server: Forks it.
        cache: Directory in which tables are built.
        watch: Told of the descriptor that becomes readable when `finished` has something to say.
        urgency: Of a binary; the greatest is built next.
        memory_bytes: As for `TableBuilders`.

    Attributes:
        given_up: Those whose child died twice, took too long, could not be started, or would have
            needed more memory than it may have.
        names: How the cache calls the tables that were built.
    """

    def __init__(
        self,
        server: ForkRequests,
        cache: Path,
        watch: Callable[[int], None],
        urgency: Callable[[int], float],
        memory_bytes: int = 0,
    ) -> None:
        self._server = server
        self._arguments = [str(cache), *([str(memory_bytes)] if memory_bytes else [])]
        self._watch = watch
        self._urgency = urgency
        self._queue: dict[int, str] = {}
        self._current = -1
        self._question = ""
        self._child: PipedHelper | None = None
        self._deadline = self._idle_since = 0.0
        self._is_asked = self._is_forgotten = False
        self._begun_s = 0.0
        self._spent_s: dict[int, float] = {}
        self._struck: set[int] = set()
        self._lost: list[int] = []
        self.given_up: set[int] = set()
        self.names: dict[int, str] = {}

    def ask(self, binary: int, path: str) -> None:
        """As `TableBuilders.ask`."""
        if binary != self._current:
            self._queue.setdefault(binary, path)
        self._ask_next()

    def forget(self, binaries: Collection[int]) -> None:
        """As `TableBuilders.forget`; what the child is at goes on, and is told to nobody."""
        for binary in binaries:
            self._queue.pop(binary, None)
            self.names.pop(binary, None)
            self._spent_s.pop(binary, None)
        self._lost = [binary for binary in self._lost if binary not in binaries]
        self._struck.difference_update(binaries)
        self.given_up.difference_update(binaries)
        self._is_forgotten |= self._is_asked and self._current in binaries

    def _ask_next(self) -> None:
        if self._is_asked or not self._queue:
            return
        if self._child is None and not self._start():
            self._lost += self._queue
            self.given_up.update(self._queue)
            self._queue.clear()
            return
        self._current = max(self._queue, key=self._urgency)
        self._question = self._queue.pop(self._current)
        self._tell(self._question)
        self._is_asked = True
        self._begun_s = time.monotonic()
        self._deadline = self._begun_s + _TIMEOUT_S

    def _tell(self, words: str) -> None:
        assert self._child is not None  # noqa: S101 - whoever calls has started it
        with contextlib.suppress(BrokenPipeError):  # it died: `finished` notices
            self._child.stdin.write(f"{words}\n".encode())
            self._child.stdin.flush()

    def _start(self) -> bool:
        """Starts the child; returns whether there was room for one."""
        try:
            self._child = self._server.run_piped(PROGRAM, self._arguments)
        except OSError:
            return False
        os.set_blocking(self._child.stdout.fileno(), False)
        self._watch(self._child.stdout.fileno())
        return True

    def finished(self) -> list[int]:
        """Returns the binaries that are done with, whether there is a table now or not."""
        done, self._lost = self._lost, []
        with contextlib.suppress(OSError):  # no interpreter can be started: it is late, then
            self._server.look()
        while self._child is not None:
            answer = self._child.stdout.read(4096)
            if answer is None and not self.is_overdue:
                break
            is_told = self._is_asked and not self._is_forgotten
            if not answer:
                # It ended, or takes too long. Also when it is asked for nothing: the other end of
                # its pipe is closed, which would wake whoever watches it for ever.
                is_late = answer is None
                self.close()
                if is_told and not self._may_retry(is_late):
                    self.given_up.add(self._current)
                    done.append(self._current)
            elif is_told:
                done.append(self._current)
                words = answer.decode(errors="replace").rstrip("\n")
                if words.startswith(BUILT):
                    self.names[self._current] = words.removeprefix(BUILT)
                elif words.endswith(TOO_LARGE):
                    self.given_up.add(self._current)
            if is_told:
                self._spent_s[self._current] = time.monotonic() - self._begun_s
            self._is_asked, self._is_forgotten, self._current = False, False, -1
            self._idle_since = time.monotonic()
            self._ask_next()
        # Most files come at a recording's start.
        if not self._is_asked and time.monotonic() - self._idle_since > _IDLE_S:
            self.close()
        lost, self._lost = self._lost, []
        return [*done, *lost]

    def take_spent_s(self) -> dict[int, float]:
        """As `TableBuilders.take_spent_s`."""
        spent_s, self._spent_s = self._spent_s, {}
        return spent_s

    def _may_retry(self, is_late: bool) -> bool:
        """Queues a binary again whose child died once: something else may have ended it."""
        if is_late or self._current in self._struck:
            return False
        self._struck.add(self._current)
        self._queue[self._current] = self._question
        return True

    @property
    def is_overdue(self) -> bool:
        """Whether the child has had more time than any file takes."""
        return self._is_asked and time.monotonic() >= self._deadline

    @property
    def output(self) -> IO[bytes] | None:
        """What becomes readable when `finished` has something to say."""
        return None if self._child is None else self._child.stdout

    def close(self) -> None:
        """Ends the child."""
        if self._child is None:
            return
        self._child.close()
        self._child = None
