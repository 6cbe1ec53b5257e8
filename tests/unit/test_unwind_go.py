# SPDX-License-Identifier: Apache-2.0
"""Rows of Go's functions from tables that are built here."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiflame.agent.errors import AiflameError
from aiflame.agent.unwind.table import UnwindTable
from aiflame.agent.unwind.x86_64 import RbpKind, Rule, RuleKind
from cfibytes import FRAMES, TEXT, Frames, table_of
from elfbytes import Elf, Section
from gobytes import BEGINS_STACK, CHANGES_STACK, GO_1_18, GO_1_20, GoFunction, go_table

_TEXT_BYTES = 0x1000
_AT_CALL = Rule(RuleKind.RSP, RbpKind.SAME, 0, 8)
_IN_FRAME = Rule(RuleKind.RSP, RbpKind.AT_CFA, -16, 0x28)

_FUNCTIONS = (
    GoFunction(0, "runtime.goexit", flags=BEGINS_STACK),
    GoFunction(0x20, "main.f", ((0, 7), (0x20, 0x30), (0, 1))),
    GoFunction(0x60, "runtime.systemstack", flags=CHANGES_STACK),
    GoFunction(0x80, "runtime.mcall", flags=CHANGES_STACK),
    GoFunction(0xA0, "runtime.sigreturn"),
    GoFunction(0xC0, "main.without", ()),
    GoFunction(0xE0, "main.g", ((0, 0x40),)),
    GoFunction(0x120, "_rt0_amd64_linux", ()),
)
_ENTRY, _END = 0x120, 0x130


def _table(
    functions: Sequence[GoFunction], end: int, magic: int = GO_1_20, code: int = TEXT
) -> bytes:
    return go_table(functions, end, magic, code)


def _elf(go: bytes, *others: Section, name: str = ".gopclntab", entry: int = _ENTRY) -> bytes:
    sections = [Section(name, go, flags=2, address=0x20000), *others]
    header = {"entry": TEXT + entry}
    text = b"\xcc" * _TEXT_BYTES
    return Elf(sections=sections, text=text, text_address=TEXT, header=header).build()


def _rules(table: UnwindTable, *offsets: int) -> list[Rule]:
    return [table.lookup(TEXT + offset) for offset in offsets]


@pytest.mark.parametrize("magic", [GO_1_18, GO_1_20])
@pytest.mark.parametrize("name", [".gopclntab", ".data.rel.ro.gopclntab"])
@pytest.mark.parametrize("code", [TEXT, 0], ids=["placed", "relocated"])
def test_functions_of_go_have_rows(tmp_path: Path, magic: int, name: str, code: int) -> None:
    table = table_of(_elf(_table(_FUNCTIONS, _END, magic, code), name=name), tmp_path)
    assert _rules(table, 0x20, 0x26, 0x27, 0x56, 0x57) == [
        *(_AT_CALL, _AT_CALL, _IN_FRAME, _IN_FRAME, _AT_CALL)
    ]
    assert _rules(table, 0xE0, 0x11F) == [_AT_CALL, _AT_CALL]
    assert _rules(table, _END, 0xC0) == [Rule(RuleKind.NO_CFI, RbpKind.SAME, 0, 0)] * 2
    assert not table.drops


def test_stacks_begin_and_change_where_go_says_so(tmp_path: Path) -> None:
    table = table_of(_elf(_table(_FUNCTIONS, _END)), tmp_path)
    kinds = [rule.kind for rule in _rules(table, 0, 0x60, 0x80)]
    assert kinds == [RuleKind.UNDEFINED_RA, RuleKind.OTHER_STACK, RuleKind.UNDEFINED_RA]
    # A handler's caller is looked up at the byte before the one that it returns to.
    signal = Rule(RuleKind.SIGNAL, RbpKind.AT_RSP, 120, 160)
    assert _rules(table, 0x9F, 0xA0) == [signal, signal]
    assert _rules(table, 0x9E)[0].kind == RuleKind.UNDEFINED_RA


def test_what_a_c_compiler_said_is_not_overruled(tmp_path: Path) -> None:
    frames = Frames()
    frames.fde(frames.cie(), TEXT + 0x20, 0x40)
    sections = Section(".eh_frame", bytes(frames.body), flags=2, address=FRAMES)
    go = _table([GoFunction(0x20, "main.f", ((0x20, 0x40),)), GoFunction(0x60, "main.g")], 0x80)
    table = table_of(_elf(go, sections), tmp_path)
    assert _rules(table, 0x30, 0x60) == [_AT_CALL, _AT_CALL]


def test_debug_information_of_go_is_not_taken_for_it(tmp_path: Path) -> None:
    debug = Frames(is_eh=False)
    debug.absolute_fde(debug.cie(augmentation=b""), TEXT, _END)
    go = _elf(_table(_FUNCTIONS, _END), Section(".debug_frame", bytes(debug.body)))
    assert _rules(table_of(go, tmp_path), 0)[0].kind == RuleKind.UNDEFINED_RA


def test_code_that_was_moved_by_a_linker_has_no_rows(tmp_path: Path) -> None:
    go = _elf(_table(_FUNCTIONS, _END, code=0), entry=0x160)  # C's code comes first
    assert table_of(go, tmp_path).drops["table of Go"] == 1


# Other data, of which a part looks like a table that is at no multiple of a pointer's size.
_OTHER_DATA = bytes(44) + struct.pack("<IHBB", GO_1_20, 0, 1, 8) + bytes(4)


@pytest.mark.parametrize("magic", [GO_1_18, GO_1_20])
def test_a_table_is_found_among_other_data(tmp_path: Path, magic: int) -> None:
    # GIVEN a program at any address that calls C, as Go 1.18 to 1.25 have C's linker make it
    data = _OTHER_DATA + _table(_FUNCTIONS, _END, magic)
    sections = Section(".go.buildinfo", b"\xff Go buildinf:", flags=3, address=0x40000)
    table = table_of(_elf(data, sections, name=".data.rel.ro", entry=0x160), tmp_path)
    assert _rules(table, 0x20, 0x27) == [_AT_CALL, _IN_FRAME]
    # It is no table where no other sign of Go is.
    other = table_of(_elf(data, name=".data.rel.ro"), tmp_path)
    assert _rules(other, 0x27)[0].kind == RuleKind.NO_CFI and not other.drops


@pytest.mark.parametrize("is_own", [True, False])
def test_where_code_begins_is_told_by_what_the_runtime_knows(tmp_path: Path, is_own: bool) -> None:
    # GIVEN a program that calls C, as C's linker makes it of what Go from 1.26 on gives it
    module = struct.pack("<Q168xQ", 0x20000 if is_own else 0x30000, TEXT + 0x100)
    section = Section(".go.module", module, flags=3, address=0x40000)
    table = table_of(_elf(_table(_FUNCTIONS, _END, code=0), section, entry=0x50), tmp_path)
    assert bool(table.drops) == (not is_own)
    expected = [_AT_CALL, _IN_FRAME] if is_own else [Rule(RuleKind.NO_CFI, RbpKind.SAME, 0, 0)] * 2
    assert _rules(table, 0x120, 0x127) == expected


def test_one_long_list_for_many_functions_is_refused(tmp_path: Path) -> None:
    steps = [(at % 2, 1) for at in range(20_000)]
    table = bytearray(_table([GoFunction(0, "main.f", steps)], 1))
    count = 1000
    index = b"".join(struct.pack("<II", at, 8 * count + 4) for at in range(count))
    (functions_at,) = struct.unpack_from("<Q", table, 64)
    record = bytes(table[functions_at + 12 :])
    table[functions_at:] = index + struct.pack("<I", count) + record
    struct.pack_into("<Q", table, 8, count)
    assert table_of(_elf(bytes(table)), tmp_path).drops["table of Go"] == 1


def test_a_table_of_another_version_is_counted(tmp_path: Path) -> None:
    table = table_of(_elf(_table(_FUNCTIONS, _END, magic=0xFFFFFFFA)), tmp_path)
    assert table.drops["table of Go"] == 1


def test_random_damage_costs_rows_at_most(tmp_path: Path) -> None:
    rng = random.Random(11)
    sound = _table(_FUNCTIONS, _END)
    refused = 0
    for _ in range(400):
        data = bytearray(sound)
        for _ in range(rng.choice((1, 4, 40))):
            data[rng.randrange(len(data))] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            table = table_of(_elf(bytes(data)), tmp_path)
        except AiflameError:
            continue
        refused += table.drops.get("table of Go", 0)
    assert 100 < refused < 400
