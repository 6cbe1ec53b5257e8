# SPDX-License-Identifier: Apache-2.0
"""Who holds the GIL, and what a thread without it is doing: waiting for it, or running without.

The holder is read from the target; whether a thread waits is told by the C functions at the leaf
of its stack. Of a free-threaded build nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from aiflame.agent.model.profile import GilState
from aiflame.agent.python.layouts import ABSENT, ACTIVE_FLAG, GilHolder, Layout
from aiflame.agent.python.memory import Memory, read_i32, read_u64
from aiflame.agent.python.threads import ThreadState


class LeafFrame(NamedTuple):
    """A native frame above the leaf-most Python frame: its name, and whose function it is."""

    name: str
    in_interpreter: bool


# Python/{ceval_gil.h,ceval_gil.c,ceval.c,pystate.c}, v3.8.18 to v3.13.0
_TAKING = re.compile(
    r"(?:take_gil|PyEval_(?:RestoreThread|Acquire\w+)|_PyThreadState_Attach)(?:\.\w+)*"
)
# What the eval loop calls when another thread asks for the GIL: it will be wanted back at once. The
# others let go of it for longer, and call it as well.
_DROPPING = re.compile(r"drop_gil(?:\.\w+)*")
_LETTING_GO = re.compile(
    r"(?:PyEval_(?:SaveThread|Release\w+)|_PyThreadState_Detach|PyGILState_Release)(?:\.\w+)*"
)
# The interpreter waits on a condition variable for the GIL only: its locks are semaphores on Linux
# (Python/thread_pthread.h, USE_SEMAPHORES), and later parking lots, semaphores as well.
_CONDITION_WAIT = re.compile(r"(?:___?|__GI_+)?pthread_cond_(?:timed|clock)?wait(?:@.*)?")


def gil_holder(
    memory: Memory, layout: Layout, runtime_address: int, interpreter: int
) -> int | None:
    """Thread state that holds the GIL of an interpreter, 0 for none, None where unknown."""
    if layout.gil_kind is GilHolder.NONE:
        return None
    if layout.gil_kind is GilHolder.RUNTIME:
        return read_u64(memory, runtime_address + layout.gil)
    gil = read_u64(memory, interpreter + layout.gil)
    if not gil:
        return None
    locked = read_i32(memory, gil + layout.gil_locked)
    if locked is None:
        return None
    return read_u64(memory, gil + layout.gil_last_holder) if locked > 0 else 0


def is_held_by(memory: Memory, layout: Layout, holder: int | None, state: int) -> bool | None:
    """Whether a thread state holds the GIL of which `gil_holder` has told the holder.

    Who takes a GIL marks it as locked before it enters itself, so that for a moment the thread
    that had it last seems to have it again. From 3.12 on that one's state tells.
    """
    if holder is None or holder != state:
        return None if holder is None else False
    if layout.thread_status == ABSENT:
        return True
    status = read_i32(memory, state + layout.thread_status)
    return None if status is None else bool(status & ACTIVE_FLAG)


def holds_gil(
    memory: Memory, layout: Layout, runtime_address: int, thread: ThreadState
) -> bool | None:
    """Whether a thread holds the GIL of its interpreter at this moment, None where unknown."""
    holder = gil_holder(memory, layout, runtime_address, thread.interpreter)
    return is_held_by(memory, layout, holder, thread.address)


def gil_state(holds: bool | None, has_python: bool, leaf: Iterable[LeafFrame]) -> GilState:
    """The label of one sample.

    Args:
        holds: Whether the thread holds the GIL, None where there is none or it is unknown.
        has_python: The thread has Python frames.
        leaf: Its native frames on the leaf side of the leaf-most Python frame, leaf first.
    """
    if not has_python:
        return GilState.NO_PYTHON
    if holds is None:
        return GilState.UNKNOWN
    if holds:
        return GilState.HELD
    below = ""
    seen = list(leaf)
    for frame in seen:
        if frame.in_interpreter and (
            _TAKING.fullmatch(frame.name) or _CONDITION_WAIT.fullmatch(below)
        ):
            return GilState.WAITING
        below = frame.name
    names = [frame.name for frame in seen if frame.in_interpreter]
    is_handing_over = any(map(_DROPPING.fullmatch, names))
    if is_handing_over and not any(map(_LETTING_GO.fullmatch, names)):
        return GilState.WAITING
    return GilState.RELEASED
