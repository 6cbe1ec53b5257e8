# SPDX-License-Identifier: Apache-2.0
"""Naming within a time: what matters most comes first, and what is left out keeps its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import COLUMNS, Window, rows_of
from aiflame.agent.sinks import bounded_naming, capture
from aiflame.agent.sinks.bounded_naming import BoundedNamer, by_importance
from aiflame.agent.sinks.capture import CaptureSink
from aiflame.agent.symbolize.stacks import NamedStack, UnnamedStack
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import RandomRecording


class _Namer:
    """Gives every stack the same name."""

    def __init__(self) -> None:
        self.losses: Counter[LossKind] = Counter()
        self.jit_symbols: dict[tuple[int, int], str] = {}
        self.named = 0

    def name(self, window: Window, stacks: Sequence[UnnamedStack]) -> list[NamedStack]:
        self.jit_symbols = {(0, self.named): "jit"}
        self.named += len(stacks)
        return [NamedStack(int(StopReason.ROOTED), b"", 0) for _ in stacks]


def _bounded(namer: Any, budget_s: float | None) -> BoundedNamer:
    return BoundedNamer(namer, lambda _window: budget_s)


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=50, deadline=None)
def test_every_stack_has_a_place(seed: int) -> None:
    for window in RandomRecording(seed).windows(3):
        order = by_importance(window, np.zeros(len(window.stacks), np.bool_))
        assert sorted(order.tolist()) == list(range(len(window.stacks)))


def _window(**columns: Sequence[tuple[Any, ...]]) -> Window:
    found = {name: rows_of(name, *rows) for name, rows in columns.items()}
    return Window.of(0, 0, 10**9, found, texts=("",))


def _stacks(count: int) -> list[tuple[Any, ...]]:
    return [(stack, *([0] * (len(COLUMNS["stacks"].dtype) - 1))) for stack in range(1, count + 1)]


def _launches(*rows: tuple[int, int, int]) -> list[tuple[int, ...]]:
    """Rows of launches, each of a stack, a kernel and a count."""
    return [(0, 0, 0, stack, 0, kernel, 0, 0, 0, count, 0) for stack, kernel, count in rows]


def _order(**columns: Sequence[tuple[Any, ...]]) -> list[int]:
    window = _window(**columns)
    order = by_importance(window, np.zeros(len(window.stacks), np.bool_))
    return [int(stack) for stack in window.stacks["stack"][order]]


def test_the_few_that_launch_all_come_before_the_many_on_the_cpu() -> None:
    # GIVEN 500 stacks with a sample each on the CPU, and two that launch kernels
    samples = [(stack, 0, SampleClass.ON_CPU, 1, 10**6) for stack in range(1, 501)]
    stacks = _stacks(503)
    found = _order(stacks=stacks, samples=samples, launches=_launches((502, 0, 7), (503, 0, 93)))
    # THEN these come first, the one that launches more before the other
    assert found[:2] == [503, 502]
    assert found[-1] == 501  # nothing is told of it


def test_the_few_of_most_waits_come_before_the_many_on_the_cpu() -> None:
    # GIVEN 500 stacks with a sample each on the CPU, one of a pool that waits all the time, and
    # one of a short wait
    samples = [(stack, 0, SampleClass.ON_CPU, 1, 10**6) for stack in range(1, 501)]
    samples += [(501, 0, SampleClass.BLOCKED, 1, 10**11), (502, 0, SampleClass.BLOCKED, 1, 10**6)]
    # THEN the long wait comes first, however it counts beside time on the CPU, the short one last.
    found = _order(stacks=_stacks(502), samples=samples)
    assert (found[0], found[-1]) == (501, 502)


def test_launches_are_weighed_by_what_the_device_did() -> None:
    # GIVEN one stack with most launches, and another with the kernel that takes most time
    launches = _launches((1, 0, 1000), (2, 1, 10), (3, 1, 1))
    columns = {"stacks": _stacks(3), "launches": launches}
    assert _order(**columns) == [1, 2, 3]
    times = [(0, 0, 0, 0, 0, 1, 1000, 1_000, 0), (0, 1, 0, 0, 0, 1, 11, 99_000, 0)]
    assert _order(**columns, kernel_times=times) == [2, 3, 1]
    # AND by its samples, which name the code of a kernel
    codes = [(7, 1, 0), (4, 0, 0)]
    found = [(0, 4, 0, 0, 0, 0, 0, 0, 5), (0, 7, 0, 0, 0, 0, 0, 0, 95)]
    assert _order(**columns, codes=codes, device_samples=found) == [2, 3, 1]


def test_a_window_without_stacks_has_no_order() -> None:
    window = RandomRecording(3).windows(1)[0]
    empty = Window.of(window.number, window.start_ns, window.end_ns, {}, texts=("",))
    assert by_importance(empty, np.zeros(0, np.bool_)).tolist() == []


def test_who_is_not_late_names_all() -> None:
    namer = _Namer()
    window = RandomRecording(3).windows(1)[0]
    bounded = _bounded(namer, None)
    assert len(bounded.name(window, [None] * 1000)) == 1000  # type: ignore[list-item]
    assert namer.named == 1000
    assert not bounded.losses.total()


def test_who_is_late_names_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a budget that the first stacks use up
    monkeypatch.setattr(bounded_naming, "NAMED_AT_ONCE", 10)
    namer = _Namer()
    window = RandomRecording(3).windows(1)[0]
    bounded = _bounded(namer, 0.0)
    found = bounded.name(window, [None] * 25)  # type: ignore[list-item]
    # THEN all others are without frames
    assert namer.named == 10
    assert [named.stop_reason for named in found] == [StopReason.ROOTED] * 10 + [
        StopReason.LOST
    ] * 15
    # AND names of generated code are kept of all that was named.
    bounded = _bounded(_Namer(), 60.0)
    bounded.name(window, [None] * 25)  # type: ignore[list-item]
    assert [*bounded.jit_symbols] == [(0, 0), (0, 10), (0, 20)]


def test_what_was_left_out_is_named_when_there_is_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # GIVEN a window with time for one stack only, and others with some of its stacks, and time
    monkeypatch.setattr(bounded_naming, "NAMED_AT_ONCE", 1)
    first, *others = RandomRecording(11).windows(8)
    stacks = {*first.stacks["stack"].tolist()}
    again = stacks & {stack for window in others for stack in window.stacks["stack"].tolist()}
    assert len(again) > 1
    namer: Any = _Namer()
    bounded = BoundedNamer(namer, lambda window: 60.0 if window.number else 0.0)
    sink = CaptureSink(CaptureWriter(tmp_path / "one.aiflame"), namer=bounded)
    # WHEN they come
    sink.put(first)
    assert sink.unnamed_stacks == len(stacks) - 1
    for window in others:
        sink.put(window)
    # THEN those that came again are named
    left = len(stacks) - len(again)
    assert sink.unnamed_stacks in (left - 1, left)


def test_time_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bounded_naming, "NAMED_AT_ONCE", 1)
    windows = RandomRecording(11).windows(3)
    sums = []
    for budget_s in (None, 0.0):
        writer = CaptureWriter(tmp_path / f"{budget_s}.aiflame")
        sink = CaptureSink(writer, namer=_bounded(_Namer(), budget_s))
        for window in windows:
            sink.put(window)
        sink.finish()
        facts: dict[str, str | int] = {
            "aiflame_version": "0",
            "started_unix_ns": 5,
            "period_ns": 1,
            "command": "c",
            "target": "t",
        }
        writer.put_meta(facts)
        writer.commit()
        writer.close()
        profile = read_capture(writer.path)
        sums.append(np.bincount(profile.samples["klass"], profile.samples["ns"]).tolist())
    assert sums[0] == sums[1]


def test_what_is_named_next_is_what_is_not_known_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # GIVEN windows that have most of their stacks in common
    first, *others = RandomRecording(11).windows(8)
    sink = CaptureSink(CaptureWriter(tmp_path / "one.aiflame"), namer=_bounded(_Namer(), None))
    sink.put(first)
    known = {*first.stacks["stack"].tolist()}
    expected = []
    for window in others:
        new = {*window.stacks["stack"].tolist()} - known
        known |= new
        expected.append(len(new))
    assert sum(expected) < sum(len(window.stacks) for window in others)
    # THEN each is named with the first of them, and those that matter most
    assert [len(rows) for _, rows in sink.unnamed(others)] == expected
    monkeypatch.setattr(capture, "NAMED_AT_ONCE", 1)
    assert all(len(rows) <= 1 for _, rows in sink.unnamed(others))
