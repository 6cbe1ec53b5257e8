# SPDX-License-Identifier: Apache-2.0
"""speedscope's JSON file format, for www.speedscope.app or a local copy of it.

Source of the format: https://www.speedscope.app/file-format-schema.json (speedscope 1.25.0).

A file holds one `sampled` profile per process, or per thread; the one with the most time comes
first and is shown first. Weights are nanoseconds. Samples are summed stacks in the order of their
names, not in time: of speedscope's views, Left Heavy and Sandwich say what the picture means.

Frames are merged as in every report: Python's by line, all others by function. speedscope takes
frames of different lines for different frames, so a frame carries a line only where all samples of
what it stands for share one.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model import Profile
from aiflame.agent.reports.base import ReportOptions
from aiflame.agent.reports.rows import Labels, Rows, rows_for, showable
from aiflame.agent.reports.summed import summed_paths

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


class SpeedscopeReport:
    """Writes speedscope's JSON; see the module."""

    name = "speedscope"
    extension = ".speedscope.json"
    is_binary = False

    def render(self, profile: Profile, options: ReportOptions) -> bytes:
        """Return the file as ASCII JSON on one line."""
        rows = rows_for(profile, options)
        used = _FrameTable(rows, _only_lines(profile, rows.labels), profile)
        profiles = _profiles(profile, rows, options, used)
        recording = profile.recording
        document = {
            "$schema": _SCHEMA,
            "exporter": f"aiflame@{showable(recording.aiflame_version)}",
            "name": showable(options.title or f"{recording.target}: {options.view.label}"),
            "activeProfileIndex": 0,
            "shared": {"frames": used.frames},
            "profiles": profiles,
        }
        return json.dumps(document, separators=(",", ":")).encode() + b"\n"


class _FrameTable:
    """The shared frames: one per label in use, numbered as they first occur."""

    def __init__(self, rows: Rows, lines: npt.NDArray[np.int64], profile: Profile) -> None:
        self.frames: list[dict[str, Any]] = []
        self._ids: dict[int, int] = {}
        self._labels = rows.labels
        self._lines = lines
        self._functions = profile.functions

    def ids(self, labels: list[int]) -> list[int]:
        known = self._ids
        return [known[label] if label in known else self._add(label) for label in labels]

    def _add(self, label: int) -> int:
        frame: dict[str, Any] = {"name": self._labels.names[label]}
        function = int(self._labels.functions[label])
        if function >= 0 and self._functions[function].file:
            frame["file"] = showable(self._functions[function].file)
            if self._lines[label] > 0:
                frame["line"] = int(self._lines[label])
        self._ids[label] = len(self.frames)
        self.frames.append(frame)
        return self._ids[label]


def _only_lines(profile: Profile, labels: Labels) -> npt.NDArray[np.int64]:
    # The line of each label, 0 where it is unknown or there are several.
    of_frame = labels.of_frame
    lines = profile.frames["line"].astype(np.int64)
    lowest = np.full(len(labels), np.iinfo(np.int64).max, dtype=np.int64)
    highest = np.zeros(len(labels), dtype=np.int64)
    np.minimum.at(lowest, of_frame, lines)
    np.maximum.at(highest, of_frame, lines)
    return np.where(lowest == highest, highest, 0)


def _profiles(
    profile: Profile, rows: Rows, options: ReportOptions, frames: _FrameTable
) -> list[dict[str, Any]]:
    group = rows.thread.astype(np.int64)
    if not options.per_thread:
        group = np.array([t.process for t in profile.threads], dtype=np.int64)[group]
    # The process, and with per_thread the thread, name the profile instead of being its root.
    heads = 2 if options.per_thread else 1
    sums: dict[int, dict[tuple[int, ...], int]] = {}
    names: dict[int, str] = {}
    for entry in summed_paths(rows, group):
        names.setdefault(entry.group, _name(rows, entry.labels[:heads]))
        stacks = sums.setdefault(entry.group, {})
        path = tuple(entry.labels[heads:])
        stacks[path] = stacks.get(path, 0) + entry.ns
    order = sorted(sums, key=lambda g: (-sum(sums[g].values()), names[g], g))
    if not order:
        # speedscope refuses a file without profiles.
        return [_sampled("no samples", {}, frames)]
    return [_sampled(names[g], sums[g], frames) for g in order]


def _name(rows: Rows, heads: list[int]) -> str:
    return " / ".join(rows.labels.names[label] for label in heads)


def _sampled(name: str, stacks: dict[tuple[int, ...], int], frames: _FrameTable) -> dict[str, Any]:
    # Label ids are in the order of names, so this is the order of names level by level.
    paths = sorted(stacks)
    return {
        "type": "sampled",
        "name": name,
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": sum(stacks.values()),
        "samples": [frames.ids(list(path)) for path in paths],
        "weights": [stacks[path] for path in paths],
    }
