# SPDX-License-Identifier: Apache-2.0
"""Threads and processes that come and go, many and fast (workloads/lives.c)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.model.profile import Process, Profile, SampleClass
from recordings import (
    OFF_CPU,
    Recording,
    Workload,
    count_of,
    frames_of,
    ns_of,
    off_cpu_by_thread,
    record_workload,
    rows_of,
)

pytestmark = pytest.mark.bpf


@pytest.fixture
def lives(workload: Callable[..., Path]) -> Path:
    return workload("lives")


def _assert_sums_are_possible(profile: Profile) -> None:
    """No thread has more time than it was there, nor the machine more than its CPUs."""
    off_cpu_ns = off_cpu_by_thread(profile)
    duration_ns = profile.recording.duration_ns
    for index, thread in enumerate(profile.threads):
        whole_ns = thread.on_cpu_ns + int(off_cpu_ns[index])
        assert 0 <= thread.on_cpu_ns <= whole_ns <= 1.001 * thread.observed_ns + 100_000, thread
        assert thread.observed_ns <= duration_ns + 100_000, thread
    assert profile.samples["ns"].max() <= duration_ns + 100_000
    cpus = os.sysconf("SC_NPROCESSORS_ONLN")
    assert sum(thread.on_cpu_ns for thread in profile.threads) <= 1.02 * cpus * duration_ns
    assert ns_of(profile, None, None, SampleClass.ON_CPU) <= 1.02 * cpus * duration_ns


@pytest.mark.parametrize("how", ["churn", "reuse"])
def test_short_lives_are_counted_once_each(lives: Path, tmp_path: Path, how: str) -> None:
    profile, truth = record_workload(tmp_path, Workload([lives, how]))

    # Three sleeps a life, and the ids of the dead, also when they are given out again, add
    # nothing.
    assert count_of(profile, "live_briefly", None, SampleClass.BLOCKED) == 3 * truth["lives"]
    _assert_sums_are_possible(profile)
    off_cpu_ns = off_cpu_by_thread(profile)
    rows = rows_of(profile, "live_briefly")
    brief = sorted({int(index) for index in rows["thread"]})
    if how == "reuse":
        assert [profile.threads[index].tid for index in brief] == [truth["tid"]]
    whole_ns = sum(profile.threads[i].on_cpu_ns + int(off_cpu_ns[i]) for i in brief)
    observed_ns = sum(profile.threads[i].observed_ns for i in brief)
    assert whole_ns == pytest.approx(observed_ns, rel=0.01)

    # The rest of what the maker measured is its own: to make a thread, and to notice its end.
    assert observed_ns <= truth["wall_ns"]
    assert ns_of(profile, "live_briefly", None, *OFF_CPU) <= truth["wall_ns"]
    assert observed_ns >= 0.5 * truth["wall_ns"]


def test_two_thousand_threads_are_all_there(lives: Path, tmp_path: Path) -> None:
    profile, truth = record_workload(tmp_path, Workload([lives, "crowd"]))
    assert truth["threads"] == 2000
    assert len(profile.threads) == 2001
    assert len({thread.tid for thread in profile.threads}) == 2001
    asleep = count_of(profile, "sleep_in_crowd", None, SampleClass.BLOCKED)
    assert asleep == truth["sleeps"] == 6000
    # Nobody wants two thousand lines of single waits: a bound for these is all that may show.
    assert {loss.name for loss in profile.losses} <= {"waits_not_listed"}

    off_cpu_ns = off_cpu_by_thread(profile)
    observed_ns = np.array([thread.observed_ns for thread in profile.threads])
    whole_ns = np.array([thread.on_cpu_ns for thread in profile.threads]) + off_cpu_ns
    assert (np.abs(whole_ns - observed_ns) <= 0.01 * observed_ns).all()
    _assert_sums_are_possible(profile)


def _processes_of(profile: Profile, function: str) -> set[Process]:
    rows = rows_of(profile, function, None, SampleClass.ON_CPU)
    return {profile.processes[profile.threads[index].process] for index in rows["thread"]}


def test_children_are_followed_when_asked_for(lives: Path, tmp_path: Path) -> None:
    profile, truth = record_workload(tmp_path, Workload([lives, "family"]), "-s", "-F", 999)

    # One process image up to its exec, another one from there on.
    (before,) = _processes_of(profile, "work_of_child")
    (after,) = _processes_of(profile, "work_after_exec")
    assert before.pid == after.pid == truth["child"]
    assert before != after
    assert before.command_line == f"{lives} family"
    assert after.command_line == "lives after-exec"
    assert after.exited_ns is not None
    for function in ("work_of_child", "work_after_exec"):
        sampled_ns = ns_of(profile, function, None, SampleClass.ON_CPU)
        # 200 samples each, which vary by less than the root of that: five times so much.
        assert sampled_ns == pytest.approx(truth["cpu_ns"], rel=5 / np.sqrt(200))

    # Each image has its own part of the thread's exact time.
    off_cpu_ns = off_cpu_by_thread(profile)
    for index, thread in enumerate(profile.threads):
        if profile.processes[thread.process] in (before, after):
            assert thread.on_cpu_ns == pytest.approx(truth["cpu_ns"], rel=0.05)
            whole_ns = thread.on_cpu_ns + int(off_cpu_ns[index])
            assert whole_ns == pytest.approx(thread.observed_ns, rel=0.01)


def test_children_are_left_alone_otherwise(lives: Path, tmp_path: Path) -> None:
    profile, truth = record_workload(tmp_path, Workload([lives, "family"]))
    assert [process.pid for process in profile.processes] != []
    assert truth["child"] not in {process.pid for process in profile.processes}
    assert ns_of(profile, "work_of_child") == 0


@pytest.mark.slow
@pytest.mark.parametrize("whole_machine", [True, False], ids=["all", "children"])
def test_a_storm_of_processes_is_weathered(
    lives: Path, tmp_path: Path, whole_machine: bool
) -> None:
    with Workload([lives, "storm"]) as storm:
        target = ["-a"] if whole_machine else ["-p", storm.pid, "-s"]
        with Recording(tmp_path, *target) as recording:
            storm.go()
            processes = storm.truth()["processes"]
            ended = recording.stop()
    profile = ended.profile
    _assert_sums_are_possible(profile)
    assert (profile.samples["ns"] > 0).all()

    # A thousand children, each with an image before its exec and one after it: all there but for
    # those that a named loss accounts for.
    seen = {process.pid for process in profile.processes if process.parent_pid == storm.pid}
    lost = sum(loss.count for loss in profile.losses)
    assert len(seen) + lost >= 0.95 * processes, profile.losses
    assert all(loss.meaning for loss in profile.losses)

    # The recorder, whose pid is known, and its own children are not in the flame graph.
    pids = {profile.processes[profile.threads[i].process].pid for i in profile.samples["thread"]}
    assert recording.pid not in pids
    assert recording.pid not in {process.parent_pid for process in profile.processes}


def test_a_command_is_recorded_from_its_first_instruction(lives: Path, tmp_path: Path) -> None:
    with Recording(tmp_path, "-F", 999, "--", lives, "first") as recording:
        profile = recording.wait().profile
    early = rows_of(profile, "work_before_main", None, SampleClass.ON_CPU)
    assert int(early["ns"].sum()) == pytest.approx(201_000_000, rel=5 / np.sqrt(200))
    assert "main" not in frames_of(profile, early["stack"][0])

    # Its whole life: from its exec, to which nothing of the recorder belongs, to its end.
    (process,) = profile.processes
    (thread,) = profile.threads
    assert process.name == "lives"
    assert process.command_line == f"{lives} first"
    assert process.exited_ns is not None
    assert thread.observed_ns == pytest.approx(process.exited_ns - process.started_ns, rel=0.01)
    assert thread.on_cpu_ns >= 0.99 * 201_000_000
    _assert_sums_are_possible(profile)
