# SPDX-License-Identifier: Apache-2.0
"""Compares recorded stacks with the tree of functions (`chains`) that made them.

The leaf's function tells its callers, up to the root. What may stand between or above them is the
C library's, and only where the tree calls it or is called by it; the kernel's signal frame, after
the handler; and the linkage stub through which a function is called. A stack that was cut has to
say so, and may not hold anything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aiflame.agent.model.profile import FrameKind, Profile, StopReason
from chains import Function, Tree

_OWN = re.compile(r"f_(\d{4})(?:\.(?:cold|part\.0))?")
_STUB = re.compile(r"f_(\d{4})@plt")
# Past the roots, and what the C library calls main from.
_ROOT_CALLERS = ["f_main", "f_root", "main"]
_SIGNAL_CALLERS = ["f_signal", "on_signal"]
_OWN_NAMES = {*_ROOT_CALLERS, *_SIGNAL_CALLERS}


class Wrong(Exception):
    """A stack holds what cannot be."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a stack turned out to be.

    Attributes:
        is_judged: A function of the tree is in it.
        has_signal: It leads through the signal handler into what that interrupted.
        depth: Its frames of the tree.
    """

    is_judged: bool
    has_signal: bool
    depth: int


def user_frames(profile: Profile, stack: int) -> list[str]:
    """Returns the names of a stack's user frames, leaf first."""
    begin, end = profile.stacks.offsets[stack : stack + 2]
    functions = profile.frames["function"][profile.stacks.frames[begin:end]][::-1]
    named = (profile.functions[function] for function in functions.tolist())
    return [function.name for function in named if function.kind is FrameKind.NATIVE]


def judge(tree: Tree, frames: Sequence[str], end: StopReason) -> Verdict:
    """Compares a stack, leaf first, with the truth.

    Raises:
        Wrong: It is not the truth, nor the leaf's side of it with a mark where it was cut.
    """
    walk = _Walk(tree, list(frames))
    try:
        walk.from_leaf()
        if walk.rest():
            raise Wrong(f"{walk.rest()[:3]} past the start")
    except _Cut as cut:
        if end is StopReason.ROOTED and walk.depth:
            raise Wrong(f"rooted, but without {cut}") from None
    return Verdict(walk.depth > 0, walk.has_signal, walk.depth)


class _Cut(Exception):
    """The frames are at their end before the truth is."""


class _Walk:
    def __init__(self, tree: Tree, frames: list[str]) -> None:
        self._tree = tree
        self._frames = frames
        self._at = 0
        self.depth = 0
        self.has_signal = False

    def rest(self) -> list[str]:
        return self._frames[self._at :]

    def _next(self, wanted: str) -> str:
        if self._at == len(self._frames):
            raise _Cut(wanted)
        self._at += 1
        return self._frames[self._at - 1]

    def _expect(self, wanted: str) -> None:
        found = self._next(wanted)
        if found.partition(".")[0] != wanted:
            raise Wrong(f"{found} instead of {wanted} after {self._frames[: self._at - 1][-3:]}")
        self.depth += wanted not in _OWN_NAMES

    def _foreign(self) -> Iterator[str]:
        """Passes frames that are not the program's own functions."""
        while self._at < len(self._frames):
            name = self._frames[self._at]
            if _OWN.fullmatch(name) or name in _OWN_NAMES:
                return
            self._at += 1
            yield name

    def from_leaf(self) -> None:
        """What was executing: the leaf, or what a signal interrupted."""
        above = list(self._foreign())
        name = self._next("any function of the tree")
        if name in _OWN_NAMES:
            self._outside(name, above)
            return
        found = _OWN.fullmatch(name)
        assert found is not None
        leaf = self._tree.functions[int(found[1])]
        self._check_above(leaf, above)
        self.depth += 1
        copies = 1
        while self._at < len(self._frames) and self.rest()[0] == name and copies < leaf.copies:
            copies += 1
            self._expect(name)
        self._callers(leaf)

    def _outside(self, name: str, above: list[str]) -> None:
        """In the functions around the trees, or what they call."""
        if name in _SIGNAL_CALLERS:
            for caller in _SIGNAL_CALLERS[_SIGNAL_CALLERS.index(name) + 1 :]:
                self._expect(caller)
            self._signal()
            return
        if above and name == "f_main" and not _STUB.fullmatch(above[0]):
            raise Wrong(f"{name} does not call {above}")
        for caller in _ROOT_CALLERS[_ROOT_CALLERS.index(name) + 1 :]:
            self._expect(caller)
        list(self._foreign())

    def _check_above(self, leaf: Function, above: list[str]) -> None:
        if above and not self._tree.calls_out(leaf):
            stub = _STUB.fullmatch(above[-1])
            # A linkage stub, or the dynamic linker that it jumps to: it binds at the first call.
            if stub is not None and self._tree.calls(leaf, int(stub[1])):
                return
            if not all(map(_is_binding, above)) or not leaf.calls:
                raise Wrong(f"{leaf.name} does not call {above}")

    def _callers(self, function: Function) -> None:
        while function.caller is not None:
            if function.edge.is_callback and not list(self._foreign()):
                name = self._next("the C library")
                raise Wrong(f"{name} calls {function.name} without the C library")
            function = self._tree.functions[function.caller]
            for _ in range(function.copies):
                self._expect(function.name)
        callers = _ROOT_CALLERS if function.number == 0 else _SIGNAL_CALLERS
        for caller in callers:
            self._expect(caller)
        if function.number == 0:
            list(self._foreign())
        else:
            self._signal()

    def _signal(self) -> None:
        """The frame that the kernel made, which the C library describes."""
        frame = self._next("the signal frame")
        if _OWN.fullmatch(frame) or frame in _OWN_NAMES:
            raise Wrong(f"{frame} instead of the signal frame")
        self.has_signal = True
        self.from_leaf()


def _is_binding(name: str) -> bool:
    return "_dl_" in name or name.startswith(("[ld-linux", "do_lookup", "check_match", "strcmp"))
