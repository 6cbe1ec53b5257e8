# SPDX-License-Identifier: Apache-2.0
"""How the helper for NVIDIA gets into processes: live, with a command, or not at all."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiflame.agent.losses import LossKind
from aiflame.agent.model.gpu import NONE
from aiflame.agent.model.profile import Profile
from breadth import cases
from nvidia_family import RECORD
from nvidia_helper import BLOCK_NS, Target, build
from recordings import Recording
from support import wait_until

pytestmark = pytest.mark.bpf

_HELPER = "libaiflame-nvidia"
_BEGIN = ("init", "context 0", "module 4096", "function 0 _Z4gemmPf", "function 0 _Z4gelufi")
# Blocks and launches of each kernel, of a round.
_GEMM, _GELU = (64, 20), (8, 50)
_ROUND = ("launch 0 64 20 0", "launch 1 8 50 0", "sync")


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("standin") / "out")


@pytest.fixture
def target(standin: Path) -> Iterator[Target]:
    with Target(standin) as running:
        running.obey(*_BEGIN)
        yield running


def _has_helper(target: Target) -> bool:
    return _HELPER in Path(f"/proc/{target.pid}/maps").read_text()


def _runs(profile: Profile) -> dict[str, tuple[int, int]]:
    """Returns how often each kernel ran, and for how long in all, by the device."""
    found: dict[str, tuple[int, int]] = {}
    for row in profile.gpu.times:
        name = profile.gpu.kernels[row["kernel"]].name
        count, ns = found.get(name, (0, 0))
        found[name] = count + int(row["count"]), ns + int(row["duration_ns"])
    return found


def test_a_running_process_gets_the_helper_and_goes_on(target: Target, tmp_path: Path) -> None:
    # WHEN a process that runs CUDA is recorded with --gpu nvidia
    arguments = ("-p", target.pid, "--gpu", "nvidia")
    with Recording(tmp_path, *arguments, program=RECORD) as recording:
        wait_until(lambda: _has_helper(target))
        target.read_until(lambda told: told.states and told.states[-1].tier > 0)
        for _ in range(20):
            target.obey(*_ROUND)
        ended = recording.stop()
    # THEN it is said, each kernel has the time that it took, and its launch is known
    loaded = (
        rf"loaded {_HELPER}.so into program \({target.pid}\), \d+\.\d s after the recording began"
    )
    assert re.search(loaded, ended.stderr)
    profile = ended.profile
    assert _runs(profile) == {
        "_Z4gemmPf": (20 * _GEMM[1], 20 * _GEMM[1] * _GEMM[0] * BLOCK_NS),
        "_Z4gelufi": (20 * _GELU[1], 20 * _GELU[1] * _GELU[0] * BLOCK_NS),
    }
    assert (profile.gpu.times["stack"] != NONE).all()
    # AND THEN nothing is measured any more, and the process works as before
    target.read_until(lambda told: told.states[-1].tier == 0)
    target.obey(*_ROUND)


# A filter that lets everything through, as those of containers let most; it outlives execve.
_FILTERED = """
import ctypes, os, struct, sys
allow = struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)
code = ctypes.create_string_buffer(allow)
program = struct.pack("<HxxxxxxQ", 1, ctypes.addressof(code))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert not prctl(38, 1, 0, 0, 0) and not prctl(22, 2, program, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.breadth
def test_a_process_with_a_seccomp_filter_gets_the_helper(standin: Path, tmp_path: Path) -> None:
    # GIVEN a process as in a container
    arguments = ("-c", _FILTERED, standin / "program")
    with Target(standin, program=Path(sys.executable), arguments=arguments) as target:
        target.obey(*_BEGIN)
        assert "Seccomp:\t2" in Path(f"/proc/{target.pid}/status").read_text()
        words = ("-p", target.pid, "--gpu", "nvidia")
        with Recording(tmp_path, *words, program=RECORD) as recording:
            wait_until(lambda: _has_helper(target))
            target.read_until(lambda told: told.states and told.states[-1].tier > 0)
            target.obey(*_ROUND)
            profile = recording.stop().profile
    assert _runs(profile)["_Z4gemmPf"] == (_GEMM[1], _GEMM[1] * _GEMM[0] * BLOCK_NS)


def test_a_command_is_started_with_the_helper(standin: Path, tmp_path: Path) -> None:
    # GIVEN a program that launches as soon as it has begun
    commands = tmp_path / "commands"
    commands.write_text("\n".join([*_BEGIN, *_ROUND * 20, ""]))
    program = f"LD_LIBRARY_PATH={standin} {standin}/program < {shlex.quote(str(commands))}"
    words = ("--gpu", "nvidia", "--", "sh", "-c", f"{program} >&2")
    # WHEN record starts it, THEN the time of every run is known
    with Recording(tmp_path, *words, program=RECORD) as recording:
        profile = recording.wait().profile
    assert _runs(profile)["_Z4gemmPf"] == (20 * _GEMM[1], 20 * _GEMM[1] * _GEMM[0] * BLOCK_NS)


@cases("words", [(), ("--gpu", "nvidia", "--no-inject")])
def test_nothing_is_loaded_that_was_not_asked_for(
    words: tuple[str, ...], target: Target, tmp_path: Path
) -> None:
    with Recording(tmp_path, "-p", target.pid, *words, program=RECORD) as recording:
        for _ in range(20):
            target.obey(*_ROUND)
        wait_until(lambda: any(len(window.launches) for window in recording.windows()))
        ended = recording.stop()
    assert not _has_helper(target)
    assert not len(ended.profile.gpu.times)
    # What it would add is said only to who did not ask.
    assert (f"--gpu nvidia loads {_HELPER}.so into it" in ended.stderr) == (not words)


def test_a_process_that_cannot_have_the_helper_is_told_of(target: Target, tmp_path: Path) -> None:
    # GIVEN a process that is stopped
    os.kill(target.pid, signal.SIGSTOP)
    arguments = ("-p", target.pid, "--gpu", "nvidia")
    with Recording(tmp_path, *arguments, program=RECORD) as recording:
        assert recording.process.stderr is not None
        line = ""
        while "no helper was loaded" not in line:
            line = recording.process.stderr.readline()
            assert line
        os.kill(target.pid, signal.SIGCONT)
        target.obey(*_ROUND)
        ended = recording.stop()
    # THEN that is said, with what helps, and counted
    assert "is stopped by a signal" in line and f"kill -CONT {target.pid}" in line
    losses = {loss.name: loss.count for loss in ended.profile.losses}
    assert losses[LossKind.HELPERS_NOT_LOADED.stored_name] == 1


@pytest.mark.breadth
def test_a_process_that_is_over_before_it_is_found_is_counted(
    standin: Path, tmp_path: Path
) -> None:
    # GIVEN a recorder that has seen a process with the helper
    go, done = tmp_path / "go", tmp_path / "done"
    os.mkfifo(go)
    program = f"LD_LIBRARY_PATH={standin} {standin}/program >&2 <"
    ends, crashes = tmp_path / "ends", tmp_path / "crashes"
    ends.write_text("\n".join([*_BEGIN, *_ROUND, ""]))
    crashes.write_text("\n".join([*_BEGIN, *_ROUND, "crash", ""]))
    script = f"{program}{ends}; cat {go}; {program}{ends}; {program}{crashes}; >{done}; cat {go}"
    words = ("--gpu", "nvidia", "--", "sh", "-c", script)
    with Recording(tmp_path, *words, program=RECORD) as recording:
        wait_until(lambda: any(len(window.kernel_times) for window in recording.windows()))
        # WHEN two more begin and end while the recorder is kept from its CPU
        recording.process.send_signal(signal.SIGSTOP)
        go.write_text("")
        wait_until(done.exists)
        recording.process.send_signal(signal.SIGCONT)
        go.write_text("")
        profile = recording.wait().profile
    # THEN it is told that they are missing, and what the one that could say so had to tell
    losses = {loss.name: loss.count for loss in profile.losses}
    assert losses[LossKind.DEVICE_MEMORY_GONE.stored_name] == 2
    assert losses[LossKind.KERNEL_TIMES_GONE.stored_name] == _GEMM[1] + _GELU[1]
    # AND THEN of the first one all is known
    assert sum(count for count, _ in _runs(profile).values()) == _GEMM[1] + _GELU[1]
