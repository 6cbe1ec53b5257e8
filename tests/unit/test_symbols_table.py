# SPDX-License-Identifier: Apache-2.0
"""Symbol tables: the right name, or none; and a stored table that is the same or refused."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.elf.image import BadElf, ElfImage
from aiflame.agent.symbols.frames import clean_name
from aiflame.agent.symbols.table import CorruptCache, SymbolSource, SymbolTable
from aiflame.agent.target_files import TargetFile
from cfibytes import unwound
from elfbytes import ALLOC_EXEC, FUNC, GLOBAL, IFUNC, LOCAL, NOTYPE, OBJECT, WEAK, Elf, Symbol
from elfbytes import Section as RawSection
from gobytes import GoFunction, go_table


def build(*files: bytes) -> SymbolTable:
    """The table of a file and its debug files."""
    with ExitStack() as stack:
        sources = []
        for data in files:
            fd = os.memfd_create("image")
            stack.callback(os.close, fd)
            os.write(fd, data)
            sources.append(SymbolSource(ElfImage.from_fd(fd), TargetFile(fd)))
        return SymbolTable.build(sources)


def names(table: SymbolTable, *addresses: int) -> list[str | None]:
    found = table.raw_names(np.array(addresses, dtype=np.uint64))
    return [None if name is None else clean_name(name.decode("utf-8", "replace")) for name in found]


def table_of(*symbols: Symbol) -> SymbolTable:
    return build(Elf(symbols=list(symbols)).build())


def test_sizes_are_respected() -> None:
    table = table_of(Symbol("one", 0x1000, 0x10), Symbol("two", 0x1020, 0x10))
    found = names(table, 0xFFF, 0x1000, 0x100F, 0x1010, 0x101F, 0x1020, 0x102F, 0x1030, 2**64 - 1)
    assert found == [None, "one", "one", None, None, "two", "two", None, None]


def test_sizeless_symbol_reaches_to_the_next_of_its_section_only() -> None:
    other = RawSection(".other", b"\x90" * 64, flags=ALLOC_EXEC, address=0x2100)
    data = Elf(
        symbols=[
            Symbol("asm_entry", 0x1000, 0, NOTYPE),
            Symbol("sized", 0x1100, 0x10),
            Symbol("asm_tail", 0x1800, 0),
            Symbol("elsewhere", 0x2100, 0, section=".other"),
        ],
        sections=[other],
    ).build()
    table = build(data)
    assert names(table, 0x1000, 0x10FF, 0x1110, 0x17FF) == ["asm_entry", "asm_entry", None, None]
    assert names(table, 0x1800, 0x1FFF, 0x2000, 0x20FF) == ["asm_tail", "asm_tail", None, None]
    assert names(table, 0x2100, 0x213F, 0x2140) == ["elsewhere", "elsewhere", None]


def test_sizeless_label_inside_a_function_does_not_hide_it() -> None:
    table = table_of(Symbol("outer", 0x1000, 0x100), Symbol("label", 0x1040, 0, NOTYPE, LOCAL))
    assert names(table, 0x1040, 0x1050) == ["outer", "outer"]


def test_sizeless_symbol_of_a_stripped_file_names_nothing() -> None:
    """GIVEN only .dynsym, THEN what lies between its entries is unknown and stays so."""
    data = Elf(dynamic_symbols=[Symbol("exported", 0x1000, 0), Symbol("f", 0x1100, 8)]).build()
    assert names(build(data), 0x1000, 0x1100) == [None, "f"]


def test_innermost_symbol_wins() -> None:
    table = table_of(
        Symbol("outer", 0x1000, 0x100),
        Symbol("inner", 0x1040, 0x20),
        Symbol("head", 0x1000, 0x10),
    )
    found = names(table, 0x1000, 0x1010, 0x103F, 0x1040, 0x105F, 0x1060, 0x10FF, 0x1100)
    assert found == ["head", "outer", "outer", "inner", "inner", "outer", "outer", None]


def test_alias_is_chosen_by_binding_then_length() -> None:
    table = table_of(
        Symbol("z", 0x1000, 16, bind=LOCAL),
        Symbol("longer_name", 0x1000, 16, bind=GLOBAL),
        Symbol("short", 0x1000, 16, bind=GLOBAL),
        Symbol("weak", 0x1000, 16, bind=WEAK),
    )
    assert names(table, 0x1008) == ["short"]


def test_only_code_is_taken() -> None:
    table = table_of(
        Symbol("variable", 0x1000, 8, OBJECT),
        Symbol("$x", 0x1010, 0, NOTYPE, LOCAL),
        Symbol("", 0x1020, 8),
        Symbol("undefined", 0x1030, 8, section="none"),
        Symbol("in_a_note", 0x1040, 8, section=".shstrtab"),
        Symbol("indirect", 0x1050, 8, IFUNC),
    )
    found = names(table, 0x1000, 0x1010, 0x1020, 0x1030, 0x1040, 0x1050)
    assert found == [None, None, None, None, None, "indirect"]


def test_lying_sizes_and_addresses_stay_inside_the_section() -> None:
    table = table_of(
        Symbol("greedy", 0x1F00, 2**64 - 1),
        Symbol("far", 2**64 - 8, 64),
        Symbol("before", 0x10, 0x5000),
    )
    assert names(table, 0x1F00, 0x1FFF, 0x2000, 2**64 - 4) == ["greedy", "greedy", None, None]
    assert names(table, 0x20) == [None]


def test_hostile_names_are_bounded_and_printable() -> None:
    nasty = b"a;b\n<script>\x1b[2J\xff\xfe"
    table = table_of(
        Symbol(nasty, 0x1000, 8), Symbol("n" * 10_000, 0x1010, 8), Symbol("_Z", 0x1020, 8)
    )
    shown, long, odd = names(table, 0x1000, 0x1010, 0x1020)
    assert shown is not None and shown.startswith("a;b\ufffd<script>\ufffd[2J")
    assert long is not None and len(long) == 4096 and long.endswith("…")
    assert odd == "_Z"


def test_symbols_of_several_files_are_merged() -> None:
    main = Elf(dynamic_symbols=[Symbol("exported", 0x1000, 8)]).build()
    mini = Elf(symbols=[Symbol("internal", 0x1010, 8)]).build()
    assert names(build(main, mini), 0x1000, 0x1010) == ["exported", "internal"]


def test_too_many_symbols_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiflame.agent.elf.symbols.MAX_SYMBOLS", 2)
    with pytest.raises(BadElf, match="limit of 2"):
        table_of(*(Symbol(f"f{i}", 0x1000 + i, 1) for i in range(3)))


def test_random_tables_agree_with_a_plain_search() -> None:
    """GIVEN overlapping symbols, THEN each address has the latest start, then the smallest end."""
    choose = random.Random(7)
    for _ in range(20):
        symbols = {}
        for index in range(40):
            start, size = 0x1000 + choose.randrange(300), choose.randrange(1, 60)
            symbols[start, size] = Symbol(f"f{index}", start, size, FUNC)
        table = table_of(*symbols.values())
        for address in range(0xFF0, 0x1180):
            holding = [s for s in symbols.values() if s.value <= address < s.value + s.size]
            best = max(holding, key=lambda s: (s.value, -s.size), default=None)
            assert names(table, address) == [best.name if best else None]


def stored(table: SymbolTable, path: Path) -> bytes:
    path.write_bytes(b"".join(bytes(chunk) for chunk in table.to_chunks()))
    return path.read_bytes()


def reopened(path: Path) -> SymbolTable:
    with path.open("rb") as file:
        return SymbolTable.from_mapping(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def test_stored_table_answers_the_same(tmp_path: Path) -> None:
    symbols = [Symbol(f"function_{i}", 0x1000 + 16 * i, 12) for i in range(200)]
    data = Elf(symbols=symbols).build()
    table = build(data, data)
    stored(table, tmp_path / "t")
    addresses = [0x1000 + i for i in range(0xC90)]
    again = reopened(tmp_path / "t")
    assert names(again, *addresses) == names(table, *addresses)
    assert names(again, 0x1000) == ["function_0"]


def test_empty_table_can_be_stored(tmp_path: Path) -> None:
    stored(SymbolTable.build([]), tmp_path / "t")
    assert names(reopened(tmp_path / "t"), 0, 0x1000) == [None, None]


def test_every_wrong_byte_and_cut_of_a_stored_table_is_noticed(tmp_path: Path) -> None:
    table = table_of(*(Symbol(f"f{i}", 0x1000 + i, 1) for i in range(9)))
    data = stored(table, tmp_path / "t")
    for position in [*range(0, len(data), 37), len(data) - 1]:
        for damaged in (data[:position], data[:position] + b"\xa5" + data[position + 1 :]):
            (tmp_path / "t").write_bytes(damaged)
            if not damaged:
                continue
            with pytest.raises(CorruptCache):
                names(reopened(tmp_path / "t"), *range(0x1000, 0x1009))


def test_plt_stubs_are_named(tmp_path: Path) -> None:
    """GIVEN a real program, THEN the target of its `call puts@plt` is named so."""
    path = tmp_path / "a.c"
    path.write_text("#include <stdio.h>\nint main(int n, char **v) { return puts(v[0]); }")
    program = tmp_path / "a"
    flags = ["-O1", "-fcf-protection=full", "-Wl,-z,ibtplt"]
    built = subprocess.run(["gcc", *flags, "-o", program, path], check=False, capture_output=True)
    if built.returncode:
        subprocess.run(["gcc", "-O1", "-o", program, path], check=True)
    listing = subprocess.run(["objdump", "-d", program], capture_output=True, text=True, check=True)
    (call,) = [line for line in listing.stdout.splitlines() if line.endswith("<puts@plt>")]
    address = int(call.split()[-2], 16)
    table = build(program.read_bytes())
    assert names(table, address, address + 7) == ["puts@plt", "puts@plt"]


def test_stubs_of_functions_that_no_symbol_has(tmp_path: Path) -> None:
    """GIVEN relocations of symbols that the table does not hold, THEN the stubs are nameless."""
    path, program = tmp_path / "a.c", tmp_path / "a"
    path.write_text("#include <stdio.h>\nint main(int n, char **v) { return puts(v[0]); }")
    subprocess.run(["gcc", "-O1", "-o", program, path], check=True)
    data = bytearray(program.read_bytes())
    headers = int.from_bytes(data[40:48], "little")
    (dynsym,) = (
        header
        for header in range(headers, headers + 64 * int.from_bytes(data[60:62], "little"), 64)
        if data[header + 4] == 11
    )
    data[dynsym + 32 : dynsym + 40] = (7).to_bytes(8, "little")
    table = build(bytes(data))
    assert names(table, int.from_bytes(data[24:32], "little")) == ["_start"]


def test_real_program_agrees_with_nm(tmp_path: Path) -> None:
    path = tmp_path / "a.c"
    path.write_text("int f(int x) { return x * 3; }\nint main(int n, char **v) { return f(n); }")
    program = tmp_path / "a"
    subprocess.run(["gcc", "-O0", "-static", "-o", program, path], check=True)
    listing = subprocess.run(["nm", "-S", program], capture_output=True, text=True, check=True)
    rows = [line.split() for line in listing.stdout.splitlines()]
    wanted = {row[3]: int(row[0], 16) for row in rows if len(row) == 4 and row[2] in "Tt"}
    table = build(program.read_bytes())
    assert names(table, wanted["main"], wanted["f"]) == ["main", "f"]
    unnamed = [name for name in wanted if names(table, wanted[name]) == [None]]
    assert len(wanted) > 500 and unnamed == []


def starts(table: SymbolTable, *addresses: int) -> list[int | None]:
    """Where functions begin that have no name."""
    asked = np.array(addresses, dtype=np.uint64)
    found = zip(table.raw_names(asked), table.ranges(asked), strict=True)
    return [around.begin if around and name is None else None for name, around in found]


_FUNCTIONS = ((0x1000, 16), (0x1020, 16), (0x1040, 32))


def test_functions_of_a_stripped_file_are_told_apart_by_where_they_begin(tmp_path: Path) -> None:
    # One has a name, and so has a part of another.
    symbols = [Symbol("exported", 0x1020, 16), Symbol("part", 0x1050, 8)]
    table = build(unwound(Elf(dynamic_symbols=symbols), *_FUNCTIONS))
    stored = tmp_path / "table"
    stored.write_bytes(b"".join(bytes(chunk) for chunk in table.to_chunks()))
    with stored.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for each in (table, SymbolTable.from_mapping(mapping)):
        asked = (0xFFF, 0x1000, 0x100F, 0x1010, 0x1020, 0x1040, 0x1050, 2**64 - 1)
        assert starts(each, *asked) == [None, 0x1000, 0x1000, *[None] * 5]
        assert names(each, 0x1000, 0x1020, 0x1040, 0x1050) == [None, "exported", None, "part"]


def test_functions_of_a_file_with_all_symbols_are_what_these_say() -> None:
    data = unwound(Elf(symbols=[Symbol("f", 0x1020, 16)]), *_FUNCTIONS)
    assert starts(build(data), 0x1000, 0x1020) == [None, None]
    # So are those of one that has a debug file.
    stripped = unwound(Elf(dynamic_symbols=[Symbol("f", 0x1020, 16)]), *_FUNCTIONS)
    assert starts(build(stripped), 0x1000) == [0x1000]
    debug = Elf(symbols=[Symbol("g", 0x1800, 16)]).build()
    assert starts(build(stripped, debug), 0x1000) == [None]


def test_a_file_without_any_name_has_functions_all_the_same() -> None:
    assert starts(build(unwound(Elf(), *_FUNCTIONS)), 0x1000, 0x102F) == [0x1000, 0x1020]


def _go(damage: int = 0, **symbols: list[Symbol]) -> bytes:
    functions = [GoFunction(0x10, "main.main"), GoFunction(0x30, "main.(*T[...]).run")]
    functions.append(GoFunction(0x60, "_rt0_amd64_linux", ()))
    table = bytearray(go_table(functions, 0x80, code=0x1000))
    table[0] ^= damage
    section = RawSection(".gopclntab", bytes(table), flags=2, address=0x20000)
    return Elf(sections=[section], **symbols).build()


def test_stripped_go_has_the_names_of_its_own_table() -> None:
    table = build(_go())
    assert names(table, 0x1010, 0x102F, 0x1030, 0x105F) == [
        *("main.main", "main.main", "main.(*T[...]).run", "main.(*T[...]).run")
    ]
    assert names(table, 0x100F, 0x1080) == [None, None]


def test_names_of_c_in_go_are_those_of_its_symbols() -> None:
    exported = Symbol("exported", 0x1030, 0x30, FUNC, GLOBAL)
    assert names(build(_go(dynamic_symbols=[exported])), 0x1010, 0x1030) == [
        *("main.main", "exported")
    ]
    whole = [Symbol("main.start", 0x1010, 0x20, FUNC, GLOBAL)]
    assert names(build(_go(symbols=whole)), 0x1010, 0x1030) == ["main.start", None]


def test_a_table_of_go_that_is_damaged_costs_names_only() -> None:
    dynamic = [Symbol("exported", 0x1030, 0x30, FUNC, GLOBAL)]
    assert names(build(_go(2, dynamic_symbols=dynamic)), 0x1010, 0x1030) == [None, "exported"]
