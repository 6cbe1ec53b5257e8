# SPDX-License-Identifier: Apache-2.0
"""Stacks of sleeping threads, walked from made-up registers and memory."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
from aiflame.agent.inspector.memory import Span
from aiflame.agent.model.profile import StopReason
from aiflame.agent.processes.stack_memory import StackMemory
from aiflame.agent.processes.table import NO_BINARY, Mapping, ProcessImage
from aiflame.agent.processes.thread_walk import StackWalker, WalkedThread
from aiflame.agent.processes.threads import ThreadRegisters
from aiflame.agent.unwind import walk
from aiflame.agent.unwind.table import UnwindTable
from cfibytes import (
    RBP,
    RIP,
    RSP,
    TEXT,
    Frames,
    cfa_expression,
    def_cfa_offset,
    elf_with,
    expression,
    sleb,
    table_of,
    uleb,
)

_BIAS = 0x7F00_0000_0000
_STACK = 0x7FFD_0000_0000
_JIT = 0x1234_0000
_ROOT, _PLAIN, _SIGNAL = range(TEXT, TEXT + 0x300, 0x100)
_BINARY = 3


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> UnwindTable:
    frames = Frames()
    cie, signal_cie = frames.cie(), frames.cie(augmentation=b"zRS")
    frames.fde(cie, _ROOT, 0x100, b"\x07" + uleb(RIP))
    frames.fde(cie, _PLAIN, 0x100, def_cfa_offset(32))
    signal = cfa_expression(b"\x77" + sleb(160) + b"\x06")
    for register, offset in ((RBP, 120), (RSP, 160), (RIP, 168)):
        signal += expression(register, b"\x77" + sleb(offset))
    frames.fde(signal_cie, _SIGNAL, 0x100, signal)
    return table_of(elf_with(frames), tmp_path_factory.mktemp("thread_walk"))


class _Tables:
    """The tables of a recording: one, which may still be on its way."""

    def __init__(self, table: UnwindTable | None) -> None:
        self.table = table
        self.loads = 0

    def table_of(self, binary: int) -> UnwindTable | None:
        self.loads += 1
        return self.table if binary == _BINARY else None

    def is_being_built(self, binary: int) -> bool:
        return binary == _BINARY and self.table is None


def _image() -> ProcessImage:
    image = ProcessImage(0, 41, 5, 0)
    code = Mapping(_BIAS + TEXT, _BIAS + TEXT + 0x1000, TEXT, _BINARY)
    image.replace_mappings([code, Mapping(_JIT, _JIT + 0x1000, 0, NO_BINARY)])
    return image


def _walker(tables: _Tables) -> StackWalker:
    images = SimpleNamespace(bias=lambda mapping: mapping.start - mapping.file_offset)
    return StackWalker(tables, images)  # type: ignore[arg-type]


def _walk(
    walker: StackWalker, image: ProcessImage, leaf: int, words: dict[int, int], frame: int = 0
) -> WalkedThread:
    """Walks from a leaf with the stack pointer at _STACK; `words` are by distance from there."""
    piece = bytearray(max(words, default=0) + 8)
    for offset, word in words.items():
        struct.pack_into("<Q", piece, offset, word)
    registers = ThreadRegisters(1, 2, 3, 4, leaf, _STACK, frame, 0, 0, 0, 41, 42, 1, 0, b"sleeper")
    memory = StackMemory(Span(41, 42, _STACK, len(piece)), bytes(piece), None)
    return walker.walk_thread(image, registers, memory)


def _code(function: int, after: int = 8) -> int:
    return _BIAS + function + after


def test_from_the_leaf_to_where_the_thread_started(table: UnwindTable) -> None:
    words = {24: _code(_PLAIN), 56: _code(_PLAIN, 20), 88: _code(_ROOT)}
    found = _walk(_walker(_Tables(table)), _image(), _code(_PLAIN, 0), words)
    chain = (_code(_PLAIN, 0), _code(_PLAIN), _code(_PLAIN, 20), _code(_ROOT))
    assert found == WalkedThread(chain, StopReason.ROOTED_BY_TABLE, frozenset())


def test_an_interrupted_function_is_found_at_its_very_first_byte(table: UnwindTable) -> None:
    # GIVEN a signal handler, called by the trampoline, over a function that had not begun
    words = {24: _code(_SIGNAL), 32 + 160: _STACK + 0x200, 32 + 168: _code(_PLAIN, 0)}
    words |= {32 + 120: 7, 0x200 + 24: _code(_ROOT)}
    found = _walk(_walker(_Tables(table)), _image(), _code(_PLAIN), words)
    # THEN it is stored so that the look-up one byte before hits it
    interrupted = _code(_PLAIN, 0) + 1
    assert found.addresses == (_code(_PLAIN), _code(_SIGNAL), interrupted, _code(_ROOT))
    assert found.end == StopReason.ROOTED_BY_TABLE


def test_a_table_that_is_still_being_built_is_named_and_asked_again(table: UnwindTable) -> None:
    tables, image, words = _Tables(None), _image(), {24: _code(_ROOT)}
    walker = _walker(tables)
    found = _walk(walker, image, _code(_PLAIN), words)
    assert (found.lacks, found.end) == (frozenset({_BINARY}), StopReason.NO_TABLE)
    # WHEN it has come
    tables.table = table
    found = _walk(walker, image, _code(_PLAIN), words)
    assert (found.lacks, found.end) == (frozenset(), StopReason.ROOTED_BY_TABLE)


def test_threads_that_sleep_where_others_did_need_no_table(table: UnwindTable) -> None:
    tables, image, words = _Tables(table), _image(), {24: _code(_ROOT)}
    walker = _walker(tables)
    found = _walk(walker, image, _code(_PLAIN), words)
    # GIVEN a walker that has let go of its tables
    walker.forget()
    assert _walk(walker, image, _code(_PLAIN), words) == found
    assert tables.loads == 1
    # WHEN there was none
    tables.table = None
    assert _walk(walker, _image(), _code(_PLAIN, 4), words).lacks == {_BINARY}
    walker.forget()
    tables.table = table
    # THEN one that has come since is used.
    assert _walk(walker, _image(), _code(_PLAIN, 4), words).end == StopReason.ROOTED_BY_TABLE


def test_mappings_that_come_later_are_used(table: UnwindTable) -> None:
    image, walker, words = _image(), _walker(_Tables(table)), {24: _code(_ROOT) + 0x10_0000}
    assert len(_walk(walker, image, _code(_PLAIN), words).addresses) == 1
    start = _BIAS + TEXT + 0x10_0000
    image.replace_mappings([*image.mappings, Mapping(start, start + 0x1000, TEXT, _BINARY)])
    assert len(_walk(walker, image, _code(_PLAIN), words).addresses) == 2


@pytest.mark.parametrize(
    ("leaf", "words", "end"),
    [
        (_code(_PLAIN), {}, StopReason.UNREADABLE),
        (_code(_PLAIN), {24: 0xDEAD}, StopReason.NO_FRAME_POINTER),
        (_code(_PLAIN), {24: 0}, StopReason.NO_FRAME_POINTER),
        (_JIT, {}, StopReason.NO_TABLE),
        (0xDEAD, {}, StopReason.NO_FRAME_POINTER),
    ],
)
def test_stacks_that_lead_nowhere_keep_their_leaf(
    table: UnwindTable, leaf: int, words: dict[int, int], end: StopReason
) -> None:
    found = _walk(_walker(_Tables(table)), _image(), leaf, words)
    assert found == WalkedThread((leaf,), end, frozenset())


@pytest.mark.parametrize("caller", [0, 3, 8, (1 << 47) - 1, (1 << 64) - 8, (1 << 64) - 1])
def test_a_caller_that_is_no_address_ends_the_walk(table: UnwindTable, caller: int) -> None:
    # GIVEN generated code, of which heuristics look at what precedes the return address
    found = _walk(_walker(_Tables(table)), _image(), _JIT + 8, {0: caller})
    assert found.addresses == (_JIT + 8,)


def test_generated_code_is_walked_by_frame_pointer(table: UnwindTable) -> None:
    words = {24: _JIT + 4, 48: 0, 56: _JIT + 8}
    found = _walk(_walker(_Tables(table)), _image(), _code(_PLAIN), words, _STACK + 48)
    assert found.addresses == (_code(_PLAIN), _JIT + 4, _JIT + 8)


def test_recursion_is_cut_where_sampled_stacks_are(table: UnwindTable) -> None:
    words = {24 + 32 * index: _code(_PLAIN) for index in range(300)}
    found = _walk(_walker(_Tables(table)), _image(), _code(_PLAIN), words)
    assert (len(found.addresses), found.end) == (walk.MAX_FRAMES, StopReason.TOO_DEEP)
