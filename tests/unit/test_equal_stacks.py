# SPDX-License-Identifier: Apache-2.0
"""Equal stacks of one process are one, in what calls of device APIs refer to."""

from __future__ import annotations

import numpy as np
from aiflame.agent.capture.equal_stacks import with_equal_stacks_merged
from aiflame.agent.model.gpu import CALL_DTYPE, LAUNCH_DTYPE, NONE, GpuProfile
from aiflame.agent.model.profile import Stacks, StopReason, Thread

_THREADS = (Thread(0, 10, "a", 0, 0), Thread(0, 11, "b", 0, 0), Thread(1, 20, "c", 0, 0))


def _stacks() -> Stacks:
    """Four times the same frames, the third time truncated; then others."""
    frames = np.array([1, 2] * 4 + [1, 3], np.uint32)
    ends = np.full(5, StopReason.ROOTED, np.uint8)
    ends[2] = StopReason.NO_TABLE
    return Stacks(np.arange(0, 12, 2, dtype=np.uint64), frames, ends)


def _gpu(*rows: tuple[int, int]) -> GpuProfile:
    """Calls and launches of (stack, thread)."""
    calls, launches = np.zeros(len(rows), CALL_DTYPE), np.zeros(len(rows), LAUNCH_DTYPE)
    for part in (calls, launches):
        part["stack"], part["thread"] = zip(*rows, strict=True)
    return GpuProfile(calls=calls, launches=launches)


def test_stacks_of_one_process_with_the_same_frames_and_end_are_one() -> None:
    # GIVEN one of another process, one that was truncated, one of other frames, and none
    gpu = _gpu((0, 0), (1, 1), (2, 0), (3, 2), (4, 0), (NONE, 0))
    merged = with_equal_stacks_merged(gpu, _stacks(), _THREADS)
    for rows in (merged.calls, merged.launches):
        assert rows["stack"].tolist() == [0, 0, 2, 3, 4, NONE]
    assert gpu.calls["stack"].tolist() == [0, 1, 2, 3, 4, NONE]


def test_what_has_no_equal_stacks_stays_as_it_is() -> None:
    gpu = _gpu((0, 0), (4, 0))
    assert with_equal_stacks_merged(gpu, _stacks(), _THREADS) is gpu
    empty = GpuProfile()
    assert with_equal_stacks_merged(empty, _stacks(), _THREADS) is empty
