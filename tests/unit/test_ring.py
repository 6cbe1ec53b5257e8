# SPDX-License-Identifier: Apache-2.0
"""The ring through which a helper tells of its device, read while it is written, and forged."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any, cast

import pytest
from aiflame.agent.losses import LossKind
from aiflame.gpu.ring import HEADER_BYTES, Record, RingReader
from hypothesis import given, settings
from hypothesis import strategies as st

_CAPACITY = 256


class _Host:
    """Counts what is lost, and does nothing else of a host's."""

    def __init__(self) -> None:
        self.lost: Counter[LossKind] = Counter()

    def lose(self, kind: LossKind, count: int = 1) -> None:
        self.lost[kind] += count


@pytest.fixture
def host() -> Any:
    return _Host()


class Ring:
    """A helper's ring, in this process's memory."""

    process = 0

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.bytes = bytearray(HEADER_BYTES + capacity)
        self.capacity = capacity
        self.head = self.number = 0
        self.write_header()

    def write_header(self, magic: bytes = b"aiflame\0", version: int = 1) -> None:
        struct.pack_into("<8sII2Q", self.bytes, 0, magic, version, 0, self.capacity, self.head)

    def put(self, kind: int, data: bytes) -> None:
        record = struct.pack("<IIQ", 16 + len(data), kind, self.number) + data
        for byte in record:
            self.bytes[HEADER_BYTES + self.head % self.capacity] = byte
            self.head += 1
        self.number += 1
        self.write_header()

    def read(self, size: int, offset: int) -> bytes:
        return bytes(self.bytes[offset : offset + size])


def test_what_is_written_is_read_once_also_where_the_ring_goes_round(host: Any) -> None:
    ring = Ring()
    reader = RingReader(ring, host)
    assert [*reader.read()] == []
    for turn in range(20):
        written = [Record(turn, bytes([turn, at] * 12)) for at in range(3)]
        for record in written:
            ring.put(*record)
        assert [*reader.read()] == written
    assert host.lost == {}


def test_a_helper_that_has_not_begun_is_waited_for(host: Any) -> None:
    ring = Ring()
    whole, ring.bytes = ring.bytes, bytearray()
    reader = RingReader(ring, host)
    assert [*reader.read()] == []
    ring.bytes = bytearray(len(whole))
    assert [*reader.read()] == []
    ring.bytes = whole
    ring.put(1, b"")
    assert [*reader.read()] == [Record(1, b"")]


def test_records_that_were_overwritten_are_counted(host: Any) -> None:
    ring = Ring()
    reader = RingReader(ring, host)
    ring.put(1, bytes(8))
    assert len([*reader.read()]) == 1
    for _ in range(20):
        ring.put(2, bytes(8))
    assert [*reader.read()] == []
    ring.put(3, bytes(8))
    assert [*reader.read()] == [Record(3, bytes(8))]
    assert host.lost == {LossKind.DEVICE_RECORDS_OVERWRITTEN: 20}


def test_records_that_are_overwritten_while_they_are_read_are_not_taken(host: Any) -> None:
    class Fast(Ring):
        is_fast = False

        def read(self, size: int, offset: int) -> bytes:
            if self.is_fast and offset:
                for _ in range(20):
                    self.put(2, bytes(8))
            return super().read(size, offset)

    ring = Fast()
    reader = RingReader(ring, host)
    ring.put(0, b"")
    assert len([*reader.read()]) == 1
    ring.put(1, bytes(8))
    ring.is_fast = True
    assert [*reader.read()] == []
    ring.is_fast = False
    before = ring.number
    ring.put(3, bytes(8))
    [*reader.read()]
    ring.put(4, bytes(8))
    assert [*reader.read()] == [Record(4, bytes(8))]
    assert host.lost == {LossKind.DEVICE_RECORDS_OVERWRITTEN: before}


def test_what_a_record_is_being_written_over_is_not_taken(host: Any) -> None:
    ring = Ring(256)
    reader = RingReader(ring, host)
    ring.put(0, b"")
    assert len([*reader.read()]) == 1
    # GIVEN a ring that is full
    for _ in range(8):
        ring.put(1, bytes(16))
    # WHEN the next record is written, and is not whole
    at = HEADER_BYTES + ring.head % ring.capacity
    ring.bytes[at : at + 24] = bytes([0xEE]) * 24
    # THEN what lay there is lost, and no more than that
    assert [*reader.read()] == []
    ring.put(2, b"")
    assert [*reader.read()] == [Record(2, b"")]
    assert host.lost == {LossKind.DEVICE_RECORDS_OVERWRITTEN: 8}


