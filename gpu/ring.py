# SPDX-License-Identifier: Apache-2.0
"""The ring in shared memory through which a helper in a target tells of its device.

All numbers are little-endian. The memory is a header of 4,096 bytes and then `capacity` bytes of
ring:

    offset  bytes
         0  8      "aiflame" and a zero
         8  4      version of this format: 1
        12  4      0
        16  8      capacity, a multiple of 8, at most 16 MiB
        24  8      head: how many bytes were written in all

Byte n of all is at n modulo `capacity` in the ring. What is written are records, each a multiple of
8 bytes long:

     0  4  its size in bytes, with these 16
     4  4  its kind, of which each helper has its own
     8  8  its number: they count from 0
    16     the rest

One thread writes. It moves `head` past a record when that is whole (release order), and writes on
whether anybody reads or not: a reader that is late misses records, and sees by their numbers how
many. The helper makes the memory with memfd_create(2), keeps children from having it
(MADV_DONTFORK), and need not trust anybody: readers open it for reading only.

The reader trusts nothing either. It copies what is new, and looks at the copy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from aiflame.agent.losses import LossKind
from aiflame.gpu.base import Host, SharedMemory

HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sII2Q")
_MAGIC, _VERSION = b"aiflame\0", 1
_RECORD = struct.Struct("<IIQ")
_ALIGNMENT = 8

# Four seconds of 30,000 launches each.
_MAX_CAPACITY = 4 << 20
# Of what is read at once, as it takes time: of kernel times, as many as a window may hold of one
# process; and records, as each takes some microseconds: helpers put what is short and frequent into
# one, some hundred of a kind. The rest is for the next time.
_MAX_BYTES, _MAX_RECORDS = 1 << 20, 4096
# Of a record, as helpers write them; what is larger may be overwritten while it is read.
_MAX_RECORD_BYTES = 1 << 16
# Between two of them: 64 GB.
_MAX_LOST = 1 << 32


class _Damaged(ValueError):
    """No helper writes this."""


class Record(NamedTuple):
    """What a helper wrote: a kind of its own, and bytes."""

    kind: int
    data: bytes


class _Header(NamedTuple):
    capacity: int
    head: int


class RingReader:
    """Reads one ring, from what is in it at first on.

    Args:
        memory: Where it is.
        host: Counts what is lost.
    """

    def __init__(self, memory: SharedMemory, host: Host) -> None:
        self._memory = memory
        self._host = host
        self._is_damaged = False
        self._capacity = 0
        self._position: int | None = None  # of all bytes
        self._next: int | None = None  # number of the record there

    def read(self) -> Iterator[Record]:
        """Yields the records since last; none any more of a ring that is no helper's."""
        if self._is_damaged:
            return
        try:
            yield from self._read()
        except _Damaged:
            self._is_damaged = True
            self._host.lose(LossKind.DEVICE_MEMORY_DAMAGED)

    def _read(self) -> Iterator[Record]:
        header = self._header()
        if header is None:
            return
        if self._position is None:
            # Where it went round before, nobody knows where a record begins.
            self._position = 0 if header.head <= header.capacity else header.head
        if header.capacity != self._capacity or header.head < self._position:
            raise _Damaged("its size or its head went back")
        size = header.head - self._position
        is_there = size <= self._sound_bytes()
        data = self._copy(self._position, min(size, _MAX_BYTES)) if is_there else b""
        if data:
            yield from self._records(data, is_all=len(data) == size)
        else:
            # What was overwritten is not known to the byte: the next number tells how much it was.
            self._position = header.head

    def _header(self) -> _Header | None:
        """Returns what the header says; None before it is written."""
        data = self._memory.read(_HEADER.size, 0)
        if len(data) < _HEADER.size or data.startswith(b"\0"):
            if self._position is not None:
                raise _Damaged("it is gone")
            return None
        magic, version, _, capacity, head = _HEADER.unpack(data)
        if magic != _MAGIC or version != _VERSION:
            raise _Damaged("another format")
        if not 0 < capacity <= _MAX_CAPACITY or capacity % _ALIGNMENT or head % _ALIGNMENT:
            raise _Damaged("no such size")
        self._capacity = self._capacity or capacity
        return _Header(capacity, head)

    def _copy(self, begin: int, size: int) -> bytes:
        """Returns what was written from a position on; nothing if it was overwritten meanwhile."""
        at = begin % self._capacity
        first = min(size, self._capacity - at)
        data = self._memory.read(first, HEADER_BYTES + at)
        data += self._memory.read(size - first, HEADER_BYTES)
        if len(data) < size:
            raise _Damaged("it is smaller than it says")
        header = self._header()
        if header is None or header.head - begin > self._sound_bytes():
            return b""
        return data

    def _sound_bytes(self) -> int:
        """Returns how far back from the head nothing is being overwritten.

        The next record is written before the head moves: over what is oldest.
        """
        return self._capacity - min(_MAX_RECORD_BYTES, self._capacity // 8)

    def _records(self, data: bytes, *, is_all: bool) -> Iterator[Record]:
        """Yields records; of what is not all there is, the last one may be cut."""
        at, begin = 0, self._position or 0
        for _ in range(_MAX_RECORDS):
            if at == len(data):
                return
            size, kind, number = 0, 0, 0
            if at + _RECORD.size <= len(data):
                size, kind, number = _RECORD.unpack_from(data, at)
            if at + max(size, _RECORD.size) > len(data) and at and not is_all:
                return
            if size < _RECORD.size or size % _ALIGNMENT or at + size > len(data):
                raise _Damaged("a record that has no end")
            self._count_lost(number)
            record = Record(kind, data[at + _RECORD.size : at + size])
            at += size
            self._position = begin + at
            yield record

    def _count_lost(self, number: int) -> None:
        missing = 0 if self._next is None else number - self._next
        if not 0 <= missing <= _MAX_LOST:
            raise _Damaged("a record with another's number")
        if missing:
            self._host.lose(LossKind.DEVICE_RECORDS_OVERWRITTEN, missing)
        self._next = number + 1
