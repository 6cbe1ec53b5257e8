# SPDX-License-Identifier: Apache-2.0
"""Serialised windows of the helper for NVIDIA, in which samples name launches; and late ends.

CUPTI and the driver are those of tests/standin, which know no change of modes while sampling is on,
end captures by what synchronises, and lose the launches of what finds no room.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from aiflame.gpu.protocol import HelperError, HelperLoss, HelperTier, Serialised, Why
from nvidia_helper import ALONE, SAMPLES_OF_BLOCK, Control, Target, Told, build_all, build_alone
from support import wait_until

# A window of 100 ms in each 400, the first after 40.
_WINDOWS = "-DWINDOWS_NS=400000000ull"
_ALL = "tier=2,read-out=20,serialised=250"
_CONTINUOUS = "tier=2,read-out=20"
# A context, a module with two kernels, and a stream beside the default one.
_SETUP = ("init", "context 0", "module 1000", "function 0 scale", "function 0 fill", "stream")
# Reasons of which the samples are among those of another one.
_TWIN = "_not_issued"


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_alone(tmp_path_factory.mktemp("standin"), _WINDOWS)


def _samples(told: Told) -> bool:
    return told.tier == HelperTier.STALLS


def _is_off(told: Told) -> bool:
    """Whether that was told, in both places."""
    return told.tier == HelperTier.LAUNCHES == told.states[-1].tier


def _is_sound(told: Told) -> bool:
    assert (told.losses, told.failed, told.damaged) == ({}, [], {})
    return True


def _by_launch(told: Told) -> Counter[int]:
    """Samples by launch, without those that are counted twice; 0: of no launch."""
    found: Counter[int] = Counter()
    for batch in told.stalls:
        reasons = told.reasons[batch.context]
        for row in batch.stalls:
            if not reasons[int(row["reason"])].endswith(_TWIN):
                found[int(row["launch"])] += int(row["count"])
    return found


def _numbered(told: Told) -> set[int]:
    return set(_by_launch(told)) - {0}


def _launch_until(target: Target, holds: Callable[[Told], object], *commands: str) -> Told:
    """Launches again and again until something holds of what was told."""

    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        target.obey(*commands)
        if holds(target.read()):
            return target.told
    raise AssertionError("it never holds")


def test_samples_of_a_window_name_their_launches(standin: Path) -> None:
    # GIVEN a process whose helper is asked for windows
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control() as control:
            target.read_until(_samples)
            control.start(serialised=250)
            # WHEN one kernel is launched from two places, and the one has thrice the samples
            launches = ("launch 0 30 3 0", "dense 0 30 1 3", "sync")
            told = _launch_until(target, lambda told: len(told.windows) > 1, *launches)
            control.stop()
            told = target.read_until(_is_off)
    # THEN each sample of a window has the launch, and all of that
    by_launch = _by_launch(told)
    del by_launch[0]
    one = 30 * SAMPLES_OF_BLOCK
    assert set(by_launch.values()) == {one, 3 * one}
    known = set(told.kernel_times["launch"].tolist())
    assert set(by_launch) <= known and len(by_launch) > 20
    # AND samples between windows have none
    numbered = [batch for batch in told.stalls if 0 not in batch.stalls["launch"]]
    between = [batch for batch in told.stalls if not batch.stalls["launch"].any()]
    assert numbered and between and len(numbered) + len(between) == len(told.stalls)
    for batch in numbered:
        assert any(w.begin_ns <= batch.begin_ns < batch.end_ns <= w.end_ns for w in told.windows)
    # AND windows are as long as was asked for, in one context
    for window in told.windows[:-1]:
        assert 90e6 < window.end_ns - window.begin_ns < 390e6
        assert (window.context, window.device) == (1, 0)
    assert _is_sound(told)


def test_kernels_of_a_window_do_not_overlap(standin: Path) -> None:
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            launches = ("launch 0 200 1 0", "launch 1 200 1 1", "sync")
            told = _launch_until(target, lambda told: told.windows, *launches)
            (window,) = told.windows
            ended = lambda told: told.kernel_times["end_ns"].max() > window.end_ns  # noqa: E731
            told = _launch_until(target, ended, "launch 0 200 1 0", "sync")
    times = np.sort(told.kernel_times, order="begin_ns")
    inside = times[(times["begin_ns"] > window.begin_ns) & (times["end_ns"] < window.end_ns)]
    assert len(inside) > 10
    # Two readings of the clock are within some microseconds of each other.
    assert np.all(inside["begin_ns"][1:].astype(np.int64) - inside["end_ns"][:-1] > -50_000)


def test_without_being_asked_there_is_no_window(standin: Path) -> None:
    with Target(standin, gpu=_CONTINUOUS) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            told = _launch_until(
                target, lambda told: len(told.kernel_times) > 1000, "launch 0 30 20 0", "sync"
            )
    assert told.windows == []
    assert set(_by_launch(told)) == {0}
    assert _is_sound(told)


def test_a_mode_that_is_refused_is_told_once_and_sampling_goes_on(standin: Path) -> None:
    # GIVEN a CUPTI without that mode
    with Target(standin, "no-serialized", gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            # WHEN windows are due, THEN that is told
            _launch_until(target, lambda told: told.errors, "launch 0 30 3 0", "sync")
            before = sum(_by_launch(target.told).values())
            # AND samples come as before, without another try
            until_s = time.monotonic() + 1
            over = lambda _: time.monotonic() > until_s  # noqa: E731
            told = _launch_until(target, over, "launch 0 300 10 0", "sync")
            assert sum(_by_launch(told).values()) > before
    assert told.failed == [(HelperError.SERIALISED, "cuptiPCSamplingSetConfigurationAttribute")]
    assert told.windows == [] and told.tier == HelperTier.STALLS
    assert set(_by_launch(told)) == {0}
    assert not told.losses


def test_several_contexts_have_no_window(standin: Path) -> None:
    # GIVEN a process of two contexts, whose kernels may wait for each other
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP, "context 1", "use 0")
        with target.control():
            launches = ("use 0", "launch 0 30 3 0", "use 1", "launch 0 30 3 0", "sync")
            _launch_until(target, lambda told: told.errors, *launches)
            until_s = time.monotonic() + 1
            told = _launch_until(target, lambda _: time.monotonic() > until_s, *launches)
            # THEN it is told once, and nothing is serialised
            assert told.failed == [(HelperError.SERIALISED, "the process has several contexts")]
            assert told.windows == [] and set(_by_launch(told)) == {0}
            # UNTIL one of them is gone
            target.obey("destroy 1", "use 0")
            told = _launch_until(target, lambda told: told.windows, "launch 0 30 3 0", "sync")
    assert len(told.errors) == 1


def test_a_window_ends_before_a_capture_begins(standin: Path) -> None:
    def is_cut(window: Serialised) -> bool:
        return window.end_ns - window.begin_ns < 90e6

    # GIVEN captures again and again, also while a window is open
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            turns = 0

            def is_seen(told: Told) -> bool:
                nonlocal turns
                turns += 1
                if turns % 50 == 0:
                    captured = "capture 1", "launch 1 1 1 1", "launch 0 5 1 0", "end 1"
                    assert target.obey(*captured) == 0
                return sum(map(is_cut, told.windows)) > 4

            # WHEN launches go on beside them, which would end them in a window
            told = _launch_until(target, is_seen, "launch 0 5 3 0", "sync")
    # THEN each comes to its end, and samples go on
    by_launch = _by_launch(told)
    assert by_launch[0]
    del by_launch[0]
    assert set(by_launch.values()) == {5 * SAMPLES_OF_BLOCK}
    assert _is_sound(told)


def test_no_window_begins_in_a_capture(standin: Path) -> None:
    with Target(standin, gpu=_CONTINUOUS) as target:
        target.obey(*_SETUP)
        with target.control() as control:
            target.read_until(_samples)
            # GIVEN a capture, WHEN windows are asked for
            target.obey("capture 1")
            control.start(serialised=250)

            # THEN none comes for longer than there is between two
            until_s = time.monotonic() + 1
            _launch_until(target, lambda _: time.monotonic() > until_s, "launch 0 10 1 0")
            assert target.told.windows == []
            # BEFORE the capture has ended, which nobody else did
            assert target.obey("end 1") == 0
            told = _launch_until(target, lambda told: told.windows, "launch 0 30 3 0", "sync")
    assert _is_sound(told)


def test_what_finds_no_room_is_told_without_its_launch(tmp_path: Path) -> None:
    # GIVEN a buffer for one kernel, and kernels that come faster than it is read
    folder = build_alone(tmp_path, _WINDOWS, "-DMOST_SERIALISED_PCS=4")
    with Target(folder, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control():
            target.read_until(_samples)
            told = _launch_until(
                target,
                lambda told: told.windows and told.losses,
                *("launch 0 30 20 0", "dense 0 30 20 3", "sync"),
            )
    # THEN they are counted, and no launch is told that may be another's
    assert told.losses[HelperLoss.UNNUMBERED] > 0
    assert set(told.losses) == {HelperLoss.UNNUMBERED}
    assert not told.errors


def test_a_context_that_goes_in_a_window_ends_it(standin: Path) -> None:
    with Target(standin, gpu=_ALL) as target:
        target.obey("init", "context 0", "module 1000", "function 0 scale", "destroy 0")
        with target.control():
            for turn in range(1, 250):
                target.obey("context 0", *["launch 0 500 1 0"] * 60, f"destroy {turn}")
                if len({window.context for window in target.read().windows}) > 3:
                    break
            told = target.told
            target.send("exit 0")
            assert target.process.wait(20) == 0
    assert len({window.context for window in told.windows}) > 3
    assert _is_sound(told)


def test_a_stop_in_a_window_leaves_the_process_as_it_was(standin: Path) -> None:
    with Target(standin, gpu=_ALL) as target:
        target.obey(*_SETUP)
        with target.control() as control:
            for _ in range(5):
                # GIVEN a window
                control.start(serialised=500)
                _launch_until(target, _samples, "launch 0 1 1 0", "sync")
                before = len(_numbered(target.told))
                has_more = lambda told: len(_numbered(told)) > before  # noqa: B023, E731
                _launch_until(target, has_more, "launch 0 30 3 0", "sync")
                # WHEN it is stopped
                control.stop()
                told = target.read_until(_is_off)
                # THEN no launch waits for its kernel
                begin_s = time.monotonic()
                target.obey("launch 0 300000 1 0")
                assert time.monotonic() - begin_s < 0.3
                target.obey("sync")
            assert len(target.read().windows) == 5
    assert _is_sound(told)


# Ends that have to wait for a capture


@contextmanager
def _captured(folder: Path) -> Iterator[tuple[Target, Control]]:
    """A process that is sampled, and has a capture."""
    with Target(folder, gpu=_CONTINUOUS) as target:
        target.obey(*_SETUP)
        with target.control() as control:
            target.read_until(_samples)
            target.obey("launch 0 1 1 0", "sync", "capture 1", "launch 1 1 1 1")
            yield target, control


def test_a_stop_waits_for_the_end_of_a_capture(standin: Path) -> None:
    # GIVEN a capture
    with _captured(standin) as (target, control):
        target.obey("launch 0 100 3 0")
        # WHEN the recorder stops
        control.stop()
        # THEN what there is then is told at once
        target.read_until(lambda told: len(told.kernel_times) >= 4)
        target.obey("launch 0 100 1 0")
        target.read_until(lambda told: len(told.kernel_times) >= 5)
        assert target.told.tier == HelperTier.STALLS
        # AND sampling ends when the capture has, which that did not end
        assert target.obey("end 1") == 0
        told = target.read_until(_is_off)
    assert told.states[-1].why == Why.ASKED
    assert _is_sound(told)


@pytest.mark.breadth
def test_a_pause_that_waits_for_a_capture_looks_for_its_end_seldom(tmp_path: Path) -> None:
    # GIVEN a capture in which a pause is due: 50 ms after sampling began
    folder = build_alone(tmp_path, "-DDUTY_NS=100000000ull")
    with _captured(folder) as (target, control):
        control.start(duty=500, read_out_ms=1_000)
        target.read_until(lambda told: told.states[-1].duty_permille == 500)
        time.sleep(0.2)
        # WHEN time passes
        slept, begun_s = target.switches_of_helper(), time.monotonic()
        time.sleep(1)
        looks = target.switches_of_helper() - slept
        # THEN it has looked each 10 ms at most, and a machine that is slow makes that fewer
        assert looks < 150 * (time.monotonic() - begun_s)
        assert target.read().tier == HelperTier.STALLS
        # AND it pauses when the capture has ended
        assert target.obey("end 1") == 0
        target.read_until(lambda told: told.states[-1].why == Why.DUTY)


def test_a_recorder_that_has_gone_is_let_go_after_the_capture(standin: Path) -> None:
    with _captured(standin) as (target, control):
        slept = target.switches_of_helper()
        control.close()
        wait_until(lambda: target.switches_of_helper() > slept, 30)  # it has seen that
        target.read()
        assert target.told.tier == HelperTier.STALLS
        assert target.obey("end 1") == 0
        told = target.read_until(_is_off)
    assert told.states[-1].why == Why.RECORDER_GONE


def test_a_start_takes_a_stop_back_that_waits(standin: Path) -> None:
    with _captured(standin) as (target, control):
        control.stop()
        control.start()
        slept = target.switches_of_helper()
        target.obey("launch 0 100 1 0")
        target.read_until(lambda told: len(told.kernel_times) >= 2)
        wait_until(lambda: target.switches_of_helper() > slept + 3)
        assert target.obey("end 1") == 0
        target.obey("launch 0 100 5 0", "sync")
        told = target.read_until(lambda told: len(told.kernel_times) >= 7)
        assert told.tier == HelperTier.STALLS
        # AND what needs sampling to begin anew waits, too
        target.obey("capture 1")
        control.start(period=18)
        target.obey("launch 0 100 1 0")
        target.read_until(lambda told: len(told.kernel_times) >= 8)
        assert told.contexts[1].period_cycles == 1 << 20
        assert target.obey("end 1") == 0
        is_set = lambda told: told.contexts[1].period_cycles == 1 << 18  # noqa: E731
        _launch_until(target, is_set, "launch 0 1 1 0")
    assert _is_sound(target.told)


@pytest.mark.breadth
def test_a_stop_waits_for_a_capture_without_end_for_a_while_only(tmp_path: Path) -> None:
    folder = build_alone(tmp_path, "-DCAPTURE_NS=1000000000ull")
    with _captured(folder) as (target, control):
        control.stop()
        told = target.read_until(_is_off)
        assert told.states[-1].why == Why.ASKED


def test_a_context_that_goes_leaves_the_captures_of_others_alone(standin: Path) -> None:
    # GIVEN two contexts that are sampled, and a capture
    with Target(standin, gpu=_CONTINUOUS) as target:
        target.obey(*_SETUP, "context 1", "launch 0 100 1 0", "use 0")
        with target.control():
            target.read_until(lambda told: {1, 2} <= told.reasons.keys())
            target.obey("use 1", "launch 0 100 2 0", "sync", "use 0", "capture 1")
            # WHEN one of them is destroyed
            target.obey("destroy 1")
            # THEN the capture comes to its end, and its samples are there
            assert target.obey("launch 1 1 1 1", "end 1") == 0
            told = target.read_until(lambda told: len(told.kernel_times) >= 3)
            of_second = sum(
                int(batch.stalls["count"].sum()) for batch in told.stalls if batch.context == 2
            )
            assert of_second >= 2 * 100 * SAMPLES_OF_BLOCK
            assert target.obey("launch 0 100 1 0") == 0
            target.read_until(lambda told: len(told.kernel_times) >= 4)
    assert _is_sound(told)


def test_an_exit_in_a_capture_waits_for_nothing(standin: Path) -> None:
    with _captured(standin) as (target, _):
        target.send("exit 7")
        assert target.process.wait(10) == 7
        assert target.read().tier == HelperTier.LAUNCHES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizer", "options"),
    [
        ("thread", {"TSAN_OPTIONS": "exitcode=66"}),
        ("address,undefined", {"ASAN_OPTIONS": "detect_leaks=0:exitcode=66"}),
    ],
)
@pytest.mark.breadth
def test_sanitizers_find_nothing_in_windows(
    tmp_path: Path, sanitizer: str, options: dict[str, str]
) -> None:
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", _WINDOWS)
    folder = build_all(tmp_path, ALONE, *flags)
    with Target(folder, gpu=_ALL, environment=options) as target:
        target.obey(*_SETUP)
        with target.control() as control:
            target.read_until(_samples, timeout_s=60)
            turns = (
                "threads 8 20",
                "capture 1",
                "launch 0 1 2 1",
                "end 1",
                "instantiate",
                "graph 1",
            )
            _launch_until(target, lambda told: len(told.windows) > 4, *turns, "sync")
            target.obey("capture 1")
            control.stop()
            target.obey("launch 0 10 10 0", "end 1")
            target.read_until(_is_off, timeout_s=60)
            target.send("exit 0")
            assert target.process.wait(60) == 0
    assert _is_sound(target.told)
