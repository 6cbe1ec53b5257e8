# SPDX-License-Identifier: Apache-2.0
"""What a window promises, of random recordings that are cut anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import (
    COLUMNS,
    NO_STACK,
    BadWindow,
    Rows,
    Window,
    check,
    check_wall,
    concatenate,
    rows_of,
)
from aiflame.agent.recording.window_builder import (
    Bounds,
    WindowBuilder,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import RandomRecording, same_windows

_SEEDS = st.integers(0, 2**32)


def _losses(window: Window) -> dict[str, int]:
    return {window.texts[row["name"]]: int(row["count"]) for row in window.losses}


@settings(max_examples=100, deadline=None)
@given(seed=_SEEDS, count=st.integers(1, 8))
def test_every_window_is_self_contained_and_its_time_adds_up(seed: int, count: int) -> None:
    for window in RandomRecording(seed).windows(count):
        check(window)
        check_wall(window)


@settings(max_examples=100, deadline=None)
@given(seed=_SEEDS, count=st.integers(1, 8))
def test_windows_hold_together_what_one_would_have_held(seed: int, count: int) -> None:
    windows = RandomRecording(seed).windows(count)
    (whole,) = RandomRecording(seed).cut([])
    check(whole)
    together = concatenate(windows)
    check(together)
    check_wall(together)
    same_windows(together, concatenate([whole]))


@settings(max_examples=100, deadline=None)
@given(
    seed=_SEEDS,
    count=st.integers(1, 4),
    stacks=st.integers(1, 6),
    of_process=st.integers(1, 6),
    events=st.integers(0, 10),
    rows=st.integers(1, 40),
)
def test_bounds_hold_and_no_time_is_lost(
    seed: int, count: int, stacks: int, of_process: int, events: int, rows: int
) -> None:
    bounds = Bounds(stacks, of_process, rows, events)
    bounded = RandomRecording(seed, bounds).windows(count)
    for window, free in zip(bounded, RandomRecording(seed).windows(count), strict=True):
        check(window)
        check_wall(window)
        used = set(window.samples["stack"].tolist()) - {NO_STACK}
        kept = used - set(window.launches["stack"].tolist()) - set(window.waits["stack"].tolist())
        assert len(kept) <= stacks
        owners = window.stacks[np.isin(window.stacks["stack"], sorted(kept))]["process"]
        assert max(np.unique(owners, return_counts=True)[1], default=0) <= of_process
        assert len(window.waits) <= events
        # Time stays: each thread has as much of each kind.
        for kind in SampleClass:
            for thread in free.threads["thread"]:
                found_ns, all_ns = (
                    int(w.samples["weight_ns"][_of(w.samples, thread, kind)].sum())
                    for w in (window, free)
                )
                assert found_ns == all_ns
        missing = len(free.waits) - len(window.waits)
        missing += len(free.kernel_times) - len(window.kernel_times)
        lost = _losses(window)
        assert lost.get("window_events_full", 0) >= missing
        has_lost_stacks = NO_STACK in window.samples["stack"]
        assert has_lost_stacks == (lost.get("window_stacks_full", 0) > 0)


def _of(samples: Rows, thread: int, kind: SampleClass) -> np.ndarray:
    return (samples["thread"] == thread) & (samples["kind"] == kind)


def test_a_sleeper_has_its_stack_in_every_window() -> None:
    # GIVEN a thread that sleeps through three windows in a stack that came before the first
    builder = WindowBuilder(Bounds())
    builder.define("processes", rows_of("processes", (0, 1, 0, 0, 0, 0, -1, _NONE, 0, 0, 0)))
    builder.define("threads", rows_of("threads", (0, 0, 1, 0)))
    addresses = np.array([11, 12], "<u8").view(COLUMNS["addresses"].dtype)
    row = (5, 0, 0, 0, 1, 1, StopReason.ROOTED, 0, False, _NONE, 0)
    builder.define("stacks", rows_of("stacks", row), addresses)
    for end_ns in (10, 20, 30):
        builder.add("samples", rows_of("samples", (5, 0, SampleClass.BLOCKED, 0, 10)))
        builder.add("thread_times", rows_of("thread_times", (0, 0, 10)))
        window = builder.close(end_ns)
        check(window)
        assert window.addresses["address"].tolist() == [11, 12]


_NONE = 0xFFFF_FFFF


def test_a_stack_that_never_came_is_lost_and_its_time_is_not() -> None:
    builder = WindowBuilder(Bounds())
    builder.define("processes", rows_of("processes", (3, 1, 0, 0, 0, 0, -1, _NONE, 0, 0, 0)))
    builder.define("threads", rows_of("threads", (0, 3, 1, 0)))
    builder.add("samples", rows_of("samples", (99, 0, SampleClass.ON_CPU, 4, 40)))
    window = builder.close(1000)
    check(window)
    assert window.stacks["stop_reason"].tolist() == [StopReason.LOST]
    assert window.stacks["process"].tolist() == [3]
    assert _losses(window) == {"stack_lost": 1}


def test_processes_that_are_gone_leave_nothing() -> None:
    # GIVEN 3,000 processes one after the other, each of which is forgotten
    builder = WindowBuilder(Bounds(kept_stacks=100))
    for number in range(3000):
        name = builder.text(f"process {number}")
        row = (number, 1, 0, 0, 0, 0, -1, _NONE, name, name, name)
        builder.define("processes", rows_of("processes", row))
        builder.define("threads", rows_of("threads", (number, number, 1, name)))
        window = builder.close(number + 1)
        assert window.texts == ("", f"process {number}")
        builder.forget([number], [number])
    assert builder.known_rows == 0
    # Texts are gone through when there are many.
    assert builder.text("another") < 10_000


def test_stacks_of_processes_that_are_gone_are_lost_ones() -> None:
    # GIVEN two processes, one of which is forgotten, and whose stack is mentioned once more
    builder = WindowBuilder(Bounds())
    for number in range(2):
        row = (number, number, 0, 0, 0, 0, -1, _NONE, 0, 0, 0)
        builder.define("processes", rows_of("processes", row))
        builder.define("threads", rows_of("threads", (number, number, 1, 0)))
        builder.define("mappings", rows_of("mappings", (number, _NONE, 0, 4096, 0, 0)))
    addresses = np.array([11], "<u8").view(COLUMNS["addresses"].dtype)
    row = (5, 0, 0, 0, 0, 1, StopReason.ROOTED, 0, False, _NONE, 0)
    builder.define("stacks", rows_of("stacks", row), addresses)
    assert len(builder.close(10).mappings) == 2
    builder.forget([0], [0])
    builder.define("stacks", rows_of("stacks", row), addresses, is_late=True)
    builder.add("samples", rows_of("samples", (5, 1, SampleClass.ON_CPU, 1, 10)))
    window = builder.close(20)
    # THEN it is there as lost, and nothing of the process is
    check(window)
    assert window.stacks[["stop_reason", "process"]].tolist() == [(StopReason.LOST, 1)]
    assert window.mappings["process"].tolist() == [1]
    assert window.processes["process"].tolist() == [1]


def test_stacks_of_processes_that_are_gone_are_not_kept() -> None:
    # GIVEN a process that stays, and one a second that does not, each with a stack
    builder = WindowBuilder(Bounds())
    addresses = np.array([11], "<u8").view(COLUMNS["addresses"].dtype)
    for number in range(60):
        row = (number, 1, 0, 0, 0, 0, -1, _NONE, 0, 0, 0)
        builder.define("processes", rows_of("processes", row))
        row = (number, 0, number, 0, 0, 1, StopReason.ROOTED, 0, False, _NONE, 0)
        builder.define("stacks", rows_of("stacks", row), addresses)
        builder.close((number + 1) * 1_000_000_000)
        builder.forget([number] if number else [], [])
    # THEN of those that are gone only the last ones are kept, until they are gone through again
    kept = [number for number in range(60) if builder.stack(number) is not None]
    assert kept[0] == 0
    assert len(kept) <= 21


def test_less_is_kept_where_there_is_little_memory_and_what_is_used_stays() -> None:
    builder = WindowBuilder(Bounds(kept_stacks=20_000))
    builder.define("processes", rows_of("processes", (0, 1, 0, 0, 0, 0, -1, _NONE, 0, 0, 0)))
    addresses = np.array([11], "<u8").view(COLUMNS["addresses"].dtype)
    for number in range(20_000):
        row = (number, 1 << 32, 0, 0, 0, 1, StopReason.ROOTED, 0, False, _NONE, 0)
        builder.define("stacks", rows_of("stacks", row), addresses)
    for least in (10_000, 5_000, 4_096, 4_096):
        builder.keep_less()
        kept = [number for number in range(20_000) if builder.is_kept("stacks", number)]
        assert kept == [*range(20_000 - least, 20_000)]
    # AND where there is more again, as many as at first
    assert [builder.keep_more() for _ in range(4)] == [True, True, True, False]
    for number in range(20_000, 50_000):
        row = (number, 1 << 32, 0, 0, 0, 1, StopReason.ROOTED, 0, False, _NONE, 0)
        builder.define("stacks", rows_of("stacks", row), addresses)
    assert [n for n in range(50_000) if builder.is_kept("stacks", n)] == [*range(30_000, 50_000)]


def test_a_window_is_filling_before_new_stacks_take_the_room_of_those_it_mentions() -> None:
    # GIVEN a stack of long ago that has come again in the open window
    builder = WindowBuilder(Bounds(kept_stacks=100))
    builder.define("processes", rows_of("processes", (0, 1, 0, 0, 0, 0, -1, _NONE, 0, 0, 0)))
    builder.define("threads", rows_of("threads", (0, 0, 1, 0)))
    addresses = np.array([11], "<u8").view(COLUMNS["addresses"].dtype)

    def define(number: int) -> None:
        row = (number, 1 << 32, 0, 0, 0, 1, StopReason.ROOTED, 0, False, _NONE, 0)
        builder.define("stacks", rows_of("stacks", row), addresses)

    for number in range(1, 101):
        define(number)
    builder.close(10)
    assert not builder.is_filling
    assert builder.is_kept("stacks", 1)
    builder.add("samples", rows_of("samples", (1, 0, SampleClass.ON_CPU, 1, 10)))
    # WHEN new ones come until it is said that they are many
    for number in itertools.takewhile(lambda _: not builder.is_filling, range(101, 300)):
        define(number)
    # THEN it is still there, and another window may have as many
    window = builder.close(20)
    assert window.stacks["stop_reason"].tolist() == [StopReason.ROOTED]
    assert not builder.is_filling


def test_a_window_ends_before_a_process_has_more_stacks_than_it_may() -> None:
    # GIVEN stacks of one process that come 30 at once
    builder = WindowBuilder(Bounds(stacks=200, stacks_of_process=100, stacks_at_once=30))
    builder.define("processes", rows_of("processes", (0, 1, 0, 0, 0, 0, -1, _NONE, 0, 0, 0)))
    builder.define("threads", rows_of("threads", (0, 0, 1, 0)))
    addresses = np.array([11], "<u8").view(COLUMNS["addresses"].dtype)
    for first in range(1, 1000, 30):
        for number in range(first, first + 30):
            row = (number, 0, 0, 0, 0, 1, StopReason.ROOTED, 0, False, _NONE, 0)
            builder.define("stacks", rows_of("stacks", row), addresses)
            sample = (number, 0, SampleClass.ON_CPU, 1, 10)
            builder.add("samples", rows_of("samples", sample))
        # WHEN windows end as soon as one is filling
        if builder.is_filling:
            window = builder.close(first)
            # THEN none has lost a stack, and each has many
            assert _losses(window) == {}
            assert len(window.stacks) == 90


def test_stacks_of_those_who_sleep_on_are_kept_however_little_memory_there_is() -> None:
    # GIVEN 9,000 threads that sleep, each where no other does
    builder = WindowBuilder(Bounds())
    for process in range(3):
        row = (process, 1 + process, 0, 0, 0, 0, -1, _NONE, 0, 0, 0)
        builder.define("processes", rows_of("processes", row))
    for thread in range(9_000):
        builder.define("threads", rows_of("threads", (thread, thread // 3_000, 1 + thread, 0)))
    addresses = np.array([11], "<u8").view(COLUMNS["addresses"].dtype)

    def define(numbers: Iterable[int]) -> None:
        for number in numbers:
            process = (number - 1) // 3_000 % 3
            row = (number, 0, process, 0, 0, 1, StopReason.ROOTED, 0, False, _NONE, 0)
            builder.define("stacks", rows_of("stacks", row), addresses)

    define(range(1, 9_001))
    for second in range(1, 8):
        rows = [(n, n - 1, SampleClass.BLOCKED, 0, 10) for n in range(1, 9_001)]
        builder.add("samples", np.array(rows, COLUMNS["samples"].dtype))
        # WHEN others come and go, and less is to be kept again and again
        define(range(100_000 * second, 100_000 * second + 300))
        window = builder.close(second)
        builder.keep_less()
        # THEN none of theirs is lost,
        assert _losses(window) == {}
    # and no window ends for them.
    define(range(900_000, 900_300))
    assert not builder.is_filling
    # Where they have gone, their room is given back.
    builder.close(8)
    builder.keep_less()
    builder.keep_less()
    define(range(910_000, 920_000))
    assert sum(builder.is_kept("stacks", n) for n in range(910_000, 920_000)) <= 8_192


def test_a_window_ends_before_it_has_more_samples_of_devices_than_it_may() -> None:
    # GIVEN samples of 300 instructions that come twice a second, and room for a thousand
    builder = WindowBuilder(Bounds(rows=1_000))
    builder.define("devices", rows_of("devices", (0, builder.text("gpu"), 0, 2, 0, 0, 1)))
    builder.define("processes", rows_of("processes", (0, 1, 0, 0, 0, 0, -1, _NONE, 0, 0, 0)))
    builder.define("kernels", np.zeros(1, COLUMNS["kernels"].dtype))
    builder.define("codes", rows_of("codes", (0, 0, _NONE)))
    builder.define("reasons", rows_of("reasons", (0, builder.text("gpu"), builder.text("stall"))))
    rows = np.zeros(300, COLUMNS["device_samples"].dtype)
    rows["offset"], rows["count"] = 16 * np.arange(300), 1
    kept, windows = 0, 0
    for half in range(1, 41):
        rows["begin_ns"], rows["end_ns"] = (half - 1) * 10, half * 10
        builder.add("device_samples", rows.copy())
        # WHEN windows end as soon as one is filling
        if builder.is_filling:
            window = builder.close(half * 10)
            # THEN none of them is lost.
            assert _losses(window) == {}
            kept += len(window.device_samples)
            windows += 1
    assert (kept, windows) == (40 * 300, 20)


@pytest.mark.parametrize("each_second", [150, 300, 600, 900])
def test_a_window_ends_before_kernel_times_of_a_second_more_have_no_room(each_second: int) -> None:
    # GIVEN room for 1,000 of them, and windows that end as soon as one is filling
    builder = WindowBuilder(Bounds(events=1_000))
    seconds = 0
    while not builder.is_filling:
        builder.add("kernel_times", np.zeros(each_second, COLUMNS["kernel_times"].dtype))
        seconds += 1
    # THEN those that come while it ends, in a tenth of a second, have room
    assert seconds * each_second + each_second // 10 < 1_000


@pytest.mark.breadth
def test_a_process_that_makes_code_all_the_time_is_forgotten_bit_by_bit() -> None:
    # GIVEN a process in which each window brings 200 functions that no other has
    builder = WindowBuilder(Bounds(kept_stacks=500))
    builder.define("processes", rows_of("processes", (3, 1, 0, 0, 0, 0, -1, _NONE, 0, 0, 0)))
    builder.define("threads", rows_of("threads", (0, 3, 1, 0)))
    most = 0
    for number in range(1, 400):
        for code in range(200):
            chain = number << 32 | code
            name = builder.text(f"f{chain}")
            builder.define("code_objects", rows_of("code_objects", (3, chain, name, 0, 1)))
            builder.define("code_lines", rows_of("code_lines", (3, chain, 8, 2)))
            frames = np.array([(chain, 8, True)], COLUMNS["chain_frames"].dtype)
            builder.define("chains", rows_of("chains", (chain, 3, 0, 1, 0)), frames)
        # WHEN the newest is used, and one of the window before
        addresses = np.zeros(0, COLUMNS["addresses"].dtype)
        for stack, of in ((2 * number, number), (2 * number + 1, number - 1)):
            row = (stack, of << 32 | 7, 3, 0, 0, 0, StopReason.ROOTED, 0, False, _NONE, 0)
            builder.define("stacks", rows_of("stacks", row), addresses)
            builder.add("samples", rows_of("samples", (stack, 0, SampleClass.ON_CPU, 1, 1)))
        window = builder.close(number)
        check(window)
        # THEN both have their names,
        known = set(window.code_objects["code"].tolist())
        assert {number << 32 | 7, *([number - 1 << 32 | 7] * (number > 1))} <= known
        builder.forget([], [])
        most = max(most, builder.known_rows)
    # and what is kept is bounded.
    assert most < 80_000


def _of_no_thread(rows: np.ndarray) -> np.ndarray:
    rows = rows.copy()
    rows["thread"] = _NONE
    return rows


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (lambda w: replace(w, stacks=w.stacks[:0]), "stack .* is not in stacks"),
        (lambda w: replace(w, threads=w.threads[:0]), "thread .* is not in threads"),
        (lambda w: replace(w, samples=_of_no_thread(w.samples)), "thread .* is not in threads"),
        (lambda w: replace(w, addresses=w.addresses[:-1]), "past the end of addresses"),
        (lambda w: replace(w, texts=("",)), "is no text"),
        (lambda w: replace(w, end_ns=w.start_ns - 1), "ends at"),
        (lambda w: replace(w, waits=w.samples), "waits"),
        (lambda w: replace(w, threads=np.repeat(w.threads, 2)), "several rows of one key"),
        (lambda w: replace(w, thread_times=_longer(w.thread_times)), "on and off CPU"),
        (lambda w: replace(w, thread_times=w.thread_times[:0]), "is not there"),
    ],
)
def test_a_broken_promise_is_found(breaks: Callable[[Window], Window], says: str) -> None:
    (window,) = RandomRecording(12).cut([])
    with pytest.raises(BadWindow, match=says):
        broken = breaks(window)
        check(broken)
        check_wall(broken)


def _longer(times: Rows) -> Rows:
    changed = times.copy()
    changed["observed_ns"] += 1_000_000_000
    return changed


def test_windows_with_a_gap_are_not_joined() -> None:
    windows = RandomRecording(1).windows(4)
    with pytest.raises(BadWindow, match="nothing tells of"):
        concatenate([windows[0], windows[2]])
