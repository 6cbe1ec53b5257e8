# SPDX-License-Identifier: Apache-2.0
"""How much slower a program runs while it is recorded.

Each round runs the load without and with each tool in turn, A B1 A B2 A ..., and compares every B
with the mean of the two A beside it: a machine that drifts slows both. The kernel's own counting is
off meanwhile, since it costs time itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import loads, tools
from bench.kernel import bpf_stats
from bench.loads import Load
from bench.table import Table, code, spread
from bench.tools import Running, Tool

_ROUNDS = 5

# About half a second each; start and stop of the tools take longer.
_PIPE_LOOPS = 100_000
_SPIN_STEPS = 2_000_000_000
_PYTHON_ROUNDS = 800

_INTRO = f"""\
Wall-clock time of the load with the tool, divided by the time without it: median (least-most)
of {_ROUNDS} pairs. 1.000 is no slow-down. The load is held on one CPU, the tool runs where it
likes."""


# Stands for any pid where a command is shown.
_SOME_PID = 99

# Makes a tool for the pid of a load.
_ToolFor = Callable[[int], Tool]


@dataclass(frozen=True, slots=True)
class _Case:
    """A load and the tools for it; `seconds` runs it once, under a tool if one is given."""

    what: str
    seconds: Callable[[_ToolFor | None], float]
    tools: tuple[_ToolFor, ...]


def ratios(runs: Sequence[float], tools_in_turn: int) -> list[list[float]]:
    """Returns the ratios of each tool, from runs in the order A B1 A B2 A B1 A B2 A."""
    with_tool = [
        b / ((before + after) / 2)
        for before, b, after in zip(runs[0::2], runs[1::2], runs[2::2], strict=False)
    ]
    return [with_tool[at::tools_in_turn] for at in range(tools_in_turn)]


def _rows(case: _Case) -> list[tuple[str, ...]]:
    runs = [case.seconds(None)]
    for _ in range(_ROUNDS):
        for tool in case.tools:
            runs += [case.seconds(tool), case.seconds(None)]
    return [
        (case.what if tool is case.tools[0] else "", spread(values), code(tool(_SOME_PID).words))
        for tool, values in zip(case.tools, ratios(runs, len(case.tools)), strict=True)
    ]


def _pipe(folder: Path) -> Callable[[_ToolFor | None], float]:
    def seconds(tool: _ToolFor | None) -> float:
        if tool is None:
            return loads.pipe_seconds(_PIPE_LOOPS)
        with Running(tool(_SOME_PID), folder):
            return loads.pipe_seconds(_PIPE_LOOPS)

    return seconds


def _load(folder: Path, command: Sequence[str]) -> Callable[[_ToolFor | None], float]:
    def seconds(tool: _ToolFor | None) -> float:
        with Load(command) as load:
            if tool is None:
                return load.seconds()
            with Running(tool(load.pid), folder):
                return load.seconds()

    return seconds


def _cases(busy: Path, folder: Path, idle_pid: int) -> list[_Case]:
    everything: _ToolFor = lambda _: tools.aiflame("-a")  # noqa: E731 - one of a row
    spin = loads.pinned(busy, "spin", loads.DEPTH, _SPIN_STEPS)
    calls = loads.pinned(loads.PYTHON, tools.HERE / "calls.py", _PYTHON_ROUNDS)
    return [
        _Case(
            "`perf bench sched pipe`",
            _pipe(folder),
            (
                lambda _: tools.aiflame("-p", idle_pid),
                everything,
                lambda _: tools.bpftrace("offcpu.bt", idle_pid),
                lambda _: tools.bpftrace("offcpu.bt", 0),
                lambda _: tools.perf("-e", "sched:sched_switch", "-a", "-g"),
                lambda _: tools.perf("-F", "99", "-a", "-g"),
            ),
        ),
        _Case(
            "a loop in C",
            _load(folder, spin),
            (
                everything,
                lambda _: tools.bpftrace("oncpu.bt"),
                lambda _: tools.perf("-F", "99", "-a", "-g"),
            ),
        ),
        _Case(
            "calls in Python",
            _load(folder, calls),
            (
                lambda pid: tools.aiflame("-p", pid),
                lambda pid: tools.py_spy(pid, "-r", 99, "-o", "bench.svg"),
                lambda pid: tools.perf("-F", "99", "-g", "-p", pid),
            ),
        ),
    ]


def measure(busy: Path, folder: Path) -> list[Table]:
    """Measures all cases."""
    with bpf_stats(False), loads.background(("sleep", "900")) as idle:
        rows = [row for case in _cases(busy, folder, idle[0]) for row in _rows(case)]
    return [Table("Slow-down", _INTRO, ("load", "with / without", "tool"), rows)]
