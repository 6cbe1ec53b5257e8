# SPDX-License-Identifier: Apache-2.0
"""Puts the Python frames of a sample where the eval loop stands in its native stack.

Frames of the interpreter that only hand calls on, and eval loops that became Python frames, are
kept under a kind of their own: reports leave them out or show them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from aiflame.agent.kernel import abi
from aiflame.agent.model.profile import FrameKind, GilState
from aiflame.agent.python.gil import LeafFrame, gil_state
from aiflame.agent.python.interpreter import LoadedInterpreter
from aiflame.agent.python.splice import Cuts, Match, Role, splice
from aiflame.agent.python.walk import PythonFrame
from aiflame.agent.symbolize.stacks import FrameIds
from aiflame.agent.symbols.frames import SourceFrame

# Ways to pair them that are certain, or uncertain at the leaf only.
_SOUND = (Match.EXACT, Match.NO_PYTHON, Match.LEAF_RACE, Match.PYTHON_CUT, Match.NATIVE_CUT)
_HOLDS = {abi.PythonGil.HELD: True, abi.PythonGil.NOT_HELD: False}


@dataclass(frozen=True, slots=True)
class PythonChain:
    """The Python frames of a sample, leaf first.

    Attributes:
        frames: As they were walked.
        sources: What each is called; None for a run without frames.
        is_whole: The walk got to the outermost frame.
    """

    frames: tuple[PythonFrame, ...]
    sources: tuple[SourceFrame | None, ...]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class NativeFrame:
    """One frame of a native stack of a process with an interpreter.

    Attributes:
        role: What it is for that.
        is_kernel: It is a frame of the kernel.
        in_interpreter: It is in the interpreter's own file.
        binary_id: Id of the file in the capture.
        address: Where it is in the file.
        sources: Its functions, innermost inlined first; () where no symbol covers it.
        label: What it is shown as there.
        frames: Their ids in the capture, as native or kernel frames, or that of the Python function
            that a trampoline stands for.
    """

    role: Role
    is_kernel: bool
    in_interpreter: bool
    binary_id: int | None
    address: int
    sources: tuple[SourceFrame, ...]
    label: str
    frames: tuple[int, ...]

    @property
    def symbol(self) -> str:
        """The function that is not inlined, "" where unknown."""
        return symbol_of(self.sources)


def symbol_of(sources: Sequence[SourceFrame]) -> str:
    """Returns the function of an address that is not inlined, "" where unknown."""
    return sources[-1].name if sources else ""


@dataclass(frozen=True, slots=True)
class MappedInterpreter:
    """The interpreter of a process: the file that it is in, and where it is."""

    binary: int
    loaded: LoadedInterpreter


class Splicer:
    """Combines stacks, and counts how runs of Python frames and eval loops were paired.

    Args:
        ids: Of frames.
    """

    def __init__(self, ids: FrameIds) -> None:
        self._ids = ids
        self.matches: Counter[Match] = Counter()

    @property
    def misfits(self) -> int:
        """Stacks in which runs of Python frames and eval loops did not correspond."""
        return sum(count for match, count in self.matches.items() if match not in _SOUND)

    def splice(
        self, natives: Sequence[NativeFrame], chain: PythonChain, is_rooted: bool
    ) -> tuple[list[int], Match]:
        """Returns the frame ids of a combined stack, leaf first, and how it was combined."""
        roles = [native.role for native in natives]
        cuts = Cuts(native=not is_rooted, python=not chain.is_whole)
        spliced = splice(roles, chain.frames, cuts)
        self.matches[spliced.match] += 1
        frames: list[int] = []
        for piece in spliced.pieces:
            if piece.is_python:
                source = chain.sources[piece.at]
                if source is not None:
                    frames.append(self._ids.frame(FrameKind.PYTHON, source, None, 0))
            elif piece.is_hidden:
                frames += self._hidden(natives[piece.at])
            else:
                frames += natives[piece.at].frames
        return frames, spliced.match

    def _hidden(self, native: NativeFrame) -> list[int]:
        """The same frames under the kind of those that are left out."""
        kind, binary_id = FrameKind.INTERPRETER, native.binary_id
        sources = native.sources or (SourceFrame(native.label, "", 0, False),)
        return [self._ids.frame(kind, source, binary_id, native.address) for source in sources]

    def gil(self, natives: Sequence[NativeFrame], gil: int, has_python: bool) -> GilState:
        """Returns what a thread had to do with the GIL."""
        leaf: list[LeafFrame] = []
        for native in natives:
            if native.role in (Role.EVAL, Role.HANDLER):
                break
            if not native.is_kernel:
                leaf.append(LeafFrame(native.symbol, native.in_interpreter))
        return gil_state(_HOLDS.get(abi.PythonGil(gil)), has_python, leaf)
