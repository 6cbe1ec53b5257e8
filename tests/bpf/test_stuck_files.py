# SPDX-License-Identifier: Apache-2.0
"""Files of targets that never open: as on a file system that the target itself serves."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from aiflame.agent.model.profile import Profile
from breadth import cases
from recordings import Ended, Recording, frames_of, public_folder
from support import AIFLAME, WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

_PATIENCE_S = 30
# linux/fanotify.h
_CLASS_CONTENT, _CLOEXEC, _MARK_ADD, _OPEN_PERM = 0x4, 0x1, 0x1, 0x1_0000
_AT_FDCWD = -100


@contextmanager
def _never_opened(path: Path) -> Iterator[None]:
    """Has whoever opens a file wait: for a permission that nobody gives (fanotify(7))."""
    libc = ctypes.CDLL(None, use_errno=True)
    group = libc.fanotify_init(_CLASS_CONTENT | _CLOEXEC, os.O_RDONLY)
    assert group >= 0, ctypes.get_errno()
    mask = ctypes.c_uint64(_OPEN_PERM)
    try:
        found = libc.fanotify_mark(group, _MARK_ADD, mask, _AT_FDCWD, os.fsencode(path))
        assert found == 0, ctypes.get_errno()
        yield
    finally:
        os.close(group)  # whoever waits still is let in


@pytest.fixture
def copies(workload: Callable[..., Path]) -> Iterator[tuple[Path, Path]]:
    """A program that computes and waits, under two names."""
    with public_folder() as folder:
        paths = folder / "stuck", folder / "sound"
        for path in paths:
            shutil.copy(workload("serving"), path)
        yield paths


@contextmanager
def _running(path: Path) -> Iterator[int]:
    process = subprocess.Popen([path, "600"], stdout=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _loss(ended: Ended) -> tuple[int, str]:
    """How many there are of the one loss, and what it says."""
    (loss,) = [loss for loss in ended.profile.losses if loss.name == "files_stuck"]
    return loss.count, loss.meaning


def _names(profile: Profile, pid: int) -> set[str]:
    """The functions in which a process was seen."""
    processes = [index for index, process in enumerate(profile.processes) if process.pid == pid]
    threads = [i for i, thread in enumerate(profile.threads) if thread.process in processes]
    rows = profile.samples[[row["thread"] in threads for row in profile.samples]]
    return {name for stack in set(rows["stack"].tolist()) for name in frames_of(profile, stack)}


def test_a_file_that_never_opens_stops_no_recording(
    copies: tuple[Path, Path], tmp_path: Path
) -> None:
    stuck, sound = copies
    # GIVEN two programs, the file of one of which nobody can open
    with _running(stuck) as stuck_pid, _running(sound) as sound_pid, _never_opened(stuck):
        arguments = ("-p", f"{stuck_pid},{sound_pid}", "-F", 499, "-d", 1)
        # WHEN both are recorded
        with Recording(tmp_path, *arguments, patience_s=_PATIENCE_S) as recording:
            ended = recording.wait()
    # THEN the recording ends, tells of the file, and has the names of the other
    count, words = _loss(ended)
    assert (count, str(stuck) in words) == (1, True)
    profile = ended.profile
    assert "forward_pass" in _names(profile, sound_pid)
    assert _names(profile, stuck_pid) and "forward_pass" not in _names(profile, stuck_pid)


def test_one_that_comes_later_stops_none_either(copies: tuple[Path, Path], tmp_path: Path) -> None:
    stuck, sound = copies
    with (
        Recording(tmp_path, "-a", "-F", 499, "-d", 3, patience_s=_PATIENCE_S) as recording,
        _running(sound) as sound_pid,
        _running(stuck),
        _never_opened(stuck),
    ):
        ended = recording.wait()
    assert str(stuck) in _loss(ended)[1]
    assert "forward_pass" in _names(ended.profile, sound_pid)


def test_a_file_that_never_opens_stops_no_dump(copies: tuple[Path, Path]) -> None:
    stuck, _ = copies
    with _running(stuck) as pid, _never_opened(stuck):
        dump = subprocess.run(
            [*AIFLAME, "dump", "-p", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=True,
        )
    assert "start_thread" in dump.stdout
    assert str(stuck) in dump.stderr


class _Served(NamedTuple):
    """A program on a file system that a process serves, and where to write what it is silent on."""

    program: Path
    pid: int
    silence: Path


@pytest.fixture
def served(copies: tuple[Path, Path]) -> Iterator[_Served]:
    if not Path("/dev/fuse").exists():
        pytest.skip("no FUSE in this kernel")
    source, _ = copies
    mount, silence = source.with_name("mount"), source.with_name("silence")
    mount.mkdir()
    command = [sys.executable, WORKLOADS / "fuseserver.py", source, mount, silence]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    program = mount / "program"
    process = subprocess.Popen([program, "600"], stdout=subprocess.DEVNULL)
    try:
        yield _Served(program, process.pid, silence)
    finally:
        # First: whoever waits for an answer gets an error then, and can be killed.
        server.kill()
        server.wait()
        server.stdout.close()
        process.kill()
        process.wait()
        subprocess.run(["umount", "--lazy", mount], check=True)


def test_a_file_on_a_served_file_system_has_names(served: _Served, tmp_path: Path) -> None:
    arguments = ("-p", served.pid, "-F", 499, "-d", 1)
    with Recording(tmp_path, *arguments, patience_s=_PATIENCE_S) as recording:
        ended = recording.wait()
    assert "forward_pass" in _names(ended.profile, served.pid)
    assert "files_stuck" not in {loss.name for loss in ended.profile.losses}


# OPEN, and READ: linux/fuse.h.
@cases("silent_on", ["14", "15"], ids=["open", "read"])
def test_a_file_system_that_does_not_answer_stops_no_recording(
    served: _Served, tmp_path: Path, silent_on: str
) -> None:
    served.silence.write_text(silent_on)
    with Recording(tmp_path, "-p", served.pid, "-d", 1, patience_s=_PATIENCE_S) as recording:
        ended = recording.wait()
    count, words = _loss(ended)
    assert (count, str(served.program) in words) == (1, True)
