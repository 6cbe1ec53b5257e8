# SPDX-License-Identifier: Apache-2.0
"""Targets that map what tools like this one trip over (workloads/hostile.c).

Each is recorded twice: unwind tables have to be built in the first recording.
"""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.model.profile import SampleClass, StopReason
from recordings import Ended, Recording, Workload, count_of, frames_of
from support import WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.slow, pytest.mark.breadth]

_HZ = 999
_CPU_MS = 500
_BUILD_ID = "0x00112233445566778899aabbccddeeff00112233"
# Frames of several sizes; -O2 keeps no frame pointers.
_ROOMS = {"left": 40, "right": 3000}


@pytest.fixture
def hostile(workload: Callable[..., Path]) -> Path:
    return workload("hostile", "-fomit-frame-pointer")


def _library(folder: Path, side: str) -> Path:
    names = [f"-DINNER={side}_inner", f"-DOUTER={side}_outer", f"-DROOM={_ROOMS[side]}"]
    flags = ["-O2", "-fomit-frame-pointer", "-shared", "-fPIC", f"-Wl,--build-id={_BUILD_ID}"]
    path = folder / f"lib{side}.so"
    subprocess.run(["gcc", *flags, *names, "-o", path, WORKLOADS / "twin.c"], check=True)
    return path


def _record(folder: Path, *commands: list[object]) -> Ended:
    """Records the programs together, twice; returns the second recording."""
    for _ in range(2):
        with ExitStack() as stack:
            loads = [stack.enter_context(Workload(command)) for command in commands]
            target = ",".join(str(load.pid) for load in loads)
            options = ("-p", target, "-F", _HZ, "--no-off-cpu", "--force")
            recording = stack.enter_context(Recording(folder, *options))
            for load in loads:
                load.go()
            for load in loads:
                load.truth()
            ended = recording.stop()
    return ended


def _assert_stacks_of(ended: Ended, side: str) -> None:
    """All samples in a library lead through its own functions to the program's start."""
    profile = ended.profile
    found = 0
    for row in profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]:
        frames = frames_of(profile, int(row["stack"]))[::-1]
        if f"{side}_inner" in frames:
            at = frames.index(f"{side}_inner")
            wanted = [f"{side}_inner", f"{side}_outer", "enter", "visit", "main"]
            assert frames[at : at + 5] == wanted
            # The first samples come before the tables.
            found += int(row["count"]) * (profile.stacks.ends[row["stack"]] == StopReason.ROOTED)
    assert found > 0.4 * _CPU_MS * _HZ / 1000


def test_libraries_with_one_build_id_keep_their_own_frames(hostile: Path, tmp_path: Path) -> None:
    left, right = (_library(tmp_path, side) for side in _ROOMS)
    # In one process, and in two; half of the time is each one's.
    ended = _record(
        tmp_path,
        [hostile, "loads", _CPU_MS, left, right],
        [hostile, "loads", _CPU_MS, left],
        [hostile, "loads", _CPU_MS, right],
    )
    for side in _ROOMS:
        _assert_stacks_of(ended, side)


def _overwrite(library: Path, damage: str) -> None:
    """Damages the unwind information of a library, and nothing else."""
    with library.open("r+b") as file:
        section = ElfImage.from_fd(file.fileno()).section(".eh_frame")
        assert section is not None
        size = section.size
        written = {
            "length": struct.pack("<I", 0x7FFF_FFF0),
            "noise": random.Random(size).randbytes(size),
            "ones": b"\xff" * size,
        }[damage]
        file.seek(section.file_offset)
        file.write(written)


def test_damaged_unwind_information_costs_its_library_only(hostile: Path, tmp_path: Path) -> None:
    commands: list[list[object]] = [[hostile, "loads", _CPU_MS, _library(tmp_path, "right")]]
    damaged = ("length", "noise", "ones")
    for damage in damaged:
        (tmp_path / damage).mkdir()
        library = _library(tmp_path / damage, "left")
        _overwrite(library, damage)
        commands.append([hostile, "loads", _CPU_MS, library])
    ended = _record(tmp_path, *commands)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    expected = len(damaged) * _CPU_MS * _HZ / 1000
    assert count_of(ended.profile, "left_inner") > 0.8 * expected
    _assert_stacks_of(ended, "right")
    assert [loss for loss in ended.profile.losses if "libleft.so" in loss.meaning]
    assert "libleft.so" in ended.stderr


def test_sixty_five_thousand_mappings_are_all_known(hostile: Path, tmp_path: Path) -> None:
    ended = _record(tmp_path, [hostile, "maps", _CPU_MS, hostile])
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    profile = ended.profile
    assert not profile.losses
    rooted = profile.stacks.ends[profile.samples["stack"]] == StopReason.ROOTED
    # The first samples come before the mappings are read.
    assert profile.samples["count"][rooted].sum() > 0.5 * _CPU_MS * _HZ / 1000
    assert count_of(profile, "compute") > 0.8 * _CPU_MS * _HZ / 1000
