# SPDX-License-Identifier: Apache-2.0
"""Unwind rows of functions without CFI, read off their first instructions.

Hand-written kernels (MKL's, for instance) and code of compilers that were told to leave CFI out
still make their frames at the beginning: registers are pushed, room is made, registers are stored.
As far as the instructions are plain, the frame is known; what is found is a guess all the same,
and a walker checks that the address it leads to follows a call.

Decodes lengths of the instructions that stand in prologues (Intel SDM volume 2, appendix A); stops
at any other. Not here: following jumps. A function that makes its frame behind one gets no rows.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.x86_64 import RbpKind

WORD_BYTES = 8
# Numbers in instructions; DWARF's differ.
_RSP, _RBP = 4, 5
# The longest prologue seen in MKL has 23 instructions; a hostile one must not cost more.
_MAX_INSTRUCTIONS = 48
# Longer than any instruction (15 bytes), so that fields can be read without a check.
_PADDING = bytes(16)

_MODRM_ONLY = {
    *(base + low for base in range(0, 0x40, 8) for low in range(4)),  # ALU
    *(0x63, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8A, 0x8B, 0x8D, 0xD1, 0xD3),
}
_MODRM_IMMEDIATE = {0x6B: 1, 0x80: 1, 0x83: 1, 0xC0: 1, 0xC1: 1, 0xC6: 1}
_MODRM_IMMEDIATE |= {0x69: 4, 0x81: 4, 0xC7: 4}
_BARE = {0x90: 0, 0x98: 0, 0x99: 0, 0xA8: 1, 0xA9: 4}
_BARE |= {base + 4: 1 for base in range(0, 0x40, 8)} | {base + 5: 4 for base in range(0, 0x40, 8)}
# Of the 0F map: moves, logic, conversions, no-operations; all with ModRM and without immediate.
_TWO_BYTE = {*range(0x10, 0x20), *range(0x28, 0x30), *range(0x40, 0x70), 0x7E, 0x7F, 0xAF}
_TWO_BYTE |= {0xB6, 0xB7, 0xBE, 0xBF, 0xD6, 0xE7, 0xEF}
# With these in map 1 an 8-bit immediate follows ModRM; in map 3 one always does.
_VECTOR_IMMEDIATE = {0x70, 0x71, 0x72, 0x73, 0xC2, 0xC4, 0xC5, 0xC6}
_VZEROUPPER = 0x77
_ENDBR64 = b"\xf3\x0f\x1e\xfa"

# sub or and, immediate, RSP: room that is made behind the prologue.
_LATE_FRAME = re.compile(rb"\x48[\x81\x83][\xec\xe4]")
# What takes room away again: the prologue is over.
_ADD_TO_RSP = (b"\x48\x83\xc4", b"\x48\x81\xc4")
_RET = b"\xc3"
_RETS = (_RET, b"\xf2\xc3", b"\xf3\xc3")
# What is farther from a return does not undo a frame: this keeps the search cheap.
_SOON_RET = rb"(?=[\s\S]{0,32}\xc3)"


class Row(NamedTuple):
    """From `offset` bytes into the function on, `state` (see `x86_64`) holds."""

    offset: int
    state: int


class _Instruction(NamedTuple):
    length: int
    opcode: int  # -1 for all that is no one-byte opcode
    rex: int
    modrm: int  # -1 for none
    operands_at: int  # of ModRM, or of the immediate


class _Frame:
    """What a prologue has done so far. Offsets in bytes."""

    def __init__(self) -> None:
        self.cfa_offset = WORD_BYTES  # from RSP
        self.rbp_cfa_offset: int | None = None  # from RBP, once it is the frame pointer
        self.saved_rbp: int | None = None  # from the CFA
        self.room = 0  # made below the pushed registers
        self.pushed: list[bytes] = []  # the pop that undoes each push, in order

    def state(self) -> int:
        if self.rbp_cfa_offset is not None:
            form, offset = arch.CFA_RBP_GUESS, self.rbp_cfa_offset
        else:
            form, offset = arch.CFA_RSP_GUESS, self.cfa_offset
        state = arch.with_ra(arch.with_cfa(0, form, offset), arch.RA_AT_CFA_8)
        if self.saved_rbp is None:
            return arch.with_rbp(state, RbpKind.SAME)
        return arch.with_rbp(state, RbpKind.AT_CFA, self.saved_rbp)


def rows_of_function(code: bytes) -> list[Row]:
    """Returns the rows of a function without CFI, ascending; none where its frame is not plain.

    Args:
        code: All of its bytes.
    """
    padded = code[: _MAX_INSTRUCTIONS * 15] + _PADDING
    frame = _Frame()
    rows = [Row(0, frame.state())]
    at = 0
    for _ in range(_MAX_INSTRUCTIONS):
        instruction = None if padded.startswith(_ADD_TO_RSP, at) else _decode(padded, at)
        if instruction is None or at + instruction.length > len(code):
            break
        if not _apply(frame, padded, instruction):
            return []
        at += instruction.length
        if frame.state() != rows[-1].state:
            rows.append(Row(at, frame.state()))
    if frame.rbp_cfa_offset is None and _LATE_FRAME.search(code, at):
        return []
    return _with_returns(rows, frame, code, at)


def _decode(code: bytes, at: int) -> _Instruction | None:
    start = at
    if code[at : at + 4] == _ENDBR64:
        return _Instruction(4, -1, 0, -1, at + 4)
    if code[at] in (0xC4, 0xC5, 0x62):
        return _vector(code, at)
    while code[at] in (0x66, 0xF2, 0xF3) and at - start < 4:
        at += 1
    rex = code[at] if code[at] & 0xF0 == 0x40 else 0
    at += bool(rex)
    opcode = code[at]
    at += 1
    if opcode == 0x0F:
        has_modrm = code[at] in _TWO_BYTE
        return _with_modrm(code, start, at + 1, (-1, rex), 0) if has_modrm else None
    if opcode in _MODRM_ONLY:
        return _with_modrm(code, start, at, (opcode, rex), 0)
    if opcode in _MODRM_IMMEDIATE:
        return _with_modrm(code, start, at, (opcode, rex), _MODRM_IMMEDIATE[opcode])
    if 0x50 <= opcode < 0x58:
        return _Instruction(at - start, opcode, rex, -1, at)
    if 0xB8 <= opcode < 0xC0:
        return _Instruction(at - start + (8 if rex & 8 else 4), -1, rex, -1, at)
    if opcode in _BARE:
        return _Instruction(at - start + _BARE[opcode], -1, rex, -1, at)
    return None


def _vector(code: bytes, start: int) -> _Instruction | None:
    """An instruction with a VEX or EVEX prefix (SDM volume 2A, 2.3.5 and 2.7.1)."""
    first = code[start]
    opcode_at = start + {0xC5: 2, 0xC4: 3, 0x62: 4}[first]
    opcode_map = 1 if first == 0xC5 else code[start + 1] & (0x1F if first == 0xC4 else 7)
    opcode = code[opcode_at]
    if opcode_map not in (1, 2, 3):
        return None
    if opcode_map == 1 and opcode == _VZEROUPPER and first != 0x62:
        return _Instruction(opcode_at + 1 - start, -1, 0, -1, opcode_at + 1)
    has_immediate = opcode_map == 3 or (opcode_map == 1 and opcode in _VECTOR_IMMEDIATE)
    return _with_modrm(code, start, opcode_at + 1, (-1, 0), int(has_immediate))


def _with_modrm(
    code: bytes, start: int, at: int, opcode_rex: tuple[int, int], immediate: int
) -> _Instruction:
    modrm = code[at]
    mode, memory = modrm >> 6, modrm & 7
    length = 1
    if mode != 3 and memory == 4:
        length += 1
        if mode == 0 and code[at + 1] & 7 == 5:
            length += 4
    if mode == 0 and memory == 5:
        length += 4
    length += {1: 1, 2: 4}.get(mode, 0)
    return _Instruction(at + length + immediate - start, *opcode_rex, modrm, at)


def _apply(frame: _Frame, code: bytes, instruction: _Instruction) -> bool:
    """Follows what an instruction does to the frame; False where that is not plain."""
    opcode, rex, modrm, at = instruction[1:]
    if 0x50 <= opcode < 0x58:
        return _push(frame, opcode - 0x50 + 8 * (rex & 1))
    if modrm < 0 or opcode < 0:
        return True
    register = (modrm >> 3 & 7) + 2 * (rex & 4)
    operand = (modrm & 7) + 8 * (rex & 1)
    if modrm >> 6 != 3:
        if opcode == 0x89 and register == _RBP and modrm & 7 == 4 and rex == 0x48:
            _store_rbp(frame, code, at)
        # Into RSP: from memory (mov, ALU) or an address (lea).
        into_register = opcode in (0x8B, 0x8D, 0x63) or (opcode < 0x40 and opcode & 2)
        return not (into_register and register == _RSP)
    is_reverse = opcode == 0x8B or (opcode < 0x40 and bool(opcode & 2))
    source, target = (operand, register) if is_reverse else (register, operand)
    if opcode in (0x89, 0x8B) and (source, target) == (_RSP, _RBP):
        if frame.saved_rbp != -2 * WORD_BYTES:
            return False
        frame.rbp_cfa_offset = frame.cfa_offset
        return True
    if opcode in (0x81, 0x83):
        return _immediate(frame, code, instruction)
    compares = opcode in (0x84, 0x85) or 0x38 <= opcode < 0x40
    if compares or target != _RSP:
        # RBP taken for another use, before it was saved.
        return compares or target != _RBP or frame.saved_rbp is not None
    return False


def _push(frame: _Frame, register: int) -> bool:
    if frame.room:
        return False
    frame.cfa_offset += WORD_BYTES
    if register == _RBP and frame.saved_rbp is None:
        frame.saved_rbp = -frame.cfa_offset
    low = 0x58 + (register & 7)
    frame.pushed.append(bytes([0x41, low] if register >= 8 else [low]))
    return True


def _store_rbp(frame: _Frame, code: bytes, at: int) -> None:
    """mov %rbp, offset(%rsp)"""
    if code[at + 1] != 0x24 or frame.saved_rbp is not None:
        return
    form = {0: "", 1: "<b", 2: "<i"}[code[at] >> 6]
    offset = struct.unpack_from(form, code, at + 2)[0] if form else 0
    if 0 <= offset < frame.cfa_offset - WORD_BYTES:
        frame.saved_rbp = offset - frame.cfa_offset


def _immediate(frame: _Frame, code: bytes, instruction: _Instruction) -> bool:
    """sub or add of an immediate to RSP; `and` aligns it, which only a frame pointer outlasts."""
    _, opcode, rex, modrm, at = instruction
    target, operation = (modrm & 7) + 8 * (rex & 1), modrm >> 3 & 7
    if target == _RBP:
        return frame.saved_rbp is not None and frame.rbp_cfa_offset is None
    if target != _RSP or operation == 7:
        return True
    value = struct.unpack_from("<b" if opcode == 0x83 else "<i", code, at + 1)[0]
    if frame.rbp_cfa_offset is not None:
        return True
    if operation == 5 and value > 0 and value % WORD_BYTES == 0 and not frame.room:
        frame.cfa_offset += value
        frame.room = value
        return True
    # sub $-128 is shorter than add $128.
    return False


def _with_returns(rows: list[Row], frame: _Frame, code: bytes, at: int) -> list[Row]:
    """Adds rows for the instructions before each return, which take the frame away again."""
    full = rows[-1].state
    if frame.rbp_cfa_offset is not None:
        ways = [([leave], [_Frame().state()]) for leave in (b"\xc9", b"\x5d")]
    elif frame.cfa_offset > WORD_BYTES:
        undo = _undo(frame)
        ways = [(undo, _undone_states(frame, undo))]
    else:
        return rows
    padded = code + _PADDING
    for undo, states in ways:
        for match in re.finditer(re.escape(undo[0]) + _SOON_RET, code[at:]):
            places, end = _to_return(padded, at + match.start(), undo)
            rows += [Row(*row) for row in zip(places, states, strict=False)]
            if places:
                rows.append(Row(end, full))
    return sorted(row for row in rows if row.offset < len(code))


def _to_return(code: bytes, at: int, undo: list[bytes]) -> tuple[list[int], int]:
    """Follows plain code from the first of the instructions that take the frame away.

    Returns:
        Where each of them ends, and where the return does; nothing unless all stand before one.
    """
    places: list[int] = []
    for _ in range(_MAX_INSTRUCTIONS):
        left = undo[len(places) :]
        if left and code.startswith(left[0], at):
            at += len(left[0])
            places.append(at)
            continue
        if code.startswith(_RETS, at):
            return (places, code.index(_RET, at) + 1) if not left else ([], 0)
        instruction = _decode(code, at)
        if instruction is None:
            break
        at += instruction.length
    return [], 0


def _undo(frame: _Frame) -> list[bytes]:
    """The instructions that take a frame away."""
    pops = frame.pushed[::-1]
    if not frame.room:
        return pops
    if frame.room < 128:
        return [b"\x48\x83\xc4" + struct.pack("<b", frame.room), *pops]
    return [b"\x48\x81\xc4" + struct.pack("<i", frame.room), *pops]


def _undone_states(frame: _Frame, undo: list[bytes]) -> list[int]:
    """The state behind each of them."""
    left = _Frame()
    left.cfa_offset = frame.cfa_offset
    left.saved_rbp = frame.saved_rbp
    states = []
    for instruction in undo:
        left.cfa_offset -= frame.room if instruction[:1] == b"\x48" else WORD_BYTES
        if left.saved_rbp is not None and left.saved_rbp < -left.cfa_offset:
            left.saved_rbp = None  # below the stack pointer: RBP has been loaded again
        states.append(left.state())
    return states
