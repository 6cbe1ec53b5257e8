# SPDX-License-Identifier: Apache-2.0
"""Nanoseconds per event, by the kernel's own count: aiflame's programs beside bpftrace's.

Both tools see the same load with the same stacks, one after the other. The first window of each is
thrown away: in it the stacks are new.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import loads, tools
from bench.kernel import Window, bpf_stats, watch
from bench.table import Aim, Table, code, spread
from bench.tools import Running, Tool

# Enough for the median to be steady: 5 x 0.5 s are some 500 samples, or half a million switches.
_WINDOWS = 5
_WINDOW_S = 0.5
_WARM_UP_S = 0.5

# All of bpftrace's but the clock of its "live" line; the names differ between versions.
THEIR_PROGRAM = r"(?!200|interval)"

_FOREIGN_AIM_NS = 200.0

_INTRO = f"""\
Nanoseconds by the kernel's own count (`kernel.bpf_stats_enabled=1`): median (least-most) of
{_WINDOWS} windows of {_WINDOW_S} s. Each tool in turn sees the same load with the same stacks.
What the kernel adds outside the programs is not in it: bpftrace's script is on a tracepoint, for
which the kernel also formats a record; aiflame's programs are on raw tracepoints, for which it does
not. bpftrace has no program for wake-ups: its off-CPU time is blocked and waiting to run in one."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One load, seen by both tools."""

    what: str
    load: tuple[tuple[str, ...], ...]
    ours: Tool
    theirs: Tool
    our_program: str = "on_switch"
    has_wakeups: bool = True
    is_foreign: bool = False


def windows(tool: Tool, folder: Path) -> list[Window]:
    """Watches a tool's programs while it records; the first moment is left out."""
    with Running(tool, folder) as running:
        time.sleep(_WARM_UP_S)
        return [watch(running.pid, _WINDOW_S) for _ in range(_WINDOWS)]


def ns_of(seen: Sequence[Window], *programs: str) -> list[float]:
    """Returns the nanoseconds of a run of these programs together, in each window that had one."""
    values = [window.ns_per_run(*programs) for window in seen]
    return [value for value in values if value is not None]


def _cases(busy: Path, idle_pid: int) -> list[_Case]:
    depth, cpu = loads.DEPTH, loads.last_cpu()
    spin = (str(busy), "loop", str(depth))
    turns = (str(busy), "turns", str(depth), "0", str(cpu))
    pipe = loads.sched_pipe(10**9)
    on_cpu, everything = tools.bpftrace("oncpu.bt"), tools.aiflame("-a")
    return [
        _Case(
            f"sample, {depth} user frames",
            (spin, spin),
            tools.aiflame("-a", "--no-off-cpu"),
            on_cpu,
            "on_cpu_sample",
            has_wakeups=False,
        ),
        _Case(
            f"switch, {depth} user frames",
            (turns,),
            everything,
            tools.bpftrace("offcpu.bt", 0),
        ),
        _Case(
            "switch, `perf bench sched pipe`",
            (pipe,),
            everything,
            tools.bpftrace("offcpu.bt", 0),
        ),
        _Case(
            "foreign switch, `perf bench sched pipe`",
            (pipe,),
            tools.aiflame("-p", idle_pid),
            tools.bpftrace("offcpu.bt", idle_pid),
            is_foreign=True,
        ),
    ]


def _rows(case: _Case, ours: list[Window], theirs: list[Window]) -> list[tuple[str, ...]]:
    our_ns, their_ns = ns_of(ours, case.our_program), ns_of(theirs, THEIR_PROGRAM)
    commands = f"{code(case.ours.words)}, {code(case.theirs.words)}"
    rows = [(case.what, spread(our_ns, 0), spread(their_ns, 0), commands)]
    if case.has_wakeups:
        both_ns = ns_of(ours, case.our_program, "on_waking")
        rows.append(("the same, with its wake-up", spread(both_ns, 0), "", ""))
    return rows


def _aims(case: _Case, ours: list[Window], theirs: list[Window]) -> list[Aim]:
    our_ns = statistics.median(ns_of(ours, case.our_program))
    if case.is_foreign:
        return [Aim(case.what, our_ns, _FOREIGN_AIM_NS, "ns")]
    their_ns = statistics.median(ns_of(theirs, THEIR_PROGRAM))
    whole_ns = statistics.median(ns_of(ours, case.our_program, "on_waking"))
    return [Aim(f"{case.what}, below bpftrace's", whole_ns, their_ns, "ns")]


def measure(busy: Path, folder: Path) -> list[Table]:
    """Measures all cases."""
    rows: list[tuple[str, ...]] = []
    aims: list[Aim] = []
    with bpf_stats(True), loads.background(("sleep", "600")) as idle:
        for case in _cases(busy, idle[0]):
            with loads.background(*case.load):
                ours, theirs = windows(case.ours, folder), windows(case.theirs, folder)
            rows += _rows(case, ours, theirs)
            aims += _aims(case, ours, theirs)
    columns = ("event", "aiflame, ns", "bpftrace, ns", "commands")
    return [Table("Cost of an event", _INTRO, columns, rows, aims)]
