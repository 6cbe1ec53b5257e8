# SPDX-License-Identifier: Apache-2.0
"""A load without and with each tool in turn, and what can be said of the pairs.

Each round runs A B1 A B2 A ..., and every B is compared with the mean of the two A beside it: a
machine that drifts slows both. Each round begins with another tool.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.table import spread
from bench.tools import Running, Tool
from bench.usage import use_of

# The least share of cases in which an interval is to hold the median.
_COVERAGE = 0.95


# The first seconds are those of new stacks and names; aiflame fetches once a second, and three of
# these are seen.
_SETTLE_S, _WATCH_S = 2.0, 3.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a load: seconds of its work.

    `cpu_s` is the CPU time of the load's process, NaN where it does not measure that.
    """

    wall_s: float
    cpu_s: float = math.nan


# Makes a tool for the pid of a load.
ToolFor = Callable[[int], Tool]

# Runs a load once, under a tool if one is given.
RunUnder = Callable[[ToolFor | None], Run]


def order(tools: int, rounds: int) -> list[int]:
    """Returns which tool runs when, of all rounds."""
    return [(at + turn) % tools for turn in range(rounds) for at in range(tools)]


def ratios(runs: Sequence[float], tools: Sequence[int]) -> list[list[float]]:
    """Returns the ratios of each tool, from runs in the order A B A B A; `tools` says which B."""
    found: list[list[float]] = [[] for _ in range(max(tools) + 1)]
    for turn, tool in enumerate(tools):
        before, with_tool, after = runs[2 * turn : 2 * turn + 3]
        found[tool].append(with_tool / ((before + after) / 2))
    return found


@dataclass(frozen=True, slots=True)
class Pairs:
    """All pairs of one tool: ratios of wall-clock and of CPU time."""

    wall: list[float]
    cpu: list[float]


def measure_pairs(run: RunUnder, tools: Sequence[ToolFor], rounds: int) -> list[Pairs]:
    """Runs all rounds; returns the pairs of each tool."""
    turns = order(len(tools), rounds)
    runs = [run(None)]
    for tool in turns:
        runs += [run(tools[tool]), run(None)]
    wall = ratios([one.wall_s for one in runs], turns)
    cpu = ratios([one.cpu_s for one in runs], turns)
    return [Pairs(*one) for one in zip(wall, cpu, strict=True)]


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU of a tool and all that descends from it, while its load works."""

    start_s: float  # seconds until it has settled, its own start included
    then_pct: float  # of one CPU, after that
    behind_s: float | None = None  # how late its samples are at the end, where it says so

    def cells(self) -> tuple[str, str, str]:
        """Cells of a table; COST_COLUMNS stands above them."""
        behind = "" if self.behind_s is None else f"{self.behind_s:.1f}"
        return f"{self.start_s:.2f}", f"{self.then_pct:.1f}", behind


COST_COLUMNS = ("tool's CPU at first, s", "then, % of one", "behind, s")
COST_INTRO = f"""\
The tool's CPU is that of its threads and processes, in a run of its own: what it took to start and
in its first {_SETTLE_S:.0f} s, in which all stacks are new, then over {_WATCH_S:.0f} s. Behind: by
how many of these {_SETTLE_S + _WATCH_S:.0f} s its samples are late, where a tool prints that: it
takes fewer of them than it was asked for."""


def seconds_behind(said: str) -> float | None:
    """Returns the last "1.05s behind in sampling" of what py-spy printed."""
    found = re.findall(r"([0-9.]+)s behind in sampling", said)
    return float(found[-1]) if found else None


def cost_of(tool: Tool, folder: Path) -> Cost:
    """Returns what a tool takes; its load is at work, and stays so."""
    with Running(tool, folder) as running:
        time.sleep(_SETTLE_S)
        before, before_s = use_of(running.pid), time.monotonic()
        time.sleep(_WATCH_S)
        after, after_s = use_of(running.pid), time.monotonic()
    then_ns = after.cpu_ns - before.cpu_ns
    return Cost(
        before.cpu_ns / 1e9,
        then_ns / 1e7 / (after_s - before_s),
        seconds_behind(running.said),
    )


def spread_or_blank(values: Sequence[float]) -> str:
    """Returns "median (least-most)", or nothing where a load does not measure it."""
    return "" if any(map(math.isnan, values)) else spread(values)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the narrowest pair of order statistics that holds the median in 95 % of cases.

    The number of values below the median is binomial with one half, whatever their distribution.

    Raises:
        ValueError: There are fewer than six values: not even the least and the most suffice.
    """
    count, outside, at = len(values), 0.0, 0
    while True:
        outside += 2 * math.comb(count, at) / 2**count
        if 1 - outside < _COVERAGE:
            break
        at += 1
    if not at:
        raise ValueError(f"no interval from {count} values")
    ranked = sorted(values)
    return ranked[at - 1], ranked[count - at]


def with_interval(values: Sequence[float]) -> str:
    """Returns "median [low-high] (least-most)"."""
    low, high = median_interval(values)
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.3f} [{low:.3f}-{high:.3f}] ({least:.3f}-{most:.3f})"
