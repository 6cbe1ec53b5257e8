# SPDX-License-Identifier: Apache-2.0
"""Attaches loaded programs: cpu-clock events and raw tracepoints, and takes them off again."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from aiflame.agent import kernelfs
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import sysbpf
from aiflame.agent.kernel.loader import Programs

_ONLINE_CPUS = Path("/sys/devices/system/cpu/online")
_POSSIBLE_CPUS = Path("/sys/devices/system/cpu/possible")

# Raw tracepoints of the programs; the off-CPU ones are attached only when asked for.
_LIFE_TRACEPOINTS = {
    "on_fork": "sched_process_fork",
    "on_exec": "sched_process_exec",
    "on_exit": "sched_process_exit",
}
_OFF_CPU_TRACEPOINTS = {"on_switch": "sched_switch", "on_waking": "sched_waking"}


def online_cpus() -> list[int]:
    """Returns the CPUs that are online."""
    return _cpus_of(_ONLINE_CPUS)


def possible_cpus() -> int:
    """Returns how many values a per-CPU map has for each key: one for each CPU that may ever be.

    Not what sysconf says: the kernel writes this many, whatever room there is.
    """
    return len(_cpus_of(_POSSIBLE_CPUS))


def _cpus_of(listing: Path) -> list[int]:
    """Reads a list such as `0-3,8`."""
    cpus: list[int] = []
    for part in kernelfs.read_bytes(listing).decode().strip().split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


class Probes:
    """What is attached, as descriptors: closing them detaches.

    Args:
        programs: Loaded programs.
        off_cpu: Attach the context-switch programs as well.

    Raises:
        EnvironmentUnfit: The kernel refuses an attachment.
    """

    def __init__(self, programs: Programs, off_cpu: bool) -> None:
        self._clocks: dict[int, int | None] = {}  # by CPU; None: it cannot be sampled
        self._period_ns = 0
        self._tracepoints: list[int] = []
        self._programs = programs
        wanted = {**_LIFE_TRACEPOINTS, **(_OFF_CPU_TRACEPOINTS if off_cpu else {})}
        for program, tracepoint in wanted.items():
            self._tracepoints.append(self._raw_tracepoint(tracepoint, programs.fds[program]))

    def _raw_tracepoint(self, name: str, program_fd: int) -> int:
        try:
            return sysbpf.open_raw_tracepoint(name, program_fd)
        except OSError as error:
            raise EnvironmentUnfit(
                f"cannot attach to tracepoint {name}: {error.strerror}"
            ) from error

    def start_clocks(self, period_ns: int) -> None:
        """Starts sampling on every online CPU.

        Raises:
            EnvironmentUnfit: perf_event_open is denied.
        """
        self._period_ns = period_ns
        try:
            for cpu in online_cpus():
                self._clocks[cpu] = self._open_clock(cpu)
        except OSError as error:
            raise _perf_denied(error) from error
        for fd in self._clocks.values():
            if fd is not None:
                sysbpf.enable_event(fd)

    def follow_cpus(self) -> int:
        """Samples CPUs that came online, and lets go of those that went, whose clocks are dead.

        Returns:
            How many came: they were not sampled until now.
        """
        online = set(online_cpus())
        for cpu in self._clocks.keys() - online:
            _close(self._clocks.pop(cpu))
        new = online - self._clocks.keys()
        for cpu in new:
            self._clocks[cpu] = None
            with contextlib.suppress(OSError):
                fd = self._clocks[cpu] = self._open_clock(cpu)
                if fd is not None:
                    sysbpf.enable_event(fd)
        return len(new)

    def _open_clock(self, cpu: int) -> int | None:
        """Opens what samples a CPU; None where that went offline since the list was read."""
        try:
            fd = sysbpf.open_cpu_clock(cpu, self._period_ns)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise
        sysbpf.set_event_program(fd, self._programs.fds["on_cpu_sample"])
        return fd

    def stop_clocks(self) -> None:
        """Ends sampling."""
        for fd in self._clocks.values():
            _close(fd)
        self._clocks = {}

    def close(self) -> None:
        """Detaches everything."""
        self.stop_clocks()
        for fd in self._tracepoints:
            os.close(fd)
        self._tracepoints = []


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


# CAP_PERFMON is enough at the levels that Linux has, of which 2 is the highest. Debian's kernels
# have a level 3 that asks for CAP_SYS_ADMIN, Ubuntu's a level 4, and are at it.
CLOCK_CURE = "run as root or with CAP_SYS_ADMIN, or: sudo sysctl kernel.perf_event_paranoid=2"


def _perf_denied(error: OSError) -> EnvironmentUnfit:
    current = kernelfs.read_text("/proc/sys/kernel/perf_event_paranoid").strip() or "unknown"
    return EnvironmentUnfit(
        f"perf_event_open: {error.strerror} (kernel.perf_event_paranoid is {current})",
        CLOCK_CURE,
    )
