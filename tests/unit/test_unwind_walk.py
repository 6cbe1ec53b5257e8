# SPDX-License-Identifier: Apache-2.0
"""The replay walker on small made-up stacks: every rule, and every way to end."""

from __future__ import annotations

import numpy as np
import pytest
from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.table import UnwindTable
from aiflame.agent.unwind.walk import FoundBy, Mapping, ReplayWalker, Walk, WalkEnd
from cfibytes import (
    PROLOGUE,
    RBP,
    RBX,
    RIP,
    RSP,
    TEXT,
    Frames,
    cfa_expression,
    def_cfa,
    def_cfa_offset,
    elf_with,
    expression,
    sleb,
    table_of,
    uleb,
)

BIAS = 0x7F00_0000_0000
STACK = 0x7FFD_0000_0000
JIT = 0x1234_0000
CALL = 0xE8 << 24  # call rel32 in the last five bytes of a word
PLT = b"\x77\x08\x80\x00\x3f\x1a\x3b\x2a\x33\x24\x22"
# Where the functions of the test library are
ROOT, PLAIN, WITH_RBP, STUB, REALIGNED, SIGNAL, ODD, LOSES_RBP, IN_RBX, NO_CFI = range(
    TEXT, TEXT + 0xA00, 0x100
)
IN_SLOT = OTHER = WITH_RBP  # in tables of their own


def code(offset: int, after: int = 8) -> int:
    return BIAS + offset + after


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> UnwindTable:
    frames = Frames()
    cie, signal_cie = frames.cie(), frames.cie(augmentation=b"zRS")
    frames.fde(cie, ROOT, 0x100, b"\x07" + uleb(RIP))
    frames.fde(cie, PLAIN, 0x100, def_cfa_offset(32))
    frames.fde(cie, WITH_RBP, 0x100, PROLOGUE)
    frames.fde(cie, STUB, 0x100, cfa_expression(PLT))
    realigned = expression(RBP, b"\x76\0") + cfa_expression(b"\x76" + sleb(-8) + b"\x06")
    frames.fde(cie, REALIGNED, 0x100, realigned)
    signal = cfa_expression(b"\x77" + sleb(160) + b"\x06")
    for register, offset in ((RBP, 120), (RSP, 160), (RIP, 168)):
        signal += expression(register, b"\x77" + sleb(offset))
    frames.fde(signal_cie, SIGNAL, 0x100, signal)
    frames.fde(cie, ODD, 0x100, cfa_expression(b"\x70\0"))
    frames.fde(cie, LOSES_RBP, 0x100, b"\x07" + uleb(RBP))
    frames.fde(cie, IN_RBX, 0x100, def_cfa(RBX, 32))
    return table_of(elf_with(frames), tmp_path_factory.mktemp("walk"))


def walk(
    library: UnwindTable, words: dict[int, int], registers: tuple[int, ...], depth: int = 127
) -> Walk:
    """Walk with code at BIAS and JIT; `words` are by distance from the stack's start.

    All code is calls: 8-aligned addresses follow one, others do not.
    """
    memory = {STACK + offset: word for offset, word in words.items()}
    mappings = [
        Mapping(BIAS + TEXT, BIAS + TEXT + 0x1000, BIAS, library),
        Mapping(JIT, JIT + 0x1000, 0, None),
    ]

    def read(address: int) -> int | None:
        in_code = any(mapping.start <= address < mapping.end for mapping in mappings)
        return CALL if in_code else None

    rip, rsp, *others = registers
    return ReplayWalker(mappings, memory.get, depth, read).walk(rip, STACK + rsp, *others)


def addresses(found: Walk) -> list[int]:
    return [frame.address for frame in found.frames]


def test_from_leaf_to_root(library: UnwindTable) -> None:
    words = {24: code(WITH_RBP), 64: STACK + 0x500, 72: code(STUB, 11), 88: code(ROOT)}
    found = walk(library, words, (code(PLAIN), 0, STACK + 64))
    assert found.end == WalkEnd.ROOTED
    assert addresses(found) == [code(PLAIN), code(WITH_RBP), code(STUB, 11), code(ROOT)]
    assert [frame.is_exact for frame in found.frames] == [True, False, False, False]


