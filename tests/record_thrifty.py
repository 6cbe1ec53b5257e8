# SPDX-License-Identifier: Apache-2.0
"""Records one process, half of all and one on-CPU sample in four; says what it has, in JSON.

Arguments: its pid and seconds.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import ProgramOptions
from aiflame.agent.model.window import Window
from aiflame.agent.processes.targets import target_of_pids
from aiflame.agent.recording.chance import Chances, Load
from aiflame.agent.recording.foundation import Foundation
from aiflame.agent.recording.recorder import Recorder
from aiflame.agent.recording.signals import StopSignals

_PERIOD_NS = 1_001_001
_ONE_IN = 4


class _Thrifty:
    """Steers so from beginning to end."""

    def first(self) -> Chances:
        return Chances(1, samples_one_in=_ONE_IN, thrift=2)

    def next(self, load: Load) -> Chances:
        assert load.own_cpu_ns > 0
        return self.first()

    def duties(self) -> dict[int, float]:
        return {}

    def take_said(self) -> list[str]:
        return []


def main() -> None:
    pid, seconds = int(sys.argv[1]), float(sys.argv[2])
    options = ProgramOptions(abi.Filter.PIDS, _PERIOD_NS, calls=False, by_chance=True)
    found = Counter[str]()

    def take(window: Window) -> None:
        rows = window.samples[window.samples["kind"] == 0]
        found["waits"] += len(window.waits)
        found["samples"] += int(rows["count"].sum())
        found["sampled_ns"] += int(rows["weight_ns"].sum())
        found["on_cpu_ns"] += int(window.thread_times["on_cpu_ns"].sum())
        for row in window.losses:
            found[window.texts[int(row["name"])]] += int(row["count"])

    with (
        StopSignals() as signals,
        Foundation(options) as foundation,
        Recorder(target_of_pids([pid]), foundation, signals, steers=_Thrifty()) as recorder,
    ):
        recorder.start(int(seconds * 1e9), lambda _: None)
        recorder.run(take, lambda _: None)
        recorder.stop(take)
        recorder.finish(take)
    print(json.dumps({**found, "period_ns": _PERIOD_NS, "one_in": _ONE_IN}))


if __name__ == "__main__":
    main()
