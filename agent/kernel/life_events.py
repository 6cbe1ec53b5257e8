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
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import sysbpf
from aiflame.agent.kernel.probes import online_cpus

# An exec and its end write about 1 KB, so this is read in time at a thousand a second on one CPU
# while the recorder is at something else for 250 ms. Within what the kernel lets everybody lock
# (perf_event_mlock_kb, 516 on each CPU).
_RING_BYTES = 1 << 18
# For all CPUs: those of large machines have 64 KB each, and have less to do each.
_RINGS_BYTES, _LEAST_RING_BYTES = 16 << 20, 1 << 16

LOST, COMM, EXIT, FORK, MMAP2 = 2, 3, 4, 7, 10
_COMM_EXEC = 1 << 13  # PERF_RECORD_MISC_COMM_EXEC (v3.16)
_HEADER = struct.Struct("<IHH")
_TIME = struct.Struct("<Q")
# Where the body ends that comes before a text, or before the time.
_LOST_BODY = struct.Struct("<QQ")  # id, lost
_COMM_BODY = struct.Struct("<II")  # pid, tid
_TASK_BODY = struct.Struct("<IIIIQ")  # pid, ppid, tid, ptid, time: of FORK and EXIT
_MMAP2_BODY = struct.Struct("<IIQQQIIQQII")  # pid, tid, addr, len, pgoff, maj, min, ino, ...

_BODIES = {
    LOST: _LOST_BODY,
    COMM: _COMM_BODY,
    EXIT: _TASK_BODY,
    FORK: _TASK_BODY,
    MMAP2: _MMAP2_BODY,
}
# Each is a multiple of u64 (kernel/events/core.c), and has a header and its time at least.
_ALIGNMENT, _LEAST_RECORD_BYTES = 8, 16
# By number; others are passed over.
_LEAST_SIZES = np.full(max(_BODIES) + 2, _LEAST_RECORD_BYTES, np.int64)
for _number, _body in _BODIES.items():
    _LEAST_SIZES[_number] = _HEADER.size + _body.size + _TIME.size
# In the header.
_SIZE_AT = 6

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

# What stands for what is no record.
_NO_RECORD = _HEADER.pack(LOST, 0, 32) + _LOST_BODY.pack(0, 1) + _TIME.pack(0)


@dataclass(frozen=True, slots=True)
class LifeRecords:
    """Events in order of time, as the kernel wrote them: most are of whom nobody asks for.

    Attributes:
        data: The records.
        numbers: PERF_RECORD_* of each, shape (n,).
        pids: Whose they are; of those that tell of a loss nobody's.
        parents: Of these, where they are of a fork.
        ns: When; 0 where that is not known.
        begins, ends: Of each in `data`.
    """

    data: bytes
    numbers: npt.NDArray[np.uint32]
    pids: npt.NDArray[np.uint32]
    parents: npt.NDArray[np.uint32]
    ns: npt.NDArray[np.uint64]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @staticmethod
    def of(parts: Sequence[bytes]) -> LifeRecords:
        """Makes them of records from one place after the other, but for what says nothing new.

        What is no record ends a part, and counts as one that was lost.
        """
        data = b"".join(parts)
        begins: list[int] = []
        of_parts = [0]
        for part in parts:
            begins += _begins(part, of_parts[-1])
            of_parts.append(of_parts[-1] + len(part))
        found = np.array(begins, np.int64)
        if not (
            all(len(part) % _ALIGNMENT == 0 for part in parts)
            and _are_records(data, found, np.array(of_parts)).all()
        ):
            return LifeRecords.of([_cut(part) for part in parts])
        return _in_order(data, found)

    def __len__(self) -> int:
        return len(self.ns)

    def event(self, at: int) -> LifeEvent:
        """Returns what one of them says."""
        return _event_of(self.data[self.begins[at] : self.ends[at]])

    def before(self, ns: int) -> tuple[LifeRecords, bytes]:
        """Returns those before a time, and the others as they were written."""
        count = int(np.searchsorted(self.ns, np.uint64(ns)))
        if count == len(self):
            return self, b""
        sooner = LifeRecords(
            self.data,
            *(self.numbers[:count], self.pids[:count], self.parents[:count]),
            *(self.ns[:count], self.begins[:count], self.ends[:count]),
        )
        return sooner, self._joined(np.arange(count, len(self)))

    def chosen(self, at: npt.NDArray[np.int64]) -> LifeRecords:
        """Returns some of them, without the memory of the others."""
        sizes = self.ends[at] - self.begins[at]
        ends = np.cumsum(sizes)
        return LifeRecords(
            self._joined(at),
            *(self.numbers[at], self.pids[at], self.parents[at], self.ns[at]),
            *(ends - sizes, ends),
        )

    def _joined(self, at: npt.NDArray[np.int64]) -> bytes:
        data = self.data
        spans = zip(self.begins[at].tolist(), self.ends[at].tolist(), strict=True)
        return b"".join([data[begin:end] for begin, end in spans])


def _begins(data: bytes, at_byte: int) -> list[int]:
    """Returns where records begin, as far as their sizes are right.

    Args:
        data: Of one CPU.
        at_byte: What its first byte is.
    """
    found = []
    sizes = memoryview(data)[: len(data) & -_ALIGNMENT].cast("H")
    at, count, shift = _SIZE_AT >> 1, len(sizes), at_byte - _SIZE_AT
    while at < count:
        found.append((at << 1) + shift)
        at += sizes[at] >> 1 or count
    return found


