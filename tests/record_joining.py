# SPDX-License-Identifier: Apache-2.0
"""Records a cgroup until it is told to end, and joins short-lived processes; says what was there.

Arguments: the cgroup's directory, and of those in it that are known. Says "attached" once it
records, and at last in JSON times by cgroup and process, how many processes there were in each, the
command lines of all, and losses. Each window's time on and off the CPU is all that threads had.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import ProgramOptions
from aiflame.agent.model.window import Window, check, check_wall
from aiflame.agent.processes.targets import target_of_cgroup
from aiflame.agent.recording.chance import Chances, Load
from aiflame.agent.recording.foundation import Foundation
from aiflame.agent.recording.recorder import Recorder
from aiflame.agent.recording.signals import StopSignals

_PERIOD_NS = 52_631_579


class _Joins:
    """Steers so from beginning to end."""

    def __init__(self, known: Sequence[str]) -> None:
        self.joined = 0
        self._known = {Path(folder).stat().st_ino: 1 for folder in known}

    def first(self) -> Chances:
        return Chances(1, self._known, details_after_ns=1_000_000_000)

    def next(self, load: Load) -> Chances:
        self.joined += load.joined
        return self.first()

    def duties(self) -> dict[int, float]:
        return {}

    def accounted_ns(self) -> int:
        return 0

    def take_said(self) -> list[str]:
        return []


class _Seen:
    """Processes, their times by cgroup and name, and losses, over all windows."""

    def __init__(self) -> None:
        self.names: dict[int, tuple[str, str]] = {}
        self.commands: dict[int, str] = {}
        self.processes: dict[int, int] = {}
        self.times: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        self.losses: Counter[str] = Counter()

    def take(self, window: Window) -> None:
        check(window)
        check_wall(window)
        texts = window.texts
        paths = {int(row["cgroup"]): texts[int(row["path"])] for row in window.cgroups}
        for row in window.processes:
            path = paths.get(int(row["cgroup"]), "")
            self.names[int(row["process"])] = path.rpartition("/")[2], texts[int(row["name"])]
            self.commands[int(row["process"])] = texts[int(row["command_line"])]
        for row in window.threads:
            self.processes[int(row["thread"])] = int(row["process"])
        for row in window.samples:
            if row["kind"] != 0:
                self._of(row["thread"])["off_ns"] += int(row["weight_ns"])
        for row in window.thread_times:
            for name in ("on_cpu_ns", "observed_ns"):
                self._of(row["thread"])[name] += int(row[name])
        for row in window.losses:
            self.losses[texts[int(row["name"])]] += int(row["count"])

    def _of(self, thread: int) -> Counter[str]:
        group, name = self.names[self.processes[int(thread)]]
        return self.times[group][name]


def main() -> None:
    options = ProgramOptions(abi.Filter.CGROUP, _PERIOD_NS, calls=False, by_chance=True)
    seen, steers = _Seen(), _Joins(sys.argv[2:])
    with (
        StopSignals() as signals,
        Foundation(options) as foundation,
        Recorder(
            target_of_cgroup(Path(sys.argv[1])), foundation, signals, steers=steers
        ) as recorder,
    ):
        recorder.start(None, lambda _: None)
        print("attached", flush=True)
        recorder.run(seen.take, lambda _: None)
        recorder.stop(seen.take)
        recorder.finish(seen.take)
    processes = Counter(group for group, _ in seen.names.values())
    found = {"times": seen.times, "processes": processes, "losses": seen.losses}
    commands = sorted(seen.commands.values())
    print(json.dumps({**found, "commands": commands, "load": steers.joined}))


if __name__ == "__main__":
    main()
