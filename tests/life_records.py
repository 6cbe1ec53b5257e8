# SPDX-License-Identifier: Apache-2.0
"""Records of the lives of processes, as the kernel writes them (linux/perf_event.h, stable ABI)."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from aiflame.agent.kernel.life_events import (
    Ended,
    Forked,
    LifeEvent,
    LifeRecords,
    Mapped,
    Named,
)

COMM_EXEC = 1 << 13


def record(kind: int, body: bytes, ns: int, bits: int = 0) -> bytes:
    """Returns a record of any kind."""
    whole = body + struct.pack("<Q", ns)
    return struct.pack("<IHH", kind, bits, 8 + len(whole)) + whole


def fork(pid: int, parent_pid: int, ns: int) -> bytes:
    """Returns PERF_RECORD_FORK; of a thread where both are the same."""
    return record(7, struct.pack("<IIIIQ", pid, parent_pid, pid, parent_pid, ns), ns)


def end(pid: int, tid: int, ns: int) -> bytes:
    """Returns PERF_RECORD_EXIT."""
    return record(4, struct.pack("<IIIIQ", pid, 1, tid, 1, ns), ns)


def comm(pid: int, tid: int, name: bytes, ns: int, bits: int = 0) -> bytes:
    """Returns PERF_RECORD_COMM."""
    return record(3, struct.pack("<II", pid, tid) + _text(name), ns, bits)


def mmap2(event: Mapped) -> bytes:
    """Returns PERF_RECORD_MMAP2."""
    pid, start, size = event.pid, event.start, event.end - event.start
    major, minor = (int(part, 16) for part in event.device.split(":"))
    place = struct.pack("<IIQQQ", pid, pid + 1, start, size, event.offset)
    file = struct.pack("<IIQQII", major, minor, event.inode, 5, 5, 2)
    return record(10, place + file + _text(event.path.encode()), event.ns)


def lost(records: int, ns: int) -> bytes:
    """Returns PERF_RECORD_LOST."""
    return record(2, struct.pack("<QQ", 9, records), ns)


def _text(text: bytes) -> bytes:
    return text + bytes(8 - len(text) % 8)


def _written(event: LifeEvent) -> bytes:
    if isinstance(event, Forked):
        return fork(event.pid, event.parent_pid, event.ns)
    if isinstance(event, Named):
        bits = COMM_EXEC if event.is_exec else 0
        return comm(event.pid, event.pid, event.name.encode(), event.ns, bits)
    if isinstance(event, Mapped):
        return mmap2(event)
    if isinstance(event, Ended):
        return end(event.pid, event.pid, event.ns)
    return lost(event.records, event.ns)


def records(events: Iterable[LifeEvent]) -> LifeRecords:
    """Returns records that say so."""
    return LifeRecords.of([b"".join(map(_written, events))])
