# SPDX-License-Identifier: Apache-2.0
"""Asks the kernel what processes waited for, and hears of threads that end; a child of `taskstats`.

Each line of its standard input names processes, which are read when it comes. What was read, and
what ended meanwhile, is written as it comes; at the end of the input it ends. Struct taskstats has
another layout in many versions (one that was moved around between v6.14 and v6.15): where its
members are, the kernel's own type information says.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from aiflame.agent import kernelfs, rights
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel.btf import Btf
from aiflame.agent.model.accounts import DELAY_CAUSES
from aiflame.agent.processes.taskstats import TASKSTATS_DTYPE, Told
from aiflame.agent.rights import Capability

_NUMBER, _ID = struct.Struct("<Q"), struct.Struct("<I")

_POSSIBLE_CPUS = Path("/sys/devices/system/cpu/possible")

# From one look at what has ended to the next: five wake-ups a second, whatever ends.
_PAUSE_S = 0.2
# The kernel takes twice of this for what nobody has read yet: 6,500 ends of 1.3 KB each.
_QUEUE_BYTES = 1 << 22
_MESSAGE_BYTES = 1 << 16
_REQUEST_BYTES = 1 << 20

# asm-generic/socket.h, and the ninth number of linux/sock_diag.h's SK_MEMINFO.
_SO_RCVBUFFORCE, _SO_MEMINFO = 33, 55
_MEMINFO = struct.Struct("<9I")

# linux/netlink.h and linux/socket.h
_NETLINK_GENERIC, _SOL_NETLINK, _NETLINK_NO_ENOBUFS = 16, 270, 5

# struct nlmsghdr and genlmsghdr, struct nlattr (linux/netlink.h), and the flag of nested ones.
_HEADER_BYTES = 20
_ATTRIBUTE = struct.Struct("<HH")
_TYPE_MASK = 0x3FFF
# linux/taskstats.h
_TYPE_TGID, _TYPE_STATS, _TYPE_AGGR_PID, _TYPE_AGGR_TGID = 2, 3, 4, 5

# Waits of a process, and for how long, by cause.
Reading = Mapping[str, tuple[int, int]]


class Layout:
    """Where struct taskstats has what.

    Args:
        btf: The kernel's types.

    Raises:
        EnvironmentUnfit: They have no such struct.
    """

    def __init__(self, btf: Btf) -> None:
        self._times_at = [
            btf.member_offset("taskstats", name)
            for name in ("cpu_run_virtual_total", "cpu_delay_total", "cpu_count")
        ]
        self._tid_at = btf.member_offset("taskstats", "ac_pid")
        self._pid_at = _optional(btf, "ac_tgid")
        self._causes = {cause: at for cause in DELAY_CAUSES if (at := _members(btf, cause))}

    def delays(self, stats: bytes) -> Reading:
        """Returns what a struct says, zeros where it is cut."""
        return {
            cause: (_number(stats, count_at), _number(stats, ns_at))
            for cause, (count_at, ns_at) in self._causes.items()
        }

    def times(self, stats: bytes) -> tuple[int, ...]:
        """Returns ns on a CPU, ns in a run queue, and time slices, as schedstat has them."""
        return tuple(_number(stats, at) for at in self._times_at)

    def has_run(self, stats: bytes) -> bool:
        """Whether it is of any thread that was on a CPU."""
        return self.times(stats)[-1] > 0

    def ids(self, stats: bytes) -> tuple[int, int]:
        """Returns the process and the thread; before v5.19, of main threads alone the process."""
        tid = _id(stats, self._tid_at)
        return tid if self._pid_at is None else _id(stats, self._pid_at), tid


def _members(btf: Btf, cause: str) -> tuple[int, int] | None:
    """Returns where waits and their time are; None if this kernel does not tell them apart."""
    count_at, ns_at = _optional(btf, f"{cause}_count"), _optional(btf, f"{cause}_delay_total")
    return None if count_at is None or ns_at is None else (count_at, ns_at)


def _optional(btf: Btf, name: str) -> int | None:
    try:
        return btf.member_offset("taskstats", name)
    except EnvironmentUnfit:
        return None


class Asks(Protocol):
    """Who knows struct taskstats of processes."""

    def of_process(self, pid: int) -> bytes:
        """Returns it for all threads that live and, where it has or had several, have ended.

        Raises:
            ProcessLookupError: There is no such process.
        """

    def of_thread(self, tid: int) -> bytes:
        """Returns it for one thread, also the last one of a process that nobody has waited for.

        Raises:
            ProcessLookupError: There is no such thread.
        """


def delays_of(pid: int, kernel: Asks, layout: Layout) -> Reading | None:
    """Returns what a process has waited for; None if it is gone."""
    try:
        stats = kernel.of_process(pid)
        # fill_stats_for_tgid() of kernel/taskstats.c (v6.18) passes over threads that have ended,
        # and what these leave behind is there for processes of several threads only.
        if not layout.has_run(stats):
            stats = kernel.of_thread(pid)
    except ProcessLookupError:
        return None
    return layout.delays(stats)


def _number(stats: bytes, at: int) -> int:
    return int(_NUMBER.unpack_from(stats, at)[0]) if at + _NUMBER.size <= len(stats) else 0


def _id(stats: bytes, at: int) -> int:
    return int(_ID.unpack_from(stats, at)[0]) if at + _ID.size <= len(stats) else 0


@dataclass(frozen=True, slots=True)
class End:
    """The end of a thread.

    Attributes:
        pid, tid: Whose.
        times: As of `Layout.times`.
        delays: Of its process; None where another thread may know more of it.
    """

    pid: int
    tid: int
    times: tuple[int, ...]
    delays: Reading | None


def end_of(message: bytes, layout: Layout) -> End | None:
    """Reads what the kernel tells when a thread ends; None if it is something else.

    pyroute2 takes 34 us to decode it and this 7 us, and a host may have thousands a second.
    """
    found = {
        kind: dict(_attributes(nested)) for kind, nested in _attributes(message[_HEADER_BYTES:])
    }
    thread = found.get(_TYPE_AGGR_PID, {}).get(_TYPE_STATS, b"")
    if not layout.has_run(thread):
        return None
    pid, tid = layout.ids(thread)
    # With the last thread comes what its process has, if that ever had several; else the main
    # thread is all of it. Where others go on after the main thread, the process comes later.
    process = found.get(_TYPE_AGGR_TGID, {})
    pid = _id(process[_TYPE_TGID], 0) if _TYPE_TGID in process else pid
    stats = process.get(_TYPE_STATS, thread if pid == tid else None)
    return End(pid, tid, layout.times(thread), None if stats is None else layout.delays(stats))


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind & _TYPE_MASK, data[at + _ATTRIBUTE.size : at + length]
        at += length + 3 & ~3


class _TaskStats:
    """Generic netlink's family TASKSTATS (include/uapi/linux/taskstats.h)."""

    def __init__(self) -> None:
        # 0.2 s: only where it is used.
        from pyroute2.netlink import genlmsg, nla
        from pyroute2.netlink.generic import GenericNetlinkSocket

        # Bytes, since pyroute2 knows the layout of few versions, and decodes names of processes
        # that need not be UTF-8.
        attributes = (("none", "none"), ("pid", "uint32"), ("tgid", "uint32"), ("stats", "cdata"))

        class Aggregate(nla):  # type: ignore[misc]
            nla_map = attributes

        class Answer(genlmsg):  # type: ignore[misc]
            nla_map = (*attributes, ("of_thread", "aggregate"), ("of_process", "aggregate"))
            aggregate = Aggregate

        class Request(genlmsg):  # type: ignore[misc]
            nla_map = attributes[:3]

        self._request = Request
        self._socket = GenericNetlinkSocket()
        self._socket.bind("TASKSTATS", Answer)

    @property
    def family(self) -> int:
        """Its number."""
        return int(self._socket.prid)

    def of_process(self, pid: int) -> bytes:
        return self._ask("tgid", "of_process", pid)

    def of_thread(self, tid: int) -> bytes:
        return self._ask("pid", "of_thread", tid)

    def _ask(self, kind: str, name: str, number: int) -> bytes:
        from pyroute2.netlink import NLM_F_REQUEST
        from pyroute2.netlink.exceptions import NetlinkError

        message = self._request()
        message["cmd"], message["version"] = 1, 1  # TASKSTATS_CMD_GET
        message["attrs"].append([kind, number])
        try:
            answers = [*self._socket.nlm_request(message, self._socket.prid, NLM_F_REQUEST)]
        except NetlinkError as error:
            if error.code == errno.ESRCH:
                raise ProcessLookupError(number) from error
            raise
        stats: bytes = answers[0].get_attr(name).get_attr("stats")
        return stats


