# SPDX-License-Identifier: Apache-2.0
"""The libraries of a command that is about to be run, found as ld.so would find them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.inspector.opener import Opener
from aiflame.agent.launches.runtimes import expected_files
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.target_files import FileGuard


@pytest.fixture
def asked() -> Iterator[tuple[Opener, FileFacts]]:
    with ExitStack() as stack:
        inspector = stack.enter_context(Inspector())
        facts = FileFacts(inspector.server, FileGuard())
        stack.callback(facts.close)
        yield inspector.opener, facts


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program in bin/ that needs lib/libouter.so, which needs lib/libinner.so."""
    for name in ("bin", "lib"):
        (tmp_path / name).mkdir()
    (tmp_path / "inner.c").write_text("int inner(void) { return 1; }")
    (tmp_path / "outer.c").write_text("int inner(void); int outer(void) { return inner(); }")
    (tmp_path / "main.c").write_text("int outer(void); int main(void) { return outer(); }")
    shared = ["gcc", "-shared", "-fPIC", "-Llib", "-Wl,-rpath,$ORIGIN"]
    for command in (
        [*shared, "-o", "lib/libinner.so", "inner.c"],
        [*shared, "-o", "lib/libouter.so", "outer.c", "-linner"],
        ["gcc", "-Llib", "-Wl,-rpath,$ORIGIN/../lib", "-o", "bin/main", "main.c", "-louter"],
    ):
        subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path / "bin/main"


def test_libraries_of_libraries_are_found(
    program: Path, asked: tuple[Opener, FileFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.parent)
    found = [path.resolve() for path in expected_files(["./main"], *asked).command]
    folder = program.parents[1] / "lib"
    assert {program, folder / "libouter.so", folder / "libinner.so"} <= set(found)
    assert asked[1].guard.bad == {}


@pytest.mark.parametrize("kept", [0, 10, 100, 5000])
def test_a_library_that_is_cut_costs_itself(
    kept: int, program: Path, asked: tuple[Opener, FileFacts]
) -> None:
    library = program.parents[1] / "lib/libouter.so"
    os.truncate(library, kept)
    found = [path.resolve() for path in expected_files([str(program)], *asked).command]
    assert {program, library} <= set(found)


@pytest.mark.parametrize("line", ["#!{}", "#! {} -x", "#!/usr/bin/env main"])
def test_a_script_needs_what_its_interpreter_needs(
    line: str,
    program: Path,
    tmp_path: Path,
    asked: tuple[Opener, FileFacts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    script = tmp_path / "script"
    script.write_text(f"{line.format(program)}\nexit\n")
    script.chmod(0o755)
    found = expected_files([str(script)], *asked).command
    assert {script, program} <= set(found)
    assert program.parents[1] / "lib/libouter.so" in [path.resolve() for path in found]
    assert asked[1].guard.bad == {}


def test_a_library_that_is_no_file_is_passed_by(
    program: Path, asked: tuple[Opener, FileFacts]
) -> None:
    library = program.parents[1] / "lib/libouter.so"
    library.unlink()
    os.mkfifo(library)
    assert library not in [
        path.resolve() for path in expected_files([str(program)], *asked).command
    ]
