# SPDX-License-Identifier: Apache-2.0
"""Whole binaries made by the real compiler: lines, inlining, debug files, cache, damage."""

from __future__ import annotations

import lzma
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from aiflame.agent.demangle import Demangler
from aiflame.agent.losses import LossKind
from aiflame.agent.symbols import resolve as symbols_resolve
from aiflame.agent.symbols.frames import SourceFrame
from aiflame.agent.symbols.resolve import DirectAccess, readable
from elfbytes import ALLOC_EXEC, Elf, Section, Symbol

U64 = npt.NDArray[np.uint64]

PROGRAM = """\
#define INLINE static inline __attribute__((always_inline))
#define APART __attribute__((noinline))
volatile int sink;
namespace shop {
INLINE int innermost(int x) { return sink = x * 3; }
INLINE int middle(int x) { return innermost(x) + 1; }
APART int outermost(int x) { return middle(x) * sink; }
template <class T> struct Box { APART T twice(T x) { return sink = x + x; } };
}
int main(int count, char **) {
    shop::Box<int> box;
    return shop::outermost(count) + box.twice(count);
}
"""
OUTERMOST, TWICE = "_ZN4shop9outermostEi", "_ZN4shop3BoxIiE5twiceEi"


def build(directory: Path, *flags: str) -> Path:
    source, program = directory / "shop.cc", directory / "shop"
    source.write_text(PROGRAM)
    subprocess.run(["g++", "-O1", "-Wl,--build-id", *flags, "-o", program, source], check=True)
    return program


def address_of(program: Path, symbol: str) -> int:
    listing = subprocess.run(["nm", program], capture_output=True, text=True, check=True).stdout
    (row,) = [line.split() for line in listing.splitlines() if line.endswith(f" {symbol}")]
    return int(row[0], 16)


class Resolver(symbols_resolve.Resolver):
    """Resolves in this process, which the worker does in two."""

    def __init__(self, cache: Path | None, **limits: int) -> None:
        super().__init__(DirectAccess(cache), **limits)

    def shown(
        self, path: str, root: str, addresses: U64, plain: bool = False
    ) -> list[tuple[SourceFrame, ...]]:
        demangler = None if plain else Demangler()
        return readable(self.resolve(path, root, addresses, plain=plain).chains, demangler)


def resolve(resolver: Resolver, program: Path, *addresses: int, root: str = "") -> list[list[str]]:
    found = resolver.shown(str(program), root, np.array(addresses, dtype=np.uint64))
    return [[frame.name for frame in chain] for chain in found]


@pytest.mark.parametrize("flags", [("-pie",), ("-no-pie",), ("-static",), ("-gdwarf-4", "-gz")])
def test_inlined_functions_with_their_lines(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program = build(tmp_path, "-g", *flags)
    start = address_of(program, OUTERMOST)
    resolver = Resolver(None)
    source = str(tmp_path / "shop.cc")
    whole = resolver.shown(str(program), "", np.arange(start, start + 24, dtype=np.uint64))
    deepest = max(whole, key=len)
    assert deepest == (
        SourceFrame("innermost", source, 5, True),
        SourceFrame("middle", source, 6, True),
        SourceFrame("shop::outermost(int)", source, 7, False),
    )
    assert resolver.problems == []


def test_without_debug_info_there_are_names_only(tmp_path: Path) -> None:
    program = build(tmp_path)
    resolver = Resolver(None)
    start = address_of(program, TWICE)
    (chain,) = resolver.shown(str(program), "", np.array([start], dtype=np.uint64))
    assert chain == (SourceFrame("shop::Box<int>::twice(int)", "", 0, False),)


def test_nothing_outside_every_symbol(tmp_path: Path) -> None:
    program = build(tmp_path, "-g")
    assert resolve(Resolver(None), program, 0, 1 << 40, 2**64 - 1) == [[], [], []]


def split_debug(program: Path, debug: Path, link: bool) -> None:
    debug.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["objcopy", "--only-keep-debug", program, debug], check=True)
    flags = [f"--add-gnu-debuglink={debug}"] if link else []
    subprocess.run(["objcopy", "--strip-all", *flags, program], check=True)


