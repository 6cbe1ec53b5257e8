# SPDX-License-Identifier: Apache-2.0
"""The facts about the machine that a figure is worth nothing without."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from bench.tools import PY_SPY

_LOOK_S = 1.0

# Where bpftrace and perf look for tracepoints (Documentation/trace/ftrace.rst). The second one is
# there where debugfs is mounted.
_TRACEFS = Path("/sys/kernel/tracing")
_TRACEFS_IN_DEBUGFS = Path("/sys/kernel/debug/tracing")


class NoTracefs(Exception):
    """There are no tracepoints for the tools to compare with."""


def provide_tracefs() -> None:
    """Mounts tracefs where nobody has: systemd does, a container or a small machine does not.

    Raises:
        NoTracefs: It cannot be mounted.
    """
    if any((folder / "events").exists() for folder in (_TRACEFS, _TRACEFS_IN_DEBUGFS)):
        return
    command = ["mount", "-t", "tracefs", "tracefs", str(_TRACEFS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = done.stderr.strip().partition("\n")[0]
        raise NoTracefs(f"bpftrace and perf need {_TRACEFS}, and it cannot be mounted: {why}")
    print(f"mounted {_TRACEFS}, which bpftrace and perf need", file=sys.stderr)


def _first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip().splitlines()[0]


def _os_release(key: str) -> str:
    lines = Path("/etc/os-release").read_text().splitlines()
    return next((line.split("=", 1)[1].strip('"') for line in lines if line.startswith(key)), "?")


def _cpuinfo(key: str) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def busy_share(before: list[int], after: list[int]) -> float:
    """Returns the busy share of all CPUs between two "cpu" lines of /proc/stat, 0 to 1.

    The fourth and fifth column are idle and waiting for I/O (Documentation/filesystems/proc.rst).
    """
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return 1 - (spent[3] + spent[4]) / max(sum(spent[:8]), 1)


def _ticks() -> list[int]:
    return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]


def facts() -> str:
    """Returns them as a Markdown list; takes a second to see what else runs."""
    before = _ticks()
    time.sleep(_LOOK_S)
    busy = busy_share(before, _ticks())
    memory_kb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024
    is_virtual = "hypervisor" in _cpuinfo("flags").split()
    has_pmu = any(
        (device / "cpumask").exists() or device.name in ("cpu", "cpu_core", "armv8_pmuv3_0")
        for device in Path("/sys/bus/event_source/devices").glob("cpu*")
    )
    lines = [
        f"{os.cpu_count()} CPUs, {_cpuinfo('model name') or platform.machine()},"
        f" {memory_kb / 2**20:.0f} GB,"
        f" {'a virtual machine' if is_virtual else 'bare metal'},"
        f" {'with' if has_pmu else 'without'} a hardware PMU",
        f"Linux {platform.release()} {platform.machine()}, {_os_release('PRETTY_NAME')}",
        f"CPython {platform.python_version()}, {_first_line('bpftrace', '--version')},"
        f" {_first_line('perf', '--version')}, {_first_line(PY_SPY, '--version')}",
        f"before the start, others kept the CPUs {100 * busy:.0f} % busy",
    ]
    return "".join(f"- {line}\n" for line in lines)
