# SPDX-License-Identifier: Apache-2.0
"""Targets whose files and ids are not those of the recorder: namespaces, cgroups, deleted files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiflame.agent.model.profile import FrameKind, Profile, SampleClass, StopReason
from aiflame.agent.processes.procfs import comm, process_ids
from aiflame.agent.processes.targets import cgroup2_mounts
from cgroups import in_cgroup, made_groups
from recordings import Recording, Workload, children_of, ns_of, rows_of

pytestmark = pytest.mark.bpf

_CONTAINER_ID = "0123456789abcdef" * 4


@pytest.fixture
def guest(workload: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder with a program and the library that it needs, both nowhere else."""
    library = workload("guestlib", "-shared", "-fPIC", "-Wl,-soname,libguest.so")
    program = workload("guest", str(library), "-Wl,-rpath,$ORIGIN")
    folder = tmp_path / "guest files"
    folder.mkdir()
    shutil.copy(program, folder / "guest")
    shutil.copy(library, folder / "libguest.so")
    return folder


def _assert_functions_have_names(profile: Profile, truth: dict[str, int]) -> None:
    for function, file in (("compute_in_program", "guest"), ("compute_in_library", "libguest.so")):
        # 150 samples, which vary by less than the root of that: five times so much.
        sampled_ns = ns_of(profile, function, None, SampleClass.ON_CPU)
        assert sampled_ns == pytest.approx(truth["cpu_ns"], rel=0.4), function
        (found,) = (f for f in profile.functions if f.name == function)
        assert found.binary is not None
        assert Path(profile.binaries[found.binary].path).name == file
        assert len(profile.binaries[found.binary].build_id) == 40
        # Not all: the loader, which finds the clock at its first call, has no frame pointers.
        rows = rows_of(profile, function, None, SampleClass.ON_CPU)
        rooted = rows[profile.stacks.ends[rows["stack"]] == StopReason.ROOTED]
        assert rooted["count"].sum() >= 0.9 * rows["count"].sum()


def test_files_of_another_mount_namespace_give_names(guest: Path, tmp_path: Path) -> None:
    # GIVEN a process in its own pid and mount namespace, with files on a file system of its own
    inside = tmp_path / "inside"
    inside.mkdir()
    script = 'mount -t tmpfs none "$2" && cp "$1"/* "$2" && rm -r "$1" && exec "$2/guest"'
    command = ["unshare", "-m", "-p", "-f", "--mount-proc", "sh", "-c", script, "sh", guest, inside]
    with Workload(command) as workload:
        (pid,) = children_of(workload.pid)
        assert not any(inside.iterdir())
        # WHEN it is recorded from outside
        with Recording(tmp_path, "-p", pid, "-F", 999) as recording:
            workload.go()
            truth = workload.truth()
            profile = recording.stop().profile
    # THEN it looks as if there were no walls
    _assert_functions_have_names(profile, truth)
    assert not [loss for loss in profile.losses if loss.name != "sampling_skipped"]
    (process,) = profile.processes
    assert (process.pid, process.name) == (pid, "guest")
    assert process.executable == str(inside / "guest")


def test_a_file_that_could_not_be_opened_at_first_is_later(guest: Path, tmp_path: Path) -> None:
    # GIVEN a program that nobody finds where it was once it is over, and that ends at once
    inside = tmp_path / "inside"
    inside.mkdir()
    script = (
        'mount -t tmpfs none "$2" && cp "$1"/* "$2" || exit;'
        ' for _ in $(seq 30); do "$2/guest" </dev/null >/dev/null; done; exec "$2/guest"'
    )
    command = ["unshare", "-m", "sh", "-c", script, "sh", guest, inside]
    with (
        Recording(tmp_path, "-a", "-F", 999, "--no-off-cpu", "--gpu", "none") as recording,
        Workload(command) as workload,
    ):
        # WHEN it runs for longer
        workload.go()
        truth = workload.truth()
        profile = recording.stop().profile
    # THEN it has names and whole stacks
    _assert_functions_have_names(profile, truth)


