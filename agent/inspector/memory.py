# SPDX-License-Identifier: Apache-2.0
"""Memory of other processes: stacks and Python's objects, without stopping anybody.

A read may wait for ever for whoever has the page (see `memory_worker`), so a child reads. One that
gets nowhere is killed, or left alone where not even that helps, and its process is not read again:
who asks waits a moment once for each such process, and never for ever.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from aiflame.agent import priority
from aiflame.agent.inspector import memory_worker as worker
from aiflame.agent.losses import LossKind

# User space ends below, whatever the page tables' depth (Documentation/arch/x86/x86_64/mm.rst).
_END_OF_USER_SPACE = 1 << 56

# A page from a slow disk takes a fifth of the first. Each process that takes longer halves the
# patience with the next one, down to the last: a thousand of them must not stop a recording.
_PATIENCE_S, _LEAST_PATIENCE_S = 0.5, 0.05
# A child that waits for a processor and not for a page is waited for.
_STARVED_PATIENCE_S = 30.0
# A child that dies of something else: the out-of-memory killer may come twice.
_MAX_DEATHS = 4
# Children that cannot be killed stay until their file system answers, or ends.
_MAX_STUCK = 256
_MAX_MESSAGE_BYTES = 4096
_MAX_ERROR = 4095  # MAX_ERRNO of linux/err.h

# The child imports nothing but this package and the standard library: without site-packages it is
# ready after 20 ms and not 60.
_BOOT = (
    "import sys;"
    "package = type(sys)('aiflame');"
    "package.__path__ = [sys.argv.pop(1)];"
    "sys.modules['aiflame'] = package;"
    "from aiflame.agent.inspector.memory_worker import main;"
    "main()"
)


class Span(NamedTuple):
    """Bytes [address, address + size) of a thread's process."""

    pid: int
    tid: int
    address: int
    size: int


class Answer(NamedTuple):
    """What was read of a span, from its beginning on.

    Attributes:
        data: Fewer bytes than asked for from the first that cannot be read.
        error: Why the process cannot be read at all, an error number; 0 where it can.
    """

    data: bytes
    error: int = 0


_NOTHING = Answer(b"")


