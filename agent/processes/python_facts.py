# SPDX-License-Identifier: Apache-2.0
"""Tells windows of Python frames: which a stack has, and what their code objects are called.

Names are read from the process while it lives, once a round for each code object, and checked
against reuse of the address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.window import COLUMNS, FactsTaker, rows_of
from aiflame.agent.python.codes import UNREADABLE_FRAME, Code, CodeReader
from aiflame.agent.python.memory import NoMemoryAccess
from aiflame.agent.python.walk import PythonFrame
from aiflame.agent.symbols.frames import SourceFrame

# Name and file of the code that the interpreter itself runs after a class's __init__
# (_Py_InitCleanup, v3.13.0 Python/specialize.c): no Python frame to anybody.
_CLEANUP_NAME = "__init__"

_NO_FRAME = SourceFrame("", "", 0, False)
_GONE = SourceFrame("[exited before its name could be read]", "", 0, False)

# Code objects of a process that are kept, some MB where code is made all the time.
_KEPT_IDS = 1 << 13

# Who reads code objects of a process: itself and three that forked each other. Some programs fork
# for ever, and each reader has a cache.
MAX_READERS = 4

# Addresses of user space have 47 bits. What is above them counts changes, and begins anew after
# 65,536 of them: by then no window knows the first ones.
_CHANGE = 1 << 48
_ID_MASK = (1 << 64) - 1


@dataclass(slots=True)
class ProcessCode:
    """The code objects of one process.

    Attributes:
        process: Its number in windows.
        readers: Read them, MAX_READERS at most. After its own come those of the processes that it
            was forked from, one from the other, which have the same at the same addresses; whoever
            was found to have exited is left out, but for the last.
        has_exited: The process is gone, or may not be read any more.
        found: By address, what was last found there; the oldest first.
        numbers: By address, under which number windows know it, where that is not the address.
        changes: How often something else was found at an address, or an address forgotten.
    """

    process: int
    readers: tuple[CodeReader, ...]
    has_exited: bool = False
    found: dict[int, Code | SourceFrame] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    changes: int = 0

    def number(self, address: int, found: Code | SourceFrame) -> int:
        """Returns the number under which windows know what was found at an address.

        Within one window an address may have been that of several functions: code objects of
        modules are freed after the import, and others get their addresses.
        """
        known = self.found.get(address)
        if known is not found:
            self.changes += known is not None
            self.found[address] = found
            if self.changes:
                self.numbers[address] = address + self.changes * _CHANGE & _ID_MASK
            if len(self.found) > _KEPT_IDS:
                oldest = next(iter(self.found))
                del self.found[oldest]
                self.numbers.pop(oldest, None)
                self.changes += 1
        return self.numbers.get(address, address)


def _read(code: ProcessCode, addresses: Sequence[int]) -> Sequence[Code | None]:
    """Reads code objects; returns none where there is nobody to read them from any more."""
    while not code.has_exited:
        reader, *others = code.readers
        try:
            return reader.read_many(addresses)
        except NoMemoryAccess:
            code.has_exited = not others
            code.readers = tuple(others) or code.readers
    return ()


def _source(code: ProcessCode, found: Code | SourceFrame, position: int) -> tuple[SourceFrame, int]:
    """Returns what a frame is called, "" for no frame, and its function's first line."""
    if isinstance(found, SourceFrame):
        return found, 0
    if found.name == found.filename == _CLEANUP_NAME:
        return _NO_FRAME, 0
    line = code.readers[0].line(found, position)  # which are kept there
    return SourceFrame(found.qualname, found.filename, line, False), max(found.first_line, 0)


class PythonFacts:
    """Facts of Python frames that windows have to know.

    Args:
        window: Where they go.
        losses: Where names are counted that could not be read.
    """

    def __init__(self, window: FactsTaker, losses: Counter[LossKind]) -> None:
        self._window = window
        self._losses = losses
        self._checked: dict[tuple[int, int], Code | None] = {}  # by process and address
        # What windows are to be told, each once.
        self._told: dict[str, dict[tuple[int, ...], None]] = {"code_objects": {}, "code_lines": {}}

    def begin_round(self) -> None:
        """Has code objects read again: others may have their addresses by now."""
        self._checked.clear()

    def read(self, code: ProcessCode, addresses: Iterable[int]) -> None:
        """Reads code objects of one process together."""
        process = code.process
        known = self._checked
        wanted = [a for a in {*addresses} if a and (process, a) not in known]
        if not wanted or code.has_exited:
            return
        found = _read(code, wanted)
        known.update(zip(((process, a) for a in wanted), found, strict=False))

    def name(self, code: ProcessCode, frames: Sequence[PythonFrame]) -> tuple[PythonFrame, ...]:
        """Reads what frames are called; windows are told by `flush`.

        Returns:
            The frames as windows know them, for `tell_chain`: with the number of what was found in
            place of its address.
        """
        self.read(code, (frame.code_address for frame in frames))
        return tuple(
            self._told_as(code, frame) if frame.code_address else frame for frame in frames
        )

    def _told_as(self, code: ProcessCode, frame: PythonFrame) -> PythonFrame:
        found = self._found(code, frame.code_address)
        number = code.number(frame.code_address, found)
        source, first_line = _source(code, found, frame.position)
        process, text = code.process, self._window.text
        row = (process, number, text(source.name), text(source.file), first_line)
        self._told["code_objects"][row] = None
        if source.name:
            self._told["code_lines"][process, number, frame.position, max(source.line, 0)] = None
        if number == frame.code_address:
            return frame
        return PythonFrame(number, frame.position, frame.ends_run)

    def _found(self, code: ProcessCode, address: int) -> Code | SourceFrame:
        """Returns the code object at an address, or what is shown where none could be read."""
        if (code.process, address) not in self._checked:
            self._losses[LossKind.PYTHON_EXITED] += 1
            return _GONE
        found = self._checked[code.process, address]
        if found is None:
            self._losses[LossKind.PYTHON_CODE_GONE] += 1
            return UNREADABLE_FRAME
        return found

    def tell_chain(
        self, chain: int, process: int, frames: Sequence[PythonFrame], end: abi.PythonEnd
    ) -> None:
        """Tells windows the Python frames of a stack.

        Args:
            chain: Under which id.
            process: Number of the process.
            frames: Leaf first, as `name` returned them.
            end: Why there are no more.
        """
        parts = [(frame.code_address, frame.position, frame.ends_run) for frame in frames]
        self._window.define(
            "chains",
            rows_of("chains", (chain, process, 0, len(frames), end)),
            np.array(parts, COLUMNS["chain_frames"].dtype),
        )

    def flush(self) -> None:
        """Tells windows what frames are called that were named since the last time."""
        for column, rows in self._told.items():
            if rows:
                self._window.define(column, np.array(list(rows), COLUMNS[column].dtype))
                rows.clear()
