# SPDX-License-Identifier: Apache-2.0
"""Line tables by hand and by chance; real ones are compared in tests/python."""

from __future__ import annotations

import random

import pytest
from aiflame.agent.python.layouts import LineTable
from aiflame.agent.python.lines import NO_LINE, line_of


@pytest.mark.parametrize(
    ("kind", "table", "expected"),
    [
        # 2 bytes of line 10, then line 12 for 4, then back to 11
        (LineTable.LNOTAB, bytes([2, 2, 4, 0xFF]), [10, 12, 12, 11]),
        # 255 and more is split: 254 bytes of line 10, then two steps of the line
        (LineTable.LNOTAB, bytes([0, 127, 0, 3]), [140, 140, 140, 140]),
        # line 10 for 2, none for 2, line 13 for 4
        (LineTable.LINETABLE, bytes([2, 0, 2, 0x80, 4, 3]), [10, NO_LINE, 13, 13]),
        # one unit on the first line, one without, one a line on with a negative long form
        (LineTable.LOCATIONS, bytes([0x80, 0, 0xF8, 0xD8, 0, 0, 0xE8, 0x05]), [10, 0, 11, 9]),
    ],
)
def test_lines_by_hand(kind: LineTable, table: bytes, expected: list[int]) -> None:
    assert [line_of(kind, table, 10, 2 * index) for index in range(4)] == expected


@pytest.mark.parametrize("kind", LineTable)
def test_before_the_first_instruction_is_the_first_line(kind: LineTable) -> None:
    assert line_of(kind, b"\xff\xff", 5, -1) == 5


@pytest.mark.parametrize("kind", LineTable)
def test_any_bytes_give_a_line_or_none(kind: LineTable) -> None:
    chance = random.Random(5)
    for _ in range(2000):
        table = chance.randbytes(chance.randrange(40))
        line = line_of(kind, table, chance.randrange(-9, 1 << 31), chance.randrange(200))
        assert 0 <= line < 1 << 31


def test_a_line_that_no_interpreter_has_is_none() -> None:
    # 2**35 - 1 lines on, 34 billion, and then back by as many
    table = b"\xe8\x7e\x7f\x7f\x7f\x7f\x3f" + b"\xe8\x7f\x7f\x7f\x7f\x7f\x3f"
    found = [line_of(LineTable.LOCATIONS, table, 10, position) for position in (0, 2)]
    assert found == [NO_LINE, 10]
