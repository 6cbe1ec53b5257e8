# SPDX-License-Identifier: Apache-2.0
"""Launches, by stack and kernel: each is counted once, with its name, and gets its samples."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from aiflame.agent.model.gpu import NONE, Direction, Operation
from aiflame.agent.model.profile import COMPLETE_REASONS, Profile, SampleClass
from aiflame.agent.reports.causes import CAUSES, classify
from aiflame.gpu.attribution import Certainty, attribute
from recordings import (
    Ended,
    Recording,
    Workload,
    frames_of,
    python_frames_of,
    record_workload,
    rows_of,
    stacks_with,
)
from support import AIFLAME, WORKLOADS

pytestmark = pytest.mark.bpf

_FREQUENCY_HZ = 999
# Where Debian's pyopencl is.
_SYSTEM_PYTHON = "/usr/bin/python3"
_SITES = {"scale_most": "scale", "scale_rest": "scale", "divide_all": "divide", "stir_all": "stir"}


class Run(NamedTuple):
    """A recording."""

    profile: Profile
    truth: dict[str, int]


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "POCL_CACHE_DIR": str(folder), "HOME": str(folder)}


@pytest.fixture(scope="module")
def program(workload: Callable[..., Path]) -> Path:
    return workload("opencl", "-lOpenCL")


@pytest.fixture(scope="module")
def late(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Attached when kernels were made and had been launched."""
    folder = tmp_path_factory.mktemp("late")
    started = Workload([program, 2000], env=_environment(folder))
    return Run(*record_workload(folder, started, "-F", _FREQUENCY_HZ))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("python")
    command = [_SYSTEM_PYTHON, WORKLOADS / "pyopencl_launches.py", 2000]
    started = Workload(command, env=_environment(folder))
    return Run(*record_workload(folder, started, "-F", _FREQUENCY_HZ))


