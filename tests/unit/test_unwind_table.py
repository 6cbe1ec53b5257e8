# SPDX-License-Identifier: Apache-2.0
"""Unwind tables: what each CFI instruction means for the rule in force at an address."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import cfibytes
import pytest
from aiflame.agent.symbols.store import Store
from aiflame.agent.unwind import build as build_module
from aiflame.agent.unwind import lockstep
from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.records import BadUnwindInfo
from aiflame.agent.unwind.table import CorruptTable, UnwindTable
from aiflame.agent.unwind.x86_64 import RbpKind, Rule, RuleKind
from cfibytes import (
    EPILOGUE,
    FRAMES,
    PROLOGUE,
    RBP,
    RIP,
    RSP,
    TEXT,
    USUAL,
    Frames,
    advance,
    cfa_expression,
    def_cfa,
    def_cfa_offset,
    elf_with,
    expression,
    offset,
    sleb,
    table_of,
    uleb,
)
from elfbytes import Elf, Section, Symbol

NO_CFI = Rule(RuleKind.NO_CFI, RbpKind.SAME, 0, 0)
UNSUPPORTED = Rule(RuleKind.UNSUPPORTED, RbpKind.SAME, 0, 0)
ROOT = Rule(RuleKind.UNDEFINED_RA, RbpKind.SAME, 0, 0)


def rsp(value: int, saved_rbp: int | None = None) -> Rule:
    return with_rbp(RuleKind.RSP, value, saved_rbp)


def with_rbp(kind: RuleKind, value: int, saved_rbp: int | None = None) -> Rule:
    where = RbpKind.SAME if saved_rbp is None else RbpKind.AT_CFA
    return Rule(kind, where, saved_rbp or 0, value)


def of_program(tmp_path: Path, program: bytes, /, **cie: object) -> UnwindTable:
    frames = Frames()
    frames.fde(frames.cie(**cie), TEXT, 0x1000, program)  # type: ignore[arg-type]
    return table_of(elf_with(frames), tmp_path)


@pytest.fixture(params=["lock-step", "plain"], autouse=True)
def _interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both interpreters must give the same rules."""
    monkeypatch.setattr(lockstep, "_FEW", 1 if request.param == "lock-step" else 1 << 30)


def test_a_function_with_a_frame_pointer(tmp_path: Path) -> None:
    table = of_program(tmp_path, PROLOGUE + EPILOGUE)
    assert table.lookup(TEXT - 1) == NO_CFI
    assert table.lookup(TEXT) == rsp(8)
    assert table.lookup(TEXT + 1) == rsp(16, -16)
    assert table.lookup(TEXT + 4) == with_rbp(RuleKind.RBP, 16, -16)
    assert table.lookup(TEXT + 24) == rsp(8, -16)
    assert table.lookup(TEXT + 0xFFF) == rsp(8, -16)
    assert table.lookup(TEXT + 0x1000) == NO_CFI
    assert table.drops == {}


