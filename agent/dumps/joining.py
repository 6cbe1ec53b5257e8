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
from aiflame.agent.model.profile import FrameKind, StopReason
from aiflame.agent.processes.table import ProcessImage
from aiflame.agent.python.gil import GilState, LeafFrame, gil_state
from aiflame.agent.python.splice import Cuts, Match, Role, role_of, splice
from aiflame.agent.python.trampolines import trampoline_name
from aiflame.agent.python.walk import Walk, WalkEnd
from aiflame.agent.symbols import roots
from aiflame.agent.symbols.frames import clean_name

_ROOTED = (StopReason.ROOTED, StopReason.ROOTED_BY_TABLE, StopReason.ROOTED_BY_HEURISTIC)
_KERNEL = "[kernel]"


# Where eval loops and runs of Python frames do not pair one to one.
_UNPAIRED = {
    Match.NO_EVAL: "not shown, since the native stack has no eval loop",
    Match.RUNS_MISSING: "fewer calls than eval loops, positions are uncertain",
    Match.EVALS_MISSING: "more calls than eval loops, positions are uncertain",
}


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


class Joiner:
    """Joins the threads of one process; threads that do the same are joined once.

    Args:
        image: The process.
        names: Of native frames.
        python: Its interpreter, None for none.
    """

    def __init__(
        self, image: ProcessImage, names: NativeNames, python: PythonProcess | None
    ) -> None:
        self._image = image
        self._names = names
        self._python = python
        self._natives: dict[int, _Native] = {}
        self._known: dict[tuple[object, ...], Joined] = {}

    def learn(self, threads: Sequence[RawThread]) -> None:
        """Names all that the stacks of threads consist of; to be called before `join`."""
        if self._python is not None:
            self._python.learn(thread.python for thread in threads if thread.python is not None)
        addresses = {address for thread in threads for address in _looked_up(thread)}
        locations = {address: self._names.location(self._image, address) for address in addresses}
        self._names.learn(self._image, locations.values())
        for address, location in locations.items():
            self._natives[address] = self._native(address, location)

    def _native(self, address: int, location: tuple[int, int]) -> _Native:
        chain = self._names.chain(self._image, location)
        if self._python is None:
            return _Native(chain, Role.OTHER, False)
        in_interpreter = location[0] == self._python.binary
        if chain[-1].kind is FrameKind.PYTHON:
            return _Native(chain, Role.TRAMPOLINE, False)
        name = "" if chain[-1].name.startswith("[") else chain[-1].name
        role = role_of(name, self._python.is_eval(address), in_interpreter)
        return _Native(chain, role, in_interpreter)

    def join(self, thread: RawThread) -> Joined:
        """Makes one stack of what was read of a thread."""
        key = (thread.kernel, thread.walked, thread.python)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._join(thread)
        return found

    def _join(self, thread: RawThread) -> Joined:
        natives = [_kernel(name) for name in thread.kernel]
        natives += [self._natives[address] for address in _looked_up(thread)]
        cut = _native_cut(thread, natives)
        if self._python is None or thread.python is None:
            label = None if self._python is None else GilState.NO_PYTHON
            frames = tuple(frame for native in natives for frame in native.chain)
            return Joined(frames, cut, "", label)
        walked, holds = thread.python
        python_cut = "" if walked.end is WalkEnd.COMPLETE else walked.end.value.replace("_", " ")
        if thread.walked is None:
            frames = tuple(self._python.frame(f) for f in walked.frames if f.code_address)
            return Joined(frames, cut, python_cut, gil_state(holds, bool(frames), ()))
        cuts = Cuts(native=bool(cut), python=bool(python_cut))
        frames, leaf, match = self._spliced(self._python, natives, walked, cuts)
        python_cut = python_cut or _UNPAIRED.get(match, "")
        has_python = any(frame.kind is FrameKind.PYTHON for frame in frames)
        return Joined(frames, cut, python_cut, gil_state(holds, has_python, leaf))

    @staticmethod
    def _spliced(
        python: PythonProcess, natives: Sequence[_Native], walked: Walk, cuts: Cuts
    ) -> tuple[tuple[DumpFrame, ...], list[LeafFrame], Match]:
        """Returns all frames, the native ones on the leaf side of all Python frames, and how."""
        roles = [native.role for native in natives]
        whole = splice(roles, walked.frames, cuts, keep_glue=True)
        pieces = whole.pieces
        kept = set(splice(roles, walked.frames, cuts).pieces)
        found: list[DumpFrame] = []
        for piece in pieces:
            if piece.is_python:
                found.append(python.frame(walked.frames[piece.at]))
            else:
                chain = natives[piece.at].chain
                found += chain if piece in kept else map(_as_glue, chain)
        after = itertools.takewhile(lambda piece: not piece.is_python, pieces)
        leaf = [natives[piece.at] for piece in after]
        called = [LeafFrame(native.chain[-1].name, native.in_interpreter) for native in leaf]
        return tuple(found), called, whole.match


def _looked_up(thread: RawThread) -> list[int]:
    addresses = () if thread.walked is None else thread.walked.addresses
    # A call at a function's very end returns to the next function.
    return [address - (at > 0) for at, address in enumerate(addresses)]


def _kernel(name: str) -> _Native:
    frame = DumpFrame(FrameKind.KERNEL, clean_name(name), "", 0, _KERNEL)
    return _Native((frame,), Role.KERNEL, False)


def _native_cut(thread: RawThread, natives: Sequence[_Native]) -> str:
    if thread.walked is None or thread.walked.end in _ROOTED:
        return ""
    if natives and roots.is_start_name(natives[-1].chain[-1].name):
        return ""
    return thread.walked.end.label


def _as_glue(frame: DumpFrame) -> DumpFrame:
    if frame.kind is FrameKind.PYTHON:
        # A trampoline, beside the Python frame of its function.
        name = trampoline_name(frame.name, frame.file)
        return DumpFrame(FrameKind.NATIVE, name, "", 0, "", True)
    return DumpFrame(frame.kind, frame.name, frame.file, frame.line, frame.module, True)
