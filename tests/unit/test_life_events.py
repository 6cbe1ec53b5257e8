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
    Lost,
    Mapped,
    Named,
    events_of,
)

_COMM_EXEC = 1 << 13


def _record(kind: int, body: bytes, ns: int, bits: int = 0) -> bytes:
    whole = body + struct.pack("<Q", ns)
    return struct.pack("<IHH", kind, bits, 8 + len(whole)) + whole


def _text(text: bytes) -> bytes:
    return text + bytes(8 - len(text) % 8)


def _fork(pid: int, parent_pid: int, ns: int) -> bytes:
    return _record(7, struct.pack("<IIIIQ", pid, parent_pid, pid, parent_pid, ns), ns)


def _exit(pid: int, tid: int, ns: int) -> bytes:
    return _record(4, struct.pack("<IIIIQ", pid, 1, tid, 1, ns), ns)


def _comm(pid: int, tid: int, name: bytes, ns: int, bits: int = 0) -> bytes:
    return _record(3, struct.pack("<II", pid, tid) + _text(name), ns, bits)


def _mmap2(pid: int, start: int, path: bytes, ns: int, inode: int = 77) -> bytes:
    place = struct.pack("<IIQQQ", pid, pid + 1, start, 0x2000, 0x1000)
    file = struct.pack("<IIQQII", 0xFE, 1, inode, 5, 5, 2)
    return _record(10, place + file + _text(path), ns)


def _lost(records: int, ns: int) -> bytes:
    return _record(2, struct.pack("<QQ", 9, records), ns)


_RECORDS = (
    (_fork(41, 40, 1), Forked(1, 41, 40)),
    (_comm(41, 41, b"ls", 2, _COMM_EXEC), Named(2, 41, "ls", is_exec=True)),
    (
        _mmap2(41, 0x5000, b"/usr/bin/ls", 3),
        Mapped(3, 41, 0x5000, 0x7000, 0x1000, "fe:01", 77, "/usr/bin/ls"),
    ),
    (_comm(41, 41, b"renamed", 4), Named(4, 41, "renamed", is_exec=False)),
    (_exit(41, 41, 5), Ended(5, 41)),
    (_lost(12, 6), Lost(6, 12)),
)


def test_each_kind_of_record() -> None:
    data = b"".join(record for record, _ in _RECORDS)
    assert list(events_of(data)) == [event for _, event in _RECORDS]
    assert list(events_of(b"")) == []


def test_threads_and_other_kinds_say_nothing() -> None:
    # A thread that is made, one that gives itself a name, one that ends; a throttled event.
    quiet = (
        _fork(41, 41, 1) + _comm(41, 42, b"worker", 2) + _exit(41, 42, 3) + _record(5, bytes(24), 4)
    )
    assert list(events_of(quiet + _fork(43, 41, 5))) == [Forked(5, 43, 41)]


def test_a_thread_that_calls_exec_becomes_its_process() -> None:
    assert list(events_of(_comm(41, 42, b"ls", 2, _COMM_EXEC))) == [Named(2, 41, "ls", True)]


def test_text_that_is_no_text() -> None:
    (event,) = events_of(_comm(41, 41, b"a\xff\nb", 1))
    assert event == Named(1, 41, "a�\nb", is_exec=False)
    (event,) = events_of(_mmap2(41, 0x1000, b"", 1, inode=0))
    assert isinstance(event, Mapped)
    assert event.path == ""


@pytest.mark.parametrize(("record", "event"), _RECORDS)
def test_a_record_that_is_cut_is_one_that_was_lost(record: bytes, event: LifeEvent) -> None:
    whole = _fork(9, 8, 7)
    for size in range(1, len(record)):
        assert list(events_of(whole + record[:size])) == [Forked(7, 9, 8), Lost(0, 1)]
        # and one that says itself that it is shorter
        if size >= 8:
            short = record[:6] + struct.pack("<H", size) + record[8:size]
            assert len(list(events_of(short))) == 1
    for size in range(8):
        assert list(events_of(record[:6] + struct.pack("<H", size))) == [Lost(0, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_senseless_bytes_end(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        data = bytearray(b"".join(record for record, _ in _RECORDS))
        for _ in range(dice.randrange(1, 9)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        assert len(list(events_of(bytes(data)))) <= len(data)


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
    assert events.read()[0] == []
    assert events.refused == 0


def test_what_happened_on_all_cpus_comes_in_order_and_once(
    machine: _Machine, events: LifeEvents
) -> None:
    events.start()
    assert len(machine.watched) == 2
    machine.rings[1].put(_comm(41, 41, b"ls", 20, _COMM_EXEC))
    machine.rings[0].put(_fork(41, 40, 10) + _exit(41, 41, 30))
    told, until_ns = events.read()
    assert told == [Forked(10, 41, 40), Named(20, 41, "ls", True), Ended(30, 41)]
    assert until_ns == 1000
    assert events.read() == ([], 1000)
    assert [ring.tail for ring in machine.rings.values()] == [
        ring.head for ring in machine.rings.values()
    ]


def test_what_happens_while_it_is_read_waits_for_the_rest(
    machine: _Machine, events: LifeEvents
) -> None:
    events.start()
    # GIVEN a child whose exec on another CPU is seen, and its fork not yet
    machine.rings[1].put(_comm(41, 41, b"ls", 1020, _COMM_EXEC))
    assert events.read() == ([], 1000)
    machine.rings[0].put(_fork(41, 40, 1010))
    machine.now_ns = 2000
    told, until_ns = events.read()
    assert (told, until_ns) == ([Forked(1010, 41, 40), Named(1020, 41, "ls", True)], 2000)


@pytest.mark.parametrize("before_end", range(0, 80, 8))
def test_records_over_the_end_of_the_ring_are_whole(
    machine: _Machine, events: LifeEvents, before_end: int
) -> None:
    ring = machine.rings[0]
    ring.at(3 * ring.size - before_end)
    events.start()
    ring.put(_RECORDS[2][0] + _RECORDS[0][0])
    assert events.read()[0] == [_RECORDS[0][1], _RECORDS[2][1]]
    assert ring.tail == ring.head


def test_cpus_that_come_and_go(machine: _Machine, events: LifeEvents) -> None:
    machine.online = [0]
    events.start()
    machine.online = [1, 2]
    machine.rings[0].put(_fork(41, 40, 10))
    events.follow_cpus()
    machine.rings[1].put(_exit(41, 41, 20))
    assert events.read()[0] == [Forked(10, 41, 40), Ended(20, 41)]
    # The kernel gives no room for the third.
    assert events.refused == 1


def test_rings_of_large_machines_are_smaller() -> None:
    sizes = [life_events._ring_bytes(cpus) for cpus in (1, 64, 128, 256, 4096)]
    assert sizes == [1 << 18, 1 << 18, 1 << 17, 1 << 16, 1 << 16]
