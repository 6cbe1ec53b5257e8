# SPDX-License-Identifier: Apache-2.0
"""The walkers of the kernel half against their twins in Python, on the same bytes.

What bpf/unwind.h and bpf/python.h do is compiled for user space (tests/walkers), and walks the same
made-up memory as agent/unwind/walk.py and agent/python/walk.py do.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.model.profile import StopReason
from aiflame.agent.python import walk as python_walk
from aiflame.agent.python.debugoffsets import read_layout
from aiflame.agent.python.layouts import ABSENT, SHIM_OWNER, Layout, table_layout
from aiflame.agent.recording.pythons import describe_layout
from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.table import UnwindTable
from aiflame.agent.unwind.walk import FoundBy, Mapping, Registers, ReplayWalker, WalkEnd
from aiflame.agent.unwind.x86_64 import RbpKind
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pymemory import debug_offsets
from walkers import Code, KernelWalkers, PythonFrames

_ALL_BITS = (1 << 64) - 1
_CODE, _JIT, _STACK = 0x5555_5540_0000, 0x7F00_0000_0000, 0x7FFD_0000_0000
_DARK = 0x7F80_0000_0000  # code that cannot be read
_BIAS = _CODE - 0x1000
_CODE_BYTES, _STACK_WORDS = 0x800, 48

# The ends that Python tells apart where the kernel half leaves it to the host.
_KERNEL_ENDS = {
    WalkEnd.ROOTED: {StopReason.ROOTED_BY_TABLE, StopReason.ROOTED_BY_HEURISTIC},
    WalkEnd.NO_TABLE: {StopReason.NO_TABLE, StopReason.ROOTED},
    WalkEnd.BAD_ADDRESS: {StopReason.NO_TABLE, StopReason.ROOTED},
    WalkEnd.UNREADABLE: {StopReason.UNREADABLE},
    WalkEnd.UNSUPPORTED: {StopReason.UNSUPPORTED_RULE},
    WalkEnd.TOO_DEEP: {StopReason.TOO_DEEP},
}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> KernelWalkers:
    return KernelWalkers(tmp_path_factory.mktemp("walkers"))


class World(NamedTuple):
    """A process that stands still: its unwind table, memory and registers."""

    states: list[tuple[int, int]]  # (offset in its code, state)
    code: bytes
    stack: list[int]
    registers: tuple[int, int, int, int]

    @property
    def table(self) -> UnwindTable:
        rows = {_CODE - _BIAS + offset: state for offset, state in sorted(self.states)}
        addresses = np.array(list(rows), np.uint64)
        return UnwindTable.of_states(addresses, np.array(list(rows.values()), np.uint64), {})

    @property
    def memory(self) -> dict[int, bytes]:
        stack = struct.pack(f"<{len(self.stack)}Q", *self.stack)
        return {_CODE: self.code, _JIT: self.code, _STACK: stack}

    @property
    def mappings(self) -> list[Code]:
        return [
            Code(_CODE, _CODE + _CODE_BYTES, _BIAS, self.table),
            Code(_JIT, _JIT + _CODE_BYTES, 0, None),
            Code(_DARK, _DARK + _CODE_BYTES, 0, None),
        ]


# Eight bytes each, of all that heuristics look for: calls of each form at the end, ways in and out.
_INSTRUCTIONS = [
    bytes.fromhex(text.replace(" ", ""))
    for text in (
        "90 90 90 e8 00 00 00 00",
        "90 90 90 90 90 90 ff d0",
        "90 90 90 90 90 ff 55 08",
        "90 90 90 90 90 ff 14 c8",
        "90 90 90 90 ff 54 24 08",
        "90 90 ff 15 00 00 00 00",
        "90 ff 94 24 00 00 00 00",
        "c3 90 90 90 90 90 ff d0",
        "5d c3 90 e8 00 00 00 00",
        "c9 c3 90 e8 00 00 00 00",
        "ff d0 c3 e8 00 00 00 00",
        "ff d0 5d c3 90 90 ff d0",
        "48 83 c4 18 c3 90 90 90",
        "48 83 c4 08 c3 90 ff d0",
        "55 48 89 e5 90 90 90 90",
        "55 48 8b ec 90 90 ff d0",
        "48 89 e5 90 90 90 90 90",
        "48 8b ec e8 00 00 00 00",
        "ff d0 55 48 89 e5 90 90",
        "90 90 90 90 90 90 90 90",
    )
]
_HEURISTIC_FORMS = (
    *(arch.CFA_RSP_HEURISTIC, arch.CFA_RBP_HEURISTIC, arch.RBX),
    *(arch.CFA_RSP_SLOT, arch.CFA_OTHER_STACK),
)
_FORMS = (*[arch.RSP] * 8, arch.RBP, arch.CFA_RBP_DEREF, *_HEURISTIC_FORMS)
_SIGNAL_STATE = arch.with_ra(
    arch.with_rbp(arch.with_cfa(0, arch.CFA_RSP_DEREF, 160), RbpKind.AT_RSP, 120), arch.RA_UCONTEXT
)
_JUNK = (0, 1, 8, _ALL_BITS, _ALL_BITS - 7, 1 << 63, _CODE - 8, _JIT + _CODE_BYTES)


def _state(chance: random.Random) -> int:
    which = chance.random()
    if which < 0.2:
        return chance.choice((arch.NO_CFI_STATE, arch.UNSUPPORTED_STATE, _SIGNAL_STATE))
    if which < 0.25:  # lazy linkage stubs
        stub = arch.with_cfa(0, arch.CFA_PLT, chance.randrange(1, 16))
        return arch.with_ra(stub, arch.RA_AT_CFA_8)
    cfa_offset = chance.choice((*[8, 16, 24] * 6, 32, 0, -8, -(1 << 31), 12))
    state = arch.with_cfa(0, chance.choice(_FORMS), cfa_offset)
    state = arch.with_rbp(state, chance.choice(tuple(RbpKind)), 8 * chance.randrange(-3, 2))
    return arch.with_ra(state, chance.choice((*[arch.RA_AT_CFA_8] * 19, arch.RA_UNDEFINED)))


def _code_address(chance: random.Random) -> int:
    unit = chance.randrange(_CODE_BYTES // 8 + 1)
    return chance.choice((*[_CODE] * 10, _JIT, _DARK)) + 8 * unit + (chance.random() < 0.1)


def _stack_address(chance: random.Random) -> int:
    word = chance.randrange(-2, _STACK_WORDS + 2)
    return _STACK + 8 * word + 4 * (chance.random() < 0.05)


def _word(chance: random.Random) -> int:
    kind = chance.random()
    if kind < 0.06:
        return chance.choice(_JUNK)
    return _code_address(chance) if kind < 0.8 else _stack_address(chance)


def _world(seed: int) -> World:
    chance = random.Random(seed)
    units = [chance.choice(_INSTRUCTIONS) for _ in range(_CODE_BYTES // 8)]
    offsets = [chance.randrange(_CODE_BYTES) for _ in range(chance.randrange(1, 40))]
    return World(
        [(offset, _state(chance)) for offset in offsets],
        b"".join(units),
        [_word(chance) for _ in range(_STACK_WORDS)],
        (
            _code_address(chance),
            chance.choice((*[_stack_address(chance)] * 9, chance.choice(_JUNK))),
            chance.choice((*[_stack_address(chance)] * 9, _word(chance))),
            chance.choice((*[_stack_address(chance)] * 9, _word(chance))),
        ),
    )


def _read_u64(memory: dict[int, bytes], address: int) -> int | None:
    """Returns a word of memory that is given by address, None where there is none."""
    for start, data in memory.items():
        if start <= address and address + 8 <= start + len(data):
            return int.from_bytes(data[address - start :][:8], "little")
    return None


def _python_stack(world: World) -> tuple[list[int], WalkEnd, bool]:
    """What Python finds: addresses as the kernel half keeps them, the end, if by a heuristic."""

    def read(address: int) -> int | None:
        return _read_u64(world.memory, address)

    mappings = [Mapping(*code) for code in world.mappings]
    found = ReplayWalker(mappings, read, read_code=read).walk(*world.registers)
    leaf, *callers = found.frames
    addresses = [
        leaf.address,
        *(caller.address + caller.is_exact & _ALL_BITS for caller in callers),
    ]
    return addresses, found.end, any(frame.found_by is FoundBy.HEURISTIC for frame in found.frames)


@settings(max_examples=1500)
@given(st.integers(0, 1 << 64).map(_world))
def test_native_walks_agree(kernel: KernelWalkers, world: World) -> None:
    kernel.set_memory(world.memory)
    kernel.set_code(world.mappings)
    # Twice: the second time from what was kept of the addresses.
    walked = [kernel.walk(*world.registers) for _ in range(2)]
    assert walked[0] == walked[1]
    addresses, end = walked[0]
    expected, expected_end, is_heuristic = _python_stack(world)
    if end is StopReason.TOO_DEEP:
        # Python looks at where the last frame is, too.
        assert addresses[: len(expected)] == expected and len(expected) >= abi.MAX_FRAMES - 1
        return
    # The kernel half keeps a caller in no known mapping, which may be brought yet.
    is_known = any(code.start <= addresses[-1] - 1 < code.end for code in world.mappings)
    if len(addresses) > 1 and not is_known:
        addresses = addresses[:-1]
    assert addresses == expected
    assert end in _KERNEL_ENDS[expected_end]
    if expected_end is WalkEnd.ROOTED:
        assert (end is StopReason.ROOTED_BY_HEURISTIC) == is_heuristic


@settings(max_examples=500)
@given(st.integers(0, 1 << 64).map(_world))
def test_a_copied_stack_is_walked_on_as_if_its_table_had_been_there(
    kernel: KernelWalkers, world: World
) -> None:
    # GIVEN a stack of whole pages, and code whose table is still being built
    page = abi.STACK_PAGE_BYTES
    memory = {**world.memory, _STACK: world.memory[_STACK].ljust(page, b"\0")}
    kernel.set_memory(memory)
    kernel.set_code(world.mappings, has_tables=False)
    copied = kernel.copy(*world.registers)
    assume(copied is not None)
    row = copied[0]
    begin = int(row["stack_pointer"])
    stack = row["memory"].tobytes()[begin % page : int(row["pages"]) * page]
    read_below = []

    def read_all(address: int) -> int | None:
        if not begin <= address <= begin + len(stack) - 8:
            read_below.append(address)
        return _read_u64(memory, address)

    def read_copy(address: int) -> int | None:
        return _read_u64({begin: stack}, address)

    def read_code(address: int) -> int | None:
        return _read_u64(memory, address)

    mappings = [Mapping(*code) for code in world.mappings]
    frame_pointer = int(row["frame_pointer"]) if row["has_frame_pointer"] else None
    base_pointer = int(row["base_pointer"]) if row["depth"] == 1 else None
    registers = Registers(int(row["instruction_pointer"]), begin, frame_pointer, base_pointer)
    start = (registers, bool(row["is_exact"]), int(row["depth"]))
    # WHEN it is walked on with the table, THEN it is as if all memory could be read, where no word
    # is asked for that lies below the stack pointer or past the copy.
    expected = ReplayWalker(mappings, read_all, read_code=read_code).resume(*start)
    assume(not read_below)
    assert ReplayWalker(mappings, read_copy, read_code=read_code).resume(*start) == expected
    # From the leaf on it is the walk that there would have been.
    if start[2] == 1:
        assert ReplayWalker(mappings, read_code, read_code=read_code).walk(*world.registers) == (
            expected
        )


@settings(max_examples=200)
@given(st.integers(0, 1 << 64).map(_world))
def test_a_table_that_comes_after_its_mappings_is_used_at_once(
    kernel: KernelWalkers, world: World
) -> None:
    kernel.set_memory(world.memory)
    kernel.set_code(world.mappings)
    expected = kernel.walk(*world.registers)
    # GIVEN new mappings, and a walk before their tables are there
    kernel.set_code(world.mappings)
    kernel.take_tables_out()
    kernel.walk(*world.registers)
    kernel.put_tables_back()
    assert kernel.walk(*world.registers) == expected


def test_what_is_known_of_an_address_is_of_one_writer(kernel: KernelWalkers) -> None:
    # GIVEN two functions whose callers lie elsewhere on the stack, kept in one place
    one, other = _CODE, _CODE + (1 << 24)
    states = [
        arch.with_ra(arch.with_cfa(0, arch.RSP, offset), arch.RA_AT_CFA_8) for offset in (8, 16)
    ]
    starts = np.array([one - _BIAS, other - _BIAS], np.uint64)
    table = UnwindTable.of_states(starts, np.array(states, np.uint64), {})
    kernel.set_memory({_STACK: struct.pack("<2Q", 11, 22)})
    kernel.set_code([Code(_CODE, other + 4096, _BIAS, table)])
    kept = kernel.known_address(one)
    written = {}
    for function in (one, other):
        kernel.walk(function, _STACK, 0, 0)
        written[function] = kept.copy()
    assert kernel.known_address(other).ctypes.data == kept.ctypes.data
    # WHEN one is interrupted by the other between its two words, in any order
    for words in ([one, other], [other, one], [one, one], [other, other]):
        torn = [written[writer][index] for index, writer in enumerate(words)]
        for function, caller in ((one, 11), (other, 22)):
            kept[:] = torn
            # THEN neither is taken for the other
            assert kernel.walk(function, _STACK, 0, 0).addresses == [function, caller]


_LAYOUTS = [
    *(table_layout((3, minor)) for minor in range(8, 13)),
    read_layout(debug_offsets((3, 13))),
    read_layout(debug_offsets((3, 14))),
    read_layout(debug_offsets((3, 13), free_threaded=True)),
    read_layout(debug_offsets((3, 14), free_threaded=True)),
]
# Room for the thread state, and for as many frames and shims as are walked.
_HEAP, _HEAP_BYTES = 0x7F00_0000_0000, 1024 + 128 * (2 * abi.MAX_FRAMES + 2)


class _Heap:
    """Memory of an interpreter."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, address: int, size: int) -> bytes | None:
        begin = address - _HEAP
        is_inside = begin >= 0 and begin + size <= len(self._data)
        return self._data[begin : begin + size] if is_inside else None


