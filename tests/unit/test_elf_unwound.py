# SPDX-License-Identifier: Apache-2.0
"""Where functions are by their unwind information: as the compiler said it, or nothing."""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiflame.agent.elf.image import BadElf, ElfImage
from aiflame.agent.elf.unwound import function_bounds
from aiflame.agent.target_files import TargetFile
from cfibytes import FRAMES, TEXT, Frames
from elfbytes import Elf, Section

_HEADER = 0x7F000
_TEXT_BYTES = 0x1000

_SOURCE = """\
static int __attribute__((noipa)) one(int n) { return n ? one(n / 2) * 3 + 1 : 7; }
static int __attribute__((noipa)) two(const char *s) { return s[0] ? one(s[0]) : 2; }
int shared(const char *s) { return two(s) + one(2); }
int main(int argc, char **argv) { return shared(argv[argc - 1]); }
"""


def _bounds(data: bytes) -> list[tuple[int, int]]:
    fd = os.memfd_create("image")
    try:
        os.write(fd, data)
        starts, ends = function_bounds(TargetFile(fd), ElfImage.from_fd(fd))
        return list(zip(starts.tolist(), ends.tolist(), strict=True))
    finally:
        os.close(fd)


def _header(
    fdes: Sequence[tuple[int, int]], address: int = _HEADER, count: int | None = None
) -> bytes:
    """.eh_frame_hdr of FDEs by where their functions and they themselves are."""
    head = b"\x01\x1b\x03\x3b" + struct.pack("<i", FRAMES - (address + 4))
    pairs = b"".join(struct.pack("<ii", start - address, fde - address) for start, fde in fdes)
    return head + struct.pack("<I", len(fdes) if count is None else count) + pairs


def _elf(frames: bytes, header: bytes, address: int = _HEADER) -> bytes:
    sections = [
        Section(".eh_frame_hdr", header, flags=2, address=address),
        Section(".eh_frame", frames, flags=2, address=FRAMES),
    ]
    return Elf(sections=sections, text=b"\x90" * _TEXT_BYTES, text_address=TEXT).build()


def _frames(*functions: tuple[int, int]) -> tuple[bytes, list[tuple[int, int]]]:
    """.eh_frame, and what a header says of it."""
    frames = Frames()
    cie = frames.cie()
    fdes = []
    for start, size in functions:
        fdes.append((start, FRAMES + len(frames.body)))
        frames.fde(cie, start, size)
    return bytes(frames.body), fdes


@pytest.mark.parametrize("flags", [("-pie",), ("-no-pie",), ("-fuse-ld=gold",)])
def test_functions_of_a_stripped_program(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "a.c").write_text(_SOURCE)
    command = ["gcc", "-O2", *flags, "-o", tmp_path / "program", tmp_path / "a.c"]
    subprocess.run(command, check=True)
    listing = subprocess.run(
        ["nm", "-S", tmp_path / "program"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listing.splitlines()]
    wanted = {
        (int(row[0], 16), int(row[0], 16) + int(row[1], 16))
        for row in rows
        if row[-1] in ("one", "two", "shared", "main")
    }
    assert len(wanted) == 4
    subprocess.run(["strip", tmp_path / "program"], check=True)
    assert wanted <= set(_bounds((tmp_path / "program").read_bytes()))


def test_each_function_ends_where_it_says_or_where_the_next_begins() -> None:
    frames, fdes = _frames((TEXT, 0x10), (TEXT + 0x20, 0x100), (TEXT + 0x40, 0x10))
    assert _bounds(_elf(frames, _header(fdes))) == [
        (TEXT, TEXT + 0x10),
        (TEXT + 0x20, TEXT + 0x40),
        (TEXT + 0x40, TEXT + 0x50),
    ]


def test_a_function_stays_inside_the_code() -> None:
    end = TEXT + _TEXT_BYTES
    frames, fdes = _frames((TEXT - 8, 16), (end - 8, 0xFFFF_FFFF), (end, 8), (TEXT + 64, 0))
    assert _bounds(_elf(frames, _header(fdes))) == [(end - 8, end)]


def test_an_entry_that_is_not_of_its_fde_says_nothing() -> None:
    frames, fdes = _frames((TEXT, 16), (TEXT + 32, 16))
    (first, at), (second, _) = fdes
    wrong = [
        [(second, at)],
        [(first, at + 1)],
        [(first, FRAMES + len(frames) - 8)],
        [(first, FRAMES - 16)],
        [(first, FRAMES + 0x10_0000)],
    ]
    for entries in wrong:
        assert _bounds(_elf(frames, _header(entries))) == []
    # One that is there twice counts once.
    assert _bounds(_elf(frames, _header([fdes[0], *fdes, fdes[1]]))) == [
        (TEXT, TEXT + 16),
        (TEXT + 32, TEXT + 48),
    ]


def test_lists_that_are_cut_or_of_another_form() -> None:
    frames, fdes = _frames((TEXT, 16))
    whole = _header(fdes)
    assert _bounds(_elf(frames, _header(fdes, count=0xFFFF_FFFF))) == [(TEXT, TEXT + 16)]
    for size in range(len(whole)):
        assert _bounds(_elf(frames, whole[:size])) == []
    for at in range(4):
        changed = bytearray(whole)
        changed[at] ^= 0xFF
        assert _bounds(_elf(frames, bytes(changed))) == []
    assert _bounds(_elf(b"", whole)) == []
    assert _bounds(_elf(frames[:20], whole)) == []


@pytest.mark.parametrize("address", [0, 1, (1 << 63) - 8, (1 << 64) - 1])
def test_addresses_at_the_end_of_all_addresses(address: int) -> None:
    frames, _ = _frames((TEXT, 16))
    header = b"\x01\x1b\x03\x3b" + struct.pack("<iIii", -1, 2, -(1 << 31), (1 << 31) - 1) + bytes(8)
    assert _bounds(_elf(frames, header, address)) == []


def test_files_changed_by_chance_say_nothing_outside_their_code() -> None:
    functions = [(TEXT + 32 * n, 24) for n in range(40)]
    frames, fdes = _frames(*functions)
    sound = _elf(frames, _header(fdes))
    assert len(_bounds(sound)) == 40
    dice = random.Random(8)
    at = sound.index(_header(fdes))
    for _ in range(2000):
        data = bytearray(sound)
        for _ in range(dice.randint(1, 8)):
            place = dice.randrange(at, len(data)) & ~3
            data[place : place + 4] = dice.choice(
                (dice.randbytes(4), b"\xff" * 4, bytes(4), struct.pack("<i", dice.randint(-99, 99)))
            )[: len(data) - place]
        try:
            found = _bounds(bytes(data))
        except BadElf:
            continue
        last = 0
        for start, end in found:
            assert last <= start < end
            last = end
