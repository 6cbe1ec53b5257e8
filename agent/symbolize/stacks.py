# SPDX-License-Identifier: Apache-2.0
"""Stacks before and after naming."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from aiflame.agent.model.profile import FrameKind, StopReason
from aiflame.agent.python.splice import Match
from aiflame.agent.symbols.frames import SourceFrame

# Stands in the addresses of a stack where kernel frames are missing between the kernel's and the
# user's part of it.
KERNEL_CUT = 0


class UnnamedStack(NamedTuple):
    """A stack that has no names yet.

    Attributes:
        process: Number of its process in the window.
        kernel_depth: How many of the addresses are the kernel's.
        stop_reason: A StopReason.
        addresses: Little-endian u64, leaf first: the kernel's, then the user's.
        chain, gil: Of its Python half, as STACK_DTYPE has them.
        is_from_switch: It was taken at a context switch.
    """

    process: int
    kernel_depth: int
    stop_reason: int
    addresses: bytes
    chain: int
    gil: int
    is_from_switch: bool


class NamedStack(NamedTuple):
    """What it has become.

    Attributes:
        stop_reason: A StopReason; names tell whether the last frame is a thread's first.
        frames: Ids of frames, little-endian u32, root first.
        gil: A model.profile.GilState.
        match: How Python frames and eval loops were paired, None without Python frames.
    """

    stop_reason: int
    frames: bytes
    gil: int
    match: Match | None = None


# Of one that there was no time for.
LEFT_OUT = NamedStack(int(StopReason.LOST), b"", 0)


class FrameIds(Protocol):
    """Gives out the ids of frames and binaries."""

    def frame(self, kind: FrameKind, source: SourceFrame, binary: int | None, address: int) -> int:
        """Returns the id of a frame.

        Args:
            kind: What it is.
            source: Function, file and line.
            binary: Id of its binary, None for none.
            address: The binary's own; 0 for none.
        """

    def binary(self, path: str, build_id: str) -> int:
        """Returns the id of a binary."""
