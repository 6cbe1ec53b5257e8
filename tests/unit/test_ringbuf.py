# SPDX-License-Identifier: Apache-2.0
"""The consuming side of a BPF ring buffer, on a file that is laid out like one."""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Iterator

import pytest
from aiflame.agent.kernel.ringbuf import RingBuffer

_PAGE = os.sysconf("SC_PAGE_SIZE")
_DATA_BYTES = _PAGE
_BUSY, _DISCARDED = 1 << 31, 1 << 30


class _Producer:
    """The kernel's side; the data area is written twice, where the kernel maps it twice."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ring")
        os.ftruncate(self.fd, 2 * _PAGE + 2 * _DATA_BYTES)
        self.position = 0

    def at(self, position: int) -> None:
        """Goes on from this position, all before it consumed."""
        self.position = position
        os.pwrite(self.fd, struct.pack("=Q", position), 0)
        os.pwrite(self.fd, struct.pack("=Q", position), _PAGE)

    @property
    def consumed(self) -> int:
        return int(struct.unpack("=Q", os.pread(self.fd, 8, 0))[0])

    def _write(self, position: int, data: bytes) -> None:
        for i, byte in enumerate(data):
            place = (position + i) % _DATA_BYTES
            for copy in (0, _DATA_BYTES):
                os.pwrite(self.fd, bytes([byte]), 2 * _PAGE + copy + place)

    def put(self, payload: bytes, flags: int = 0) -> int:
        """Reserves and writes a record; returns where."""
        begin = self.position
        self._write(begin, struct.pack("<II", len(payload) | flags, 0) + payload)
        self.position += (8 + len(payload) + 7) & ~7
        os.pwrite(self.fd, struct.pack("=Q", self.position), _PAGE)
        return begin

    def finish(self, begin: int, length: int, flags: int = 0) -> None:
        """Completes a record that was busy."""
        self._write(begin, struct.pack("<I", length | flags))


class _Poll:
    """A file cannot be polled: what an epoll object would be told."""

    def __init__(self) -> None:
        self.watched: list[int] = []

    def register(self, fd: int, events: int) -> None:
        self.watched.append(fd)

    def close(self) -> None:
        self.watched = []


@pytest.fixture
def producer() -> Iterator[_Producer]:
    made = _Producer()
    yield made
    os.close(made.fd)


@pytest.fixture
def ring(producer: _Producer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RingBuffer]:
    monkeypatch.setattr(select, "epoll", _Poll)
    made = RingBuffer(producer.fd, _DATA_BYTES)
    yield made
    made.close()


def test_nothing_yet(ring: RingBuffer) -> None:
    assert list(ring.records()) == []


@pytest.mark.parametrize("sizes", [[8], [1, 7, 8, 9, 64], [0, 0], [_DATA_BYTES - 8]])
def test_records_come_in_order_and_once(
    producer: _Producer, ring: RingBuffer, sizes: list[int]
) -> None:
    payloads = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    for payload in payloads:
        producer.put(payload)
    assert list(ring.records()) == payloads
    assert list(ring.records()) == []
    assert producer.consumed == producer.position


def test_a_record_over_the_end_of_the_data_is_whole(producer: _Producer, ring: RingBuffer) -> None:
    producer.at(5 * _DATA_BYTES - 16)
    producer.put(b"first".ljust(24, b"."))
    producer.put(b"second")
    assert list(ring.records()) == [b"first".ljust(24, b"."), b"second"]


def test_positions_beyond_32_bits(producer: _Producer, ring: RingBuffer) -> None:
    producer.at(7 << 40)
    producer.put(b"far")
    assert list(ring.records()) == [b"far"]
    assert producer.consumed == (7 << 40) + 16


def test_nothing_overtakes_a_record_that_is_still_written(
    producer: _Producer, ring: RingBuffer
) -> None:
    producer.put(b"one")
    second = producer.put(b"two", _BUSY)
    producer.put(b"three")
    assert list(ring.records()) == [b"one"]
    assert producer.consumed == second
    producer.finish(second, 3)
    assert list(ring.records()) == [b"two", b"three"]


def test_discarded_records_are_passed_over_and_their_room_given_back(
    producer: _Producer, ring: RingBuffer
) -> None:
    producer.put(b"gone", _DISCARDED)
    producer.put(b"here")
    late = producer.put(b"late", _BUSY)
    assert list(ring.records()) == [b"here"]
    producer.finish(late, 4, _DISCARDED)
    assert list(ring.records()) == []
    assert producer.consumed == producer.position


def test_room_is_given_back_record_by_record(producer: _Producer, ring: RingBuffer) -> None:
    for payload in (b"one", b"two", b"three"):
        producer.put(payload)
    records = ring.records()
    next(records)
    next(records)
    assert producer.consumed == 16
    # A reader that stops early reads the rest, and the one it had, next time.
    records.close()
    assert list(ring.records()) == [b"two", b"three"]


def test_what_is_watched(producer: _Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    poll = _Poll()
    monkeypatch.setattr(select, "epoll", lambda: poll)
    ring = RingBuffer(producer.fd, _DATA_BYTES)
    ring.watch(99)
    assert poll.watched == [producer.fd, 99]
    ring.close()
