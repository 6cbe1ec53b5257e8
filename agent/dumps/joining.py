# SPDX-License-Identifier: Apache-2.0
"""From what was read of a thread to what is shown of it: frames named, and put into each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from aiflame.agent.dumps.model import DumpFrame
from aiflame.agent.dumps.native import NativeNames
from aiflame.agent.dumps.pythons import PythonProcess
from aiflame.agent.dumps.reading import RawThread
from aiflame.agent.model import FrameKind, StackEnd
from aiflame.agent.python.gil import GilState, LeafFrame, gil_state
from aiflame.agent.python.splice import Cuts, Role, role_of, splice
from aiflame.agent.python.walk import WalkEnd
from aiflame.agent.recording import roots
from aiflame.agent.recording.processes import ProcessImage
from aiflame.agent.symbols.frames import clean_name

_ROOTED = (StackEnd.ROOTED, StackEnd.ROOTED_BY_TABLE, StackEnd.ROOTED_BY_GUESS)
_KERNEL = "[kernel]"


class _Native(NamedTuple):
    """The frames of one native address, innermost inlined function first."""

    chain: tuple[DumpFrame, ...]
    role: Role
    in_interpreter: bool


class Joined(NamedTuple):
    """Frames leaf first, why either half has no root ("" where it has), and the GIL's label."""

    frames: tuple[DumpFrame, ...]
    cut: str
    python_cut: str
    gil: GilState | None


def places_of(image: ProcessImage, thread: RawThread, names: NativeNames) -> list[tuple[int, int]]:
    """Returns the places of a thread's native frames, leaf first, for `NativeNames`."""
    if thread.walked is None:
        return []
    return [names.place(image, address) for address in _looked_up(thread)]


def _looked_up(thread: RawThread) -> list[int]:
    addresses = () if thread.walked is None else thread.walked.addresses
    # A call at a function's very end returns to the next function.
    return [address - (at > 0) for at, address in enumerate(addresses)]


def join(
    image: ProcessImage, thread: RawThread, names: NativeNames, python: PythonProcess | None
) -> Joined:
    """Makes one stack of what was read; the names of its places were learnt before."""
    natives = [_kernel(name) for name in thread.kernel]
    natives += [_native(image, address, names, python) for address in _looked_up(thread)]
    cut = _native_cut(thread, natives)
    if python is None:
        return Joined(_expanded(natives), cut, "", None)
    walked = None if thread.python is None else thread.python.walk
    if thread.python is None or walked is None:
        return Joined(_expanded(natives), cut, "", GilState.NO_PYTHON)
    python_cut = "" if walked.end is WalkEnd.COMPLETE else walked.end.value.replace("_", " ")
    if thread.walked is None:
        frames = tuple(python.frame(frame) for frame in walked.frames if frame.code_address)
        label = gil_state(thread.python.holds_gil, bool(walked.frames), ())
        return Joined(frames, cut, python_cut, label)
    cuts = Cuts(native=bool(cut), python=bool(python_cut))
    roles = [native.role for native in natives]
    pieces = splice(roles, walked.frames, cuts, keep_glue=True).pieces
    kept = set(splice(roles, walked.frames, cuts).pieces)
    found: list[DumpFrame] = []
    for piece in pieces:
        if piece.is_python:
            found.append(python.frame(walked.frames[piece.at]))
        else:
            chain = natives[piece.at].chain
            found += chain if piece in kept else map(_as_glue, chain)
    behind = list(itertools.takewhile(lambda piece: not piece.is_python, pieces))
    leaf = [
        LeafFrame(natives[piece.at].chain[-1].name, natives[piece.at].in_interpreter)
        for piece in behind
    ]
    label = gil_state(thread.python.holds_gil, len(behind) < len(pieces), leaf)
    return Joined(tuple(found), cut, python_cut, label)


def _kernel(name: str) -> _Native:
    frame = DumpFrame(FrameKind.KERNEL, clean_name(name), "", 0, _KERNEL)
    return _Native((frame,), Role.KERNEL, False)


def _native(
    image: ProcessImage, address: int, names: NativeNames, python: PythonProcess | None
) -> _Native:
    place = names.place(image, address)
    chain = names.chain(image, place)
    if python is None:
        return _Native(chain, Role.OTHER, False)
    in_interpreter = place[0] == python.binary
    name = chain[-1].name
    role = role_of("" if name.startswith("[") else name, python.is_eval(address), in_interpreter)
    return _Native(chain, role, in_interpreter)


def _native_cut(thread: RawThread, natives: Sequence[_Native]) -> str:
    if thread.walked is None or thread.walked.end in _ROOTED:
        return ""
    if natives and roots.is_start_name(natives[-1].chain[-1].name):
        return ""
    return thread.walked.end.label


def _expanded(natives: Sequence[_Native]) -> tuple[DumpFrame, ...]:
    return tuple(frame for native in natives for frame in native.chain)


def _as_glue(frame: DumpFrame) -> DumpFrame:
    return DumpFrame(frame.kind, frame.name, frame.file, frame.line, frame.module, True)