@pytest.mark.parametrize(("after", "slot"), [(0, 0), (10, 0), (11, 8), (15, 8)])
def test_linkage_stub_before_and_after_its_push(
    library: UnwindTable, after: int, slot: int
) -> None:
    found = walk(library, {slot: code(ROOT)}, (code(STUB, after), 0, 0))
    assert found.end == WalkEnd.ROOTED


def test_realigned_stack(library: UnwindTable) -> None:
    # GIVEN the CFA at RBP - 8 and the caller's RBP at RBP
    words = {0x40 - 8: STACK + 0x80, 0x40: STACK + 0xA0, 0x78: code(WITH_RBP)}
    words |= {0xA0: 0, 0xA8: code(ROOT)}
    found = walk(library, words, (code(REALIGNED), 0, STACK + 0x40))
    assert addresses(found) == [code(REALIGNED), code(WITH_RBP), code(ROOT)]
    assert found.end == WalkEnd.ROOTED


def test_through_a_signal_handler(library: UnwindTable) -> None:
    # GIVEN a handler on a stack above the one it interrupted, at a function's first instruction
    words = {0x1018: code(SIGNAL), 0x1020 + 160: STACK, 0x1020 + 168: code(PLAIN, 0)}
    words |= {0x1020 + 120: 77, 24: code(ROOT)}
    found = walk(library, words, (code(PLAIN), 0x1000, 0))
    assert addresses(found) == [code(PLAIN), code(SIGNAL), code(PLAIN, 0), code(ROOT)]
    assert [frame.is_exact for frame in found.frames] == [True, False, True, False]


def test_frame_pointers_where_there_is_no_table(library: UnwindTable) -> None:
    words = {32: STACK + 64, 40: JIT + 8, 64: 0, 72: code(ROOT)}
    found = walk(library, words, (code(NO_CFI), 0, STACK + 32))
    assert [frame.found_by for frame in found.frames] == [
        FoundBy.REGISTERS,
        FoundBy.FRAME_POINTER,
        FoundBy.FRAME_POINTER,
    ]
    assert found.end == WalkEnd.ROOTED


def test_rbx_leads_on_from_the_leaf_only(library: UnwindTable) -> None:
    words = {8: code(IN_RBX), 0x60 - 8: code(ROOT)}
    rbx = STACK + 0x40
    found = walk(library, words, (code(IN_RBX), 0, 0, rbx))
    assert addresses(found) == [code(IN_RBX), code(ROOT)]
    assert found.end == WalkEnd.ROOTED and found.frames[1].found_by == FoundBy.HEURISTIC
    # A callee may have another RBX.
    found = walk(library, {**words, 0: code(IN_RBX)}, (code(LOSES_RBP), 0, 0, rbx))
    assert addresses(found) == [code(LOSES_RBP), code(IN_RBX)]
    assert found.end == WalkEnd.UNSUPPORTED


def test_rbx_that_is_something_else_leads_nowhere(library: UnwindTable) -> None:
    for rbx, end in ((0, WalkEnd.BAD_ADDRESS), (STACK + 0x40, WalkEnd.NO_TABLE)):
        found = walk(library, {0x60 - 8: 1234}, (code(IN_RBX), 0, 0, rbx))
        assert (addresses(found), found.end) == ([code(IN_RBX)], end)


@pytest.mark.parametrize(
    ("words", "frames", "end"),
    [
        # At any depth, as the register that it is read by is known at any.
        ({0: code(IN_SLOT), 8 + 0x98: STACK + 0x200, 0x240: code(NO_CFI)}, 3, WalkEnd.ROOTED),
        ({0: code(IN_SLOT), 8 + 0x98: STACK - 0x100}, 2, WalkEnd.BAD_ADDRESS),
        ({0: code(IN_SLOT), 8 + 0x98: STACK + 0x200}, 2, WalkEnd.UNREADABLE),
        ({0: code(IN_SLOT)}, 2, WalkEnd.UNREADABLE),
        ({0: code(IN_SLOT), 8 + 0x98: STACK + 0x200, 0x240: 1234}, 2, WalkEnd.NO_TABLE),
    ],
)
def test_a_stack_pointer_in_the_stack_leads_on(
    words: dict[int, int], frames: int, end: WalkEnd
) -> None:
    forms = {
        PLAIN: (arch.RSP, 8),
        IN_SLOT: (arch.CFA_RSP_SLOT, arch.slot_and_offset(0x98, 0x48)),
    }
    states = [arch.with_ra(arch.with_cfa(0, *form), arch.RA_AT_CFA_8) for form in forms.values()]
    states.append(arch.with_ra(states[0], arch.RA_UNDEFINED))
    starts = np.array([*forms, NO_CFI], np.uint64)
    table = UnwindTable.of_states(starts, np.array(states, np.uint64), {})
    found = walk(table, words, (code(PLAIN), 0, 0))
    assert (len(found.frames), found.end) == (frames, end)


