# SPDX-License-Identifier: Apache-2.0
"""Which frames are the reader's own: what tables lead with.

A thread that waits does so in the scheduler, called by libc, called by the interpreter. That is so
of every program, and says nothing of this one. So time off the CPU is charged to the innermost
frame of the highest `Rank` in its stack. Patterns are such as Python and RE2 read alike, so
that a store is asked with the same ones: https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import enum
import re

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import FrameKind, Function, Profile, Stacks
from aiflame.agent.reports.causes import LIBC_PREFIXES
from aiflame.agent.reports.selection import by_frame

I64 = npt.NDArray[np.int64]

_LIBC = "|".join(map(re.escape, LIBC_PREFIXES))
_INTERPRETER = r"libpython[0-9]|python[0-9.]*t?(-dbg)?$|pypy"

# Paths of binaries in which code of anybody waits: the C library, C++'s, the interpreter, and what
# comes with it.
WAITING_MODULE = rf"(^|/)({_LIBC}|libstdc\+\+|libc\+\+|{_INTERPRETER})|/lib-dynload/[^/]*$"

# Files of Python's own library, wherever it is installed: of packages in it nothing is said.
STANDARD_LIBRARY = r"^<frozen |/lib(64)?/python3\.[0-9]+t?/"
# PyOpenCL compiles a function for each kernel, under this name (pyopencl/invoker.py).
PACKAGES = r"/(site|dist)-packages/|^<pyopencl invoker for "

# Scripts that pip makes of a package's entry points call that package, and nothing else.
ENTRY_POINT = r"/bin/[^/]*$"

# Functions by which the kernel takes a CPU away from whoever called it, kernel/sched/core.c.
SCHEDULER = r"^_*(preempt_|io_)?schedule(_|$)|^_*cond_resched|^__switch_to"

# Their frames stay in the processor's cache.
_STACKS_AT_ONCE = 2_048


class Rank(enum.IntEnum):
    """How much a frame tells of who waited; the page knows the same order."""

    SCHEDULER = 0
    KERNEL = 1
    LIBRARY = 2  # libc, C++'s library and the interpreter
    STANDARD = 3  # Python's own library, in Python
    OWN = 4


_is_waiting_module = re.compile(WAITING_MODULE).search
_is_standard_library = re.compile(STANDARD_LIBRARY).search
_is_package = re.compile(PACKAGES).search
_is_entry_point = re.compile(ENTRY_POINT).search
_is_scheduler = re.compile(SCHEDULER).search


def is_standard_library(function: Function) -> bool:
    """Whether a function of Python is of Python's own library."""
    return bool(_is_standard_library(function.file)) and not _is_package(function.file)


def is_installed(function: Function) -> bool:
    """Whether a function of Python is of its library, of a package, or a script that calls one."""
    file = function.file
    return bool(_is_standard_library(file) or _is_package(file) or _is_entry_point(file))


def ranks(profile: Profile) -> npt.NDArray[np.uint8]:
    """Return the `Rank` of each function, shape (functions,)."""
    waits_in = [bool(_is_waiting_module(binary.path)) for binary in profile.binaries]

    def rank(function: Function) -> Rank:
        if function.kind is FrameKind.KERNEL:
            return Rank.SCHEDULER if _is_scheduler(function.name) else Rank.KERNEL
        if function.kind is FrameKind.PYTHON:
            return Rank.STANDARD if is_standard_library(function) else Rank.OWN
        is_library = function.kind is FrameKind.INTERPRETER or (
            function.binary is not None and waits_in[function.binary]
        )
        return Rank.LIBRARY if is_library else Rank.OWN

    return np.array([rank(function) for function in profile.functions], np.uint8)


def innermost_of_highest(rank_of_frame: npt.NDArray[np.uint8], stacks: Stacks) -> I64:
    """Return where in `stacks.frames` the innermost frame of the highest rank of each stack is.

    Args:
        rank_of_frame: The rank of each frame of the profile, shape (frames,).
        stacks: The stacks.

    Returns:
        Positions, -1 for stacks without frames; shape (stacks,).
    """
    offsets = stacks.offsets.astype(np.int64)
    found = np.full(len(stacks), -1, np.int64)
    rank = by_frame(rank_of_frame, stacks)
    for first in range(0, len(stacks), _STACKS_AT_ONCE):
        ends = offsets[first : first + _STACKS_AT_ONCE + 1]
        there = np.flatnonzero(np.diff(ends))
        if len(there):
            at = np.arange(ends[0], ends[-1])
            # Ordered by rank, then by position: the largest of a stack is the one looked for.
            keys = rank[ends[0] : ends[-1]].astype(np.int64) * len(rank) + at
            highest = np.maximum.reduceat(keys, ends[there] - ends[0])
            found[first + there] = highest % len(rank)
    return found


def charged_frames(profile: Profile) -> I64:
    """Return the frame that waits in each stack are charged to, -1 for none."""
    return _innermost_frames(profile, ranks(profile))


def innermost_functions(profile: Profile) -> I64:
    """Return the function of the innermost frame of each stack, -1 for none."""
    frames = np.append(profile.stacks.frames.astype(np.int64), -1)
    offsets = profile.stacks.offsets.astype(np.int64)
    return functions_of(profile, np.where(np.diff(offsets) > 0, frames[offsets[1:] - 1], -1))


def functions_of(profile: Profile, frame: I64) -> I64:
    """Return the function of each frame, -1 for none, which -1 has."""
    found: I64 = np.append(profile.frames["function"].astype(np.int64), -1)[frame]
    return found


def launching_frames(profile: Profile) -> I64:
    """Return the frame that launches in each stack are charged to, -1 for none.

    The innermost line of Python that is of no installed package, else of none of Python's own, else
    the innermost function that is not a device runtime's or a library's for waiting.
    """
    calls = {function.name for function in profile.gpu.functions}
    programs = {process.executable for process in profile.processes}
    runtimes = {f.binary for f in profile.functions if f.name in calls and f.binary is not None}
    # A runtime may be linked into the program itself.
    runtimes = {at for at in runtimes if profile.binaries[at].path not in programs}
    own = ranks(profile)

    def rank(at: int, function: Function) -> int:
        if function.kind is FrameKind.PYTHON:
            return 4 if not is_installed(function) else 3 if own[at] == Rank.OWN else 1
        is_runtime = function.binary in runtimes or function.name in calls
        return 2 if own[at] == Rank.OWN and not is_runtime else 1

    found = [rank(at, function) for at, function in enumerate(profile.functions)]
    return _innermost_frames(profile, np.array(found, np.uint8))


def waited_in(profile: Profile) -> I64:
    """Return the innermost frame of each stack that is not the scheduler's, -1 for none."""
    return _innermost_frames(profile, (ranks(profile) > Rank.SCHEDULER).astype(np.uint8))


def _innermost_frames(profile: Profile, rank_of_function: npt.NDArray[np.uint8]) -> I64:
    rank_of_frame = rank_of_function[profile.frames["function"]]
    at = innermost_of_highest(rank_of_frame, profile.stacks)
    frames = np.append(profile.stacks.frames.astype(np.int64), -1)  # found by -1
    found: I64 = frames[at]
    return found
