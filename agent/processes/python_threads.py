# SPDX-License-Identifier: Apache-2.0
"""The Python frames of a thread that does not run, walked from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from aiflame.agent.kernel import abi
from aiflame.agent.python.gil import is_held_by
from aiflame.agent.python.layouts import ABSENT, Layout
from aiflame.agent.python.memory import Memory, NoMemoryAccess, Pages, read_u64
from aiflame.agent.python.walk import PythonFrame, walk


@dataclass(frozen=True, slots=True)
class ThreadPython:
    """The Python half of a thread.

    Attributes:
        frames: Leaf first.
        end: Why there are no more.
        gil: What the thread has to do with the GIL.
    """

    frames: tuple[PythonFrame, ...]
    end: abi.PythonEnd
    gil: abi.PythonGil


UNREADABLE_THREAD = ThreadPython((), abi.PythonEnd.UNREADABLE, abi.PythonGil.UNKNOWN)


def fetch_leaf_frames(pages: Pages, layout: Layout, states: Iterable[int]) -> None:
    """Reads where the walks of threads begin, those of all at once.

    Args:
        pages: Of their process; what is walked in them after this is of this moment or later.
        layout: Of its interpreter.
        states: Addresses of the thread states.
    """
    addresses = list(states)
    offsets = [layout.thread_frame]
    if layout.cframe_frame != ABSENT:
        offsets.append(layout.cframe_frame)
    with contextlib.suppress(NoMemoryAccess):
        for offset in offsets:
            found = [address + offset for address in addresses]
            pages.fetch(found)
            addresses = [read_u64(pages, address) or 0 for address in found]
        pages.fetch(addresses)


def walk_thread(
    pages: Pages, memory: Memory, layout: Layout, state: int, holder: int | None
) -> ThreadPython:
    """Walks the frames of a thread.

    Args:
        pages: From `fetch_leaf_frames`.
        memory: Of the process as it is now, where it is told who has the GIL.
        layout: Of its interpreter.
        state: Address of its thread state.
        holder: Thread state that holds its GIL, as `gil_holder` tells.

    Raises:
        NoMemoryAccess: The process is gone, or may not be read.
    """
    walked = walk(pages, layout, state)
    holds = is_held_by(memory, layout, holder, state)
    gil = abi.PythonGil.UNKNOWN
    if holds is not None:
        gil = abi.PythonGil.HELD if holds else abi.PythonGil.NOT_HELD
    return ThreadPython(walked.frames, abi.PythonEnd[walked.end.name], gil)
