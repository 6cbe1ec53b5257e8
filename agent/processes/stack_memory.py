# SPDX-License-Identifier: Apache-2.0
"""Reads stacks of other processes, a few pages at a time, without stopping them.

process_vm_readv(2) brings in what is not in memory, so it may wait for whoever has that: a swap
device, or a file system that the target itself serves. It is called in a thread of its own; one
that gets nowhere is left behind, and its process is not asked again.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import queue
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

from aiflame.agent import priority

PAGE_BYTES = mmap.PAGESIZE
# User space ends below, whatever the page tables' depth (Documentation/arch/x86/x86_64/mm.rst).
_END_OF_USER_SPACE = 1 << 56

# What a walk may read besides the first piece: 127 frames with 8 KiB of local variables each.
_MAX_LATE_PAGES = 256

# A page from a slow disk takes a tenth of that.
_PATIENCE_S = 1.0

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (ctypes.c_int, *(2 * (ctypes.c_void_p, ctypes.c_ulong)), ctypes.c_ulong)

_U64 = struct.Struct("<Q")


class Place(NamedTuple):
    """Bytes [address, address + size) of a thread's process."""

    pid: int
    tid: int
    address: int
    size: int


def _copy(place: Place) -> bytes:
    """Returns what is readable from the beginning of a place on."""
    address, end = place.address, place.address + place.size
    if not 0 <= address < end <= _END_OF_USER_SPACE:
        return b""
    # One vector a page: a call reads whole vectors up to the first that it cannot.
    edges = [address, *range(address // PAGE_BYTES * PAGE_BYTES + PAGE_BYTES, end, PAGE_BYTES)]
    edges.append(end)
    vectors = [word for a, b in itertools.pairwise(edges) for word in (a, b - a)]
    remote = struct.pack(f"<{len(vectors)}Q", *vectors)
    buffer = ctypes.create_string_buffer(place.size)
    local = struct.pack("<QQ", ctypes.addressof(buffer), place.size)
    # By thread: a process whose first thread has ended is not found by its own id.
    copied = _readv(place.tid, local, 1, remote, len(vectors) // 2, 0)
    return buffer.raw[:copied] if copied > 0 else b""


class StackReader:
    """Reads memory of processes.

    Attributes:
        stuck: Processes that are not read any more, since a read of them got nowhere.
    """

    def __init__(self) -> None:
        self.stuck: set[int] = set()
        self._work: queue.SimpleQueue[tuple[list[Place], list[bytes]] | None] | None = None
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def read(self, places: Sequence[Place]) -> list[bytes]:
        """Returns the bytes of each place, fewer from the first that cannot be read on."""
        found: list[bytes] = []
        while len(found) < len(places):
            rest = list(places[len(found) :])
            if rest[0].pid in self.stuck:
                found.append(b"")
                continue
            run = next((i for i, place in enumerate(rest) if place.pid in self.stuck), len(rest))
            got = self._read_run(rest[:run])
            if len(got) < run:
                self.stuck.add(rest[len(got)].pid)
            found += got
        return found

    def _read_run(self, places: list[Place]) -> list[bytes]:
        """Reads in the helper thread up to where that stops getting on."""
        if self._work is None:
            self._work, self._done = queue.SimpleQueue(), queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._work, self._done), daemon=True).start()
        got: list[bytes] = []
        self._work.put((places, got))
        before = -1
        while len(got) != before:
            before = len(got)
            with contextlib.suppress(queue.Empty):
                self._done.get(timeout=_PATIENCE_S)
                return got
        self._work = None
        return got[:before]

    def close(self) -> None:
        """Ends the helper thread."""
        if self._work is not None:
            self._work.put(None)
            self._work = None


def _serve(
    work: queue.SimpleQueue[tuple[list[Place], list[bytes]] | None],
    done: queue.SimpleQueue[None],
) -> None:
    priority.hurry()
    while (asked := work.get()) is not None:
        places, got = asked
        for place in places:
            got.append(_copy(place))
        done.put(None)


class StackMemory:
    """One thread's stack: a piece that was read before, and pages that are read when asked for.

    Args:
        place: Where the piece lies.
        piece: Its bytes.
        reader: Reads the pages; None for none but the piece.

    Attributes:
        late_pages: How many pages had to be read; they are of another moment than the piece.
    """

    def __init__(self, place: Place, piece: bytes, reader: StackReader | None) -> None:
        self._place = place
        self._piece = piece
        self._reader = reader
        self._pages: dict[int, bytes] = {}

    @property
    def late_pages(self) -> int:
        return len(self._pages)

    def read_u64(self, address: int) -> int | None:
        """Returns a word of memory, None where there is none to be read."""
        offset = address - self._place.address
        if 0 <= offset <= len(self._piece) - _U64.size:
            return int(_U64.unpack_from(self._piece, offset)[0])
        offset = address % PAGE_BYTES
        page = self._page(address - offset)
        return int(_U64.unpack_from(page, offset)[0]) if offset + _U64.size <= len(page) else None

    def _page(self, start: int) -> bytes:
        page = self._pages.get(start)
        if page is None:
            if self._reader is None or len(self._pages) >= _MAX_LATE_PAGES:
                return b""
            page = self._pages[start] = self._read_page(start)
        return page

    def _read_page(self, start: int) -> bytes:
        if self._reader is None:
            return b""
        return self._reader.read([self._place._replace(address=start, size=PAGE_BYTES)])[0]

    def page_of_code(self, start: int) -> bytes:
        """Returns a page of code, which is of any moment, and none of the `late_pages`."""
        return self._read_page(start)
