# SPDX-License-Identifier: Apache-2.0
"""speedscope's JSON file format, for www.speedscope.app or a local copy of it.

Source of the format: https://www.speedscope.app/file-format-schema.json (speedscope 1.25.0).

A file holds one `sampled` profile per process, or per thread; the one with the most time comes
first and is shown first. Weights are nanoseconds. Device samples follow as profiles of their own,
whose weights are counts, and GPU time, in nanoseconds again; `--view gpu` has the former only, and
`--view gputime` the latter. speedscope colours frames by their file, so the leaf of a sample's
stack has its stall category for one. Samples are summed stacks in the order of their names, not in
time: of speedscope's views, Left Heavy and Sandwich say what the flame graph means.

Frames are merged as in every report: Python's by line, all others by function. speedscope takes
frames of different lines for different frames, so a frame carries a line only where all samples of
what it stands for share one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.base import ReportOptions, View
from aiflame.agent.reports.device_rows import device_rows, device_samples
from aiflame.agent.reports.device_times import device_times, time_rows
from aiflame.agent.reports.facts import range_words
from aiflame.agent.reports.merge import first_alike, merged
from aiflame.agent.reports.rows import Labels, Rows, rows_for
from aiflame.agent.reports.summed import summed_paths
from aiflame.agent.reports.words import process_label, showable
from aiflame.gpu.stalls import StallCategory

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


class SpeedscopeReport:
    """Writes speedscope's JSON; see the module."""

    name = "speedscope"
    extension = ".speedscope.json"
    is_binary = False

    def render(self, profile: Profile, options: ReportOptions) -> bytes:
        """Return the file as ASCII JSON on one line."""
        used = _FrameTable(profile)
        profiles = _time_profiles(profile, options, used)
        if len(profile.gpu.samples) and options.view is not View.GPU_TIME:
            profiles += _device_profiles(profile, options, used)
        if len(profile.gpu.times) and options.view is not View.GPU:
            profiles += _gpu_time_profiles(profile, options, used)
        if not profiles:
            # speedscope refuses a file without profiles.
            profiles = [_sampled("no samples", [], [], "nanoseconds")]
        recording = profile.recording
        when = "" if recording.time_range is None else f", {range_words(recording)}"
        document = {
            "$schema": _SCHEMA,
            "exporter": f"aiflame@{showable(recording.aiflame_version)}",
            "name": showable(options.title or f"{recording.target}: {options.view.label}{when}"),
            "activeProfileIndex": 0,
            "shared": {"frames": used.frames},
        }
        return f'{_json(document)[:-1]},"profiles":[{",".join(profiles)}]}}\n'.encode()


class _FrameTable:
    """The shared frames, numbered as they first occur."""

    def __init__(self, profile: Profile) -> None:
        self.frames: list[dict[str, Any]] = []
        self._profile = profile
        self._leaves: dict[tuple[str, str], int] = {}

    def of(self, labels: Labels) -> Callable[[int], str]:
        """Return what gives the number of the frame of a label, as JSON has it."""
        return _Numbers(self, labels, _only_lines(self._profile, labels)).__getitem__

    def number(self, labels: Labels, label: int, line: int) -> int:
        """Return the number of a frame that is used for the first time."""
        function = int(labels.functions[label])
        file = self._profile.functions[function].file if function >= 0 else ""
        return self._add(labels.names[label], showable(file) if file else "", line if file else 0)

    def leaf(self, name: str, category: str) -> int:
        """Return the number of a frame that has a stall category for its file."""
        key = (name, category)
        if key not in self._leaves:
            self._leaves[key] = self._add(name, category, 0)
        return self._leaves[key]

    def _add(self, name: str, file: str, line: int) -> int:
        frame: dict[str, Any] = {"name": name}
        if file:
            frame["file"] = file
        if line:
            frame["line"] = line
        self.frames.append(frame)
        return len(self.frames) - 1


class _Numbers(dict[int, str]):
    """The number of the frame of each label, given when it is first asked for."""

    def __init__(self, frames: _FrameTable, labels: Labels, lines: npt.NDArray[np.int64]) -> None:
        super().__init__()
        self._frames, self._labels, self._lines = frames, labels, lines

    def __missing__(self, label: int) -> str:
        self[label] = str(self._frames.number(self._labels, label, int(self._lines[label])))
        return self[label]


