# SPDX-License-Identifier: Apache-2.0
"""What captures on request take is not what recording takes, and no budget is for it.

An agent does less where its processes take more CPU time or memory than their budgets. A capture is
made by a process that the agent has begun, and takes most of a CPU for as long as it lasts: counted
as the agent's own it would thin what is recorded of the whole host, for minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from aiflame.agent.model.profile import NS_PER_S
from aiflame.agent.processes import procfs

_LOOK_S = 0.02


class CaptureProcesses:
    """The processes that make captures, told apart from all others that this process has begun.

    Each leads a process group. Where one is killed, its group is.

    They are begun and waited for here alone: what one has used counts among all children from the
    moment that it is waited for, and whoever looks at that moment must not take it for others'.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Kept until their end: Python itself waits for those that nobody has any more.
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ended_s = 0.0

    def begin(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Starts one, and returns it."""
        with self._lock:
            for left in [*self._running.values()]:  # which did not end when they were to
                self._look(left)
            process = start()
            self._running[process.pid] = process
        return process

    def wait(self, process: subprocess.Popen[bytes], timeout_s: float = 0) -> float | None:
        """Waits for the end of one that was begun here, whose `returncode` is set then.

        Returns:
            The CPU time, in seconds, that it and those that it has begun took; None where it has
            not ended, or its end was waited for before.
        """
        until_s = time.monotonic() + timeout_s
        while process.returncode is None:
            with self._lock:
                took_s = self._look(process)
            if took_s is not None or time.monotonic() >= until_s:
                return took_s
            time.sleep(_LOOK_S)
        return None

    def _look(self, process: subprocess.Popen[bytes]) -> float | None:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        if ended.si_code != os.CLD_EXITED:  # what it has begun goes on
            with suppress(ProcessLookupError):
                # Until it is waited for, no other group can have its number.
                os.killpg(process.pid, signal.SIGKILL)
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        process.returncode = os.waitstatus_to_exitcode(status)
        del self._running[pid]
        took_s = usage.ru_utime + usage.ru_stime
        self._ended_s += took_s
        return took_s

    def begun(self) -> list[int]:
        """Returns those that make captures, and all that they have begun."""
        with self._lock:
            return [*self._running, *procfs.begun_by(self._running)]

    def others(self) -> list[int]:
        """Returns all else that this process has begun, and what those have."""
        with self._lock:
            return procfs.begun(self._running)

    def others_cpu_ns(self) -> int:
        """Returns the CPU time of all else that this process has begun, also of what has ended."""
        with self._lock:
            return procfs.helpers_cpu_ns(self._running) - round(self._ended_s * NS_PER_S)
