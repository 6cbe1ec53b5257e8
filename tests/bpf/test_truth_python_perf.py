# SPDX-License-Identifier: Apache-2.0
"""Programs that run with -X perf, where test_truth_python_chains.py does not look.

Threads that sleep, in a recording and in a dump; and an interpreter that is not recognised, of
which perf-PID.map is all that is known.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.model.profile import GilState, SampleClass, StopReason
from interpreters import each, executable
from pychains import Tree
from recordings import Recording, Workload, python_frames_of, record_workload, rows_of_process
from support import WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.slow, pytest.mark.breadth]

_THREADS = WORKLOADS / "pythreads.py"
_CHAINS = WORKLOADS / "pychains.py"
_OPTIONS = ("-X", "perf")
_VERSIONS = ("3.12", "3.13", "3.14", "3.15")
_ROOTED = (StopReason.ROOTED, StopReason.ROOTED_BY_HEURISTIC)
_SLEEPERS = 500
_FUNCTIONS = 40
_CPU_MS = 300
_HZ = 999


@pytest.mark.parametrize("version", each(_VERSIONS))
def test_threads_asleep_since_before_are_rooted(version: str, tmp_path: Path) -> None:
    load = Workload([executable(version), *_OPTIONS, _THREADS, "asleep"])
    with load, Recording(tmp_path, "-p", load.pid, "-F", 99, "-d", 1) as recording:
        profile = recording.wait().profile
    found = set()
    for row in rows_of_process(profile, load.pid, SampleClass.BLOCKED):
        stack = int(row["stack"])
        own = [f for f in python_frames_of(profile, stack) if f.file == str(_THREADS)]
        if [frame.name for frame in own] == ["Sleeper.outer", "Sleeper.inner"]:
            # Each once: no frame of a stub beside it, which has no line.
            assert all(frame.line for frame in own), (own, row)
            assert profile.stacks.ends[stack] in _ROOTED
            assert profile.stacks.gil[stack] == GilState.RELEASED
            found.add(row["thread"])
    # A list comprehension is no function of its own from 3.12 on.
    assert len(found) == _SLEEPERS


@pytest.mark.parametrize("version", each(_VERSIONS))
def test_a_dump_has_whole_stacks(
    version: str, run_aiflame: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    with Workload([executable(version), *_OPTIONS, _THREADS, "asleep"]) as load:
        done = run_aiflame("dump", "-p", load.pid, "--json")
    assert done.returncode == 0, done.stderr
    (process,) = json.loads(done.stdout)["processes"]
    sleepers = 0
    for thread in process["threads"]:
        assert not thread["cut"] and not thread["python_cut"], thread
        shown = [frame for frame in thread["frames"] if not frame["glue"]]
        assert not any(frame["name"].startswith("py::") for frame in shown)
        pythons = [frame for frame in shown if frame["kind"] == "python"]
        assert all(frame["line"] for frame in pythons), pythons
        sleepers += [frame["name"] for frame in pythons[:2]] == ["Sleeper.inner", "Sleeper.outer"]
    assert sleepers == _SLEEPERS


def test_stubs_tell_functions_of_an_interpreter_that_is_not_known(tmp_path: Path) -> None:
    # GIVEN a program with Python in a library that no one would take for it
    python = executable("3.12")
    (library,) = python.parents[1].glob("lib/libpython3.12.so.1.0")
    shutil.copy(library, tmp_path / "embedded.so")
    (tmp_path / library.name).symlink_to("embedded.so")
    tree = Tree(_FUNCTIONS, seed=_FUNCTIONS)
    program = tmp_path / "program.py"
    program.write_text(tree.source)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [python, *_OPTIONS, _CHAINS, program, _CPU_MS]
    load = Workload(command, env=environment)
    # WHEN it is recorded
    profile, _ = record_workload(tmp_path, load, "-F", _HZ, "--no-off-cpu")
    # THEN its functions are there by name and file, in their order
    strange: Counter[str] = Counter()
    total = 0
    for row in rows_of_process(profile, load.pid, SampleClass.ON_CPU):
        chain = [frame[:2] for frame in python_frames_of(profile, int(row["stack"]))]
        assert chain[:1] == [("<module>", str(_CHAINS))]
        if len(chain) > 3 and chain[2] == ("work", str(_CHAINS)):
            total += int(row["count"])
            if not _is_of(tree, chain[3:]):
                strange[" ".join(name for name, _ in chain)] += int(row["count"])
    assert total > 0.8 * _CPU_MS * _HZ / 1000
    assert not strange


def _is_of(tree: Tree, own: list[tuple[str, str]]) -> bool:
    """Whether functions call each other like this in the program."""
    if own[-1][0] == "finish":
        # It only calls the coroutine that its caller made.
        own = own[:-1]
    for leaf in tree.functions:
        for chain in tree.chains(leaf, leaf.lines[0], has_qualified=True):
            if own == [frame[:2] for frame in chain]:
                return True
    return False
