# SPDX-License-Identifier: Apache-2.0
"""Unwind information that lies: a table with counted losses, or one clear error, and soon."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import pytest
from aiflame.agent.errors import AiflameError
from aiflame.agent.unwind import lockstep, table
from aiflame.agent.unwind.records import MAX_PROGRAM_BYTES, BadUnwindInfo
from cfibytes import (
    EPILOGUE,
    PROLOGUE,
    TEXT,
    Frames,
    advance,
    cfa_expression,
    def_cfa_offset,
    elf_with,
    expression,
    table_of,
    uleb,
)


def a_library() -> Frames:
    frames = Frames()
    for number in range(4):
        cie = frames.cie(augmentation=(b"zR", b"zRS", b"zPLR", b"zR")[number], data=DATA[number])
        for index in range(30):
            program = PROLOGUE + b"\x0a" + EPILOGUE + b"\x0b" + advance(index) + def_cfa_offset(96)
            program += expression(6, b"\x76\x00") + cfa_expression(b"\x76\x70\x06")
            frames.fde(cie, TEXT + 0x1000 * number + 64 * index, 64, program)
    return frames


DATA = (b"\x1b", b"\x1b", b"\x9b" + bytes(4) + b"\x1b\x1b", b"\x1b")


@pytest.mark.breadth
@pytest.mark.parametrize("few", [1, 1 << 30], ids=["lock-step", "plain"])
def test_random_damage(tmp_path: Path, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "_FEW", few)
    rng = random.Random(7)
    sound = bytes(a_library().body)
    outcomes = {"whole": 0, "losses": 0, "refused": 0}
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(rng.choice((1, 4, 40))):
            data[rng.randrange(len(data))] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            found = table_of(elf_with(bytes(data)), tmp_path)
        except AiflameError:
            outcomes["refused"] += 1
            continue
        found.check()
        outcomes["losses" if found.drops else "whole"] += 1
    # THEN damage costs functions, never the run, and is not kept quiet
    assert outcomes["losses"] > 200 and outcomes["whole"] > 0


def test_both_interpreters_agree_on_damaged_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(11)
    for _ in range(40):
        frames = Frames()
        cie = frames.cie()
        for index in range(40):
            program = bytearray(PROLOGUE + b"\x0a" + EPILOGUE + b"\x0b" + advance(index))
            for _ in range(3):
                program[rng.randrange(len(program))] = rng.choice((0x0E, 0xFF, rng.randrange(256)))
            frames.fde(cie, TEXT + 64 * index, 64, bytes(program))
        tables = []
        for few in (1, 1 << 30):
            monkeypatch.setattr(lockstep, "_FEW", few)
            tables.append(table_of(elf_with(frames), tmp_path).to_chunks(bytes(32)))
        assert tables[0] == tables[1]


def test_random_bytes(tmp_path: Path) -> None:
    rng = random.Random(3)
    for size in (1, 4, 5, 64, 4096):
        found = table_of(elf_with(rng.randbytes(size)), tmp_path)
        assert len(found) == 0


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<I", 0x7FFFFFFF),
        struct.pack("<IQ", 0xFFFFFFFF, 1 << 60),
        struct.pack("<IQ", 0xFFFFFFFF, (1 << 64) - 12),
        struct.pack("<I", 0xFFFFFFF5),
    ],
)
def test_lengths_that_lead_out(tmp_path: Path, head: bytes) -> None:
    frames = Frames()
    frames.fde(frames.cie(), TEXT, 64, PROLOGUE)
    frames.body += head + bytes(12)
    found = table_of(elf_with(frames), tmp_path)
    # THEN what came before stays
    assert len(found) > 0
    assert found.drops == {"records not reached": 1}


@pytest.mark.parametrize("parent", [0x7FFFFFFF, 4, 0x80000000])
def test_parents_that_are_none(tmp_path: Path, parent: int) -> None:
    frames = Frames()
    cie = frames.cie()
    frames.fde(cie, TEXT, 64)
    offset = len(frames.body)
    frames.fde(cie, TEXT + 64, 64)
    struct.pack_into("<I", frames.body, offset + 4, parent)
    found = table_of(elf_with(frames), tmp_path)
    assert found.drops == {"bad CIE": 1} and len(found) == 2


def test_an_fde_as_parent(tmp_path: Path) -> None:
    frames = Frames()
    cie = frames.cie()
    first = len(frames.body)
    frames.fde(cie, TEXT, 64)
    frames.fde(first, TEXT + 64, 64)
    # The last is its own parent.
    frames.fde(len(frames.body), TEXT + 128, 64)
    assert table_of(elf_with(frames), tmp_path).drops == {"bad CIE": 2}


def test_operands_past_the_end(tmp_path: Path) -> None:
    frames = Frames()
    cie = frames.cie()
    endless = b"\x0e" + b"\xff" * 4
    for index, program in enumerate((endless, b"\x0f" + uleb(1 << 60), b"\x04\1", b"\x10\x03\x7f")):
        frames.fde(cie, TEXT + 64 * index, 64, bytes(-(len(program) + 13) % 8) + program)
    assert table_of(elf_with(frames), tmp_path).drops == {"bad program": 4}


def test_long_programs_take_bounded_time(tmp_path: Path) -> None:
    # GIVEN programs that only the plain interpreter runs, far beyond what it is given
    frames = Frames()
    cie = frames.cie()
    body = cfa_expression(b"\x70\0") * (MAX_PROGRAM_BYTES // 4 - 8)
    for index in range(120):
        frames.fde(cie, TEXT + 64 * index, 64, body)
    frames.fde(cie, TEXT + 0x10000, 64, body * 2)
    begin = time.process_time()
    found = table_of(elf_with(frames), tmp_path)
    # THEN those beyond the bound are counted, in less than any user would wait
    assert set(found.drops) == {"costly program", "long program"}
    assert 40 < found.drops["costly program"] < 120
    assert time.process_time() - begin < 20


def test_too_many_rules_lose_the_rarest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_RULES", 6)
    frames = Frames()
    cie = frames.cie()
    for index in range(8):
        program = (advance(4) + def_cfa_offset(16) + advance(4) + def_cfa_offset(8)) * 2
        program += advance(4) + def_cfa_offset(1000 + index)
        frames.fde(cie, TEXT + 64 * index, 64, program)
    found = table_of(elf_with(frames), tmp_path)
    assert len(found.rules) == 6 and found.drops == {"rule over the limit": 6}
    kinds = [found.lookup(TEXT + 64 * index + 60).kind.name for index in range(8)]
    assert kinds.count("UNSUPPORTED") == 6 and found.lookup(TEXT + 4).cfa_offset == 16


def test_too_many_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lockstep, table):
        monkeypatch.setattr(module, "MAX_ROWS", 100)
    frames = Frames()
    cie = frames.cie()
    for index in range(64):
        frames.fde(cie, TEXT + 64 * index, 60, PROLOGUE + EPILOGUE)
    with pytest.raises(BadUnwindInfo, match="limit"):
        table_of(elf_with(frames), tmp_path)
