#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stacks of waits by chance, within a budget, against those of all waits: cost, and what differs.

Two services in cgroups of their own switch often (switches.c). Two recordings take them at once,
one of which has a budget. Whoever is attached first sees a thread leave its CPU before the other
has walked its stack: each round has them in the other order.

    sudo .venv/bin/python tests/bench/chance.py --seconds 300 --rounds 2 .venv/bin/aiflame
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aiflame.agent.processes.targets import cgroup2_mounts
from bench import loads
from bench.kernel import Runs, bpf_stats, programs
from bench.tools import HERE
from cgroups import made_groups

_GROUPS = ("aiflame-bench/one", "aiflame-bench/other")
_LARGEST = 10
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a recording has found, and what its programs took.

    Attributes:
        by_group: Time off the CPU by process, in ns; each is in a cgroup of its own.
        by_stack: The same by stack.
        cost: Of all programs, of one CPU.
        switches: A second.
    """

    by_group: Counter[str]
    by_stack: Counter[str]
    cost: float
    switches: float


class _Recording:
    """A recording of both services, attached when this is made."""

    def __init__(self, aiflame: str, pids: Sequence[int], budget: float | None, folder: Path):
        self.capture = folder / f"{budget}.aiflame"
        self._aiflame = aiflame
        self._log = folder / f"{budget}.log"
        options = () if budget is None else ("--off-cpu-budget", str(budget))
        words = (aiflame, "record", "-p", ",".join(map(str, pids)), "--gpu", "none", *options)
        with self._log.open("w") as log:
            command = [*words, "--force", "-o", str(self.capture)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until_s = time.monotonic() + _PATIENCE_S
        while "attached:" not in self._log.read_text():
            if time.monotonic() > until_s or self._process.poll() is not None:
                raise TimeoutError(self._log.read_text())
            time.sleep(0.1)

    def runs(self) -> dict[int, Runs]:
        """Returns what its programs did so far."""
        return programs(self._process.pid)

    def seen(self, before: dict[int, Runs], after: dict[int, Runs], seconds: float) -> _Seen:
        """Waits for its end; returns what it has found of the last seconds."""
        self._process.wait(_PATIENCE_S)
        folded = self.capture.with_suffix(".folded")
        # They began one after the other, and end with the services.
        words = ("--view", "offcpu", "--last", str(int(seconds)), "--force", "-o", str(folded))
        command = [self._aiflame, "report", str(self.capture), "-f", "folded", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        by_stack = Counter[str]()
        for line in folded.read_text().splitlines():
            stack, _, ns = line.rpartition(" ")
            by_stack[stack] += int(ns)
        by_group = Counter[str]()
        for stack, own_ns in by_stack.items():
            by_group[stack.partition(";")[0]] += own_ns
        after = {at: runs for at, runs in after.items() if at in before}  # loaded meanwhile
        run_ns = sum(runs.run_time_ns - before[at].run_time_ns for at, runs in after.items())
        of_switches = (at for at, runs in after.items() if runs.name == "on_switch")
        switches = sum(after[at].run_count - before[at].run_count for at in of_switches)
        return _Seen(by_group, by_stack, run_ns / 1e9 / seconds, switches / seconds)


def _round(arguments: argparse.Namespace, program: Path, *, is_budget_first: bool) -> list[_Seen]:
    """Records once; returns what was seen with the budget, and without."""
    budgets = [arguments.budget, None] if is_budget_first else [None, arguments.budget]
    with ExitStack() as parts:
        groups = parts.enter_context(made_groups(cgroup2_mounts()[0], *_GROUPS))
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        script = 'echo $$ > "$1/cgroup.procs" && exec "$2" "$3"'
        command = ("sh", "-c", script, "sh")
        services = [
            parts.enter_context(
                loads.Load((*command, str(group), str(program), str(arguments.seconds)))
            )
            for group in groups
        ]
        pids = [service.pid for service in services]
        recordings = {
            budget: _Recording(arguments.program, pids, budget, folder) for budget in budgets
        }
        for service in services:
            service.go()
        time.sleep(arguments.warm)
        before, began_s = {b: each.runs() for b, each in recordings.items()}, time.monotonic()
        time.sleep(arguments.seconds - 2 * arguments.warm)
        after, took_s = {b: each.runs() for b, each in recordings.items()}, time.monotonic()
        return [
            recordings[budget].seen(before[budget], after[budget], took_s - began_s)
            for budget in (arguments.budget, None)
        ]


def _differences(by_chance: Counter[str], all_of_it: Counter[str], keys: Sequence[str]) -> str:
    return ", ".join(f"{100 * (by_chance[key] / all_of_it[key] - 1):+.2f} %" for key in keys)


def main() -> None:
    """Prints what each round has found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="`aiflame`")
    parser.add_argument("--budget", type=float, default=3, help="percent of one CPU")
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=float, default=10, help="seconds before it is measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, bpf_stats(True):
        program = Path(folder) / "switches"
        source = str(HERE / "switches.c")
        subprocess.run(["gcc", *loads.FLAGS, "-pthread", "-o", str(program), source], check=True)
        for turn in range(arguments.rounds):
            capped, full = _round(arguments, program, is_budget_first=turn % 2 == 0)
            print(
                f"round {turn + 1}, {'budget' if turn % 2 == 0 else 'all'} attached first,"
                f" {os.cpu_count()} CPUs: {full.switches:,.0f} switches a second; programs"
                f" {100 * capped.cost:.2f} % of one CPU with a budget of {arguments.budget:g} %,"
                f" {100 * full.cost:.2f} % with all stacks"
            )
            groups = sorted(full.by_group)
            print(f"    by cgroup: {_differences(capped.by_group, full.by_group, groups)}")
            stacks = [stack for stack, _ in full.by_stack.most_common(_LARGEST)]
            share = sum(full.by_stack[stack] for stack in stacks) / full.by_stack.total()
            print(
                f"    the {_LARGEST} largest of {len(full.by_stack)} stacks, {100 * share:.0f} %"
                f" of all: {_differences(capped.by_stack, full.by_stack, stacks)}"
            )


if __name__ == "__main__":
    main()
