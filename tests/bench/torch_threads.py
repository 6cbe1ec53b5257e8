# SPDX-License-Identifier: Apache-2.0
"""How much slower a program of 160 threads that call PyTorch runs while it is recorded.

Needs an interpreter that has PyTorch: name one in AIFLAME_BENCH_TORCH. Without, there is nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bench import loads, tools
from bench.kernel import bpf_stats
from bench.loads import Load
from bench.pairs import (
    COST_COLUMNS,
    COST_INTRO,
    Cost,
    Pairs,
    Run,
    ToolFor,
    cost_of,
    measure_pairs,
    with_interval,
)
from bench.table import Table, code
from bench.tools import Running

_THREADS = 160
# About a second; the tools take longer to start and to stop.
_LAPS = 10
# The interval of the median leaves out the least and the most of nine.
_ROUNDS = 9
# Until the unwind tables of PyTorch are in the cache on disk.
_WARM_UP_S = 5
_RATES_HZ = (99, 499)

# Stands for any pid where a command is shown.
_SOME_PID = 99

# For as long as somebody looks at four tools.
_MANY_ROUNDS = 200

_INTRO = f"""\
A process of {_THREADS} threads, four of which work at a time, in turn; the work of a run is fixed.
With the tool divided by without: median [interval that holds it in 95 % of cases] (least-most) of
{_ROUNDS} pairs, of wall-clock time and of the process's own CPU time; where a tool stops the
process to look at it, only the first shows it. The load is held on one CPU, the tool runs where it
likes.

{COST_INTRO}"""


def _ours(rate_hz: int) -> ToolFor:
    return lambda pid: tools.aiflame("-p", pid, "-F", rate_hz)


def _theirs(rate_hz: int) -> ToolFor:
    return lambda pid: tools.py_spy(pid, "-r", rate_hz, "-o", "bench.svg")


def _warm(load: Load, folder: Path) -> None:
    with Running(tools.aiflame("-p", load.pid, "-d", _WARM_UP_S), folder) as running:
        running.wait()


def _pairs(command: Sequence[str], chosen: Sequence[ToolFor], folder: Path) -> list[Pairs]:
    with Load(command) as load:
        _warm(load, folder)

        def run(tool: ToolFor | None) -> Run:
            if tool is None:
                return Run(*load.times())
            with Running(tool(load.pid), folder):
                return Run(*load.times())

        return measure_pairs(run, chosen, _ROUNDS)


def _costs(command: Sequence[str], chosen: Sequence[ToolFor], folder: Path) -> list[Cost]:
    with Load(command) as load:
        for _ in range(_MANY_ROUNDS):
            load.go()
        return [cost_of(tool(load.pid), folder) for tool in chosen]


def measure(busy: Path, folder: Path) -> list[Table]:
    """Measures aiflame and py-spy, each at both rates; no table where there is no PyTorch."""
    del busy
    torch = os.environ.get("AIFLAME_BENCH_TORCH")
    if torch is None:
        return []
    command = loads.pinned(torch, tools.HERE / "batons.py", _THREADS, _LAPS)
    chosen = [make(rate_hz) for rate_hz in _RATES_HZ for make in (_ours, _theirs)]
    with bpf_stats(False):
        measured = zip(
            chosen,
            _pairs(command, chosen, folder),
            _costs(command, chosen, folder),
            strict=True,
        )
    rows: list[tuple[str, ...]] = [
        (
            with_interval(pairs.wall),
            with_interval(pairs.cpu),
            *cost.cells(),
            code(tool(_SOME_PID).words),
        )
        for tool, pairs, cost in measured
    ]
    columns = ("wall-clock time", "the process's CPU time", *COST_COLUMNS, "tool")
    return [Table(f"Slow-down of {_THREADS} threads of PyTorch", _INTRO, columns, rows)]
