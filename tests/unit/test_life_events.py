# SPDX-License-Identifier: Apache-2.0
"""What the kernel tells of the lives of processes: records made by hand, whole, cut and senseless.

The ring is a file that is laid out like one.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Iterator

import pytest
from aiflame.agent.kernel import life_events, sysbpf
from aiflame.agent.kernel.life_events import (
    Ended,
    Forked,
    LifeEvent,
    LifeEvents,
    LifeRecords,
    Lost,
    Mapped,
    Named,
)
from life_records import COMM_EXEC, comm, end, fork, lost, mmap2, record

_MAPPED = Mapped(3, 41, 0x5000, 0x7000, 0x1000, "fe:01", 77, "/usr/bin/ls")
_RECORDS = (
    (fork(41, 40, 1), Forked(1, 41, 40)),
    (comm(41, 41, b"ls", 2, COMM_EXEC), Named(2, 41, "ls", is_exec=True)),
    (mmap2(_MAPPED), _MAPPED),
    (comm(41, 41, b"renamed", 4), Named(4, 41, "renamed", is_exec=False)),
    (end(41, 41, 5), Ended(5, 41)),
    (lost(12, 6), Lost(6, 12)),
)


def _said(records: LifeRecords) -> list[LifeEvent]:
    return [records.event(at) for at in range(len(records))]


def _events_of(data: bytes) -> list[LifeEvent]:
    return _said(LifeRecords.of([data]))


def _read(events: LifeEvents) -> tuple[list[LifeEvent], int]:
    records, until_ns = events.read()
    return _said(records), until_ns


def test_each_kind_of_record() -> None:
    data = b"".join(record for record, _ in _RECORDS)
    assert _events_of(data) == [event for _, event in _RECORDS]
    assert _events_of(b"") == []


def test_threads_and_other_kinds_say_nothing() -> None:
    # A thread that is made, one that gives itself a name, one that ends; a throttled event.
    quiet = fork(41, 41, 1) + comm(41, 42, b"worker", 2) + end(41, 42, 3) + record(5, bytes(24), 4)
    assert _events_of(quiet + fork(43, 41, 5)) == [Forked(5, 43, 41)]


def test_a_thread_that_calls_exec_becomes_its_process() -> None:
    assert _events_of(comm(41, 42, b"ls", 2, COMM_EXEC)) == [Named(2, 41, "ls", True)]


def test_text_that_is_no_text() -> None:
    (event,) = _events_of(comm(41, 41, b"a\xff\nb", 1))
    assert event == Named(1, 41, "a�\nb", is_exec=False)
    (event,) = _events_of(mmap2(_MAPPED._replace(inode=0, path="")))
    assert isinstance(event, Mapped)
    assert event.path == ""


@pytest.mark.parametrize(("record", "event"), _RECORDS)
def test_a_record_that_is_cut_is_one_that_was_lost(record: bytes, event: LifeEvent) -> None:
    whole = fork(9, 8, 7)
    for size in range(1, len(record)):
        assert _events_of(whole + record[:size]) == [Lost(0, 1), Forked(7, 9, 8)]
        # and one that says itself that it is shorter
        if size >= 8:
            short = record[:6] + struct.pack("<H", size) + record[8:size]
            assert len(_events_of(short)) == 1
    for size in range(8):
        assert _events_of(record[:6] + struct.pack("<H", size)) == [Lost(0, 1)]


def test_what_is_cut_on_some_cpus_is_whole_on_others() -> None:
    whole = [fork(pid, 8, ns) for pid, ns in ((41, 3), (42, 4), (43, 5))]
    cut, too_large = fork(9, 8, 2)[:36], fork(9, 8, 2)[:6] + struct.pack("<H", 80) + bytes(32)
    parts = [whole[0], cut, whole[1] + cut, too_large, b"", whole[2]]
    others = [Forked(3, 41, 8), Forked(4, 42, 8), Forked(5, 43, 8)]
    assert _said(LifeRecords.of(parts)) == [Lost(0, 1)] * 3 + others


@pytest.mark.parametrize("seed", range(20))
def test_senseless_bytes_end(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        data = bytearray(b"".join(record for record, _ in _RECORDS))
        for _ in range(dice.randrange(1, 9)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        assert len(_events_of(bytes(data))) <= len(data)


class _Kernel:
    """Writes a ring as the kernel does, over its end as well."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ring")
        self.size = life_events._RING_BYTES
        os.ftruncate(self.fd, mmap.PAGESIZE + self.size)
        self.head = 0

    def at(self, position: int) -> None:
        """Goes on from this position, all before it read."""
        self.head = position
        os.pwrite(self.fd, struct.pack("<QQ", position, position), 1024)

    def put(self, data: bytes) -> None:
        for at, byte in enumerate(data, self.head):
            os.pwrite(self.fd, bytes([byte]), mmap.PAGESIZE + at % self.size)
        self.head += len(data)
        os.pwrite(self.fd, struct.pack("<Q", self.head), 1024)

    @property
    def tail(self) -> int:
        return int(struct.unpack("<Q", os.pread(self.fd, 8, 1032))[0])


