# SPDX-License-Identifier: Apache-2.0
"""A host's profile in parts: they add up to the whole, and share nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.fleet.batches import batches_of
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.gpu import NONE
from aiflame.agent.model.profile import Profile
from aiflame.agent.sinks.rebuilt import capture_of_windows
from aiflame.gpu.attribution import attribution_of
from aiflame.gpu.attribution.kernel_times import attributed_times, measured_times
from device_profiles import (
    hostile_device_profile,
    small_device_profile,
    small_timed_profile,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import process, small_profile
from windows import RandomRecording

_FACTS: dict[str, str | int] = {
    "aiflame_version": "0",
    "started_unix_ns": 5,
    "period_ns": 10_000_000,
    "command": "aiflame agent",
    "target": "all",
}


def _frames(profile: Profile, stack: int) -> Hashable:
    """Returns all that is known of a stack, without numbers that differ between profiles."""
    if stack == NONE:
        return None
    stacks = profile.stacks
    rows = stacks.frames[int(stacks.offsets[stack]) : int(stacks.offsets[stack + 1])]
    found = []
    for row in profile.frames[rows].tolist():
        function = profile.functions[row[0]]
        binary = None if function.binary is None else profile.binaries[function.binary]
        found.append((replace(function, binary=None), binary, row[1:]))
    return tuple(found), int(stacks.ends[stack]), int(stacks.gil[stack])


def _kernel(profile: Profile, kernel: int) -> Hashable:
    if kernel == NONE:
        return None
    known = profile.gpu.kernels[kernel]
    return replace(known, process=0), profile.processes[known.process]


def _code(profile: Profile, code: int) -> Hashable:
    known = profile.gpu.codes[code]
    binary = None if known.binary is None else profile.binaries[known.binary]
    lines = {replace(i, code=0) for i in profile.gpu.instructions if i.code == code}
    return _kernel(profile, known.kernel), binary, known.size_bytes, frozenset(lines)


def _thread(profile: Profile, thread: int) -> Hashable:
    known = profile.threads[thread]
    return replace(known, process=0), profile.processes[known.process]


_NAMED = {"stack": _frames, "thread": _thread, "kernel": _kernel, "code": _code}


def _content(profile: Profile) -> dict[str, Counter[Hashable]]:
    """Returns the rows of all tables, with what they refer to in the place of its number."""
    gpu = profile.gpu
    assert gpu.attributed is not None or not len(gpu.samples)
    tables = {
        "samples": profile.samples,
        "waits": profile.waits,
        "calls": gpu.calls,
        "events": gpu.events,
        "launches": gpu.launches,
        "device samples": gpu.samples,
        "times": gpu.times,
    }
    found: dict[str, Counter[Hashable]] = {}
    of_row: dict[str, list[Hashable]] = {}
    for name, rows in tables.items():
        of_row[name] = [_row(profile, rows, row) for row in rows]
        found[name] = Counter(of_row[name])
    others = [("spans", profile.spans, "sample", "samples")]
    if gpu.attributed is not None and gpu.attributed_times is not None:
        others.append(("attributed", gpu.attributed, "sample", "device samples"))
        others.append(("attributed times", gpu.attributed_times, "time", "times"))
    for name, rows, field, table in others:
        words = [(of_row[table][int(row[field])], _row(profile, rows, row, field)) for row in rows]
        found[name] = Counter(words)
    found["threads"] = Counter(_thread(profile, each) for each in range(len(profile.threads)))
    found["codes"] = Counter(_code(profile, each) for each in range(len(gpu.codes)))
    return found


def _row(profile: Profile, rows: Any, row: Any, left_out: str = "") -> Hashable:
    words: list[Hashable] = []
    for name in rows.dtype.names:
        if name == left_out:
            continue
        value = row[name].tolist()
        words.append(_NAMED[name](profile, value) if name in _NAMED else repr(value))
    return tuple(words)


def _settled(profile: Profile) -> Profile:
    """Returns a profile with what attribution makes of the whole of it, if it is not there."""
    gpu = profile.gpu
    if gpu.attributed is not None:
        return profile
    attribution = attribution_of(gpu, measured_times(gpu))
    times = attributed_times(gpu)
    return replace(profile, gpu=replace(gpu, attributed=attribution.rows, attributed_times=times))


def _labels(count: int, groups: int) -> list[Labels]:
    return [Labels(service=f"s{number % groups}") for number in range(count)]


def _check(profile: Profile, labels: Sequence[Labels]) -> list[Batch]:
    """Divides a profile, and checks that nothing was lost, doubled or changed."""
    batches = [*batches_of(profile, labels)]
    whole = _content(_settled(profile))
    parts: dict[str, Counter[Hashable]] = {name: Counter() for name in whole}
    for batch in batches:
        for name, rows in _content(_settled(batch.profile)).items():
            parts[name] += rows
    for name in ("threads", "codes"):  # of processes with neither time nor samples
        assert not parts[name] - whole[name]
        del parts[name], whole[name]
    assert parts == whole
    for batch in batches:
        _check_alone(batch)
    return batches


def _check_alone(batch: Batch) -> None:
    """Checks that a batch mentions nothing that is not in it, and has nothing that it needs not."""
    profile = batch.profile
    stacks, gpu = profile.stacks, profile.gpu
    assert set(range(len(profile.frames))) == {*stacks.frames.tolist()}
    assert set(range(len(profile.functions))) == {*profile.frames["function"].tolist()}
    assert {thread.process for thread in profile.threads} <= set(range(len(profile.processes)))
    mentioned = [profile.samples, profile.waits, gpu.calls, gpu.launches, gpu.samples, gpu.times]
    used = {stack for rows in mentioned for stack in rows["stack"].tolist()} - {NONE}
    assert used <= set(range(len(stacks)))


@pytest.mark.parametrize("groups", [1, 2, 3])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
def test_parts_of_random_recordings_add_up(
    groups: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # GIVEN time on and off the CPU, waits, launches and device samples of some processes
    path = tmp_path_factory.mktemp("capture") / "run.aiflame"
    windows = RandomRecording(seed).windows(3)
    capture_of_windows(path, windows, _FACTS, with_names=False)
    profile = read_capture(path)
    # WHEN it is divided THEN the parts are the whole, row by row,
    batches = _check(profile, _labels(len(profile.processes), groups))
    # AND so are their sums.
    for name in ("ns", "count"):
        assert sum(int(b.profile.samples[name].sum()) for b in batches) == int(
            profile.samples[name].sum()
        )
    assert sum(int(b.profile.gpu.samples["count"].sum()) for b in batches) == int(
        profile.gpu.samples["count"].sum()
    )


@pytest.mark.parametrize(
    "profile",
    [small_profile(), small_device_profile(), hostile_device_profile(), small_timed_profile()],
    ids=["small", "device", "hostile", "timed"],
)
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_parts_of_known_profiles_add_up(profile: Profile, groups: int) -> None:
    batches = _check(profile, _labels(len(profile.processes), groups))
    assert 1 <= len(batches) <= groups
    assert {batch.begin_unix_ns for batch in batches} == {profile.recording.started_unix_ns}
    assert {batch.duration_ns for batch in batches} == {profile.recording.duration_ns}


def test_who_has_nothing_has_no_part() -> None:
    # GIVEN a process that did nothing, beside one that did
    profile = small_profile()
    idle = process(4000, "idle")
    profile = replace(profile, processes=(*profile.processes, idle))
    labels = [*_labels(len(profile.processes) - 1, 1), Labels(service="idle")]
    assert [batch.labels.service for batch in batches_of(profile, labels)] == ["s0"]


def test_who_is_left_out_is_in_no_part() -> None:
    whole = small_profile()
    labels = [None, *_labels(len(whole.processes) - 1, 1)]
    shown = [process.pid for b in batches_of(whole, labels) for process in b.profile.processes]
    assert whole.processes[0].pid not in shown and shown


def test_a_large_host_is_divided_soon() -> None:
    # GIVEN 300 services, each a process
    whole = small_profile()
    count = 300
    many = replace(
        whole,
        processes=whole.processes * count,
        threads=tuple(
            replace(thread, process=thread.process + number * len(whole.processes))
            for number in range(count)
            for thread in whole.threads
        ),
        samples=np.tile(whole.samples, count),
        spans=whole.spans[:0],
        waits=whole.waits[:0],
    )
    threads = np.repeat(np.arange(count), len(whole.samples)) * len(whole.threads)
    many.samples["thread"] += threads.astype(np.uint32)
    batches = [*batches_of(many, _labels(len(many.processes), len(many.processes)))]
    assert sum(int(b.profile.samples["ns"].sum()) for b in batches) == count * int(
        whole.samples["ns"].sum()
    )
