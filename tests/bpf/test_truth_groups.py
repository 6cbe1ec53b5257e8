# SPDX-License-Identifier: Apache-2.0
"""Containers, units and names of processes as targets: what is in them is recorded, and only that.

Of a container or unit the recorder sees nothing but the names of cgroups, so cgroups of such names
are all that it takes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.processes.targets import cgroup2_mounts
from breadth import cases
from cgroups import in_cgroup, made_groups
from recordings import Recording, Workload, ns_of

pytestmark = pytest.mark.bpf

RunAiflame = Callable[..., "subprocess.CompletedProcess[str]"]

# Other than any that another run of the tests has at the same time.
_OWN = f"{os.getpid():08x}"
_ID = _OWN + "0123456789abcdef" * 3 + "01234567"
_OTHER_ID = _OWN + "fedcba9876543210" * 3 + "fedcba98"
_UNIT = f"aiflame-test-{os.getpid()}"
# What a guest computes, in ns of CPU time, in its program and in its library.
_GUEST_NS = 150_000_000


@pytest.fixture
def guest(workload: Callable[..., Path], tmp_path: Path) -> Path:
    library = workload("guestlib", "-shared", "-fPIC", "-Wl,-soname,libguest.so")
    program = workload("guest", str(library), "-Wl,-rpath,$ORIGIN")
    shutil.copy(library, tmp_path / "libguest.so")
    return Path(shutil.copy(program, tmp_path / "guest"))


@pytest.fixture
def groups() -> Iterator[dict[str, Path]]:
    """Cgroups of two containers and two units, and one below each of the first; by their names."""
    names = [
        f"system.slice/docker-{_ID}.scope",
        f"system.slice/docker-{_ID}.scope/init",
        f"system.slice/docker-{_OTHER_ID}.scope",
        f"system.slice/{_UNIT}.service",
        f"system.slice/{_UNIT}.service/worker",
        f"system.slice/{_UNIT}-other.service",
    ]
    with made_groups(cgroup2_mounts()[0], *names) as made:
        yield dict(zip(names, made, strict=True))


def _run_all(stack: ExitStack, groups: dict[str, Path], guest: Path) -> dict[str, Workload]:
    return {name: stack.enter_context(in_cgroup(path, guest)) for name, path in groups.items()}


def _record(folder: Path, workloads: list[Workload], *target: str) -> tuple[Profile, str]:
    with Recording(folder, *target, "-F", 999) as recording:
        for workload in workloads:
            workload.go()
        for workload in workloads:
            workload.truth()
        ended = recording.stop()
    return ended.profile, ended.stderr


def _cpu_ns(profile: Profile, function: str) -> int:
    return ns_of(profile, function, None, SampleClass.ON_CPU)


def _assert_recorded(profile: Profile, workloads: dict[str, Workload], names: list[str]) -> None:
    by_pid = {workload.pid: name for name, workload in workloads.items()}
    assert {by_pid.get(process.pid) for process in profile.processes} == {*names}
    for function in ("compute_in_program", "compute_in_library"):
        # 150 samples each, which vary by less than the root of that: five times so much.
        assert _cpu_ns(profile, function) == pytest.approx(len(names) * _GUEST_NS, rel=0.4)
    for process in profile.processes:
        name = by_pid[process.pid]
        container = next((each for each in (_ID, _OTHER_ID) if each in name), "")
        assert (process.cgroup, process.container_id) == (f"/{name}", container)


def test_a_container_is_recorded_and_nothing_else(
    groups: dict[str, Path], guest: Path, tmp_path: Path, run_aiflame: RunAiflame
) -> None:
    with ExitStack() as stack:
        workloads = _run_all(stack, groups, guest)
        wanted = _ID[:10]
        profile, said = _record(tmp_path, [*workloads.values()], "--container", wanted)
        # Its name is not known, since no docker runs here.
        refused = run_aiflame("record", "--container", "no-such-container", "-d", "1")
    _assert_recorded(profile, workloads, [name for name in groups if _ID in name])
    assert profile.recording.target == f"container {_ID[:12]} (docker)"
    assert "has no cgroup v2 directory" not in said
    assert refused.returncode == 2
    assert "no running container is no-such-container" in refused.stderr
    for each in (_ID, _OTHER_ID):
        assert f"\n  {each[:12]} docker (guest)\n" in refused.stderr


def test_a_unit_is_recorded_and_nothing_else(
    groups: dict[str, Path], guest: Path, tmp_path: Path, run_aiflame: RunAiflame
) -> None:
    with ExitStack() as stack:
        workloads = _run_all(stack, groups, guest)
        profile, _ = _record(tmp_path, [*workloads.values()], "--unit", _UNIT)
        refused = run_aiflame("record", "--unit", f"{_UNIT}-othre", "-d", "1")
    _assert_recorded(profile, workloads, [name for name in groups if f"{_UNIT}.service" in name])
    assert profile.recording.target == f"unit {_UNIT}.service"
    assert refused.returncode == 2
    assert f"no unit {_UNIT}-othre has a process here" in refused.stderr
    assert f"there is {_UNIT}-other" in refused.stderr


def test_processes_of_a_name_are_recorded_with_the_children_that_they_start(
    guest: Path, tmp_path: Path
) -> None:
    # GIVEN two processes of one name, a shell whose executable has it, and another one
    comm = f"same{os.getpid()}"
    program = Path(shutil.copy(guest, guest.with_name(comm)))
    shell = tmp_path / "bin" / comm
    shell.parent.mkdir()
    shutil.copy(Path("/bin/sh").resolve(), shell)
    script = 'echo ready; read go; echo go | "$0" | tail -n +2'
    with (
        Workload([program]) as one,
        Workload([program]) as other,
        Workload([shell, "-c", script, guest]) as parent,
        Workload([guest]) as outside,
    ):
        profile, _ = _record(tmp_path, [one, other, parent, outside], "--comm", comm)
    # THEN they are recorded, and what the shell started meanwhile
    named = {process.pid for process in profile.processes if process.name == comm}
    assert named >= {one.pid, other.pid, parent.pid}
    assert outside.pid not in {process.pid for process in profile.processes}
    assert profile.recording.target == f"comm {comm} (3 processes)"
    assert {process.name for process in profile.processes} >= {comm, "guest", "tail"}
    assert _cpu_ns(profile, "compute_in_program") == pytest.approx(3 * _GUEST_NS, rel=0.4)


@cases("target", ["-p", "--comm"])
def test_children_that_are_there_already_are_followed(
    guest: Path, tmp_path: Path, target: str
) -> None:
    # GIVEN a process of its own name whose grandchild is waiting to begin
    comm = f"pid{os.getpid()}"
    shell = Path(shutil.copy(Path("/bin/sh").resolve(), tmp_path / comm))
    script = '( "$0"; true ); true'
    with Workload([shell, "-c", script, guest]) as parent, Workload([guest]) as outside:
        named = [target, str(parent.pid), "-s"] if target == "-p" else [target, comm]
        profile, _ = _record(tmp_path, [parent, outside], *named)
    # THEN it is recorded from there on, and its neighbour is not
    assert outside.pid not in {process.pid for process in profile.processes}
    assert {process.name for process in profile.processes} == {comm, "guest"}
    assert _cpu_ns(profile, "compute_in_program") == pytest.approx(_GUEST_NS, rel=0.4)


@pytest.fixture
def hierarchy(tmp_path: Path) -> Iterator[Path]:
    """A mounted v1 hierarchy without controllers, as systemd's own is where v1 is used."""
    mount = tmp_path / "v1"
    mount.mkdir()
    options = f"none,name=aiflame{os.getpid()}"
    subprocess.run(["mount", "-t", "cgroup", "-o", options, "none", mount], check=True)
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


def test_a_container_that_only_v1_groups_is_recorded_by_its_processes(
    hierarchy: Path, guest: Path, tmp_path: Path
) -> None:
    with (
        made_groups(hierarchy, f"docker/{_ID}", f"docker/{_OTHER_ID}") as (group, other_group),
        in_cgroup(group, guest) as inside,
        in_cgroup(other_group, guest) as other,
    ):
        workloads = {f"docker/{_ID}": inside, f"docker/{_OTHER_ID}": other}
        profile, said = _record(tmp_path, [inside, other], "--container", _ID)
    _assert_recorded(profile, workloads, [f"docker/{_ID}"])
    words = f"container {_ID[:12]} (docker)"
    assert profile.recording.target == f"{words}: 1 process and children"
    assert f"note: {words} has no cgroup v2 directory here" in said
