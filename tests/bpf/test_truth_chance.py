# SPDX-License-Identifier: Apache-2.0
"""Off-CPU stacks by chance against what threads measured of themselves (workloads/chance.c).

What is exact has to be right to the measure; what chance has chosen, within five times what it
varies by: once in a million and more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.model.profile import Profile, SampleClass, StopReason
from aiflame.agent.model.window import Window, check, check_wall
from aiflame.agent.processes.targets import cgroup2_mounts
from cgroups import in_cgroup, made_groups
from recordings import (
    OFF_CPU,
    Recording,
    count_of,
    ns_of,
    off_cpu_by_thread,
    rows_of,
    stacks_with,
)
from support import wait_until

pytestmark = pytest.mark.bpf

# A third of what all stacks take, and more than exact totals do: where these alone are above the
# budget, threads have fewer stacks than is said below.
_BUDGET_PCT = 10
# Of a thread that waits often, whatever its cgroup's chance (agent/fleet/cost.py).
_LEAST_STACKS_PER_S = 20
_SIGMAS = 5
# While less is done, one on-CPU sample in so many is taken.
_SAMPLES_ONE_IN = 4
# Threads measure their waits with clocks that take time themselves.
_MEASURE = 0.03


class Run(NamedTuple):
    """The recording of this file: the workload in two cgroups at once."""

    profile: Profile
    windows: list[Window]
    truths: list[dict[str, int]]
    pids: list[int]
    said: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, workload: Callable[..., Path]) -> Iterator[Run]:
    program = workload("chance")
    names = ["aiflame-chance/one", "aiflame-chance/other"]
    with ExitStack() as stack:
        groups = stack.enter_context(made_groups(cgroup2_mounts()[0], *names))
        started = [stack.enter_context(in_cgroup(group, program)) for group in groups]
        pids = [one.pid for one in started]
        folder = tmp_path_factory.mktemp("chance")
        recording = stack.enter_context(
            Recording(
                folder,
                *("-p", ",".join(map(str, pids)), "--off-cpu-budget", _BUDGET_PCT),
                *("--stack-storage-size", 4096),
            )
        )
        for one in started:
            one.go()
        truths = [one.truth() for one in started]
        wait_until(lambda: len(recording.windows()) >= 5, 60)
        windows = recording.windows()
        ended = recording.stop()
        yield Run(ended.profile, windows, truths, pids, ended.stderr)


def _of(run: Run, pid: int) -> Profile:
    """The profile with the samples of one process alone."""
    profile = run.profile
    processes = [index for index, process in enumerate(profile.processes) if process.pid == pid]
    threads = [i for i, thread in enumerate(profile.threads) if thread.process in processes]
    rows = profile.samples[np.isin(profile.samples["thread"], threads)]
    return replace(profile, samples=rows)


def _each(run: Run) -> list[tuple[Profile, dict[str, int]]]:
    return [(_of(run, pid), truth) for pid, truth in zip(run.pids, run.truths, strict=True)]


def _sampled(profile: Profile, function: str) -> int:
    return ns_of(profile, function, None, *OFF_CPU)


def _young_ns(truth: dict[str, int]) -> int:
    """What long waits had of a window that closed when they were too young to be told as long."""
    return truth["rest_long.count"] * abi.OPEN_WAIT_NS


def test_time_adds_up_in_every_window(run: Run) -> None:
    # GIVEN all windows but the first, in which threads are still being entered
    for window in run.windows[1:]:
        check(window)
        check_wall(window)


def test_on_and_off_cpu_make_the_whole_time_of_each_thread(run: Run) -> None:
    off_cpu_ns = off_cpu_by_thread(run.profile)
    assert len(run.profile.threads) == 2 * 8
    for index, thread in enumerate(run.profile.threads):
        whole_ns = thread.on_cpu_ns + off_cpu_ns[index]
        assert whole_ns == pytest.approx(thread.observed_ns, rel=0.01), thread.name


def test_waits_of_a_second_are_exact(run: Run) -> None:
    for profile, truth in _each(run):
        assert truth["rest_long.count"] == count_of(
            profile, "rest_long", "rester", SampleClass.BLOCKED
        )
        recorded_ns = _sampled(profile, "rest_long")
        bound_ns = 0.01 * truth["rest_long.ns"] + _young_ns(truth)
        assert abs(recorded_ns - truth["rest_long.ns"]) < bound_ns
        # They were walked from outside or chosen, and are complete.
        ends = profile.stacks.ends[rows_of(profile, "rest_long", "rester")["stack"]]
        assert {*ends.tolist()} == {StopReason.ROOTED}


def test_short_waits_of_a_thread_with_long_ones_keep_their_share(run: Run) -> None:
    for profile, truth in _each(run):
        # All of the thread's other waits are of one function: they are scaled to what they were.
        recorded_ns = _sampled(profile, "rest_short")
        bound_ns = _MEASURE * truth["rest_short.ns"] + _young_ns(truth)
        assert abs(recorded_ns - truth["rest_short.ns"]) < bound_ns
        # What is missing from the one is in the other.
        both_ns = recorded_ns + _sampled(profile, "rest_long")
        true_ns = truth["rest_short.ns"] + truth["rest_long.ns"]
        assert both_ns == pytest.approx(true_ns, rel=0.01)


def test_waits_of_two_lengths_by_turns_keep_their_shares(run: Run) -> None:
    for profile, truth in _each(run):
        for thread, functions in (("mixer", ("mix_short", "mix_middle")),):
            ns = [_sampled(profile, function) for function in functions]
            true_ns = [truth[f"{function}.ns"] for function in functions]
            # THEN both together are exact,
            assert sum(ns) == pytest.approx(sum(true_ns), rel=_MEASURE), thread
            # and of a ratio estimator, the error of one share is the other share times the error
            # of how many were chosen of each: one over the root of that, of each.
            seconds = profile.recording.duration_ns / 1e9
            chosen = _LEAST_STACKS_PER_S * min(seconds, 5) / 2
            for one, other, true_one, true_other in zip(
                ns, ns[::-1], true_ns, true_ns[::-1], strict=True
            ):
                error = true_other / sum(true_ns) * np.sqrt(2 / chosen)
                bound = (_SIGMAS * error + _MEASURE) * true_one
                assert abs(one - true_one) < max(bound, _MEASURE * true_other), (one, other)


def test_a_thread_that_waits_seldom_has_all_its_waits(run: Run) -> None:
    for profile, truth in _each(run):
        counted = count_of(profile, "wait_seldom", "seldom", SampleClass.BLOCKED)
        # One more where a page was not there.
        assert counted in (truth["wait_seldom.count"], truth["wait_seldom.count"] + 1)
        assert _sampled(profile, "wait_seldom") == pytest.approx(truth["wait_seldom.ns"], rel=0.01)


def test_busy_threads_wait_where_they_wait(run: Run) -> None:
    for profile, _ in _each(run):
        for function, thread in (("await_ping", "answerer"), ("await_turn", "passer-1")):
            under = ns_of(profile, function, thread, SampleClass.BLOCKED)
            whole = ns_of(profile, None, thread, SampleClass.BLOCKED)
            # Another wait, as for a page, stands for up to 64 like it if it is chosen: of 1 ms,
            # one or two in four seconds are this much.
            assert under > 0.97 * whole, thread
            # Each wait is counted, though few have a stack.
            assert count_of(profile, function, thread, SampleClass.BLOCKED) > 5_000


def test_next_to_nothing_is_without_a_stack(run: Run) -> None:
    bare = run.profile.stacks.ends == StopReason.NOT_SAMPLED
    rows = run.profile.samples[run.profile.samples["klass"] != SampleClass.ON_CPU]
    assert int(rows["ns"][bare[rows["stack"]]].sum()) < 0.01 * int(rows["ns"].sum())
    # What there is is said.
    lost = {loss.name: loss.count for loss in run.profile.losses}
    assert bool(bare[rows["stack"]].any()) == ("waits_not_sampled" in lost)


def test_few_stacks_were_taken(run: Run) -> None:
    # Some 20,000 switches a second in each cgroup would leave no thread's stacks out.
    switches = sum(int(rows_of(p, None, None, *OFF_CPU)["count"].sum()) for p, _ in _each(run))
    assert switches > 50_000
    assert stacks_with(run.profile, "await_turn").any()


def test_short_processes_take_few_stacks(tmp_path: Path) -> None:
    # GIVEN 300 processes that wait once each, and next to nothing to spend on stacks
    command = "for i in $(seq 300); do /bin/sleep 0.002; done"
    with Recording(
        tmp_path, "--off-cpu-budget", 0.1, "--", "/bin/bash", "-c", command
    ) as recording:
        profile = recording.wait().profile
    rows = rows_of(profile, None, "sleep", SampleClass.BLOCKED)
    waits = int(rows["count"].sum())
    assert waits >= 300
    # THEN a wait takes no stack because its thread is new: some 1 in 16 do, more where each of
    # them took long to begin.
    bare = profile.stacks.ends[rows["stack"]] == StopReason.NOT_SAMPLED
    assert int(rows["count"][bare].sum()) > waits / 4


class Thrifty(NamedTuple):
    """What was recorded while less was done of what can be left.

    Attributes:
        counts: By name.
        blocked: ns by name of the thread and leaf of the stack, "" for those without one.
    """

    counts: dict[str, int]
    blocked: dict[str, dict[str, int]]


def _thrifty(program: Sequence[str], seconds: int, *, thrift: int = 2, one_in: int = 1) -> Thrifty:
    recorder = Path(__file__).parents[1] / "record_thrifty.py"
    with subprocess.Popen(program) as running:
        wanted = (running.pid, seconds, thrift, _SAMPLES_ONE_IN, one_in)
        command = [sys.executable, str(recorder), *map(str, wanted)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        running.kill()
    assert done.returncode == 0, done.stderr
    return Thrifty(**json.loads(done.stdout))


def test_samples_that_were_drawn_stand_for_those_that_were_left_out() -> None:
    # GIVEN a process that computes, of whose samples one in four is taken
    found = _thrifty(("sh", "-c", "while :; do :; done"), 3).counts
    # THEN each counts once, and weighs as much as four,
    assert found["sampled_ns"] == found["samples"] * _SAMPLES_ONE_IN * found["period_ns"]
    # those that were left out are counted,
    whole = found["samples"] + found["samples_left_out"]
    error = np.sqrt(whole / _SAMPLES_ONE_IN * (1 - 1 / _SAMPLES_ONE_IN))
    assert abs(found["samples"] - whole / _SAMPLES_ONE_IN) < _SIGMAS * error
    # and what a thread was on the CPU is as exact as it was.
    assert whole * found["period_ns"] == pytest.approx(found["on_cpu_ns"], rel=0.1)


def test_only_the_longest_waits_are_listed_where_less_is_done() -> None:
    # GIVEN a shell that waits for 1.2 s again and again
    found = _thrifty(("sh", "-c", "while :; do sleep 1.2; done"), 6).counts
    # THEN none is listed that ends, it is said of how many, and what goes on at the end is there.
    assert found["waits_not_listed"] >= 3
    assert found["waits"] <= 2


@pytest.mark.breadth
def test_long_waits_that_nobody_has_walked_have_the_stacks_of_their_thread(
    workload: Callable[..., Path],
) -> None:
    # GIVEN 300 threads that wait for a second again and again, of which one wait in eight has a
    # stack, and more than can be walked while they last
    found = _thrifty((str(workload("resters")),), 12, thrift=6, one_in=8)
    here, there = found.blocked["here"], found.blocked["there"]
    # THEN those that took one are counted as what they cost, but for those of the last window,
    stacks = 12 * 300 / 1.1 / 8
    assert stacks / 4 < found.counts["stacks"] < stacks + _SIGMAS * np.sqrt(stacks)
    # most of the time has a stack, though seven waits in eight took none,
    for each in (here, there):
        assert each.get("", 0) < 0.5 * sum(each.values())
    # AND none has that of another.
    assert not (here.keys() & there.keys()) - {""}