class _Ends:
    """Hears of all threads of the machine that end, from now on.

    Args:
        family: The number of TASKSTATS.
        layout: Of what comes.
    """

    def __init__(self, family: int, layout: Layout) -> None:
        self._layout = layout
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_GENERIC)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _QUEUE_BYTES)
        # What finds no room is counted (`lost`), and is no reason to refuse what comes next.
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
        self._socket.bind((0, 0))
        cpus = kernelfs.read_text(_POSSIBLE_CPUS).strip().encode() + b"\0"
        # TASKSTATS_CMD_GET with TASKSTATS_CMD_ATTR_REGISTER_CPUMASK; NLM_F_REQUEST.
        attribute = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(cpus), 3) + cpus + bytes(-len(cpus) % 4)
        size = _HEADER_BYTES + len(attribute)
        self._socket.send(struct.pack("<IHHIIBBH", size, family, 1, 0, 0, 1, 1, 0) + attribute)
        self._socket.setblocking(False)

    @property
    def lost(self) -> int:
        """How many found no room until now."""
        data = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        return int(_MEMINFO.unpack(data)[-1])

    def take(self) -> Iterator[End]:
        """Yields what has come."""
        while True:
            try:
                message = self._socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return
            end = end_of(message, self._layout)
            if end is not None:
                yield end


