# SPDX-License-Identifier: Apache-2.0
"""Where threads keep their Python thread state: what code says, and what memory adds to it."""

from __future__ import annotations

import random
import struct

import pytest
from aiflame.agent.python.debugoffsets import read_layout
from aiflame.agent.python.evalcode import AddressRange
from aiflame.agent.python.thread_state import StateKind, StatePlace, find_slot, place_of
from aiflame.agent.python.threads import UnsupportedLibc
from pymemory import BASE, ConstructedMemory, debug_offsets

_AT = 0x1000
_RUNTIME = AddressRange(0x9000, 0xA000)
_LAYOUT = read_layout(debug_offsets((3, 15)))


def _rip(at: int, length: int, target: int) -> bytes:
    """The displacement of an instruction that refers to something by its own address."""
    return struct.pack("<i", target - _AT - at - length)


# PyGILState_GetThisThreadState, as compilers and linkers have it.
_CODES = {
    "Debian's 3.15.2": (
        "f30f1efa 64488b0425d8ffffff c3",
        StatePlace(StateKind.BELOW, below=40),
    ),
    "local dynamic, relaxed": (
        "f30f1efa 55 4889e5 66666664488b042500000000 488b80d8ffffff 5d c3",
        StatePlace(StateKind.BELOW, below=40),
    ),
    "general dynamic, relaxed": (
        "f30f1efa 64488b042500000000 488d80d8ffffff 488b00 c3",
        StatePlace(StateKind.BELOW, below=40),
    ),
    "libpython's 3.15.2": (
        "f30f1efa 55 4889e5 488d3d 61a64a00 e85c9dcfff 5d 488b8028000000 c3",
        StatePlace(StateKind.MODULE, 0x1000 + 15 + 0x4AA661, 40),
    ),
    "general dynamic": (
        "50 66488d3d 00400000 666648e800000000 488b00 5a c3",
        StatePlace(StateKind.MODULE, 0x1000 + 9 + 0x4000, 0),
    ),
    "initial exec": (
        "f30f1efa 488b0500400000 64488b00 c3",
        StatePlace(StateKind.DISTANCE, 0x1000 + 11 + 0x4000),
    ),
    "3.14's": ("8b3d" + _rip(0, 6, 0x9100).hex() + "e900000000", StatePlace(StateKind.KEY, 0x9100)),
    "above the thread pointer": ("64488b042510000000c3", None),
    "far below": ("64488b0425000000f0c3", None),
    "a negative offset in a block": ("488d3d00400000 e800000000 488b40f8 c3", None),
    "nothing of all this": ("31c0c3", None),
}


@pytest.mark.parametrize("name", _CODES)
def test_code_tells_where_it_looks(name: str) -> None:
    code, place = _CODES[name]
    assert place_of(bytes.fromhex(code), _AT, _RUNTIME) == place


def test_any_bytes_are_survived() -> None:
    chance = random.Random(15)
    pieces = [bytes.fromhex(code) for code, _ in _CODES.values()]
    for _ in range(2000):
        code = bytearray(b"".join(chance.sample(pieces, 3)))
        for _ in range(chance.randrange(8)):
            code[chance.randrange(len(code))] = chance.randrange(256)
        place = place_of(bytes(code[: chance.randrange(96)]), _AT, _RUNTIME)
        assert place is None or place.kind in StateKind


class Target:
    """An interpreter in a library, with one thread."""

    def __init__(self) -> None:
        self.memory = ConstructedMemory()
        self.runtime = self.memory.allocate(1024)
        interpreter = self.memory.allocate(8192)
        self.state = self.memory.allocate(512)
        self.block = self.memory.allocate(512)
        self.pthread = self.memory.allocate(1024)
        self.vector = self.memory.allocate(256)
        self.got = self.memory.allocate(16)
        layout = _LAYOUT
        self.memory.word(self.runtime + layout.runtime_interpreters, interpreter)
        self.memory.word(interpreter + layout.interpreter_threads, self.state)
        self.memory.word(self.state + layout.thread_id, self.pthread)
        self.memory.word(self.pthread + 8, self.vector)
        self.memory.word(self.vector + 3 * 16, self.block)
        self.memory.word(self.got, 3)
        self.memory.word(self.block + 40, self.state)

    def slot(self, place: StatePlace) -> int | None:
        return find_slot(self.memory, _LAYOUT, self.runtime, place, lambda: 0)


def test_a_library_has_its_block_below_each_thread_pointer() -> None:
    target = Target()
    place = StatePlace(StateKind.MODULE, target.got, 40)
    slot = target.block + 40 - target.pthread
    assert target.slot(place) == slot
    assert target.slot(StatePlace(StateKind.BELOW, below=8)) == -8
    # The GOT may have the offset, too.
    target.memory.word(target.got + 8, 16)
    assert target.slot(StatePlace(StateKind.MODULE, target.got, 24)) == slot
    target.memory.word(target.got, slot)
    assert target.slot(StatePlace(StateKind.DISTANCE, target.got)) == slot


def test_a_thread_that_begins_is_waited_for() -> None:
    target = Target()
    target.memory.word(target.block + 40, 0)
    assert target.slot(StatePlace(StateKind.MODULE, target.got, 40)) is None
    target.memory.word(target.runtime + _LAYOUT.runtime_interpreters, 0)
    assert target.slot(StatePlace(StateKind.MODULE, target.got, 40)) is None


@pytest.mark.parametrize("block", [BASE + (1 << 19), (1 << 64) - 1, 0, 1 << 40])
def test_a_library_that_was_loaded_late_is_refused(block: int) -> None:
    target = Target()
    target.memory.word(target.vector + 3 * 16, block)
    with pytest.raises(UnsupportedLibc, match="loaded late"):
        target.slot(StatePlace(StateKind.MODULE, target.got, 40))


def test_damaged_memory_is_survived() -> None:
    chance = random.Random(315)
    for _ in range(500):
        target = Target()
        for _ in range(chance.randint(1, 3)):
            at = chance.choice((target.runtime, target.state, target.pthread, target.got))
            word = chance.choice((0, 1, 3, 1 << 63, BASE + chance.randrange(1 << 20)))
            target.memory.word(at + 8 * chance.randrange(32), word)
        for kind in (StateKind.MODULE, StateKind.DISTANCE):
            try:
                slot = target.slot(StatePlace(kind, target.got, 40))
            except UnsupportedLibc:
                continue
            assert slot is None or -(1 << 20) < slot < 0
