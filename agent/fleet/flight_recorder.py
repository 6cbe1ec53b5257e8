# SPDX-License-Identifier: Apache-2.0
"""The newest part of what an agent has recorded, read from its stretches while it records."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from aiflame.agent.capture.segment import BadSegment
from aiflame.agent.errors import AiflameError
from aiflame.agent.fleet.stretches import folders_of, kept_kernel_file
from aiflame.agent.model.profile import Process
from aiflame.agent.model.window import NO_TIME, Window
from aiflame.agent.processes import procfs
from aiflame.agent.sinks.segments import RecordedWindows

# When a recording began, by a clock that nobody sets, in ns since boot (CLOCK_MONOTONIC).
MONOTONIC_START_FACT = "started_monotonic_ns"

# Of a file that many processes have mapped, so many are asked for it.
_MAX_ROOTS = 8


class FlightRecorder:
    """The windows that end within some time before the newest one, whose end stays what it is.

    Stretches of an agent that ran before have other numbers for everything: they are not in it.
    Those of a clock that was set since are: where windows begin is counted from the recording's
    start, and facts are of the newest.

    Args:
        directory: Of the agent.
        last_ns: How much of the newest is wanted.

    Attributes:
        facts: Of the recording.
        stretches: How many stretches there are windows of.
        end_ns: Where the newest window ends, since the recording's start.

    Raises:
        AiflameError: Nothing is recorded yet.
    """

    def __init__(self, directory: Path, last_ns: int) -> None:
        self.facts: dict[str, str | int] = {}
        self.end_ns = 0
        found: dict[Path, int] = {}  # where each begins
        for folder in reversed(folders_of(directory)):
            try:
                windows = RecordedWindows(folder)
            except (BadSegment, OSError):  # it has no window yet, is damaged, or was removed
                continue
            if self.facts and recording_of(windows.facts) != recording_of(self.facts):
                break
            begin_ns = int(folder.name) - int(windows.facts["started_unix_ns"])
            # Names go by the clock: of one that was set back, they are not in order.
            if not found or begin_ns > max(found.values()):
                end_ns = _end_of(windows)
                if not end_ns:
                    continue
                self.facts, self.end_ns = windows.facts, end_ns
            found[folder] = begin_ns
        if not found:
            raise AiflameError("nothing is recorded yet", "ask again in some seconds")
        self._begin_ns = self.end_ns - last_ns
        begins_ns = [*sorted(found.values()), self.end_ns]
        folders = sorted(found, key=found.__getitem__)
        self._folders = [
            folder
            for folder, following_ns in zip(folders, begins_ns[1:], strict=True)
            if following_ns > self._begin_ns
        ]
        self.stretches = len(self._folders)

    def kept(self, binary: int) -> int | None:
        """Returns a descriptor of a file that stretches keep, by its number; None for none."""
        return kept_kernel_file(self._folders, binary)

    def __iter__(self) -> Iterator[Window]:
        windows = itertools.chain.from_iterable(map(_windows, self._folders))
        return (w for w in windows if self._begin_ns < w.end_ns <= self.end_ns)


def recording_of(facts: Mapping[str, str | int]) -> str | int:
    """Returns what tells the recordings of one host apart, given the facts of a stretch."""
    return facts.get(MONOTONIC_START_FACT, facts["started_unix_ns"])


def _end_of(windows: Iterable[Window]) -> int:
    """Returns where the newest window ends that can be read, 0 where none can."""
    end_ns = 0
    with suppress(OSError):
        for window in windows:
            end_ns = max(end_ns, window.end_ns)
    return end_ns


def _windows(folder: Path) -> Iterator[Window]:
    try:
        yield from RecordedWindows(folder)
    except (BadSegment, OSError):  # the agent has removed it: what is old goes
        return


class SeenProcesses:
    """The processes of windows, with where their files may still be.

    Attributes:
        processes: By number.
    """

    def __init__(self) -> None:
        self.processes: dict[int, Process] = {}
        self._mapping: dict[int, list[int]] = {}

    def add(self, window: Window) -> None:
        """Takes note of those of a window."""
        texts = window.texts
        cgroups = dict(window.cgroups[["cgroup", "path"]].tolist())
        for row in window.processes:
            exited_ns = int(row["exited_ns"])
            self.processes[int(row["process"])] = Process(
                pid=int(row["pid"]),
                parent_pid=int(row["parent_pid"]),
                name=texts[row["name"]],
                executable=texts[row["executable"]],
                command_line="",
                cgroup=texts[cgroups.get(int(row["cgroup"]), 0)],
                container_id="",
                started_ns=int(row["started_ns"]),
                exited_ns=None if exited_ns == NO_TIME else exited_ns,
            )
        for process, binary in np.unique(window.mappings[["process", "binary"]]).tolist():
            users = self._mapping.setdefault(binary, [])
            if process not in users:
                users.append(process)
                del users[:-_MAX_ROOTS]

    def roots(self, binary: int) -> Iterator[str]:
        """Yields root directories of live processes that have mapped a file, the newest first."""
        for number in reversed(self._mapping.get(binary, [])):
            process = self.processes[number]
            # A pid may be another's by now, which could show its own files for those of this one.
            is_there = process.exited_ns is None and process.cgroup
            if is_there and procfs.cgroups(process.pid).telling == process.cgroup:
                yield f"/proc/{process.pid}/root"
