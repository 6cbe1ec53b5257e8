# SPDX-License-Identifier: Apache-2.0
"""Reading stacks: of this very process, which needs no privilege."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator

import pytest
from aiflame.agent.processes import stack_memory
from aiflame.agent.processes.stack_memory import Place, StackMemory, StackReader

_PAGE = mmap.PAGESIZE
_HERE = (os.getpid(), os.getpid())


@pytest.fixture
def reader() -> Iterator[StackReader]:
    reader = StackReader()
    yield reader
    reader.close()


@pytest.fixture
def region() -> Iterator[tuple[int, bytes]]:
    """Three pages of known bytes and their address; what lies behind is not readable."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    access = mmap.PROT_READ | mmap.PROT_WRITE
    start = libc.mmap(None, ctypes.c_size_t(4 * _PAGE), access, flags, -1, ctypes.c_long(0))
    contents = bytes(range(256)) * (3 * _PAGE // 256)
    ctypes.memmove(start, contents, len(contents))
    assert libc.mprotect(start + 3 * _PAGE, _PAGE, 0) == 0
    yield start, contents
    libc.munmap(start, 4 * _PAGE, 0)


def _word(contents: bytes, at: int) -> int:
    return int.from_bytes(contents[at : at + 8], "little")


def test_a_read_ends_where_memory_does(reader: StackReader, region: tuple[int, bytes]) -> None:
    start, contents = region
    places = [
        Place(*_HERE, start + 40, 100),
        Place(*_HERE, start + 40, 4 * _PAGE),
        Place(*_HERE, start + 3 * _PAGE, _PAGE),
        Place(*_HERE, start, 0),
        Place(*_HERE, (1 << 64) - 8, 64),
        Place(*_HERE, 0, 64),
        Place(1 << 30, 1 << 30, start, 64),  # no such process
    ]
    assert reader.read(places) == [contents[40:140], contents[40:], b"", b"", b"", b"", b""]


def test_words_beyond_the_piece_are_read_late(
    reader: StackReader, region: tuple[int, bytes]
) -> None:
    start, contents = region
    memory = StackMemory(Place(*_HERE, start, 64), contents[:64], reader)
    assert memory.read_u64(start + 56) == _word(contents, 56)
    assert memory.late_pages == 0
    assert memory.read_u64(start + 57) == _word(contents, 57)
    assert memory.read_u64(start + 2 * _PAGE) == _word(contents, 2 * _PAGE)
    assert memory.read_u64(start + 3 * _PAGE - 8) == _word(contents, 3 * _PAGE - 8)
    assert memory.late_pages == 2
    # AND what is not there is not made up
    assert memory.read_u64(start + 3 * _PAGE - 7) is None
    assert memory.read_u64(start + 3 * _PAGE) is None
    assert memory.read_u64((1 << 64) - 8) is None


def test_nothing_is_read_late_where_that_would_be_of_another_moment(
    region: tuple[int, bytes],
) -> None:
    start, contents = region
    memory = StackMemory(Place(*_HERE, start, 64), contents[:64], None)
    assert memory.read_u64(start + 8) == _word(contents, 8)
    assert memory.read_u64(start + 64) is None
    assert memory.late_pages == 0


def test_a_walk_reads_a_bounded_number_of_pages(
    monkeypatch: pytest.MonkeyPatch, reader: StackReader, region: tuple[int, bytes]
) -> None:
    monkeypatch.setattr(stack_memory, "_MAX_LATE_PAGES", 2)
    start, contents = region
    memory = StackMemory(Place(*_HERE, start, 0), b"", reader)
    words = [memory.read_u64(start + page * _PAGE) for page in range(3)]
    assert words == [_word(contents, 0), _word(contents, _PAGE), None]


def test_memory_that_never_comes_costs_its_own_process_only(
    monkeypatch: pytest.MonkeyPatch, reader: StackReader
) -> None:
    # GIVEN a process whose memory comes from a file system that it serves itself
    released = threading.Event()
    asked: list[int] = []

    def copy(place: Place) -> bytes:
        asked.append(place.pid)
        if place.pid == 13:
            released.wait()
        return b"%d" % place.pid

    monkeypatch.setattr(stack_memory, "_copy", copy)
    monkeypatch.setattr(stack_memory, "_PATIENCE_S", 0.02)
    places = [Place(pid, pid, 0, 8) for pid in (1, 13, 2, 13, 3)]
    try:
        # THEN all others are read, and it is not asked twice
        assert reader.read(places) == [b"1", b"", b"2", b"", b"3"]
        assert reader.read(places[:3]) == [b"1", b"", b"2"]
        assert reader.stuck == {13}
        assert asked == [1, 13, 2, 3, 1, 2]
    finally:
        released.set()
