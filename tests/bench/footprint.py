# SPDX-License-Identifier: Apache-2.0
"""What the recorder itself takes while two CPUs are busy and switch 20,000 times a second."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from bench import loads, tools
from bench.events import THEIR_PROGRAM
from bench.kernel import bpf_stats, watch
from bench.table import Aim, Table, code
from bench.tools import Running, Tool
from bench.usage import use_of

_SECONDS, _THEIR_SECONDS = 10.0, 5.0
_US_BETWEEN_SWITCHES = 92  # and the switch itself: 10,000 a second on each of two CPUs

_CPU_AIM_PCT, _MEMORY_AIM_MB = 1.0, 60.0

_INTRO = f"""\
Two pairs of processes, each pair on a CPU of its own; one of the two computes for
{_US_BETWEEN_SWITCHES} us, {loads.DEPTH} calls deep, and hands over to the other. Over
{_SECONDS:.0f} s ({_THEIR_SECONDS:.0f} s for the others) from the moment that the tool is live:
CPU is that of all its threads and processes, from /proc/PID/task/*/schedstat; the programs' is
what the kernel counts for them, paid by the threads that are recorded. Memory is resident (RSS),
the peaks of its processes added up."""


@dataclass(frozen=True, slots=True)
class _Seen:
    cpu_pct: float
    memory_mb: float
    programs_pct: float
    switches_per_s: float


def _watch(tool: Tool, program: str, seconds: float, folder: Path) -> _Seen:
    with Running(tool, folder) as running:
        before, start_s = use_of(running.pid), time.monotonic()
        window = watch(running.pid, seconds)
        after, end_s = use_of(running.pid), time.monotonic()
    return _Seen(
        (after.cpu_ns - before.cpu_ns) / 1e7 / (end_s - start_s),
        after.peak_bytes / 1e6,
        100 * window.cpu_share,
        window.per_second(program),
    )


def _row(tool: Tool, seen: _Seen) -> tuple[str, ...]:
    counted = seen.switches_per_s > 0  # perf has no programs
    return (
        code(tool.words),
        f"{seen.cpu_pct:.2f}",
        f"{seen.memory_mb:.0f}",
        f"{seen.programs_pct:.1f}" if counted else "not counted",
        f"{seen.switches_per_s:,.0f}" if counted else "not counted",
    )


def measure(busy: Path, folder: Path) -> list[Table]:
    """Measures aiflame and, for the same load, bpftrace and perf."""
    cpus = range(max(loads.last_cpu() - 1, 0), loads.last_cpu() + 1)
    turns = (str(busy), "turns", str(loads.DEPTH), str(_US_BETWEEN_SWITCHES))
    pairs = [(*turns, str(cpu)) for cpu in cpus]
    ours = tools.aiflame("-a")
    rows, aims = [], []
    with bpf_stats(True), loads.background(*pairs):
        seen = _watch(ours, "on_switch", _SECONDS, folder)
        aims += [
            Aim("the recorder's CPU", seen.cpu_pct, _CPU_AIM_PCT, "% of one CPU"),
            Aim("the recorder's memory", seen.memory_mb, _MEMORY_AIM_MB, "MB"),
        ]
        rows.append(_row(ours, seen))
        for theirs in (
            tools.bpftrace("offcpu.bt", 0),
            tools.perf("-e", "sched:sched_switch", "-a", "-g"),
        ):
            seen = _watch(theirs, THEIR_PROGRAM, _THEIR_SECONDS, folder)
            rows.append(_row(theirs, seen))
    columns = ("tool", "CPU, % of one", "memory, MB", "programs, % of one CPU", "switches/s")
    return [Table("The recorder itself", _INTRO, columns, rows, aims)]
