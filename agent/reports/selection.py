# SPDX-License-Identifier: Apache-2.0
"""Which frames of a stack a report shows: Python's, native ones, or both.

A stack holds everything: between Python frames stands the interpreter's own machine code, which
says nothing but that Python called Python. So a view is a choice of frames, made here for all
formats; the time of a frame that is left out belongs to the frame it was called from. Frames made
by aiflame stay in every view.

Causes of waits are not found here: they are read from the whole stack.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import FrameKind, Function, Profile, Stacks
from aiflame.agent.reports.base import Frames

# Their indexes stay in the processor's cache.
_FRAMES_AT_ONCE = 1 << 16

_HIDDEN_KINDS = {
    Frames.BOTH: (FrameKind.INTERPRETER,),
    Frames.PYTHON: (FrameKind.NATIVE, FrameKind.KERNEL, FrameKind.INTERPRETER),
    Frames.NATIVE: (FrameKind.PYTHON,),
    Frames.ALL: (),
}

# co_filename of the modules that are frozen into the interpreter and run before any of the user's
# (Python/frozen.c: importlib since 3.3, zipimport since 3.8, runpy since 3.11).
_FROZEN_PREFIXES = ("<frozen importlib", "<frozen zipimport", "<frozen runpy")

# Before 3.11 runpy was a file; these are what `python -m` runs of it (Lib/runpy.py).
_RUNPY_ENDING = "/runpy.py"
_RUNPY_NAMES = frozenset(
    {"_run_module_as_main", "_run_code", "_run_module_code", "run_module", "run_path"}
)


def hidden_kinds(frames: Frames) -> tuple[FrameKind, ...]:
    """Return the kinds of frames that a selection leaves out."""
    return _HIDDEN_KINDS[frames]


def has_python(profile: Profile) -> bool:
    """Whether a selection makes any difference."""
    return any(f.kind in (FrameKind.PYTHON, FrameKind.INTERPRETER) for f in profile.functions)


def is_import_machinery(function: Function) -> bool:
    """Whether a function is one that imports modules, or that starts the user's program."""
    if function.kind is not FrameKind.PYTHON:
        return False
    return function.file.startswith(_FROZEN_PREFIXES) or (
        function.file.endswith(_RUNPY_ENDING) and function.name in _RUNPY_NAMES
    )


def by_frame(of_frame: npt.NDArray[Any], stacks: Stacks) -> npt.NDArray[Any]:
    """Return what is known of each frame, for each frame of each stack."""
    frames = stacks.frames
    found = np.empty(len(frames), of_frame.dtype)
    # Some at a time: numpy makes indexes of 64 bits of all that it is given.
    for first in range(0, len(frames), _FRAMES_AT_ONCE):
        part = slice(first, first + _FRAMES_AT_ONCE)
        found[part] = of_frame[frames[part]]
    return found


def shown_stacks(profile: Profile, frames: Frames, hide_importlib: bool = False) -> Stacks:
    """Return the stacks of a profile with the chosen frames, as many and in the same order."""
    hidden = hidden_kinds(frames)
    is_all = not hidden and not hide_importlib
    if is_all or (not has_python(profile) and frames is not Frames.PYTHON):
        return profile.stacks
    keeps = np.array(
        [
            f.kind not in hidden and not (hide_importlib and is_import_machinery(f))
            for f in profile.functions
        ],
        dtype=np.bool_,
    )
    stacks = profile.stacks
    kept: npt.NDArray[np.bool_] = by_frame(keeps[profile.frames["function"]], stacks)
    # In 32 bits, as so many numbers are among the largest arrays of a report.
    before = np.zeros(len(kept) + 1, np.uint32)
    np.cumsum(kept, out=before[1:])
    offsets = before[stacks.offsets.astype(np.int64)].astype(np.uint64)
    del before
    return Stacks(offsets, stacks.frames[kept], stacks.ends, stacks.gil)