@pytest.mark.parametrize(
    ("rbp", "word", "end"),
    [
        (STACK + 0x40, code(ROOT), WalkEnd.ROOTED),
        (STACK - 0x40, code(ROOT), WalkEnd.ROOTED),
        (STACK - 0x40, 1234, WalkEnd.NO_TABLE),
        (STACK - 0x40, None, WalkEnd.UNREADABLE),
        (STACK, code(OTHER), WalkEnd.TOO_DEEP),  # round in circles
    ],
)
def test_a_stack_that_was_changed_to_may_be_the_higher_one(
    rbp: int, word: int | None, end: WalkEnd
) -> None:
    other = arch.with_ra(arch.with_cfa(0, arch.CFA_OTHER_STACK, 16), arch.RA_AT_CFA_8)
    starts, states = np.array([ROOT, OTHER], np.uint64), [arch.ROOT_STATE, other]
    table = UnwindTable.of_states(starts, np.array(states, np.uint64), {})
    words = {} if word is None else {rbp + 8 - STACK: word}
    found = walk(table, words, (code(OTHER), 0x10, rbp))
    assert found.end == end


def test_a_leaf_without_a_frame_is_left_by_a_checked_heuristic(library: UnwindTable) -> None:
    # GIVEN a leaf in code without CFI, whose RBP leads nowhere
    found = walk(library, {0: code(PLAIN), 32: code(ROOT)}, (JIT, 0, 5))
    assert addresses(found) == [JIT, code(PLAIN), code(ROOT)]
    assert [frame.found_by for frame in found.frames] == [
        FoundBy.REGISTERS,
        FoundBy.HEURISTIC,
        FoundBy.TABLE,
    ]
    assert found.end == WalkEnd.ROOTED


def test_a_frame_in_generated_code_leads_to_what_no_call_precedes(library: UnwindTable) -> None:
    # GIVEN a leaf and a caller in generated code, and a stale return address on top of the stack
    words = {0: code(PLAIN), 32: STACK + 64, 40: JIT + 9, 64: 0, 72: code(ROOT)}
    found = walk(library, words, (JIT, 0, STACK + 32))
    assert addresses(found) == [JIT, JIT + 9, code(ROOT)]
    assert found.end == WalkEnd.ROOTED
    # WHEN the leaf is in a file, or what RBP points at is no frame, THEN it has to follow a call
    found = walk(library, words, (code(NO_CFI), 0, STACK + 32))
    assert addresses(found)[:2] == [code(NO_CFI), code(PLAIN)]
    found = walk(library, words | {32: STACK + 65}, (JIT, 0, STACK + 32))
    assert addresses(found)[:2] == [JIT, code(PLAIN)]
    # Also where it leads out of generated code, or out of all code.
    for word in (code(ROOT, 9), 12345, STACK):
        found = walk(library, words | {40: word}, (JIT, 0, STACK + 32))
        assert addresses(found)[:2] == [JIT, code(PLAIN)]
        assert found.frames[1].found_by == FoundBy.HEURISTIC


