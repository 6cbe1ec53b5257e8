# SPDX-License-Identifier: Apache-2.0
"""The Python frames of all stacks, and sums over them.

Self time of a Python function, or line, is the time in which it was the innermost Python frame:
also what native code and the kernel did for it. Total time counts a stack once, however often
a function called itself there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import FrameKind, Profile
from aiflame.agent.reports.own_code import is_standard_library
from aiflame.agent.reports.selection import by_frame, is_import_machinery

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PythonFrames:
    """One entry per Python frame of a stack, stack by stack, root first."""

    stack: I64  # which stack it is in, ascending
    frame: I64  # index into Profile.frames
    is_leaf: npt.NDArray[np.bool_]  # the innermost of its stack
    is_own: npt.NDArray[np.bool_]  # the innermost one that is not of Python's library, else is_leaf

    def __len__(self) -> int:
        return len(self.stack)

    def self_of(self, key: I64, weights: U64, keys: int) -> U64:
        """Return the sum of the weights of stacks by the key of their innermost Python frame.

        Args:
            key: What to sum by, below `keys`, one for each entry.
            weights: Of each stack, shape (stacks,).
            keys: How many keys there are.
        """
        sums = np.zeros(keys, dtype=np.uint64)
        np.add.at(sums, key[self.is_leaf], weights[self.stack[self.is_leaf]])
        return sums

    def row_of_stacks(self, key: I64, stacks: int, is_chosen: npt.NDArray[np.bool_]) -> I64:
        """Return the key of the chosen entry of each stack, -1 for none; shape (stacks,)."""
        found = np.full(stacks, -1, np.int64)
        found[self.stack[is_chosen]] = key[is_chosen]
        return found

    def total_of(self, key: I64, weights: U64, keys: int) -> U64:
        """Return the sum of the weights of the stacks in which each key is; see `self_of`."""
        sums = np.zeros(keys, dtype=np.uint64)
        pairs = np.unique(self.stack * max(1, keys) + key)
        np.add.at(sums, pairs % max(1, keys), weights[pairs // max(1, keys)])
        return sums

    def occurrences_of(self, key: I64, weights: U64, keys: int) -> U64:
        """Return the same, a stack counted as often as the key is in it."""
        sums = np.zeros(keys, dtype=np.uint64)
        np.add.at(sums, key, weights[self.stack])
        return sums


def python_frames(profile: Profile, hide_importlib: bool = False) -> PythonFrames:
    """Return the Python frames of all stacks of a profile."""
    wanted = np.array(
        [
            f.kind is FrameKind.PYTHON and not (hide_importlib and is_import_machinery(f))
            for f in profile.functions
        ],
        dtype=np.bool_,
    )
    stacks = profile.stacks
    kept = by_frame(wanted[profile.frames["function"]], stacks)
    lengths = np.diff(stacks.offsets.astype(np.int64))
    stack = np.repeat(np.arange(len(stacks), dtype=np.int64), lengths)[kept]
    is_leaf = np.ones(len(stack), dtype=np.bool_)
    is_leaf[:-1] = stack[1:] != stack[:-1]
    frame = stacks.frames[kept].astype(np.int64)
    is_library = np.array([is_standard_library(f) for f in profile.functions], np.bool_)
    own = np.flatnonzero(~is_library[profile.frames["function"][frame]])
    # Of several values for one element numpy keeps the last, the innermost.
    last = np.full(len(stacks), -1, np.int64)
    last[stack[is_leaf]] = np.flatnonzero(is_leaf)
    last[stack[own]] = own
    is_own = np.zeros(len(stack), np.bool_)
    is_own[last[last >= 0]] = True
    return PythonFrames(stack, frame, is_leaf, is_own)
