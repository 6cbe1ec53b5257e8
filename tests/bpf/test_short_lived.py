# SPDX-License-Identifier: Apache-2.0
"""Short-lived processes that are joined, since each by itself takes too much of an agent's time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.processes.scheduler_accounts import interrupted_ns
from aiflame.agent.processes.targets import cgroup2_mounts
from cgroups import made_groups

pytestmark = pytest.mark.bpf

_RECORDER = Path(__file__).parents[1] / "record_joining.py"
_PATIENCE_S = 120.0
_NAME = f"aiflame-short-lived-{os.getpid()}"
_PROGRAMS = 100
_SLEEP_S = 0.01
# Each computes for a tenth of a second at least, in which two samples are taken.
_COMPUTES = """
echo $$ > "$1/cgroup.procs"
for i in $(seq "$2"); do
    sh -c 'i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done' "of-run-$i"
done
"""
_LOOP = 'echo $$ > "$1/cgroup.procs"; for i in $(seq "$2"); do "$3" "$4"; done'


def _usage_ns(group: Path) -> int:
    """Returns the CPU time of all that were in a cgroup, by the kernel's own account."""
    lines = (group / "cpu.stat").read_text().splitlines()
    return next(int(line.split()[1]) * 1000 for line in lines if line.startswith("usage_usec"))


def test_threads_of_a_short_lived_program_are_told_of_by_its_name(
    workload: Callable[..., Path],
) -> None:
    mount = next(iter(cgroup2_mounts()))
    with made_groups(mount, f"{_NAME}/threads") as (group,):
        # GIVEN a hundred programs of four threads, which have names of their own
        command = [sys.executable, str(_RECORDER), str(mount / _NAME), str(group)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
            assert recorder.stdout is not None
            assert recorder.stdout.readline() == "attached\n"
            program = workload("shortthreads")
            words = ["bash", "-c", _LOOP, "bash", group, str(_PROGRAMS), program, ""]
            subprocess.run(words, check=True, timeout=_PATIENCE_S)
            recorder.send_signal(signal.SIGINT)
            found = json.loads(recorder.communicate(timeout=_PATIENCE_S)[0])
    times = found["times"]["threads"]
    # THEN their threads are theirs,
    assert not any(name.startswith("worker") for name in times)
    # all of them,
    assert times[program.name]["off_ns"] > _PROGRAMS * 5 * 1_000_000
    whole_ns = times[program.name]["on_cpu_ns"] + times[program.name]["off_ns"]
    assert whole_ns == pytest.approx(times[program.name]["observed_ns"], rel=0.01)
    # and each program counts once, and what it was before its exec.
    joined = found["losses"]["short_lived_joined"]
    assert 1.5 * _PROGRAMS < joined < 2.2 * _PROGRAMS


def test_short_lived_programs_are_joined_with_exact_times_and_right_cgroups() -> None:
    mount = next(iter(cgroup2_mounts()))
    names = [f"{_NAME}/{leaf}" for leaf in ("computes", "sleeps", "unknown")]
    with made_groups(mount, *names) as groups:
        # GIVEN cgroups in which a hundred programs each run one after the other, one of them new
        command = [sys.executable, str(_RECORDER), str(mount / _NAME), *map(str, groups[:2])]
        interrupted_before_ns = interrupted_ns()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
            assert recorder.stdout is not None
            assert recorder.stdout.readline() == "attached\n"
            true, sleep = ("/bin/true", ""), ("/bin/sleep", str(_SLEEP_S))
            for group, program in zip(groups, (true, sleep, sleep), strict=True):
                words = ["bash", "-c", _LOOP, "bash", group, str(_PROGRAMS), *program]
                subprocess.run(words, check=True, timeout=_PATIENCE_S)
            recorder.send_signal(signal.SIGINT)
            found = json.loads(recorder.communicate(timeout=_PATIENCE_S)[0])
        used_ns = [_usage_ns(group) for group in groups]
        not_used_ns = interrupted_ns() - interrupted_before_ns
    times = found["times"]
    computes, sleeps = times["computes"], times["sleeps"]
    # THEN few of them have details, but for those in the new one: it may be gone with them,
    joined = found["losses"]["short_lived_joined"]
    assert joined > 2 * _PROGRAMS  # a fork is one image, and its program another
    processes = found["processes"]
    assert processes["computes"] + processes["sleeps"] < _PROGRAMS
    assert processes["unknown"] >= _PROGRAMS
    # by name and cgroup,
    assert "true" in computes
    assert "true" not in sleeps
    assert "sleep" in sleeps
    assert "sleep" not in computes
    # all of their time is there, on the CPU
    for group, used in zip((computes, sleeps), used_ns[:2], strict=True):
        on_cpu_ns = sum(times["on_cpu_ns"] for times in group.values())
        # The kernel's account has what takes a task out, after its end was told: some 50 us, of
        # programs that take 600. It has no time that the hypervisor stole, of which a program on
        # the CPU knows nothing.
        assert 0.8 * used < on_cpu_ns < 1.02 * used + not_used_ns
    # and off it.
    assert sleeps["sleep"]["off_ns"] > _PROGRAMS * _SLEEP_S * 1e9
    for group in (computes, sleeps):
        for of_name in group.values():
            whole_ns = of_name["on_cpu_ns"] + of_name.get("off_ns", 0)
            assert whole_ns == pytest.approx(of_name["observed_ns"], rel=0.01)
    # What was joined up to the last but one window was part of a load.
    assert 0 < found["load"] <= joined


@pytest.mark.breadth
def test_a_short_lived_program_that_is_sampled_has_its_arguments() -> None:
    mount, count = next(iter(cgroup2_mounts())), 20
    with made_groups(mount, f"{_NAME}/sampled") as (group,):
        command = [sys.executable, str(_RECORDER), str(mount / _NAME), str(group)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
            assert recorder.stdout is not None
            assert recorder.stdout.readline() == "attached\n"
            words = ["bash", "-c", _COMPUTES, "bash", group, str(count)]
            subprocess.run(words, check=True, timeout=_PATIENCE_S)
            recorder.send_signal(signal.SIGINT)
            found = json.loads(recorder.communicate(timeout=_PATIENCE_S)[0])
    last_words = [line.rpartition(" ")[2] for line in found["commands"]]
    # One that is kept from its CPU, on a crowded machine, may be joined.
    assert sum(f"of-run-{number}" in last_words for number in range(1, count + 1)) >= 0.8 * count
