# SPDX-License-Identifier: Apache-2.0
"""Memory of other processes: stacks and Python's objects, without stopping anybody.

A read may wait for ever for whoever has the page (see `memory_worker`), so a child reads. One that
gets nowhere is killed, or left alone where not even that helps, and its process is not read again:
who asks waits a moment once for each such process, and never for ever.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aiflame.agent.inspector import memory_worker as worker
from aiflame.agent.inspector.child import Child, Children, began
from aiflame.agent.losses import LossKind

# User space ends below, whatever the page tables' depth (Documentation/arch/x86/x86_64/mm.rst).
_END_OF_USER_SPACE = 1 << 56

# A page from a slow disk takes a fifth of the first. Each process that takes longer halves the
# patience with the next one, down to the last: a thousand of them must not stop a recording.
_PATIENCE_S, _LEAST_PATIENCE_S = 0.5, 0.05
_MAX_ERROR = 4095  # MAX_ERRNO of linux/err.h
# Of what is shared with the child: more than that is given back, until somebody needs it again.
_KEPT_BYTES = 1 << 20


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


class _Child(Child):
    """A process that reads. Its memory is shared, so that what it reads is copied once."""

    def __init__(self) -> None:
        fd = os.memfd_create("aiflame-memory", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, worker.SHARED_BYTES)
            self.shared = worker.Shared(fd)
            super().__init__("memory_worker", (fd,))
        finally:
            os.close(fd)

    @property
    def progress(self) -> int:
        """The number of the span that it is at."""
        return int(worker.PROGRESS.unpack_from(self.shared.memory)[0])

    def ask(self, spans: Sequence[Span]) -> None:
        """Has spans read; a message tells when they are."""
        memory = self.shared.memory
        for index, (_, tid, address, size) in enumerate(spans):
            at = worker.SPANS_AT + index * worker.SPAN.size
            worker.SPAN.pack_into(memory, at, tid, address, size)
        worker.PROGRESS.pack_into(memory, 0, 0)
        self.send(worker.COUNT.pack(len(spans)))

    def answers(self, spans: Sequence[Span]) -> Iterator[Answer]:
        """Yields what was read. The child's numbers are not trusted."""
        memory, at = self.shared.memory, worker.DATA_AT
        for index, span in enumerate(spans):
            offset = worker.RESULTS_AT + index * worker.RESULT.size
            (found,) = worker.RESULT.unpack_from(memory, offset)
            if found < 0:
                yield Answer(b"", min(-found, _MAX_ERROR))
            else:
                yield Answer(memory[at : at + min(found, span.size)])
            at += span.size

    def give_back(self) -> None:
        """Returns the pages that are shared; their bytes are 0 then."""
        with contextlib.suppress(OSError):  # then they stay
            self.shared.memory.madvise(mmap.MADV_REMOVE)


class RemoteMemory:
    """Reads memory of processes. The child is started on first use.

    Attributes:
        stuck: Processes that are not read any more, since a read of them got nowhere, and when each
            began: another one with its number is read.
    """

    def __init__(self) -> None:
        self.stuck: dict[int, bytes] = {}
        self._children = Children(_Child)
        self._given_up = self._era = 0

    @property
    def losses(self) -> dict[LossKind, int]:
        """What is missing for want of memory that could be read."""
        return {
            LossKind.STACKS_STUCK: self._given_up,
            LossKind.MEMORY_READER_DIED: self._children.deaths,
        }

    @property
    def loss_files(self) -> dict[LossKind, set[str]]:
        """Processes to blame."""
        return {LossKind.STACKS_STUCK: {f"process {pid}" for pid in self.stuck}}

    @property
    def failures(self) -> str:
        """What the child could not give up before it began to read, in words."""
        return self._children.failures

    @property
    def pid(self) -> int | None:
        """Of the child, None where there is none."""
        return self._children.pid

    def start(self) -> bool:
        """Starts the child, for who will need it soon; returns whether there is one."""
        return self._children.start() is not None

    def read(self, spans: Sequence[Span]) -> list[Answer]:
        """Returns what could be read of each span."""
        self._children.look()
        if self._era != self._children.era:
            self._era = self._children.era
            self.stuck.clear()
        for pid in self.stuck.keys() & {span.pid for span in spans}:
            if self.stuck[pid] != began(pid):
                del self.stuck[pid]
        found = [_NOTHING] * len(spans)
        left = [index for index, span in enumerate(spans) if _can_be_asked(span)]
        while left:
            left = [index for index in left if spans[index].pid not in self.stuck]
            batch = _first_batch(spans, left)
            asked = [spans[index] for index in batch]
            child = self._children.start() if asked else None
            if child is None:
                break
            answers = self._ask(child, asked)
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
            self._children.lose(is_stuck=False)
            return None
        stuck = self._children.stuck
        patience_s = max(_PATIENCE_S / 2**self._children.recently_stuck, _LEAST_PATIENCE_S)
        if self._children.wait(child, patience_s, lambda: child.progress) is None:
            if self._children.stuck > stuck:
                pid = spans[min(child.progress, len(spans) - 1)].pid
                self.stuck[pid] = began(pid)
                self._given_up += 1
            return None
        answers = list(child.answers(spans))
        if sum(span.size for span in spans) > _KEPT_BYTES:
            child.give_back()
        return answers

    def close(self) -> None:
        """Ends the child."""
        self._children.close()


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
