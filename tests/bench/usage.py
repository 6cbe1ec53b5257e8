# SPDX-License-Identifier: Apache-2.0
"""What a tool takes of the machine: CPU and memory of a process and all that descend from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Use:
    """What a tool used so far: CPU nanoseconds, resident bytes at the peak."""

    cpu_ns: int
    peak_bytes: int


def _read(path: Path) -> str:
    """Returns a file of /proc, nothing once its process or thread has ended."""
    try:
        return path.read_text(errors="surrogateescape")  # a name in it can be of any bytes
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _after_name(stat: str) -> list[str]:
    """The fields after the name in brackets: state, parent and so on (proc_pid_stat(5))."""
    return stat.rpartition(")")[2].split()


def family(pid: int) -> list[Path]:
    """Returns the folders of a process and its descendants; a helper may have left its group."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _after_name(_read(folder / "stat"))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return [Path(f"/proc/{member}") for member in found]


def cpu_ns(folder: Path) -> int:
    """Returns what a process took so far, given its folder, and its children that ended."""
    # The first number is the time on a CPU in ns (Documentation/scheduler/sched-stats.rst).
    threads = [_read(thread / "schedstat").split() for thread in (folder / "task").glob("*")]
    # cutime and cstime, of children that have ended: a short window would otherwise lose what a
    # helper took that ends in it.
    ended = _after_name(_read(folder / "stat"))[13:15]
    return sum(int(t[0]) for t in threads if t) + sum(map(int, ended)) * _NS_PER_TICK


def _peak_bytes(folder: Path) -> int:
    lines = _read(folder / "status").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def use_of(pid: int) -> Use:
    """Returns what a process and its descendants used so far."""
    members = family(pid)
    return Use(sum(map(cpu_ns, members)), sum(map(_peak_bytes, members)))
