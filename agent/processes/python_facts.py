# SPDX-License-Identifier: Apache-2.0
"""Tells windows of Python frames: which a stack has, and what their code objects are called.

Names are read from the process while it lives, once a round for each code object, and checked
against reuse of the address.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
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

_GONE = SourceFrame("[exited before its name could be read]", "", 0, False)

# Lines of a process that are kept, some MB where code is made all the time.
_KEPT_LINES = 1 << 14


@dataclass(slots=True)
class ProcessCode:
    """The code objects of one process.

    Attributes:
        process: Its number in windows.
        reader: Reads them.
        parents_reader: Reads those of the process that it was forked from, which has the same at
            the same addresses; None where it was not forked.
        has_exited: The process is gone, or may not be read any more.
        lines: By id of the code object, which is kept with it so that no other can get it, and
            position.
    """

    process: int
    reader: CodeReader
    parents_reader: CodeReader | None = None
    has_exited: bool = False
    lines: OrderedDict[tuple[int, int], tuple[Code, SourceFrame]] = field(
        default_factory=OrderedDict
    )


def _read(code: ProcessCode, addresses: Sequence[int]) -> Sequence[Code | None]:
    """Reads code objects; returns none where there is nobody to read them from any more."""
    try:
        return code.reader.read_many(addresses)
    except NoMemoryAccess:
        if code.parents_reader is None:
            code.has_exited = True
            return ()
        code.reader, code.parents_reader = code.parents_reader, None
    return _read(code, addresses)


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

    def name(self, code: ProcessCode, frames: Sequence[PythonFrame]) -> None:
        """Reads what frames are called; windows are told by `flush`."""
        objects, lines = self._told["code_objects"], self._told["code_lines"]
        process, text = code.process, self._window.text
        self.read(code, (frame.code_address for frame in frames))
        for frame in frames:
            address, position = frame.code_address, frame.position
            if not address:
                continue
            found = self._source(code, address, position)
            if found is None:
                objects[process, address, 0, 0, 0] = None
                continue
            source, first_line = found
            objects[process, address, text(source.name), text(source.file), first_line] = None
            lines[process, address, position, max(source.line, 0)] = None

    def _source(
        self, code: ProcessCode, address: int, position: int
    ) -> tuple[SourceFrame, int] | None:
        """Returns what a frame is called, and its function's first line; None for no frame."""
        key = (code.process, address)
        if key not in self._checked:
            self._losses[LossKind.PYTHON_EXITED] += 1
            return _GONE, 0
        found = self._checked[key]
        if found is None:
            return UNREADABLE_FRAME, 0
        if found.name == found.filename == _CLEANUP_NAME:
            return None
        known = code.lines.get((id(found), position))
        if known is None:
            line = code.reader.line(found, position)
            source = SourceFrame(found.qualname, found.filename, line, False)
            known = code.lines[(id(found), position)] = (found, source)
            if len(code.lines) > _KEPT_LINES:
                code.lines.popitem(last=False)
        return known[1], max(found.first_line, 0)

    def tell_chain(
        self, chain: int, process: int, frames: Sequence[PythonFrame], end: abi.PythonEnd
    ) -> None:
        """Tells windows the Python frames of a stack.

        Args:
            chain: Under which id.
            process: Number of the process.
            frames: Leaf first.
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
