# SPDX-License-Identifier: Apache-2.0
"""Finds accesses in compiled programs whose bound old verifiers do not see.

Verifiers before Linux 6.2 know the range of a pointer only from the instructions directly before
the access. Two shapes that compilers like have none: a pointer that moves along in a loop whose end
is counted in another register, and an index that was compared long before, or in a copy.

Instructions: struct bpf_insn (include/uapi/linux/bpf.h); classes and operations are its low three
and high four bits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

_INSTRUCTION = struct.Struct("<BBhi")
_Row = tuple[int, int, int, int]

_FRAME = 10  # the stack's register
_CALLER_SAVED = range(6)

# Classes.
_LD, _LDX, _ST, _STX, _ALU, _JMP, _JMP32, _ALU64 = range(8)
# Operations of _ALU64, and of the jumps.
_ADD, _MUL, _AND, _LSH, _MOV = 0x0, 0x2, 0x5, 0x6, 0xB
_JUMP, _CALL, _EXIT = 0x0, 0x8, 0x9
_LOAD_IMMEDIATE_64 = 0x18
_FROM_REGISTER = 0x08


@dataclass(frozen=True)
class _Value:
    """What is known of a register.

    Attributes:
        origin: The register or stack slot at the beginning of the loop that it comes from.
        is_moved: It is that one plus something.
        is_masked: It was masked, and only copied and scaled since.
        has_free_index: It is a pointer plus an index that was not masked.
    """

    origin: tuple[str, int] | None = None
    is_moved: bool = False
    is_masked: bool = False
    has_free_index: bool = False


_UNKNOWN = _Value()


def unbounded_accesses(instructions: bytes) -> list[str]:
    """Returns a line for each access without a bound: its instruction's number, and why."""
    rows = list(_INSTRUCTION.iter_unpack(instructions))
    return _free_indices(rows) + [
        line for loop in _loops(rows) for line in _moving_pointers(rows, loop)
    ]


def _successors(rows: list[_Row], at: int) -> list[int]:
    opcode, _, offset, _ = rows[at]
    if opcode & 7 in (_JMP, _JMP32):
        operation = opcode >> 4
        if operation == _EXIT:
            return []
        if operation == _JUMP:
            return [at + 1 + offset]
        if operation != _CALL:
            return [at + 1, at + 1 + offset]
    return [at + (2 if opcode == _LOAD_IMMEDIATE_64 else 1)]


def _loops(rows: list[_Row]) -> list[list[int]]:
    """Returns the instructions of each natural loop, in the order of the program.

    Backward jumps that are no loops come from how compilers place what is unlikely.
    """
    before: dict[int, set[int]] = {0: set()}
    pending = [0]
    order = []
    while pending:
        at = pending.pop()
        order.append(at)
        for after in _successors(rows, at):
            if after not in before:
                before[after] = set()
                pending.append(after)
            before[after].add(at)
    return [
        sorted(body)
        for tail in order
        for head in _successors(rows, tail)
        if head <= tail and (body := _natural_loop(before, head, tail)) is not None
    ]


def _natural_loop(before: dict[int, set[int]], head: int, tail: int) -> set[int] | None:
    """What leads from the head to the tail; None where the tail is reached past the head."""
    body, pending = {head, tail}, [tail]
    while pending:
        at = pending.pop()
        if at == head:
            continue
        if at == 0:
            return None
        for earlier in before[at] - body:
            body.add(earlier)
            pending.append(earlier)
    return body


def _base_of(opcode: int, registers: int) -> int | None:
    """The register that a load or a store goes through, None for other instructions."""
    if opcode & 7 == _LDX:
        return registers >> 4
    if opcode & 7 in (_ST, _STX):
        return registers & 15
    return None


def _free_indices(rows: list[_Row]) -> list[str]:
    """Indices that are not masked in the straight line of instructions before the access."""
    targets = {
        at + 1 + offset
        for at, (opcode, _, offset, _) in enumerate(rows)
        if opcode & 7 in (_JMP, _JMP32) and opcode >> 4 not in (_CALL, _EXIT)
    }
    state: dict[int, _Value] = {}
    found = []
    for at, row in enumerate(rows):
        if at in targets:
            state = {r: replace(v, is_masked=False) for r, v in state.items() if v.has_free_index}
        base = _base_of(row[0], row[1])
        if base is not None and state.get(base, _UNKNOWN).has_free_index:
            found.append(f"{at}: an index that is not masked")
        _follow(state, {}, row)
        if at + 1 not in _successors(rows, at) and row[0] & 7 in (_JMP, _JMP32):
            state = {}  # what follows in the program does not follow in time
    return found


def _moving_pointers(rows: list[_Row], loop: list[int]) -> list[str]:
    """Pointers that each round of a loop moves on, and goes through."""
    state = {register: _Value(("register", register)) for register in range(_FRAME)}
    slots: dict[int, _Value] = {}
    used: dict[tuple[str, int], int] = {}
    for at in loop:
        base = _base_of(rows[at][0], rows[at][1])
        if base is not None and base != _FRAME:
            origin = state.get(base, _UNKNOWN).origin
            if origin is not None:
                used.setdefault(origin, at)
        _follow(state, slots, rows[at])
    last = {("register", r): v for r, v in state.items()}
    last |= {("slot", s): v for s, v in slots.items()}
    return [
        f"{used[origin]}: a pointer that moves in the loop at {loop[0]}"
        for origin, value in last.items()
        if origin in used and value.origin == origin and value.is_moved
    ]


def _follow(state: dict[int, _Value], slots: dict[int, _Value], row: _Row) -> None:
    """Applies one instruction."""
    opcode, registers, offset, _ = row
    kind, target, source = opcode & 7, registers & 15, registers >> 4
    if kind == _STX and target == _FRAME:
        slots[offset] = state.get(source, _UNKNOWN)
    elif kind == _LDX:
        kept = slots.setdefault(offset, _Value(("slot", offset))) if source == _FRAME else _UNKNOWN
        state[target] = kept
    elif kind == _LD:
        state[target] = _UNKNOWN
    elif kind in (_JMP, _JMP32) and opcode >> 4 == _CALL:
        for register in _CALLER_SAVED:
            state[register] = _UNKNOWN
    elif kind in (_ALU, _ALU64):
        state[target] = _computed(state, opcode, target, source)


def _computed(state: dict[int, _Value], opcode: int, target: int, source: int) -> _Value:
    """What an arithmetic instruction leaves in its target."""
    operation, is_wide = opcode >> 4, opcode & 7 == _ALU64
    mine, other = state.get(target, _UNKNOWN), state.get(source, _UNKNOWN)
    if operation == _MOV:
        if not opcode & _FROM_REGISTER:
            return _Value(is_masked=True)  # a constant
        return other if is_wide else replace(other, origin=None)
    if operation == _AND and not opcode & _FROM_REGISTER:
        return _Value(is_masked=True)
    if operation in (_LSH, _MUL) and not opcode & _FROM_REGISTER:
        return _Value(is_masked=mine.is_masked)
    if operation == _ADD and is_wide:
        if not opcode & _FROM_REGISTER:
            return replace(mine, is_moved=True)
        if other.is_masked:
            return _Value(origin=mine.origin, has_free_index=mine.has_free_index)
        if mine.is_masked:
            return _Value(origin=other.origin, has_free_index=other.has_free_index)
        return _Value(has_free_index=True)
    return _UNKNOWN
