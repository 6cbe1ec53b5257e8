# SPDX-License-Identifier: Apache-2.0
"""Bytecode files, the constants of a host, and the check of compiled accesses."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.bytecode import (
    BadBytecode,
    Bytecode,
    MapDefinition,
    ProgramDefinition,
    define_program,
)
from aiflame.agent.kernel.loader import ProgramOptions, map_entries
from aiflame.agent.kernel.program_list import MAPS, TEMPLATES
from aiflame.agent.kernel.syscalls import MapShape
from bytecode_bounds import unbounded_accesses

_BPF = Path(__file__).parents[2] / "bpf"


def _code(*rows: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("<BBhi", *row) for row in rows)


_EXIT = (0x95, 0, 0, 0)


def _bytecode() -> Bytecode:
    # r1 = HOST_MARK | 2; r2 = a map; exit
    body = _code((0x18, 1, 0, 2), (0, 0, 0, 0x6169666C), (0x18, 0x12, 0, 0), (0, 0, 0, 0), _EXIT)
    program = ProgramDefinition("p", "uprobe", body, ((16, "m"),), ((0, 2),))
    maps = (MapDefinition("m", MapShape(2, 4, 8, 1, 0)),)
    return Bytecode("digest", "BCC 0", maps, (program,))


def test_a_file_holds_all_of_it() -> None:
    assert Bytecode.from_bytes(_bytecode().to_bytes()) == _bytecode()


def test_any_changed_byte_is_noticed() -> None:
    data = _bytecode().to_bytes()
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        with pytest.raises(BadBytecode):
            Bytecode.from_bytes(changed)
        with pytest.raises(BadBytecode):
            Bytecode.from_bytes(data[:at])


def test_a_host_is_put_into_the_instructions() -> None:
    linked = _bytecode().program("p").linked({"m": 7}, {2: 0x1122334455667788})
    assert linked == _code(
        (0x18, 1, 0, 0x55667788), (0, 0, 0, 0x11223344), (0x18, 0x12, 0, 7), (0, 0, 0, 0), _EXIT
    )


def test_marked_constants_are_found_and_others_are_left() -> None:
    body = _code((0x18, 1, 0, 5), (0, 0, 0, 0x6169666C), (0x18, 3, 0, 9), (0, 0, 0, 1), _EXIT)
    assert define_program("p", "uprobe", body, {}).constants == ((0, 5),)


def test_the_loader_sizes_each_map_that_is_left_to_it() -> None:
    text = "".join(path.read_text() for path in sorted(_BPF.glob("*.[ch]")))
    declared = re.findall(r"\bBPF_\w+\(([^;]*?), SIZED_BY_HOST\);", text)
    left = {words[-1] if words[0] != "ring" else "ring" for words in map(_names, declared)}
    entries = map_entries(ProgramOptions(abi.Filter.ALL, 1, ring_pages=2))
    # BPF_ARRAY(name, value, size), BPF_TABLE(type, key, value, name, size), BPF_RINGBUF(name, size)
    assert left == set(entries)
    assert set(entries) | set(TEMPLATES) <= set(MAPS)


def _names(declaration: str) -> list[str]:
    words = [word.strip() for word in declaration.split(",")]
    return words if words[0].startswith('"') else [words[0]]


# A loop over an array in r8, whose end is counted in r1: what LLVM 14 made of a plain for-loop, and
# what kept the programs from Linux 5.10 to 6.1.
_COUNTED_DOWN = (
    (0xB7, 1, 0, 127),  # r1 = 127
    (0x79, 0x83, 0, 0),  # r3 = *(u64 *)(r8 + 0)
    (0x07, 8, 0, 8),  # r8 += 8
    (0x07, 1, 0, -1),  # r1 += -1
    (0x55, 1, -4, 0),  # if r1 != 0 goto -4
    _EXIT,
)
# The same through the stack, where the compiler ran out of registers.
_COUNTED_DOWN_SPILLED = (
    (0x79, 0xA2, -8, 0),  # r2 = *(u64 *)(r10 - 8)
    (0x79, 0x23, 0, 0),  # r3 = *(u64 *)(r2 + 0)
    (0x07, 2, 0, 8),  # r2 += 8
    (0x7B, 0x2A, -8, 0),  # *(u64 *)(r10 - 8) = r2
    (0x55, 3, -5, 0),  # if r3 != 0 goto -5
    _EXIT,
)
_INDEXED = (
    (0xBF, 0x12, 0, 0),  # r2 = r1
    (0x57, 2, 0, 127),  # r2 &= 127
    (0x67, 2, 0, 3),  # r2 <<= 3
    (0xBF, 0x84, 0, 0),  # r4 = r8
    (0x0F, 0x24, 0, 0),  # r4 += r2
    (0x79, 0x43, 0, 0),  # r3 = *(u64 *)(r4 + 0)
    (0x07, 1, 0, 1),  # r1 += 1
    (0xA5, 1, -8, 127),  # if r1 < 127 goto -8
    _EXIT,
)


def test_a_pointer_that_moves_in_a_loop_is_found() -> None:
    assert unbounded_accesses(_code(*_COUNTED_DOWN)) == ["1: a pointer that moves in the loop at 1"]
    assert unbounded_accesses(_code(*_COUNTED_DOWN_SPILLED)) == [
        "1: a pointer that moves in the loop at 0"
    ]


def test_a_masked_index_is_bounded_and_another_is_not() -> None:
    assert unbounded_accesses(_code(*_INDEXED)) == []
    without_mask = (*_INDEXED[:1], *_INDEXED[2:7], (0xA5, 1, -7, 127), _EXIT)
    assert unbounded_accesses(_code(*without_mask)) == ["4: an index that is not masked"]
