# SPDX-License-Identifier: Apache-2.0
"""Asks the kernel what processes waited for; a child of `delays`, with one right.

Each line of its standard input names processes; they are read when it comes. At the end of the
input all readings are written, and it ends. Struct taskstats has another layout in many versions
(one that was moved around between v6.14 and v6.15): where its members are, the kernel's own type
information says.
"""

from __future__ import annotations

import errno
import struct
import sys
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from aiflame.agent import rights
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel.btf import Btf
from aiflame.agent.model.accounts import DELAY_CAUSES
from aiflame.agent.processes.delays import DELAY_READING_DTYPE
from aiflame.agent.rights import Capability

_NUMBER = struct.Struct("<Q")

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
        self._time_slices_at = btf.member_offset("taskstats", "cpu_count")
        self._causes = {cause: at for cause in DELAY_CAUSES if (at := _members(btf, cause))}

    def delays(self, stats: bytes) -> Reading:
        """Returns what a struct says, zeros where it is cut."""
        return {
            cause: (_number(stats, count_at), _number(stats, ns_at))
            for cause, (count_at, ns_at) in self._causes.items()
        }

    def has_run(self, stats: bytes) -> bool:
        """Whether it is of any thread that was on a CPU."""
        return _number(stats, self._time_slices_at) > 0


def _members(btf: Btf, cause: str) -> tuple[int, int] | None:
    """Returns where waits and their time are; None if this kernel does not tell them apart."""
    try:
        return (
            btf.member_offset("taskstats", f"{cause}_count"),
            btf.member_offset("taskstats", f"{cause}_delay_total"),
        )
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


def main() -> None:
    """Reads requests until there are no more, then writes all answers."""
    rights.keep_only({Capability.NET_ADMIN})
    kernel, layout = _TaskStats(), Layout(Btf.of_kernel())
    rows = []
    for number, line in enumerate(sys.stdin):
        for pid in map(int, line.split()):
            found = delays_of(pid, kernel, layout)
            if found is not None:
                rows.append((pid, number, *(found.get(cause, (0, 0)) for cause in DELAY_CAUSES)))
    sys.stdout.buffer.write(np.array(rows, DELAY_READING_DTYPE).tobytes())


if __name__ == "__main__":
    main()
