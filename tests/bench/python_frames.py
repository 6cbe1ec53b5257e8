# SPDX-License-Identifier: Apache-2.0
"""What a sample costs that has Python frames, by the kernel's own count."""

from __future__ import annotations

import os
from pathlib import Path

from bench import loads, tools
from bench.events import ns_of, windows
from bench.kernel import bpf_stats
from bench.table import Aim, Table, spread

_DEPTHS = (10, 60)
_AIM_DEPTH, _AIM_NS = 60, 12_000.0

_INTRO = """\
Nanoseconds of a sample of a Python program by the kernel's own count: native frames by unwind
tables and Python frames by the interpreter's own chain, in one invocation. In the first column the
calls go from Python to Python; in the second each goes through a C function (`sorted`), so that
there are as many calls of the eval loop as Python frames."""

_PROGRAM = """
def down(n):
    if n:
        return {call}
    while True:
        pass
down({depth} - 2)
"""
_CALLS = {"Python to Python": "down(n - 1)", "through C": "sorted([n - 1], key=down)"}


def _row(depth: int, folder: Path) -> tuple[tuple[str, ...], list[Aim]]:
    figures = []
    for call in _CALLS.values():
        load = (loads.PYTHON, "-c", _PROGRAM.format(call=call, depth=depth))
        # One a CPU: ticks of others, which cost next to nothing, would be counted as well.
        with loads.background(*[load] * (os.cpu_count() or 1)) as pids:
            tool = tools.aiflame("-p", ",".join(map(str, pids)), "--no-off-cpu", "-F", 499)
            figures.append(ns_of(windows(tool, folder), "on_cpu_sample"))
    middle = sorted(figures[0])[len(figures[0]) // 2]
    words = f"sample, {depth} Python frames"
    aims = [Aim(words, middle, _AIM_NS, "ns")] if depth == _AIM_DEPTH else []
    return (f"{depth}", *(spread(values, 0) for values in figures)), aims


def measure(busy: Path, folder: Path) -> list[Table]:
    """Measures samples of Python programs."""
    rows, aims = [], []
    with bpf_stats(True):
        for depth in _DEPTHS:
            row, more = _row(depth, folder)
            rows.append(row)
            aims += more
    columns = ("Python frames", *(f"{call}, ns" for call in _CALLS))
    return [Table("A sample of Python", _INTRO, columns, rows, aims)]