class _Child:
    """A process that reads. Its memory is shared, so that what it reads is copied once."""

    def __init__(self) -> None:
        fd = os.memfd_create("aiflame-memory", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.ftruncate(fd, worker.SHARED_BYTES)
            self.shared = worker.Shared(fd)
            packages = str(Path(__file__).parents[2])
            numbers = map(str, (theirs.fileno(), fd, os.getpid()))
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-I", "-S", "-c", _BOOT, packages, *numbers],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), fd),
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the recorder
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(fd)
        self.socket = ours
        self.is_ready = False
        priority.hurry_child(self.process.pid)

    @property
    def progress(self) -> int:
        """The number of the span that it is at."""
        return int(worker.PROGRESS.unpack_from(self.shared.memory)[0])

    def ask(self, spans: Sequence[Span]) -> None:
        """Has spans read; `has_answered` tells when they are."""
        memory = self.shared.memory
        for index, (_, tid, address, size) in enumerate(spans):
            at = worker.SPANS_AT + index * worker.SPAN.size
            worker.SPAN.pack_into(memory, at, tid, address, size)
        worker.PROGRESS.pack_into(memory, 0, 0)
        self.socket.send(worker.COUNT.pack(len(spans)))

    def take_message(self, timeout_s: float) -> bytes | None:
        """Returns what it says, b"" if it has ended, None if it says nothing within the time."""
        poll = select.poll()  # select() knows no descriptor above 1,023
        poll.register(self.socket, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return None
        with contextlib.suppress(ConnectionError):
            return self.socket.recv(_MAX_MESSAGE_BYTES)
        return b""

    @property
    def waits_for_a_processor(self) -> bool:
        """Whether it would get on if it were let."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
            return status.rpartition(") ")[2][:1] == "R"
        return False

    def answers(self, spans: Sequence[Span]) -> Iterator[Answer]:
        """Yields what was read. The child's numbers are not trusted."""
        memory, at = self.shared.memory, worker.DATA_AT
        for index, span in enumerate(spans):
            place = worker.RESULTS_AT + index * worker.RESULT.size
            (found,) = worker.RESULT.unpack_from(memory, place)
            if found < 0:
                yield Answer(b"", min(-found, _MAX_ERROR))
            else:
                yield Answer(memory[at : at + min(found, span.size)])
            at += span.size

    def end(self) -> None:
        """Ends it; it may go on to wait where no signal gets through (fs/fuse/dev.c, v6.1)."""
        self.socket.close()
        self.process.kill()


class RemoteMemory:
    """Reads memory of processes. The child is started on first use.

    Attributes:
        stuck: Processes that are not read any more, since a read of them got nowhere.
        failures: What the child could not give up before it began to read, in words.
    """

    def __init__(self) -> None:
        self.stuck: set[int] = set()
        self.failures = ""
        self._child: _Child | None = None
        self._ended: list[_Child] = []
        self._deaths = 0

    @property
    def losses(self) -> dict[LossKind, int]:
        """What is missing for want of memory that could be read."""
        return {
            LossKind.STACKS_STUCK: len(self.stuck),
            LossKind.MEMORY_READER_DIED: self._deaths,
            LossKind.SANDBOX_INCOMPLETE: int(bool(self.failures)),
        }

    @property
    def loss_files(self) -> dict[LossKind, set[str]]:
        """Processes to blame."""
        return {
            LossKind.STACKS_STUCK: {f"process {pid}" for pid in self.stuck},
            LossKind.SANDBOX_INCOMPLETE: {self.failures} - {""},
        }

    @property
    def pid(self) -> int | None:
        """Of the child, None where there is none."""
        return None if self._child is None else self._child.process.pid

    def start(self) -> bool:
        """Starts the child, for who will need it soon; returns whether there is one."""
        self._ended = [child for child in self._ended if child.process.poll() is None]
        if self._child is None and self._deaths < _MAX_DEATHS and len(self.stuck) < _MAX_STUCK:
            try:
                self._child = _Child()
            except OSError:  # no memory, or too many processes
                self._deaths = _MAX_DEATHS
        return self._child is not None

    def read(self, spans: Sequence[Span]) -> list[Answer]:
        """Returns what could be read of each span."""
        found = [_NOTHING] * len(spans)
        left = [index for index, span in enumerate(spans) if _can_be_asked(span)]
        while left:
            left = [index for index in left if spans[index].pid not in self.stuck]
            batch = _first_batch(spans, left)
            asked = [spans[index] for index in batch]
            if not asked or not self.start() or self._child is None:
                break
            answers = self._ask(self._child, asked)
            if answers is not None:
                for index, answer in zip(batch, answers, strict=True):
                    found[index] = answer
                left = left[len(batch) :]
        return found

    def _ask(self, child: _Child, spans: Sequence[Span]) -> list[Answer] | None:
        """Returns the child's answers; None where it has come to an end, and one may try again."""
        try:
            child.ask(spans)
        except ConnectionError:
            self._lost(child)
            return None
        before = -1
        starved_until_s = time.monotonic() + _STARVED_PATIENCE_S
        while True:
            message = child.take_message(self._patience_s)
            if message is None:
                now = child.progress
                if now == before and not (
                    child.waits_for_a_processor and time.monotonic() < starved_until_s
                ):
                    self._stuck_at(child, spans[min(now, len(spans) - 1)].pid)
                    return None
                before = now
            elif not message:
                self._lost(child)
                return None
            elif child.is_ready:
                return list(child.answers(spans))
            else:
                child.is_ready = True
                self.failures = message.decode(errors="replace").removeprefix("ready ")

    @property
    def _patience_s(self) -> float:
        # Twice: what it is at is looked at, then looked at again.
        return float(max(_PATIENCE_S / 2 ** len(self.stuck), _LEAST_PATIENCE_S)) / 2

    def _stuck_at(self, child: _Child, pid: int) -> None:
        if child.is_ready:
            self.stuck.add(pid)
        else:
            self._deaths += 1
        self._leave(child)

    def _lost(self, child: _Child) -> None:
        self._deaths += 1
        self._leave(child)

    def _leave(self, child: _Child) -> None:
        child.end()
        self._ended.append(child)
        self._child = None

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._leave(self._child)
        for child in self._ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(_LEAST_PATIENCE_S)
        self._ended = []


def _can_be_asked(span: Span) -> bool:
    is_there = 0 <= span.address < span.address + span.size <= _END_OF_USER_SPACE
    return is_there and span.size <= worker.MAX_DATA_BYTES


def _first_batch(spans: Sequence[Span], left: Sequence[int]) -> list[int]:
    """Returns as many of those that are left as the child can be asked for at once."""
    batch: list[int] = []
    size = 0
    for index in left[: worker.MAX_SPANS]:
        size += spans[index].size
        if size > worker.MAX_DATA_BYTES:
            break
        batch.append(index)
    return batch
