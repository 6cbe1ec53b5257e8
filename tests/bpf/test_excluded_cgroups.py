# SPDX-License-Identifier: Apache-2.0
"""Cgroups that are left out in the kernel: nothing of them is recorded, and it is said how much."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.processes.targets import cgroup2_mounts
from bench.kernel import bpf_stats
from cgroups import made_groups

pytestmark = pytest.mark.bpf

_RECORDER = Path(__file__).parents[1] / "record_excluding.py"
_NAME = f"aiflame-excluded-{os.getpid()}"
# Computes and sleeps in turn, in a process that it becomes by exec in its cgroup.
_COMPUTE = """
import time
while True:
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass
    time.sleep(0.01)
"""
# Two processes on one CPU that wake each other: nothing but context switches.
_SWITCH = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
(a, b), (c, d) = os.pipe(), os.pipe()
read, write = (a, d) if os.fork() else (c, b)
os.write(d, b"x")
while os.write(write, os.read(read, 1)):
    pass
"""


@pytest.fixture
def groups() -> Iterator[tuple[Path, Path]]:
    """Two cgroups of v2, side by side."""
    with made_groups(cgroup2_mounts()[0], f"{_NAME}/out", f"{_NAME}/in") as (out, inside):
        yield out, inside


@contextmanager
def _running(group: Path, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a Python program as an engine starts a container: moved first, then exec."""
    shell = 'echo $$ > "$1/cgroup.procs" && exec "$2" -c "$3"'
    command = ["sh", "-c", shell, "sh", group, sys.executable, script]
    with subprocess.Popen([*map(str, command)], start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, 9)


@contextmanager
def _recorder(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, _RECORDER, *arguments]
    with subprocess.Popen(
        [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _answer(recorder: subprocess.Popen[str]) -> dict[str, Any]:
    answer, _ = recorder.communicate("go\n", timeout=60)
    assert recorder.returncode == 0
    found: dict[str, Any] = json.loads(answer)
    return found


def test_nothing_of_an_excluded_cgroup_is_recorded(groups: tuple[Path, Path]) -> None:
    out, inside = groups
    with ExitStack() as stack:
        # GIVEN a program in an excluded cgroup and one beside it, there before the recording is
        before = stack.enter_context(_running(out, _COMPUTE))
        beside = stack.enter_context(_running(inside, _COMPUTE))
        recorder = stack.enter_context(_recorder(4, out))
        # AND one that enters the cgroup while the host is recorded
        after = stack.enter_context(_running(out, _COMPUTE))
        # WHEN it is recorded
        answer = _answer(recorder)
    times, losses = answer["times"], answer["losses"]
    # THEN there is nothing of the first
    assert str(before.pid) not in times
    assert times[str(beside.pid)]["on_ns"] > 0
    # AND of the last what it was before it came there: a shell, for some milliseconds
    assert times.get(str(after.pid), {"observed_ns": 0})["observed_ns"] < 1_000_000_000
    # AND it is said how much is missing: both wanted two thirds of a CPU
    assert losses["excluded"] > 0
    assert losses["excluded_ns"] == losses["excluded"] * 1_001_001
    assert losses["excluded_ns"] > times[str(beside.pid)]["on_ns"] / 2


def test_a_cgroup_that_is_excluded_later_leaves_at_its_next_switch(
    groups: tuple[Path, Path],
) -> None:
    out, inside = groups
    with ExitStack() as stack:
        # GIVEN two programs that are recorded
        leaving = stack.enter_context(_running(out, _COMPUTE))
        staying = stack.enter_context(_running(inside, _COMPUTE))
        recorder = stack.enter_context(_recorder(4, "late", out))
        # WHEN the cgroup of one is excluded
        answer = _answer(recorder)
    left, stayed = (answer["times"][str(process.pid)] for process in (leaving, staying))
    # THEN its time ends there, and adds up until then as that of the other does
    assert left["observed_ns"] < stayed["observed_ns"] / 2
    assert answer["losses"]["excluded"] > 0
    off_and_on = (left["off_ns"] + left["on_ns"]) / left["observed_ns"]
    assert off_and_on == pytest.approx(1, abs=0.35)  # samples vary in so short a time


def test_switches_of_what_is_excluded_cost_two_look_ups(groups: tuple[Path, Path]) -> None:
    out, _ = groups
    with _running(out, _SWITCH), bpf_stats(True):
        # WHEN a host is recorded on which one cgroup switches all the time
        with _recorder(2, out) as recorder:
            excluded = _answer(recorder)
        with _recorder(2) as recorder:
            recorded = _answer(recorder)
    assert excluded["switch_runs"] > 10_000
    # THEN a switch costs a fraction of what it costs where the cgroup is recorded
    assert excluded["switch_ns"] < recorded["switch_ns"] / 3