def test_debug_file_by_build_id_in_the_target_root(tmp_path: Path) -> None:
    program = build(tmp_path, "-g")
    start = address_of(program, OUTERMOST)
    notes = subprocess.run(["readelf", "-n", program], capture_output=True, text=True, check=True)
    build_id = notes.stdout.split("Build ID: ")[1].split()[0]
    path = f"root/usr/lib/debug/.build-id/{build_id[:2]}/{build_id[2:]}.debug"
    split_debug(program, tmp_path / path, link=False)
    assert resolve(Resolver(None), program, start) == [[]]
    found = resolve(Resolver(None), program, start, root=str(tmp_path / "root"))
    assert found[0][-1] == "shop::outermost(int)"


@pytest.mark.parametrize("path", ["{dir}/shop.dbg", "{dir}/.debug/shop.dbg", "debug"])
def test_debug_file_by_link(tmp_path: Path, path: str) -> None:
    """GIVEN a link with a checksum, THEN each of its three paths is tried beneath the root."""
    program = build(tmp_path, "-g", "-Wl,--build-id=none")
    start = address_of(program, OUTERMOST)
    root = tmp_path / "root"
    path = path.format(dir="{dir}") if path != "debug" else "/usr/lib/debug{dir}/shop.dbg"
    debug = Path(str(root) + path.format(dir=tmp_path))
    split_debug(program, debug, link=True)
    resolver = Resolver(None)
    fd = os.open(program, os.O_RDONLY)
    try:
        path = Path(f"/proc/{os.getpid()}/fd/{fd}")
        assert resolve(resolver, path, start, root=str(root))[0][-1] == "shop::outermost(int)"
        # A byte more, and the checksum no longer fits.
        debug.write_bytes(debug.read_bytes() + b"x")
        assert resolve(resolver, path, start, root=str(root)) == [[]]
    finally:
        os.close(fd)
    assert {problem.reason for problem in resolver.problems} == {LossKind.BAD_DEBUG_FILE}
    assert "checksum" in resolver.problems[-1].detail


def test_debug_file_of_another_build_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(Elf(build_id=b"1" * 20).build())
    path = tmp_path / "root/usr/lib/debug/.build-id/31" / ("31" * 19 + ".debug")
    path.parent.mkdir(parents=True)
    path.write_bytes(Elf(build_id=b"2" * 20, symbols=[Symbol("forged", 0x1000, 16)]).build())
    resolver = Resolver(None)
    assert resolve(resolver, program, 0x1000, root=str(tmp_path / "root")) == [[]]
    assert [problem.reason for problem in resolver.problems] == [LossKind.BAD_DEBUG_FILE]


def with_debugdata(data: bytes) -> bytes:
    section = Section(".gnu_debugdata", data)
    return Elf(dynamic_symbols=[Symbol("exported", 0x1000, 8)], sections=[section]).build()


def test_mini_debug_data(tmp_path: Path) -> None:
    mini = lzma.compress(Elf(symbols=[Symbol("_ZN4mini8internalEv", 0x1010, 8)]).build())
    program = tmp_path / "program"
    program.write_bytes(with_debugdata(mini))
    found = resolve(Resolver(None), program, 0x1000, 0x1010, 0x1020)
    assert found == [["exported"], ["mini::internal()"], []]


@pytest.mark.parametrize(
    "made",
    [
        lambda: b"",
        lambda: b"not xz",
        lambda: lzma.compress(b"not elf"),
        lambda: lzma.compress(bytes(200_000_000), preset=0)[:-9],
    ],
    ids=["empty", "not xz", "not elf", "bomb"],
)
def test_bad_mini_debug_data_costs_only_itself(tmp_path: Path, made: Callable[[], bytes]) -> None:
    data = made()
    program = tmp_path / "program"
    program.write_bytes(with_debugdata(data))
    resolver = Resolver(None)
    assert resolve(resolver, program, 0x1000) == [["exported"]]
    reasons = [problem.reason for problem in resolver.problems]
    assert reasons == [LossKind.BAD_DEBUG_FILE] * bool(data)


