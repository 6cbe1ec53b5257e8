# SPDX-License-Identifier: Apache-2.0
"""CPU shares and known stacks (workloads/burns.c), in one recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from aiflame.agent.model.profile import COMPLETE_REASONS, Profile, SampleClass, StopReason
from recordings import (
    Workload,
    count_of,
    frames_of,
    off_cpu_by_thread,
    record_workload,
    rows_of,
    thread_named,
)

pytestmark = pytest.mark.bpf

# Where the C library starts threads and processes.
# With unwind tables walks go on to where the kernel began the thread.
_STARTS = {"start_thread", "__libc_start_call_main", "clone3", "_start"}


class Run(NamedTuple):
    """The recording of this file."""

    profile: Profile
    truth: dict[str, int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, workload: Callable[..., Path]) -> Run:
    folder = tmp_path_factory.mktemp("burns")
    return Run(*record_workload(folder, Workload([workload("burns")]), "-F", 999))


def test_functions_get_their_shares_of_the_cpu(run: Run) -> None:
    three = count_of(run.profile, "spend_three", "shares", SampleClass.ON_CPU)
    one = count_of(run.profile, "spend_one", "shares", SampleClass.ON_CPU)
    truth_ns = run.truth["spend_three"], run.truth["spend_one"]
    share = truth_ns[0] / sum(truth_ns)
    assert share == pytest.approx(0.75, abs=0.01)

    # 1,500 ms at 999 Hz. The number of samples in one of two functions is binomial at worst: five
    # standard deviations, missed once in two million runs.
    n = three + one
    assert n > 1000
    assert abs(three - share * n) < 5 * np.sqrt(n * share * (1 - share))


def test_a_sample_weighs_what_a_thread_runs_between_two(run: Run) -> None:
    # How many ticks fall into a time t that comes in pieces varies by less than sqrt(t / period).
    period_ns = run.profile.recording.period_ns
    assert period_ns == 1_000_000_000 // 999
    for name in ("shares", "shallow", "deep"):
        exact = thread_named(run.profile, name).on_cpu_ns / period_ns
        sampled = count_of(run.profile, None, name, SampleClass.ON_CPU)
        assert abs(sampled - exact) < 5 * np.sqrt(exact) + 2, name


def test_on_and_off_cpu_make_the_whole_time_of_each_thread(run: Run) -> None:
    off_cpu_ns = off_cpu_by_thread(run.profile)
    assert len(run.profile.threads) == 4
    for index, thread in enumerate(run.profile.threads):
        whole_ns = thread.on_cpu_ns + int(off_cpu_ns[index])
        assert whole_ns == pytest.approx(thread.observed_ns, rel=0.01), thread.name


def test_every_stack_leads_to_the_start_of_its_thread(run: Run) -> None:
    on_cpu = rows_of(run.profile, None, None, SampleClass.ON_CPU)
    checked = 0
    for stack in np.unique(on_cpu["stack"]):
        frames = frames_of(run.profile, int(stack))
        if "descend" in frames and frames.count("descend") > 200:
            continue  # deeper than is kept, see below
        if not {"shares", "descend", "main"} & {*frames}:
            continue  # the C library's own code, before and after the workload's
        assert run.profile.stacks.ends[stack] in COMPLETE_REASONS, frames
        assert frames[0] in {*_STARTS, "_start"}, frames
        assert {"diver", "shares", "main"} & {*frames[:4]}, frames
        checked += 1
    assert checked > 5


def test_two_hundred_calls_deep_are_two_hundred_frames(run: Run) -> None:
    on_cpu = rows_of(run.profile, "descend", "shallow", SampleClass.ON_CPU)
    stacks = [frames_of(run.profile, stack) for stack in on_cpu["stack"]]
    # The C library has no frame pointers: in its clock, the caller is missing.
    is_own = np.array([frames[-1] == "descend" for frames in stacks])
    own = [frames for frames in stacks if frames[-1] == "descend"]
    counts, depths = on_cpu["count"][is_own], [frames.count("descend") for frames in own]
    # On the way down, which takes microseconds, a page of the stack may be waited for.
    assert counts[np.array(depths) == 200].sum() >= 0.95 * counts.sum() > 0
    assert max(depths) == 200
    assert {frames[0] for frames in own} <= _STARTS
    lengths = [len(frames) - frames.index("diver") for frames in own]
    assert lengths == [depth + 1 for depth in depths]


def test_what_is_deeper_than_is_kept_says_so(run: Run) -> None:
    on_cpu = rows_of(run.profile, "descend", "deep", SampleClass.ON_CPU)
    deepest = [row for row in on_cpu if frames_of(run.profile, row["stack"]).count("descend") > 200]
    assert deepest
    for row in deepest:
        assert run.profile.stacks.ends[row["stack"]] == StopReason.TOO_DEEP
        assert "diver" not in frames_of(run.profile, row["stack"])
    losses = {loss.name: loss.count for loss in run.profile.losses}
    assert losses["user_frames_cut"] >= sum(int(row["count"]) for row in deepest)
