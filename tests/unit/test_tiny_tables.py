# SPDX-License-Identifier: Apache-2.0
"""Unwind tables of tiny files: there at once, the same as a builder's, and nobody else's harm."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.file_questions import BadAnswer
from aiflame.agent.processes.binaries import BinaryFile, BinaryTable
from aiflame.agent.processes.cached_tables import CachedTables
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.waiting_tables import WaitingTables
from aiflame.agent.target_files import TargetFile
from aiflame.agent.unwind import questions
from aiflame.agent.unwind.questions import TINY_FILE_BYTES, TINY_TABLE, tiny_table
from aiflame.agent.unwind.records import BadUnwindInfo
from aiflame.agent.unwind.table import UnwindTable
from cfibytes import (
    EPILOGUE,
    FRAMES,
    PROLOGUE,
    TEXT,
    Frames,
    advance,
    cfa_expression,
    def_cfa_offset,
    table_of,
    uleb,
)
from elfbytes import ALLOC_EXEC, HEADER_BYTES, Elf, Section, Symbol
from support import blind_inspector


def _frames(functions: int, program: bytes = PROLOGUE + EPILOGUE) -> Frames:
    frames = Frames()
    cie = frames.cie()
    for index in range(functions):
        frames.fde(cie, TEXT + 64 * index, 64, program)
    return frames


def _elf(frames: Frames, **more: Any) -> Elf:
    section = Section(".eh_frame", bytes(frames.body), flags=2, address=FRAMES)
    return Elf(**{"sections": [section], "text": b"\x90" * 0x1000, "text_address": TEXT, **more})


# A function that unwind information tells of, and one that it does not.
_BARE = b"\x53\x48\x83\xec\x40\xe8\xf6\xff\xff\xff\x48\x83\xc4\x40\x5b\xc3"
_SOUND = {
    "with CFI": _elf(_frames(20)).build(),
    "in part": _elf(
        _frames(1),
        text=b"\x90" * 64 + _BARE,
        symbols=[Symbol("bare", TEXT + 64, len(_BARE))],
    ).build(),
    "damaged": _elf(_frames(3, b"\x3f")).build(),
    "without": Elf().build(),
}


class _Files:
    """What a process maps, and the tables of it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        inspector = blind_inspector()
        stack.callback(inspector.server.close)
        self.binaries = BinaryTable(inspector)
        stack.callback(self.binaries.close)
        self.tables = CachedTables(self.binaries, ElfImages(self.binaries), folder / "cache")
        stack.callback(self.tables.close)

    def map(self, data: bytes) -> int:
        """Has a file mapped; returns its index."""
        index = len(self.binaries.files)
        path = self._folder / str(index)
        path.write_bytes(data)
        fd = os.open(path, os.O_RDONLY)
        self._stack.callback(os.close, fd)
        self.binaries.files[index] = BinaryFile(index, str(path), fd, "")
        return index

    @property
    def built(self) -> int:
        """How many tables builders have stored."""
        return len([*(self._folder / "cache").glob("*.unwind*")])


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Files]:
    monkeypatch.setattr("aiflame.agent.symbols.known._ROOT_DIRECTORY", tmp_path / "run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    with ExitStack() as stack:
        yield _Files(tmp_path, stack)


def _bytes(table: UnwindTable | None) -> bytes:
    assert table is not None
    return b"".join(map(bytes, table.to_chunks(bytes(32))))


@pytest.mark.parametrize("kind", _SOUND)
def test_a_table_is_there_at_once_and_as_a_builder_makes_it(
    kind: str, files: _Files, tmp_path: Path
) -> None:
    data = _SOUND[kind]
    found = _bytes(files.tables.load(files.map(data)))
    assert not files.tables.is_at_work and files.built == 0
    # WHEN a builder has to make it, as the same file is a little longer
    other = files.map(data + bytes(TINY_FILE_BYTES + 1 - len(data)))
    assert files.tables.load(other) is None
    # THEN it is the same
    assert _bytes(WaitingTables(files.tables).table_of(other)) == found
    assert _bytes(table_of(data, tmp_path)) == found
    assert files.built == 1


def test_a_file_that_is_not_mapped_yet_needs_no_builder(files: _Files) -> None:
    files.tables.expect(files.binaries.files[files.map(_SOUND["with CFI"])].fd or 0)
    assert not files.tables.is_expecting and not files.tables.is_at_work


def test_a_file_for_another_machine_is_refused(files: _Files) -> None:
    with pytest.raises(BadUnwindInfo):
        files.tables.load(files.map(Elf(header={"machine": 183}).build()))


def _spend(files: _Files, fd: int) -> None:
    files.binaries.guard.charge(os.getuid(), 19)


def _take_away(files: _Files, fd: int) -> None:
    class _Remote:
        identity, size_bytes, owner, is_stuck = (1, 1), os.fstat(fd).st_size, 0, False

        def read(self, size: int, offset: int) -> bytes:
            return os.pread(fd, size, offset)

    files.binaries.guard.remote[fd] = _Remote()


@pytest.mark.parametrize("happens", [_spend, _take_away])
def test_what_must_not_be_waited_for_is_built(
    happens: Callable[[_Files, int], None], files: _Files
) -> None:
    # GIVEN an owner whose files have taken much time, or a file that may never be read
    binary = files.map(_SOUND["with CFI"])
    happens(files, files.binaries.files[binary].fd or 0)
    # THEN its table is a builder's
    assert files.tables.load(binary) is None
    assert files.tables.build(binary)


def _asked(data: bytes) -> Any:
    fd = os.memfd_create("file")
    try:
        os.write(fd, data)
        return tiny_table(TargetFile(fd), "")
    finally:
        os.close(fd)


def _again_and_again() -> bytes:
    """A file that has the same code at many addresses."""
    text, count = b"\xff\xe0" * 4000, 60
    places = [TEXT + 0x10000 * at for at in range(count)]
    elf = Elf(text=text, text_address=TEXT, symbols=[Symbol("f", TEXT, len(text))])
    for at in places[1:]:
        name = f".t{at:x}"
        elf.sections.append(Section(name, flags=ALLOC_EXEC, address=at, size=len(text)))
        elf.symbols.append(Symbol("f", at, len(text), section=name))
    data = elf.build()
    (offset,) = struct.unpack_from("<Q", data, HEADER_BYTES + 8)
    elf.header = {"phoff": len(data), "phnum": count}
    loads = [
        struct.pack("<IIQQQQQQ", 1, 5, offset, at, at, len(text), len(text), 4096) for at in places
    ]
    return elf.build() + b"".join(loads)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"#!/bin/sh\n",
        _SOUND["with CFI"][:100],
        Elf(header={"machine": 183}).build(),
        bytes(TINY_FILE_BYTES + 1),
    ],
    ids=["empty", "script", "cut", "machine", "large"],
)
def test_all_else_is_left_to_builders(data: bytes) -> None:
    assert _asked(data) is None


