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
from aiflame.agent.python.thread_state import StateKind
from aiflame.agent.target_files import TargetFile
from interpreters import prefix

_SOURCE = Path(__file__).parent / "offsets.c"


def _headers_say(python: Path, folder: Path) -> dict[str, int]:
    root = prefix(python)
    if root == Path("/usr"):
        pytest.skip("no pyenv CPython, whose headers would be there")
    (include,) = root.glob(f"include/{_name(python)}*")
    # Debian's pyconfig.h includes that of the processor.
    folders = (f"-I{include}", f"-I{include}/internal", "-idirafter", include.parent)
    subprocess.run(["gcc", "-w", *folders, "-o", folder / "offsets", _SOURCE], check=True)
    said = subprocess.run([folder / "offsets"], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in map(str.split, said.splitlines())}


def _name(python: Path) -> str:
    return python.name.removesuffix("-linked")


def _files(python: Path) -> list[Path]:
    """The program, and the library that it may be linked with."""
    root = prefix(python)
    # What pyenv installs has a folder of its own; Debian's versions are all in one.
    name = "libpython3.[0-9]*" if python.parent == root / "bin" else f"lib{_name(python)}"
    pattern = f"{name}.so.1.0"
    libraries = [*root.glob(f"lib/{pattern}"), *root.glob(f"lib/x86_64-linux-gnu/{pattern}")]
    return [root / "bin" / _name(python), *libraries]


def _interpreters(python: Path) -> list[Interpreter | None]:
    found = []
    for path in _files(python):
        fd = os.open(path, os.O_RDONLY)
        try:
            found.append(find_interpreter(TargetFile(fd), ElfImage.from_fd(fd), path.name))
        finally:
            os.close(fd)
    return found


def test_offsets_are_those_of_the_headers(python: Path, tmp_path: Path) -> None:
    said = _headers_say(python, tmp_path)
    found = [interpreter for interpreter in _interpreters(python) if interpreter is not None]
    for interpreter in found:
        layout = interpreter.layout
        ours = {field.name: getattr(layout, field.name) for field in fields(layout)}
        assert {name: ours[name] for name in said} == said
        if "runtime_tss_key" in said:
            assert interpreter.state_place.kind is StateKind.KEY
            key = interpreter.state_place.address - interpreter.runtime_address
            assert key == said["runtime_tss_key"]


def test_an_interpreter_is_in_the_program_or_in_its_library(python: Path) -> None:
    program, *libraries = _interpreters(python)
    # Debian has it in both: programs that embed it are linked with the library.
    assert (program is None) == bool(libraries) or all((program, *libraries))
