# SPDX-License-Identifier: Apache-2.0
"""What the kernel tells of the lives of processes: forks, execs, ends, and what is mapped to run.

A process of a few milliseconds is over before anybody can read /proc/PID/maps. So a perf event that
counts nothing is opened on each CPU, which writes such records to a ring of its own (this is how
`perf record` names short processes). All processes of the machine are told of.

Layouts: include/uapi/linux/perf_event.h (v6.1), stable ABI. A record is a u32 type, a u16 of bits,
a u16 size of all of it, the body, and here always a u64 time at the end (sample_id_all).
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from aiflame.agent.kernel import sysbpf
from aiflame.agent.kernel.probes import online_cpus

# An exec and its end write about 1 KB, so this is read in time at a thousand a second on one CPU
# while the recorder is at something else for 250 ms. Within what the kernel lets everybody lock
# (perf_event_mlock_kb, 516 on each CPU).
_RING_BYTES = 1 << 18
# For all CPUs: those of large machines have 64 KB each, and have less to do each.
_RINGS_BYTES, _LEAST_RING_BYTES = 16 << 20, 1 << 16

_LOST, _COMM, _EXIT, _FORK, _MMAP2 = 2, 3, 4, 7, 10
_COMM_EXEC = 1 << 13  # PERF_RECORD_MISC_COMM_EXEC (v3.16)
_HEADER = struct.Struct("<IHH")
_TIME = struct.Struct("<Q")
# Where the body ends that comes before a text, or before the time.
_LOST_BODY = struct.Struct("<QQ")  # id, lost
_COMM_BODY = struct.Struct("<II")  # pid, tid
_TASK_BODY = struct.Struct("<IIIIQ")  # pid, ppid, tid, ptid, time: of FORK and EXIT
_MMAP2_BODY = struct.Struct("<IIQQQIIQQII")  # pid, tid, addr, len, pgoff, maj, min, ino, ...

_BODIES = {
    _LOST: _LOST_BODY,
    _COMM: _COMM_BODY,
    _EXIT: _TASK_BODY,
    _FORK: _TASK_BODY,
    _MMAP2: _MMAP2_BODY,
}

# Each process maps the same few files: their names are made, and kept by those who keep events,
# once. A path has 4,096 bytes at most, and 50 mostly.
_MOST_TEXTS = 1 << 10

# struct perf_event_mmap_page.
_HEAD_AT, _TAIL_AT = 1024, 1032
_POSITION = struct.Struct("<Q")


class Forked(NamedTuple):
    """A process was made. Times are monotonic ns, as in all events."""

    ns: int
    pid: int
    parent_pid: int


class Named(NamedTuple):
    """A process has a new name, by exec or because its first thread gave itself one.

    At an exec it comes before all that the new program has mapped, and that before the tracepoint
    sched_process_exec.
    """

    ns: int
    pid: int
    name: str
    is_exec: bool


class Mapped(NamedTuple):
    """A process has mapped something executable, or made a mapping executable.

    Attributes:
        pid: The process.
        start, end: Addresses.
        offset: Of the mapping in its file, in bytes.
        device: Of the file, major:minor in hex, as /proc/PID/maps writes it; 00:00 for none.
        inode: The same, 0 for none. Kernels from v6.8 to v6.17 tell of another device and inode
            here than there for files on overlayfs.
        path: As the kernel knew it: of the process's own root, or `//anon`, `[vdso]`.
    """

    ns: int
    pid: int
    start: int
    end: int
    offset: int
    device: str
    inode: int
    path: str


class Ended(NamedTuple):
    """The first thread of a process has ended."""

    ns: int
    pid: int


class Lost(NamedTuple):
    """So many records found no room."""

    ns: int
    records: int


LifeEvent: TypeAlias = Forked | Named | Mapped | Ended | Lost


def events_of(data: bytes) -> Iterator[LifeEvent]:
    """Yields the events of whole records, in their order; those of other kinds are left out.

    What is no record ends it, and counts as one that was lost.
    """
    at = 0
    while at + _HEADER.size <= len(data):
        kind, bits, size = _HEADER.unpack_from(data, at)
        body = _BODIES.get(kind)
        least = _HEADER.size if body is None else _HEADER.size + body.size + _TIME.size
        if size < least or at + size > len(data):
            break
        if body is not None:
            event = _event_of(kind, bits, data, at + _HEADER.size, at + size - _TIME.size)
            if event is not None:
                yield event
        at += size
    if at < len(data):
        yield Lost(0, 1)


def _event_of(kind: int, bits: int, data: bytes, begin: int, end: int) -> LifeEvent | None:
    """Makes an event of a record, None of one that says nothing new of a process.

    Args:
        kind: PERF_RECORD_*.
        bits: PERF_RECORD_MISC_*.
        data: Holds it.
        begin: Of its body.
        end: The same; there is the time.
    """
    (ns,) = _TIME.unpack_from(data, end)
    if kind == _MMAP2:
        fields = _MMAP2_BODY.unpack_from(data, begin)
        pid, _, start, size, offset, major, minor, inode, *_ = fields
        path = _text(data[begin + _MMAP2_BODY.size : end])
        return Mapped(ns, pid, start, start + size, offset, _device(major, minor), inode, path)
    if kind == _COMM:
        pid, tid = _COMM_BODY.unpack_from(data, begin)
        is_exec = bool(bits & _COMM_EXEC)
        if not is_exec and pid != tid:
            return None
        return Named(ns, pid, _text(data[begin + _COMM_BODY.size : end]), is_exec)
    if kind == _LOST:
        _, records = _LOST_BODY.unpack_from(data, begin)
        return Lost(ns, records)
    pid, parent_pid, tid, _, _ = _TASK_BODY.unpack_from(data, begin)
    if kind == _FORK:
        return Forked(ns, pid, parent_pid) if pid != parent_pid else None
    return Ended(ns, pid) if pid == tid else None


@functools.lru_cache(_MOST_TEXTS)
def _device(major: int, minor: int) -> str:
    return f"{major:02x}:{minor:02x}"


@functools.lru_cache(_MOST_TEXTS)
def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(errors="replace")


class _Ring:
    """The records of one CPU.

    Args:
        cpu: Its number.
        size_bytes: A power of two.
        watch: Is told of what becomes readable when it is half full.

    Raises:
        OSError: The kernel refuses it.
    """

    def __init__(self, cpu: int, size_bytes: int, watch: Callable[[int], None]) -> None:
        self._size = size_bytes
        fd = sysbpf.open_life_events(cpu, size_bytes // 2)
        try:
            self._memory = mmap.mmap(fd, mmap.PAGESIZE + size_bytes, mmap.MAP_SHARED)
            watch(fd)
        finally:
            os.close(fd)  # the mapping has one of its own, and what is watched is the file

    def take(self) -> bytes:
        """Returns the records that are there, and gives their room back.

        The positions are aligned 64-bit words: `ringbuf` tells why plain access does on x86.
        """
        (head,) = _POSITION.unpack_from(self._memory, _HEAD_AT)
        (tail,) = _POSITION.unpack_from(self._memory, _TAIL_AT)
        if head == tail:
            return b""
        begin, size = mmap.PAGESIZE + tail % self._size, head - tail
        first = self._memory[begin : min(begin + size, mmap.PAGESIZE + self._size)]
        data = first + self._memory[mmap.PAGESIZE : mmap.PAGESIZE + size - len(first)]
        _POSITION.pack_into(self._memory, _TAIL_AT, head)
        return data

    def close(self) -> None:
        """Ends it."""
        self._memory.close()


class LifeEvents:
    """The rings of all CPUs, once they are started.

    Args:
        watch: Is told of descriptors that become readable when a ring is half full.

    """

    def __init__(self, watch: Callable[[int], None]) -> None:
        self._watch = watch
        self._rings: dict[int, _Ring | None] = {}  # by CPU; None: refused
        self._is_started = False
        self._early: list[LifeEvent] = []

    @property
    def refused(self) -> int:
        """Of how many CPUs the kernel does not tell: it gives no memory for a ring."""
        return sum(ring is None for ring in self._rings.values())

    def start(self) -> None:
        """Begins to listen. Where the kernel refuses, nothing is told."""
        self._is_started = True
        self.follow_cpus()

    def follow_cpus(self) -> None:
        """Listens on CPUs that came online, and lets go of those that went."""
        if not self._is_started:
            return
        online = set(online_cpus())
        for cpu in self._rings.keys() - online:
            ring = self._rings.pop(cpu)
            if ring is not None:
                self._early += events_of(ring.take())
                ring.close()
        size_bytes = _ring_bytes(len(online))
        for cpu in sorted(online - self._rings.keys()):
            self._rings[cpu] = None
            with contextlib.suppress(OSError):
                self._rings[cpu] = _Ring(cpu, size_bytes, self._watch)

    def read(self) -> tuple[list[LifeEvent], int]:
        """Returns what has happened since the last read, in order, and up to when that is all.

        The rings are read one after the other, so that what happens meanwhile would come in part:
        that is kept for the next time.
        """
        until_ns = time.monotonic_ns()
        found, self._early = self._early, []
        for ring in self._rings.values():
            if ring is not None:
                found += events_of(ring.take())
        found.sort(key=_ns)
        count = len(found)
        while count and found[count - 1].ns > until_ns:
            count -= 1
        self._early = found[count:]
        return found[:count], until_ns

    def close(self) -> None:
        """Ends it."""
        for ring in self._rings.values():
            if ring is not None:
                ring.close()
        self._rings = {}
        self._is_started = False


def _ns(event: LifeEvent) -> int:
    return event.ns


def _ring_bytes(cpus: int) -> int:
    """Returns the size of each ring, a power of two."""
    size_bytes = _RING_BYTES
    while size_bytes > _LEAST_RING_BYTES and size_bytes * cpus > _RINGS_BYTES:
        size_bytes //= 2
    return size_bytes