def _linked(layout: Layout, frames: Sequence[tuple[int, int, int]], words: list[int]) -> bytes:
    """Frames of random content, linked as they are told to be; the thread state comes first."""
    data = bytearray(struct.pack(f"<{len(words)}Q", *words) * (_HEAP_BYTES // 8))[:_HEAP_BYTES]

    def put(at: int, word: int) -> None:
        data[at : at + 8] = struct.pack("<Q", word)

    for number, (caller, code, mark) in enumerate(frames):
        at = 1024 + 128 * number
        put(at + layout.frame_previous, caller)
        put(at + layout.frame_code, code)
        if layout.frame_mark >= 0:
            data[at + layout.frame_mark] = mark
    return bytes(data)


_frame_addresses = st.one_of(
    *[st.integers(0, 55).map(lambda number: _HEAP + 1024 + 128 * number)] * 6,
    st.sampled_from((0, 8, _HEAP - 8, _HEAP + 4, _HEAP + _HEAP_BYTES - 64, _ALL_BITS, 1 << 47)),
)
_codes = st.one_of(
    *[st.integers(0, 100).map(lambda number: _HEAP + 64 * number)] * 6,
    st.sampled_from((0, 1, _HEAP + 3, _HEAP + 4, _HEAP + 7, _ALL_BITS)),
)


@settings(max_examples=400)
@given(
    st.sampled_from(_LAYOUTS),
    st.lists(
        st.tuples(_frame_addresses, _codes, st.sampled_from((0, 0, 1, 2, 3, 4, 255))), max_size=60
    ),
    st.booleans(),
    st.lists(st.one_of(_frame_addresses, st.integers(0, _ALL_BITS)), min_size=1, max_size=8),
)
def test_python_walks_agree(
    kernel: KernelWalkers,
    layout: Layout,
    frames: list[tuple[int, int, int]],
    in_order: bool,
    words: list[int],
) -> None:
    _compare_python_walks(kernel, layout, _in_order(frames) if in_order else frames, words)


def test_walks_of_shims_between_all_frames_agree(kernel: KernelWalkers) -> None:
    # GIVEN as many frames and shims as are walked, and then the root
    layout = table_layout((3, 12))
    frames = [(0, _HEAP, mark) for _ in range(abi.MAX_FRAMES) for mark in (0, SHIM_OWNER)]
    for count in (len(frames) - 1, len(frames)):
        linked = _in_order(frames[:count])
        linked[-1] = (0, *linked[-1][1:])
        found = _compare_python_walks(kernel, layout, linked, [0])
        assert found.end is abi.PythonEnd.COMPLETE
        assert len(found.frames) == abi.MAX_FRAMES


def _in_order(frames: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [
        (_HEAP + 1024 + 128 * (number + 1), code, mark)
        for number, (_, code, mark) in enumerate(frames)
    ]


def _compare_python_walks(
    kernel: KernelWalkers,
    layout: Layout,
    frames: Sequence[tuple[int, int, int]],
    words: list[int],
) -> PythonFrames:
    data = bytearray(_linked(layout, frames, words))
    thread_state = struct.pack("<Q", _HEAP + 1024)
    if layout.cframe_frame != ABSENT:
        data[layout.cframe_frame + 512 : layout.cframe_frame + 520] = thread_state
        thread_state = struct.pack("<Q", _HEAP + 512)
    if frames:
        data[layout.thread_frame : layout.thread_frame + 8] = thread_state
    # The thread pointer leads to the thread state, which is where the memory begins.
    state_slot = _HEAP_BYTES - 8
    data[state_slot:] = struct.pack("<Q", _HEAP)
    process: Any = np.zeros(1, abi.PYTHON_PROCESS_DTYPE)
    describe_layout(layout, process[0])
    process["state_slot"] = state_slot
    kernel.set_memory({_HEAP: bytes(data)})
    found = kernel.walk_python(process, _HEAP)
    expected = python_walk.walk(_Heap(bytes(data)), layout, _HEAP)
    assert found.end.name == expected.end.name
    assert found.frames == [
        (frame.code_address, frame.position, frame.ends_run) for frame in expected.frames
    ]
    return found
