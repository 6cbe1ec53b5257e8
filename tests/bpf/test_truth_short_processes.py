# SPDX-License-Identifier: Apache-2.0
"""Processes of some milliseconds: who they were, and what they ran, when they are long gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiflame.agent.inspector.opener import Opener
from aiflame.agent.kernel.life_events import Ended, Forked, LifeEvent, LifeEvents, Mapped, Named
from aiflame.agent.model.profile import COMPLETE_REASONS, Profile, SampleClass, StopReason
from aiflame.agent.processes import procfs
from aiflame.agent.processes.procfs import MapsLine
from breadth import cases
from recordings import Recording, frames_of, rows_of
from short_processes import PROGRAMS, ROUNDS, SCRIPT, busy_loops
from support import wait_until

pytestmark = pytest.mark.bpf

_GONE = "[exited before it could be read]"
_NAME_GONE = "[exited before its name could be read]"
_COMMAND_LINES = {
    *("ls -l /usr/bin", "date", "grep -c root /etc/passwd", "gzip -c", "gzip -1 -c"),
    *("head -c 200000 /bin/bash", "head -c 1000000 /bin/bash", "perl -e $s += $_ for 1..20000"),
    *("sort /etc/passwd", "sed -n $p /etc/passwd"),
}


def _share_of(profile: Profile, name: str) -> float:
    """Which share of the CPU time was spent in stacks with a frame of that name."""
    rows = rows_of(profile, None, None, SampleClass.ON_CPU)
    ns = [int(row["ns"]) for row in rows if name in frames_of(profile, row["stack"])]
    return sum(ns) / int(rows["ns"].sum())


# Each is forked by one that has ended when the names of its functions are read, or that ends at
# once: then init is its parent, or whoever takes orphans.
_FORKED_BY_FORKS = """
import os, sys, time

def burn():
    until_s = time.monotonic() + 0.01
    while time.monotonic() < until_s:
        pass

for _ in range(100):
    ended, ends = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            burn()
        elif sys.argv[1] == "waits":
            os.wait()
        os._exit(0)
    os.wait()
    os.close(ends)
    os.read(ended, 1)
    os.close(ended)
