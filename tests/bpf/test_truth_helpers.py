# SPDX-License-Identifier: Apache-2.0
"""A device family with a helper in its targets: launches with numbers, and a ring of times.

Tier 1 from end to end: what the device ran is under the stack that launched it, to the nanosecond.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from aiflame.agent.model.gpu import NONE
from aiflame.agent.model.profile import Profile
from recordings import Recording, Workload, frames_of
from toy_family import RECORD

pytestmark = pytest.mark.bpf

_ROUNDS = 200
_SITES = ("often", "seldom")
# Of a round, as toys.c has it.
_LAUNCHES = {("often", "scale"): 3, ("seldom", "scale"): 1, ("seldom", "fill"): 1}
_NS = {("often", "scale"): 6_000, ("seldom", "scale"): 20_000, ("seldom", "fill"): 5_000}


@pytest.fixture
def toys(workload: Callable[..., Path], tmp_path: Path) -> Path:
    """The program, with its helper beside it."""
    library = tmp_path / "libaiflame-toy.so"
    shutil.copy(workload("toyhelper", "-shared", "-fPIC"), library)
    flags = (str(library), f"-Wl,-rpath,{tmp_path}")
    return Path(shutil.copy(workload("toys", *flags), tmp_path / "toys"))


def _site(profile: Profile, stack: int) -> str:
    if stack == NONE:
        return "unknown"
    frames = frames_of(profile, stack)
    return next((site for site in _SITES if site in frames), f"none of {frames}")


def _launched(profile: Profile, process: int) -> Counter[tuple[str, str]]:
    """Returns the launches of a process by call site and kernel."""
    gpu, found = profile.gpu, Counter[tuple[str, str]]()
    for row in gpu.calls[gpu.calls["kernel"] != NONE]:
        kernel = gpu.kernels[row["kernel"]]
        if kernel.process == process:
            found[_site(profile, int(row["stack"])), kernel.name] += int(row["count"])
    return found


def _ran_ns(profile: Profile, process: int) -> Counter[tuple[str, str]]:
    """Returns the time on the device of a process by call site and kernel."""
    gpu, found = profile.gpu, Counter[tuple[str, str]]()
    for row in gpu.times:
        kernel = gpu.kernels[row["kernel"]]
        if kernel.process == process:
            found[_site(profile, int(row["stack"])), kernel.name] += int(row["duration_ns"])
    return found


def _process(profile: Profile, pid: int) -> int:
    (found,) = (at for at, process in enumerate(profile.processes) if process.pid == pid)
    return found


def _of_rounds(of_one: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    return {key: value * _ROUNDS for key, value in of_one.items()}


def test_times_of_numbered_launches_are_under_their_stacks(
    toys: Path, tmp_path: Path, run_aiflame: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # GIVEN one kernel of two sites, 3:1, which takes ten times as long for the one as for the other
    with (
        Workload([toys, _ROUNDS, "sound"]) as workload,
        Recording(tmp_path, "-p", workload.pid, program=RECORD) as recording,
    ):
        workload.go()
        truth = workload.truth()
        ended = recording.stop()
    # WHEN it is read, THEN each launch and each nanosecond is where it was launched
    profile = ended.profile
    process = _process(profile, workload.pid)
    assert _launched(profile, process) == _of_rounds(_LAUNCHES)
    assert _ran_ns(profile, process) == _of_rounds(_NS)
    assert sum(_of_rounds(_NS).values()) == truth["often.ns"] + truth["seldom.ns"]
    assert profile.losses == ()
    # AND that is what a user sees
    shown = run_aiflame("stats", ended.capture, "--view", "gpu").stdout
    (table,) = (part for part in shown.split("\n\n") if "Top launch stacks" in part)
    of_seldom, of_often = (
        next(line for line in table.splitlines() if f"< {site} <" in line)
        for site in reversed(_SITES)
    )
    assert f"{25_000 * _ROUNDS / 1e6:,.1f}" in of_seldom
    assert f"{6_000 * _ROUNDS / 1e6:,.1f}" in of_often


def test_times_of_a_process_that_has_ended_are_there(toys: Path, tmp_path: Path) -> None:
    with (
        Workload([toys, _ROUNDS, "sound"]) as workload,
        Recording(tmp_path, "-p", workload.pid, program=RECORD) as recording,
    ):
        workload.go()
        workload.truth()
        workload.process.kill()
        ended = recording.wait()
    profile = ended.profile
    assert _ran_ns(profile, _process(profile, workload.pid)) == _of_rounds(_NS)


def test_a_bell_is_heard_at_once(toys: Path, tmp_path: Path) -> None:
    # GIVEN a process that begins to share memory late, and is gone within the second
    with (
        Workload([toys, _ROUNDS, "sound"], env={**os.environ, "TOY_LATE": "1"}) as workload,
        Recording(tmp_path, "-p", workload.pid, program=RECORD) as recording,
    ):
        workload.go()
        workload.truth()
        workload.process.kill()
        ended = recording.wait()
    # THEN its memory was found since it rang
    profile = ended.profile
    assert _ran_ns(profile, _process(profile, workload.pid)) == _of_rounds(_NS)


@pytest.mark.parametrize(
    "lie", ["size", "head", "magic", "record", "shrink", "numbers", "ids", "times"]
)
def test_a_process_that_lies_costs_itself_only(toys: Path, tmp_path: Path, lie: str) -> None:
    with ExitStack() as stack:
        sound = stack.enter_context(Workload([toys, _ROUNDS, "sound"]))
        liar = stack.enter_context(Workload([toys, _ROUNDS, lie]))
        pids = f"{liar.pid},{sound.pid}"
        recording = stack.enter_context(Recording(tmp_path, "-p", pids, program=RECORD))
        for workload in (liar, sound):
            workload.go()
        for workload in (liar, sound):
            workload.truth()
        profile = recording.stop().profile
    # THEN all is known of the other one
    process = _process(profile, sound.pid)
    assert _launched(profile, process) == _of_rounds(_LAUNCHES)
    assert _ran_ns(profile, process) == _of_rounds(_NS)
    # AND of this one its launches, and nothing that is wrong
    process = _process(profile, liar.pid)
    assert _launched(profile, process) == _of_rounds(_LAUNCHES)
    ran_ns = _ran_ns(profile, process)
    names = {loss.name for loss in profile.losses}
    if lie == "ids":
        assert {site for site, _ in ran_ns} == {"unknown"}
        assert names == set()
    elif lie == "times":
        assert names == {"kernel_times_refused"}
    else:
        assert all(ran_ns[key] <= ns for key, ns in _of_rounds(_NS).items())
        assert names == {"device_memory_damaged"}
