# SPDX-License-Identifier: Apache-2.0
"""Records the whole host but some cgroups, and says what became of whom, in JSON.

Arguments: seconds, then the cgroups' directories, and with "path:" before it what paths are of
groups of v1. With "late" as the first of these, they are excluded once there is a line on standard
input, which it waits for in any case; with "back", recorded again then. Run times of
programs are there while kernel.bpf_stats_enabled is 1, which the caller switches.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import ProgramOptions
from aiflame.agent.model.window import Window
from aiflame.agent.processes.targets import target_of_all
from aiflame.agent.recording.foundation import Foundation
from aiflame.agent.recording.recorder import Recorder
from aiflame.agent.recording.signals import StopSignals

_PERIOD_NS = 1_001_001
_PATH = "path:"


class _Seen:
    """Times of processes and losses, over all windows."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.threads: dict[int, int] = {}
        self.times: dict[int, Counter[str]] = defaultdict(Counter)
        self.losses: Counter[str] = Counter()

    def take(self, window: Window) -> None:
        for row in window.processes:
            self.pids[int(row["process"])] = int(row["pid"])
        for row in window.threads:
            self.threads[int(row["thread"])] = int(row["process"])
        for row in window.samples:
            kind = "on" if row["kind"] == 0 else "off"
            self._of(row["thread"])[f"{kind}_ns"] += int(row["weight_ns"])
        for row in window.thread_times:
            for name in ("on_cpu_ns", "observed_ns"):
                self._of(row["thread"])[name] += int(row[name])
        for row in window.losses:
            name = window.texts[int(row["name"])]
            self.losses[name] += int(row["count"])
            self.losses[f"{name}_ns"] += int(row["thread_ns"])

    def _of(self, thread: int) -> Counter[str]:
        return self.times[self.pids[self.threads[int(thread)]]]


def main() -> None:
    seconds, *words = sys.argv[1:]
    when = words.pop(0) if words[:1] in (["late"], ["back"]) else ""
    paths = {word.removeprefix(_PATH) for word in words if word.startswith(_PATH)}
    ids = {Path(word).stat().st_ino for word in words if not word.startswith(_PATH)}
    options = ProgramOptions(abi.Filter.ALL, _PERIOD_NS, calls=False, excluded_max=64)
    seen = _Seen()
    target = target_of_all()
    with (
        StopSignals() as signals,
        Foundation(options) as foundation,
        Recorder(target, foundation, signals) as recorder,
    ):
        if when != "late":
            assert recorder.exclude(ids) == 0
            recorder.leave_out(paths)
        recorder.start(int(float(seconds) * 1e9), lambda _: None)
        print("attached", flush=True)
        sys.stdin.readline()
        before = foundation.programs.costs()["on_switch"]
        if when == "late":
            recorder.exclude(ids)
            recorder.leave_out(paths)
        elif when == "back":
            recorder.exclude(())
            recorder.leave_out(())
        recorder.run(seen.take, lambda _: None)
        after = foundation.programs.costs()["on_switch"]
        recorder.stop(seen.take)
        recorder.finish(seen.take)
    runs = after.run_count - before.run_count
    answer = {
        "times": seen.times,
        "losses": seen.losses,
        "switch_runs": runs,
        "switch_ns": (after.run_time_ns - before.run_time_ns) / max(runs, 1),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