@pytest.mark.parametrize(
    ("program", "rule"),
    [
        (def_cfa_offset(300), rsp(300)),
        (def_cfa(RSP, 1 << 20), rsp(1 << 20)),
        (def_cfa(RBP, 16), with_rbp(RuleKind.RBP, 16)),
        (def_cfa(10, 0), UNSUPPORTED),
        (def_cfa_offset(1 << 40), UNSUPPORTED),
        (b"\x12" + uleb(RSP) + sleb(-2), rsp(16)),
        (b"\x13" + sleb(-4), rsp(32)),
        (offset(RBP, 2), rsp(8, -16)),
        (b"\x05" + uleb(RBP) + uleb(3), rsp(8, -24)),
        (b"\x11" + uleb(RBP) + sleb(4), rsp(8, -32)),
        (b"\x2f" + uleb(RBP) + uleb(2), rsp(8, 16)),
        (offset(RBP, 2) + b"\x08" + uleb(RBP), rsp(8)),
        (offset(RBP, 2) + b"\xc6", rsp(8)),
        (offset(RBP, 2) + b"\x06" + uleb(RBP), rsp(8)),
        (offset(RBP, 1 << 20), Rule(RuleKind.RSP, RbpKind.UNKNOWN, 0, 8)),
        (b"\x07" + uleb(RBP), Rule(RuleKind.RSP, RbpKind.UNKNOWN, 0, 8)),
        (b"\x09" + uleb(RBP) + uleb(3), Rule(RuleKind.RSP, RbpKind.UNKNOWN, 0, 8)),
        (b"\x14" + uleb(RBP) + uleb(3), Rule(RuleKind.RSP, RbpKind.UNKNOWN, 0, 8)),
        (b"\x15" + uleb(RBP) + sleb(-3), Rule(RuleKind.RSP, RbpKind.UNKNOWN, 0, 8)),
        (b"\x16" + uleb(RBP) + b"\x02\x77\x08", Rule(RuleKind.RSP, RbpKind.UNKNOWN, 0, 8)),
        (b"\x07" + uleb(RIP), ROOT),
        (b"\x07" + uleb(RIP) + b"\xd0", rsp(8)),
        (b"\x09" + uleb(RIP) + uleb(2), UNSUPPORTED),
        (offset(RIP, 2), UNSUPPORTED),
        (b"\x0a" + def_cfa_offset(64) + b"\x0a" + offset(RBP, 2) + b"\x0b\x0b", rsp(8)),
        (b"\x0a" * 10 + def_cfa_offset(64) + b"\x0b" * 9, rsp(8)),
        (b"\x2e" + uleb(1000) + def_cfa_offset(24), rsp(24)),
        (offset(3, 5) + offset(12, 4) + offset(17, 9) + b"\xc3", rsp(8)),
        (b"\x01" + bytes(8), NO_CFI),
        (b"\x3f", NO_CFI),
        (b"\x0b", NO_CFI),
        (b"\x0c\x07", rsp(0)),
    ],
)
def test_one_instruction(tmp_path: Path, program: bytes, rule: Rule) -> None:
    assert of_program(tmp_path, program).lookup(TEXT) == rule


@pytest.mark.parametrize("threshold", [9, 10, 11])
def test_linkage_stub(tmp_path: Path, threshold: int) -> None:
    stub = b"\x77\x08\x80\x00\x3f\x1a" + bytes([0x30 + threshold]) + b"\x2a\x33\x24\x22"
    program = def_cfa_offset(16) + advance(6) + def_cfa_offset(24) + advance(10)
    table = of_program(tmp_path, program + cfa_expression(stub))
    assert table.lookup(TEXT) == rsp(16)
    assert table.lookup(TEXT + 6) == rsp(24)
    assert table.lookup(TEXT + 0x123) == Rule(RuleKind.PLT, RbpKind.SAME, 0, threshold)


def test_realigned_stack(tmp_path: Path) -> None:
    program = def_cfa(10, 0) + advance(10) + expression(RBP, b"\x76\x00")
    program += cfa_expression(b"\x76\x68\x06") + expression(3, b"\x76\x58")
    program += advance(0x1F0) + def_cfa(10, 0) + advance(5) + def_cfa(RSP, 8)
    table = of_program(tmp_path, program)
    assert table.lookup(TEXT) == UNSUPPORTED
    assert table.lookup(TEXT + 10) == Rule(RuleKind.RBP_DEREF, RbpKind.AT_RBP, 0, -24)
    assert table.lookup(TEXT + 0x1FA) == UNSUPPORTED
    # At its `ret` RBP has been popped, whatever the compiler still says.
    assert table.lookup(TEXT + 0x1FF) == Rule(RuleKind.RSP, RbpKind.SAME, 0, 8)


@pytest.mark.parametrize(
    "body", [b"", b"\x76", b"\x76\x80", b"\x70\x08\x06", b"\x76\x08\x06\x06", b"\x77" * 60]
)
def test_other_expressions_end_the_walk(tmp_path: Path, body: bytes) -> None:
    assert of_program(tmp_path, cfa_expression(body)).lookup(TEXT) == UNSUPPORTED


