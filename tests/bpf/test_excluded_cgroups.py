# SPDX-License-Identifier: Apache-2.0
"""Cgroups that are left out in the kernel: nothing of them is recorded, and it is said how much."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import support
from aiflame.agent.processes import procfs
from aiflame.agent.processes.targets import cgroup2_mounts
from aiflame.agent.sinks.segments import RecordedWindows
from bench.kernel import bpf_stats
from cgroups import made_groups
from support import wait_until

pytestmark = pytest.mark.bpf

_RECORDER = Path(__file__).parents[1] / "record_excluding.py"
_PATIENCE_S = 180.0
_NAME = f"aiflame-excluded-{os.getpid()}"
# Computes and sleeps in turn, in a process that it becomes by exec in its cgroup: 20 % of a CPU, of
# which there are few.
_COMPUTE = """
import time
while True:
    end = time.process_time() + 0.005
    while time.process_time() < end:
        pass
    time.sleep(0.02)
"""
# Waits until it is asked, and then makes a container.
_ENGINE = """
import os, time
while not os.path.exists({asked!r}):
    time.sleep(0.01)
if os.fork() == 0:
    with open({procs!r}, "w") as file:
        file.write(str(os.getpid()))
    os.execv({python!r}, ["python", "-c", {script!r}])
time.sleep(1000)
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


class _Groups(NamedTuple):
    """Two cgroups side by side, and what the first is to a recorder that excludes it."""

    out: Path
    inside: Path
    excluded: str


@pytest.fixture(params=["v2", pytest.param("v1", marks=pytest.mark.breadth)])
def groups(request: pytest.FixtureRequest) -> Iterator[_Groups]:
    """Of v2, which programs know by their ids, and of a v1 hierarchy, by the paths of processes."""
    with ExitStack() as stack:
        is_v1 = request.param == "v1"
        mount = stack.enter_context(_pids_hierarchy()) if is_v1 else cgroup2_mounts()[0]
        # As engines call the groups of containers: of all of v1, those are what tells.
        names = [f"{_NAME}/{kind * 64}" for kind in "ab"]
        out, inside = stack.enter_context(made_groups(mount, *names))
        yield _Groups(out, inside, f"path:/{names[0]}" if is_v1 else str(out))


