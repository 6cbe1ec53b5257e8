# SPDX-License-Identifier: Apache-2.0
"""Stacks of generated code that keeps frame pointers, walked to the thread's start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.model.profile import COMPLETE_REASONS, Profile, SampleClass
from recordings import Workload, frames_of, record_workload, rows_of

pytestmark = pytest.mark.bpf


_FRAMES = ("main", "spend_long", "entry", "interpreter", "compiled")


def _native(profile: Profile, stack: int) -> tuple[str, ...]:
    """Returns the frames of its own code from `main` on; none of a stack that is not complete."""
    if profile.stacks.ends[stack] not in COMPLETE_REASONS:
        return ()
    frames = frames_of(profile, stack)
    return tuple(name for name in frames if name in {*_FRAMES, "spend_brief", "never_called"})


def test_generated_code_with_frame_pointers_is_walked_to_its_start(
    tmp_path_factory: pytest.TempPathFactory, workload: Callable[..., Path]
) -> None:
    program = workload("jit", "-fomit-frame-pointer")
    for name in ("first", "second"):
        folder = tmp_path_factory.mktemp(name)
        profile, _ = record_workload(folder, Workload([program]), "-F", 999)
    times: dict[str, Counter[tuple[str, ...]]] = {}
    for caller in ("spend_long", "spend_brief"):
        times[caller] = Counter()
        for row in rows_of(profile, caller, None, SampleClass.ON_CPU):
            times[caller][_native(profile, int(row["stack"]))] += int(row["ns"])
    long, brief = times["spend_long"], times["spend_brief"]
    # THEN code that is called without a call instruction has its callers
    assert long[_FRAMES] > 0.95 * long.total(), long
    # At any of its instructions: no caller is left out where a frame is made or taken down.
    true = [("main", "spend_brief", *_FRAMES[2:depth]) for depth in range(2, 6)]
    assert sum(brief[frames] for frames in true) > 0.99 * brief.total(), brief
    assert brief[true[2]] > 0 and brief[true[3]] > 0, brief
