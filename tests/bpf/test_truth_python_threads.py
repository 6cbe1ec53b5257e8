# SPDX-License-Identifier: Apache-2.0
"""Python frames of many threads, of threads in C only, and of child processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiflame.agent.model.profile import GilState, Profile, SampleClass
from interpreters import each, executable
from recordings import (
    PythonLine,
    Recording,
    Workload,
    python_frames_of,
    record_workload,
    rows_of_process,
)
from support import WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.slow]

_SCRIPT = WORKLOADS / "pythreads.py"
_THREADS = 500
_CPU_MS = 300
_HZ = 499
# A wait of this length is the sleep, not a lock on the way into it.
_LONG_NS = 20_000_000
# One of each way to link frames.
_VERSIONS = ("3.8", "3.11", "3.12", "3.13", "3.14", "3.15")


def _line(remark: str) -> int:
    lines = _SCRIPT.read_text().splitlines()
    (number,) = (at for at, line in enumerate(lines, 1) if line.endswith(f"# at: {remark}"))
    return number


def _own(profile: Profile, stack: int) -> list[PythonLine]:
    return [frame for frame in python_frames_of(profile, stack) if frame.file == str(_SCRIPT)]


@pytest.mark.parametrize("version", each(_VERSIONS))
def test_each_of_many_sleepers_shows_where_it_sleeps(version: str, tmp_path: Path) -> None:
    # GIVEN 500 threads that fall asleep and sleep on after the recording, and one in C
    load = Workload([executable(version), _SCRIPT, "sleepers"])
    # WHEN they are recorded
    profile, _ = record_workload(tmp_path, load, "-F", 99)
    # THEN each has its chain and its lines, once, with the GIL released
    sleepers, pythons, everyone = set(), set(), set()
    mislabelled = 0
    for row in rows_of_process(profile, load.pid, SampleClass.BLOCKED):
        stack, thread = int(row["stack"]), profile.threads[row["thread"]]
        names = [frame.name.rpartition(".")[2] for frame in _own(profile, stack)]
        if names[:1] == ["outer"]:
            lines = [frame.line for frame in _own(profile, stack)]
            if lines[-1] in (_line("outer"), _line("entering")):
                continue  # on its way it waited for a lock, or for the GIL
            assert names[-1] == "inner" and {*names} <= {"outer", "inner", "<listcomp>"}
            assert lines == [*[_line("outer")] * (len(names) - 1), _line("inner")]
            is_asleep = int(row["ns"]) > _LONG_NS
            mislabelled += is_asleep and profile.stacks.gil[stack] != GilState.RELEASED
            sleepers.add(thread.tid)
        has_python = len(python_frames_of(profile, stack)) > 0
        assert has_python == (profile.stacks.gil[stack] != GilState.NO_PYTHON)
        everyone.add(thread.tid)
        pythons |= {thread.tid} if has_python else set()
    assert len(sleepers) == _THREADS, len(sleepers)
    assert not mislabelled
    assert load.pid in pythons
    # Of the C thread there is no Python; nor, maybe, of the workload's own guard.
    assert 1 <= len(everyone - pythons) <= 2
    assert not profile.losses


@pytest.mark.parametrize("version", each(_VERSIONS))
def test_children_show_their_python(version: str, tmp_path: Path) -> None:
    load = Workload([executable(version), _SCRIPT, "children", _CPU_MS])
    profile, truth = record_workload(tmp_path, load, "-s", "-F", _HZ)
    for method, function in (("fork", "forked"), ("spawn", "spawned")):
        found = 0
        for row in rows_of_process(profile, truth[f"{method}.pid"], SampleClass.ON_CPU):
            own = _own(profile, int(row["stack"]))
            names = [frame.name for frame in own]
            if names[-1:] == ["spin"]:
                assert names[-3:] == [function, "compute", "spin"]
                found += int(row["count"])
        # Python is seen once the process's mappings were: until then, native frames only.

        assert found > 0.5 * _CPU_MS * _HZ / 1000


@pytest.mark.parametrize("version", each(_VERSIONS))
def test_threads_asleep_since_before_show_their_python(version: str, tmp_path: Path) -> None:
    load = Workload([executable(version), _SCRIPT, "asleep"])
    profile, _ = record_workload(tmp_path, load, "-F", 99)
    found = set()
    for row in rows_of_process(profile, load.pid, SampleClass.BLOCKED):
        names = [f.name.rpartition(".")[2] for f in _own(profile, int(row["stack"]))]
        if names[:1] == ["outer"] and names[-1] == "inner" and int(row["ns"]) > _LONG_NS:
            assert profile.stacks.gil[row["stack"]] == GilState.RELEASED
            found.add(profile.threads[row["thread"]].tid)
    assert len(found) == 500


def test_a_process_that_never_runs_shows_its_python(tmp_path: Path) -> None:
    # GIVEN a process that sleeps through a recording of the whole system
    load = Workload([executable("3.12"), _SCRIPT, "asleep"])
    with load, Recording(tmp_path, "-a", "-F", 99, "-d", 1) as recording:
        profile = recording.wait().profile
    found = set()
    for row in rows_of_process(profile, load.pid, SampleClass.BLOCKED):
        names = [frame.name for frame in _own(profile, int(row["stack"]))]
        if names == ["Sleeper.outer", "Sleeper.inner"]:
            found.add(row["thread"])
    assert len(found) == _THREADS
