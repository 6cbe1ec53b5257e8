# SPDX-License-Identifier: Apache-2.0
"""Who parses files of targets: processes without rights, and nobody else.

Whoever opens files forks its parsers, so that the code is the same, and only the process tells them
apart.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.errors import AiflameError
from aiflame.agent.symbols.outline import checked, read_outline
from aiflame.agent.symbols.perfmap import PerfMap
from aiflame.agent.symbols.worker import Worker
from aiflame.agent.target_files import BadTargetFile
from aiflame.agent.unwind.worker import _Builder
from hypothesis import given
from hypothesis import strategies as st

_ROOT = Path(__file__).parents[2]

# What makes something of a file's bytes, and who calls it: functions that parsers run.
_PARSE = {
    *("ElfImage.read", "ElfImage.from_fd", "PerfMap.read", "PerfMap.parse", "find_functions"),
    *("read_prologue", "capstone.Cs", "Cubin"),
    *("zstandard.ZstdDecompressor", "lz4.block.decompress", "unneeded"),
}
_IN_PARSERS = {
    # What questions ask (`inspector.file_reader`).
    "agent.elf.dynamic:dependencies",
    "agent.elf.functions:names_at",
    "agent.elf.headers:headers",
    "agent.injection.questions:unsafe_parts",
    "agent.launches.questions:functions",
    "agent.launches.symbols:find_functions",
    "agent.python.questions:interpreter",
    "agent.python.questions:key_block",
    "agent.unwind.questions:tiny_table",
    "gpu.nvidia.cubin:functions",
    "gpu.nvidia.cubin:unneeded",
    "gpu.nvidia.fatbin:cubin",
    "gpu.nvidia.fatbin:section",
    "gpu.opencl.disassembly:instructions",
    "gpu.opencl.kernel_file:read_kernel_file",
    # A library of ours, which targets are to load.
    "agent.injection.inject:_read",
    # What these call.
    "agent.launches.probe_sites:_instructions",
    "agent.unwind.prologue_x86_64:_decoder",
    "gpu.nvidia.fatbin:_kernels",
    "gpu.nvidia.fatbin:_lz4",
    "gpu.nvidia.fatbin:_zstd",
    "gpu.opencl.disassembly:_decoder",
    # What the parsers of symbols and of unwind tables do.
    "agent.symbols.debugfiles:__init__",
    "agent.symbols.outline:read_outline",
    "agent.symbols.worker:_generated",
    "agent.unwind.worker:_parse",
}
# What of that others import, and who, to do it in parsers; of all else nobody imports anything.
_IMPORTED = {
    "agent.launches.symbols.find_functions": {"agent.launches.questions"},
    "agent.symbols.debugfiles.OpenElf": {"agent.symbols.lines", "agent.symbols.resolve"},
    "agent.symbols.outline.read_outline": {"agent.symbols.worker", "agent.unwind.worker"},
    "agent.symbols.resolve.Resolver": {"agent.symbols.worker"},
    "gpu.nvidia.cubin.unneeded": {"gpu.nvidia.fatbin"},
}


@cache
def _trees() -> dict[str, ast.Module]:
    paths = [*(_ROOT / "agent").rglob("*.py"), *(_ROOT / "gpu").rglob("*.py")]
    return {
        ".".join(path.relative_to(_ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for path in paths
    }


def _calls() -> Iterator[tuple[str, str]]:
    """Yields each call in agent/ and gpu/: the function that it is in, and what is called."""
    for module, tree in _trees().items():
        yield from _calls_in(tree, module, "")


def _calls_in(node: ast.AST, module: str, function: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield f"{module}:{function}", ast.unparse(child.func)
        is_function = isinstance(child, ast.FunctionDef)
        yield from _calls_in(child, module, child.name if is_function else function)


def test_files_are_parsed_where_there_are_no_rights() -> None:
    found = {where for where, what in _calls() if what in _PARSE}
    # Other ways to the same, of these classes themselves.
    found -= {"agent.elf.image:from_fd", "agent.symbols.perfmap:read"}
    assert found - _IN_PARSERS == set()
    assert _IN_PARSERS - found == set(), "the list is longer than it has to be"


def test_what_parses_is_imported_by_those_who_have_it_done_in_parsers() -> None:
    found: dict[str, set[str]] = {}
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}".removeprefix("aiflame.")
                    found.setdefault(name, set()).add(path)
    for name in {*_IMPORTED, *(where.replace(":", ".") for where in _IN_PARSERS)}:
        assert found.get(name, set()) == _IMPORTED.get(name, set()), name


def test_workers_have_outlines_made_by_their_parsers() -> None:
    assert {where for where, what in _calls() if what == "read_outline"} == {
        "agent.symbols.worker:_parse",
        "agent.unwind.worker:_parse",
    }


@pytest.fixture
def parses_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Makes parsing fail in this process, not in those that it forks."""
    own = os.getpid()
    read, read_map = ElfImage.read, PerfMap.read
    tries: list[str] = []

    def refuse(what: str) -> None:
        if os.getpid() == own:
            tries.append(what)
            raise AssertionError(f"{what} is parsed with rights")

    def guarded(cls: type[ElfImage], file: Any) -> ElfImage:
        refuse("a file")
        return read(file)

    def guarded_map(cls: type[PerfMap], fd: int, *limits: int) -> PerfMap:
        refuse("a perf map")
        return read_map(fd, *limits)

    monkeypatch.setattr(ElfImage, "read", classmethod(guarded))
    monkeypatch.setattr(PerfMap, "read", classmethod(guarded_map))
    return lambda: len(tries)