def test_signal_frame(tmp_path: Path) -> None:
    # GIVEN the description that glibc gives of __restore_rt
    program = cfa_expression(b"\x77" + sleb(160) + b"\x06")
    offsets = {8: 40, RBP: 120, 3: 128, RSP: 160, RIP: 168}
    for register, saved_at in offsets.items():
        program += expression(register, b"\x77" + sleb(saved_at))
    table = of_program(tmp_path, program, augmentation=b"zRS", program=def_cfa(RSP, 8))
    assert table.lookup(TEXT) == Rule(RuleKind.SIGNAL, RbpKind.AT_RSP, 120, 160)


def test_signal_frame_of_another_form_is_not_taken_for_a_call(tmp_path: Path) -> None:
    assert of_program(tmp_path, b"", augmentation=b"zRS").lookup(TEXT) == UNSUPPORTED


@pytest.mark.parametrize(
    ("augmentation", "data"),
    [
        (b"zPLR", b"\x9b" + bytes(4) + b"\x1b\x1b"),
        (b"zRB", b"\x1b"),
        (b"zR", b"\x1b\0\0\0"),
    ],
)
def test_augmentations(tmp_path: Path, augmentation: bytes, data: bytes) -> None:
    table = of_program(tmp_path, PROLOGUE, augmentation=augmentation, data=data)
    assert table.lookup(TEXT + 1) == rsp(16, -16)


@pytest.mark.parametrize(
    ("cie", "reason"),
    [
        ({"augmentation": b"zX"}, "bad CIE"),
        ({"augmentation": b"eh"}, "bad CIE"),
        ({"alignment": (0, -8)}, "bad CIE"),
        ({"data": b"\x9b"}, "unknown pointer encoding"),
        ({"data": b"\x3b"}, "unknown pointer encoding"),
        ({"data": b"\x09"}, "unknown pointer encoding"),
        ({"data": b"\xff"}, "bad CIE"),
    ],
)
def test_what_is_not_understood_is_counted(
    tmp_path: Path, cie: dict[str, object], reason: str
) -> None:
    table = of_program(tmp_path, PROLOGUE, **cie)
    assert (len(table), table.drops) == (0, {reason: 1})


def test_other_alignments(tmp_path: Path) -> None:
    table = of_program(tmp_path, PROLOGUE, alignment=(4, -4), program=def_cfa(RSP, 8) + b"\x90\2")
    assert table.lookup(TEXT + 3) == rsp(8)
    assert table.lookup(TEXT + 4) == rsp(16, -8)


def test_64_bit_lengths(tmp_path: Path) -> None:
    frames = Frames()
    frames.fde(frames.cie(is_64=True), TEXT, 16, PROLOGUE, is_64=True)
    assert table_of(elf_with(frames), tmp_path).lookup(TEXT + 1) == rsp(16, -16)


def test_code_between_functions_has_no_rule(tmp_path: Path) -> None:
    frames = Frames()
    cie = frames.cie()
    # The second has no code between it and the first, and the records are out of order.
    frames.fde(cie, TEXT + 0x40, 16, def_cfa_offset(48))
    frames.body += bytes(4)
    frames.fde(cie, TEXT, 16)
    frames.fde(cie, TEXT + 16, 16, def_cfa_offset(32))
    table = table_of(elf_with(frames), tmp_path)
    found = [table.lookup(TEXT + at) for at in (0, 15, 16, 31, 32, 0x3F, 0x40, 0x4F, 0x50)]
    assert found == [rsp(8)] * 2 + [rsp(32)] * 2 + [NO_CFI] * 2 + [rsp(48)] * 2 + [NO_CFI]


def test_the_later_of_overlapping_functions_rules_from_its_start(tmp_path: Path) -> None:
    frames = Frames()
    cie = frames.cie()
    frames.fde(cie, TEXT, 64, advance(32) + def_cfa_offset(80))
    frames.fde(cie, TEXT + 16, 8, def_cfa_offset(48))
    frames.fde(cie, TEXT + 16, 16, def_cfa_offset(56))
    table = table_of(elf_with(frames), tmp_path)
    found = [table.lookup(TEXT + at) for at in (0, 15, 16, 23, 24, 40)]
    assert found == [rsp(8), rsp(8), rsp(48), rsp(48), NO_CFI, NO_CFI]
    assert table.drops == {"overlapped": 2}


