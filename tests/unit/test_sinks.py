# SPDX-License-Identifier: Apache-2.0
"""Sinks, given recordings of which everything is known."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.segment import BadSegment
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.errors import DiskFull
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import Profile, SampleClass, StopReason
from aiflame.agent.model.window import (
    COLUMNS,
    MADE_STACKS,
    NONE,
    Window,
    check,
    concatenate,
    rows_of,
)
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from aiflame.agent.sinks.capture import CaptureSink
from aiflame.agent.sinks.rebuilt import capture_of_windows
from aiflame.agent.sinks.segments import (
    FollowedWindows,
    JitSymbolSink,
    RecordedWindows,
    SegmentSink,
    are_segments,
)
from aiflame.agent.symbolize.stacks import NamedStack, UnnamedStack
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import FACTS, RandomRecording, same_windows


def _captured(windows: list[Window]) -> Profile:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "run.aiflame"
        writer = CaptureWriter(path)
        sink = CaptureSink(writer)
        for window in windows:
            sink.put(window)
        facts = {"duration_ns": sink.end_ns, "recorder_cpu_ns": 0, "recorder_peak_rss_bytes": 0}
        writer.put_meta({**FACTS, **facts})
        writer.commit()
        writer.close()
        return read_capture(path)


def _times(profile: Profile) -> dict[tuple[Any, ...], tuple[int, int]]:
    """Count and time by stack, thread and class, as a reader sees it."""
    found: dict[tuple[Any, ...], tuple[int, int]] = {}
    for row in profile.samples:
        frames = profile.stacks.frames[slice(*profile.stacks.offsets[row["stack"] :][:2])].tolist()
        names = tuple(profile.functions[profile.frames["function"][frame]].name for frame in frames)
        key = (names, profile.threads[row["thread"]].tid, int(row["klass"]))
        count, ns = found.get(key, (0, 0))
        found[key] = (count + int(row["count"]), ns + int(row["ns"]))
    return found


def _threads(profile: Profile) -> list[tuple[int, int, int]]:
    return sorted((t.tid, t.on_cpu_ns, t.observed_ns) for t in profile.threads)


def _waits(profile: Profile) -> list[tuple[int, ...]]:
    waits = profile.waits[["thread", "start_ns", "blocked_ns", "runnable_ns"]].tolist()
    return sorted((profile.threads[thread].tid, *times) for thread, *times in waits)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6))
def test_a_capture_says_the_same_however_the_recording_was_cut(seed: int, count: int) -> None:
    cut, whole = (
        _captured(RandomRecording(seed).windows(count)),
        _captured(RandomRecording(seed).cut([])),
    )
    assert _times(cut) == _times(whole)
    assert _threads(cut) == _threads(whole)
    assert _waits(cut) == _waits(whole)
    assert [process.name for process in cut.processes] == [p.name for p in whole.processes]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6))
def test_a_capture_has_the_time_that_windows_have(seed: int, count: int) -> None:
    windows = RandomRecording(seed).windows(count)
    profile, whole = _captured(windows), concatenate(windows)
    for kind in SampleClass:
        chosen = profile.samples["klass"] == kind
        of_kind = whole.samples["kind"] == kind
        assert profile.samples["ns"][chosen].sum() == whole.samples["weight_ns"][of_kind].sum()
    assert int(profile.gpu.samples["count"].sum()) == int(whole.device_samples["count"].sum())
    launches = whole.launches["count"].sum() + whole.calls["count"].sum()
    assert int(profile.gpu.calls["count"].sum()) == int(launches)


def _builder() -> WindowBuilder:
    builder = WindowBuilder(Bounds())
    builder.define("processes", rows_of("processes", (0, 7, 1, 7, 0, 0, -1, NONE, 0, 0, 0)))
    builder.define("threads", rows_of("threads", (0, 0, 8, 0)))
    return builder


def _define_stack(
    builder: WindowBuilder,
    stack: int,
    *,
    is_late: bool = False,
    reason: StopReason = StopReason.ROOTED,
) -> None:
    row = (stack, 0, 0, 0, 0, 1, reason, 0, False, NONE, 0)
    addresses = np.array([0x1234], "<u8").view(COLUMNS["addresses"].dtype)
    builder.define("stacks", rows_of("stacks", row), addresses, is_late=is_late)


def test_windows_of_any_length_give_each_second_what_was_in_it() -> None:
    # GIVEN a thread that always runs, and windows of seconds or less that end whenever they do
    builder, windows = _builder(), []
    _define_stack(builder, 99)
    ends_ms = [1_000, 2_900, 5_000, 5_400, 9_600, 14_600, 15_600, 16_700, 20_000]
    for begin_ms, end_ms in itertools.pairwise([0, *ends_ms]):
        ns = (end_ms - begin_ms) * 1_000_000
        builder.add("samples", rows_of("samples", (99, 0, SampleClass.ON_CPU, 7, ns)))
        windows.append(builder.close(end_ms * 1_000_000, is_last=end_ms == 20_000))
    profile = _captured(windows)
    # THEN each second has a second of it
    by_second = [0] * 20
    for _, first_s, seconds, _, ns in profile.spans.tolist():
        for second in range(first_s, first_s + seconds):
            by_second[second] += ns
    assert [round(ns / 1e6) for ns in by_second] == [1_000] * 20
    assert sum(by_second) == 20 * 10**9


def test_a_stack_that_comes_late_is_not_lost() -> None:
    # GIVEN a sample whose stack comes after its window was closed, and nothing mentions it again
    builder = _builder()
    builder.add("samples", rows_of("samples", (99, 0, SampleClass.ON_CPU, 4, 40)))
    first = builder.close(1000)
    assert first.stacks["stop_reason"].tolist() == [StopReason.LOST]
    _define_stack(builder, 99, is_late=True)
    profile = _captured([first, builder.close(2000, is_last=True)])
    ((key, value),) = _times(profile).items()
    assert key == (("[native 0x1234]",), 8, 0)
    assert value == (4, 40)


def test_a_stack_that_is_walked_on_has_one_row() -> None:
    builder, windows = _builder(), []
    for at, reason in enumerate((StopReason.NO_TABLE_YET, StopReason.ROOTED)):
        _define_stack(builder, 99, is_late=at > 0, reason=reason)
        builder.add("samples", rows_of("samples", (99, 0, SampleClass.ON_CPU, 4, 40)))
        windows.append(builder.close(1000 * (at + 1), is_last=at > 0))
    profile = _captured(windows)
    assert profile.stacks.ends.tolist() == [StopReason.ROOTED]
    assert [*_times(profile).values()] == [(8, 80)]


class _Namer:
    """Names nothing, and keeps what it is asked for."""

    def __init__(self) -> None:
        self.seen: list[UnnamedStack] = []

    def name(self, window: Window, stacks: Sequence[UnnamedStack]) -> list[NamedStack]:
        self.seen += stacks
        return [NamedStack(stack.stop_reason, b"", 0) for stack in stacks]


def test_a_wait_that_is_walked_late_is_told_again_as_one() -> None:
    # GIVEN an open wait, and its whole stack in a window that has none of its time
    builder, made = _builder(), MADE_STACKS << 32 | 1
    builder.add("samples", rows_of("samples", (made, 0, SampleClass.BLOCKED, 0, 40)))
    windows = []
    for depth, reason in ((1, StopReason.NO_TABLE_YET), (2, StopReason.ROOTED_BY_TABLE)):
        row = (made, 0, 0, 0, 0, depth, reason, 0, False, NONE, 0)
        addresses = np.arange(depth, dtype="<u8").view(COLUMNS["addresses"].dtype)
        builder.define("stacks", rows_of("stacks", row), addresses, is_late=bool(windows))
        windows.append(builder.close(1000 * depth))
    namer = _Namer()
    with tempfile.TemporaryDirectory() as name:
        writer = CaptureWriter(Path(name) / "run.aiflame")
        sink = CaptureSink(writer, namer=namer)
        for window in (*windows, builder.close(3000)):
            sink.put(window)
        writer.close()
    # THEN it is named twice, each time without what tracing a switch adds to it.
    assert [len(stack.addresses) for stack in namer.seen] == [8, 16]
    assert [stack.is_from_switch for stack in namer.seen] == [True, True]


def test_a_wait_is_one_row_in_the_second_in_which_it_ended() -> None:
    builder = _builder()
    _define_stack(builder, 5)
    windows = []
    for second in range(4):
        ends = second == 2
        if second < 3:
            row = (5, 0, SampleClass.BLOCKED, int(ends), 300 if ends else 1_000_000_000)
            builder.add("samples", rows_of("samples", row))
        windows.append(builder.close((second + 1) * 1_000_000_000, is_last=second == 3))
    profile = _captured(windows)
    assert profile.samples[["count", "ns"]].tolist() == [(1, 2_000_000_300)]


def test_a_wait_that_never_ended_is_one_row_at_the_end() -> None:
    builder = _builder()
    _define_stack(builder, 5)
    builder.add("samples", rows_of("samples", (5, 0, SampleClass.BLOCKED, 0, 77)))
    profile = _captured([builder.close(100), builder.close(200, is_last=True)])
    assert profile.samples[["count", "ns"]].tolist() == [(1, 77)]


def test_a_wait_that_outlasts_a_capture_is_in_the_seconds_in_which_it_was(tmp_path: Path) -> None:
    # GIVEN three seconds and a half of a thread that sleeps in them all, then waits for a CPU
    builder = _builder()
    _define_stack(builder, 5)
    second_ns, windows = 1_000_000_000, []
    for second in range(4):
        kinds = {SampleClass.BLOCKED: second_ns}
        if second == 3:
            kinds = {SampleClass.BLOCKED: 200_000_000, SampleClass.WAITING_TO_RUN: 300_000_000}
        for kind, ns in kinds.items():
            builder.add("samples", rows_of("samples", (5, 0, kind, 0, ns)))
        windows.append(builder.close(second * second_ns + sum(kinds.values())))
    # WHEN a capture ends there, and the recording goes on
    database = tmp_path / "cut.aiflame"
    capture_of_windows(database, windows, FACTS)
    profile = read_capture(database)
    # THEN its time is not all in the last second
    by_second = Counter[tuple[int, int]]()
    for sample, first_s, seconds, _, ns in profile.spans.tolist():
        for s in range(first_s, first_s + seconds):
            by_second[int(profile.samples["klass"][sample]), s] += ns  # of each of them
    assert by_second == {
        **{(int(SampleClass.BLOCKED), s): second_ns for s in range(3)},
        (int(SampleClass.BLOCKED), 3): 200_000_000,
        (int(SampleClass.WAITING_TO_RUN), 3): 300_000_000,
    }
    assert profile.waits[["start_ns", "blocked_ns", "runnable_ns"]].tolist() == [
        (0, 3_200_000_000, 300_000_000)
    ]


def test_newer_mappings_lie_over_older_ones() -> None:
    builder = _builder()
    for number, path in enumerate(("/old", "/new")):
        builder.define("binaries", rows_of("binaries", (number, builder.text(path), 0)))
    builder.define("mappings", rows_of("mappings", (0, 0, 0x1000, 0x9000, 0, 0x1000)))
    builder.define("mappings", rows_of("mappings", (0, 1, 0x3000, 0x4000, 0, 0x3000)))
    for at, stack in ((0x1100, 1), (0x3100, 2), (0x5100, 3)):
        row = (stack, 0, 0, 0, 0, 1, StopReason.ROOTED, 0, False, NONE, 0)
        builder.define(
            "stacks", rows_of("stacks", row), np.array([at], "<u8").view(COLUMNS["addresses"].dtype)
        )
        builder.add("samples", rows_of("samples", (stack, 0, SampleClass.ON_CPU, 1, 10)))
    profile = _captured([builder.close(1000, is_last=True)])
    assert {names for names, *_ in _times(profile)} == {
        ("[old+0x100]",),
        ("[new+0x100]",),
        ("[old+0x4100]",),
    }


def _segments(folder: Path, windows: list[Window], keep_ns: int | None = None) -> None:
    sink = SegmentSink(folder, FACTS, keep_ns)
    for window in windows:
        sink.put(window)
    sink.close()


def _long(seconds: int) -> list[Window]:
    builder = _builder()
    _define_stack(builder, 5)
    windows = []
    for second in range(seconds):
        builder.add("samples", rows_of("samples", (5, 0, SampleClass.ON_CPU, 1, second)))
        windows.append(builder.close((second + 1) * 1_000_000_000))
    return windows


def _jit_windows(count: int) -> list[Window]:
    """Each with a stack of its own, in generated code."""
    builder = _builder()
    builder.define("mappings", rows_of("mappings", (0, NONE, 0x1000, 0x9000, 0, 0)))
    windows = []
    for number in range(count):
        row = (number + 1, 0, 0, 0, 0, 1, StopReason.ROOTED, 0, False, NONE, 0)
        address = np.array([0x1000 + number], "<u8").view(COLUMNS["addresses"].dtype)
        builder.define("stacks", rows_of("stacks", row), address)
        builder.add("samples", rows_of("samples", (number + 1, 0, SampleClass.ON_CPU, 1, 10)))
        windows.append(builder.close((number + 1) * 1000))
    return windows


def test_names_of_generated_code_outlive_the_process(tmp_path: Path) -> None:
    # GIVEN segments, and names that were found of some windows' stacks, by two processes one after
    # the other, of which the second began anew
    windows = _jit_windows(4)
    _segments(tmp_path, windows)
    for numbers in ((0, 2), (0, 3)):
        jit_symbols = JitSymbolSink(tmp_path)
        for number in numbers:
            jit_symbols.put(windows[number], {(0, 0x1000 + number): f"f{number}"})
        jit_symbols.close()
    # WHEN a capture is made of what is there
    recorded = RecordedWindows(tmp_path)
    for window in recorded:
        check(window)
    capture_of_windows(tmp_path / "run.aiflame", iter(recorded), FACTS)
    # THEN its stacks have these names, and one of which none was found says so
    profile = read_capture(tmp_path / "run.aiflame")
    assert Counter(names for names, *_ in _times(profile)) == Counter(
        [("f0",), ("[generated code]",), ("f2",), ("f3",)]
    )


def test_names_of_generated_code_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiflame.agent.sinks.jit_symbols._MOST_SYMBOLS", 2)
    windows = _jit_windows(1)
    _segments(tmp_path, windows)
    jit_symbols = JitSymbolSink(tmp_path)
    jit_symbols.put(windows[0], {(0, 0x1000 + number): "f" for number in range(5)})
    jit_symbols.close()
    (window,) = RecordedWindows(tmp_path)
    assert len(window.jit_symbols) == 2
    losses = {window.texts[row["name"]]: int(row["count"]) for row in window.losses}
    assert losses == {LossKind.JIT_SYMBOLS_FULL.stored_name: 3}


def test_segments_give_back_a_recording(tmp_path: Path) -> None:
    windows = _long(200)
    _segments(tmp_path, windows)
    assert len(list(tmp_path.iterdir())) == 4
    read = RecordedWindows(tmp_path)
    for window, found in zip(windows, read, strict=True):
        same_windows(window, found)
    assert (read.facts, read.damage) == (FACTS, [])
    assert are_segments(tmp_path)
    assert all(are_segments(path) for path in tmp_path.iterdir())


def test_a_flight_recorder_keeps_what_it_was_told_to(tmp_path: Path) -> None:
    _segments(tmp_path, _long(1000), keep_ns=120_000_000_000)
    ends = [window.end_ns // 1_000_000_000 for window in RecordedWindows(tmp_path)]
    assert ends == list(range(ends[0], 1001))
    assert 1000 - 180 <= ends[0] <= 1000 - 119
    # Each segment stands for itself.
    path = tmp_path / "run.aiflame"
    capture_of_windows(path, RecordedWindows(tmp_path), FACTS)
    profile = read_capture(path)
    assert profile.recording.started_unix_ns == 5 + (ends[0] - 1) * 1_000_000_000
    assert profile.recording.duration_ns == len(ends) * 1_000_000_000
    assert int(profile.samples["count"].sum()) == len(ends)


def test_what_is_cut_or_missing_costs_only_itself(tmp_path: Path) -> None:
    _segments(tmp_path, _long(200))
    first, second, third, _ = sorted(tmp_path.iterdir())
    second.write_bytes(second.read_bytes()[:-1])
    third.unlink()
    read = RecordedWindows(tmp_path)
    ends = [window.end_ns // 1_000_000_000 for window in read]
    assert ends == [*range(1, 120), *range(181, 201)]
    assert len(read.damage) == 1
    assert read.damage[0].startswith(second.name)
    assert not are_segments(tmp_path / "nothing")
    first.write_bytes(b"SQLite")
    assert not are_segments(first)


@pytest.mark.parametrize("left", [0, 12, 30])
def test_facts_are_of_the_first_segment_that_has_them(tmp_path: Path, left: int) -> None:
    # GIVEN segments of which the first is cut in its header, and the second is zeros
    _segments(tmp_path, _long(200))
    first, second, *_ = sorted(tmp_path.iterdir())
    first.write_bytes(first.read_bytes()[:left])
    second.write_bytes(bytes(99))
    # THEN the others are read as if these were not there, and that is said
    read = RecordedWindows(tmp_path)
    assert read.facts == FACTS
    assert [window.end_ns // 1_000_000_000 for window in read] == [*range(121, 201)]
    assert [words.partition(":")[0] for words in read.damage] == [first.name, second.name]
    # AND where no header is left, there is no recording.
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(BadSegment, match=r"header|no segment"):
        RecordedWindows(tmp_path)


def test_where_there_is_nothing_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadSegment, match="no segment"):
        RecordedWindows(tmp_path)
    _segments(tmp_path, _long(1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadSegment, match="no window"):
        capture_of_windows(tmp_path / "run.aiflame", RecordedWindows(tmp_path), FACTS)


def test_facts_and_numbers_that_no_recording_has_are_refused(tmp_path: Path) -> None:
    (window,) = RandomRecording(3).cut([])
    with pytest.raises(BadSegment, match="header"):
        capture_of_windows(tmp_path / "a", [window], {"started_unix_ns": "nan"}, with_names=False)
    samples = window.samples.copy()
    samples["weight_ns"] = (1 << 64) - 1
    forged = replace(window, samples=samples)
    with pytest.raises(BadSegment, match="damaged"):
        capture_of_windows(tmp_path / "b", [forged], FACTS, with_names=False)


def test_a_full_disk_is_said_and_leaves_whole_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a disk that is full after the third window
    from aiflame.agent.capture import segment

    written: Counter[str] = Counter()
    write = segment.os.write

    def full(descriptor: int, data: Any) -> int:
        written["calls"] += 1
        if written["calls"] > 4:  # the header is one
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    sink = SegmentSink(tmp_path, FACTS)
    windows = _long(5)
    monkeypatch.setattr(segment.os, "write", full)
    with pytest.raises(DiskFull, match="No space left"):
        for window in windows:
            sink.put(window)
    monkeypatch.undo()
    assert [window.number for window in RecordedWindows(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("failing", ["open", "write"])
def test_who_follows_gets_past_a_moment_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    # GIVEN a recording that is followed, as the disk is full for two windows
    windows = RandomRecording(7).windows(6)
    sink, following = SegmentSink(tmp_path, FACTS), FollowedWindows(tmp_path)
    sink.put(windows[0])
    before = [window.number for window in following.take(1)]

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for window in windows[1:3]:
        sink.close()  # each is of another segment
        with monkeypatch.context() as full, pytest.raises(DiskFull):
            full.setattr(os, failing, fails)
            sink.put(window)
    # WHEN there is room again THEN what was written comes, and nothing is told to be damaged.
    for window in windows[3:]:
        sink.put(window)
    sink.close()
    after = [window.number for window in following.take(3)]
    following.close()
    assert before + after == [0, 3, 4, 5]
    recorded = RecordedWindows(tmp_path)
    assert [window.number for window in recorded] == [0, 3, 4, 5]
    assert not recorded.damage


def test_kernel_times_of_a_longer_window_are_in_the_seconds_in_which_they_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN eight runs from one stack, in a window of four seconds
    monkeypatch.setattr(CaptureSink, "_launched_from", lambda _, kernels, *__: [0] * len(kernels))
    builder = _builder()
    _define_stack(builder, 5)
    builder.define("devices", rows_of("devices", (0, builder.text("gpu"), 0, 2, 0, 0, 1)))
    kernel = (0, 0, builder.text("gpu"), builder.text("k"), builder.text(""))
    builder.define("kernels", rows_of("kernels", kernel))
    times = np.zeros(8, COLUMNS["kernel_times"].dtype)
    times["end_ns"] = np.arange(8) * 500_000_000 + 400_000_000
    times["begin_ns"], times["duration_ns"] = times["end_ns"] - 300_000_000, 300_000_000
    times["count"] = 1
    builder.add("kernel_times", times)
    builder.add("samples", rows_of("samples", (5, 0, SampleClass.ON_CPU, 1, 10)))
    # WHEN it is written
    found = _captured([builder.close(4_000_000_000)]).gpu.times
    # THEN those of each second are together.
    assert found[["end_ns", "count", "duration_ns"]].tolist() == [
        (second * 1_000_000_000 + 900_000_000, 2, 600_000_000) for second in range(4)
    ]