def _only_lines(profile: Profile, labels: Labels) -> npt.NDArray[np.int64]:
    # The line of each label, 0 where it is unknown or there are several.
    of_frame = labels.of_frame
    lines = profile.frames["line"].astype(np.int64)
    lowest = np.full(len(labels), np.iinfo(np.int64).max, dtype=np.int64)
    highest = np.zeros(len(labels), dtype=np.int64)
    np.minimum.at(lowest, of_frame, lines)
    np.maximum.at(highest, of_frame, lines)
    return np.where(lowest == highest, highest, 0)


def _time_profiles(profile: Profile, options: ReportOptions, frames: _FrameTable) -> list[str]:
    if options.view.is_of_devices:
        return []
    rows = rows_for(profile, options)
    frame = frames.of(rows.labels)
    group = rows.thread.astype(np.int64)
    if not options.per_thread:
        first = first_alike(merged(profile, options.merge))
        group = first[np.array([t.process for t in profile.threads], dtype=np.int64)][group]
    # The process, and with per_thread the thread, name the profile instead of being its root.
    heads = 2 if options.per_thread else 1
    sums: dict[int, dict[tuple[int, ...], int]] = {}
    names: dict[int, str] = {}
    for entry in summed_paths(rows, group):
        if entry.group not in names:
            names[entry.group] = _name(rows, entry.labels[:heads])
        stacks = sums.setdefault(entry.group, {})
        path = tuple(entry.labels[heads:])
        stacks[path] = stacks.get(path, 0) + entry.ns
    order = sorted(sums, key=lambda g: (-sum(sums[g].values()), names[g], g))
    # Label ids are in the order of names, so this is the order of names level by level.
    made = []
    for g in order:
        stacks = sums.pop(g)
        paths = sorted(stacks)
        numbers = [f"[{','.join(map(frame, path))}]" for path in paths]
        made.append(_sampled(names[g], [stacks[path] for path in paths], numbers, "nanoseconds"))
    return made


def _device_profiles(profile: Profile, options: ReportOptions, frames: _FrameTable) -> list[str]:
    samples = device_samples(profile)
    rows = device_rows(profile, replace(options, view=View.GPU), samples).rows
    frame = frames.of(rows.labels)
    n_categories = len(StallCategory)
    shown = merged(profile, options.merge)
    process_of = first_alike(shown)[samples.process]
    sums: dict[int, dict[tuple[int, ...], int]] = {}
    for entry in summed_paths(rows, process_of * n_categories + samples.category):
        process, category = divmod(entry.group, n_categories)
        stacks = sums.setdefault(process, {})
        path = (*entry.labels[1:], category)
        stacks[path] = stacks.get(path, 0) + entry.ns
    made = []
    for process in sorted(sums, key=lambda p: (-sum(sums[p].values()), p)):
        numbers = []
        paths = sorted(sums[process])
        for *above, last, category in paths:
            leaf = frames.leaf(rows.labels.names[last], StallCategory(category).label)
            numbers.append(f"[{','.join([*map(frame, above), str(leaf)])}]")
        found = shown.processes[process]
        name = f"{process_label(found.name, found.pid)}, device samples"
        made.append(_sampled(name, [sums[process][path] for path in paths], numbers, "none"))
    return made


def _gpu_time_profiles(profile: Profile, options: ReportOptions, frames: _FrameTable) -> list[str]:
    times = device_times(profile)
    rows = time_rows(profile, options, times).rows
    frame = frames.of(rows.labels)
    shown = merged(profile, options.merge)
    sums: dict[int, dict[tuple[int, ...], int]] = {}
    for entry in summed_paths(rows, first_alike(shown)[times.process]):
        stacks = sums.setdefault(entry.group, {})
        path = tuple(entry.labels[1:])
        stacks[path] = stacks.get(path, 0) + entry.ns
    made = []
    for process in sorted(sums, key=lambda p: (-sum(sums[p].values()), p)):
        paths = sorted(sums[process])
        numbers = [f"[{','.join(map(frame, path))}]" for path in paths]
        found = shown.processes[process]
        name = f"{process_label(found.name, found.pid)}, {View.GPU_TIME.label}"
        made.append(_sampled(name, [sums[process][path] for path in paths], numbers, "nanoseconds"))
    return made


def _name(rows: Rows, heads: list[int]) -> str:
    return " / ".join(rows.labels.names[label] for label in heads)


def _sampled(name: str, weights: list[int], stacks: list[str], unit: str) -> str:
    # One profile, as JSON; `stacks` are those that weigh so much, as JSON, leaf last.
    head = {
        "type": "sampled",
        "name": name,
        "unit": unit,
        "startValue": 0,
        "endValue": sum(weights),
    }
    return f'{_json(head)[:-1]},"samples":[{",".join(stacks)}],"weights":{_json(weights)}}}'


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
