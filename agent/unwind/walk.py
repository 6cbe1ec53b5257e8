# SPDX-License-Identifier: Apache-2.0
"""Walks a recorded stack with unwind tables, step by step as the kernel half does.

For threads that no probe sees, for tests, and for replaying in Python what went wrong on another
machine: it needs registers, a way to read words of the stack and of code, and the mappings with
their tables; no root and no live process.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from aiflame.agent.unwind.x86_64 import (
    HEURISTICS,
    RbpKind,
    Rule,
    RuleKind,
    follows_call,
    return_slot,
)

# Twice as deep as perf goes; deeper stacks, of Python frames as well, lose their root, and say so.
MAX_FRAMES = 255
WORD_BYTES = 8
_ADDRESS_MASK = (1 << 64) - 1
# A return address lies after a call, which may be the last instruction of its function.
_INTO_CALL = 1

# Reads one word of the target's memory; None where it is not readable.
ReadU64 = Callable[[int], int | None]


class WalkEnd(enum.Enum):
    """Why a walk ended; the value is what a reader sees."""

    ROOTED = "rooted"  # at a frame that has no caller
    NO_TABLE = "no table"  # code without CFI, and no frame pointer led on
    UNREADABLE = "unreadable memory"
    TOO_DEEP = "too deep"
    UNSUPPORTED = "unsupported rule"
    BAD_ADDRESS = "bad address"  # a caller outside all code, or a stack that does not grow


class FoundBy(enum.Enum):
    """What led from the callee to a frame."""

    REGISTERS = "registers"
    TABLE = "table"
    FRAME_POINTER = "frame pointer"
    # A prologue's row, what the next instructions undo, a leaf's top of the stack: after a call.
    # And a leaf's frame pointer, where what is on top of the stack is after a call as well.
    HEURISTIC = "heuristic"


class RuleSource(Protocol):
    """What a walk asks of an `UnwindTable`."""

    def lookup(self, address: int) -> Rule:
        """The rule for an instruction at a virtual address of the binary."""


class Mapping(NamedTuple):
    """Executable memory of the process. `address - bias` is an address of the table's binary."""

    start: int
    end: int
    bias: int
    table: RuleSource | None  # None: generated code


class WalkedFrame(NamedTuple):
    """An instruction pointer; an exact one is not a return address (leaf, interrupted frame)."""

    address: int
    is_exact: bool
    found_by: FoundBy


@dataclass(frozen=True, slots=True)
class Walk:
    """Frames from the leaf on, and why there are no more."""

    frames: tuple[WalkedFrame, ...]
    end: WalkEnd


class Registers(NamedTuple):
    """What a walk needs of a thread; `rbp` None once it is lost, `rbx` above the leaf."""

    rip: int
    rsp: int
    rbp: int | None
    rbx: int | None = None


class _Stop(Exception):
    def __init__(self, end: WalkEnd) -> None:
        super().__init__(end.value)
        self.end = end