time.sleep(1)
"""


@pytest.mark.parametrize("parent", ["waits", "ends"])
def test_children_of_children_have_their_functions_when_both_are_gone(
    tmp_path: Path, parent: str
) -> None:
    command = ("--", sys.executable, "-c", _FORKED_BY_FORKS, parent)
    with Recording(tmp_path, "-F", "499", "--gpu", "none", *command) as recording:
        profile = recording.wait().profile
    assert _share_of(profile, "burn") > 0.5
    assert _share_of(profile, _NAME_GONE) < 0.05


@cases("loops", [0, 2], ids=["quiet", "busy"])
def test_hundreds_of_short_processes_have_names(tmp_path: Path, loops: int) -> None:
    with busy_loops(loops), Recording(tmp_path, "--", "bash", "-c", SCRIPT) as recording:
        profile = recording.wait().profile
    assert _share_of(profile, _GONE) < 0.01
    # Each program ran so often, and the shell was forked for each, and once for `seq`.
    names = Counter(process.name for process in profile.processes)
    wanted = {name: ROUNDS * count for name, count in PROGRAMS.items()}
    assert names == {**wanted, "bash": ROUNDS * PROGRAMS.total() + 2, "seq": 1}
    lines = {process.command_line for process in profile.processes if process.name in PROGRAMS}
    assert lines == _COMMAND_LINES
    threads = Counter(
        (thread.name, profile.processes[thread.process].name) for thread in profile.threads
    )
    assert all(thread == process for thread, process in threads)
    # Where they are known to have been, also of those of whom /proc was never read.
    assert {process.cgroup for process in profile.processes} == {profile.processes[0].cgroup}
    assert {loss.name for loss in profile.losses} <= {"python_exited"}


def test_a_program_that_nobody_has_seen_and_nobody_sees_again(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    """Fifty files that run once each: they are found by their paths when they have run."""
    lives = workload("lives")
    names = [f"once-{number:02}" for number in range(50)]
    for name in names:
        shutil.copy(lives, tmp_path / name)
    command = "for i in once-*; do ./$i briefly; done"
    with Recording(tmp_path, "-F", 999, "--", "sh", "-c", command) as recording:
        profile = recording.wait().profile
    assert _share_of(profile, _GONE) == 0
    found = {process.executable for process in profile.processes}
    assert {str(tmp_path / name) for name in names} <= found
    (functions,) = [{function.name for function in profile.functions}]
    assert "work_briefly" in functions
    assert not [loss for loss in profile.losses if loss.name == "binary_not_opened"]


def test_children_of_a_process_from_before(tmp_path: Path) -> None:
    """They are followed, and a forked one has what its parent has mapped."""
    code = (
        "import os, sys\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "for i in range(100):\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        sum(range(20000 + i))\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "print('done', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = subprocess.Popen(
        ["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        with Recording(tmp_path, "-p", process.pid, "-s", "-F", 999) as recording:
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            profile = recording.stop().profile
    finally:
        process.kill()
        process.communicate()
    assert _share_of(profile, _GONE) == 0
    assert _share_of(profile, "[unmapped memory]") < 0.01
    children = [one for one in profile.processes if one.parent_pid == process.pid]
    assert len(children) == 100
    assert {child.name for child in children} == {profile.processes[0].name}
    assert {child.executable for child in children} == {profile.processes[0].executable}


@cases("loops", [0, 2], ids=["quiet", "busy"])
def test_children_have_complete_stacks_from_their_fork_on(tmp_path: Path, loops: int) -> None:
    """Also those of children, and all while nobody has read yet what they have mapped."""
    code = (
        "import os, time\n"
        "def work_of_child():\n"
        "    time.sleep(0.0003)\n"
        "def beget(levels):\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        work_of_child()\n"
        "        if levels:\n"
        "            beget(levels - 1)\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "for _ in range(200):\n"
        "    beget(1)\n"
    )
    program = (sys.executable, "-c", code)
    with busy_loops(loops), Recording(tmp_path, "-F", 999, "--", *program) as recording:
        profile = recording.wait().profile
    first = min(profile.processes, key=lambda process: process.started_ns)
    rows = [
        (int(row["ns"]), int(profile.stacks.ends[row["stack"]]), row["stack"])
        for row in profile.samples
        if profile.processes[profile.threads[row["thread"]].process].pid != first.pid
    ]
    has_run = sum(ns for ns, end, _ in rows if end != StopReason.NOT_RUN_YET)
    complete = sum(ns for ns, end, _ in rows if end in COMPLETE_REASONS)
    assert complete >= 0.9 * has_run  # the look-ups of symbols by the loader are not
    work = [ns for ns, _, stack in rows if "work_of_child" in frames_of(profile, stack)]
    assert sum(work) >= 0.9 * 400 * 300_000


def test_a_parent_in_vfork_is_where_it_begins_a_program(tmp_path: Path) -> None:
    """It waits for the exec of its child, with its return address in a register."""
    code = (
        "import subprocess\n"
        "def begin_programs():\n"
        "    for _ in range(200):\n"
        "        subprocess.run(['/bin/true'], check=True)\n"
        "begin_programs()\n"
    )
    with Recording(tmp_path, "-F", 999, "--", sys.executable, "-c", code) as recording:
        profile = recording.wait().profile
    waits = rows_of(profile, "__vfork", None, SampleClass.BLOCKED)
    assert int(waits["count"].sum()) >= 190
    found = Counter[bool]()
    for row in waits:
        is_complete = profile.stacks.ends[row["stack"]] in COMPLETE_REASONS
        is_whole = "begin_programs" in frames_of(profile, row["stack"])
        found[is_complete and is_whole] += int(row["ns"])
    assert found[True] >= 0.99 * found.total()
    # What a child was at in Python is gone once it is inside exec: that is no loss.
    lost = {loss.name: loss.count for loss in profile.losses}
    assert lost.get("python_unreadable_stack", 0) < 20


@cases("library", ["glibc", "musl"])
def test_waits_in_vfork_are_under_who_called_it(
    workload: Callable[..., Path], tmp_path: Path, library: str
) -> None:
    program = workload("vforks", "-fomit-frame-pointer")
    with Recording(tmp_path, "-F", 999, "--", program, library) as recording:
        profile = recording.wait().profile
    leaves = {"glibc": "__vfork", "musl": "vfork_of_musl"}
    waits = rows_of(profile, leaves[library], None, SampleClass.BLOCKED)
    assert int(waits["count"].sum()) >= 390
    assert int(waits["ns"].sum()) >= 390 * 2_000_000
    caller = ["main", f"begin_as_{library}"]
    found = Counter[bool]()
    for row in waits:
        frames = frames_of(profile, row["stack"])
        at = frames.index(leaves[library])
        is_complete = profile.stacks.ends[row["stack"]] in COMPLETE_REASONS
        found[is_complete and frames[at - 2 : at] == caller] += int(row["ns"])
    # The first ones come before the tables, which take some 20 ms.
    assert found[True] >= 0.95 * found.total()


@pytest.fixture
def events() -> Iterator[LifeEvents]:
    made = LifeEvents(lambda fd: None)
    made.start()
    yield made
    made.close()


def test_the_kernel_tells_what_proc_shows(events: LifeEvents) -> None:
    assert events.refused == 0
    begun_ns = time.monotonic_ns()
    opener = Opener()
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        wait_until(lambda: Path(f"/proc/{process.pid}/wchan").read_text() not in ("", "0"))
        wait_until(lambda: "cat" in procfs.comm(process.pid))
        shown = procfs.executable_mappings(opener, process.pid)
    finally:
        process.communicate()
        opener.close()
    told: list[LifeEvent] = []

    def has_ended() -> bool:
        records, _ = events.read()
        told.extend(map(records.event, range(len(records))))
        return any(isinstance(event, Ended) and event.pid == process.pid for event in told)

    wait_until(has_ended)
    own = [event for event in told if not hasattr(event, "pid") or event.pid == process.pid]
    assert [type(event) for event in own if not isinstance(event, Mapped)] == [Forked, Named, Ended]
    assert own[0] == Forked(own[0].ns, process.pid, os.getpid())
    assert own[1] == Named(own[1].ns, process.pid, "cat", is_exec=True)
    mapped = [MapsLine(*event[2:]) for event in own if isinstance(event, Mapped)]
    # vsyscall, which is no mapping of the process, and what the loader has unmapped since.
    assert {line for line in shown if line.path != "[vsyscall]"} <= {*mapped}
    times = [event.ns for event in own]
    assert times == sorted(times)
    assert begun_ns < times[0] < times[-1] < time.monotonic_ns()
