# SPDX-License-Identifier: Apache-2.0
"""Code that was loaded before a helper could tell of it, found in programs that nvcc built."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, cast

import asked_bytes
import fatbins
import pytest
from aiflame.agent.file_questions import Question
from aiflame.agent.inspector import tools
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.losses import LossKind
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.target_files import FileGuard
from aiflame.gpu.base import CodeKey, KernelSample
from aiflame.gpu.nvidia import fatbin, late
from aiflame.gpu.nvidia.code import KeptCode
from aiflame.gpu.nvidia.fatbin import Part, Position, Section
from aiflame.gpu.nvidia.late import Found, Missing, Object
from fatbins import FILL, SCALE, SUM, needs_nvcc, needs_nvdisasm
from helper_memory import Host

T = TypeVar("T")


class _Files(Host):
    """A host of processes that map files, which are read as a recorder reads them."""

    def __init__(self, *paths: Path) -> None:
        super().__init__()
        self.guard = FileGuard()
        self.server = ForkServer()
        self.facts = FileFacts(self.server, self.guard)
        self.paths = paths
        self.fds = [os.open(path, os.O_RDONLY) for path in paths]
        self.asked: Counter[str] = Counter()

    def close(self) -> None:
        self.facts.close()
        self.server.close()
        for fd in self.fds:
            os.close(fd)

    def files(self, process: int) -> Collection[int]:
        return range(len(self.paths))

    def ask(self, file: int, question: Question[T]) -> T | None:
        self.asked[question.name.rpartition(":")[2]] += 1
        return self.facts.ask(str(self.paths[file]), self.fds[file], question)

    def about(self, name: str, data: bytes, question: Question[T]) -> T | None:
        return asked_bytes.about(self.facts, name, data, question)

    def run(self, program: str, arguments: list[str], data: bytes) -> bytes | None:
        return tools.run_tool(program, arguments, data) if tools.is_sound(program) else None

    def find(
        self, missing: Mapping[Object, Missing], files: Mapping[int, Collection[int]] | None = None
    ) -> dict[Object, Found]:
        every = {process: self.files(process) for process, _ in missing}
        return dict(late.find(cast(Any, self), missing, files or every))


def _missing(*names: str, sm: int = 90, last: int = 16) -> Missing:
    return Missing(sm, Counter(dict.fromkeys(names, 5)), dict.fromkeys(names, last))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("late")


@pytest.fixture(scope="module")
def program(folder: Path) -> Path:
    return fatbins.build(folder / "program", *fatbins.ZSTD)


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """Of which `scale` is other code, and all else the same."""
    source = fatbins.kernels_saying(7)
    return fatbins.build(folder / "other", *fatbins.LZ4, kernels=source)


@pytest.fixture
def host(program: Path) -> Iterator[_Files]:
    with closing(_Files(program)) as host:
        yield host


def _sample(name: str, code: int = 7, offset: int = 16, process: int = 3) -> KernelSample:
    return KernelSample(0, 0, CodeKey(process, None, name, code), offset, "r", 5)


@needs_nvcc
@needs_nvdisasm
def test_a_kernel_that_was_loaded_before_has_sass_and_lines(host: _Files) -> None:
    # GIVEN samples of a process of whose modules its helper was not told
    kept = KeptCode(cast(Any, host), lambda device: 90)
    kept.keep([_sample(SCALE), _sample(FILL), _sample(SUM, 8)], lambda code: b"")
    # AND which is over before the recording is
    kept.forget(3)
    # WHEN kernels are listed
    for name, code, word, line in ((SCALE, 7, "MUFU.SIN", 4), (SUM, 8, "FADD", 4)):
        listing = kept.listing(CodeKey(3, None, name, code), frozenset({16}))
        # THEN they have instructions and lines
        assert listing is not None
        assert listing.size_bytes == 16 * len(listing.lines)
        assert {one.line for one in listing.lines if word in one.text} == {line}
        # AND what holds them is told, and goes into the capture
        assert kept.found_in(CodeKey(3, None, name, code)) == 0
        assert kept.code(CodeKey(3, None, name, code))
    assert not host.lost
    assert not host.guard.bad


@needs_nvcc
def test_what_a_helper_has_told_is_not_looked_for(host: _Files) -> None:
    kept = KeptCode(cast(Any, host), lambda device: 90)
    kept.keep([_sample(SCALE)], lambda code: b"\x7fELF")
    kept.listing(_sample(SCALE).code, frozenset({16}))
    assert not host.asked
    assert kept.found_in(_sample(SCALE).code) is None


@needs_nvcc
def test_processes_of_one_program_have_it_searched_once(host: _Files) -> None:
    missing = {(process, 7): _missing(SCALE, FILL) for process in range(8)}
    found = host.find(missing)
    assert {*found} == {*missing}
    assert len({one.data for one in found.values()}) == 1
    assert host.asked == {"section": 1, "search": 1, "cubin": 1}
    assert not host.lost


@needs_nvcc
@pytest.mark.parametrize(
    "missing",
    [
        _missing("no_such_kernel"),
        _missing(SCALE, "no_such_kernel"),
        _missing(SCALE, SUM),  # which are in two cubins
        _missing(SCALE, sm=100),
        _missing(SCALE, sm=0),
        _missing(SCALE, last=1 << 20),  # past its end
        _missing(),
    ],
)
def test_what_no_file_has_is_told(host: _Files, missing: Missing) -> None:
    assert host.find({(3, 7): missing}) == {}
    assert host.lost == {LossKind.DEVICE_CODE_NOT_FOUND: 1}


@needs_nvcc
@pytest.mark.breadth
def test_of_two_that_differ_none_is_taken(program: Path, other: Path) -> None:
    missing = {(3, 7): _missing(SCALE), (3, 8): _missing(FILL), (3, 9): _missing(SCALE, FILL)}
    with closing(_Files(program, other)) as host:
        found = host.find(missing)
        # THEN what is the same in both is taken from either
        assert {*found} == {(3, 8)}
        assert host.lost == {LossKind.DEVICE_CODE_AMBIGUOUS: 2}
    # AND a process that maps one of them has that one's
    with closing(_Files(program, other)) as host:
        found = host.find({(3, 7): _missing(SCALE), (4, 7): _missing(SCALE)}, {3: [0], 4: [1]})
        assert [found[one, 7].file for one in (3, 4)] == [0, 1]
        assert not host.lost


@needs_nvcc
def test_several_devices_have_code_of_their_own(host: _Files) -> None:
    found = host.find({(3, 7): _missing(SCALE, sm=80), (3, 8): _missing(SCALE, sm=90)})
    assert len({one.data for one in found.values()}) == 2
    assert not host.lost


@needs_nvcc
def test_files_without_device_code_are_searched_quickly(program: Path) -> None:
    with closing(_Files(Path("/bin/true"), Path("/bin/sh"), program)) as host:
        (found,) = host.find({(3, 7): _missing(SCALE)}).values()
        assert found.file == 2
        assert host.asked == {"section": 3, "search": 1, "cubin": 1}


class _SlowFiles(Host):
    """Files of which each part takes two seconds, and the searches that were begun of each."""

    def __init__(self, parts: Mapping[int, int]) -> None:
        super().__init__()
        self.parts = parts
        self.now_s = 0.0
        self.searched: Counter[int] = Counter()

    def ask(self, file: int, question: Question[T]) -> T | None:
        if question is fatbin.SECTION:
            return cast(T, Section(0, self.parts[file]))
        self.now_s += 2
        self.searched[file] += 1
        left = self.parts[file] - self.searched[file]
        return cast(T, Part((), 0, Position(self.searched[file]) if left else None))


def test_the_end_of_a_recording_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a process with little code, three with much, and a file that two of these have
    host = _SlowFiles({0: 2, 1: 50, 2: 51, 3: 52})
    monkeypatch.setattr(late.time, "monotonic", lambda: host.now_s)
    missing = {(process, 7): _missing(SCALE) for process in range(4)}
    files = {0: [0], 1: [1], 2: [2, 3], 3: [2]}
    assert dict(late.find(cast(Any, host), missing, files)) == {}
    # THEN each has a quarter of 20 s, but for what is begun by then
    assert host.searched == {0: 2, 1: 3, 2: 5}
    # AND what was not searched is told
    assert host.lost == {
        LossKind.DEVICE_CODE_NOT_SEARCHED: 3,
        LossKind.DEVICE_CODE_NOT_FOUND: 4,
    }


@needs_nvcc
def test_the_kernels_that_ran_most_are_looked_for(
    host: _Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a process that invents kernels, and another one
    monkeypatch.setattr(late, "MAX_FUNCTIONS", 4)
    invented = Missing(90, Counter({f"x{n}": 10**9 for n in range(50)}), {})
    found = host.find({(3, 7): invented, (4, 7): _missing(SCALE, FILL)})
    # THEN that one's are found
    assert {*found} == {(4, 7)}
    assert host.lost == {LossKind.DEVICE_CODE_NOT_FOUND: 1}


@needs_nvcc
def test_found_code_has_its_room(host: _Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiflame.gpu.nvidia.code._MAX_BYTES", 100)
    kept = KeptCode(cast(Any, host), lambda device: 90)
    kept.keep([_sample(SCALE)], lambda code: b"")
    assert kept.listing(_sample(SCALE).code, frozenset({16})) is None
    assert host.lost[LossKind.DEVICE_CODE_NOT_KEPT] == 1
    assert kept.found_in(_sample(SCALE).code) is None


def test_what_is_missing_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiflame.gpu.nvidia.code._MAX_MISSING", 100)
    host = Host()
    kept = KeptCode(cast(Any, host), lambda device: 90)
    for process in range(1000):
        kept.keep([_sample("k", process=process)], lambda code: b"")
        kept.forget(process)
    assert len(kept._missing) == 100
    assert host.lost == {LossKind.DEVICE_CODE_NOT_FOUND: 900}
