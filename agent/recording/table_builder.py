# SPDX-License-Identifier: Apache-2.0
"""Has unwind tables built by child processes, without ever waiting for them.

The one that samples need most comes next: a process may map a hundred files and run in three. Small
files have a child of their own, since a large one takes seconds, and may have been begun before it
was known what is needed.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

# libtorch_cpu takes a second; what takes this long on any machine is a file made to.
_TIMEOUT_S = 60.0

# An interpreter takes 0.1 s; compilers and PyTorch, which take seconds, are larger by far.
_SMALL_FILE_BYTES = 32 << 20


class TableBuilders:
    """A queue for small files and one for large ones.

    Args:
        cache: Directory in which tables are built.
        watch: Told of descriptors that become readable when `finished` has something to say.
        urgency: Of a binary; the greatest is built next.
        size_bytes: Of a binary's file.
    """

    def __init__(
        self,
        cache: Path,
        watch: Callable[[int], None],
        urgency: Callable[[int], float],
        size_bytes: Callable[[int], int],
    ) -> None:
        self._size_bytes = size_bytes
        self._small = TableBuilder(cache, watch, urgency)
        self._large = TableBuilder(cache, watch, urgency)

    def ask(self, binary: int, path: str) -> None:
        """Queues a binary by its index and an openable path, unless it is queued already."""
        is_small = self._size_bytes(binary) <= _SMALL_FILE_BYTES
        (self._small if is_small else self._large).ask(binary, path)

    def finished(self) -> list[int]:
        """Returns the binaries that are done with, whether there is a table now or not."""
        return [*self._small.finished(), *self._large.finished()]

    def wait(self, timeout_s: float) -> bool:
        """Waits until `finished` has something to say; returns whether it has."""
        outputs = [lane.output for lane in (self._small, self._large) if lane.output is not None]
        return bool(outputs) and bool(select.select(outputs, [], [], timeout_s)[0])

    def close(self) -> None:
        """Ends the children."""
        self._small.close()
        self._large.close()


class TableBuilder:
    """A queue of binaries, and the child that works on its head.

    Args:
        cache: Directory in which tables are built.
        watch: Told of the descriptor that becomes readable when `finished` has something to say.
        urgency: Of a binary; the greatest is built next.
    """

    def __init__(
        self, cache: Path, watch: Callable[[int], None], urgency: Callable[[int], float]
    ) -> None:
        self._cache = cache
        self._watch = watch
        self._urgency = urgency
        self._queue: dict[int, str] = {}
        self._current = -1
        self._child: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        self._is_asked = False

    def ask(self, binary: int, path: str) -> None:
        """Queues a binary by its index and an openable path, unless it is queued already."""
        if binary != self._current:
            self._queue.setdefault(binary, path)
        self._ask_next()

    def _ask_next(self) -> None:
        if self._is_asked or not self._queue:
            return
        if self._child is None:
            self._child = subprocess.Popen(  # noqa: S603 - a module of our own
                [sys.executable, "-m", "aiflame.agent.unwind.worker", str(self._cache)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the recorder
            )
            assert self._child.stdout is not None  # noqa: S101 - it is a pipe
            os.set_blocking(self._child.stdout.fileno(), False)
            self._watch(self._child.stdout.fileno())
        assert self._child.stdin is not None  # noqa: S101 - it is a pipe
        self._current = max(self._queue, key=self._urgency)
        path = self._queue.pop(self._current)
        try:
            self._child.stdin.write(f"{path}\n".encode())
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # it died: `finished` notices, and drops the binary that it was at
        self._is_asked = True
        self._deadline = time.monotonic() + _TIMEOUT_S

    def finished(self) -> list[int]:
        """Returns the binaries that are done with, whether there is a table now or not."""
        done: list[int] = []
        while self._is_asked and self._child is not None:
            assert self._child.stdout is not None  # noqa: S101 - it is a pipe
            answer = self._child.stdout.read(4096)
            if answer is None and time.monotonic() < self._deadline:
                break
            if not answer:  # it ended, or takes too long
                self.close()
            done.append(self._current)
            self._is_asked, self._current = False, -1
            self._ask_next()
        return done

    @property
    def output(self) -> IO[bytes] | None:
        """What becomes readable when `finished` has something to say."""
        return None if self._child is None else self._child.stdout

    def close(self) -> None:
        """Ends the child."""
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        self._child = None