def _are_records(
    data: bytes, begins: npt.NDArray[np.int64], of_parts: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Returns which are whole records; what follows one that is none is nothing.

    Args:
        data: Of all CPUs, a multiple of `_ALIGNMENT`.
        begins: Where records may begin.
        of_parts: Where what is of each CPU begins, and where all ends.
    """
    words = np.frombuffer(data, "<u4")
    numbers, sizes = words[begins >> 2], (words[(begins >> 2) + 1] >> 16).astype(np.int64)
    least = _LEAST_SIZES[np.minimum(numbers, len(_LEAST_SIZES) - 1)]
    ends = of_parts[np.searchsorted(of_parts, begins, "right")]
    are_records: npt.NDArray[np.bool_] = (
        (sizes >= least) & (sizes % _ALIGNMENT == 0) & (begins + sizes <= ends)
    )
    return are_records


def _cut(part: bytes) -> bytes:
    """Returns the records of one CPU up to what is none, which counts as one that was lost."""
    whole = part[: len(part) & -_ALIGNMENT]
    begins = np.array(_begins(whole, 0), np.int64)
    is_record = _are_records(whole, begins, np.array([0, len(whole)]))
    if is_record.all() and len(whole) == len(part):
        return part
    end = len(whole) if is_record.all() else int(begins[is_record.argmin()])
    return part[:end] + _NO_RECORD


def _in_order(data: bytes, begins: npt.NDArray[np.int64]) -> LifeRecords:
    """Returns whole records in order of time, without those that say nothing new."""
    words, times = np.frombuffer(data, "<u4"), np.frombuffer(data, "<u8")
    at = begins >> 2
    numbers, bits, sizes = words[at], words[at + 1] & 0xFFFF, (words[at + 1] >> 16).astype(np.int64)
    pids, others = words[at + 2], words[at + 3]
    is_leader = pids == words[np.minimum(at + 4, len(words) - 1)]  # of FORK and EXIT
    is_new = (
        (numbers == MMAP2)
        | ((numbers == COMM) & ((bits & _COMM_EXEC > 0) | (pids == others)))
        | ((numbers == FORK) & (pids != others))
        | ((numbers == EXIT) & is_leader)
        | (numbers == LOST)
    )
    ns = times[(begins + sizes >> 3) - 1]
    order = np.flatnonzero(is_new)
    order = order[np.argsort(ns[order], kind="stable")]
    ends = (begins + sizes)[order]
    rows = (numbers[order], pids[order], others[order], ns[order], begins[order], ends)
    return LifeRecords(data, *rows)


def _event_of(record: bytes) -> LifeEvent:
    """Makes an event of a record."""
    number, bits, size = _HEADER.unpack_from(record)
    end = size - _TIME.size
    (ns,) = _TIME.unpack_from(record, end)
    if number == MMAP2:
        fields = _MMAP2_BODY.unpack_from(record, _HEADER.size)
        pid, _, start, length, offset, major, minor, inode, *_ = fields
        path = _text(record[_HEADER.size + _MMAP2_BODY.size : end])
        return Mapped(ns, pid, start, start + length, offset, _device(major, minor), inode, path)
    if number == COMM:
        pid, _ = _COMM_BODY.unpack_from(record, _HEADER.size)
        name = _text(record[_HEADER.size + _COMM_BODY.size : end])
        return Named(ns, pid, name, bool(bits & _COMM_EXEC))
    if number == LOST:
        _, count = _LOST_BODY.unpack_from(record, _HEADER.size)
        return Lost(ns, count)
    pid, parent_pid, *_ = _TASK_BODY.unpack_from(record, _HEADER.size)
    return Forked(ns, pid, parent_pid) if number == FORK else Ended(ns, pid)


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
        self._early = b""

    @property
    def refused(self) -> int:
        """Of how many CPUs the kernel does not tell: it gives no memory for a ring."""
        return sum(ring is None for ring in self._rings.values())

    def start(self) -> None:
        """Begins to listen. Where the kernel refuses, nothing is told."""
        self._is_started = True
        self.follow_cpus()

    def follow_cpus(self, came: Set[int] = frozenset()) -> None:
        """Listens on CPUs that came online, and lets go of those that went.

        Args:
            came: Those that went and came since: of them nothing is told any more.
        """
        if not self._is_started:
            return
        online, is_first = set(online_cpus()), not self._rings
        for cpu in self._rings.keys() - (online - came):
            ring = self._rings.pop(cpu)
            if ring is not None:
                self._early += ring.take()
                ring.close()
        size_bytes = _ring_bytes(len(online))
        for cpu in sorted(online - self._rings.keys()):
            self._rings[cpu] = None
            with contextlib.suppress(OSError):
                self._rings[cpu] = _Ring(cpu, size_bytes, self._watch)
            if not is_first:  # it was there for a moment, and told nothing
                self._early += _NO_RECORD

    def read(self) -> tuple[LifeRecords, int]:
        """Returns what has happened since the last read, in order, and up to when that is all.

        The rings are read one after the other, so that what happens meanwhile would come in part:
        that is kept for the next time.
        """
        until_ns = time.monotonic_ns()
        parts = [self._early]
        parts += [ring.take() for ring in self._rings.values() if ring is not None]
        found, self._early = LifeRecords.of(parts).before(until_ns + 1)
        return found, until_ns

    def close(self) -> None:
        """Ends it."""
        for ring in self._rings.values():
            if ring is not None:
                ring.close()
        self._rings = {}
        self._is_started = False


def _ring_bytes(cpus: int) -> int:
    """Returns the size of each ring, a power of two."""
    size_bytes = _RING_BYTES
    while size_bytes > _LEAST_RING_BYTES and size_bytes * cpus > _RINGS_BYTES:
        size_bytes //= 2
    return size_bytes
