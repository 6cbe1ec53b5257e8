# SPDX-License-Identifier: Apache-2.0
"""Records one process, a part of all, of its samples and its waits; says what it has, in JSON.

Arguments: its pid and seconds; how many times less is done, and of how many samples, and of how
many waits, one is taken.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict

from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import ProgramOptions
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import Window, check, check_wall
from aiflame.agent.processes.targets import target_of_pids
from aiflame.agent.recording.chance import Chances, Load
from aiflame.agent.recording.foundation import Foundation
from aiflame.agent.recording.recorder import Recorder
from aiflame.agent.recording.signals import StopSignals

_PERIOD_NS = 1_001_001


class _Thrifty:
    """Steers so from beginning to end.

    Attributes:
        stacks: How many waits took a stack.
    """

    def __init__(self, thrift: int, samples_one_in: int, one_in: int) -> None:
        self._chances = Chances(
            *(one_in, {}, 128_000_000_000), samples_one_in=samples_one_in, thrift=thrift
        )
        self.stacks = 0

    def first(self) -> Chances:
        return self._chances

    def next(self, load: Load) -> Chances:
        assert load.own_cpu_ns > 0
        self.stacks += load.stacks
        return self._chances

    def duties(self) -> dict[int, float]:
        return {}

    def accounted_ns(self) -> int:
        return 0

    def take_said(self) -> list[str]:
        return []


class _Found:
    """Counts, and the time of waits by name of the thread and leaf of the stack, "" for none."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.blocked: dict[str, Counter[str]] = defaultdict(Counter)
        self._names: dict[int, str] = {}

    def take(self, window: Window) -> None:
        check(window)
        check_wall(window)
        is_on_cpu = window.samples["kind"] == SampleClass.ON_CPU
        rows = window.samples[is_on_cpu]
        self.counts["waits"] += len(window.waits)
        self.counts["samples"] += int(rows["count"].sum())
        self.counts["sampled_ns"] += int(rows["weight_ns"].sum())
        self.counts["on_cpu_ns"] += int(window.thread_times["on_cpu_ns"].sum())
        for row in window.losses:
            self.counts[window.texts[int(row["name"])]] += int(row["count"])
        for row in window.threads:
            self._names[int(row["thread"])] = window.texts[int(row["name"])]
        stacks = {int(row["stack"]): row for row in window.stacks}
        for row in window.samples[window.samples["kind"] == SampleClass.BLOCKED]:
            stack = stacks[int(row["stack"])]
            leaf = ""
            if stack["stop_reason"] != StopReason.NOT_SAMPLED and stack["user_depth"]:
                leaf = str(window.addresses[int(stack["first"] + stack["kernel_depth"])][0])
            self.blocked[self._names[int(row["thread"])]][leaf] += int(row["weight_ns"])


def main() -> None:
    pid, seconds = int(sys.argv[1]), float(sys.argv[2])
    steers = _Thrifty(*map(int, sys.argv[3:]))
    options = ProgramOptions(abi.Filter.PIDS, _PERIOD_NS, calls=False, by_chance=True)
    found = _Found()
    with (
        StopSignals() as signals,
        Foundation(options) as foundation,
        Recorder(target_of_pids([pid]), foundation, signals, steers=steers) as recorder,
    ):
        recorder.start(int(seconds * 1e9), lambda _: None)
        recorder.run(found.take, lambda _: None)
        recorder.stop(found.take)
        recorder.finish(found.take)
    counts = {**found.counts, "period_ns": _PERIOD_NS, "stacks": steers.stacks}
    print(json.dumps({"counts": counts, "blocked": found.blocked}))


if __name__ == "__main__":
    main()
