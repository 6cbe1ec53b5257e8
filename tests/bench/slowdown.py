# SPDX-License-Identifier: Apache-2.0
"""How much slower a program runs while it is recorded; see pairs.py for how runs are compared.

The kernel's own counting is off meanwhile, since it costs time itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import loads, tools
from bench.kernel import bpf_stats
from bench.loads import Load
from bench.pairs import (
    COST_COLUMNS,
    COST_INTRO,
    Cost,
    Run,
    RunUnder,
    ToolFor,
    cost_of,
    measure_pairs,
    spread_or_blank,
)
from bench.table import Table, code, spread
from bench.tools import Running

_ROUNDS = 5

# About half a second each; start and stop of the tools take longer.
_PIPE_LOOPS = 100_000
_SPIN_STEPS = 2_000_000_000
_PYTHON_ROUNDS = 800

# For as long as somebody looks.
_ENDLESS_ROUNDS = 10**9

_INTRO = f"""\
Wall-clock time of the load with the tool, divided by the time without it: median (least-most)
of {_ROUNDS} pairs; 1.000 is no slow-down. The same of the load's own CPU time, where it measures
that: time for which a tool has stopped it is not in there. The load is held on one CPU, the tool
runs where it likes.

{COST_INTRO}"""

# Stands for any pid where a command is shown.
_SOME_PID = 99


@dataclass(frozen=True, slots=True)
class _Case:
    """A load and the tools for it.

    `run` runs the load once, under a tool if one is given; `costs` returns what the tools take.
    """

    what: str
    run: RunUnder
    tools: tuple[ToolFor, ...]
    costs: Callable[[Sequence[ToolFor]], list[Cost]] | None = None


def _rows(case: _Case) -> list[tuple[str, ...]]:
    measured = measure_pairs(case.run, case.tools, _ROUNDS)
    costs = [cost.cells() for cost in case.costs(case.tools)] if case.costs else None
    return [
        (
            "" if at else case.what,
            spread(pairs.wall),
            spread_or_blank(pairs.cpu),
            *(costs[at] if costs else ("" for _ in COST_COLUMNS)),
            code(case.tools[at](_SOME_PID).words),
        )
        for at, pairs in enumerate(measured)
    ]


def _pipe(folder: Path) -> RunUnder:
    def run(tool: ToolFor | None) -> Run:
        if tool is None:
            return Run(loads.pipe_seconds(_PIPE_LOOPS))
        with Running(tool(_SOME_PID), folder):
            return Run(loads.pipe_seconds(_PIPE_LOOPS))

    return run


def _load(folder: Path, command: Sequence[str]) -> RunUnder:
    def run(tool: ToolFor | None) -> Run:
        with Load(command) as load:
            if tool is None:
                return Run(*load.times())
            with Running(tool(load.pid), folder):
                return Run(*load.times())

    return run


def _python_costs(folder: Path) -> Callable[[Sequence[ToolFor]], list[Cost]]:
    def costs(chosen: Sequence[ToolFor]) -> list[Cost]:
        with Load(_calls(_ENDLESS_ROUNDS)) as load:
            load.go()
            return [cost_of(tool(load.pid), folder) for tool in chosen]

    return costs


def _calls(rounds: int) -> tuple[str, ...]:
    return loads.pinned(loads.PYTHON, tools.HERE / "calls.py", rounds)


def _cases(busy: Path, folder: Path, idle_pid: int) -> list[_Case]:
    everything: ToolFor = lambda _: tools.aiflame("-a")  # noqa: E731 - one of a row
    spin = loads.pinned(busy, "spin", loads.DEPTH, _SPIN_STEPS)
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
            _load(folder, _calls(_PYTHON_ROUNDS)),
            (
                lambda pid: tools.aiflame("-p", pid, "-F", 99),
                lambda pid: tools.py_spy(pid, "-r", 99, "-o", "bench.svg"),
                lambda pid: tools.perf("-F", "99", "-g", "-p", pid),
                lambda pid: tools.aiflame("-p", pid, "-F", 499),
                lambda pid: tools.py_spy(pid, "-r", 499, "-o", "bench.svg"),
            ),
            _python_costs(folder),
        ),
    ]


def measure(busy: Path, folder: Path) -> list[Table]:
    """Measures all cases."""
    with bpf_stats(False), loads.background(("sleep", "900")) as idle:
        rows = [row for case in _cases(busy, folder, idle[0]) for row in _rows(case)]
    columns = ("load", "wall-clock time", "its CPU time", *COST_COLUMNS, "tool")
    return [Table("Slow-down", _INTRO, columns, rows)]
