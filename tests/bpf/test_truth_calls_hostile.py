# SPDX-License-Identifier: Apache-2.0
"""Calls of device APIs by programs that make them hard to count."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiflame.agent.model.gpu import NONE
from aiflame.agent.model.profile import Profile
from recordings import Recording, Workload, record_workload

pytestmark = pytest.mark.bpf

Record = Callable[..., tuple[Profile, dict[str, int]]]


@pytest.fixture
def record(workload: Callable[..., Path], tmp_path: Path) -> Record:
    """`record(way, rounds, *options)` records workloads/clhard.c."""
    environment = {**os.environ, "POCL_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}

    def run(way: str, rounds: int, *options: object) -> tuple[Profile, dict[str, int]]:
        command = [workload("clhard", "-lOpenCL"), way, rounds]
        return record_workload(tmp_path, Workload(command, env=environment), *options)

    return run


def _counts(profile: Profile) -> Counter[tuple[str, str]]:
    """Counts calls by function and kernel."""
    gpu = profile.gpu
    found: Counter[tuple[str, str]] = Counter()
    for row in gpu.calls:
        kernel = gpu.kernels[row["kernel"]].name if row["kernel"] != NONE else ""
        found[gpu.functions[row["function"]].name, kernel] += int(row["count"])
    return found


def _count(profile: Profile, function: str) -> int:
    return sum(count for (name, _), count in _counts(profile).items() if name == function)


def test_what_a_launch_left_on_the_stack_hides_no_call(record: Record) -> None:
    profile, truth = record("stale", 300)
    assert _count(profile, "clFinish") == truth["waits"]
    assert _count(profile, "clEnqueueNDRangeKernel") == truth["launches"]


def test_a_handle_that_is_used_again_has_its_new_name(record: Record) -> None:
    profile, truth = record("reuse", 300)
    launches = truth["launches"] // 2
    assert _counts(profile) == {
        ("clEnqueueNDRangeKernel", "more"): launches,
        ("clEnqueueNDRangeKernel", "less"): launches,
        ("clFinish", ""): truth["waits"],
    }
    gpu = profile.gpu
    work: Counter[str] = Counter()
    for row in gpu.calls:
        if row["kernel"] != NONE:
            work[gpu.kernels[row["kernel"]].name] += int(row["work"])
    assert work == {"more": 2 * launches, "less": launches}


def test_sizes_that_cannot_be_cost_only_themselves(record: Record) -> None:
    # GIVEN more work than 64 bits hold, in so many launches that their sum does not fit either
    profile, truth = record("refused", 100_000)
    # THEN each launch is counted, and the capture can be read
    assert _count(profile, "clEnqueueNDRangeKernel") == truth["launches"]
    losses = {loss.name: loss.count for loss in profile.losses}
    # Of 10 launches a round two have a readable number of sizes where no memory is.
    assert losses.pop("call_arguments_unreadable") == truth["launches"] // 5
    assert losses.pop("call_sizes_cut") >= 1
    # So many that differ from each other are counted alone.
    assert losses.pop("launches_not_timed") > 0
    assert losses == {}


@pytest.mark.breadth
def test_a_launch_inside_of_another_apis_launch_is_counted(record: Record) -> None:
    profile, truth = record("wrapped", 200)
    assert _count(profile, "cudaLaunchKernel") == truth["waits"] == 200
    assert _count(profile, "clEnqueueNDRangeKernel") == truth["launches"] == 400
    assert _count(profile, "clFinish") == 200


@pytest.mark.breadth
def test_threads_that_have_ended_leave_room_for_others(record: Record) -> None:
    # GIVEN more threads than callers are kept at a time
    profile, truth = record("threads", 2000)
    assert _count(profile, "clEnqueueNDRangeKernel") == truth["launches"] == 2000
    assert profile.losses == ()


@contextmanager
def _image(lower: Path, folder: Path) -> Iterator[Path]:
    """Yields a mount of a folder, as each container of one image has its own."""
    other, mount = folder / "other", folder / "mount"
    other.mkdir(parents=True)
    mount.mkdir()
    subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", f"lowerdir={lower}:{other}", str(mount)],
        check=True,
    )
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.breadth
def test_a_library_in_two_containers_of_one_image_is_counted_once(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    program = workload("clhard", "-lOpenCL")
    # GIVEN one file that two mounts show with device numbers of their own
    (tmp_path / "lower").mkdir()
    linked = subprocess.run(["ldd", str(program)], check=True, capture_output=True, text=True)
    library = next(line.split()[2] for line in linked.stdout.splitlines() if "libOpenCL" in line)
    shutil.copy(library, tmp_path / "lower" / "libOpenCL.so.1")
    with (
        _image(tmp_path / "lower", tmp_path / "one") as one,
        _image(tmp_path / "lower", tmp_path / "two") as two,
    ):
        command = [program, "stale", 100]
        environment = {**os.environ, "POCL_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
        first = Workload(command, env={**environment, "LD_LIBRARY_PATH": str(one)})
        second = Workload(command, env={**environment, "LD_LIBRARY_PATH": str(two)})
        with first, second:
            pids = f"{first.pid},{second.pid}"
            with Recording(tmp_path, "-p", pids) as recording:
                first.go()
                second.go()
                truth = [first.truth(), second.truth()]
                profile = recording.stop().profile
    # THEN a probe on each mount, which is a probe on the one file, counts no call twice
    launches = sum(measured["launches"] for measured in truth)
    assert _count(profile, "clEnqueueNDRangeKernel") == launches == 200
    assert _count(profile, "clFinish") == 200
