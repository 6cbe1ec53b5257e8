# SPDX-License-Identifier: Apache-2.0
"""Samples of OpenCL kernels on PoCL, whose device is the CPU: where they are, and how many."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from aiflame.agent.model.gpu import GpuProfile, Instruction, Tier
from aiflame.agent.model.profile import Profile, SampleClass
from breadth import cases
from recordings import Recording, Workload, frames_of, record_workload, rows_of
from support import WORKLOADS

pytestmark = pytest.mark.bpf

_FREQUENCY_HZ = 999

# Where Debian's pyopencl is.
_SYSTEM_PYTHON = "/usr/bin/python3"


class Run(NamedTuple):
    """A recording."""

    profile: Profile
    truth: dict[str, int]
    said: str

    @property
    def gpu(self) -> GpuProfile:
        return self.profile.gpu


Record = Callable[..., Run]


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "POCL_CACHE_DIR": str(folder), "HOME": str(folder)}


@pytest.fixture(scope="module")
def record(
    tmp_path_factory: pytest.TempPathFactory, workload: Callable[..., Path]
) -> Callable[..., Run]:
    """`record(workload, *arguments)` records it, with a PoCL cache of its own."""

    def run(name: str, *arguments: object) -> Run:
        folder = tmp_path_factory.mktemp(name)
        (folder / "cache").mkdir()
        command = [workload(name, "-lOpenCL"), *arguments]
        with (
            Workload(command, env=_environment(folder / "cache")) as started,
            Recording(folder, "-p", started.pid, "-F", _FREQUENCY_HZ) as recording,
        ):
            started.go()
            truth = started.truth()
            ended = recording.stop()
        return Run(ended.profile, truth, ended.stderr)

    return run


@pytest.fixture(scope="module")
def three(record: Record) -> Run:
    return record("opencl", 2000, "-g")


def _samples_of(gpu: GpuProfile, code: int) -> int:
    return int(gpu.samples["count"][gpu.samples["code"] == code].sum())


def _by_kernel(gpu: GpuProfile) -> dict[str, list[int]]:
    """Samples of each code, by the name of its kernel."""
    found: dict[str, list[int]] = {}
    for code, known in enumerate(gpu.codes):
        found.setdefault(gpu.kernels[known.kernel].name, []).append(_samples_of(gpu, code))
    return found


def _listing(gpu: GpuProfile, code: int) -> dict[int, Instruction]:
    return {line.offset: line for line in gpu.instructions if line.code == code}


def test_device_is_named_with_what_is_known_of_it(three: Run) -> None:
    (device,) = three.gpu.devices
    assert device.family == "opencl"
    assert device.name.startswith("PoCL 3.")
    assert device.tier is Tier.STALLS
    assert device.period_ns == three.profile.recording.period_ns
    assert [(reason.family, reason.name) for reason in three.gpu.reasons] == [("opencl", "issuing")]
    assert "device opencl: PoCL" in three.said
    assert " device samples in " in three.said


def test_device_samples_are_the_cpu_samples_in_kernel_code(three: Run) -> None:
    on_cpu = rows_of(three.profile, None, None, SampleClass.ON_CPU)
    is_kernel = [
        any(name.startswith("_pocl_kernel_") for name in frames_of(three.profile, stack))
        for stack in range(len(three.profile.stacks))
    ]
    in_kernels = int(on_cpu["count"][np.array(is_kernel)[on_cpu["stack"]]].sum())
    # Enough to compare: other programs may have had the processors.
    assert int(three.gpu.samples["count"].sum()) == in_kernels > 100
    assert three.profile.losses == ()


def test_workers_do_little_else(three: Run) -> None:
    # All was compiled before the recording began.
    (process,) = three.profile.processes
    workers = [thread.tid != process.pid for thread in three.profile.threads]
    on_cpu = rows_of(three.profile, None, None, SampleClass.ON_CPU)
    of_workers = int(on_cpu["count"][np.array(workers)[on_cpu["thread"]]].sum())
    assert int(three.gpu.samples["count"].sum()) > 0.9 * of_workers


def test_work_of_3_to_1_gets_samples_of_3_to_1(three: Run) -> None:
    found = _by_kernel(three.gpu)
    assert sorted(found) == ["divide", "scale", "stir"]
    # PoCL builds a kernel anew for each local size, and these two sizes get two.
    assert len(found["scale"]) == 2
    most, n = max(found["scale"]), sum(found["scale"])
    # Five standard deviations, and as much again for work that others take the processor from.
    assert abs(most - 0.75 * n) < 10 * np.sqrt(0.75 * 0.25 * n)


def test_every_sample_is_at_an_instruction_of_its_kernel(three: Run) -> None:
    for row in three.gpu.samples:
        code, offset = int(row["code"]), int(row["offset"])
        assert offset < three.gpu.codes[code].size_bytes
        assert _listing(three.gpu, code)[offset].text
    assert len(three.gpu.instructions) > 100


def test_samples_have_the_lines_of_the_loop(three: Run) -> None:
    # GIVEN a program built with -g and optimised, WHEN its samples are looked up by line
    loops = {"scale": {4, 5}, "divide": {12, 13}, "stir": {20, 21}}
    in_loops = 0
    for row in three.gpu.samples:
        code = int(row["code"])
        line = _listing(three.gpu, code)[int(row["offset"])]
        kernel = three.gpu.kernels[three.gpu.codes[code].kernel]
        if line.line in loops[kernel.name] and line.file.endswith(".cl"):
            in_loops += int(row["count"])
    # THEN nearly all are in the lines that take the time
    assert in_loops > 0.9 * int(three.gpu.samples["count"].sum())


def test_jump_says_where_it_goes_in_the_kernel(three: Run) -> None:
    for code in range(len(three.gpu.codes)):
        listing = _listing(three.gpu, code)
        targets = [line.text.split()[1] for line in listing.values() if line.text[:2] == "jn"]
        assert targets
        assert all(int(target, 16) in listing for target in targets)


@pytest.mark.breadth
def test_code_that_was_not_optimised_has_lines_of_its_own(record: Record) -> None:
    run = record("opencl", 300, "-g -cl-opt-disable")
    lines = [
        _listing(run.gpu, int(row["code"]))[int(row["offset"])].line for row in run.gpu.samples
    ]
    assert np.mean([line > 0 for line in lines]) > 0.9


@cases("when", ["before the recording", "during it"])
def test_kernels_whose_files_are_deleted_keep_their_code(
    when: str, tmp_path: Path, workload: Callable[..., Path]
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    started = Workload([workload("opencl", "-lOpenCL"), 500], env=_environment(cache))
    with started:
        if when == "before the recording":
            shutil.rmtree(cache)
        with Recording(tmp_path, "-p", started.pid, "-F", _FREQUENCY_HZ) as recording:
            started.go()
            if when == "during it":
                shutil.rmtree(cache)
            started.truth()
            gpu = recording.stop().profile.gpu
    assert sorted(_by_kernel(gpu)) == ["divide", "scale", "stir"]
    for row in gpu.samples:
        assert int(row["offset"]) in _listing(gpu, int(row["code"]))


def test_kernel_that_is_rebuilt_keeps_its_builds_apart(record: Record) -> None:
    run = record("clrebuild", 3, 600)
    # GIVEN one kernel by name
    (kernel,) = run.gpu.kernels
    assert kernel.name == "work"
    # THEN each build has its own code, in the order in which they ran
    assert len({code.binary for code in run.gpu.codes}) == len(run.gpu.codes) == 3
    for number, has_division in enumerate([False, True, False]):
        texts = [line.text for line in _listing(run.gpu, number).values()]
        assert any("divss" in text for text in texts) == has_division
    # AND as many samples as it took processor time: the main thread's waiting is in it too
    for number in range(3):
        expected = run.truth[f"work{number}.cpu_ns"] * _FREQUENCY_HZ / 1e9
        count = _samples_of(run.gpu, number)
        assert 0.7 * expected - 5 * np.sqrt(expected) < count < expected + 5 * np.sqrt(expected)


@pytest.mark.breadth
def test_python_program_on_the_distributions_pyopencl(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    command = [_SYSTEM_PYTHON, WORKLOADS / "pyopencl_launches.py", 1000]
    started = Workload(command, env=_environment(tmp_path / "cache"))
    profile, _ = record_workload(tmp_path, started, "-F", _FREQUENCY_HZ)
    found = _by_kernel(profile.gpu)
    assert sorted(found) == ["divide", "scale", "stir"]
    most, n = max(found["scale"]), sum(found["scale"])
    assert abs(most - 0.75 * n) < 10 * np.sqrt(0.75 * 0.25 * n)