class ReplayWalker:
    """Walks stacks of one process.

    Args:
        mappings: Executable mappings, disjoint, in any order.
        read_u64: Reads a word of the recorded stack.
        max_frames: Where a walk is given up.
        read_code: Reads a word of code; without it, any address in code may be a return address,
            and none is found by what the next instructions undo.
    """

    def __init__(
        self,
        mappings: Sequence[Mapping],
        read_u64: ReadU64,
        max_frames: int = MAX_FRAMES,
        read_code: ReadU64 | None = None,
    ) -> None:
        self._mappings = sorted(mappings, key=lambda mapping: mapping.start)
        self._starts = [mapping.start for mapping in self._mappings]
        self._read_u64 = read_u64
        self._max_frames = max_frames
        self._read_code = read_code

    def walk(self, rip: int, rsp: int, rbp: int, rbx: int | None = None) -> Walk:
        """Follow the stack of a thread with these registers to its end."""
        return self.resume(Registers(rip, rsp, rbp, rbx), is_exact=True, depth=1)

    def resume(self, registers: Registers, is_exact: bool, depth: int) -> Walk:
        """Goes on with a walk.

        Args:
            registers: At the last frame that is known.
            is_exact: That frame's instruction pointer is not a return address.
            depth: How many frames are known; 1: it is the leaf.

        Returns:
            The last frame that was known, and those after it.
        """
        frames = [WalkedFrame(registers.rip, is_exact, FoundBy.REGISTERS)]
        most = self._max_frames - depth + 1
        try:
            while True:
                at_leaf = depth == 1 and len(frames) == 1
                registers, frame = self._caller(registers, frames[-1].is_exact, at_leaf)
                if self._mapping(frame.address, frame.is_exact) is None:
                    no_table = frame.found_by == FoundBy.FRAME_POINTER
                    raise _Stop(WalkEnd.NO_TABLE if no_table else WalkEnd.BAD_ADDRESS)
                if len(frames) == most:
                    raise _Stop(WalkEnd.TOO_DEEP)
                frames.append(frame)
        except _Stop as stop:
            return Walk(tuple(frames), stop.end)

    def _mapping(self, address: int, is_exact: bool) -> Mapping | None:
        looked_up = address if is_exact else address - _INTO_CALL
        index = bisect.bisect_right(self._starts, looked_up) - 1
        if index < 0 or looked_up >= self._mappings[index].end:
            return None
        return self._mappings[index]

    def _caller(
        self, at: Registers, is_exact: bool, is_leaf: bool
    ) -> tuple[Registers, WalkedFrame]:
        mapping = self._mapping(at.rip, is_exact)
        if mapping is None:
            raise _Stop(WalkEnd.BAD_ADDRESS)
        looked_up = at.rip - mapping.bias - (0 if is_exact else _INTO_CALL)
        rule = mapping.table.lookup(looked_up) if mapping.table is not None else None
        if rule is None or rule.kind == RuleKind.NO_CFI:
            caller = self._by_instructions(at, is_exact)
            return caller or self._without_cfi(at, is_leaf, mapping.table is None)
        if rule.kind == RuleKind.UNDEFINED_RA:
            raise _Stop(WalkEnd.ROOTED)
        if rule.kind == RuleKind.UNSUPPORTED:
            raise _Stop(WalkEnd.UNSUPPORTED)
        if rule.kind == RuleKind.SIGNAL:
            return self._interrupted(at, rule)
        cfa = self._cfa(at, rule)
        # Each call pushes a word, so the stack grows from frame to frame; this ends every loop but
        # those through code that changes stacks, which the number of frames ends.
        is_below = cfa <= at.rsp and rule.kind != RuleKind.OTHER_STACK
        if is_below or cfa % WORD_BYTES:
            raise _Stop(WalkEnd.BAD_ADDRESS)
        rip, rbp = self._read(cfa - WORD_BYTES), self._rbp(at, rule, cfa)
        found_by = FoundBy.TABLE
        if rule.kind in HEURISTICS:
            found_by = FoundBy.HEURISTIC
            self._require_caller(rip)
        return Registers(rip, cfa, rbp), WalkedFrame(rip, False, found_by)

    def _cfa(self, at: Registers, rule: Rule) -> int:
        if rule.kind in (RuleKind.RSP, RuleKind.RSP_HEURISTIC):
            return at.rsp + rule.cfa_offset & _ADDRESS_MASK
        if rule.kind == RuleKind.PLT:
            pushed = (at.rip & 15) >= rule.cfa_offset
            return at.rsp + (2 * WORD_BYTES if pushed else WORD_BYTES) & _ADDRESS_MASK
        if rule.kind == RuleKind.RBX:
            if at.rbx is None:
                raise _Stop(WalkEnd.UNSUPPORTED)
            return at.rbx + rule.cfa_offset & _ADDRESS_MASK
        if rule.kind == RuleKind.RSP_SLOT:
            slot, offset = rule.cfa_offset >> 16 & 0xFFFF, rule.cfa_offset & 0xFFFF
            return self._read(at.rsp + slot) + offset & _ADDRESS_MASK
        if at.rbp is None:
            raise _Stop(WalkEnd.UNSUPPORTED)
        slot = at.rbp + rule.cfa_offset & _ADDRESS_MASK
        return self._read(slot) if rule.kind == RuleKind.RBP_DEREF else slot

    def _rbp(self, at: Registers, rule: Rule, cfa: int) -> int | None:
        if rule.rbp_kind == RbpKind.SAME:
            return at.rbp
        if rule.rbp_kind == RbpKind.AT_CFA:
            return self._read(cfa + rule.rbp_offset)
        if rule.rbp_kind == RbpKind.AT_RBP and at.rbp is not None:
            return self._read(at.rbp + rule.rbp_offset)
        return None

    def _interrupted(self, at: Registers, rule: Rule) -> tuple[Registers, WalkedFrame]:
        """The thread as it was when the signal came; its stack may be another one."""
        slot = at.rsp + rule.cfa_offset
        rsp, rip = self._read(slot), self._read(slot + WORD_BYTES)
        rbp = self._read(at.rsp + rule.rbp_offset)
        return Registers(rip, rsp, rbp), WalkedFrame(rip, True, FoundBy.TABLE)

    def _by_instructions(
        self, at: Registers, is_exact: bool
    ) -> tuple[Registers, WalkedFrame] | None:
        """The caller of code that begins, or returns now or when its callee has; None for other."""
        code = self._code(at.rip)
        found = None if code is None else return_slot(code, is_exact)
        base = _frame_pointer(at) if found is not None and found.from_rbp else at.rsp
        if found is None or base is None:
            return None
        slot = base + found.offset & _ADDRESS_MASK
        rip = self._read_u64(slot)
        rbp = self._read_u64(slot - WORD_BYTES) if found.has_link else at.rbp
        if rip is None or (rbp is None and found.has_link):
            return None
        self._require_caller(rip, by_frame=True)
        return Registers(rip, slot + WORD_BYTES, rbp), WalkedFrame(rip, False, FoundBy.HEURISTIC)

    def _without_cfi(
        self, at: Registers, is_leaf: bool, is_generated: bool
    ) -> tuple[Registers, WalkedFrame]:
        """By saved RBP and return address at RBP; a leaf's may be on top of the stack instead."""
        base, top = _frame_pointer(at), self._read_u64(at.rsp) if is_leaf else None
        rbp = None if base is None else self._read_u64(base)
        rip = None if base is None else self._read_u64(base + WORD_BYTES)
        if base is not None and rbp is not None and rip is not None:
            caller = Registers(rip, base + 2 * WORD_BYTES, rbp)
            if not is_leaf:
                return caller, WalkedFrame(rip, False, FoundBy.FRAME_POINTER)
            # A leaf's RBP may be anything, unless what it points at looks like a frame.
            is_frame = is_generated and rbp > base and rbp % WORD_BYTES == 0
            if (is_frame or self._follows_call(rip)) and self._is_caller(rip, by_frame=True):
                # On top a leaf without a frame has its return address; RBP may be its caller's.
                is_certain = top is None or not self._follows_call(top)
                found_by = FoundBy.FRAME_POINTER if is_certain else FoundBy.HEURISTIC
                return caller, WalkedFrame(rip, False, found_by)
        if not is_leaf or top is None:
            raise _Stop(WalkEnd.NO_TABLE)
        self._require_caller(top)
        frame = WalkedFrame(top, False, FoundBy.HEURISTIC)
        return Registers(top, at.rsp + WORD_BYTES, at.rbp), frame

    def _require_caller(self, address: int, by_frame: bool = False) -> None:
        """Ends the walk at what is no caller."""
        if not self._is_caller(address, by_frame):
            raise _Stop(WalkEnd.NO_TABLE)

    def _is_caller(self, address: int, by_frame: bool = False) -> bool:
        """Whether an address is in code, and after a call.

        Generated code that a frame leads to need not follow one: HotSpot's interpreter pushes where
        its callees return to, and jumps (jdk-17 src/hotspot/cpu/x86/templateTable_x86.cpp,
        prepare_invoke).
        """
        mapping = self._mapping(address, is_exact=False)
        if mapping is None:
            return False
        return (by_frame and mapping.table is None) or self._follows_call(address)

    def _follows_call(self, address: int) -> bool:
        if self._read_code is None:
            return True
        code = self._code(address - WORD_BYTES)
        return code is not None and follows_call(code)

    def _code(self, address: int) -> bytes | None:
        """Eight bytes of code."""
        if self._read_code is None:
            return None
        begin = address % WORD_BYTES
        words = [self._read_code(address - begin)]
        if begin:  # as few as are needed: the next ones may lie past the end of all code
            words.append(self._read_code(address - begin + WORD_BYTES))
        code = b"".join(word.to_bytes(WORD_BYTES, "little") for word in words if word is not None)
        return None if None in words else code[begin : begin + WORD_BYTES]

    def _read(self, address: int) -> int:
        word = self._read_u64(address & _ADDRESS_MASK)
        if word is None:
            raise _Stop(WalkEnd.UNREADABLE)
        return word


def _frame_pointer(at: Registers) -> int | None:
    """RBP where it can point at a frame of the stack: it lies above RSP, and aligned."""
    if at.rbp is None or at.rbp < at.rsp or at.rbp % WORD_BYTES:
        return None
    return at.rbp
