# SPDX-License-Identifier: Apache-2.0
"""Processes that load the helper for NVIDIA by themselves, from where an agent has put it.

Driver and CUPTI are stand-ins (tests/standin).
"""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import prepared_agent
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import NONE
from aiflame.agent.reports.device_rows import device_samples
from nvidia_family import RECORD
from nvidia_helper import BLOCK_NS, Target, build
from prepared_agent import FLAG
from recordings import Recording, frames_of
from support import wait_until

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

_PROGRAM = Path(prepared_agent.__file__)
# Where a workload's mount namespace has the agent's directory.
_INSIDE = "/srv"
_VARIABLE = {"CUDA_INJECTION64_PATH": f"{_INSIDE}/libaiflame-nvidia.so"}
_SETUP = ("init", "context 0", "module 1000", "function 0 scale", "function 0 fill", "stream")
# Of _ROUNDS, by call site.
_ROUNDS, _ROUND = 5, ("launch 0 300 20 0", "runtime 0 100 20", "sync")
_LAUNCHES = 40  # of a round
_RAN = Counter(driver=_ROUNDS * 6_000 * BLOCK_NS, runtime=_ROUNDS * 2_000 * BLOCK_NS)
# A crowded machine takes as long to name a stretch.
_PATIENCE_S = 90.0
# And until it is in a capture.
_CAPTURED_S = 300.0


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("standin"), FLAG)


def _workload(standin: Path, helpers: Path) -> Target:
    """The program in a mount namespace, with the helper in its environment and nothing else."""
    script = f"mount --bind {helpers} {_INSIDE} && exec {standin}/program"
    arguments = ("--mount", "sh", "-c", script)
    program = Path("/usr/bin/unshare")
    return Target(standin, program=program, arguments=arguments, environment=_VARIABLE)


def _ran(captures: Path, name: str) -> Counter[str]:
    """Returns the nanoseconds of a kernel by call site."""
    found = Counter[str]()
    for path in captures.glob("*.aiflame"):
        profile = read_capture(path)
        for row in profile.gpu.times:
            if profile.gpu.kernels[row["kernel"]].name == name:
                frames = [] if row["stack"] == NONE else frames_of(profile, int(row["stack"]))
                site = "runtime" if "launch_by_runtime" in frames else "driver"
                found[site if "main" in frames else "unknown"] += int(row["duration_ns"])
    return found


def _lost(captures: Path, kind: LossKind) -> int:
    losses = [one for path in captures.glob("*.aiflame") for one in read_capture(path).losses]
    return sum(one.count for one in losses if one.name == kind.stored_name)


def _launch_until(target: Target, holds: Callable[[], bool]) -> int:
    """Launches until something holds; returns how many kernels."""
    launches = 0

    def is_so() -> bool:
        nonlocal launches
        target.obey(*_ROUND)
        launches += _LAUNCHES
        return holds()

    wait_until(is_so, _PATIENCE_S)
    return launches


class _Agent:
    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.helpers, self.captures, self.log = _folders(folder)
        self.process = process

    def said(self, words: str) -> bool:
        return words in self.log.read_text()

    def metric(self, name: str) -> float:
        """Returns a metric without labels."""
        url = re.search(r"health and metrics: (\S+)", self.log.read_text())
        assert url is not None
        with urllib.request.urlopen(f"{url[1]}/metrics") as answer:  # noqa: S310 - of its own
            text = answer.read().decode()
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])


