# SPDX-License-Identifier: Apache-2.0
"""What a thread that is off the CPU waits for, and since when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from aiflame.agent.dumps.model import DumpFrame, ThreadState
from aiflame.agent.model.profile import (
    FRAME_DTYPE,
    SAMPLE_DTYPE,
    WAIT_DTYPE,
    Binary,
    Function,
    GilState,
    Profile,
    Recording,
    Stacks,
)
from aiflame.agent.processes.threads import ThreadRegisters
from aiflame.agent.reports.causes import CAUSES, Cause, classify

# Bits of task_struct.__state (include/linux/sched.h, v5.10 to v6.18), the first that is set counts.
_STATES = (
    (0x1, ThreadState.SLEEPING),
    (0x4, ThreadState.STOPPED),
    (0x8, ThreadState.TRACED),
    (0x8000, ThreadState.FROZEN),
    (0x2, ThreadState.UNINTERRUPTIBLE),
)
# The two clocks are compared with this error; a wait that seems to begin later than now is none.
_CLOCK_ERROR_NS = 2_000_000


def state_of(registers: ThreadRegisters) -> ThreadState:
    """Returns what the kernel says that a thread does."""
    if registers.is_on_cpu:
        return ThreadState.RUNNING
    for bit, state in _STATES:
        if registers.state & bit:
            return state
    return ThreadState.RUNNABLE


def waited_ns(registers: ThreadRegisters, read_ns: int, clock_offset_ns: int | None) -> int | None:
    """Returns for how long a thread has waited; None where it does not, or this is not known.

    Args:
        registers: Of the thread.
        read_ns: When they were read, monotonic.
        clock_offset_ns: Monotonic time less the scheduler's clock; None where unknown.
    """
    if clock_offset_ns is None or not registers.stopped_ns:
        return None
    if state_of(registers) in (ThreadState.RUNNING, ThreadState.RUNNABLE):
        return None
    waited = read_ns - clock_offset_ns - registers.stopped_ns
    return max(waited, 0) if waited > -_CLOCK_ERROR_NS else None


def causes_of(stacks: Sequence[tuple[Sequence[DumpFrame], GilState]]) -> list[str]:
    """Returns for each stack what its thread waits for, "" where nothing tells.

    Args:
        stacks: Frames leaf first, and what the thread has to do with the GIL.
    """
    binaries: dict[str, int] = {}
    functions: dict[Function, int] = {}
    rows: list[int] = []
    for stack, _ in stacks:
        for frame in reversed(stack):
            binary = binaries.setdefault(frame.module, len(binaries)) if frame.module else None
            function = Function(frame.kind, frame.name, binary, "")
            rows.append(functions.setdefault(function, len(functions)))
    frames = np.zeros(len(functions), FRAME_DTYPE)
    frames["function"] = np.arange(len(functions))
    offsets = np.cumsum([0, *(len(stack) for stack, _ in stacks)]).astype(np.uint64)
    gil = np.array([state for _, state in stacks], np.uint8)
    profile = Profile(
        Recording("", 0, 0, 0, "", "", 0, 0, ()),
        (),
        (),
        tuple(Binary(path, "") for path in binaries),
        tuple(functions),
        frames,
        Stacks(offsets, np.array(rows, np.uint32), np.zeros(len(stacks), np.uint8), gil),
        np.zeros(0, SAMPLE_DTYPE),
        np.zeros(0, WAIT_DTYPE),
    )
    found = classify(profile).tolist()
    return ["" if cause == Cause.OTHER else CAUSES[cause] for cause in found]
