# SPDX-License-Identifier: Apache-2.0
"""Stacks of generated code, walked to the thread's start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.model.profile import (
    COMPLETE_REASONS,
    Profile,
    SampleClass,
    StopReason,
    is_generated,
)
from recordings import Workload, frames_of, record_workload, rows_of

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]


_FRAMES = ("main", "spend_long", "entry", "interpreter", "compiled")
_BESIDE = ("spend_beside_data", "spend_beside_code")
_NAMES = {*_FRAMES, *_BESIDE, "spend_brief", "never_called", "spend_with_frame", "leaf"}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory, workload: Callable[..., Path]) -> Profile:
    """A recording of the program whose tables were there from the start."""
    program = workload("jit", "-fomit-frame-pointer")
    for name in ("first", "second"):
        folder = tmp_path_factory.mktemp(name)
        recorded, _ = record_workload(folder, Workload([program]), "-F", 999)
    return recorded


def _native(profile: Profile, stack: int) -> tuple[str, ...]:
    """Returns the frames of its own code from `main` on; none of a stack that is not complete."""
    if profile.stacks.ends[stack] not in COMPLETE_REASONS:
        return ()
    return tuple(name for name in frames_of(profile, stack) if name in _NAMES)


def _times(profile: Profile, function: str) -> Counter[tuple[str, ...]]:
    """Returns nanoseconds on CPU under a function, by `_native`."""
    times: Counter[tuple[str, ...]] = Counter()
    for row in rows_of(profile, function, None, SampleClass.ON_CPU):
        times[_native(profile, int(row["stack"]))] += int(row["ns"])
    return times


def test_generated_code_with_frame_pointers_is_walked_to_its_start(profile: Profile) -> None:
    long, brief = _times(profile, "spend_long"), _times(profile, "spend_brief")
    # THEN code that is called without a call instruction has its callers
    assert long[_FRAMES] > 0.95 * long.total(), long
    # At any of its instructions: no caller is left out where a frame is made or taken down.
    true = [("main", "spend_brief", *_FRAMES[2:depth]) for depth in range(2, 6)]
    assert sum(brief[frames] for frames in true) > 0.99 * brief.total(), brief
    assert brief[true[2]] > 0 and brief[true[3]] > 0, brief


def test_generated_code_is_told_from_that_of_files(profile: Profile) -> None:
    generated = {one.name for one in profile.functions if is_generated(one)}
    assert {"interpreter", "compiled", "leaf"} <= generated
    assert not generated & {"main", "entry", "_start"}


def test_a_leaf_of_generated_code_without_a_frame_is_left_by_the_top_of_its_stack(
    profile: Profile,
) -> None:
    # GIVEN callers in whose RBP is what looks like a frame and is none
    times = _times(profile, "leaf")
    # THEN none of their stacks is cut, and no caller is left out
    assert times[()] < 0.01 * times.total(), times
    for caller in _BESIDE:
        assert times["main", caller, "leaf"] > 0.25 * times.total(), times


def test_a_leaf_that_may_have_no_frame_is_not_said_to_be_certain(profile: Profile) -> None:
    # GIVEN a leaf whose RBP is its caller's frame, and the return address on top of the stack
    rows = rows_of(profile, "leaf", None, SampleClass.ON_CPU)
    ends = Counter[StopReason]()
    for row in rows:
        ends[StopReason(profile.stacks.ends[row["stack"]])] += int(row["ns"])
    assert ends[StopReason.ROOTED_BY_HEURISTIC] > 0.99 * ends.total(), ends
