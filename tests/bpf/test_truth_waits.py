# SPDX-License-Identifier: Apache-2.0
"""Off-CPU time against what threads measured of themselves (workloads/waits.c).

One recording serves the whole file: eleven ways to wait, side by side. A thread's own measure of
its off-CPU time is its wall time less its CPU time, so that a busy machine, on which threads also
wait for a CPU, changes both sides alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from aiflame.agent.model.profile import Profile, SampleClass, StopReason
from aiflame.agent.reports.causes import Cause, classify
from recordings import (
    OFF_CPU,
    Workload,
    count_of,
    frames_of,
    ns_of,
    off_cpu_by_thread,
    record_workload,
    rows_of,
    stacks_with,
    thread_named,
)

pytestmark = pytest.mark.bpf


class Run(NamedTuple):
    """The recording of this file."""

    profile: Profile
    truth: dict[str, int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, workload: Callable[..., Path]) -> Run:
    folder = tmp_path_factory.mktemp("waits")
    return Run(*record_workload(folder, Workload([workload("waits")]), "-F", 999))


def _ns_by_cause(profile: Profile, rows: npt.NDArray[np.void], cause: Cause) -> int:
    return int(rows["ns"][classify(profile)[rows["stack"]] == cause].sum())


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("take_naps", Cause.SLEEP),
        ("read_from_pipe", Cause.PIPE_SOCKET),
        ("poll_in_vain", Cause.POLL),
    ],
)
def test_waits_last_as_long_as_the_thread_says(run: Run, function: str, cause: Cause) -> None:
    truth_ns = run.truth[f"{function}.wall_ns"] - run.truth[f"{function}.cpu_ns"]
    assert ns_of(run.profile, function, None, *OFF_CPU) == pytest.approx(truth_ns, rel=0.02)

    # Nearly all of it asleep, and for the right reason.
    blocked = rows_of(run.profile, function, None, SampleClass.BLOCKED)
    assert blocked["ns"].sum() > 0.5 * truth_ns
    # A machine short of memory may add a page fault.
    assert _ns_by_cause(run.profile, blocked, cause) > 0.98 * blocked["ns"].sum()


def test_waits_for_a_mutex_last_as_long_as_the_thread_says(run: Run) -> None:
    # Of the whole thread: the C library's lock hides its callers. The thread's wait for its first
    # turn, before it could measure anything, has no stack.
    off_cpu = rows_of(run.profile, None, "locks", *OFF_CPU)
    off_cpu = off_cpu[run.profile.stacks.ends[off_cpu["stack"]] != StopReason.NOT_RUN_YET]
    truth_ns = run.truth["locks.wall_ns"] - run.truth["locks.cpu_ns"]
    assert int(off_cpu["ns"].sum()) == pytest.approx(truth_ns, rel=0.02)

    blocked = off_cpu[off_cpu["klass"] == SampleClass.BLOCKED]
    assert blocked["count"].sum() == run.truth["locks.sleeps"]
    assert _ns_by_cause(run.profile, blocked, Cause.LOCK) > 0.98 * blocked["ns"].sum()


def test_a_prime_number_of_sleeps_is_counted(run: Run) -> None:
    blocked = rows_of(run.profile, "take_naps", None, SampleClass.BLOCKED)
    causes = classify(run.profile)[blocked["stack"]]
    assert int(blocked["count"][causes == Cause.SLEEP].sum()) == 23
    # A page that the machine took back may cost the thread a sleep more.
    assert int(blocked["count"].sum()) == run.truth["take_naps.sleeps"] <= 25


@pytest.mark.parametrize(
    "function", ["read_from_pipe", "poll_in_vain", "answer_pings", "hop_between_cpus"]
)
def test_each_sleep_is_one_interval(run: Run, function: str) -> None:
    # How often 4,999 round trips put a thread to sleep is up to the scheduler, which keeps count.
    assert run.truth[f"{function}.sleeps"] > 0
    counted = count_of(run.profile, function, None, SampleClass.BLOCKED)
    assert counted == run.truth[f"{function}.sleeps"]


def test_waits_for_a_busy_cpu_are_counted_as_such(run: Run) -> None:
    assert run.truth["gaps_ns"] > 300_000_000
    waiting = (SampleClass.PREEMPTED, SampleClass.WAITING_TO_RUN)
    recorded_ns = ns_of(run.profile, "compete_for_cpu", None, *waiting)
    assert recorded_ns == pytest.approx(run.truth["gaps_ns"], rel=0.02)
    assert ns_of(run.profile, "compete_for_cpu", None, SampleClass.BLOCKED) == 0


def test_intervals_survive_a_move_to_another_cpu(run: Run) -> None:
    truth_ns = run.truth["hop_between_cpus.wall_ns"] - run.truth["hop_between_cpus.cpu_ns"]
    recorded_ns = ns_of(run.profile, "hop_between_cpus", None, *OFF_CPU)
    assert recorded_ns == pytest.approx(truth_ns, rel=0.02)


def test_on_and_off_cpu_make_the_whole_time_of_each_thread(run: Run) -> None:
    # naps, locks, holder, reads, writer, polls, answerer, pinger, hops, two rivals, early, late,
    # and the main thread
    assert len(run.profile.threads) == 14
    off_cpu_ns = off_cpu_by_thread(run.profile)
    for index, thread in enumerate(run.profile.threads):
        whole_ns = thread.on_cpu_ns + off_cpu_ns[index]
        assert whole_ns == pytest.approx(thread.observed_ns, rel=0.01), thread.name
        assert whole_ns <= 1.0001 * run.profile.recording.duration_ns, thread.name


def test_sampled_time_agrees_with_exact_time(run: Run) -> None:
    # Where a tick falls is chance: the number of samples in a time t varies by less than
    # sqrt(t / period). Five of that, and one sample at each end of each thread's run.
    for name in ("rival-1", "rival-2"):
        exact = thread_named(run.profile, name).on_cpu_ns / run.profile.recording.period_ns
        sampled = count_of(run.profile, None, name, SampleClass.ON_CPU)
        assert abs(sampled - exact) <= 5 * np.sqrt(exact) + 2, name


def test_a_thread_asleep_since_before_the_recording_is_there(run: Run) -> None:
    thread = thread_named(run.profile, "early")
    assert thread.on_cpu_ns == 0
    assert thread.observed_ns == pytest.approx(run.profile.recording.duration_ns, rel=0.01)
    (row,) = rows_of(run.profile, None, "early")
    assert row["klass"] == SampleClass.BLOCKED
    assert row["count"] == 1
    assert int(row["ns"]) == pytest.approx(run.profile.recording.duration_ns, rel=0.01)

    # Its stack was walked from outside.
    assert run.profile.stacks.ends[row["stack"]] == StopReason.ROOTED
    assert "wait_for_ever" in frames_of(run.profile, row["stack"])
    assert classify(run.profile)[row["stack"]] == Cause.PIPE_SOCKET


def test_a_thread_that_never_wakes_up_again_is_there(run: Run) -> None:
    thread = thread_named(run.profile, "late")
    rows = rows_of(run.profile, "wait_for_ever", "late", SampleClass.BLOCKED)
    assert rows["count"].sum() == 1
    assert int(rows["ns"].sum()) == pytest.approx(thread.observed_ns, rel=0.01)

    # It has a line among the long waits as well, to the end of the recording.
    waits = run.profile.waits[stacks_with(run.profile, "wait_for_ever")[run.profile.waits["stack"]]]
    (wait,) = waits[waits["thread"] == run.profile.threads.index(thread)]
    assert wait["blocked_ns"] == rows["ns"].sum()
    end_ns = int(wait["start_ns"] + wait["blocked_ns"])
    assert end_ns == pytest.approx(run.profile.recording.duration_ns, rel=0.001)


def test_nothing_was_lost(run: Run) -> None:
    assert [loss for loss in run.profile.losses if loss.name != "sampling_skipped"] == []