def test_rows_past_the_function_are_cut(tmp_path: Path) -> None:
    frames = Frames()
    frames.fde(frames.cie(), TEXT, 16, advance(16) + def_cfa_offset(64) + advance(9))
    table = table_of(elf_with(frames), tmp_path)
    assert [table.lookup(TEXT + at) for at in (15, 16, 30)] == [rsp(8), NO_CFI, NO_CFI]


@pytest.mark.parametrize(
    ("start", "size"), [(0, 64), (TEXT - 8, 16), (TEXT + 0x2FFF8, 16), (TEXT, 0), (0x70000, 4)]
)
def test_functions_outside_code_are_dropped(tmp_path: Path, start: int, size: int) -> None:
    frames = Frames()
    frames.fde(frames.cie(), start, size)
    table = table_of(elf_with(frames), tmp_path)
    assert (len(table), table.drops) == (0, {"outside code": 1})


def test_every_page_begins_with_the_rule_in_force(tmp_path: Path) -> None:
    # GIVEN a function that reaches over two page borders, and one after a gap
    frames = Frames()
    cie = frames.cie()
    frames.fde(cie, TEXT + 0x100, 0x320, def_cfa_offset(64))
    frames.fde(cie, TEXT + 0x640, 16)
    table = table_of(elf_with(frames), tmp_path)
    # THEN each page that has code begins with a row at offset 0
    firsts = table.rows[table.page_first_row[:-1]]
    assert (table.base_page, firsts["offset"].tolist()) == (TEXT >> 9, [0, 0, 0, 0])
    found = [table.lookup(TEXT + at) for at in (0xFF, 0x100, 0x1FF, 0x200, 0x400, 0x420, 0x600)]
    assert found == [NO_CFI, *[rsp(64)] * 4, NO_CFI, NO_CFI]


def test_equal_neighbours_and_equal_rules_are_stored_once(tmp_path: Path) -> None:
    frames = Frames()
    cie = frames.cie()
    for index in range(15):
        # The register saved in between is none that a walk needs.
        frames.fde(cie, TEXT + 32 * index, 32, advance(4) + offset(3, 2) + advance(4) + b"\xc3")
    table = table_of(elf_with(frames), tmp_path)
    assert table.rows.tolist() == [(0, 2), (480, 0)]
    assert table.rules["kind"].tolist() == [0, 7, 1]


def test_debug_frame_only_adds(tmp_path: Path) -> None:
    frames, debug = Frames(), Frames(is_eh=False)
    frames.fde(frames.cie(), TEXT + 16, 16, def_cfa_offset(32))
    cie = debug.cie(augmentation=b"", is_64=False)
    for start in (0, 8, 16, 24, 32):
        debug.absolute_fde(cie, TEXT + start, 8 if start != 8 else 16, def_cfa_offset(64))
    table = table_of(elf_with(frames, debug), tmp_path)
    found = [table.lookup(TEXT + at) for at in (0, 7, 8, 16, 31, 32, 39, 40)]
    assert found == [rsp(64)] * 2 + [NO_CFI] + [rsp(32)] * 2 + [rsp(64)] * 2 + [NO_CFI]


def test_debug_frame_alone(tmp_path: Path) -> None:
    debug = Frames(is_eh=False)
    debug.absolute_fde(debug.cie(augmentation=b""), TEXT, 64, PROLOGUE)
    assert table_of(elf_with(None, debug), tmp_path).lookup(TEXT + 1) == rsp(16, -16)


def test_file_without_cfi_has_an_empty_table(tmp_path: Path) -> None:
    table = table_of(Elf().build(), tmp_path)
    assert len(table) == 0 and table.lookup(0x1000) == NO_CFI


def test_other_machines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadUnwindInfo, match="AARCH64"):
        table_of(Elf(header={"machine": 183}).build(), tmp_path)


