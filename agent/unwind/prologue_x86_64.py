# SPDX-License-Identifier: Apache-2.0
"""Unwind rows of functions without CFI, read off their first instructions.

Hand-written kernels (MKL's, for instance) and code of compilers that were told to leave CFI out
still make their frames at the beginning: registers are pushed, room is made, registers are stored.
As far as the instructions are plain, the frame is known; what is found is a heuristic all the same,
and a walker checks that the address it leads to follows a call.

Kernels that align their stack keep where it was: in RBX, as OpenBLAS's for matrices do (v0.3.30
kernel/x86_64/dgemm_kernel_4x8_haswell.S), or in the new stack, as MKL's (2024.2,
mkl_blas_avx512_dgemm_kernel_nocopy_NN_bn). That it stays there is not looked up in all of their
code, which would take longer than all else; that they find their way back by it is. Where RBX is
used for something else for a while, the check of the walker is what is left.

Capstone decodes. The first instruction that goes elsewhere or takes something off the stack is past
the prologue. Not here: following jumps. A function that makes its frame after one gets no rows.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.x86_64 import RbpKind

WORD_BYTES = 8
_MAX_INSTRUCTION_BYTES = 15
# The longest prologue seen in MKL has 23 instructions; a hostile one must not cost more.
_MAX_INSTRUCTIONS = 48
# Decoded at a time, as most prologues are over soon.
_CHUNK_INSTRUCTIONS = 12

# Of what an instruction with 32 bits for it can take from RSP.
_MAX_ROOM_BYTES = 1 << 31

# The pop that undoes the push of a register.
_POPS = {
    name: bytes([0x58 + number])
    for number, name in enumerate(("rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi"))
}
_POPS |= {f"r{8 + number}": bytes([0x41, 0x58 + number]) for number in range(8)}
RSP_NAMES = frozenset(("rsp", "esp", "sp", "spl"))
RBP_NAMES = frozenset(("rbp", "ebp", "bp", "bpl"))
_NAMES = {"rbp": RBP_NAMES, "rbx": frozenset(("rbx", "ebx", "bx", "bl", "bh"))}
# They read their first operand only.
COMPARES = frozenset(("cmp", "test", "bt", "nop"))
EXCHANGES = frozenset(("xchg", "xadd"))
# What ends a prologue: it goes elsewhere, or moves RSP in a way that is not followed here.
_ENDS = re.compile(
    r"j|ljmp|loop|l?call|i?ret|sys|enter|leave|pop(?!cnt)|pushf|int|ud\d|hlt|xbegin|xabort"
)
IMMEDIATE = re.compile(r"-?(?:0x[0-9a-f]+|\d+)")
_SLOT = re.compile(r"qword ptr \[rsp(?: \+ (0x[0-9a-f]+|\d+))?\], rb[px]")
# What names RSP, RBP or RBX, in any width.
_OF_FRAMES = re.compile(r"[sb]p|b[xlh]")

# Frames made after the prologue. sub or and, immediate, RSP: room. push %rbp; mov %rsp,%rbp: as in
# V8's Builtins_InterpreterEntryTrampoline (v11.3), which looks at its function first.
_LATE_FRAME = re.compile(rb"\x48[\x81\x83][\xec\xe4]|\x55\x48(?:\x89\xe5|\x8b\xec)")
_RETS = (b"\xc3", b"\xf2\xc3", b"\xf3\xc3")
# Where a copy of RSP may be, and the form of the CFA that this makes.
_BY_COPY = {"rbx": arch.RBX, "rbp": arch.CFA_RBP_HEURISTIC}
# mov from there to RSP, in its two encodings.
_BACK = {"rbx": (b"\x48\x89\xdc", b"\x48\x8b\xe3"), "rbp": (b"\x48\x89\xec", b"\x48\x8b\xe5")}
# mov %rax,%rsp: after a mov to RAX from where it is on the stack.
_BACK_BY_RAX = b"\x48\x89\xc4"
# What is farther from a return does not undo a frame: this keeps the search cheap. OpenBLAS loads
# six registers (29 bytes) before it takes their room away.
_SOON_RET = rb"(?=[\s\S]{0,48}\xc3)"
# MKL's functions have eight returns at most; a hostile one must not cost more.
_MAX_WAYS_BACK = 256


class Row(NamedTuple):
    """From `offset` bytes into the function on, `state` (see `x86_64`) holds."""

    offset: int
    state: int


@dataclass
class _Frame:
    """What a prologue has done so far. Offsets in bytes.

    Attributes:
        cfa_offset: From RSP.
        rbp_cfa_offset: From RBP, once it is the frame pointer.
        saved_rbp: From the CFA.
        has_saved_rbx: RBX may be used.
        room: Made below the pushed registers.
        pushed: The pop that undoes each push, in order.
        copied: This as it was when RSP was copied to a register, which still holds that.
        copy: That register.
        base: As `copied`, once RSP was moved in a way that only the copy outlasts.
        slot: Where the copy is from RSP, once it is there, and RSP is not moved any more.
    """

    cfa_offset: int = WORD_BYTES
    rbp_cfa_offset: int | None = None
    saved_rbp: int | None = None
    has_saved_rbx: bool = False
    room: int = 0
    pushed: tuple[bytes, ...] = ()
    copied: _Frame | None = None
    copy: str = ""
    base: _Frame | None = None
    slot: int | None = None

    def state(self) -> int:
        if self.rbp_cfa_offset is not None:
            form, offset = arch.CFA_RBP_HEURISTIC, self.rbp_cfa_offset
        elif self.base is not None and self.slot is not None:
            form, offset = arch.CFA_RSP_SLOT, arch.slot_and_offset(self.slot, self.base.cfa_offset)
        elif self.base is not None:
            form, offset = _BY_COPY[self.copy], self.base.cfa_offset
        else:
            form, offset = arch.CFA_RSP_HEURISTIC, self.cfa_offset
        state = arch.with_ra(arch.with_cfa(0, form, offset), arch.RA_AT_CFA_8)
        if self.saved_rbp is None:
            return arch.with_rbp(state, RbpKind.SAME)
        return arch.with_rbp(state, RbpKind.AT_CFA, self.saved_rbp)


def rows_of_function(code: bytes) -> list[Row]:
    """Returns the rows of a function without CFI, ascending; none where its frame is not plain.

    Args:
        code: All of its bytes.
    """
    frame = _Frame()
    rows = [Row(0, frame.state())]
    at = 0
    for end, mnemonic, operands in _decoded(code, 0, _MAX_INSTRUCTIONS):
        is_back = frame.base is not None and mnemonic == "mov" and operands.startswith("rsp, ")
        if is_back or _is_past(mnemonic, operands):
            break
        # Few instructions are a push or name such a register.
        if mnemonic == "push" or _OF_FRAMES.search(operands) is not None:
            if not _apply(frame, mnemonic, operands):
                return []
            state = frame.state()
            if state != rows[-1].state:
                rows.append(Row(end, state))
        at = end
    is_by_rsp = frame.rbp_cfa_offset is None and (frame.base is None or frame.slot is not None)
    if is_by_rsp and _LATE_FRAME.search(code, at):
        return []
    return _with_returns(rows, frame, code, at)


@cache
def _decoder() -> Any:
    # Here, as it takes 30 ms: most binaries have CFI for all of their functions.
    import capstone

    return capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)


def decode(code: bytes, address: int, most: int) -> Iterable[tuple[int, int, str, str]]:
    """Decodes instructions up to the first that is none: address, size, mnemonic, operands."""
    found: Iterable[tuple[int, int, str, str]] = _decoder().disasm_lite(code, address, most)
    return found


def _decoded(code: bytes, at: int, most: int) -> Iterator[tuple[int, str, str]]:
    """Decodes instructions up to the first that is none: end, mnemonic, operands."""
    count = most_at_once = min(most, _CHUNK_INSTRUCTIONS)
    while most > 0 and count == most_at_once:
        chunk = code[at : at + most_at_once * _MAX_INSTRUCTION_BYTES]
        count = 0
        for start, size, mnemonic, operands in decode(chunk, at, most_at_once):
            at = start + size
            count += 1
            yield at, mnemonic, operands
        most -= count


@cache  # of as many as there are instructions
def _is_end(mnemonic: str) -> bool:
    """Whether an instruction is past a prologue whatever its operands are."""
    without_prefix = mnemonic.rpartition(" ")[2]  # as "repz ret" has one
    return _ENDS.match(without_prefix) is not None


def _is_past(mnemonic: str, operands: str) -> bool:
    """Whether the prologue is over: also when a value is pushed, or room is taken away."""
    if mnemonic == "push":
        return operands not in _POPS
    if mnemonic == "add" and operands.startswith("rsp, "):
        return IMMEDIATE.fullmatch(operands, len("rsp, ")) is not None
    return _is_end(mnemonic)


def _apply(frame: _Frame, mnemonic: str, operands: str) -> bool:
    """Follows what an instruction does to the frame; False where that is not plain."""
    if mnemonic == "push":
        return _push(frame, operands)
    target, _, source = operands.partition(", ")
    if mnemonic == "mov" and source in ("rbp", "rbx"):
        slot = _SLOT.fullmatch(operands)
        if slot is not None:
            _store(frame, source, int(slot[1] or "0", 0))
    if mnemonic == "mov" and operands == "rbp, rsp" and not frame.room:
        if frame.saved_rbp != -2 * WORD_BYTES:
            return False
        frame.rbp_cfa_offset = frame.cfa_offset
        return True
    if mnemonic == "mov" and source == "rsp" and target in _BY_COPY and frame.base is None:
        is_saved = frame.has_saved_rbx if target == "rbx" else frame.saved_rbp is not None
        frame.copied, frame.copy = replace(frame), target
        return is_saved
    if mnemonic in COMPARES:
        return True
    written = {target, source} if mnemonic in EXCHANGES else {target}
    if written & _NAMES.get(frame.copy, frozenset()):
        if frame.base is not None and frame.slot is None:
            return False
        frame.copied = None
    if written & RBP_NAMES:
        # For another use: it must have been saved before, and must not hold the frame.
        return frame.saved_rbp is not None and frame.rbp_cfa_offset is None
    return not written & RSP_NAMES or _move_rsp(frame, mnemonic, operands)


def _move_rsp(frame: _Frame, mnemonic: str, operands: str) -> bool:
    """sub of an immediate makes room; what else is done to RSP only another register outlasts."""
    target, _, source = operands.partition(", ")
    is_immediate = IMMEDIATE.fullmatch(source) is not None
    if frame.rbp_cfa_offset is not None:
        return is_immediate
    if frame.base is not None:
        return frame.slot is None
    size_bytes = int(source, 0) if is_immediate else 0
    # sub $-128 is shorter than add $128.
    is_room = 0 < size_bytes < _MAX_ROOM_BYTES and size_bytes % WORD_BYTES == 0
    if mnemonic != "sub" or target != "rsp" or not is_room or frame.room:
        frame.base = frame.copied
        return frame.base is not None
    frame.cfa_offset += size_bytes
    frame.room = size_bytes
    return True


def _push(frame: _Frame, register: str) -> bool:
    if frame.room or frame.base is not None:
        return False
    frame.cfa_offset += WORD_BYTES
    if register == "rbp" and frame.saved_rbp is None:
        frame.saved_rbp = -frame.cfa_offset
    frame.has_saved_rbx |= register == "rbx"
    frame.pushed += (_POPS[register],)
    return True


def _store(frame: _Frame, register: str, offset: int) -> None:
    """mov qword ptr [rsp + offset], register"""
    if frame.base is not None:
        if register == frame.copy and frame.slot is None and offset < arch.MAX_SLOT:
            frame.slot = offset
        return
    if offset >= frame.cfa_offset - WORD_BYTES:
        return
    if register == "rbx":
        frame.has_saved_rbx = True
    elif frame.saved_rbp is None:
        frame.saved_rbp = offset - frame.cfa_offset


def _with_returns(rows: list[Row], frame: _Frame, code: bytes, at: int) -> list[Row]:
    """Adds rows for the instructions before each return, which take the frame away again."""
    full = rows[-1].state
    count = len(rows)
    for undo in _ways_back(frame):
        states = _undone_states(frame, undo)
        found = re.finditer(re.escape(undo[0].code) + _SOON_RET, code[at:])
        for match in islice(found, _MAX_WAYS_BACK):
            ends, return_end = _to_return(code, at + match.start(), undo)
            rows += [Row(*row) for row in zip(ends, states, strict=False)]
            if ends:
                rows.append(Row(return_end, full))
    if frame.base is not None and len(rows) == count:
        return []  # it may be anywhere by then
    return sorted(row for row in rows if row.offset < len(code))


class _Undo(NamedTuple):
    """An instruction that takes a part of a frame away, and how much of the stack."""

    code: bytes
    size_bytes: int


def _ways_back(frame: _Frame) -> list[list[_Undo]]:
    """How a function may take its frame away before it returns; none: it has none."""
    if frame.rbp_cfa_offset is not None:
        all_bytes = frame.cfa_offset - WORD_BYTES
        return [[_Undo(leave, all_bytes)] for leave in (b"\xc9", b"\x5d")]
    if frame.base is not None:
        return [[_Undo(back, 0), *_undo(frame.base)] for back in _back(frame)]
    undo = _undo(frame)
    return [undo] if undo else []


def _back(frame: _Frame) -> tuple[bytes, ...]:
    """The instruction that sets RSP to what it was when it was copied, in its encodings."""
    if frame.slot is None:
        return _BACK[frame.copy]
    if frame.slot < 128:
        return b"\x48\x8b\x64\x24" + struct.pack("<b", frame.slot), _BACK_BY_RAX
    return b"\x48\x8b\xa4\x24" + struct.pack("<i", frame.slot), _BACK_BY_RAX


def _to_return(code: bytes, at: int, undo: list[_Undo]) -> tuple[list[int], int]:
    """Follows plain code from the first of the instructions that take the frame away.

    Returns:
        Where each of them ends, and where the return does; nothing unless all stand before one.
    """
    ends: list[int] = []
    for end, mnemonic, _ in _decoded(code, at, _MAX_INSTRUCTIONS):
        left = undo[len(ends) :]
        if left and code[at:end] == left[0].code:
            ends.append(end)
        elif code[at:end] in _RETS:
            return (ends, end) if not left else ([], 0)
        elif _is_end(mnemonic):
            break
        at = end
    return [], 0


def _undo(frame: _Frame) -> list[_Undo]:
    """The instructions that take pushed registers and their room away."""
    pops = [_Undo(pop, WORD_BYTES) for pop in frame.pushed[::-1]]
    if not frame.room:
        return pops
    if frame.room < 128:
        return [_Undo(b"\x48\x83\xc4" + struct.pack("<b", frame.room), frame.room), *pops]
    return [_Undo(b"\x48\x81\xc4" + struct.pack("<i", frame.room), frame.room), *pops]


def _undone_states(frame: _Frame, undo: list[_Undo]) -> list[int]:
    """The state after each of them."""
    left = _Frame((frame.base or frame).cfa_offset, saved_rbp=frame.saved_rbp)
    states = []
    for instruction in undo:
        left.cfa_offset -= instruction.size_bytes
        if left.saved_rbp is not None and left.saved_rbp < -left.cfa_offset:
            left.saved_rbp = None  # below the stack pointer: RBP has been loaded again
        states.append(left.state())
    return states
