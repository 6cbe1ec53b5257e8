# SPDX-License-Identifier: Apache-2.0
"""Device code in programs: as nvcc puts it there, and as somebody who means harm does."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import fatbins
import lz4.block
import pytest
import zstandard
from aiflame.agent.file_questions import BadAnswer, Question
from aiflame.agent.target_files import BadTargetFile, TargetFile
from aiflame.gpu.nvidia import fatbin
from aiflame.gpu.nvidia.cubin import Function, functions_of
from aiflame.gpu.nvidia.fatbin import Kernel, Part, Position, Section, cubin_at, search_from
from elfbytes import Elf
from elfbytes import Section as ElfSection
from fatbins import FILL, LZ4, PLAIN, SCALE, SUM, ZSTD, needs_nvcc
from hypothesis import example, given, settings
from hypothesis import strategies as st

T = TypeVar("T")

_NAMES = (SCALE, FILL, SUM)
_MAGIC = 0xBA55ED50
_FLAGS = {PLAIN: 0, LZ4: 0x2000, ZSTD: 0x8000}


@pytest.fixture(
    scope="module",
    params=[PLAIN, *(pytest.param(each, marks=pytest.mark.breadth) for each in (LZ4, ZSTD))],
    ids=["plain", "lz4", "zstd"],
)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = fatbins.build(tmp_path_factory.mktemp("fatbin"), *request.param)
    # Each is what it is called.
    flags = {entry[2] & 0xA000 for entry in _entries(path) if entry[0] == fatbin._KIND_CUBIN}
    assert flags - {0} == {_FLAGS[request.param]} - {0}
    return path


def _entries(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yields kind, architecture and flags of each entry."""
    section, data = _section(path), path.read_bytes()
    at, end = section.offset, section.offset + section.size
    while at < end:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        entry, at = at + header, at + header + size
        while entry < at:
            (kind, _, header, size), (sm,) = (
                struct.unpack_from("<HHIQ", data, entry),
                struct.unpack_from("<I", data, entry + 28),
            )
            yield kind, sm, struct.unpack_from("<Q", data, entry + 40)[0]
            entry += header + size


def _asked(path: Path, question: Question[T]) -> T:
    """As a parser answers, and whoever asks checks."""
    fd = os.open(path, os.O_RDONLY)
    try:
        answer = question.read(TargetFile(fd), *question.arguments)
        return question.checked(json.loads(json.dumps(answer)))
    finally:
        os.close(fd)


def _section(path: Path) -> Section:
    section = _asked(path, fatbin.SECTION)
    assert section is not None
    return section


def _parts(path: Path, sm: int = 90, names: Sequence[str] = _NAMES) -> Iterator[Part]:
    section = _section(path)
    position: Position | None = Position(section.offset)
    while position is not None:
        part = _asked(path, search_from(section, position, sm, names))
        position = part.rest
        yield part


def _found(path: Path, sm: int = 90, names: Sequence[str] = _NAMES) -> list[Kernel]:
    parts = [*_parts(path, sm, names)]
    assert not any(part.unread for part in parts)
    return [kernel for part in parts for kernel in part.kernels]


def _functions(path: Path) -> dict[str, Function]:
    question = functions_of(_NAMES)
    return _asked(path, question)


