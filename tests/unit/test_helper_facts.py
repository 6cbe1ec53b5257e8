# SPDX-License-Identifier: Apache-2.0
"""What helpers tell: facts read in order, late, in parts, and forged; and the reference sender."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from aiflame.agent.losses import LossKind
from aiflame.gpu.base import Host
from aiflame.gpu.protocol import (
    VERSION,
    BadRecord,
    Code,
    Context,
    Facts,
    Failed,
    HelperDevice,
    HelperTier,
    Name,
    Node,
    Reasons,
    Why,
    failed,
    losses,
    stalls,
    times,
)
from aiflame.gpu.ring import HEADER_BYTES, Record
from hypothesis import given
from hypothesis import strategies as st
from nvidia_helper import Target, build_alone

_RING = 256
_AT = HEADER_BYTES + _RING


class _Memory:
    """A helper's memory, of which the ring is empty."""

    process = 0

    def __init__(self, facts_bytes: int = 1 << 16) -> None:
        self.bytes = bytearray(_AT + facts_bytes)
        self.facts_bytes = facts_bytes
        self.head = self.number = 0
        self.write_header()

    def write_header(self) -> None:
        fields = (b"aiflame\0", 1, 0, _RING, 0, self.facts_bytes, self.head)
        struct.pack_into("<8sII4Q", self.bytes, 0, *fields)

    def put(self, kind: int, data: bytes) -> None:
        data += bytes(-len(data) % 8)
        record = struct.pack("<IIQ", 16 + len(data), kind, self.number) + data
        self.bytes[_AT + self.head : _AT + self.head + len(record)] = record
        self.head += len(record)
        self.number += 1
        self.write_header()

    def read(self, size: int, offset: int) -> bytes:
        return bytes(self.bytes[offset : offset + size])


class _Losses:
    def __init__(self) -> None:
        self.lost: Counter[LossKind] = Counter()

    def lose(self, kind: LossKind, count: int = 1) -> None:
        self.lost[kind] += count


def _facts(memory: _Memory) -> tuple[Facts, Counter[LossKind]]:
    host = _Losses()
    return Facts(memory, cast(Host, host)), host.lost


def test_facts_are_read_once_and_in_order() -> None:
    memory = _Memory()
    facts, lost = _facts(memory)
    assert list(facts.read()) == []
    memory.put(5, struct.pack("<II", 1, 0) + b"_Z5scalePf\0")
    memory.put(3, struct.pack("<IIQ", 4, 1, 1 << 20))
    assert list(facts.read()) == [Name(1, "_Z5scalePf"), Context(4, 1, 1 << 20)]
    memory.put(7, struct.pack("<QQQ", 9, 8, 0))
    memory.put(2, struct.pack("<IIIHH16s", 0, 132, 1755000, 9, 0, b"u" * 16) + b"H200\0")
    assert list(facts.read()) == [
        Node(9, 8, 0),
        HelperDevice(0, 132, 1755000, 9, 0, b"u" * 16, "H200"),
    ]
    assert list(facts.read()) == []
    # AND one that comes late has them all
    assert len(list(_facts(memory)[0].read())) == 4
    assert not lost


def test_code_is_read_when_it_is_wanted() -> None:
    memory = _Memory()
    facts, _ = _facts(memory)
    head = struct.pack("<QQQII", 77, 5, 100_0, 1, 2)
    memory.put(6, head + b"c" * 1000)
    memory.put(6, head)
    first, second = facts.read()
    assert isinstance(first, Code) and isinstance(second, Code)
    assert facts.code(first) == b"c" * 1000
    assert (second.at, facts.code(second)) == (None, b"")


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (1, struct.pack("<IiII", VERSION, 5, 2, 0) + b"nvidia\0one\0two\0"),
        (2, b"short"),
        (4, struct.pack("<II", 1, 1 << 30) + bytes(64)),
        (5, struct.pack("<II", 1, 0) + b"nothing at the end"[:16]),
        (99, bytes(16)),
    ],
)
def test_a_fact_that_is_none_ends_it(kind: int, data: bytes) -> None:
    memory = _Memory()
    facts, lost = _facts(memory)
    memory.put(kind, data)
    memory.put(3, struct.pack("<IIQ", 4, 1, 0))
    assert list(facts.read()) == []
    assert list(facts.read()) == []
    assert lost == {LossKind.DEVICE_MEMORY_DAMAGED: 1}


def test_a_head_that_goes_back_or_beyond_ends_it() -> None:
    for head in (8, 1 << 40):
        memory = _Memory()
        facts, lost = _facts(memory)
        memory.put(3, struct.pack("<IIQ", 4, 1, 0))
        assert len(list(facts.read())) == 1
        memory.head = head
        memory.write_header()
        assert list(facts.read()) == []
        assert lost == {LossKind.DEVICE_MEMORY_DAMAGED: 1}


@given(st.binary(max_size=600), st.integers(0, 1 << 64 - 1))
def test_any_bytes_are_survived(data: bytes, head: int) -> None:
    memory = _Memory(1024)
    memory.bytes[_AT : _AT + len(data)] = data
    memory.head = head % 1024
    memory.write_header()
    facts, lost = _facts(memory)
    for _ in range(3):
        for fact in facts.read():
            if isinstance(fact, Code):
                facts.code(fact)
    assert sum(lost.values()) <= 1


@given(st.binary(max_size=300), st.sampled_from([times, stalls, losses, failed]))
def test_any_record_is_read_or_refused(data: bytes, read: Any) -> None:
    try:
        read(Record(16, data))
    except BadRecord:
        return


def test_an_error_has_its_texts() -> None:
    data = struct.pack("<QIi", 7, 5, 35) + b"cuptiPCSamplingEnable\0no rights\0\0\0"
    assert failed(Record(20, data)) == Failed(7, 5, 35, "cuptiPCSamplingEnable", "no rights")


def test_reasons_are_as_many_as_they_say() -> None:
    memory = _Memory()
    facts, _ = _facts(memory)
    memory.put(4, struct.pack("<II4I", 1, 2, 3, 10, 7, 11))
    (found,) = facts.read()
    assert isinstance(found, Reasons)
    assert found.reasons.tolist() == [(3, 10), (7, 11)]


def test_the_reference_sender_speaks_the_protocol(tmp_path: Path) -> None:
    folder = build_alone(tmp_path)
    with Target(folder, program=folder / "sender") as target:
        # GIVEN a sender that nobody has started
        told = target.read()
        assert (told.hellos[0].vendor, told.tier) == ("reference", HelperTier.LAUNCHES)
        assert told.devices[0].name == "Reference 1"
        assert target.code(told.codes[0]) == b"code"
        # WHEN it is started, and its recorder goes
        with target.control() as control:
            control.start()
            target.read_until(lambda told: len(told.kernel_times) >= 5)
        target.read_until(lambda told: told.states and not told.states[-1].tier)
        # THEN all that it launched was told
        times = told.kernel_times
        assert times["launch"].tolist() == list(range(1, len(times) + 1))
        assert told.durations_ns() == {"_Z5scalePf": 5000 * len(times)}
        assert told.samples() == {
            ("_Z5scalePf", 0x10, "waits_for_memory"): 3 * len(times),
            ("_Z5scalePf", 0x20, "waits_for_memory"): len(times),
        }
        assert [state.why for state in told.states] == [Why.ASKED, Why.RECORDER_GONE]
        # AND it can be started again
        with target.control() as control:
            control.start()
            target.read_until(lambda told: len(told.kernel_times) > len(times))
            control.stop()
            target.read_until(lambda told: told.states[-1].why == Why.ASKED and not told.tier)
    assert not told.damaged