def test_deleted_files_give_names(guest: Path, tmp_path: Path) -> None:
    with Workload([guest / "guest"]) as workload:
        shutil.rmtree(guest)
        with Recording(tmp_path, "-p", workload.pid, "-F", 999) as recording:
            workload.go()
            truth = workload.truth()
            profile = recording.stop().profile
    _assert_functions_have_names(profile, truth)


def test_replaced_files_give_the_names_of_those_that_run(guest: Path, tmp_path: Path) -> None:
    with Workload([guest / "guest"]) as workload:
        for name in ("guest", "libguest.so"):
            (guest / "other").write_bytes(b"an upgrade")
            (guest / "other").replace(guest / name)
        with Recording(tmp_path, "-p", workload.pid, "-F", 999) as recording:
            workload.go()
            truth = workload.truth()
            profile = recording.stop().profile
    _assert_functions_have_names(profile, truth)


def test_a_command_may_be_gone_before_its_names_are_read(guest: Path, tmp_path: Path) -> None:
    script = f'echo go | "{guest}/guest" >/dev/null; rm -r "{guest}"'
    with Recording(tmp_path, "-F", 999, "--", "sh", "-c", script) as recording:
        profile = recording.wait().profile
    _assert_functions_have_names(profile, {"cpu_ns": 150_000_000})


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup with one below it that is named like a container's."""
    name = f"aiflame-test-{os.getpid()}"
    with made_groups(cgroup2_mounts()[0], f"{name}/docker-{_CONTAINER_ID}.scope") as (below,):
        yield below.parent


def test_a_cgroup_is_recorded_with_those_below_it(
    cgroup: Path, guest: Path, tmp_path: Path
) -> None:
    (below,) = cgroup.glob("docker-*")
    program = guest / "guest"
    with (
        in_cgroup(cgroup, program) as here,
        in_cgroup(below, program) as child,
        Workload([program]) as outside,
        Recording(tmp_path, "--cgroup", cgroup, "-F", 999) as recording,
    ):
        for workload in (here, child, outside):
            workload.go()
        for workload in (here, child, outside):
            workload.truth()
        profile = recording.stop().profile
    recorded = {process.pid: process for process in profile.processes}
    assert {*recorded} == {here.pid, child.pid}
    assert recorded[here.pid].container_id == ""
    assert recorded[child.pid].container_id == _CONTAINER_ID
    assert recorded[child.pid].cgroup == f"/{cgroup.name}/{below.name}"
    assert ns_of(profile, "compute_in_program", None, SampleClass.ON_CPU) == pytest.approx(
        300_000_000, rel=0.3
    )


def test_a_process_that_enters_a_cgroup_is_recorded_from_there_on(
    cgroup: Path, guest: Path, tmp_path: Path
) -> None:
    with Recording(tmp_path, "--cgroup", cgroup, "-F", 999) as recording:
        with in_cgroup(cgroup, guest / "guest") as workload:
            workload.go()
            workload.truth()
        profile = recording.stop().profile
    assert workload.pid in {process.pid for process in profile.processes}
    assert ns_of(profile, "compute_in_library", None, SampleClass.ON_CPU) == pytest.approx(
        150_000_000, rel=0.4
    )


def test_a_kernel_thread_has_kernel_frames_only(tmp_path: Path) -> None:
    # One that is woken up several times a second on any machine that does anything.
    wanted = ("rcu_preempt", "rcu_sched")
    pid = next(pid for pid in process_ids() if comm(pid) in wanted)
    with Recording(tmp_path, "-p", pid, "-d", "1") as recording:
        profile = recording.wait().profile
    kinds = {profile.functions[function].kind for function in profile.frames["function"]}
    assert kinds == {FrameKind.KERNEL}
    ends = {StopReason(end) for end in profile.stacks.ends}
    assert StopReason.KERNEL_ONLY in ends
    assert ends <= {StopReason.KERNEL_ONLY, StopReason.NOT_WALKED}
    (process,) = profile.processes
    assert (process.executable, process.command_line) == ("", "")