@needs_nvcc
def test_kernels_are_found_in_the_cubin_that_has_them(program: Path, tmp_path: Path) -> None:
    found = {kernel.name: kernel for kernel in _found(program)}
    assert {*found} == {*_NAMES}
    # THEN those of one source file are in one cubin
    assert found[SCALE].cubin == found[FILL].cubin != found[SUM].cubin
    # AND it lists as the one does that nvcc makes alone
    command = ["nvcc", "-lineinfo", "-cubin", "-arch=sm_90", "-o", tmp_path / "alone.cubin"]
    subprocess.run([*command, "kernels.cu"], cwd=program.parent, check=True)
    taken = tmp_path / "taken.cubin"
    taken.write_bytes(_asked(program, cubin_at(found[SCALE].cubin, [SCALE, FILL])))
    expected = _functions(tmp_path / "alone.cubin")
    assert {*expected} == {SCALE, FILL}
    for name, function in _functions(taken).items():
        assert (function.sm, function.size) == (90, found[name].size)
        assert function.size == expected[name].size
        assert [line.line for line in function.lines] == [
            line.line for line in expected[name].lines
        ]
    # AND of what was not asked for there is no code
    only = tmp_path / "only.cubin"
    only.write_bytes(_asked(program, cubin_at(found[SCALE].cubin, [FILL])))
    assert len(only.read_bytes()) == len(taken.read_bytes())
    assert only.read_bytes().count(0) > taken.read_bytes().count(0) + found[SCALE].size // 4


@needs_nvcc
@pytest.mark.parametrize(
    ("device", "expected"), [(75, None), (80, 80), (86, 80), (89, 80), (90, 90), (100, None)]
)
def test_a_device_takes_code_of_its_own_generation(
    program: Path, tmp_path: Path, device: int, expected: int | None
) -> None:
    found = _found(program, device, [SCALE])
    # The driver compiles the text (PTX) for all others.
    assert len(found) == (expected is not None)
    for kernel in found:
        (tmp_path / "k.cubin").write_bytes(_asked(program, cubin_at(kernel.cubin, [SCALE])))
        assert _functions(tmp_path / "k.cubin")[SCALE].sm == expected


@needs_nvcc
def test_of_two_that_fit_the_later_one_is_taken(tmp_path: Path) -> None:
    path = fatbins.build(tmp_path, architectures=(80, 86))
    by_device = {sm: _found(path, sm, [SCALE])[0].cubin for sm in (80, 86, 89)}
    assert by_device[80] != by_device[86] == by_device[89]


