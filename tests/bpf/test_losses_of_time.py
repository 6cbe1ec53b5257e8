# SPDX-License-Identifier: Apache-2.0
"""Threads and sums that find no room: a loss, said as time, never an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.model.profile import Profile
from recordings import Ended, Recording, Workload

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

_THREADS = 400


def _record(program: Path, folder: Path, *options: object) -> Ended:
    """Records threads that sleep, for a second."""
    with (
        Workload([program, "crowd", _THREADS]) as crowd,
        Recording(folder, "-p", crowd.pid, "-d", 1, *options) as recording,
    ):
        return recording.wait()


def _missing_share(said: str) -> float:
    match = re.search(r"([\d,.]+) (m?s) of ([\d,.]+) s of thread time is missing \((.+)\)", said)
    assert match is not None, said
    missing_s = float(match[1].replace(",", "")) / (1000 if match[2] == "ms" else 1)
    return missing_s / float(match[3].replace(",", ""))


def _kept_share(profile: Profile) -> float:
    observed = sum(thread.observed_ns for thread in profile.threads)
    return float(profile.samples["ns"].astype(np.int64).sum()) / observed


def test_threads_beyond_the_table_are_a_loss(workload: Callable[..., Path], tmp_path: Path) -> None:
    program = workload("sleepers", "-fomit-frame-pointer")
    ended = _record(program, tmp_path, "--thread-storage-size", 100)
    profile = ended.profile
    losses = {loss.name: loss.count for loss in profile.losses}
    # The kernel keeps some entries aside for each CPU.
    assert _THREADS - 100 <= losses["thread_table_full"] <= _THREADS
    assert "thread_table_full" in ended.stderr
    # All of them were there for the whole time.
    assert _missing_share(ended.stderr) == pytest.approx(1 - _kept_share(profile), abs=0.01)
    assert _missing_share(ended.stderr) > 0.7


def test_what_is_not_lost_is_not_said_to_miss_time(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    ended = _record(workload("sleepers", "-fomit-frame-pointer"), tmp_path)
    assert "is missing" not in ended.stderr
    assert _kept_share(ended.profile) == pytest.approx(1, abs=0.01)


def test_sums_beyond_the_table_are_said_as_time(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    with (
        Workload([workload("lives"), "crowd"]) as crowd,
        Recording(tmp_path, "-p", crowd.pid, "--hash-storage-size", 16) as recording,
    ):
        crowd.go()
        crowd.truth()
        ended = recording.stop()
    assert "sums_full" in ended.stderr
    profile = ended.profile
    assert _missing_share(ended.stderr) == pytest.approx(1 - _kept_share(profile), abs=0.05)
