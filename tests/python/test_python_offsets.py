# SPDX-License-Identifier: Apache-2.0
"""Our offsets against each version's own headers, and against the key that its code reads."""

from __future__ import annotations

import os
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.python.interpreter import Interpreter, find_interpreter
from aiflame.agent.target_files import TargetFile

_SOURCE = Path(__file__).parent / "offsets.c"


@pytest.fixture
def prefix(python: Path) -> Path:
    """Where an interpreter with headers is installed; the system's comes without."""
    prefix = python.parents[1]
    if prefix == Path("/usr"):
        pytest.skip("no pyenv CPython, whose headers would be there")
    return prefix


def _headers_say(prefix: Path, folder: Path) -> dict[str, int]:
    (include,) = prefix.glob("include/python3.*")
    command = ["gcc", "-w", f"-I{include}", f"-I{include}/internal", "-o", folder / "offsets"]
    subprocess.run([*command, _SOURCE], check=True)
    said = subprocess.run([folder / "offsets"], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in map(str.split, said.splitlines())}


def _interpreter(prefix: Path) -> Interpreter:
    (library,) = prefix.glob("lib/libpython3.*.so.1.0")
    fd = os.open(library, os.O_RDONLY)
    try:
        found = find_interpreter(TargetFile(fd), ElfImage.from_fd(fd), library.name)
    finally:
        os.close(fd)
    assert found is not None
    return found


def test_offsets_are_those_of_the_headers(prefix: Path, tmp_path: Path) -> None:
    said = _headers_say(prefix, tmp_path)
    found = _interpreter(prefix)
    ours = {field.name: getattr(found.layout, field.name) for field in fields(found.layout)}
    assert {name: ours[name] for name in said} == said
    assert found.tss_key_address - found.runtime_address == said["runtime_tss_key"]


def test_an_interpreter_is_the_program_or_the_library_but_not_both(python: Path) -> None:
    libraries = list(python.parents[1].glob("lib/libpython3.[0-9]*.so.1.0"))
    fd = os.open(python, os.O_RDONLY)
    try:
        found = find_interpreter(TargetFile(fd), ElfImage.from_fd(fd), python.name)
    finally:
        os.close(fd)
    assert (found is None) == bool(libraries)