@contextmanager
def _pids_hierarchy() -> Iterator[Path]:
    """Where a hierarchy of v1 is mounted: the host's, or a named one, which any kernel can have."""
    for line in procfs.read_lines("/proc/self/mounts", 1 << 20):
        _, mount, kind, options, *_ = line.split(" ")
        if kind == "cgroup" and "pids" in options.split(","):
            yield Path(mount)
            return
    with TemporaryDirectory() as folder:
        mount = ["mount", "-t", "cgroup", "-o", f"none,name={_NAME}", "none", folder]
        subprocess.run(mount, check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


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


def _times(stretches: Path) -> list[tuple[int, dict[int, int]]]:
    """Returns of each window of an agent its length, and the time of each process in it, in ns."""
    found = []
    for folder in stretches.glob("*"):
        pids: dict[int, int] = {}
        processes: dict[int, int] = {}
        for window in RecordedWindows(folder):
            pids.update(window.processes[["process", "pid"]].tolist())
            processes.update(window.threads[["thread", "process"]].tolist())
            times: Counter[int] = Counter()
            for thread, ns in window.thread_times[["thread", "observed_ns"]].tolist():
                times[pids[processes[thread]]] += ns
            found.append((window.end_ns - window.start_ns, times))
    return found


def _answer(recorder: subprocess.Popen[str]) -> dict[str, Any]:
    answer, _ = recorder.communicate("go\n", timeout=60)
    assert recorder.returncode == 0
    found: dict[str, Any] = json.loads(answer)
    return found


def test_nothing_of_an_excluded_cgroup_is_recorded(groups: _Groups) -> None:
    out, inside, excluded = groups
    with ExitStack() as stack:
        # GIVEN a program in an excluded cgroup and one beside it, there before the recording is
        before = stack.enter_context(_running(out, _COMPUTE))
        beside = stack.enter_context(_running(inside, _COMPUTE))
        recorder = stack.enter_context(_recorder(4, excluded))
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
    # AND it is said how much is missing: both wanted as much of a CPU
    assert losses["excluded"] > 0
    assert losses["excluded_ns"] == losses["excluded"] * 1_001_001
    assert losses["excluded_ns"] > times[str(beside.pid)]["on_ns"] / 2


def test_a_cgroup_that_is_excluded_later_leaves_at_its_next_switch(
    groups: _Groups,
) -> None:
    out, inside, excluded = groups
    with ExitStack() as stack:
        # GIVEN two programs that are recorded
        leaving = stack.enter_context(_running(out, _COMPUTE))
        staying = stack.enter_context(_running(inside, _COMPUTE))
        recorder = stack.enter_context(_recorder(4, "late", excluded))
        # WHEN the cgroup of one is excluded
        answer = _answer(recorder)
    left, stayed = (answer["times"][str(process.pid)] for process in (leaving, staying))
    # THEN its time ends there, and adds up until then as that of the other does
    assert left["observed_ns"] < stayed["observed_ns"] / 2
    assert answer["losses"]["excluded"] > 0
    off_and_on_ns = left.get("off_ns", 0) + left["on_cpu_ns"]
    assert off_and_on_ns == pytest.approx(left["observed_ns"], rel=0.01)


@pytest.mark.breadth
def test_a_cgroup_that_is_recorded_again_is_from_its_next_switch_on(groups: _Groups) -> None:
    out, inside, excluded = groups
    with ExitStack() as stack:
        # GIVEN a program in an excluded cgroup
        coming = stack.enter_context(_running(out, _COMPUTE))
        staying = stack.enter_context(_running(inside, _COMPUTE))
        recorder = stack.enter_context(_recorder(4, "back", excluded))
        # WHEN the cgroup is excluded no more
        answer = _answer(recorder)
    came, stayed = (answer["times"][str(process.pid)] for process in (coming, staying))
    # THEN it is recorded as the other is.
    assert came["observed_ns"] > stayed["observed_ns"] / 2
    assert came["on_ns"] > stayed["on_ns"] / 3
    off_and_on_ns = came["off_ns"] + came["on_cpu_ns"]
    assert off_and_on_ns == pytest.approx(came["observed_ns"], rel=0.01)


def test_a_container_of_an_excluded_engine_is_recorded(groups: _Groups, tmp_path: Path) -> None:
    out, inside, excluded = groups
    asked = tmp_path / "asked"
    script = _ENGINE.format(
        asked=str(asked), procs=str(inside / "cgroup.procs"), python=sys.executable, script=_COMPUTE
    )
    with ExitStack() as stack:
        # GIVEN an engine in an excluded cgroup
        engine = stack.enter_context(_running(out, script))
        recorder = stack.enter_context(_recorder(4, excluded))
        # WHEN it moves a process of its own to another cgroup, which calls exec there
        asked.touch()
        answer = _answer(recorder)
        (container,) = procfs.descendants([engine.pid])
    times = answer["times"]
    # THEN that one is recorded, for all of the time but its first moments, and the engine is not.
    assert str(engine.pid) not in times
    assert times[str(container)]["observed_ns"] > 2_000_000_000


@pytest.mark.breadth
def test_an_agent_leaves_out_a_container(groups: _Groups, tmp_path: Path) -> None:
    out, inside, _ = groups
    log = tmp_path / "log"
    command = [
        *(*support.AIFLAME, "agent", "--directory", str(tmp_path / "agent"), "--stretch", "10m"),
        *("--health", "", "--gpu", "none", "--exclude", f"container_id={out.name}"),
        *("--cost-cpu-percent", "100"),  # above its budget, windows are of a minute
    ]
    with ExitStack() as stack:
        # GIVEN an agent that leaves out one container of two
        before = stack.enter_context(_running(out, _COMPUTE))
        beside = stack.enter_context(_running(inside, _COMPUTE))
        stderr = stack.enter_context(log.open("wb"))
        agent = stack.enter_context(subprocess.Popen(command, stderr=stderr))
        stack.callback(agent.kill)
        wait_until(lambda: "recording all processes" in log.read_text(), _PATIENCE_S)
        # WHEN another process of it begins meanwhile
        after = stack.enter_context(_running(out, _COMPUTE))
        # THEN there is nothing of the container after a while, which two windows in a row show,
        stretches = tmp_path / "agent" / "stretches"
        left_out = {before.pid, after.pid}

        def has_left() -> bool:
            times = _times(stretches)[-2:]
            return len(times) == 2 and not any(left_out & one.keys() for _, one in times)

        wait_until(has_left, _PATIENCE_S)
        length_ns, times = _times(stretches)[-1]
        agent.terminate()
        assert agent.wait(60) == 0, log.read_text()
    # AND all of the time of what is beside it.
    assert times[beside.pid] == pytest.approx(length_ns, rel=0.01)


@pytest.mark.breadth
def test_switches_of_what_is_excluded_cost_two_look_ups(groups: _Groups) -> None:
    out, _, name = groups
    with _running(out, _SWITCH), bpf_stats(True):
        # WHEN a host is recorded on which one cgroup switches all the time
        with _recorder(2, name) as recorder:
            excluded = _answer(recorder)
        with _recorder(2) as recorder:
            recorded = _answer(recorder)
    assert excluded["switch_runs"] > 10_000
    # THEN a switch costs a fraction of what it costs where the cgroup is recorded
    assert excluded["switch_ns"] < recorded["switch_ns"] / 3