class _Worker:
    def __init__(self) -> None:
        self._layout = Layout(Btf.of_kernel())
        self._kernel = _TaskStats()
        self._ends = _Ends(self._kernel.family, self._layout)
        self._is_first = True

    def run(self) -> None:
        """Serves until there are no more requests."""
        self._write([self._row(Told.READY, 0, 0, (0, 0, 0), {})])
        requests, is_over = b"", False
        while not is_over:
            readable, _, _ = select.select([sys.stdin.fileno()], [], [], _PAUSE_S)
            if readable:
                data = os.read(sys.stdin.fileno(), _REQUEST_BYTES)
                requests, is_over = requests + data, not data
            *lines, requests = requests.split(b"\n")
            for line in lines:
                self._read(map(int, line.split()))
            self._write(self._ended())
        self._write([self._row(Told.END, 0, 0, (0, 0, 0), {})])

    def _read(self, pids: Iterator[int]) -> None:
        kind, self._is_first = Told.FIRST if self._is_first else Told.LAST, False
        found = ((pid, delays_of(pid, self._kernel, self._layout)) for pid in pids)
        self._write(
            self._row(kind, pid, 0, (0, 0, 0), reading)
            for pid, reading in found
            if reading is not None
        )

    def _ended(self) -> Iterator[tuple[object, ...]]:
        for end in self._ends.take():
            kind = Told.THREAD_ENDED if end.delays is None else Told.PROCESS_ENDED
            yield self._row(kind, end.pid, end.tid, end.times, end.delays or {})

    def _row(
        self, kind: Told, pid: int, tid: int, times: tuple[int, ...], reading: Reading
    ) -> tuple[object, ...]:
        causes = (reading.get(cause, (0, 0)) for cause in DELAY_CAUSES)
        return (int(kind), pid, tid, self._ends.lost, *times, time.monotonic_ns(), *causes)

    def _write(self, rows: Iterable[tuple[object, ...]]) -> None:
        data = memoryview(np.array([*rows], TASKSTATS_DTYPE).tobytes())
        while data:  # the recorder may take its time: what ends meanwhile waits in the socket
            data = data[os.write(sys.stdout.fileno(), data) :]


def main() -> None:
    """Serves the recorder until it ends."""
    rights.keep_only({Capability.NET_ADMIN})
    _Worker().run()


if __name__ == "__main__":
    main()