@needs_nvcc
def test_a_search_in_parts_finds_the_same(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _found(program)
    monkeypatch.setattr(fatbin, "_QUESTION_CPU_S", 0)
    parts = [*_parts(program)]
    assert [len(part.kernels) for part in parts if part.kernels] == [2, 1]
    assert [kernel for part in parts for kernel in part.kernels] == whole
    monkeypatch.setattr(fatbin, "_QUESTION_CPU_S", 1)
    monkeypatch.setattr(fatbin, "_MAX_HEADERS", 1)
    assert [kernel for part in _parts(program) for kernel in part.kernels] == whole


def test_most_files_have_no_device_code(tmp_path: Path) -> None:
    for data in (b"", b"#!/bin/sh\n", Elf().build()):
        (tmp_path / "file").write_bytes(data)
        assert _asked(tmp_path / "file", fatbin.SECTION) is None


# ---- what nobody builds ------------------------------------------------------------------------


def _entry(data: bytes, flags: int = 0, size: int | None = None, **changed: int) -> bytes:
    fields = {"kind": 2, "version": 0x101, "header": 64, "padded": len(data), "packed": len(data)}
    fields |= {"options": 0, "minor": 8, "major": 1, "sm": 90, "name": 0, "length": 0}
    fields |= {"flags": 0x11 | flags, "zero": 0, "unpacked": len(data) if size is None else size}
    return struct.pack("<2HIQ2I2H3I3Q", *(fields | changed).values()) + data


def _container(*entries: bytes, **changed: int) -> bytes:
    content = b"".join(entries)
    fields = {"magic": _MAGIC, "version": 1, "header": 16, "size": len(content)}
    return struct.pack("<IHHQ", *(fields | changed).values()) + content


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(Elf(sections=[ElfSection(".nv_fatbin", content)]).build())
    return path


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A cubin of one function, of 64 bytes: `scale`."""
    names, code = b"\0scale\0", bytes(range(64))
    section = struct.Struct("<2I4Q2I2Q")
    at = 64 + 4 * section.size
    symbol = struct.pack("<I2BH2Q", 1, 2, 0, 3, 0, len(code))
    head = (b"\x7fELF", 2, 1, 1, 0, 7, 2, 190, 1, 0, 0, 64, 90, 64, 0, 0, 64, 4, 2)
    sections = (
        section.pack(*[0] * 10)
        + section.pack(0, 2, 0, 0, at, len(symbol), 2, 0, 0, 0)
        + section.pack(0, 3, 0, 0, at + len(symbol), len(names), 0, 0, 0, 0)
        + section.pack(0, 1, 0, 0, at + len(symbol) + len(names), len(code), 0, 0, 0, 0)
    )
    return struct.pack("<4s5B7x2HI3QI6H", *head) + sections + symbol + names + code


def _zstd(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def _lz4(data: bytes) -> bytes:
    packed: bytes = lz4.block.compress(data, store_size=False)
    return packed


def test_made_ones_are_read_as_real_ones_are(cubin: bytes, tmp_path: Path) -> None:
    forms = [
        _entry(cubin),
        _entry(_lz4(cubin), 0x2000, len(cubin)),
        _entry(_zstd(cubin), 0x8000, len(cubin)),
        _entry(_zstd(cubin, write_content_size=False), 0x8000, len(cubin)),
    ]
    # Linkers align containers.
    content = b"".join(_container(form) + bytes(8 * at) for at, form in enumerate(forms))
    path = _file(tmp_path / "made", content)
    found = _found(path)
    assert [(kernel.name, kernel.size) for kernel in found] == [(SCALE, 64)] * 4
    assert len({kernel.digest for kernel in found}) == 1
    for kernel in found:
        assert _asked(path, cubin_at(kernel.cubin, [SCALE])) == cubin


def test_much_code_is_searched_however_fast_a_machine_is(
    cubin: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fatbin, "_QUESTION_CPU_S", 100)
    large = cubin + bytes(60 << 20)
    content = _container(_entry(_zstd(large), 0x8000, len(large))) * 12
    assert len(_found(_file(tmp_path / "large", content))) == 12


_ZEROS = bytes(200 << 20)


@pytest.mark.parametrize(
    "bad",
    [
        lambda cubin: _entry(_zstd(cubin), 0x8000, len(cubin) - 1),
        lambda cubin: _entry(_zstd(cubin), 0x8000, 1 << 40),
        lambda cubin: _entry(_zstd(cubin), 0x8000, 0),
        lambda cubin: _entry(_zstd(_ZEROS), 0x8000, 1 << 20),
        lambda cubin: _entry(_zstd(_ZEROS, write_content_size=False), 0x8000, 1 << 20),
        lambda cubin: _entry(_zstd(_ZEROS), 0x8000, 200 << 20),
        lambda cubin: _entry(b"\x28\xb5\x2f\xfd" + b"\xff" * 40, 0x8000, 1000),
        lambda cubin: _entry(_lz4(cubin), 0x2000, len(cubin) - 1),
        lambda cubin: _entry(_lz4(cubin)[:-9], 0x2000, len(cubin)),
        lambda cubin: _entry(_lz4(_ZEROS), 0x2000, 1 << 20),
        lambda cubin: _entry(_lz4(_ZEROS), 0x2000, 200 << 20),
        lambda cubin: _entry(cubin[:100]),
        lambda cubin: _entry(b".version 8.0\n" * 9),
        lambda cubin: _entry(b""),
    ],
)
def test_a_bad_cubin_costs_itself_alone(
    cubin: bytes, tmp_path: Path, bad: Callable[[bytes], bytes]
) -> None:
    path = _file(
        tmp_path / "bad", _container(bad(cubin), _entry(cubin)) + _container(_entry(cubin))
    )
    parts = [*_parts(path)]
    assert sum(len(part.kernels) for part in parts) == 2
    assert sum(part.unread for part in parts) == 1
    first = _section(path).offset + 16
    with suppress(BadTargetFile):
        assert not _asked(path, cubin_at(first, [SCALE]))


@pytest.mark.parametrize(
    "bad",
    [
        lambda entry: _container(entry, size=1 << 62),
        lambda entry: _container(entry, size=(1 << 64) - 16),
        lambda entry: _container(entry, size=len(entry) + 1),
        lambda entry: _container(entry, header=0),
        lambda entry: _container(entry, header=8),
        lambda entry: _container(entry, magic=7),
        lambda entry: _container(entry)[:12],
        lambda entry: _container(_entry(b"", header=0)),
        lambda entry: _container(_entry(b"", padded=(1 << 64) - 64, packed=0)),
        lambda entry: _container(_entry(b"", padded=1 << 40, packed=0)),
        lambda entry: _container(_entry(b"12345678", packed=9)),
        lambda entry: _container(*[_entry(b"")] * 1025),
    ],
)
def test_what_leads_nowhere_ends_the_search_and_is_told(
    cubin: bytes, tmp_path: Path, bad: Callable[[bytes], bytes]
) -> None:
    path = _file(tmp_path / "bad", _container(_entry(cubin)) + bad(_entry(cubin)))
    (part,) = _parts(path)
    assert len(part.kernels) == 1
    assert part.unread == 1


def test_a_hole_of_terabytes_is_not_read(tmp_path: Path) -> None:
    path = _file(tmp_path / "sparse", b"12345678")
    section = _section(path)
    os.truncate(path, 1 << 42)
    begun_s = time.thread_time()
    hole = Section(section.offset + 8, (1 << 42) - section.offset - 8)
    part = _asked(path, search_from(hole, Position(hole.offset), 90, _NAMES))
    assert (part.kernels, part.unread, part.rest) == ((), 1, None)
    assert time.thread_time() - begun_s < 5


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6
    )
)
@example(changes=[(0, b"")])
def test_damage_ends_in_bounded_time(
    cubin: bytes, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]
) -> None:
    content = bytearray(
        _container(
            _entry(_zstd(cubin), 0x8000, len(cubin)), _entry(_lz4(cubin), 0x2000, len(cubin))
        )
        + _container(_entry(cubin))
    )
    for at, junk in changes:
        content[at : at + len(junk)] = junk
    path = _file(tmp_path_factory.mktemp("damaged") / "file", bytes(content))
    begun_s = time.thread_time()
    for part in _parts(path):
        assert all(kernel.name == SCALE for kernel in part.kernels)
        for kernel in part.kernels:
            assert _asked(path, cubin_at(kernel.cubin, [SCALE]))
    assert time.thread_time() - begun_s < 5


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        [[], 0, [0, 0]],
        [[], 0, [16, 0]],
        [[], 0, [17, -1]],
        [[], -1, None],
        [[[1 << 40, 0, 1, "ab"]], 0, None],
        [[[0, 3, 1, "ab"]], 0, None],
        [[[0, 0, 1 << 40, "ab"]], 0, None],
        [[[0, 0, 1, "a" * 33]], 0, None],
        [[[0, 0, 1, 7]], 0, None],
        [[[0, 0, 1, "ab"]] * 30_000, 0, None],
    ],
    ids=lambda answer: str(answer)[:40],
)
def test_parts_that_no_sound_parser_tells_of(answer: Any) -> None:
    question = search_from(Section(16, 100), Position(16), 90, _NAMES)
    with pytest.raises(BadAnswer):
        question.checked(answer)


@pytest.mark.parametrize(
    "answer",
    [
        [1, ""],
        [4, "no base"],
        [4, "AAAA"],
        [1 << 40, "eJwDAAAAAAE="],
        [10, "eJxjYGBgAAAABAAB"],
        [2, "eJxjYGBgAAAABAAB"],
        [4, None],
        7,
    ],
    ids=str,
)
def test_cubins_that_no_sound_parser_gives(answer: Any) -> None:
    assert cubin_at(0, _NAMES).checked([4, "eJxjYGBgAAAABAAB"]) == bytes(4)
    with pytest.raises(BadAnswer):
        cubin_at(0, _NAMES).checked(answer)
