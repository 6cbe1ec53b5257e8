# SPDX-License-Identifier: Apache-2.0
"""The walk along a thread's Python frames: the reference for the kernel half, step by step.

It reads what the kernel half reads, in the same pieces and with the same bounds, and ends for the
same reasons, so that either can be checked against the other. From a thread state follow
`thread_frame` (and `cframe_frame`) to the leaf frame; of each frame read `frame_bytes` at once.

Frames of a thread that runs are changed under the reader. A walk of a running thread is right in
the kernel half, which runs in that thread; from outside it is right for threads that wait. Those
have finished to enter the eval loop: what the kernel half does where it meets the middle of that
(`begin_again` in bpf/python.h) has no counterpart here.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from aiflame.agent.python.layouts import ABSENT, SHIM_OWNER, Layout, Position, RunEnd
from aiflame.agent.python.memory import Memory, read_u64, sound_address
from aiflame.agent.unwind.walk import MAX_FRAMES

# Shims stand between frames, at most one for each.
_MAX_STEPS = 2 * MAX_FRAMES
# A position that lies nowhere in its code object: unreadable, torn, or thread-local bytecode.
NO_POSITION = -(1 << 31)
# struct _PyCodeArray: how many copies there are, then pointers to them. The first is the code
# object's own (3.14 Include/cpython/code.h).
_FIRST_COPY, _COPY_BYTES = 8, 8
# Code of one function: the largest generated functions have a few MB.
_MAX_CODE_BYTES = 1 << 30
_OBJECT_ALIGNMENT = 8


class WalkEnd(enum.Enum):
    """Why a walk ended."""

    COMPLETE = "complete"
    TOO_DEEP = "too_deep"
    UNREADABLE = "unreadable"
    BAD_POINTER = "bad_pointer"
    LOOP = "loop"


@dataclass(frozen=True, slots=True)
class PythonFrame:
    """One frame.

    Attributes:
        code_address: The code object; 0 in a run without frames: an eval loop that has not linked
            its first frame yet, or has unlinked its last.
        position: Bytes from the first instruction to the executing one; -2 or -1 before the first
            has run, `NO_POSITION` where unknown.
        ends_run: The frame was entered from C: it is the last one of its call of the eval loop.
    """

    code_address: int
    position: int
    ends_run: bool


@dataclass(frozen=True, slots=True)
class Walk:
    """Frames leaf first, and why there are no more."""

    frames: tuple[PythonFrame, ...]
    end: WalkEnd


def leaf_frame(memory: Memory, layout: Layout, thread_state: int) -> int | None:
    """Address of the leaf frame, 0 for none, None where it cannot be read."""
    address = read_u64(memory, thread_state + layout.thread_frame)
    if layout.cframe_frame != ABSENT and address:
        return read_u64(memory, address + layout.cframe_frame)
    return address


def walk(memory: Memory, layout: Layout, thread_state: int) -> Walk:
    """All Python frames of a thread, from its thread state."""
    address = leaf_frame(memory, layout, thread_state)
    if address is None:
        return Walk((), WalkEnd.UNREADABLE)
    found: list[PythonFrame] = []
    run_is_open = False
    marker = 0
    for step in range(_MAX_STEPS + 1):
        if address == 0:
            return Walk(tuple(found), WalkEnd.COMPLETE)
        if address == marker:
            return Walk(tuple(found), WalkEnd.LOOP)
        if step == _MAX_STEPS:
            break
        # Brent: a marker that is set at powers of two is met again inside any loop.
        if step & (step - 1) == 0:
            marker = address
        if not _is_object(address):
            return Walk(tuple(found), WalkEnd.BAD_POINTER)
        data = memory.read(address, layout.frame_bytes)
        if data is None:
            return Walk(tuple(found), WalkEnd.UNREADABLE)
        if layout.run_end is RunEnd.SHIM and data[layout.frame_mark] >= SHIM_OWNER:
            _end_run(found, run_is_open)
            run_is_open = False
        else:
            frame = _frame(memory, layout, data)
            if frame is None:
                return Walk(tuple(found), WalkEnd.BAD_POINTER)
            if len(found) == MAX_FRAMES:
                return Walk(tuple(found), WalkEnd.TOO_DEEP)
            found.append(frame)
            run_is_open = not frame.ends_run
        address = _word(data, layout.frame_previous)
    return Walk(tuple(found), WalkEnd.TOO_DEEP)


def _end_run(found: list[PythonFrame], run_is_open: bool) -> None:
    """What a shim means: the frame before it ends its run, or there is none in this one.

    Only a leaf run can be empty; 3.15's base frame after the last shim is not a run (nor is it
    one by itself, which `splice` sees to).
    """
    if run_is_open:
        last = found[-1]
        found[-1] = PythonFrame(last.code_address, last.position, True)
    elif not found:
        found.append(PythonFrame(0, NO_POSITION, True))


def _frame(memory: Memory, layout: Layout, data: bytes) -> PythonFrame | None:
    code = _word(data, layout.frame_code) & ~layout.code_tags
    if not _is_object(code):
        return None
    if layout.run_end is RunEnd.EVERY_FRAME:
        ends_run = True
    elif layout.run_end is RunEnd.ENTRY_BYTE:
        ends_run = data[layout.frame_mark] != 0
    else:
        ends_run = False
    return PythonFrame(code, _position(memory, layout, data, code), ends_run)


def _position(memory: Memory, layout: Layout, data: bytes, code: int) -> int:
    if layout.position is Position.POINTER:
        begin = _instructions(memory, layout, data, code)
        value = _word(data, layout.frame_position) - begin if begin else NO_POSITION
    else:
        value = int(struct.unpack_from("<i", data, layout.frame_position)[0])
        if layout.position is Position.LASTI_UNITS and value >= 0:
            value *= 2
    return value if -2 <= value < _MAX_CODE_BYTES else NO_POSITION


def _instructions(memory: Memory, layout: Layout, data: bytes, code: int) -> int:
    """Where the instructions that a frame runs begin; 0 where that cannot be read."""
    if layout.code_copies == ABSENT:
        return code + layout.code_instructions
    copies = read_u64(memory, code + layout.code_copies)
    if copies is None or not _is_object(copies):
        return 0
    index = int(struct.unpack_from("<I", data, layout.frame_copy)[0])
    begin = read_u64(memory, copies + _FIRST_COPY + _COPY_BYTES * index)
    return begin if begin is not None and _is_object(begin) else 0


def _is_object(address: int) -> bool:
    return sound_address(address) and not address % _OBJECT_ALIGNMENT


def _word(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<Q", data, offset)[0])