@pytest.mark.parametrize(
    "data",
    [Elf(sections=[Section(".gopclntab", bytes(64))]).build(), _again_and_again()],
    ids=["go", "again"],
)
def test_what_may_take_long_is_not_begun(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "build", lambda *_: pytest.fail("it is begun"))
    assert _asked(data) is None


def test_a_table_that_is_no_tiny_one_is_left_to_builders(monkeypatch: pytest.MonkeyPatch) -> None:
    found = TINY_TABLE.checked(_asked(_SOUND["with CFI"]))
    monkeypatch.setattr(questions, "_MAX_TABLE_BYTES", len(_bytes(found)) - 1)
    assert _asked(_SOUND["with CFI"]) is None


def _costly() -> Iterator[bytes]:
    """Files of 30 KB in which there is much to do, as of what little there is."""
    nops = b"\0" * 4
    for program in (nops, advance(1) + def_cfa_offset(16), cfa_expression(b"\x70\0"), b"\x0a\x0b"):
        frames = Frames()
        cie = frames.cie(b"\x0c\x07\x08\x90\x01" + program * (6000 // len(program)))
        for index in range(500):
            frames.fde(cie, TEXT + 8 * index, 8, program)
        yield _elf(frames).build()
    for code in (b"\x90", b"\x55", b"\xff\xe0", b"\x74\x10", b"\x0f\x84\xfa\xef\xff\xff", _BARE):
        text = code * (12_000 // len(code))
        symbols = [Symbol("f", TEXT + at, len(text) - at) for at in range(400)]
        yield Elf(text=text, text_address=TEXT, symbols=symbols).build()
    frames = Frames()
    cie = frames.cie()
    program = b"".join(advance(1) + b"\x0e" + uleb(16 + 8 * number) for number in range(60))
    for index in range(90):
        frames.fde(cie, TEXT + 40 * index, 40, program)
    yield _elf(frames).build()


def test_the_costliest_take_no_long_time() -> None:
    for data in _costly():
        assert 16 << 10 < len(data) <= TINY_FILE_BYTES
        begun_s = time.process_time()
        _asked(data)
        assert time.process_time() - begun_s < 1.5  # seen: 0.1


def test_random_damage() -> None:
    rng, found = random.Random(7), 0
    sound = [*_SOUND.values()]
    for number in range(300):
        data = bytearray(sound[number % len(sound)])
        for _ in range(rng.choice((1, 4, 40))):
            at = rng.randrange(len(data) if rng.random() < 0.3 else min(len(data), 400))
            data[at] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        try:
            answer = _asked(bytes(data))
        except (ArithmeticError, LookupError, TypeError, ValueError):  # as parsers tell of
            continue
        found += TINY_TABLE.checked(answer) is not None
    assert found > 100


def _lies() -> Iterator[Any]:
    sound = _asked(_SOUND["with CFI"])
    yield from (1, [], {}, True, "", "x", "§", "\ud800", sound[:-4], sound[4:], sound + sound)
    yield f"{sound[:-8]}{'A' * 8}"
    yield "A" * (1 << 20)
    table = TINY_TABLE.checked(sound)
    assert table is not None
    for field in ("kind", "rbp_kind"):
        rules = table.rules.copy()
        rules[field] = 200
        yield _encoded(UnwindTable(table.base_page, table.page_first_row, table.rows, rules))
    rows = table.rows.copy()
    rows["rule"] = len(table.rules)
    yield _encoded(UnwindTable(table.base_page, table.page_first_row, rows, table.rules))
    first = table.page_first_row.copy()
    first[-1] += 1
    yield _encoded(UnwindTable(table.base_page, first, table.rows, table.rules))


def _encoded(table: UnwindTable) -> str:
    return questions.base64.b64encode(_bytes(table)).decode()


def test_tables_that_no_parser_makes_are_refused() -> None:
    for lie in _lies():
        with pytest.raises(BadAnswer):
            TINY_TABLE.checked(lie)
