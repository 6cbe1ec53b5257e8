# SPDX-License-Identifier: Apache-2.0
"""Whom to record: found by pid, by cgroup, or started."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent import kernelfs
from aiflame.agent.errors import AiflameError, EnvironmentUnfit, UsageError
from aiflame.agent.kernel import abi, checks
from aiflame.agent.processes import procfs, targets


def test_running_processes() -> None:
    target = targets.target_of_pids([os.getpid(), os.getppid()])
    own, parent = procfs.comm(os.getpid()), procfs.comm(os.getppid())
    assert target.filter == abi.Filter.PIDS
    assert target.words == f"{own} (pid {os.getpid()}), {parent} (pid {os.getppid()})"
    assert target.file_stem == f"{own}-{os.getpid()}"
    assert target.existing_pids() == [os.getpid(), os.getppid()]


def test_a_process_that_is_not_there() -> None:
    with pytest.raises(AiflameError, match=r"^no such process: 4194305") as error:
        targets.target_of_pids([os.getpid(), 4194305])
    assert error.value.exit_code == 1
    assert error.value.hint


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`namespace(inode)`: the initial pid namespace is now this one."""

    def is_initial(inode: int) -> None:
        monkeypatch.setattr(checks, "_INITIAL_PID_NAMESPACE", inode)

    return is_initial


def test_what_a_container_is_told(namespace: Callable[[int], None]) -> None:
    own = Path("/proc/self/ns/pid").stat().st_ino
    namespace(own + 1)
    with pytest.raises(EnvironmentUnfit, match="pid namespace of its own") as unfit:
        targets.require_host_pid_namespace()
    assert unfit.value.hint == "run with --pid=host / hostPID: true"
    with pytest.raises(AiflameError, match=r"^no such process: 4194305 is visible here$") as error:
        targets.target_of_pids([4194305])
    assert error.value.hint == "run with --pid=host / hostPID: true"
    namespace(own)
    targets.require_host_pid_namespace()
    with pytest.raises(AiflameError, match=r"^no such process: 4194305$") as error:
        targets.target_of_pids([4194305])
    assert error.value.hint == "pgrep -a NAME lists running ones"


def test_a_thread_is_no_process() -> None:
    done, started = threading.Event(), threading.Event()

    def body() -> None:
        started.set()
        done.wait()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        started.wait()
        tid = thread.native_id
        assert tid is not None
        with pytest.raises(UsageError, match=f"^{tid} is a thread, not a process$") as error:
            targets.target_of_pids([tid])
        assert error.value.hint == f"aiflame record -p {os.getpid()}"
    finally:
        done.set()
        thread.join()


def _group(path: Path, *pids: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.controllers").write_text("cpu memory\n")
    (path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return path


def test_a_cgroup_and_those_below_it(tmp_path: Path) -> None:
    group = _group(tmp_path / "web.slice", 5)
    _group(group / "a.service", 11, 12)
    _group(group / "b.service")
    _group(tmp_path / "other.slice", 99)
    target = targets.target_of_cgroup(group)
    assert (target.filter, target.cgroup) == (abi.Filter.CGROUP, group)
    assert target.words == f"cgroup {group}"
    assert target.file_stem == "cgroup-web.slice"
    assert sorted(target.existing_pids()) == [5, 11, 12]


@pytest.mark.parametrize("given", ["/web.slice", "web.slice"])
def test_a_cgroup_by_its_path_below_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    group = _group(tmp_path / "web.slice", 5)
    monkeypatch.setattr(targets, "cgroup2_mounts", lambda: [Path("/nonexistent"), tmp_path])
    target = targets.target_of_cgroup(Path(given))
    assert target.cgroup == group
    assert target.words == f"cgroup {given}"


@pytest.mark.parametrize("name", ["missing", "folder", "file"])
def test_what_is_no_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(targets, "cgroup2_mounts", lambda: [])
    path = tmp_path / name
    with pytest.raises(UsageError, match=f"^{re.escape(f'not a cgroup v2 directory: {path}')}$"):
        targets.target_of_cgroup(path)


def test_mounts_with_odd_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "proc /proc proc rw 0 0\n"
        "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n"
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
        "none /mnt/a\x0c\u2028b tmpfs rw 0 0\n"
        " \n"
        "none /mnt/cgroup2 tmpfs cgroup2 0 0\n"
    )
    read = kernelfs.read_text
    monkeypatch.setattr(kernelfs, "read_text", lambda path, limit=65536: read(mounts, limit))
    assert targets.cgroup2_mounts() == [Path("/sys/fs/cgroup/unified")]


def test_everything() -> None:
    target = targets.target_of_all()
    assert target.filter == abi.Filter.ALL
    assert os.getpid() in target.existing_pids()


def test_a_command_has_its_programs_name(tmp_path: Path) -> None:
    program = tmp_path / "a-program-with-a-long-name"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    target = targets.target_of_command([str(program), "--fast"])
    assert target.command is not None
    try:
        # As much as the kernel keeps of it (TASK_COMM_LEN).
        assert target.file_stem == f"a-program-with--{target.command.pid}"
        assert target.existing_pids() == []
    finally:
        target.command.end()


def test_a_command_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    for name in (str(tmp_path / "data"), str(tmp_path), "no-such-program", ""):
        with pytest.raises(UsageError, match=f"^cannot run {name}: no such program$"):
            targets.target_of_command([name])