def test_cache_gives_the_same_answers_without_the_tables_of_the_file(tmp_path: Path) -> None:
    program = build(tmp_path, "-g")
    cache = tmp_path / "cache"
    start = address_of(program, OUTERMOST)
    addresses = np.arange(start, start + 64, dtype=np.uint64)
    cold = Resolver(cache).shown(str(program), "", addresses)
    assert sorted(path.suffix for path in cache.iterdir()) == [".lines", ".symbols03"]
    before = {path: path.stat().st_ino for path in cache.iterdir()}
    assert Resolver(cache).shown(str(program), "", addresses) == cold
    assert {path: path.stat().st_ino for path in cache.iterdir()} == before


def test_damaged_cache_is_built_again(tmp_path: Path) -> None:
    program = build(tmp_path, "-g")
    cache = tmp_path / "cache"
    start = address_of(program, OUTERMOST)
    addresses = np.arange(start, start + 64, dtype=np.uint64)
    cold = Resolver(cache).shown(str(program), "", addresses)
    sound = {path: path.read_bytes() for path in cache.iterdir()}
    for path, data in sound.items():
        # The last byte of a table of symbols is padding of its last block of names.
        for damaged in (data[:-1] + b"\xff", data[: len(data) // 2], b"", b"x" * len(data)):
            path.write_bytes(damaged)
            assert Resolver(cache).shown(str(program), "", addresses) == cold
            assert path.read_bytes() == data or damaged == data[:-1] + b"\xff"
            path.write_bytes(data)


def test_missing_and_odd_files_are_counted(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("#!/bin/sh\n")
    resolver = Resolver(None)
    for name in ("none", "fifo", "text"):
        assert resolve(resolver, tmp_path / name, 0x1000) == [[]]
    reasons = [problem.reason for problem in resolver.problems]
    assert reasons == [LossKind.UNREADABLE_BINARY, LossKind.UNREADABLE_BINARY, LossKind.BAD_ELF]


def test_too_much_debug_info_costs_only_the_lines(tmp_path: Path) -> None:
    program = build(tmp_path, "-g")
    resolver = Resolver(None, max_dwarf_bytes=10)
    assert resolve(resolver, program, address_of(program, TWICE)) == [
        ["shop::Box<int>::twice(int)"]
    ]
    assert [problem.reason for problem in resolver.problems] == [LossKind.DEBUG_INFO_TOO_LARGE]


def test_plain_mode_leaves_out_dwarf_and_demangling(tmp_path: Path) -> None:
    program = build(tmp_path, "-g")
    start = np.array([address_of(program, OUTERMOST)], dtype=np.uint64)
    (chain,) = Resolver(None).shown(str(program), "", start, plain=True)
    assert chain == (SourceFrame(OUTERMOST, "", 0, False),)


@pytest.mark.breadth
def test_random_damage_of_a_real_program_costs_only_names(tmp_path: Path) -> None:
    """GIVEN 150 copies with wrong bytes anywhere, THEN none raises, and every answer is shaped."""
    program = build(tmp_path, "-g")
    start = address_of(program, OUTERMOST)
    sound = program.read_bytes()
    choose = random.Random(5)
    lengths = set()
    for _ in range(150):
        data = bytearray(sound)
        for _ in range(choose.randint(1, 40)):
            data[choose.randrange(64, len(data))] = choose.randrange(256)
        program.write_bytes(data)
        (chain,) = resolve(Resolver(None), program, start)
        lengths.add(bool(chain))
    assert True in lengths


def test_section_that_lies_about_its_place_costs_only_itself(tmp_path: Path) -> None:
    liar = Section(".debug_info", b"\xff" * 64, flags=0, size=60)
    text = Section(".text2", b"\x90" * 16, flags=ALLOC_EXEC, address=0x9000)
    program = tmp_path / "program"
    program.write_bytes(Elf(symbols=[Symbol("f", 0x1000, 16)], sections=[liar, text]).build())
    assert resolve(Resolver(None), program, 0x1000) == [["f"]]
