# SPDX-License-Identifier: Apache-2.0
"""ELF headers: what a sound file says, and that a lying one costs only itself."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from aiflame.agent.elf.image import BadElf, ElfImage
from aiflame.agent.target_files import TargetFile
from elfbytes import HEADER_BYTES, Elf, Section, Symbol


def parse(data: bytes, tmp_path: Path) -> ElfImage:
    path = tmp_path / "image"
    path.write_bytes(data)
    return parse_file(path)


def parse_file(path: Path) -> ElfImage:
    fd = os.open(path, os.O_RDONLY)
    try:
        return ElfImage.from_fd(fd)
    finally:
        os.close(fd)


def outcome(data: bytes, tmp_path: Path) -> str:
    try:
        image = parse(data, tmp_path)
    except BadElf:
        return "refused"
    return "no sections" if image.damage else "sound"


def test_headers_of_a_built_file(tmp_path: Path) -> None:
    image = parse(Elf(build_id=bytes(range(20)), text_address=0x7000).build(), tmp_path)
    assert image.build_id == bytes(range(20)).hex()
    assert (image.kind, image.machine, image.bits, image.interp) == ("dyn", "X86_64", 64, "")
    (load,) = image.loads
    assert (load.virtual_address, load.file_size, load.executable) == (0x7000, 0x1000, True)
    text = image.section(".text")
    assert text is not None and text.executable and text.end_address == 0x8000


def test_headers_agree_with_readelf(tmp_path: Path) -> None:
    source = tmp_path / "a.c"
    source.write_text("int main(void) { return 0; }")
    program = tmp_path / "a"
    subprocess.run(["gcc", "-Wl,--build-id", "-o", program, source], check=True)
    image = parse_file(program)
    notes = subprocess.run(["readelf", "-n", program], capture_output=True, text=True, check=True)
    assert f"Build ID: {image.build_id}" in notes.stdout
    listing = subprocess.run(
        ["readelf", "-lW", program], capture_output=True, text=True, check=True
    )
    assert f"interpreter: {image.interp}]" in listing.stdout
    assert listing.stdout.count("  LOAD ") == len(image.loads) > 0


def test_debuglink_of_a_stripped_program(tmp_path: Path) -> None:
    source = tmp_path / "a.c"
    source.write_text("int main(void) { return 0; }")
    program = tmp_path / "a"
    subprocess.run(["gcc", "-g", "-o", program, source], check=True)
    shutil.copy(program, tmp_path / "a.debug")
    subprocess.run(
        ["objcopy", "--strip-all", f"--add-gnu-debuglink={tmp_path}/a.debug", program], check=True
    )
    link = parse_file(program).debuglink
    assert link is not None and link.name == "a.debug"


@pytest.mark.parametrize("name", [b"../../etc/passwd", b"/etc/passwd", b"a/b"])
def test_debuglink_with_a_directory_is_ignored(tmp_path: Path, name: bytes) -> None:
    data = name + bytes(4 - len(name) % 4) + b"\1\2\3\4"
    assert (
        parse(Elf(sections=[Section(".gnu_debuglink", data)]).build(), tmp_path).debuglink is None
    )


def test_addresses_become_file_offsets(tmp_path: Path) -> None:
    elf = Elf(text=bytes(range(256)), text_address=0x7000)
    image = parse(elf.build(), tmp_path)
    start = image.loads[0].file_offset
    found = [image.file_offset_of(address) for address in (0x6FFF, 0x7000, 0x70FF, 0x7100, 2**64)]
    assert found == [None, start, start + 0xFF, None, None]
    with (tmp_path / "image").open("rb") as opened:
        file = TargetFile(opened.fileno())
        assert image.read_at(file, 0x7010, 4) == bytes((16, 17, 18, 19))
        assert image.read_at(file, 0x70FE, 4) == bytes((254, 255)), "not past the segment"
        assert image.read_at(file, 0x6FFF, 4) == b""


def test_segments_are_as_long_as_the_file(tmp_path: Path) -> None:
    data = Elf(text=bytes(4096)).build()
    offset = parse(data, tmp_path).loads[0].file_offset
    (load,) = parse(data[: offset + 100], tmp_path).loads
    assert load.file_size == 100


@pytest.mark.parametrize(
    ("file_offset", "bias"),
    [
        (0x2000, 0x7F0000000000 - 0x401000),
        (0x3000, 0x7F0000000000 - 0x402000),
        (0x9000, 0x7F0000000000 - 0x9000),  # no code of this file
    ],
)
def test_load_bias_of_a_mapping(tmp_path: Path, file_offset: int, bias: int) -> None:
    # GIVEN code that begins at 0x2340 of the file and is linked to 0x401340
    data = bytearray(Elf().build().ljust(0x5000, b"\0"))
    struct.pack_into("<IIQQQQ", data, HEADER_BYTES, 1, 5, 0x2340, 0x401340, 0x401340, 0x1500)
    # WHEN whole pages of it are mapped THEN the bias is that of its addresses
    assert parse(bytes(data), tmp_path).bias(0x7F0000000000, file_offset) == bias


def test_file_without_build_id_has_a_key_of_its_contents(tmp_path: Path) -> None:
    one = parse(Elf(text=b"\x90" * 64).build(), tmp_path)
    two = parse(Elf(text=b"\xcc" * 64).build(), tmp_path)
    assert one.build_id == ""
    assert one.cache_key.startswith("x-") and one.cache_key != two.cache_key


def test_copied_build_id_does_not_share_a_key(tmp_path: Path) -> None:
    one = parse(Elf(build_id=b"1" * 20).build(), tmp_path)
    two = parse(Elf(build_id=b"1" * 20, text=b"\xcc" * 64).build(), tmp_path)
    assert one.build_id == two.build_id and one.cache_key != two.cache_key


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an ELF file"),
        (b"#!/bin/sh\n", "not an ELF file"),
        (b"\x7fELF", "cut"),
        (b"\x7fELF\x02\x01\x01" + bytes(30), "cut"),
        (b"\x7fELF\x09\x01\x01" + bytes(80), "class"),
        (Elf(header={"phnum": 0}).build(), "program headers"),
        (Elf(header={"phnum": 65535}).build(), "program headers"),
        (Elf(header={"phoff": 2**63}).build(), "program headers"),
        (Elf(kind=4).build(), "neither"),
        (Elf(text_address=2**64 - 16).build(), "wraps"),
    ],
)
def test_bad_files_are_refused_with_the_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(BadElf, match=reason):
        parse(data, tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        {"shoff": 2**64 - 1},
        {"shoff": 2**63},
        {"shoff": 10**12},
        {"shnum": 65279},
        {"shnum": 0},
        {"shstrndx": 60000},
        {"shentsize": 1},
    ],
)
def test_lying_section_headers_cost_only_the_sections(
    tmp_path: Path, header: dict[str, int]
) -> None:
    data = Elf(symbols=[Symbol("f", 0x1000, 16)], header=header).build()
    assert outcome(data, tmp_path) in ("refused", "no sections")


def test_section_outside_the_file_is_empty(tmp_path: Path) -> None:
    data = Elf(sections=[Section(".symtab", b"x" * 24, "symtab", size=1 << 60)]).build()
    section = parse(data, tmp_path).section(".symtab")
    assert section is not None and section.size == 0


def test_every_cut_of_a_file_ends_in_an_answer(tmp_path: Path) -> None:
    data = Elf(symbols=[Symbol("f", 0x1000, 16)], build_id=b"1" * 20, text=b"\x90" * 64).build()
    outcomes = {outcome(data[:length], tmp_path) for length in range(len(data))}
    assert outcomes == {"refused", "no sections"}
    assert outcome(data, tmp_path) == "sound"


def test_random_damage_never_raises_anything_else(tmp_path: Path) -> None:
    """Only BadElf may come out of 1,000 files with a few wrong bytes in their headers."""
    random_bytes = random.Random(23)
    sound = Elf(symbols=[Symbol("f", 0x1000, 16)], build_id=b"1" * 20, text=b"\x90" * 64).build()
    outcomes = Counter()
    for _ in range(1000):
        data = bytearray(sound)
        for _ in range(random_bytes.randint(1, 6)):
            spot = random_bytes.choice((HEADER_BYTES, len(data)))
            data[random_bytes.randrange(spot)] = random_bytes.choice((0, 1, 0x7F, 0x80, 0xFF))
        outcomes[outcome(bytes(data), tmp_path)] += 1
    assert set(outcomes) == {"refused", "no sections", "sound"}


def test_sparse_10_gb_file_costs_no_time_or_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.write_bytes(Elf(symbols=[Symbol("f", 0x1000, 16)], build_id=b"1" * 20).build())
    os.truncate(path, 10 * 1024**3)
    began = time.thread_time()
    assert parse_file(path).build_id == (b"1" * 20).hex()
    assert time.thread_time() - began < 1
