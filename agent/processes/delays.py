# SPDX-License-Identifier: Apache-2.0
"""What processes waited for, as the kernel's delay accounting has it (taskstats).

It takes CAP_NET_ADMIN, which a recording does without, and a library that takes 23 MB: so a child
asks (`delays_worker`), which is started before rights are given up, and only where the kernel does
account delays, of processes made since it was told to (sysctl kernel.task_delayacct).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent import kernelfs, rights
from aiflame.agent.inspector.child import ends
from aiflame.agent.model.accounts import DELAY_CAUSES
from aiflame.agent.process_group import OWN_PROCESS_GROUP
from aiflame.agent.rights import Capability

_SYSCTL = "/proc/sys/kernel/task_delayacct"

# One answer of the child: which reading it is of, the first (0) or the last (1), and for each cause
# how many waits there were until then, and for how long.
DELAY_READING_DTYPE = np.dtype(
    [
        ("pid", "<u4"),
        ("reading", "<u4"),
        *((cause, [("count", "<u8"), ("ns", "<u8")]) for cause in DELAY_CAUSES),
    ]
)

# Of 100,000 processes; a pipe of 64 KB is full with 8,000, and the child takes 0.3 s to begin.
_PIPE_BYTES = 1 << 20
# The child needs 0.1 ms for a process, and may have to wait for a processor.
_PATIENCE_S = 10.0
# Of twice as many processes as a host can have (PID_MAX_LIMIT), at most: what says more is broken.
_MOST_BYTES = (1 << 23) * DELAY_READING_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class ProcessDelay:
    """Waits of a process between two readings; `cause` is one of DELAY_CAUSES."""

    pid: int
    cause: str
    count: int
    ns: int


def are_accounted() -> bool:
    """Whether the kernel accounts delays of processes that are made now."""
    return kernelfs.read_text(_SYSCTL, 16).strip() == "1"


def are_readable() -> bool:
    """Whether it does, and this process may ask for them."""
    return are_accounted() and not rights.missing([Capability.NET_ADMIN])


class Delays:
    """The child that reads delays. A context manager, which ends it.

    Where it cannot be started, or does not answer, there are no delays.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # no memory, or too many processes
            self._process = subprocess.Popen(
                [sys.executable, "-m", "aiflame.agent.processes.delays_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",  # python -m would import from the working directory first
                bufsize=0,
                **OWN_PROCESS_GROUP,
            )
        if self._process is not None and self._process.stdin is not None:
            requests = self._process.stdin.fileno()
            os.set_blocking(requests, False)
            with contextlib.suppress(OSError):  # it has what there is
                fcntl.fcntl(requests, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def __enter__(self) -> Delays:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the child, none where it is over."""
        return [] if self._process is None else [self._process.pid]

    def read(self, pids: Iterable[int]) -> None:
        """Has processes read, now; does not wait for that. To be called twice."""
        request = (" ".join(map(str, pids)) + "\n").encode()
        if self._process is not None and self._process.stdin is not None:
            try:
                written = os.write(self._process.stdin.fileno(), request)
            except OSError:  # it has ended, or takes nothing
                written = 0
            if written < len(request):
                self.close()

    def finish(self) -> list[ProcessDelay]:
        """Returns what is between the two readings; ends the child.

        Of a process that the first has not, it is all since it began.
        """
        answer = self._answer()
        self.close()
        if len(answer) % DELAY_READING_DTYPE.itemsize:
            return []  # it was cut
        return delays_between(np.frombuffer(answer, DELAY_READING_DTYPE))

    def _answer(self) -> bytes:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return b""
        process.stdin.close()
        until_s, found = time.monotonic() + _PATIENCE_S, bytearray()
        while len(found) < _MOST_BYTES:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                break
            data = os.read(process.stdout.fileno(), _PIPE_BYTES)
            if not data:
                return bytes(found)
            found += data
        return b""

    def close(self) -> None:
        """Ends the child."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        process.kill()
        if ends(process.pid):
            process.wait()


def delays_between(readings: npt.NDArray[np.void]) -> list[ProcessDelay]:
    """Returns what processes waited between the two readings, causes without waits aside.

    Args:
        readings: DELAY_READING_DTYPE, in any order.
    """
    first = {int(row["pid"]): row for row in readings[readings["reading"] == 0]}
    found = []
    for row in readings[readings["reading"] == 1]:
        before = first.get(int(row["pid"]))
        for cause in DELAY_CAUSES:
            count, ns = (int(row[cause][name]) for name in ("count", "ns"))
            if before is not None:
                counted, waited_ns = (int(before[cause][name]) for name in ("count", "ns"))
                # Less: another process has the number now.
                if counted <= count and waited_ns <= ns:
                    count, ns = count - counted, ns - waited_ns
            if count or ns:
                found.append(ProcessDelay(int(row["pid"]), cause, count, ns))
    return found