def _request(path: Path, **more: Any) -> dict[str, Any]:
    return {
        **{"id": 1, "path": str(path), "root": "/", "addresses": [0x1000], "plain": False},
        **{"perf_map_uid": None, **more},
    }


def test_the_worker_of_symbols_parses_nothing(
    parses_elsewhere: Callable[[], int], tmp_path: Path
) -> None:
    worker = Worker(tmp_path / "cache", 30.0)
    # GIVEN a stripped program, for which debug files are looked for, and a perf map
    name = f"perf-{os.getpid()}.map"
    (tmp_path / name).write_text("1000 10 generated\n")
    for _ in range(2):  # the second time from the cache
        answer = worker.answer(_request(Path(sys.executable).resolve()))
        assert answer["problems"] == []
    answer = worker.answer(_request(Path(f"/{name}"), root=str(tmp_path), perf_map_uid=os.getuid()))
    assert "generated" in str(answer)
    worker.close()
    assert parses_elsewhere() == 0


def test_the_worker_of_unwind_tables_parses_nothing(
    parses_elsewhere: Callable[[], int], tmp_path: Path
) -> None:
    builder = _Builder(tmp_path / "cache")
    names = {builder.build(str(Path(sys.executable).resolve())) for _ in range(2)}
    assert len(names) == 1
    # A file that is none says so, also where it is not looked at as a whole.
    for name, size_bytes in (("script", 0), ("large", 4 << 20)):
        (tmp_path / name).write_bytes(b"#!/bin/sh\n" + bytes(size_bytes))
        with pytest.raises(AiflameError, match="not an ELF file"):
            builder.build(str(tmp_path / name))
    builder._parsers.close()
    assert parses_elsewhere() == 0


_SIZE = 10_000


def _sound(**changes: Any) -> dict[str, Any]:
    said = {"build_id": "ab" * 20, "link": "x.debug", "is_complete": True, "parts": [[0, 4096]]}
    return {"outline": [*{**said, **changes}.values()]}


def test_an_outline_is_what_a_parser_says() -> None:
    found = checked(_sound(parts=[[0, 4096], [5000, 5000]]), _SIZE)
    assert found.contents is not None
    assert (found.build_id, found.debuglink, found.is_complete) == ("ab" * 20, "x.debug", True)
    assert found.contents.parts == ((0, 4096), (5000, 5000))
    assert checked(_sound(parts=None), _SIZE).contents is None
    with pytest.raises(BadTargetFile, match="no ELF file"):
        checked({"bad": "no ELF file"}, _SIZE)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"outline": None},
        {"outline": [1, 2, 3]},
        _sound(build_id="../../etc"),
        _sound(build_id="AB"),
        _sound(build_id=5),
        _sound(link="../../etc/passwd"),
        _sound(link="x" * 300),
        _sound(link=7),
        _sound(is_complete=1),
        _sound(parts=7),
        _sound(parts=[[0]]),
        _sound(parts=[[0, 0]]),
        _sound(parts=[[0, -1]]),
        _sound(parts=[[-1, 2]]),
        _sound(parts=[[0, 1.5]]),
        _sound(parts=[[0, True]]),
        _sound(parts=[["0", 1]]),
        _sound(parts=[[0, _SIZE + 1]]),
        _sound(parts=[[5, 10], [0, 5]]),
        _sound(parts=[[0, 10], [5, 10]]),
        _sound(parts=[[0, 1]] * 10_000),
    ],
)
def test_an_outline_that_no_sound_parser_gives(answer: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        checked(answer, _SIZE)


@given(st.binary(max_size=200), st.sampled_from(["symbols", "unwinding"]))
def test_any_file_has_an_outline_or_is_bad(data: bytes, purpose: str) -> None:
    fd = os.memfd_create("file")
    try:
        os.write(fd, b"\x7fELF" + data)
        answer = read_outline(fd, purpose)
        try:
            checked(answer, len(data) + 4)
        except BadTargetFile:
            assert "bad" in answer
    finally:
        os.close(fd)
