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
from typing import NamedTuple

import pytest
from aiflame.agent.model.gpu import NONE
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.device_times import device_times
from breadth import cases
from browser.chromium import CHROMIUM, browser
from recordings import Ended, Recording, Workload, frames_of
from toy_family import RECORD

pytestmark = pytest.mark.bpf

_ROUNDS = 200
_SITES = ("often", "seldom")
# Of a round, as toys.c has it.
_LAUNCHES = {("often", "scale"): 3, ("seldom", "scale"): 1, ("seldom", "fill"): 1}
_NS = {("often", "scale"): 6_000, ("seldom", "scale"): 20_000, ("seldom", "fill"): 5_000}


def _toys(workload: Callable[..., Path], folder: Path) -> Path:
    """Puts the program into a folder, with its helper beside it."""
    library = workload("toyhelper", "-shared", "-fPIC", "-Wl,-soname,libaiflame-toy.so")
    shutil.copy(library, folder / "libaiflame-toy.so")
    program = workload("toys", str(library), "-Wl,-rpath,$ORIGIN")
    return Path(shutil.copy(program, folder / "toys"))


@pytest.fixture
def toys(workload: Callable[..., Path], tmp_path: Path) -> Path:
    return _toys(workload, tmp_path)


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


class Sound(NamedTuple):
    """The recording of a program that tells no lies."""

    ended: Ended
    truth: dict[str, int]
    pid: int


@pytest.fixture(scope="module")
def sound(workload: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Sound:
    folder = tmp_path_factory.mktemp("sound")
    with (
        Workload([_toys(workload, folder), _ROUNDS, "sound"]) as started,
        Recording(folder, "-p", started.pid, program=RECORD) as recording,
    ):
        started.go()
        truth = started.truth()
        return Sound(recording.stop(), truth, started.pid)


def test_times_of_numbered_launches_are_under_their_stacks(
    sound: Sound, run_aiflame: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # GIVEN one kernel of two sites, 3:1, which takes ten times as long for the one as for the other
    ended, truth, pid = sound
    # WHEN it is read, THEN each launch and each nanosecond is where it was launched
    profile = ended.profile
    process = _process(profile, pid)
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
    # AND in the flame graph of GPU time, to the nanosecond
    assert _gpu_time(run_aiflame, ended.capture) == _of_rounds(_NS)


def _gpu_time(
    run_aiflame: Callable[..., subprocess.CompletedProcess[str]], capture: Path
) -> dict[tuple[str, str], int]:
    """Returns the nanoseconds of `--view gputime` by call site and kernel."""
    folded = ("-f", "folded", "--plain", "-o", "-")
    found = Counter[tuple[str, str]]()
    for line in run_aiflame("report", capture, "--view", "gputime", *folded).stdout.splitlines():
        stack, _, ns = line.rpartition(" ")
        *frames, boundary, kernel = stack.split(";")
        assert boundary == "-"
        found[next(site for site in _SITES if site in frames), kernel] += int(ns)
    return dict(found)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_of_a_recording_shows_gpu_time(
    sound: Sound, tmp_path: Path, run_aiflame: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # WHEN the page of a recording of kernels whose times are known is opened in a browser
    path = tmp_path / "gputime.html"
    run_aiflame("report", sound.ended.capture, "--view", "gputime", "-o", path)
    with browser(tmp_path) as page:
        page.open(path)
        # THEN each site has its own
        totals = page.value(
            "Object.fromEntries(aiflame.data.names.map((n, i) => [n, aiflame.sums.total[i]]))"
        )
        assert {site: totals[site] for site in _SITES} == {
            site: sum(ns for (of, _), ns in _of_rounds(_NS).items() if of == site)
            for site in _SITES
        }
        assert page.text("whole").startswith(
            f"100 % = {sum(_NS.values()) * _ROUNDS / 1e6:.3f} ms of GPU time"
        )
        assert "100.00 % exact, 0.00 % shared" in page.text("graph-note")


def _ran_until_killed(toys: Path, folder: Path, **more: str) -> Counter[tuple[str, str]]:
    """Returns the time on the device of a process that is killed once it has done all.

    Args:
        toys: The program.
        folder: Where it is recorded.
        more: Added to its environment.
    """
    with (
        Workload([toys, _ROUNDS, "sound"], env={**os.environ, **more}) as workload,
        Recording(folder, "-p", workload.pid, program=RECORD) as recording,
    ):
        workload.go()
        workload.truth()
        workload.process.kill()
        profile = recording.wait().profile
    return _ran_ns(profile, _process(profile, workload.pid))


def test_times_of_a_process_that_has_ended_are_there(toys: Path, tmp_path: Path) -> None:
    assert _ran_until_killed(toys, tmp_path) == _of_rounds(_NS)


def test_a_bell_is_heard_at_once(toys: Path, tmp_path: Path) -> None:
    # GIVEN a process that begins to share memory late, and is gone within the second
    # THEN its memory was found since it rang
    assert _ran_until_killed(toys, tmp_path, TOY_LATE="1") == _of_rounds(_NS)


@cases("lie", ["size", "head", "magic", "record", "shrink", "numbers", "ids", "times"])
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
        # Shared by launches, as nothing tells them apart.
        shared = device_times(profile)
        own = shared.ns[shared.process == process]
        assert int(own.sum()) == sum(_of_rounds(_NS).values())
    elif lie == "times":
        assert names == {"kernel_times_refused"}
    else:
        assert all(ran_ns[key] <= ns for key, ns in _of_rounds(_NS).items())
        assert names == {"device_memory_damaged"}
