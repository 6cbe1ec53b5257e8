# SPDX-License-Identifier: Apache-2.0
"""Symbols of ELF files: found by name, and functions as they lie."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from aiflame.agent.elf.functions import FunctionNames, function_ranges
from aiflame.agent.elf.image import BadElf, ElfImage
from aiflame.agent.elf.symbols import (
    MAX_NAME_BYTES,
    find_symbols,
    find_symbols_beginning,
    first_symbols,
    read_names,
    symbol_sections,
)
from aiflame.agent.target_files import TargetFile
from elfbytes import GLOBAL, LOCAL, NOTYPE, OBJECT, WEAK, Elf, Section, Symbol

Opened = Callable[[Elf | bytes], tuple[TargetFile, ElfImage]]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """`opened(elf)`: a file with these bytes, and its headers."""
    descriptors = []

    def make(elf: Elf | bytes) -> tuple[TargetFile, ElfImage]:
        descriptors.append(os.memfd_create("elf"))
        os.write(descriptors[-1], elf if isinstance(elf, bytes) else elf.build())
        file = TargetFile(descriptors[-1])
        return file, ElfImage.read(file)

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


def test_symbols_are_found_in_both_tables_the_complete_one_first(opened: Opened) -> None:
    elf = Elf(
        symbols=[Symbol("both", 0x1000, 8), Symbol("data", 0x1100, 4, OBJECT, LOCAL)],
        dynamic_symbols=[Symbol("both", 0x1000, 16, bind=WEAK), Symbol("absent", 0, 0, section="")],
    )
    found = find_symbols(*opened(elf), (b"both", b"data", b"absent", b"bot", b"oth"))
    assert [(s.name, s.address, s.size, s.binding, s.is_dynamic) for s in found] == [
        (b"both", 0x1000, 8, GLOBAL, False),
        (b"data", 0x1100, 4, LOCAL, False),
        (b"both", 0x1000, 16, WEAK, True),
    ]
    assert first_symbols(*opened(elf), [b"both"])[b"both"].size == 8


def test_short_names_are_found_at_the_start_of_a_table(opened: Opened) -> None:
    found = find_symbols(*opened(Elf(symbols=[Symbol("f", 0x1000, 8)])), [b"f", b"a_longer_name"])
    assert [symbol.name for symbol in found] == [b"f"]


def test_symbols_are_found_by_their_beginning(opened: Opened) -> None:
    names = ("eval.cold", "eval", "an_eval.x", "eval.part.0", "eva")
    elf = Elf(symbols=[Symbol(name, 0x1000 + 16 * at, 8) for at, name in enumerate(names)])
    found = find_symbols_beginning(*opened(elf), b"eval.")
    assert {symbol.name: symbol.address for symbol in found} == {
        b"eval.cold": 0x1000,
        b"eval.part.0": 0x1030,
    }


@pytest.mark.parametrize("seam", [131_060, 131_071, 131_072, 131_073, 131_080])
def test_symbols_by_their_beginning_across_pieces(opened: Opened, seam: int) -> None:
    elf = Elf(symbols=[Symbol("x" * (seam - 6), 0x1000, 8), Symbol("eval.cold", 0x1010, 8)])
    found = find_symbols_beginning(*opened(elf), b"eval.")
    assert [symbol.name for symbol in found] == [b"eval.cold"]


def test_a_file_for_32_bits_has_symbols(opened: Opened) -> None:
    # GIVEN a 32-bit file with one function
    body = bytearray(52 + 32)
    struct.pack_into("<8I", body, 52, 1, len(body), 0x1000, 0x1000, 64, 64, 5, 4096)
    headers = bytearray(40)
    for name, kind, flags, address, data, link in (
        (1, 1, 6, 0x1000, bytes(64), 0),
        (7, 2, 0, 0, bytes(16) + struct.pack("<3I2BH", 1, 0x1004, 8, 0x12, 0, 1), 3),
        (15, 3, 0, 0, b"\0f32\0", 0),
        (0, 3, 0, 0, b"\0.text\0.symtab\0.strtab\0", 0),
    ):
        location = (address, len(body), len(data), link)
        headers += struct.pack("<10I", name, kind, flags, *location, 0, 1, 0)
        body += data
    fields = (3, 3, 1, 0x1000, 52, len(body), 0, 52, 32, 1, 40, 5, 4)
    struct.pack_into("<16s2H5I6H", body, 0, b"\x7fELF\x01\x01\x01", *fields)
    # WHEN it is read THEN it says the same as a 64-bit one would
    file, image = opened(bytes(body) + bytes(headers))
    assert (image.machine, image.bits, image.entry, image.damage) == ("386", 32, 0x1000, "")
    assert find_symbols(file, image, [b"f32"])[0].address == 0x1004
    starts, ends = function_ranges(file, image)
    assert (starts.tolist(), ends.tolist()) == ([0x1004], [0x100C])


def test_names_are_read_in_the_order_asked_for(opened: Opened) -> None:
    file, image = opened(Elf(symbols=[Symbol("first", 0x1000, 8), Symbol("second", 0x1010, 8)]))
    (sections,) = symbol_sections(image)
    offsets = np.array([7, 1, 9, 7, 0, 5000, 1 << 40], np.uint64)
    names = read_names(file, sections.strings, offsets)
    assert names == [b"second", b"first", b"cond", b"second", b"", b"", b""]


def test_a_long_name_is_cut(opened: Opened) -> None:
    file, image = opened(Elf(symbols=[Symbol("n" * (MAX_NAME_BYTES + 5), 0x1000, 8)]))
    (sections,) = symbol_sections(image)
    (name,) = read_names(file, sections.strings, np.array([1], np.uint64))
    assert name == b"n" * MAX_NAME_BYTES


def test_names_that_overlap_without_end_are_refused(opened: Opened) -> None:
    file, image = opened(Elf(symbols=[Symbol("n" * 200_000, 0x1000, 8)]))
    (sections,) = symbol_sections(image)
    with pytest.raises(BadElf, match="longer"):
        read_names(file, sections.strings, np.arange(200_000, dtype=np.uint64))


def test_ranges_of_functions_are_sorted_and_distinct(opened: Opened) -> None:
    elf = Elf(
        symbols=[
            Symbol("late", 0x1200, 16),
            Symbol("alias", 0x1100, 8),
            Symbol("early", 0x1100, 16),
            Symbol("data", 0x1150, 8, OBJECT),
            Symbol("assembly", 0x1180, 0, NOTYPE),
        ]
    )
    starts, ends = function_ranges(*opened(elf))
    assert starts.tolist() == [0x1100, 0x1180, 0x1200]
    assert ends.tolist() == [0x1110, 0x1200, 0x1210]


def test_function_names_are_those_of_the_table(opened: Opened) -> None:
    elf = Elf(
        symbols=[
            Symbol("local", 0x1100, 16, bind=LOCAL),
            Symbol("global", 0x1100, 16),
            Symbol("next", 0x1110, 8),
            Symbol("absent", 0, 0, section="undefined"),
        ]
    )
    file, image = opened(elf)
    names = FunctionNames(file, image)
    expected = {0x10FF: b"", 0x1100: b"global", 0x110F: b"global", 0x1117: b"next", 0x1118: b""}
    assert {address: names.at(file, address) for address in expected} == expected
    assert names.at(file, -1) == names.at(file, 1 << 64) == b""


def test_a_table_without_names_of_its_own_is_none(opened: Opened) -> None:
    tables = [
        Section(".symtab", bytes(48), "symtab", link=".text", entry_size=24),
        Section(".dynsym", bytes(48), "dynsym", link="nowhere", entry_size=24),
    ]
    file, image = opened(Elf(sections=tables))
    assert symbol_sections(image) == []
    assert find_symbols(file, image, [b"f"]) == []
    assert FunctionNames(file, image).at(file, 0x1000) == b""