@pytest.mark.parametrize("leaf", [JIT, code(NO_CFI)])
def test_a_frame_of_a_leaf_is_certain_where_no_return_address_is_on_top(
    library: UnwindTable, leaf: int
) -> None:
    words = {32: STACK + 64, 40: code(ROOT)}
    for top, found_by in (
        (code(PLAIN), FoundBy.HEURISTIC),
        (code(PLAIN, 9), FoundBy.FRAME_POINTER),
        (12345, FoundBy.FRAME_POINTER),
    ):
        found = walk(library, {**words, 0: top}, (leaf, 0, STACK + 32))
        assert (addresses(found), found.end) == ([leaf, code(ROOT)], WalkEnd.ROOTED)
        assert found.frames[1].found_by == found_by


def test_a_leaf_whose_rbp_is_no_frame_keeps_it_for_its_callers(library: UnwindTable) -> None:
    # GIVEN a caller whose frame it is
    words = {0: code(WITH_RBP), 32: STACK + 64, 40: code(ROOT, 9)}
    found = walk(library, words, (JIT, 0, STACK + 32))
    assert addresses(found) == [JIT, code(WITH_RBP), code(ROOT, 9)]
    assert found.end == WalkEnd.ROOTED


@pytest.mark.parametrize(
    ("words", "registers", "end", "depth"),
    [
        ({}, (code(PLAIN), 0, 0), WalkEnd.UNREADABLE, 1),
        ({24: 0xDEAD}, (code(PLAIN), 0, 0), WalkEnd.BAD_ADDRESS, 1),
        ({24: 0}, (code(PLAIN), 0, 0), WalkEnd.BAD_ADDRESS, 1),
        ({}, (0xDEAD, 0, 0), WalkEnd.BAD_ADDRESS, 1),
        ({}, (code(ODD), 0, 0), WalkEnd.UNSUPPORTED, 1),
        ({0: code(WITH_RBP)}, (code(LOSES_RBP), 0, STACK + 64), WalkEnd.UNSUPPORTED, 2),
        ({}, (code(WITH_RBP), 0x100, STACK), WalkEnd.BAD_ADDRESS, 1),
        ({}, (code(WITH_RBP), 0, STACK + 3), WalkEnd.BAD_ADDRESS, 1),
        ({}, (code(WITH_RBP), 0, (1 << 64) - 8), WalkEnd.BAD_ADDRESS, 1),
        ({0: STACK, 8: code(PLAIN)}, (code(NO_CFI), 0x100, STACK), WalkEnd.NO_TABLE, 1),
        ({0: 0, 8: 0xDEAD}, (JIT, 0, STACK), WalkEnd.NO_TABLE, 1),
        ({}, (JIT, 0, 0), WalkEnd.NO_TABLE, 1),
        # On top of a leaf's stack: code, but after no call; a call, but no code.
        ({0: JIT + 9}, (JIT, 0, 0), WalkEnd.NO_TABLE, 1),
        ({0: 0xDEAD0}, (JIT, 0, 0), WalkEnd.NO_TABLE, 1),
        # Only a leaf's: here the caller is in code without CFI.
        ({24: JIT + 8, 32: code(ROOT)}, (code(PLAIN), 0, 0), WalkEnd.NO_TABLE, 2),
        ({}, (JIT, 0, STACK), WalkEnd.NO_TABLE, 1),
    ],
)
def test_how_walks_end(
    library: UnwindTable,
    words: dict[int, int],
    registers: tuple[int, int, int],
    end: WalkEnd,
    depth: int,
) -> None:
    found = walk(library, words, registers)
    assert (found.end, len(found.frames)) == (end, depth)


def test_recursion_is_cut_at_the_limit(library: UnwindTable) -> None:
    words = {24 + 32 * index: code(PLAIN) for index in range(200)} | {24 + 32 * 200: code(ROOT)}
    cut = walk(library, words, (code(PLAIN), 0, 0))
    assert (cut.end, len(cut.frames)) == (WalkEnd.TOO_DEEP, 127)
    whole = walk(library, words, (code(PLAIN), 0, 0), depth=202)
    assert (whole.end, len(whole.frames)) == (WalkEnd.ROOTED, 202)


def test_a_call_at_the_end_of_a_function_belongs_to_it(library: UnwindTable) -> None:
    # GIVEN a return address that is the first byte of the next function
    words = {24: BIAS + WITH_RBP, 56: code(ROOT)}
    assert walk(library, words, (code(PLAIN), 0, 0)).end == WalkEnd.ROOTED
