# SPDX-License-Identifier: Apache-2.0
"""Programs of another user whose files lie: the recording is saved, and the loss is named.

The programs themselves run well: the kernel and the loader read no section headers.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiflame.agent.model.profile import Profile
from breadth import cases
from recordings import Recording, public_folder
from support import AIFLAME, SERVING_ARGUMENTS

pytestmark = pytest.mark.bpf

_NOBODY = 65534
# Elf64_Shdr, elf.h: where in a section header the fields are.
_OFFSET_AT, _LINK_AT = 24, 40
_SECTION_HEADER_BYTES = 64
_SHT_SYMTAB, _SHT_STRTAB = 2, 3
_SPARSE_BYTES = 1 << 30


def _section_at(data: bytes, name: str) -> int:
    """Where a section's header is."""
    (first,) = struct.unpack_from("<Q", data, 40)
    count, names_index = struct.unpack_from("<HH", data, 60)
    (names,) = struct.unpack_from("<Q", data, first + 64 * names_index + _OFFSET_AT)
    for at in range(first, first + 64 * count, _SECTION_HEADER_BYTES):
        begin = names + struct.unpack_from("<I", data, at)[0]
        if data[begin : data.index(b"\0", begin)] == name.encode():
            return at
    raise AssertionError(f"no section {name}")


def _with_offset(section: str) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        copy = bytearray(data)
        struct.pack_into("<Q", copy, _section_at(data, section) + _OFFSET_AT, (1 << 64) - 256)
        return bytes(copy)

    return changed


def _without_link(data: bytes) -> bytes:
    """The dynamic section has its strings in no section."""
    copy = bytearray(data)
    struct.pack_into("<I", copy, _section_at(data, ".dynamic") + _LINK_AT, 0)
    return bytes(copy)


def _with_many_tables(data: bytes) -> bytes:
    """400 symbol tables that share one string table, which is to be `_SPARSE_BYTES` long."""
    body = bytearray(data) + bytes(-len(data) % 16)
    strings = struct.pack("<IIQQQQIIQQ", 0, _SHT_STRTAB, 0, 0, 0, _SPARSE_BYTES, 0, 0, 1, 0)
    table = struct.pack("<IIQQQQIIQQ", 0, _SHT_SYMTAB, 0, 0, 64, 48, 1, 0, 8, 24)
    struct.pack_into("<Q", body, 40, len(body))
    struct.pack_into("<HHH", body, 58, _SECTION_HEADER_BYTES, 402, 1)
    return bytes(body) + bytes(_SECTION_HEADER_BYTES) + strings + 400 * table


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as path:
        yield path


@pytest.fixture
def program(workload: Callable[..., Path], folder: Path) -> Callable[..., Path]:
    """`program(change)`: one that computes and waits, with its file changed."""

    def make(change: Callable[[bytes], bytes], size_bytes: int = 0) -> Path:
        path = folder / "changed"
        shutil.copy(workload("serving"), path)
        path.write_bytes(change(path.read_bytes()))
        if size_bytes:
            os.truncate(path, size_bytes)
        os.chown(path, _NOBODY, _NOBODY)
        return path

    return make


@contextmanager
def _running(path: Path) -> Iterator[int]:
    """Another user runs it."""
    process = subprocess.Popen(
        [path, *SERVING_ARGUMENTS],
        stdout=subprocess.DEVNULL,
        user=_NOBODY,
        group=_NOBODY,
        extra_groups=[],
    )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _assert_loss_names(profile: Profile, path: Path) -> None:
    assert len(profile.samples)
    losses = {loss.name: loss.meaning for loss in profile.losses}
    assert str(path) in losses["binary_not_read"]


_LIES = {
    "symtab": _with_offset(".symtab"),
    "dynsym": _with_offset(".dynsym"),
    "strtab": _with_offset(".strtab"),
}


@cases("section", _LIES)
def test_a_wrong_offset_costs_symbols_not_the_recording(
    program: Callable[..., Path], tmp_path: Path, section: str
) -> None:
    path = program(_LIES[section])
    with _running(path) as pid, Recording(tmp_path, "-p", pid, "-d", 1) as recording:
        _assert_loss_names(recording.wait().profile, path)


def test_one_that_is_started_costs_a_running_recording_nothing(
    program: Callable[..., Path], tmp_path: Path
) -> None:
    path = program(_LIES["symtab"])
    with Recording(tmp_path, "-a", "-d", 3) as recording, _running(path):
        _assert_loss_names(recording.wait().profile, path)


@pytest.mark.breadth
def test_a_command_with_a_bad_file_is_recorded(
    program: Callable[..., Path], tmp_path: Path
) -> None:
    path = program(_LIES["symtab"])
    with Recording(tmp_path, "-d", 1, "--", path, *SERVING_ARGUMENTS) as recording:
        _assert_loss_names(recording.wait().profile, path)


@pytest.mark.breadth
def test_a_command_whose_sections_lie_about_what_segments_say_is_recorded(
    program: Callable[..., Path], tmp_path: Path
) -> None:
    # What it needs is read as the dynamic linker reads it.
    path = program(_without_link)
    with Recording(tmp_path, "-d", 1, "--", path, *SERVING_ARGUMENTS) as recording:
        assert len(recording.wait().profile.samples)


def test_a_bad_file_is_dumped(program: Callable[..., Path]) -> None:
    path = program(_LIES["symtab"])
    with _running(path) as pid:
        command = [*AIFLAME, "dump", "-p", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"binary_not_read: {path}" in done.stderr
    assert "serving" in done.stdout or "changed" in done.stdout


@pytest.mark.breadth
@pytest.mark.slow
@pytest.mark.parametrize("target", ["-p", "-a"])
def test_a_file_of_few_bytes_that_would_take_hours_is_given_up(
    program: Callable[..., Path], tmp_path: Path, target: str
) -> None:
    path = program(_with_many_tables, _SPARSE_BYTES + (1 << 20))
    assert path.stat().st_blocks * 512 < 1 << 20
    with _running(path) as pid:
        words = ("-p", pid) if target == "-p" else ("-a",)
        with Recording(tmp_path, *words, "-d", 2) as recording:
            profile = recording.wait().profile
    _assert_loss_names(profile, path)
    assert profile.recording.duration_ns < 15e9