def test_cache_gives_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = Frames()
    frames.fde(frames.cie(), TEXT, 64, PROLOGUE)
    frames.fde(0, TEXT + 64, 64, b"\x3f")
    store = Store(tmp_path / "cache")
    built = table_of(elf_with(frames), tmp_path, store)
    # THEN the second time nothing is built
    monkeypatch.setattr(cfibytes, "build", None)
    loaded = table_of(elf_with(frames), tmp_path, store)
    assert loaded.to_chunks(bytes(32)) == built.to_chunks(bytes(32))
    assert loaded.drops == built.drops == {"bad program": 1}


def test_cache_is_not_shared_by_files_that_differ_in_their_cfi(tmp_path: Path) -> None:
    # GIVEN two files of one length, alike at both ends
    store = Store(tmp_path / "cache")
    for words in (32, 48):
        frames = Frames()
        frames.fde(frames.cie(), TEXT, 64, def_cfa_offset(words))
        assert table_of(elf_with(frames), tmp_path, store).lookup(TEXT) == rsp(words)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_table_of_another_version_is_not_used(tmp_path: Path) -> None:
    frames = Frames()
    frames.fde(frames.cie(), TEXT, 64, PROLOGUE)
    store = Store(tmp_path / "cache")
    table = table_of(elf_with(frames), tmp_path, store)
    (file,) = (tmp_path / "cache").iterdir()
    assert build_module.load(file.name, store) is not None
    old = f"{file.stem}.unwind01"
    store.write(old, table.to_chunks(build_module.identity_of(old)))
    assert build_module.load(old, store) is None


def test_damaged_cache_is_built_anew(tmp_path: Path) -> None:
    frames = Frames()
    frames.fde(frames.cie(), TEXT, 64, PROLOGUE)
    store = Store(tmp_path / "cache")
    table_of(elf_with(frames), tmp_path, store)
    (file,) = (tmp_path / "cache").iterdir()
    sound = file.read_bytes()
    for damaged in (sound[:-1], sound[:20], sound[:-4] + b"\xff" * 4, b"x" + sound[1:]):
        file.write_bytes(damaged)
        assert table_of(elf_with(frames), tmp_path, store).lookup(TEXT + 1) == rsp(16, -16)
        assert file.read_bytes() == sound


def test_a_table_of_another_binary_is_refused(tmp_path: Path) -> None:
    frames = Frames()
    frames.fde(frames.cie(), TEXT, 64)
    table = table_of(elf_with(frames), tmp_path)
    data = b"".join(bytes(chunk) for chunk in table.to_chunks(b"a" * 32))
    assert len(UnwindTable.from_mapping(data, b"a" * 32)) == len(table)
    with pytest.raises(CorruptTable, match="another binary"):
        UnwindTable.from_mapping(data, b"b" * 32)


@pytest.mark.parametrize("field", ["kind", "rbp_kind"])
def test_a_table_with_rules_of_no_known_kind_is_refused(tmp_path: Path, field: str) -> None:
    # GIVEN a table as a parser that was taken over may make it, with a checksum that is right
    frames = Frames()
    frames.fde(frames.cie(), TEXT, 64, PROLOGUE)
    table = table_of(elf_with(frames), tmp_path)
    rules = table.rules.copy()
    rules[field][-1] = 200
    forged = replace(table, rules=rules)
    data = b"".join(bytes(chunk) for chunk in forged.to_chunks(b"a" * 32))
    # WHEN it is read THEN it is none, and not an error of whoever looks an address up
    with pytest.raises(CorruptTable, match="kinds"):
        UnwindTable.from_mapping(data, b"a" * 32)


