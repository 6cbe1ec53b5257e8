# SPDX-License-Identifier: Apache-2.0
"""Attaches loaded programs: cpu-clock events and raw tracepoints, and takes them off again."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from aiflame.agent import kernelfs
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.kernel import sysbpf
from aiflame.agent.kernel.loader import Programs

_ONLINE_CPUS = Path("/sys/devices/system/cpu/online")
_POSSIBLE_CPUS = Path("/sys/devices/system/cpu/possible")

# The count of an event, of which nothing else is read: perf_event_open(2).
_COUNT_BYTES = 8
# Two clocks are read one after the other, between which a busy machine may do something else.
_LEAST_SLEEP_NS, _CLOCK_READINGS = 100_000_000, 5

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
        self._counts: dict[int, bytes] = {}  # what clocks had counted when they were looked at
        self._turn: list[int] = []  # whose clocks are looked at next, the last first
        self._slept_ns = _slept_ns()
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

    def follow_cpus(self) -> set[int]:
        """Samples CPUs that came online, and lets go of those that went, whose clocks are dead.

        A CPU that goes takes its events along for good (perf_event_exit_cpu of
        kernel/events/core.c), also where it is back before anybody looks: all but one go while the
        machine sleeps. Of others the clock stands, which is looked at in turn, as that interrupts
        the CPU.

        Returns:
            Those that came: they were not sampled until now.
        """
        online, slept_ns = set(online_cpus()), _slept_ns()
        dead = self._clocks.keys() - online
        if slept_ns - self._slept_ns > _LEAST_SLEEP_NS:
            dead |= self._clocks.keys()
        else:
            dead |= self._standing()
        self._slept_ns = slept_ns
        for cpu in dead:
            _close(self._clocks.pop(cpu))
            self._counts.pop(cpu, None)
        came = set()
        for cpu in online - self._clocks.keys():
            self._clocks[cpu] = None
            with contextlib.suppress(OSError):
                fd = self._clocks[cpu] = self._open_clock(cpu)
                if fd is not None:
                    sysbpf.enable_event(fd)
                    came.add(cpu)
        return came

    def _standing(self) -> set[int]:
        """Returns the next CPU, if its clock has not gone on since it was looked at, or is none."""
        if not self._turn:
            self._turn = sorted(self._clocks)
        cpu = self._turn.pop() if self._turn else -1
        if cpu not in self._clocks:
            return set()
        fd = self._clocks[cpu]
        if fd is None:
            return {cpu}
        try:
            count = os.read(fd, _COUNT_BYTES)
        except OSError:  # of an event that is no more
            return {cpu}
        before, self._counts[cpu] = self._counts.get(cpu), count
        return {cpu} if count == before else set()

    def _open_clock(self, cpu: int) -> int | None:
        """Opens what samples a CPU; None where that went offline since the list was read."""
        try:
            fd = sysbpf.open_cpu_clock(cpu, self._period_ns)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise
        try:
            sysbpf.set_event_program(fd, self._programs.fds["on_cpu_sample"])
        except OSError:
            _close(fd)
            raise
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


def _slept_ns() -> int:
    """Returns for how long the machine has slept: one clock goes on then (clock_gettime(2)).

    It is less than half of `_LEAST_SLEEP_NS` too much, unless all readings were interrupted.
    """
    for _ in range(_CLOCK_READINGS):
        before_ns = time.monotonic_ns()
        found_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - before_ns
        if time.monotonic_ns() - before_ns < _LEAST_SLEEP_NS // 2:
            break
    return found_ns


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
