# SPDX-License-Identifier: Apache-2.0
"""Processes whose on-CPU samples are told one by one, with times, and launches in order.

All samples are counted by stack, and launches by stack and kernel. Of a process whose CPUs are a
device, each sample also says when it was taken, and launches are counted by their order on each
queue, which together tells who launched what ran there.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.losses import LossKind

# A second and CPU: -F may ask for as many.
_SAMPLES_PER_S = 10_000


class TimedProcesses:
    """Asks the kernel half for the times of samples.

    Args:
        programs: Loaded programs.

    Attributes:
        losses: Processes that there was no room for.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._pids: set[int] = set()
        self.losses: Counter[LossKind] = Counter()

    def add(self, pid: int) -> None:
        """Asks for those of a process; counts one that there is no room for."""
        if not self._pids:
            self._programs.set(abi.Setting.TIMED_SAMPLES, _SAMPLES_PER_S)
        if len(self._pids) >= self._programs.timed_processes.max_entries:
            # Nobody tells of the end of one that became another program which nobody has seen.
            for other in [one for one in self._pids if not Path(f"/proc/{one}").exists()]:
                self.forget(other)
        if len(self._pids) < self._programs.timed_processes.max_entries:
            self._pids.add(pid)
            key = pid.to_bytes(4, "little")
            self._programs.timed_processes.update(key, (1).to_bytes(4, "little"))
        else:
            self.losses[LossKind.PROCESSES_NOT_TIMED] += 1

    def forget(self, pid: int) -> None:
        """A process has ended."""
        if pid in self._pids:
            self._pids.remove(pid)
            self._programs.timed_processes.delete(pid.to_bytes(4, "little"))
