# SPDX-License-Identifier: Apache-2.0
"""A file with another's build id, length and ends: whoever is recorded first, the tables in the
cache are its own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.elf.contents import Contents, for_symbols, for_unwinding
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.symbols import known
from aiflame.agent.symbols.known import KnownTables
from aiflame.agent.symbols.service import Request, SymbolService
from aiflame.agent.symbols.store import Store
from aiflame.agent.target_files import BadTargetFile, TargetFile
from aiflame.agent.unwind.build import load
from aiflame.agent.unwind.table_builder import TableBuilder
from cfibytes import unwound
from elfbytes import Elf, Section, Symbol
from support import wait_until

_BUILD_ID = bytes(range(20))
# What lies between is not at an end of the file.
_PADDING = bytes(8192)


def _named(name: str) -> bytes:
    symbols = [Symbol(name, 0x1000, 16)]
    sections = [Section(".padding", _PADDING)]
    return Elf(symbols=symbols, build_id=_BUILD_ID, sections=sections).build() + _PADDING


def _assert_same_ends(one: bytes, other: bytes) -> None:
    assert len(one) == len(other)
    differences = [at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    assert 4096 <= differences[0] <= differences[-1] < len(one) - 4096


def test_symbols_are_those_of_the_file_itself(tmp_path: Path) -> None:
    # GIVEN two files that differ in a name
    honest = _named("honest")
    forged = honest.replace(b"honest", b"forged")
    _assert_same_ends(honest, forged)
    for name, data in (("forged", forged), ("honest", honest)):
        (tmp_path / name).write_bytes(data)
    addresses = np.array([0x1000], np.uint64)
    for _ in range(2):  # the second time from the cache
        with SymbolService(tmp_path / "cache") as service:
            # WHEN the forged one is asked for first
            for name in ("forged", "honest"):
                request = Request(str(tmp_path / name), "", addresses)
                (result,) = service.resolve_many([request])
                # THEN each has its own
                assert [[frame.name for frame in chain] for chain in result.frames] == [[name]]


def test_symbols_of_a_debug_file_are_its_own(tmp_path: Path) -> None:
    # GIVEN a binary whose debug file, of that build id, is not the same in two roots
    binary = Elf(dynamic_symbols=[Symbol("f", 0x1000, 1)], build_id=_BUILD_ID).build()
    (tmp_path / "binary").write_bytes(binary)
    place = f"usr/lib/debug/.build-id/{_BUILD_ID.hex()[:2]}/{_BUILD_ID.hex()[2:]}.debug"
    for name in ("forged", "honest"):
        path = tmp_path / name / place
        path.parent.mkdir(parents=True)
        path.write_bytes(_named(name))
    with SymbolService(tmp_path / "cache") as service:
        for name in ("forged", "honest"):
            addresses = np.array([0x1008], np.uint64)
            request = Request(str(tmp_path / "binary"), str(tmp_path / name), addresses)
            (result,) = service.resolve_many([request])
            assert [[frame.name for frame in chain] for chain in result.frames] == [[name]]


_FUNCTION = """
.section .padding, "a"
.skip 8192
.text
.skip 8192
.globl bare
.type bare, @function
bare:
    push %rbx
    sub $64, %rsp
    call bare
    add $64, %rsp
    pop %rbx
    ret
