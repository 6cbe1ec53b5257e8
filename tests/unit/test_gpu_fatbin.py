# SPDX-License-Identifier: Apache-2.0
"""Kernel names are read from device code in a program, whatever state it is in."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from aiflame.gpu.fatbin import FatbinNames, names_in_fatbin

_LZ4, _ZSTD = 0x2011, 0x8011
_CODE = b"\x7fELF" + bytes(60) + b"\0.text._Z1av\0.nv.constant0._Z1av\0.text._Z1bv\0.symtab\0"


def _member(data: bytes, flags: int = 0x11, size: int = 0, kind: int = 2) -> bytes:
    padded = data + bytes(-len(data) % 8)
    packed = len(data) if flags != 0x11 else 0
    head = struct.pack("<HHIQI20xQ8xQ", kind, 0x101, 64, len(padded), packed, flags, size)
    return head + padded


def _container(*members: bytes) -> bytes:
    body = b"".join(members)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def _lz4(*sequences: tuple[bytes, int, int]) -> bytes:
    """Literals, distance and length of a copy (0, 0: none), as an LZ4 block has them."""
    out = bytearray()
    for literals, distance, length in sequences:
        count, extra = min(len(literals), 15), max(length - 4, 0)
        out.append(count << 4 | min(extra, 15))
        out += _more(len(literals)) + literals
        if distance:
            out += struct.pack("<H", distance) + _more(extra)
    return bytes(out)


def _more(count: int) -> bytes:
    return bytes([255] * ((count - 15) // 255) + [(count - 15) % 255]) if count >= 15 else b""


def test_kernels_of_machine_code_are_named_and_its_other_functions_are_not() -> None:
    text = _member(b".entry _Z1cv .nv.constant0._Z1cv\0", kind=1)
    data = _container(text, _member(_CODE)) + bytes(16) + _container(_member(_CODE))
    assert names_in_fatbin(data) == FatbinNames(("_Z1av",), 0)


def test_lz4_is_decompressed_with_copies_that_repeat_themselves() -> None:
    head = b"\0.nv.constant0._Z"
    # GIVEN "ab" copied to a name of 300 letters, and then the start copied for a second kernel
    sequences = ((head + b"ab", 2, 298), (b"\0", 19 + 298 + 1, 17), (b"second\0", 0, 0))
    names = names_in_fatbin(_container(_member(_lz4(*sequences), _LZ4, 1000)))
    assert names == FatbinNames(("_Z" + "ab" * 150, "_Zsecond"), 0)


@pytest.mark.parametrize(
    ("what", "member"),
    [
        ("a copy from before the start", _member(_lz4((b"abc", 9, 8), (b"x", 0, 0)), _LZ4, 99)),
        ("a copy from nowhere", _member(b"\x10a\0\0\x10b", _LZ4, 99)),
        ("cut inside a length", _member(b"\xf0\xff\xff", _LZ4, 99)),
        ("no zstd frame", _member(b"nothing of the kind", _ZSTD, 99)),
        ("zstd that claims too much", _member(b"nothing", _ZSTD, 1 << 60)),
        ("zstd that claims nothing", _member(b"nothing", _ZSTD, 0)),
    ],
)
def test_damaged_member_costs_only_itself(what: str, member: bytes) -> None:
    assert names_in_fatbin(_container(member, _member(_CODE))) == FatbinNames(("_Z1av",), 1), what


def test_member_that_reaches_out_of_the_section_is_not_read() -> None:
    data = _container(_member(_CODE))
    assert names_in_fatbin(data[:-40]) == FatbinNames((), 1)


def test_copies_without_end_are_cut() -> None:
    bomb = _lz4((b"\0", 1, 1 << 20), *((b"", 1, 1 << 20),) * 50)
    members = [_member(bomb, _LZ4, 1 << 40)] * 100
    found = names_in_fatbin(_container(*members))
    assert found.names == ()
    assert found.unread > 50


def test_damaged_sections_are_harmless() -> None:
    whole = _container(_member(_CODE), _member(_lz4((_CODE, 5, 9), (b"x", 0, 0)), _LZ4, 300))
    random = np.random.default_rng(3)
    for _ in range(500):
        data = bytearray(whole)
        for place in random.integers(0, len(data), 4).tolist():
            data[place] = int(random.integers(256))
        found = names_in_fatbin(bytes(data[: int(random.integers(1, len(data) + 1))]))
        assert len(found.names) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "size", "speed"])
def test_kernels_of_a_program_that_nvcc_built_are_named(
    cuda_workload: Callable[..., Path], tmp_path: Path, mode: str
) -> None:
    flag = f"--compress-mode={mode}"
    try:
        program = cuda_workload("cudalaunches", "-cudart", "shared", flag)
    except subprocess.CalledProcessError:
        pytest.skip("no nvcc that knows compression modes")
    section = tmp_path / "section"
    subprocess.run(
        ["objcopy", f"--dump-section=.nv_fatbin={section}", program, tmp_path / "copy"], check=True
    )
    assert names_in_fatbin(section.read_bytes()) == FatbinNames(
        (
            "_Z6hiddenPi",
            "_ZN4work4fillIdLi2EEEvPT_S1_",
            "_ZN4work4fillIfLi4EEEvPT_S1_",
            "_ZN4work5scaleEPff",
            "plain",
        ),
        0,
    )