def _folders(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "helpers", folder / "captures", folder / "log"


@contextmanager
def _running(folder: Path, standin: Path, *more: str) -> Iterator[_Agent]:
    """An agent that puts helpers into a directory, and ends as a service manager ends it."""
    helpers, captures, log = _folders(folder)
    captures.mkdir()
    arguments = ("--directory", folder / "agent", "--gpu-helper-directory", helpers)
    sinks = ("--stretch", "5s", "--sinks-captures-directory", captures, "--health", "")
    with log.open("wb") as file:
        words = (_PROGRAM, standin / "libaiflame-nvidia.so", *arguments, *sinks, *more)
        process = subprocess.Popen([sys.executable, *map(str, words)], stderr=file)
    try:
        agent = _Agent(folder, process)
        wait_until(lambda: agent.said("recording all processes"), _PATIENCE_S)
        yield agent
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_workload_that_is_started_later_is_told_by_its_environment_alone(
    standin: Path, tmp_path: Path
) -> None:
    # GIVEN an agent
    # WHEN a program begins in another mount namespace, and the agent has found its helper
    with _running(tmp_path, standin) as agent, _workload(standin, agent.helpers) as target:
        target.obey(*_SETUP)
        target.read_until(lambda told: any(state.tier for state in told.states), _PATIENCE_S)
        target.obey("launch 1 50 1 1", "sync")
        target.read_until(lambda told: any(state.tier == 2 for state in told.states))
        maps = Path(f"/proc/{target.pid}/maps").read_text()
        for _ in range(_ROUNDS):
            target.obey(*_ROUND)
        # THEN its kernel times are in captures, under the stacks that launched them
        wait_until(lambda: sum(_ran(agent.captures, "scale").values()) >= _RAN.total(), _CAPTURED_S)
    assert _ran(agent.captures, "scale") == _RAN
    assert agent.said("tier 2, launches, and samples with reasons")
    # AND THEN so are stall samples
    sampled = 0
    for path in agent.captures.glob("*.aiflame"):
        profile = read_capture(path)
        rows = device_samples(profile)
        for stack, count in zip(rows.stack.tolist(), rows.count.tolist(), strict=True):
            assert "main" in frames_of(profile, stack)
            sampled += count
    assert sampled > 0
    # AND THEN nobody has put anything into it: the library is where its environment says
    assert f"{_INSIDE}/libaiflame-nvidia-" in maps
    assert not agent.said("loaded libaiflame")
    assert not agent.said(f"({target.pid}) runs on a device of nvidia: --gpu nvidia loads")


def test_stalls_are_left_out_where_they_would_exceed_the_budget(
    standin: Path, tmp_path: Path
) -> None:
    # GIVEN an agent that may take next to nothing, and a program that it finds
    budget = ("--cost-cpu-percent", "0.1", "--cost-host-percent", "0.05")
    with (
        _running(tmp_path, standin, *budget, "--health", "127.0.0.1:0") as agent,
        _workload(standin, agent.helpers) as target,
    ):
        wait_until(lambda: agent.metric("aiflame_device_duty_ratio") == 1, _PATIENCE_S)
        target.obey(*_SETUP)
        target.read_until(lambda told: any(state.tier for state in told.states), _PATIENCE_S)
        # WHEN its device is sampled
        said = f"stalls of program ({target.pid}) are not sampled"
        launches = _launch_until(target, lambda: agent.said(said)) + _ROUNDS * _LAUNCHES
        target.read_until(lambda told: told.states[-1].tier == 1, _PATIENCE_S)
        samples = sum(target.told.samples().values())
        for _ in range(_ROUNDS):
            target.obey(*_ROUND)
        target.read_until(lambda told: len(told.kernel_times) == launches, _PATIENCE_S)
        wait_until(lambda: agent.metric("aiflame_device_duty_ratio") == 0, _PATIENCE_S)
        # THEN it is not any more, its kernel times are told as before,
        assert sum(target.read().samples().values()) == samples
        # AND captures say for how long stalls are missing.
        wait_until(lambda: _lost(agent.captures, LossKind.DEVICE_STALLS_LEFT_OUT) > 0, _CAPTURED_S)


def test_a_helper_of_an_older_protocol_is_refused_and_its_process_goes_on(
    tmp_path: Path, run_aiflame: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    # GIVEN a program that has the helper of an older version in it
    older = build(tmp_path / "older", "-DPROTOCOL_VERSION=1")
    with Target(older, gpu="") as target:
        target.obey(*_SETUP)
        with Recording(tmp_path, "-p", target.pid, "--gpu", "nvidia", program=RECORD) as recording:
            target.obey("launch 0 300 20 0", "sync")
            wait_until(lambda: any(len(window.launches) for window in recording.windows()))
            ended = recording.stop()
        # THEN it is not told to begin, and goes on as before
        assert not target.read().states
        target.obey("launch 0 300 20 0", "sync")
    # AND THEN its launches are there, and the reason and the cure for what is not
    profile = ended.profile
    assert len(profile.gpu.calls) and not len(profile.gpu.times)
    losses = {loss.name: loss.count for loss in profile.losses}
    assert losses[LossKind.HELPERS_FOREIGN.stored_name] == 1
    shown = run_aiflame("stats", ended.capture).stdout
    assert "of another version" in shown and "start them anew" in shown
