# SPDX-License-Identifier: Apache-2.0
"""What the kernel's taskstats tell: what processes waited for, and what threads took that ended.

It takes CAP_NET_ADMIN, which a recording does without, and a library that takes 23 MB: so a child
asks and listens (`taskstats_worker`), which is started before rights are given up, and only where
the kernel does account delays, of processes made since it was told to (sysctl
kernel.task_delayacct).
"""

from __future__ import annotations

import contextlib
import enum
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
from aiflame.agent import kernelfs, priority, rights
from aiflame.agent.inspector.child import kill
from aiflame.agent.model.accounts import DELAY_CAUSES
from aiflame.agent.process_group import OWN_PROCESS_GROUP
from aiflame.agent.rights import Capability

_SYSCTL = "/proc/sys/kernel/task_delayacct"


class Told(enum.IntEnum):
    """What a row of TASKSTATS_DTYPE is of."""

    READY = 0  # nothing: from now on it is told what ends
    FIRST = 1  # a process, read at the start
    LAST = 2  # a process, read at the end
    THREAD_ENDED = 3  # a thread that has ended
    PROCESS_ENDED = 4  # the same, and all of its process, which it may have been the last of
    END = 5  # nothing: it is the last row


# `tid` and the times are of threads that have ended, as their schedstat would have them. Each cause
# is of a process: how many waits there were until then, and for how long. read_ns is monotonic;
# lost: how many ends of threads, of the whole machine, found no room until then.
TASKSTATS_DTYPE = np.dtype(
    [
        ("kind", "<u4"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("lost", "<u4"),
        ("on_cpu_ns", "<u8"),
        ("run_queue_ns", "<u8"),
        ("timeslices", "<u8"),
        ("read_ns", "<i8"),
        *((cause, [("count", "<u8"), ("ns", "<u8")]) for cause in DELAY_CAUSES),
    ]
)

# Requests of 100,000 processes; the child takes 0.3 s to begin, and a pipe of 64 KB is full with
# 8,000. Answers of 7,000 processes or ends of threads, between two looks at them.
_PIPE_BYTES = 1 << 20
# The child takes 0.5 s to begin, while the recorder gets ready as well. Where it takes longer than
# that, what ends until it has begun is not told.
_BEGINNING_S = 2.0
# The child needs 0.1 ms for a process, and may have to wait for a processor.
_PATIENCE_S = 10.0
# Of twice as many processes as a host can have (PID_MAX_LIMIT), at most: what says more is broken.
_MOST_BYTES = (1 << 23) * TASKSTATS_DTYPE.itemsize


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


class TaskStats:
    """The child that asks and listens. A context manager, which ends it.

    Where it cannot be started, or does not answer, nothing is told.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # no memory, or too many processes
            self._process = subprocess.Popen(
                [sys.executable, "-m", "aiflame.agent.processes.taskstats_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",  # python -m would import from the working directory first
                bufsize=0,
                # One thread, so that none has rights that the first gives up; numpy would start
                # one per CPU.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                **OWN_PROCESS_GROUP,
            )
        if self._process is not None:
            priority.hurry_child(self._process.pid)  # to begin
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    os.set_blocking(stream.fileno(), False)
                    with contextlib.suppress(OSError):  # it has what there is
                        fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def __enter__(self) -> TaskStats:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the child, none where it is over."""
        return [] if self._process is None else [self._process.pid]

    def wait(self) -> None:
        """Waits until it is told what ends; for a moment at most."""
        until_s, process = time.monotonic() + _BEGINNING_S, self._process
        if process is None or process.stdout is None:
            return
        while not self._rest:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not _has_data(process.stdout.fileno(), left_s):
                break
            self._rest = os.read(process.stdout.fileno(), _PIPE_BYTES)
            if not self._rest:
                break
        priority.let_wait(process.pid)

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

    def take(self) -> npt.NDArray[np.void]:
        """Returns what was told since the last time, TASKSTATS_DTYPE; does not wait for more."""
        data = b""
        if self._process is not None and self._process.stdout is not None:
            with contextlib.suppress(BlockingIOError):
                data = os.read(self._process.stdout.fileno(), _PIPE_BYTES)
        return self._rows(data)

    def finish(self) -> npt.NDArray[np.void]:
        """Returns all that is still to be told, none where that is cut; ends the child."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return self._rows(b"")
        process.stdin.close()
        until_s, found = time.monotonic() + _PATIENCE_S, bytearray()
        while len(found) < _MOST_BYTES:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not _has_data(process.stdout.fileno(), left_s):
                break
            data = os.read(process.stdout.fileno(), _PIPE_BYTES)
            if not data:
                break
            found += data
        rows = self._rows(bytes(found))
        self.close()
        is_whole = len(rows) > 0 and rows["kind"][-1] == Told.END
        return rows if is_whole else rows[:0]

    def _rows(self, data: bytes) -> npt.NDArray[np.void]:
        data = self._rest + data
        size = len(data) // TASKSTATS_DTYPE.itemsize * TASKSTATS_DTYPE.itemsize
        self._rest = data[size:]
        return np.frombuffer(data[:size], TASKSTATS_DTYPE)

    def close(self) -> None:
        """Ends the child."""
        process, self._process = self._process, None
        if process is not None:
            kill(process)


def delays_between(
    first: npt.NDArray[np.void], last: npt.NDArray[np.void]
) -> list[list[ProcessDelay]]:
    """Returns what processes waited since they were read first, causes without waits aside.

    Of a process that was not read, it is all since it began.

    Args:
        first: TASKSTATS_DTYPE, in any order.
        last: The same, in the order of time: a number may come again, of another process.

    Returns:
        A list for each of the last.
    """
    known = {int(row["pid"]): row for row in first}
    found = []
    for row in last:
        before = known.pop(int(row["pid"]), None)
        delays = []
        for cause in DELAY_CAUSES:
            count, ns = (int(row[cause][name]) for name in ("count", "ns"))
            if before is not None:
                counted, waited_ns = (int(before[cause][name]) for name in ("count", "ns"))
                # Less: another process has the number now.
                if counted <= count and waited_ns <= ns:
                    count, ns = count - counted, ns - waited_ns
            if count or ns:
                delays.append(ProcessDelay(int(row["pid"]), cause, count, ns))
        found.append(delays)
    return found


def _has_data(descriptor: int, wait_s: float) -> bool:
    """Waits for data or the end; select() takes no descriptor above 1,023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))