@pytest.fixture(scope="module")
def whole(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Recorded from its first instruction on, each call one by one."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "go").write_text("go\n")
    command = f"exec {program} 500 < go"
    with Recording(
        *(folder, "--trace", "-F", _FREQUENCY_HZ, "--", "sh", "-c", command),
        env=_environment(folder),
    ) as recording:
        return recording.wait()


def _launches(profile: Profile) -> Iterator[tuple[str, str, int, int]]:
    """Yields call site, kernel, launches and work items of each row of launches."""
    gpu = profile.gpu
    for row in gpu.calls:
        if gpu.functions[row["function"]].operation is Operation.LAUNCH:
            frames = frames_of(profile, int(row["stack"]))
            site = next((name for name in _SITES if name in frames), f"none of {frames}")
            kernel = gpu.kernels[row["kernel"]].name
            yield site, kernel, int(row["count"]), int(row["work"])


def _count(profile: Profile, *functions: str) -> int:
    gpu = profile.gpu
    names = np.array([function.name in functions for function in gpu.functions], bool)
    return int(gpu.calls["count"][names[gpu.calls["function"]]].sum())


@pytest.mark.parametrize("which", ["late", "python"])
def test_each_launch_is_counted_once_where_it_was_made(
    which: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(which)
    found: Counter[tuple[str, str]] = Counter()
    work: Counter[str] = Counter()
    for site, kernel, count, items in _launches(run.profile):
        found[site, kernel] += count
        work[site] += items
    assert found == {
        (site, kernel): run.truth[f"{site}.launches"] for site, kernel in _SITES.items()
    }
    assert work["scale_most"] == 3 * 4096 * run.truth["scale_most.launches"]
    assert work["stir_all"] == 4096 * run.truth["stir_all.launches"]
    assert run.profile.losses == ()


def test_each_wait_is_counted_too(late: Run) -> None:
    launches = sum(late.truth[f"{site}.launches"] for site in _SITES)
    assert _count(late.profile, "clWaitForEvents") == launches
    assert _count(late.profile, "clEnqueueNDRangeKernel") == launches


@pytest.mark.parametrize("which", ["late", "python"])
def test_stacks_of_calls_are_whole(which: str, request: pytest.FixtureRequest) -> None:
    profile = request.getfixturevalue(which).profile
    ends = {int(profile.stacks.ends[stack]) for stack in set(profile.gpu.calls["stack"].tolist())}
    assert ends <= set(COMPLETE_REASONS)


def test_python_lines_stand_before_the_launch(python: Run) -> None:
    gpu = python.profile.gpu
    lines = (WORKLOADS / "pyopencl_launches.py").read_text().splitlines()
    seen = set()
    for row in gpu.calls:
        if gpu.functions[row["function"]].operation is Operation.LAUNCH:
            frames = python_frames_of(python.profile, int(row["stack"]))
            site = next(frame for frame in frames if frame.name in _SITES)
            assert lines[site.line - 1].strip().startswith(f"{_SITES[site.name]}(queue")
            assert site.file.endswith("pyopencl_launches.py")
            seen.add(site.name)
    assert seen == set(_SITES)


@pytest.mark.parametrize("which", ["late", "python"])
def test_samples_go_to_the_stacks_that_launched_them(
    which: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(which)
    gpu = run.profile.gpu
    shares: Counter[tuple[str, str, Certainty]] = Counter()
    for row in attribute(gpu):
        sample = gpu.samples[row["sample"]]
        kernel = gpu.kernels[gpu.codes[sample["code"]].kernel].name
        assert row["stack"] != NONE
        frames = frames_of(run.profile, int(row["stack"]))
        site = next(name for name in _SITES if name in frames)
        shares[site, kernel, Certainty(row["certainty"])] += int(row["count"])
    assert sum(shares.values()) == int(gpu.samples["count"].sum())
    of_site: Counter[str] = Counter()
    for (site, kernel, _), count in shares.items():
        assert kernel == _SITES[site]
        of_site[site] += count
    assert min(of_site[site] for site in _SITES) > 10, shares
    # The sizes are 3 to 1: five standard deviations, and what others take the processor for.
    n = of_site["scale_most"] + of_site["scale_rest"]
    assert abs(of_site["scale_most"] - 0.75 * n) < 5 * np.sqrt(0.75 * 0.25 * n) + 0.03 * n
    # Each launch is waited for. The wait for an event is known by where C keeps the event.
    exact = sum(count for (_, _, how), count in shares.items() if how is Certainty.EXACT)
    assert which == "python" or exact > 0.9 * sum(shares.values())


@pytest.mark.parametrize("which", ["late", "python"])
def test_waiting_for_the_device_is_called_so(which: str, request: pytest.FixtureRequest) -> None:
    # GIVEN a loader that jumps on into the driver, which leaves no frame of the call
    profile = request.getfixturevalue(which).profile
    blocked = rows_of(profile, None, None, SampleClass.BLOCKED)
    main = [profile.threads[thread].tid == profile.processes[0].pid for thread in blocked["thread"]]
    blocked = blocked[main]
    # THEN the call is in the stack all the same, and its waits are the device's
    is_wait = stacks_with(profile, "clWaitForEvents")[blocked["stack"]]
    causes = [CAUSES[cause] for cause in classify(profile)[blocked["stack"]]]
    assert {causes[at] for at in np.flatnonzero(is_wait)} == {"GPU wait"}
    assert blocked["ns"][is_wait].sum() > 0.8 * blocked["ns"].sum()


@pytest.mark.breadth
def test_nothing_is_missing_of_a_program_that_was_started(whole: Ended) -> None:
    profile = whole.profile
    launches = {(site, kernel) for site, kernel, _, _ in _launches(profile)}
    assert launches == set(_SITES.items())
    # "clCreateKernel" was seen: no kernel needed another source of its name.
    gpu = profile.gpu
    assert {kernel.name for kernel in gpu.kernels} == set(_SITES.values())
    assert _count(profile, "clCreateBuffer") == 1
    (buffer,) = (
        row for row in gpu.calls if gpu.functions[row["function"]].name == "clCreateBuffer"
    )
    assert int(buffer["bytes"]) == 3 * 4096 * 4


def test_each_call_is_listed_on_request(whole: Ended) -> None:
    gpu = whole.profile.gpu
    assert len(gpu.events) == int(gpu.calls["count"].sum())
    is_launch = np.array([f.operation is Operation.LAUNCH for f in gpu.functions], bool)
    launches = gpu.events[is_launch[gpu.events["function"]]]
    assert set(launches["grid"][:, 0].tolist()) == {4096, 3 * 4096}
    assert (launches["grid"][:, 1:] == 1).all()
    assert len(set(launches["queue"].tolist())) == 1
    assert (np.diff(gpu.events["start_ns"].astype(np.int64)) > -(10**7)).all()
    assert set(gpu.calls["direction"].tolist()) == {Direction.UNKNOWN}


@pytest.mark.breadth
def test_two_processes_on_one_device(program: Path, tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    with (
        Workload([program, 1000], env=environment) as one,
        Workload([program, 1000], env=environment) as other,
        Recording(tmp_path, "-p", f"{one.pid},{other.pid}", "-F", _FREQUENCY_HZ) as recording,
    ):
        one.go()
        other.go()
        truth = {one.pid: one.truth(), other.pid: other.truth()}
        profile = recording.stop().profile
    gpu = profile.gpu
    found: Counter[tuple[int, str]] = Counter()
    for row in gpu.calls:
        if row["kernel"] != NONE:
            kernel = gpu.kernels[row["kernel"]]
            thread = profile.threads[row["thread"]]
            assert kernel.process == thread.process
            found[profile.processes[kernel.process].pid, kernel.name] += int(row["count"])
    assert found == {
        (pid, kernel): sum(own[f"{s}.launches"] for s, k in _SITES.items() if k == kernel)
        for pid, own in truth.items()
        for kernel in set(_SITES.values())
    }
    for row in attribute(gpu):
        kernel = gpu.kernels[gpu.codes[gpu.samples[row["sample"]]["code"]].kernel]
        launcher = {
            profile.threads[call["thread"]].process
            for call in gpu.calls
            if call["stack"] == row["stack"]
        }
        assert launcher == {kernel.process}


# Enough for all to be known of the program while it runs.
_ROUNDS = 10_000
_SITES_OF_CUDA = {"by_syntax": 12, "by_call": 6, "by_config": 3, "together": 2}


@pytest.mark.parametrize("runtime", ["static", "shared"])
def test_cuda_launches_are_counted_without_a_driver(
    runtime: str, cuda_workload: Callable[..., Path], tmp_path: Path
) -> None:
    program = cuda_workload("cudalaunches", "-cudart", runtime, "-default-stream=per-thread")
    with Recording(tmp_path, "--", program, _ROUNDS) as recording:
        profile = recording.wait().profile
    gpu = profile.gpu
    by_kernel: Counter[str] = Counter()
    by_site: Counter[str] = Counter()
    for row in gpu.calls:
        if gpu.functions[row["function"]].operation is Operation.LAUNCH:
            by_kernel[gpu.kernels[row["kernel"]].name] += int(row["count"])
            frames = " ".join(frames_of(profile, int(row["stack"])))
            # The last launch of by_syntax is a tail call.
            frames = frames.replace("_Z6hiddenPi", "by_syntax")
            site = next((site for site in _SITES_OF_CUDA if site in frames), "cut")
            by_site[site] += int(row["count"])
    # 23 a round, each once, though some go through a thunk that is probed as well.
    assert sum(by_kernel.values()) == 23 * _ROUNDS
    assert "" not in by_kernel, by_kernel
    assert sum(count for name, count in by_kernel.items() if "fill" in name) == 4 * _ROUNDS
    assert sum(count for name, count in by_kernel.items() if "scale" in name) == 14 * _ROUNDS
    assert _count(profile, "cudaDeviceSynchronize") == _ROUNDS
    # Until its mappings were read, the program's stacks are cut.
    whole = sum(by_site.values()) - by_site.pop("cut", 0)
    assert whole > 5 * _ROUNDS
    for site, launches in _SITES_OF_CUDA.items():
        assert by_site[site] == pytest.approx(launches / 23 * whole, rel=0.01)


@pytest.mark.breadth
def test_cuda_kernels_of_a_running_program_have_names(
    cuda_workload: Callable[..., Path], tmp_path: Path
) -> None:
    # GIVEN a program whose kernels were registered before the recording
    program = cuda_workload("cudalaunches", "-cudart", "static", "-default-stream=per-thread")
    with subprocess.Popen([program, "1000000000"], stdout=subprocess.DEVNULL) as process:
        with Recording(tmp_path, "-p", process.pid, "-d", "1") as recording:
            profile = recording.wait().profile
        process.kill()
    # THEN their handles are named by the stubs that the launches came from
    launched = [row for row in profile.gpu.calls if row["kernel"] != NONE]
    names = {profile.gpu.kernels[row["kernel"]].name for row in launched}
    assert len(launched) > 4
    assert {name.strip("_Z0123456789Pi") for name in names} >= {"hidden", "plain"}
    assert all(name for name in names), names
    assert sum("scale" in name or "fill" in name for name in names) == len(names) - 2


def test_gpu_none_records_no_device_half(program: Path, tmp_path: Path) -> None:
    with (
        Workload([program, 300], env=_environment(tmp_path)) as started,
        Recording(tmp_path, "-p", started.pid, "--gpu", "none") as recording,
    ):
        started.go()
        started.truth()
        ended = recording.stop()
    assert "device opencl" not in ended.stderr
    assert " device samples in " not in ended.stderr
    profile = ended.profile
    assert profile.gpu.devices == ()
    assert len(profile.gpu.calls) == len(profile.gpu.samples) == 0
    assert len(profile.samples) > 0


def test_a_report_of_device_samples_is_written(whole: Ended, tmp_path: Path) -> None:
    output = tmp_path / "run.folded"
    command = [*AIFLAME, "report", str(whole.capture), "--view", "gpu", "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    text = output.read_text()
    assert ";scale_most;clEnqueueNDRangeKernel;-;scale_[G];" in text.replace("launch;", "")
