# SPDX-License-Identifier: Apache-2.0
"""Stacks that met code whose unwind table was not there, walked on once it is.

The kernel half sends a copy of such a stack: registers where the walk met that code, and the pages
of the stack from there on. Windows have it at once, as far as it was walked, under an id of its
own; and again, as a later definition of that id, once it was walked to its end. Only stacks of
on-CPU samples and of calls are copied. Copies are kept in memory, never in a file.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.inspector.memory import Span
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import COMPLETE_REASONS, StopReason
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import Mapping, ProcessImage, ProcessTable
from aiflame.agent.processes.thread_walk import (
    StackWalker,
    TableSource,
    WalkBegin,
    WalkedThread,
)
from aiflame.agent.unwind.walk import Registers

# Of one process: what two busy threads bring at 499 Hz, or ten at 99 Hz; a walk takes 0.2 ms.
COPIES_PER_S = 1024

# Of all copies that wait; half of it may be of one process.
_MAX_KEPT_BYTES = 64_000_000

# At each look: 40 ms. To look through a thousand that still wait takes 1 ms.
_MOST_WALKED = 200
_LOOK_INTERVAL_NS = 100_000_000
# To load tables again takes milliseconds.
_FORGET_NS = 60_000_000_000

# What a stack is in may have been mapped a moment before: then it is walked again for so long.
_MAPPED_SOON_NS = 1_000_000_000

# As long as for the stacks of threads that sleep.
_PATIENCE_NS = 15_000_000_000

_U64 = struct.Struct("<Q")


@dataclass(slots=True)
class _Copy:
    """A stack that is to be walked on.

    Attributes:
        record: As the kernel half walked it; of abi.STACK_DTYPE.
        begin: The first frame in code without a table.
        memory: The stack from that frame's stack pointer on.
        came_ns: Monotonic.
        mappings: Of its process, as it was walked last; None before.
        lacks: Tables that this walk did without, and that are being built.
        walked: What it found.
    """

    stack: int
    image: ProcessImage
    record: npt.NDArray[np.void]
    begin: WalkBegin
    memory: bytes
    came_ns: int
    mappings: Sequence[Mapping] | None = None
    lacks: frozenset[int] = frozenset()
    walked: WalkedThread | None = None


class Records(Protocol):
    """What the kernel half has sent; RingBuffer is one."""

    def records(self) -> Iterator[bytes]:
        """Yields what has come."""


class Tables(TableSource, Protocol):
    """Tables that may be on their way; UnwindTables has them."""

    def are_settled(self, binaries: Collection[int]) -> bool:
        """Whether of each of some binaries there is a table, or will be none."""

    def wait(self, binaries: Collection[int], deadline_ns: int) -> bool:
        """Waits for tables until a monotonic time; returns whether all are done."""


class TakesStacks(Protocol):
    """Where stacks go; Stacks is one."""

    def add(
        self, keys: npt.NDArray[Any], records: npt.NDArray[Any], *, is_late: bool = False
    ) -> None:
        """Takes in stacks, or, late, what is known of them now."""


class _CopiedMemory:
    """What was copied of a stack, and code as it is now.

    Args:
        copy: Of the stack.
        table: Process table.
    """

    def __init__(self, copy: _Copy, table: ProcessTable) -> None:
        self._image = copy.image
        self._start = copy.begin.registers.rsp
        self._stack = copy.memory
        self._table = table

    def read_u64(self, address: int) -> int | None:
        """As WalkMemory.read_u64."""
        offset = address - self._start
        if not 0 <= offset <= len(self._stack) - _U64.size:
            return None
        return int(_U64.unpack_from(self._stack, offset)[0])

    def page_of_code(self, start: int) -> bytes:
        """As WalkMemory.page_of_code; of a process that is gone, as its files have it."""
        span = Span(self._image.pid, self._image.pid, start, abi.STACK_PAGE_BYTES)
        if not self._image.is_over:
            return self._table.memory.read([span])[0].data
        (at,) = self._image.find(np.array([start], np.uint64)).tolist()
        if at < 0:
            return b""
        mapping = self._image.mappings[at]
        return self._table.binaries.bytes_at(
            mapping.binary, mapping.file_offset + start - mapping.start, span.size
        )


class LateWalks:
    """The stacks that wait for tables.

    Args:
        copies: What the kernel half has sent.
        table: Process table.
        tables: Unwind tables.
        images: ELF headers of the binaries.
        stacks: Takes them.

    Attributes:
        complete: How many stacks were walked to their end.
        truncated: How many were not, although all was waited for. Not those of which nothing could
            be read when they were taken, as inside exec: no table is missing for them.
        losses: Copies that there was no room for.
    """

    def __init__(
        self,
        copies: Records,
        table: ProcessTable,
        tables: Tables,
        images: ElfImages,
        stacks: TakesStacks,
    ) -> None:
        self._copies = copies
        self._table = table
        self._tables = tables
        self._stacks = stacks
        self._walker = StackWalker(tables, images)
        self._waiting: list[_Copy] = []
        self._next_look_ns = self._forgot_ns = 0
        self._kept_bytes: Counter[int] = Counter()  # by index of the process image
        self.complete = self.truncated = 0
        self.losses: Counter[LossKind] = Counter()

    def take(self) -> None:
        """Takes in the copies that the kernel half has sent."""
        found = []
        for payload in self._copies.records():
            row = np.frombuffer(payload, abi.STACK_COPY_DTYPE, 1)[0]
            record = np.array([row["record"]], abi.STACK_DTYPE)
            copy = _copy_of(row, record, self._table)
            if not self._has_room(copy):
                self.losses[LossKind.STACK_COPIES_FULL] += 1
                found.append((copy.stack, record))
                continue
            self._kept_bytes[copy.image.index] += _size_bytes(copy)
            self._waiting.append(copy)
            early = record.copy()
            early["end"] = StopReason.NO_TABLE_YET
            found.append((copy.stack, early))
        self._give(found)

    def _has_room(self, copy: _Copy) -> bool:
        size_bytes = _size_bytes(copy)
        of_process = self._kept_bytes[copy.image.index] + size_bytes
        is_fair = of_process <= _MAX_KEPT_BYTES // 2
        return is_fair and self._kept_bytes.total() + size_bytes <= _MAX_KEPT_BYTES

    def used_images(self) -> set[int]:
        """Returns the process images, by index, whose stacks wait."""
        return {copy.image.index for copy in self._waiting}

    def poll(self) -> None:
        """Walks what can be walked on now, or not so much of it that it would take long."""
        now_ns = time.monotonic_ns()
        if self._waiting and now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + _LOOK_INTERVAL_NS
            self._walk(_MOST_WALKED)

    def _walk(self, most: int) -> None:
        now_ns = time.monotonic_ns()
        waiting, settled = [], []
        for at, copy in enumerate(self._waiting):
            if most <= 0:
                waiting += self._waiting[at:]
                break
            if self._is_due(copy):
                most -= 1
                self._walk_one(copy)
            if _is_settled(copy, now_ns):
                settled.append(copy)
            else:
                waiting.append(copy)
        self._waiting = waiting
        self._settle(settled)
        # On some hosts something waits all day.
        if not waiting or now_ns - self._forgot_ns >= _FORGET_NS:
            self._forgot_ns = now_ns
            self._walker.forget()

    def _is_due(self, copy: _Copy) -> bool:
        if not copy.image.mappings:
            return False
        if copy.mappings is not copy.image.mappings:
            return True
        return bool(copy.lacks) and self._tables.are_settled(copy.lacks)

    def _walk_one(self, copy: _Copy) -> None:
        copy.mappings = copy.image.mappings
        memory = _CopiedMemory(copy, self._table)
        copy.walked = self._walker.walk_on(copy.image, copy.begin, memory)
        copy.lacks = copy.walked.lacks

    def _settle(self, copies: Sequence[_Copy]) -> None:
        """Gives what is known of stacks, which is all that will be."""
        for copy in copies:
            self._kept_bytes[copy.image.index] -= _size_bytes(copy)
            if not self._kept_bytes[copy.image.index]:
                del self._kept_bytes[copy.image.index]
            if copy.walked is not None and _is_better(copy.walked, copy):
                _extend(copy.record[0], copy.begin.depth - 1, copy.walked)
            is_complete = int(copy.record["end"][0]) in COMPLETE_REASONS
            self.complete += is_complete
            self.truncated += not is_complete and bool(copy.memory)
        self._give([(copy.stack, copy.record) for copy in copies], is_late=True)

    def _give(
        self, found: Sequence[tuple[int, npt.NDArray[np.void]]], *, is_late: bool = False
    ) -> None:
        """Gives stacks together: whose addresses are in no mapping has its mappings read again."""
        if found:
            stacks = np.array([stack for stack, _ in found], abi.STACK_ID_DTYPE)
            records = np.concatenate([record for _, record in found])
            self._stacks.add(stacks, records, is_late=is_late)

    def finish(self) -> None:
        """Walks on what is left, once the recording has ended; may wait for tables."""
        self.take()
        deadline_ns = time.monotonic_ns() + _PATIENCE_NS
        waited_for = frozenset[int]()
        while self._waiting:
            self._walk(len(self._waiting))
            lacking = frozenset[int]().union(*(copy.lacks for copy in self._waiting))
            # As in SleepWalks.finish.
            if lacking <= waited_for or not self._tables.wait(lacking, deadline_ns):
                break
            waited_for |= lacking
        self._settle(self._waiting)
        self._waiting.clear()


def _copy_of(row: np.void, record: npt.NDArray[np.void], table: ProcessTable) -> _Copy:
    stack_pointer = int(row["stack_pointer"])
    before = stack_pointer % abi.STACK_PAGE_BYTES
    memory = row["memory"].tobytes()[before : int(row["pages"]) * abi.STACK_PAGE_BYTES]
    frame_pointer = int(row["frame_pointer"]) if row["has_frame_pointer"] else None
    base_pointer = int(row["base_pointer"]) if row["depth"] == 1 else None
    registers = Registers(
        int(row["instruction_pointer"]), stack_pointer, frame_pointer, base_pointer
    )
    return _Copy(
        stack=int(row["stack"]),
        image=table.image(int(record["tgid"][0]), int(record["image"][0])),
        record=record,
        begin=WalkBegin(registers, bool(row["is_exact"]), int(row["depth"])),
        memory=memory,
        came_ns=time.monotonic_ns(),
    )


def _extend(record: np.void, known: int, walked: WalkedThread) -> None:
    """Puts what was walked after the first frames of a stack."""
    before = int(record["kernel_depth"])
    depth = min(known + len(walked.addresses), abi.MAX_FRAMES - before)
    record["frames"][before + known : before + depth] = walked.addresses[: depth - known]
    record["user_depth"], record["end"] = depth, walked.end


def _size_bytes(copy: _Copy) -> int:
    return len(copy.memory) + copy.record.nbytes


def _is_settled(copy: _Copy, now_ns: int) -> bool:
    """Whether another walk of a stack would bring nothing more."""
    age_ns = now_ns - copy.came_ns
    if age_ns > _PATIENCE_NS:
        return True
    if copy.lacks:
        return False
    if copy.walked is not None and copy.walked.end in COMPLETE_REASONS:
        return True
    return age_ns > _MAPPED_SOON_NS


def _is_better(walked: WalkedThread, copy: _Copy) -> bool:
    """Whether a walk brought more than the kernel half had without a table."""
    if walked.end in COMPLETE_REASONS:
        return True
    # Another end may be a word that only looks like the end of a chain of frame pointers.
    has_end = int(copy.record["end"][0]) == StopReason.ROOTED_BY_TABLE
    depth = copy.begin.depth - 1 + len(walked.addresses)
    return not has_end and depth >= int(copy.record["user_depth"][0])
