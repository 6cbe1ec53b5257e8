# SPDX-License-Identifier: Apache-2.0
"""Functions of device APIs are found where a file defines them, and damaged files cost nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.elf.image import BadElf
from aiflame.agent.launches.symbols import ApiFunction, find_functions
from aiflame.agent.target_files import TargetFile
from elfbytes import GLOBAL, IFUNC, LOCAL, OBJECT, WEAK, Elf, Section, Symbol

NAMES = frozenset(("cudaLaunchKernel", "__cudaLaunchKernel", "cuLaunch", "clEnqueueNDRangeKernel"))


@pytest.fixture
def find(tmp_path: Path) -> Callable[..., dict[str, ApiFunction]]:
    """`find(elf)`: what is found in a file that is made of an `Elf` or of bytes."""

    def found(elf: Elf | bytes, names: frozenset[str] = NAMES) -> dict[str, ApiFunction]:
        path = tmp_path / "file"
        path.write_bytes(elf if isinstance(elf, bytes) else elf.build())
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return find_functions(TargetFile(descriptor), names)
        finally:
            os.close(descriptor)

    return found


Find = Callable[..., dict[str, ApiFunction]]
TEXT = bytes(range(256)) * 16


@pytest.mark.parametrize("table", ["symbols", "dynamic_symbols"])
def test_a_function_is_where_the_bytes_are(find: Find, table: str) -> None:
    elf = Elf(text=TEXT, text_address=0x5000)
    getattr(elf, table).extend([Symbol("x", 0x5000, 4), Symbol("cuLaunch", 0x5123, 16)])
    found = find(elf)["cuLaunch"]
    assert elf.build()[found.file_offset :][:16] == TEXT[0x123:0x133] == found.code
    assert (found.name, found.size_bytes) == ("cuLaunch", 16)


def test_only_functions_that_are_defined_here_count(find: Find) -> None:
    elf = Elf(
        dynamic_symbols=[
            Symbol("cudaLaunchKernel", 0, 0, section="undefined"),
            Symbol("__cudaLaunchKernel", 0x1100, 8, kind=OBJECT),
            Symbol("cuLaunch", 0x1200, 8, kind=IFUNC),
            Symbol("clEnqueueNDRangeKernel_not", 0x1300, 8),
            Symbol("clEnqueueNDRangeKerne", 0x1300, 8),
        ]
    )
    assert find(elf) == {}


def test_name_may_be_the_end_of_another(find: Find) -> None:
    # GIVEN a string table in which one name is stored as the end of a longer one
    elf = Elf(dynamic_symbols=[Symbol("__cudaLaunchKernel", 0x1100, 8), Symbol("@", 0x1200, 8)])
    data = bytearray(elf.build())
    strings = data.index(b"\0__cudaLaunchKernel\0")
    symbol = data.index((0x1200).to_bytes(8, "little")) - 8
    data[symbol : symbol + 4] = (3).to_bytes(4, "little")
    assert data[strings + 3 :].startswith(b"cudaLaunchKernel\0")
    # WHEN it is read THEN both are found
    found = find(bytes(data))
    base = found["__cudaLaunchKernel"].file_offset
    assert found["cudaLaunchKernel"].file_offset == base + 0x100


@pytest.mark.parametrize("order", [1, -1])
def test_global_function_is_preferred(find: Find, order: int) -> None:
    symbols = [
        Symbol("cuLaunch", 0x1100, 8, bind=LOCAL),
        Symbol("cuLaunch", 0x1200, 8, bind=WEAK),
        Symbol("cuLaunch", 0x1300, 8, bind=GLOBAL),
    ]
    text = TEXT[:0x300] + b"global" + bytes(0x1000)
    found = find(Elf(symbols=symbols[::order], text=text))["cuLaunch"]
    assert found.code.startswith(b"global")


def test_function_without_a_size_has_code(find: Find) -> None:
    found = find(Elf(symbols=[Symbol("cuLaunch", 0x1100, 0)], text=TEXT))["cuLaunch"]
    assert found.size_bytes == 0
    assert found.code.startswith(TEXT[0x100:0x140])


def test_huge_function_is_cut(find: Find) -> None:
    found = find(Elf(symbols=[Symbol("cuLaunch", 0x1000, 1 << 40)], text=bytes(1 << 18)))
    assert len(found["cuLaunch"].code) == 64 * 1024


def test_address_outside_of_code_is_not_found(find: Find) -> None:
    assert find(Elf(symbols=[Symbol("cuLaunch", 0x900000, 8)])) == {}


@pytest.mark.parametrize("back", [0, 1, 5, 8, 9, 17])
def test_names_across_pieces_are_found(find: Find, back: int) -> None:
    # GIVEN a table of names that is read in pieces of 128 KiB, and a name on the seam
    filler = Symbol("f" * ((1 << 20) - 2 - back), 0x1000, 4)
    elf = Elf(symbols=[filler, Symbol("__cudaLaunchKernel", 0x1100, 8)])
    assert set(find(elf)) == {"__cudaLaunchKernel"}


def test_many_symbols_are_searched_in_pieces(find: Find) -> None:
    symbols = [Symbol(f"s{index}", 0x1000, 4) for index in range(100_000)]
    symbols.append(Symbol("cuLaunch", 0x1100, 8))
    assert set(find(Elf(symbols=symbols))) == {"cuLaunch"}


def test_names_that_repeat_without_end_are_refused(find: Find) -> None:
    strings = Section(".dynstr", b"\0" + b"cuLaunch\0" * 100_000, "strtab")
    table = Section(".dynsym", bytes(48), "dynsym", link=".dynstr", entry_size=24)
    with pytest.raises(BadElf, match="repeat"):
        find(Elf(sections=[strings, table]))


def test_symbols_that_repeat_without_end_are_refused(find: Find) -> None:
    symbol = b"\x01\0\0\0\x12\0\x01\0" + (0x1000).to_bytes(8, "little") + bytes(8)
    strings = Section(".dynstr", b"\0cuLaunch\0", "strtab")
    table = Section(".dynsym", symbol * 100_000, "dynsym", link=".dynstr", entry_size=24)
    with pytest.raises(BadElf, match="repeat"):
        find(Elf(sections=[strings, table]))


def test_nothing_asked_for_is_nothing_read() -> None:
    assert find_functions(TargetFile(-1), frozenset()) == {}


def test_file_that_is_no_elf_is_refused(find: Find) -> None:
    with pytest.raises(BadElf):
        find(b"#!/bin/sh\n")


def test_damaged_files_are_refused_or_harmless(find: Find) -> None:
    # GIVEN a sound file, and copies with damaged bytes and of every length
    whole = Elf(
        symbols=[Symbol("cuLaunch", 0x1100, 8)],
        dynamic_symbols=[Symbol("cudaLaunchKernel", 0x1200, 8)],
        text=bytes(0x300),
    ).build()
    random = np.random.default_rng(7)
    for _ in range(400):
        data = bytearray(whole)
        for offset in random.integers(0, len(data), 3).tolist():
            data[offset] = int(random.integers(256))
        cut = int(random.integers(1, len(data))) if random.random() < 0.3 else len(data)
        # WHEN they are read THEN nothing but a refusal is raised
        try:
            found = find(bytes(data[:cut]))
        except BadElf:
            continue
        assert set(found) <= NAMES
        assert all(0 <= function.file_offset < cut for function in found.values())


def test_compiled_library_is_read_as_its_linker_wrote_it(find: Find, tmp_path: Path) -> None:
    source = tmp_path / "api.c"
    source.write_text(
        "int other(int); int cuLaunch(int a) { return other(a) + 1; }"
        "int cudaLaunchKernel(int a) { return a * 3; }"
    )
    library = tmp_path / "libapi.so"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60
    )
    found = find(library.read_bytes())
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
    ).stdout
    addresses = {line.split()[2]: int(line.split()[0], 16) for line in lines.splitlines()}
    # A small library's code lies in the file where it lies in memory.
    assert {name: function.file_offset for name, function in found.items()} == {
        name: addresses[name] for name in ("cuLaunch", "cudaLaunchKernel")
    }
