# SPDX-License-Identifier: Apache-2.0
"""Compiled programs from the cache: the same recording without the compiler."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.recording import abi, loader, program_cache
from aiflame.agent.recording.loader import ProgramOptions, Programs, load_programs
from recordings import Recording

pytestmark = pytest.mark.bpf

_OPTIONS = ProgramOptions(abi.Filter.PIDS, 10_101_010)


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def _bundle(folder: Path) -> Path:
    (bundle,) = folder.glob("programs-*.bpf")
    return bundle


def _close(programs: Programs) -> None:
    programs.need_calls()
    assert {*loader.PROGRAMS} <= set(programs.fds)
    programs.close()


def test_a_second_load_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _close(load_programs(_OPTIONS, tmp_path))
    # GIVEN a machine on which nothing can be compiled any more
    monkeypatch.setattr(loader, "ask_child", None)
    # THEN programs and maps come from the bundle, again and again
    for _ in range(2):
        programs = load_programs(_OPTIONS, tmp_path)
        programs.set(abi.Setting.EPOCH, 1)
        assert programs.thread_iterator_fd is not None
        _close(programs)


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "garbage"])
def test_a_damaged_bundle_is_compiled_anew(tmp_path: Path, damage: str) -> None:
    _close(load_programs(_OPTIONS, tmp_path))
    whole = _bundle(tmp_path).read_bytes()
    middle = len(whole) // 2
    broken = {
        "cut": whole[:-100],
        "empty": b"",
        "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "garbage": b"\xff" * 5000,
    }
    _bundle(tmp_path).write_bytes(broken[damage])
    with pytest.raises(program_cache.StaleBundle):
        program_cache.load(broken[damage])
    _close(load_programs(_OPTIONS, tmp_path))
    assert _bundle(tmp_path).read_bytes() != broken[damage]


def test_other_options_are_other_programs(tmp_path: Path) -> None:
    _close(load_programs(_OPTIONS, tmp_path))
    _close(load_programs(ProgramOptions(abi.Filter.ALL, 10_101_010), tmp_path))
    assert len(list(tmp_path.glob("programs-*.bpf"))) == 2


def test_a_recording_of_kept_programs_is_like_the_first(sleeper: int, tmp_path: Path) -> None:
    stacks = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        # An odd size is in no other test: the first of these two compiles it.
        with Recording(folder, "-p", sleeper, "--stack-storage-size", 4711) as recording:
            stacks.append(read_capture(recording.stop().capture).stacks.ends.tolist())
    assert stacks[0] == stacks[1] == [0]