def test_a_ring_that_went_round_before_anybody_read_is_read_from_now_on(host: Any) -> None:
    ring = Ring()
    for _ in range(20):
        ring.put(1, bytes(8))
    reader = RingReader(ring, host)
    assert [*reader.read()] == []
    ring.put(2, b"")
    assert [*reader.read()] == [Record(2, b"")]
    assert host.lost == {}


def test_no_more_is_taken_at_once_than_there_is_time_for(host: Any) -> None:
    ring = Ring(1 << 20)
    reader = RingReader(ring, host)
    for _ in range(10_000):
        ring.put(1, b"")
    assert [len([*reader.read()]) for _ in range(4)] == [4096, 4096, 1808, 0]
    # Also where the last record that is read is cut.
    ring = Ring(4 << 20)
    reader = RingReader(ring, host)
    for _ in range(3):
        ring.put(1, bytes(600_000))
    assert [len([*reader.read()]) for _ in range(4)] == [1, 1, 1, 0]
    assert host.lost == {}


def test_a_record_that_is_larger_than_all_that_is_taken_is_damage(host: Any) -> None:
    ring = Ring(4 << 20)
    reader = RingReader(ring, host)
    ring.put(1, bytes(1 << 20))
    assert [*reader.read()] == []
    assert host.lost == {LossKind.DEVICE_MEMORY_DAMAGED: 1}


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"\xff"),  # the name
        (0, b"\0"),
        (8, b"\x02"),  # the version
        (16, struct.pack("<Q", 1 << 62)),  # the capacity
        (16, struct.pack("<Q", 0)),
        (16, struct.pack("<Q", 128)),
        (16, struct.pack("<Q", 257)),
        (24, struct.pack("<Q", 0)),  # the head goes back
        (24, struct.pack("<Q", 49)),
        (HEADER_BYTES + 24, struct.pack("<I", 0)),  # sizes of records
        (HEADER_BYTES + 24, struct.pack("<I", 8)),
        (HEADER_BYTES + 24, struct.pack("<I", 20)),
        (HEADER_BYTES + 24, struct.pack("<I", 0xFFFF_FFF8)),
        (HEADER_BYTES + 32, struct.pack("<Q", 0)),  # numbers of records
        (HEADER_BYTES + 32, struct.pack("<Q", 1 << 63)),
    ],
)
def test_a_ring_that_no_helper_writes_is_damaged(host: Any, offset: int, value: bytes) -> None:
    ring = Ring()
    reader = RingReader(ring, host)
    ring.put(1, bytes(8))
    assert len([*reader.read()]) == 1
    ring.put(2, bytes(8))
    ring.bytes[offset : offset + len(value)] = value
    for _ in range(2):
        assert [*reader.read()] == []
    assert host.lost == {LossKind.DEVICE_MEMORY_DAMAGED: 1}


def test_a_ring_that_shrinks_is_damaged(host: Any) -> None:
    ring = Ring()
    reader = RingReader(ring, host)
    ring.put(1, bytes(8))
    assert len([*reader.read()]) == 1
    ring.put(2, bytes(8))
    del ring.bytes[HEADER_BYTES:]
    for _ in range(2):
        assert [*reader.read()] == []
    assert host.lost == {LossKind.DEVICE_MEMORY_DAMAGED: 1}


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, HEADER_BYTES + _CAPACITY), st.binary(min_size=1, max_size=9)),
        max_size=8,
    ),
    st.integers(0, 3),
)
def test_whatever_is_in_it_is_records_or_damage(changes: list[tuple[int, bytes]], n: int) -> None:
    ring, host = Ring(), cast(Any, _Host())
    reader = RingReader(ring, host)
    for _ in range(n):
        ring.put(1, bytes(16))
    for offset, value in changes:
        # Half of them where it hurts.
        at = offset if offset % 2 else offset % 32
        ring.bytes[at : at + len(value)] = value[: len(ring.bytes) - at]
        taken = [*reader.read()]
        assert sum(16 + len(record.data) for record in taken) <= _CAPACITY
