# SPDX-License-Identifier: Apache-2.0
"""What readers of Python's objects ask of a process's memory.

Nothing in the target changes or waits, so what is read may be torn or stale; each reader bounds
and checks it. `inspector.memory` reads processes; tests read bytes that they made.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Generator, Iterable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from aiflame.agent.errors import AiflameError

# The longest single read anywhere is a line table; no caller needs more.
MAX_READ_BYTES = 1024 * 1024
# User space of x86-64 with four-level page tables (Linux Documentation/arch/x86/x86_64/mm.rst);
# CPython asks for no address above it.
MAX_ADDRESS = (1 << 47) - 4096
_LOWEST_ADDRESS = 4096  # the first page is never mapped
_PAGE_BYTES = mmap.PAGESIZE

_T = TypeVar("_T")
Reading: TypeAlias = Generator[tuple[int, int], "bytes | None", _T]


class Memory(Protocol):
    """The address space of one process."""

    def read(self, address: int, size: int) -> bytes | None:
        """Exactly `size` bytes from `address`, or None."""


class BatchMemory(Memory, Protocol):
    """The same, where to read many pieces at once costs little more than one."""

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """As `read` for each (address, size)."""


class NoMemoryAccess(AiflameError):
    """This process may not read the target's memory, or the target is gone."""


class Pages:
    """Memory a page at a time: what is read next mostly lies beside it, as a thread's frames do.

    It is for one moment: pages are kept until they are `forgotten`.
    """

    def __init__(self, memory: BatchMemory) -> None:
        self._memory = memory
        self._pages: dict[int, bytes | None] = {}

    def forget(self) -> None:
        """Has all be read anew."""
        self._pages.clear()

    def fetch(self, addresses: Iterable[int]) -> None:
        """Reads the pages of addresses that will be asked for, all at once."""
        pages = {address & -_PAGE_BYTES for address in addresses if sound_address(address)}
        missing = list(pages - self._pages.keys())
        found = self._memory.read_many([(page, _PAGE_BYTES) for page in missing])
        self._pages.update(zip(missing, found, strict=True))

    def read(self, address: int, size: int) -> bytes | None:
        """Exactly `size` bytes from `address`, or None."""
        start = address & -_PAGE_BYTES
        if address + size > start + _PAGE_BYTES:
            return self._memory.read(address, size)
        if start not in self._pages:
            self._pages[start] = self._memory.read(start, _PAGE_BYTES)
        page = self._pages[start]
        return None if page is None else page[address - start : address - start + size]


def read_together(memory: BatchMemory, readings: Iterable[Reading[_T]]) -> list[_T]:
    """Runs readings side by side: what they ask for next is read at once.

    Args:
        memory: Is read.
        readings: Each yields (address, size), is sent the bytes or None, and goes on from there.

    Returns:
        What each returns, in order.
    """
    results: dict[int, _T] = {}
    going = list(enumerate(readings))
    answers: list[bytes | None] = [None] * len(going)  # what a generator is sent first
    count = len(going)
    while going:
        asked: list[tuple[int, int]] = []
        left: list[tuple[int, Reading[_T]]] = []
        for (index, reading), answer in zip(going, answers, strict=True):
            try:
                asked.append(reading.send(answer))
                left.append((index, reading))
            except StopIteration as end:  # noqa: PERF203 - each reading ends by itself
                results[index] = end.value
        going = left
        answers = memory.read_many(asked) if asked else []
    return [results[index] for index in range(count)]


def sound_address(address: int) -> bool:
    """Whether anything of user space can be there."""
    return _LOWEST_ADDRESS <= address < MAX_ADDRESS


def read_u64(memory: Memory, address: int) -> int | None:
    """A pointer-sized number, or None."""
    data = memory.read(address, 8)
    return None if data is None else int(struct.unpack("<Q", data)[0])


def read_i32(memory: Memory, address: int) -> int | None:
    """A C int, or None."""
    data = memory.read(address, 4)
    return None if data is None else int(struct.unpack("<i", data)[0])
