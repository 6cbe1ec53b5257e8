# SPDX-License-Identifier: Apache-2.0
"""The kernel's own account of the BPF programs that a process holds, whoever made them.

kernel.bpf_stats_enabled (v5.1) makes the kernel count runs and nanoseconds of each program. The
nanoseconds include the two clock readings around each run, the same for every tool. Programs are
found by the descriptors of their process, so that those of other profilers on the machine do not
count.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent.kernel.arch import this_architecture

_STATS = Path("/proc/sys/kernel/bpf_stats_enabled")

# enum bpf_cmd and struct bpf_prog_info (include/uapi/linux/bpf.h, v6.1); stable ABI.
_PROG_GET_FD_BY_ID, _OBJ_GET_INFO_BY_FD = 13, 15
_INFO_BYTES, _NAME_AT, _NAME_BYTES, _RUNS_AT = 232, 64, 16, 192

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def bpf_stats(enabled: bool) -> Iterator[None]:
    """Switches the kernel's counting on or off; restores what it was."""
    before = _STATS.read_text()
    _STATS.write_text(f"{int(enabled)}\n")
    try:
        yield
    finally:
        _STATS.write_text(before)


@dataclass(frozen=True, slots=True)
class Runs:
    """What one program did."""

    name: str
    run_time_ns: int
    run_count: int


def _bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    number = ctypes.c_long(this_architecture().syscall_bpf)
    result = int(_libc.syscall(number, ctypes.c_int(command), buffer, ctypes.c_uint(len(buffer))))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _program_ids(pid: int) -> set[int]:
    found = set()
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        try:
            lines = info.read_text().splitlines()
        except FileNotFoundError:  # closed since the listing
            continue
        found |= {int(line.split()[1]) for line in lines if line.startswith("prog_id:")}
    return found


def _runs(program_id: int) -> Runs:
    fd = _bpf(_PROG_GET_FD_BY_ID, struct.pack("<III", program_id, 0, 0))
    try:
        info = ctypes.create_string_buffer(_INFO_BYTES)
        _bpf(_OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", fd, len(info), ctypes.addressof(info)))
    finally:
        os.close(fd)
    name = info.raw[_NAME_AT : _NAME_AT + _NAME_BYTES].partition(b"\0")[0].decode()
    return Runs(name, *struct.unpack_from("<QQ", info.raw, _RUNS_AT))


def programs(pid: int) -> dict[int, Runs]:
    """Returns what each program that a process holds has done so far, by the kernel's id."""
    return {program_id: _runs(program_id) for program_id in sorted(_program_ids(pid))}


@dataclass(frozen=True, slots=True)
class Window:
    """What a process's programs did in a span of time."""

    seconds: float
    runs: tuple[Runs, ...]

    def ns_per_run(self, *names: str) -> float | None:
        """Nanoseconds of the programs whose names match, for each run of the first of them.

        A tool whose programs have names of its version's choosing is matched by a pattern.
        """
        chosen = [runs for name in names for runs in self.runs if re.match(name, runs.name)]
        if not chosen or not chosen[0].run_count:
            return None
        return sum(runs.run_time_ns for runs in chosen) / chosen[0].run_count

    def per_second(self, name: str) -> float:
        """Runs a second of the programs whose names match."""
        return sum(runs.run_count for runs in self.runs if re.match(name, runs.name)) / self.seconds

    @property
    def cpu_share(self) -> float:
        """Time of all programs, as a share of one CPU."""
        return sum(runs.run_time_ns for runs in self.runs) / 1e9 / self.seconds


def between(before: Mapping[int, Runs], after: Mapping[int, Runs]) -> tuple[Runs, ...]:
    """Returns what the programs that were there at both moments did in between."""
    return tuple(
        Runs(
            runs.name,
            runs.run_time_ns - before[program].run_time_ns,
            runs.run_count - before[program].run_count,
        )
        for program, runs in after.items()
        if program in before
    )


def watch(pid: int, seconds: float) -> Window:
    """Waits, and returns what a process's programs did meanwhile."""
    before, start_s = programs(pid), time.monotonic()
    time.sleep(seconds)
    after, end_s = programs(pid), time.monotonic()
    return Window(end_s - start_s, between(before, after))