.size bare, . - bare
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library with a function that no unwind information tells of."""
    (tmp_path / "bare.s").write_text(_FUNCTION)
    path = tmp_path / "honest"
    flags = ("-shared", "-nostdlib", "-Wl,--build-id=0x0123456789abcdef")
    subprocess.run(["gcc", *flags, "-o", path, tmp_path / "bare.s"], check=True)
    return path


def _table(cache: Path, builder: TableBuilder, number: int, path: Path) -> bytes:
    builder.ask(number, str(path))
    done: list[int] = []
    wait_until(lambda: done.extend(builder.finished()) or done, 60)
    table = load(builder.names[number], Store(cache))
    assert table is not None
    return b"".join(map(bytes, table.to_chunks(bytes(32))))


@contextmanager
def _builder(cache: Path) -> Iterator[TableBuilder]:
    server = ForkServer()
    builder = TableBuilder(server, cache, lambda fd: None, lambda binary: 0.0)
    try:
        yield builder
    finally:
        builder.close()
        server.close()


def test_unwind_rules_are_those_of_the_file_itself(tmp_path: Path, library: Path) -> None:
    # GIVEN two libraries that differ in code without unwind information
    honest = library.read_bytes()
    forged = honest.replace(b"\x48\x83\xec\x40", b"\x48\x83\xec\x20")
    _assert_same_ends(honest, forged)
    path = tmp_path / "forged"
    path.write_bytes(forged)
    with _builder(tmp_path / "own") as builder:
        own = _table(tmp_path / "own", builder, 0, library)
    with _builder(tmp_path / "shared") as builder:
        other = _table(tmp_path / "shared", builder, 0, path)
        found = _table(tmp_path / "shared", builder, 1, library)
    assert found == own != other


def test_functions_without_a_name_are_those_of_the_file_itself(tmp_path: Path) -> None:
    # GIVEN two files that differ in their unwind information, or in the list of it, alone
    address, cache = 0x1030, tmp_path / "cache"
    for at, functions in enumerate([((0x1000, 64),), ((0x1020, 64),), ((0x1000, 48),), ()]):
        path = tmp_path / str(at)
        path.write_bytes(unwound(Elf(build_id=_BUILD_ID), *functions))
        # WHEN all of them are asked about with one cache
        with SymbolService(cache) as service:
            request = Request(str(path), "", np.array([address], np.uint64))
            (result,) = service.resolve_many([request])
        # THEN each has its own
        within = [start for start, size in functions if start <= address < start + size]
        assert [found and found.begin for found in result.ranges] == (within or [None])


def _opened(path: Path) -> tuple[TargetFile, ElfImage]:
    file = TargetFile(os.open(path, os.O_RDONLY))
    return file, ElfImage.read(file)


def test_a_copy_has_what_the_digest_is_of_and_stays(library: Path) -> None:
    data = library.read_bytes()
    file, image = _opened(library)
    for select in (for_unwinding, for_symbols):
        library.write_bytes(data)
        contents = select(file, image)
        copy, digest = contents.copied(file)
        # WHEN the file is written to
        library.write_bytes(bytes(len(data)))
        assert contents.digest(file) != digest
        # THEN the copy stays, and nobody can write to it
        held = os.pread(copy, len(data), 0)
        assert contents.digest(TargetFile(copy)) == digest
        with pytest.raises(PermissionError):
            os.pwrite(copy, b"x", 0)
        # AND it has nothing else
        for offset, size in contents.parts:
            assert held[offset : offset + size] == data[offset : offset + size]
            held = held[:offset] + bytes(size) + held[offset + size :]
        assert held == bytes(len(data))
        assert ElfImage.read(TargetFile(copy)) == image
        os.close(copy)
    library.write_bytes(data[:100])
    with pytest.raises(BadTargetFile, match="cut"):
        contents.digest(file)
    os.close(file.fd)


def test_parts_that_lie_over_each_other_are_read_once(tmp_path: Path) -> None:
    # GIVEN 500 sections of a sparse file, each nearly as long as all of it
    sections = [Section(f".debug_{i}", size=(1 << 28) - i) for i in range(500)]
    path = tmp_path / "sparse"
    path.write_bytes(Elf(sections=sections).build())
    os.truncate(path, 1 << 30)
    file, image = _opened(path)
    parts = for_symbols(file, image).parts
    assert sum(size for _, size in parts) < 1 << 29
    ends = [offset + size for offset, size in parts]
    assert all(end <= begin for end, (begin, _) in zip(ends, parts[1:], strict=False))
    os.close(file.fd)


def test_more_than_any_real_file_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(Elf(sections=[Section(".debug_info", size=2 << 30)]).build())
    os.truncate(path, 3 << 30)
    file, image = _opened(path)
    with pytest.raises(BadTargetFile):
        for_symbols(file, image)
    os.close(file.fd)


def test_where_bytes_are_is_part_of_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file:
        opened = TargetFile(file.fileno())
        parts = [((0, 10),), ((1, 10),), ((0, 5), (6, 5))]
        assert len({Contents(4096, part).digest(opened) for part in parts}) == len(parts)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that have just been written count as old."""
    monkeypatch.setattr(known, "_SETTLED_NS", -(1 << 62))


def test_a_file_is_known_until_it_changes(tmp_path: Path, settled: None) -> None:
    path, tables = tmp_path / "file", KnownTables(tmp_path / "known")
    path.write_bytes(b"one")
    with path.open("rb+") as file:
        fd = file.fileno()
        assert tables.name(fd) == ""
        tables.keep(os.fstat(fd), fd, "its name")
        assert KnownTables(tmp_path / "known").name(fd) == "its name"
        # WHEN it changes, and its times are set back THEN it is another
        before = os.fstat(fd)
        wait_until(lambda: os.utime(path) or path.stat().st_ctime_ns != before.st_ctime_ns)
        os.pwrite(fd, b"two", 0)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert tables.name(fd) == ""
        # AND what was read while it changed is nobody's
        tables.keep(before, fd, "another")
        assert tables.name(fd) == ""


def test_what_may_be_another_file_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tables = tmp_path / "file", KnownTables(tmp_path / "known")
    path.write_bytes(b"one")
    with path.open("rb") as file:
        fd = file.fileno()
        # one that was written a moment ago
        monkeypatch.setattr(known, "_SETTLED_NS", 1 << 62)
        tables.keep(os.fstat(fd), fd, "name")
        assert tables.name(fd) == ""
        # one from before the machine was booted
        monkeypatch.setattr(known, "_SETTLED_NS", -(1 << 62))
        tables.keep(os.fstat(fd), fd, "name")
        monkeypatch.setattr(known, "_BOOT_ID", path)
        assert KnownTables(tmp_path / "known").name(fd) == ""
    # one of a file system that somebody else makes up
    with Path("/proc/version").open("rb") as other:
        tables.keep(os.fstat(other.fileno()), other.fileno(), "name")
        assert tables.name(other.fileno()) == ""
