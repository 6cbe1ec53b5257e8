# SPDX-License-Identifier: Apache-2.0
"""Code objects and strings on constructed memory, hostile ones among them."""

from __future__ import annotations

import random

import pytest
from aiflame.agent.python.codes import CodeReader
from aiflame.agent.python.debugoffsets import read_layout
from aiflame.agent.python.layouts import ABSENT, Layout, table_layout
from aiflame.agent.python.walk import NO_POSITION
from aiflame.agent.symbols.frames import MAX_NAME_CHARS
from pymemory import BASE, ConstructedMemory, debug_offsets

LAYOUTS = [
    table_layout((3, 9)),
    table_layout((3, 12)),
    read_layout(debug_offsets((3, 13), free_threaded=True)),
    read_layout(debug_offsets((3, 14), free_threaded=True)),
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@each_layout
@pytest.mark.parametrize("name", ["f", "grüße", "名前", "🐍", ""])
def test_names_of_each_width(layout: Layout, name: str) -> None:
    memory = ConstructedMemory()
    reader = CodeReader(memory, layout)
    code = reader.read(memory.code(layout, name))
    assert code is not None
    has_qualname = layout.code_qualname != ABSENT
    assert code.name == name
    assert code.qualname == (f"Q.{name}" if has_qualname else name)
    assert code.filename == f"{name}.py"
    assert reader.drops == {}


@each_layout
def test_a_name_of_a_megabyte_is_cut_and_counted(layout: Layout) -> None:
    memory = ConstructedMemory(4 << 20)
    reader = CodeReader(memory, layout)
    address = memory.code(layout, "f")
    memory.word(address + layout.code_name, memory.text(layout, "x" * (1 << 20)))
    code = reader.read(address)
    assert code is not None
    assert len(code.name) == MAX_NAME_CHARS
    assert reader.drops["name_cut"] >= 1


@each_layout
def test_names_are_cleaned(layout: Layout) -> None:
    memory = ConstructedMemory()
    code = CodeReader(memory, layout).read(memory.code(layout, "a\x1b[31m\u202eb\ud800"))
    assert code is not None
    assert not set(code.name) & set("\x1b\u202e\ud800")


@each_layout
@pytest.mark.parametrize("length", [-1, 1 << 62, 4000])
def test_a_name_that_lies_about_its_length(layout: Layout, length: int) -> None:
    memory = ConstructedMemory(8192)
    reader = CodeReader(memory, layout)
    address = memory.code(layout, "f")
    memory.word(address + layout.code_name, memory.text(layout, "f", length))
    assert reader.read(address) is None
    assert reader.drops["unreadable_name"] == 1


@each_layout
def test_a_reused_address_is_read_anew(layout: Layout) -> None:
    memory = ConstructedMemory()
    reader = CodeReader(memory, layout)
    address = memory.code(layout, "old")
    first = reader.read(address)
    assert first is reader.read(address)
    other = memory.code(layout, "new", b"", 9)
    memory.write(address, memory.read(other, 512) or b"")
    code = reader.read(address)
    assert code is not None
    assert (code.name, code.first_line) == ("new", 9)
    assert reader.drops == {"address_reused": 1}


@each_layout
@pytest.mark.parametrize(
    ("length", "reason"), [(1 << 40, "line_table_cut"), (-5, "unreadable_line_table")]
)
def test_a_bad_line_table_leaves_the_first_line(layout: Layout, length: int, reason: str) -> None:
    memory = ConstructedMemory()
    reader = CodeReader(memory, layout)
    address = memory.code(layout, "f", b"", 33)
    memory.word(address + layout.code_line_table, memory.blob(layout, b"xx", length))
    code = reader.read(address)
    assert code is not None
    assert reader.line(code, 4) == 33
    assert reader.drops == {reason: 1}


def test_an_unknown_position_shows_the_first_line() -> None:
    memory, layout = ConstructedMemory(), table_layout((3, 9))
    reader = CodeReader(memory, layout)
    code = reader.read(memory.code(layout, "f", bytes([2, 1, 2, 1]), 10))
    assert code is not None
    assert [reader.line(code, at) for at in (-1, 0, 2, 4, NO_POSITION)] == [10, 10, 11, 12, 10]


@each_layout
def test_garbage_costs_only_itself(layout: Layout) -> None:
    chance = random.Random(3)
    memory = ConstructedMemory(1 << 16)
    for at in range(0, 1 << 16, 8):
        inside = BASE + 8 * chance.randrange(1 << 13)
        memory.word(BASE + at, inside if chance.random() < 0.7 else chance.randrange(1 << 64))
    reader = CodeReader(memory, layout)
    for _ in range(2000):
        code = reader.read(
            chance.choice((BASE + 8 * chance.randrange(1 << 13), chance.randrange(1 << 64)))
        )
        assert code is None or len(code.name) <= MAX_NAME_CHARS
    assert reader.drops["unreadable_code"] > 0
    assert reader.drops["unreadable_name"] > 0