def test_file_without_section_headers(tmp_path: Path) -> None:
    # GIVEN a file with a segment PT_GNU_EH_FRAME instead of section headers
    frames = Frames()
    frames.fde(frames.cie(program=USUAL), TEXT, 64, PROLOGUE)
    header = b"\x01\x1b\x03\x3b" + struct.pack("<i", 4) + bytes(frames.body)
    sound = bytearray(Elf(text=b"\x90" * 0x100, text_address=TEXT, build_id=b"1" * 20).build())
    at = len(sound)
    struct.pack_into("<QHHHHHH", sound, 40, 0, 0, 64, 56, 3, 0, 0)
    # The program headers move to the end: the one of the text, one that maps the frames, and one
    # that points out their header.
    load = bytes(sound[64:120])
    struct.pack_into("<Q", sound, 32, at)
    struct.pack_into("<I", sound, 48, 0)
    struct.pack_into("<HHH", sound, 52, 64, 56, 3)
    frames_at = at + 3 * 56
    header_row = (frames_at, FRAMES_HDR, FRAMES_HDR, len(header), len(header), 4)
    sound += load
    sound += struct.pack("<IIQQQQQQ", 1, 4, *header_row)
    sound += struct.pack("<IIQQQQQQ", 0x6474E550, 4, *header_row)
    table = table_of(bytes(sound) + header, tmp_path)
    assert table.lookup(TEXT + 1) == rsp(16, -16)


# .eh_frame itself then begins at FRAMES, where `Frames` supposes it.
FRAMES_HDR = Frames().address - 8


@pytest.mark.parametrize(
    ("stub", "rows"),
    [
        # jmp *GOT; push $0; jmp head
        ("ff2500000000 6800000000 e900000000", [(0, 16), (6, 24), (16, 11)]),
        # endbr64; push $0; bnd jmp head; nop
        ("f30f1efa 6800000000 f2e900000000 90", [(0, 16), (6, 24), (16, 9)]),
        # no stub after the head
        ("", [(0, 16), (6, 24)]),
    ],
)
def test_lazy_stubs_without_cfi(stub: str, rows: list[tuple[int, int]]) -> None:
    head = bytes.fromhex("ff3500000000 ff2500000000 0f1f4000")
    states = arch.stub_states(head + bytes.fromhex(stub))
    found = [(offset, arch.rule_of(state)) for offset, state in states]
    kinds = [RuleKind.RSP, RuleKind.RSP, RuleKind.PLT]
    assert [(at, rule.cfa_offset) for at, rule in found] == rows
    assert [rule.kind for _, rule in found] == kinds[: len(rows)]


def test_stubs_that_only_jump_leave_the_stack_alone() -> None:
    states = arch.stub_states(bytes.fromhex("f30f1efa ff2500000000 660f1f440000"))
    assert [(at, arch.rule_of(state)) for at, state in states] == [(0, rsp(8))]


_GREENLET = "_ZN8greenlet12UserGreenlet15inner_bootstrapEP9_greenletP7_object"


@pytest.mark.parametrize(
    ("name", "size", "is_start"),
    [
        (_GREENLET, 0x20, True),
        ("_ZN8greenlet12UserGreenlet15inner_bootstrapERNS_4refsE", 0x20, True),
        ("_ZN8greenlet12UserGreenlet13g_initialstubEPv", 0x20, False),
        (f"not{_GREENLET}", 0x20, False),
        # Where it lies about its size, this costs the file's own stacks their callers.
        (_GREENLET, (1 << 64) - 1, True),
        (_GREENLET, 0, False),
    ],
)
def test_a_greenlet_begins_where_no_caller_is(
    tmp_path: Path, name: str, size: int, is_start: bool
) -> None:
    frames = Frames()
    cie = frames.cie()
    for start in (TEXT, TEXT + 0x20, TEXT + 0x40):
        frames.fde(cie, start, 0x20, PROLOGUE)
    section = Section(".eh_frame", bytes(frames.body), flags=2, address=FRAMES)
    symbols = [Symbol(name, TEXT + 0x20, size)]
    elf = Elf(dynamic_symbols=symbols, sections=[section], text=bytes(0x60), text_address=TEXT)
    table = table_of(elf.build(), tmp_path)
    assert table.lookup(TEXT + 0x1F) == with_rbp(RuleKind.RBP, 16, -16)
    for at, rule in ((0, rsp(8)), (1, rsp(16, -16)), (0x1F, with_rbp(RuleKind.RBP, 16, -16))):
        found = table.lookup(TEXT + 0x20 + at)
        assert found == (ROOT if is_start else rule)
    if size == 0x20:
        assert table.lookup(TEXT + 0x40) == rsp(8)
