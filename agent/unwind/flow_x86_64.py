# SPDX-License-Identifier: Apache-2.0
"""Unwind rows of code without CFI, found by following it from where functions begin.

What a compiler was told to leave CFI out of still calls its functions and jumps within them. So
from the functions that symbols name, or where a stripped program begins, those that they call, jump
to or take the address of are found, without symbols, and what each instruction does to RSP and RBP
is followed on all ways through them: frames that are made after a jump, arguments that are pushed
in the midst. musl's libc.so as distributions strip it is such code.

Capstone decodes. After an indirect jump the code that nothing leads to is taken for its targets, as
those of a switch are, up to the next function. Where RSP was moved by what is not known there are
no rows. All of it is a heuristic: a walker checks that the address it leads to follows a call.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from aiflame.agent.unwind import x86_64 as arch
from aiflame.agent.unwind.prologue_x86_64 import (
    COMPARES,
    EXCHANGES,
    IMMEDIATE,
    RBP_NAMES,
    RSP_NAMES,
    WORD_BYTES,
    decode,
)
from aiflame.agent.unwind.x86_64 import RbpKind

# Decoded at a time: a run of instructions without a jump is mostly shorter.
_CHUNK_INSTRUCTIONS = 16
_CHUNK_BYTES = 15 * _CHUNK_INSTRUCTIONS

# Decoded in all: twice what the largest code that is followed takes, and a second of CPU time. A
# file may say that a function begins at each byte, or jump to each.
_MAX_DECODED = 1 << 21

# No function's frame is larger: a stack has 8 MB, and threads' have less.
_MAX_FRAME_BYTES = 1 << 23

_TARGET = re.compile(r"0x[0-9a-f]+")
_RSP_SLOT = re.compile(r"qword ptr \[rsp(?: \+ (0x[0-9a-f]+|\d+))?\]")
_FROM_BASE = re.compile(r"\[(r[sb]p)(?: ([+-]) (0x[0-9a-f]+|\d+))?\]")
_FROM_RIP = re.compile(r"\[rip ([+-]) (0x[0-9a-f]+|\d+)\]")
# At the end: what is moved or pushed.
_CONSTANT = re.compile(r"\b0x[0-9a-f]+$")
# What names RSP or RBP in any width.
_OF_FRAMES = re.compile(r"[sb]p")
_ENDS = frozenset(("ret", "hlt", "ud0", "ud1", "ud2", "int3", "iretq", "ljmp", "sysretq", "lret"))


class Range(NamedTuple):
    """Code that lies at virtual address `begin`."""

    begin: int
    code: bytes


class _Frame(NamedTuple):
    """Where the caller's frame is, in bytes.

    Attributes:
        of_rsp: From RSP to the CFA, 0 where that is not known.
        of_rbp: From RBP to the CFA, 0 where RBP does not hold the frame.
        saved_rbp: From the CFA to the caller's RBP, 0 while that is in RBP.
    """

    of_rsp: int = WORD_BYTES
    of_rbp: int = 0
    saved_rbp: int = 0


@lru_cache(maxsize=1024)  # musl's libc.so has 900
def _state(frame: _Frame) -> int:
    form = arch.CFA_RBP_HEURISTIC if frame.of_rbp else arch.CFA_RSP_HEURISTIC
    state = arch.with_ra(arch.with_cfa(0, form, frame.of_rbp or frame.of_rsp), arch.RA_AT_CFA_8)
    if not frame.saved_rbp:
        return arch.with_rbp(state, RbpKind.SAME)
    return arch.with_rbp(state, RbpKind.AT_CFA, frame.saved_rbp)


_ENTERED = _Frame()


@dataclass
class _Found:
    """What is known of the code of one range.

    Attributes:
        range: That.
        frames: Before each instruction that a way leads to, None where it is not known.
        ends: Of each of these instructions.
    """

    range: Range
    frames: dict[int, _Frame | None]
    ends: dict[int, int]


class Followed(NamedTuple):
    """What was found.

    Attributes:
        rows: Where each state begins, ascending; NO_CFI_STATE after what is known.
        lost: Instructions before which the frame is not known any more, ascending.
    """

    rows: list[tuple[int, int]]
    lost: list[int]


def follow(
    ranges: Sequence[Range],
    starts: Iterable[int],
    entry: int = 0,
    *,
    has_fixed_addresses: bool = False,
) -> Followed:
    """Follows code from where functions begin.

    Args:
        ranges: Code without CFI, ascending and disjoint.
        starts: Where functions in it begin.
        entry: Where a program begins, which nobody has called; 0 for none.
        has_fixed_addresses: Instructions may have such an address in them as it is.

    Returns:
        Nothing where following them takes too long.
    """
    # Once to find where functions begin, and once to know it wherever code before them runs into
    # them, as it seems to where a function that does not return is called.
    decoded = 0
    for _ in range(2):
        flow = _Flow([_Found(one, {}, {}) for one in ranges], decoded, has_fixed_addresses)
        if not flow.follow(starts, entry):
            return Followed([], [])
        decoded = flow.decoded
        starts = flow.called | (flow.named - flow.jumped)
    return Followed(
        [row for part in flow.found for row in _rows(part)],
        [at for part in flow.found for at in sorted(part.ends) if part.frames[at] is None],
    )


def _rows(found: _Found) -> list[tuple[int, int]]:
    rows: list[tuple[int, int]] = []
    after = found.range.begin
    for at in sorted(found.ends):
        if at < after:
            continue  # in the midst of another instruction
        if at > after and rows:
            rows.append((after, arch.NO_CFI_STATE))
        frame = found.frames[at]
        rows.append((at, arch.NO_CFI_STATE if frame is None else _state(frame)))
        after = found.ends[at]
    if rows:
        rows.append((after, arch.NO_CFI_STATE))
    return rows


class _Flow:
    """Follows code; each instruction once, so that it ends.

    Attributes:
        found: What is known of it.
        called: Where functions begin.
        named: Where they begin as it seems: by symbols, or since the address is taken.
        jumped: What is jumped to with a frame made: a part of a function (GCC's .cold).
        decoded: Instructions that were decoded, those of flows before with it.
    """

    def __init__(self, found: Sequence[_Found], decoded: int, has_fixed_addresses: bool) -> None:
        self.found = found
        self._has_fixed_addresses = has_fixed_addresses
        self.decoded = decoded
        self._begins = [part.range.begin for part in found]
        self.called: set[int] = set()
        self.named: set[int] = set()
        self.jumped: set[int] = set()
        # Where to go on, with what frame; and that of a switch that it is a part of, if of any.
        self._waiting: list[tuple[_Found, int, _Frame | None, _Frame | None]] = []
        self._parts: list[tuple[int, _Frame]] = []
        self._passed: set[int] = set()  # code that parts of a switch were looked for after

    def follow(self, starts: Iterable[int], entry: int) -> bool:
        """Follows all; False where that is given up, since there is too much of it."""
        for start in starts:
            self._enter(start, self.named)
        self._meet(entry, None)
        while self._waiting or self._parts:
            if self.decoded > _MAX_DECODED:
                return False
            if self._waiting:
                self._run(*self._waiting.pop())
            else:
                self._next_part(*self._parts.pop())
        return True

    def _part(self, address: int) -> _Found | None:
        index = bisect.bisect_right(self._begins, address) - 1
        if index < 0:
            return None
        found = self.found[index]
        return found if address < found.range.begin + len(found.range.code) else None

    def _enter(self, address: int, starts: set[int]) -> None:
        if self._part(address) is not None:
            starts.add(address)
            self._meet(address, _ENTERED)

    def _meet(self, address: int, frame: _Frame | None, switch: _Frame | None = None) -> None:
        """Code at an address is come to with that frame; who comes first is right."""
        part = self._part(address)
        if part is not None and address not in part.frames:
            part.frames[address] = frame
            self._waiting.append((part, address, frame, switch))

    def _next_part(self, at: int, switch: _Frame) -> None:
        """Goes on with the first code that nothing leads to, up to the next function."""
        part = self._part(at)
        while part is not None and not self._is_start(at):
            if at not in part.ends:
                self._meet(at, switch, switch)
                return
            if at in self._passed:
                return
            self._passed.add(at)
            at = part.ends[at]

    def _is_start(self, address: int) -> bool:
        return address in self.called or address in self.named

    def _run(self, part: _Found, at: int, frame: _Frame | None, switch: _Frame | None) -> None:
        """Follows instructions up to one that does not lead to the next, or to known code."""
        begin, code = part.range
        is_over = False
        while not is_over:
            chunk = code[at - begin : at - begin + _CHUNK_BYTES]
            count = 0
            self.decoded += _CHUNK_INSTRUCTIONS
            for start, size, mnemonic, operands in decode(chunk, at, _CHUNK_INSTRUCTIONS):
                count += 1
                at = start + size
                part.ends[start] = at
                is_over = not self._step(at, mnemonic, operands, frame) or at in part.frames
                if is_over:
                    break
                frame = part.frames[at] = frame and _after(frame, mnemonic, operands)
            is_over |= count < _CHUNK_INSTRUCTIONS
        if switch is not None:
            self._parts.append((at, switch))

    def _step(self, end: int, mnemonic: str, operands: str, frame: _Frame | None) -> bool:
        """Notes where an instruction leads; False where it is not to the next one."""
        bare = mnemonic.rpartition(" ")[2]  # as "repz ret" has a prefix
        if bare == "call":
            if _TARGET.fullmatch(operands) is not None:
                self._enter(int(operands, 16), self.called)
        elif bare == "lea":
            place = _FROM_RIP.search(operands)
            if place is not None:
                distance = int(place[2], 0)
                self._enter(end + (distance if place[1] == "+" else -distance), self.named)
        elif bare in ("mov", "push") and self._has_fixed_addresses:
            constant = _CONSTANT.search(operands)
            if constant is not None:
                self._enter(int(constant[0], 16), self.named)
        elif bare[0] == "j":
            if _TARGET.fullmatch(operands) is not None:
                target = int(operands, 16)
                if frame is not None:
                    if frame != _ENTERED:
                        self.jumped.add(target)
                    self._meet(target, frame)
            elif bare == "jmp" and frame is not None:
                self._parts.append((end, frame))
            return bare != "jmp"
        return bare not in _ENDS


def _after(frame: _Frame, mnemonic: str, operands: str) -> _Frame | None:
    """Returns the frame after an instruction, None where it is not known any more."""
    if mnemonic in ("push", "pushfq"):
        return _pushed(frame, operands)
    if mnemonic in ("pop", "popfq"):
        return _popped(frame, operands)
    if mnemonic == "leave":
        left = frame._replace(of_rsp=frame.of_rbp)
        return _popped(left, "rbp") if frame.of_rbp else None
    if mnemonic == "enter":
        return None
    if mnemonic in COMPARES or _OF_FRAMES.search(operands) is None:
        return frame
    target, _, source = operands.partition(", ")
    if mnemonic == "mov" and source == "rbp":
        slot = _RSP_SLOT.fullmatch(target)
        if slot is not None and frame.of_rsp and not frame.saved_rbp:
            place = int(slot[1] or "0", 0) - frame.of_rsp
            return frame._replace(saved_rbp=place) if place < -WORD_BYTES else frame
    written = {target, source} if mnemonic in EXCHANGES else {target}
    if written & RBP_NAMES:
        return _rbp_written(frame, mnemonic, source)
    if written & RSP_NAMES:
        return _rsp_moved(frame, mnemonic, target, source)
    return frame


def _checked(frame: _Frame) -> _Frame | None:
    """Returns a frame that can be; RBP is enough where RSP is not known."""
    if frame.of_rsp and not WORD_BYTES <= frame.of_rsp < _MAX_FRAME_BYTES:
        return None
    return frame if frame.of_rsp or frame.of_rbp else None


def _pushed(frame: _Frame, register: str) -> _Frame | None:
    if register.startswith("word") or not frame.of_rsp:
        return frame if frame.of_rbp else None
    of_rsp = frame.of_rsp + WORD_BYTES
    is_link = register == "rbp" and not frame.saved_rbp
    return _checked(
        frame._replace(of_rsp=of_rsp, saved_rbp=-of_rsp if is_link else frame.saved_rbp)
    )


def _popped(frame: _Frame, register: str) -> _Frame | None:
    if register in RSP_NAMES:
        return None
    place = -frame.of_rsp
    left = frame._replace(of_rsp=frame.of_rsp - WORD_BYTES) if frame.of_rsp else frame
    if register == "rbp":
        if not frame.of_rsp or place != frame.saved_rbp:
            return None
        left = left._replace(of_rbp=0, saved_rbp=0)
    # What is taken beyond the return address is no frame's.
    return _checked(left) if left.of_rsp or not frame.of_rsp else None


def _rbp_written(frame: _Frame, mnemonic: str, source: str) -> _Frame | None:
    if mnemonic == "mov":
        if source == "rsp" and frame.of_rsp:
            return frame._replace(of_rbp=frame.of_rsp) if frame.saved_rbp else None
        slot = _RSP_SLOT.fullmatch(source)
        place = int(slot[1] or "0", 0) - frame.of_rsp if slot is not None else 0
        if frame.of_rsp and slot is not None and place == frame.saved_rbp:
            return frame._replace(of_rbp=0, saved_rbp=0)
    # For another use: it must have been saved before.
    return _checked(frame._replace(of_rbp=0)) if frame.saved_rbp else None


def _rsp_moved(frame: _Frame, mnemonic: str, target: str, source: str) -> _Frame | None:
    of_rsp = 0
    if target == "rsp" and mnemonic in ("add", "sub") and IMMEDIATE.fullmatch(source) is not None:
        distance = int(source, 0)
        of_rsp = frame.of_rsp and frame.of_rsp + (distance if mnemonic == "sub" else -distance)
    elif target == "rsp" and mnemonic == "lea":
        place = _FROM_BASE.fullmatch(source)
        if place is not None:
            base = frame.of_rsp if place[1] == "rsp" else frame.of_rbp
            distance = int(place[3] or "0", 0) * (-1 if place[2] == "-" else 1)
            of_rsp = base and base - distance
    elif target == "rsp" and mnemonic == "mov" and source == "rbp":
        of_rsp = frame.of_rbp
    if of_rsp and of_rsp < WORD_BYTES:
        return None
    return _checked(frame._replace(of_rsp=of_rsp))
