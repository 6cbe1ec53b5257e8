# SPDX-License-Identifier: Apache-2.0
"""The libraries that a program needs, as the dynamic linker is told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from aiflame.agent.elf.dynamic import Dependencies, read_dependencies
from aiflame.agent.elf.image import BadElf, ElfImage
from aiflame.agent.target_files import TargetFile


def dependencies(path: Path) -> Dependencies:
    with path.open("rb") as opened:
        file = TargetFile(opened.fileno())
        return read_dependencies(file, ElfImage.read(file))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that needs libone.so and looks for it in two folders first."""
    (tmp_path / "one.c").write_text("int one(void) { return 1; }")
    (tmp_path / "a.c").write_text("int one(void); int main(void) { return one(); }")
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libone.so.1", "-o", tmp_path / "libone.so"]
    subprocess.run([*command, tmp_path / "one.c"], check=True)
    flags = ["-L", tmp_path, "-lone", "-Wl,-rpath,$ORIGIN/lib:/opt/lib"]
    path = tmp_path / "a"
    subprocess.run(["gcc", "-o", path, tmp_path / "a.c", *flags], check=True)
    return path


def test_what_a_program_needs(program: Path) -> None:
    found = dependencies(program)
    assert found.libraries[0] == "libone.so.1" and "libc.so.6" in found.libraries
    assert found.folders == ("$ORIGIN/lib", "/opt/lib")


def test_sections_are_not_needed(program: Path) -> None:
    data = bytearray(program.read_bytes())
    data[40:48] = bytes(8)  # e_shoff
    program.write_bytes(data)
    assert dependencies(program).libraries[0] == "libone.so.1"


def test_a_static_program_needs_nothing(program: Path) -> None:
    source = program.with_suffix(".c")
    source.write_text("int main(void) { return 0; }")
    subprocess.run(["gcc", "-static", "-o", program, source], check=True)
    assert dependencies(program) == Dependencies((), ())


def test_libraries_without_end_are_refused(program: Path) -> None:
    # GIVEN a dynamic section that is all one library
    data = bytearray(program.read_bytes())
    with program.open("rb") as opened:
        image = ElfImage.read(TargetFile(opened.fileno()))
    (segment,) = (s for s in image.segments if s.type == 2)
    begin = segment.file_offset
    needed = bytes(data[begin : begin + 16])
    strings = next(
        bytes(data[at : at + 16])
        for at in range(begin, begin + segment.file_size, 16)
        if data[at] == 5
    )
    # WHEN it is followed to its end THEN the file is refused
    table = strings + needed * 1000
    header = image.segments.index(segment) * 56 + 64
    offset = len(data)
    data += table
    data[header + 8 : header + 16] = offset.to_bytes(8, "little")
    data[header + 32 : header + 40] = len(table).to_bytes(8, "little")
    program.write_bytes(data)
    with pytest.raises(BadElf, match="more libraries"):
        dependencies(program)