class _Machine:
    """CPUs with a ring each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rings = {cpu: _Kernel() for cpu in range(2)}
        self.online = [0, 1]
        self.now_ns = 1000
        self.watched: list[int] = []
        patch.setattr(life_events, "online_cpus", lambda: self.online)
        patch.setattr(sysbpf, "open_life_events", self._open)
        patch.setattr(life_events.time, "monotonic_ns", lambda: self.now_ns)

    def _open(self, cpu: int, _: int) -> int:
        if cpu not in self.rings:
            raise PermissionError
        return os.dup(self.rings[cpu].fd)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Machine]:
    made = _Machine(monkeypatch)
    yield made
    for ring in made.rings.values():
        os.close(ring.fd)


@pytest.fixture
def events(machine: _Machine) -> Iterator[LifeEvents]:
    made = LifeEvents(machine.watched.append)
    yield made
    made.close()


def test_nothing_is_told_before_the_start(events: LifeEvents) -> None:
    events.follow_cpus()
    assert _read(events)[0] == []
    assert events.refused == 0


def test_what_happened_on_all_cpus_comes_in_order_and_once(
    machine: _Machine, events: LifeEvents
) -> None:
    events.start()
    assert len(machine.watched) == 2
    machine.rings[1].put(comm(41, 41, b"ls", 20, COMM_EXEC))
    machine.rings[0].put(fork(41, 40, 10) + end(41, 41, 30))
    told, until_ns = _read(events)
    assert told == [Forked(10, 41, 40), Named(20, 41, "ls", True), Ended(30, 41)]
    assert until_ns == 1000
    assert _read(events) == ([], 1000)
    assert [ring.tail for ring in machine.rings.values()] == [
        ring.head for ring in machine.rings.values()
    ]


def test_what_happens_while_it_is_read_waits_for_the_rest(
    machine: _Machine, events: LifeEvents
) -> None:
    events.start()
    # GIVEN a child whose exec on another CPU is seen, and its fork not yet
    machine.rings[1].put(comm(41, 41, b"ls", 1020, COMM_EXEC))
    assert _read(events) == ([], 1000)
    machine.rings[0].put(fork(41, 40, 1010))
    machine.now_ns = 2000
    told, until_ns = _read(events)
    assert (told, until_ns) == ([Forked(1010, 41, 40), Named(1020, 41, "ls", True)], 2000)


@pytest.mark.parametrize("before_end", range(0, 80, 8))
def test_records_over_the_end_of_the_ring_are_whole(
    machine: _Machine, events: LifeEvents, before_end: int
) -> None:
    ring = machine.rings[0]
    ring.at(3 * ring.size - before_end)
    events.start()
    ring.put(_RECORDS[2][0] + _RECORDS[0][0])
    assert _read(events)[0] == [_RECORDS[0][1], _RECORDS[2][1]]
    assert ring.tail == ring.head


def test_cpus_that_come_and_go(machine: _Machine, events: LifeEvents) -> None:
    machine.online = [0]
    events.start()
    machine.online = [1, 2]
    machine.rings[0].put(fork(41, 40, 10))
    events.follow_cpus()
    machine.rings[1].put(end(41, 41, 20))
    # What those that came told before they were listened to is lost.
    gaps = [Lost(0, 1), Lost(0, 1)]
    assert _read(events)[0] == [*gaps, Forked(10, 41, 40), Ended(20, 41)]
    # The kernel gives no room for the third.
    assert events.refused == 1


def test_cpus_that_went_and_came_are_listened_to_anew(
    machine: _Machine, events: LifeEvents
) -> None:
    machine.online = [0, 1]
    events.start()
    machine.rings[1].put(fork(41, 40, 10))
    events.follow_cpus({1})
    machine.rings[1].put(end(41, 41, 20))
    assert _read(events)[0] == [Lost(0, 1), Forked(10, 41, 40), Ended(20, 41)]


def test_rings_of_large_machines_are_smaller() -> None:
    sizes = [life_events._ring_bytes(cpus) for cpus in (1, 64, 128, 256, 4096)]
    assert sizes == [1 << 18, 1 << 18, 1 << 17, 1 << 16, 1 << 16]
