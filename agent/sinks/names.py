# SPDX-License-Identifier: Apache-2.0
"""The functions, frames and binaries of a capture, each stored once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.model.profile import FrameKind
from aiflame.agent.sinks.index import Index

if TYPE_CHECKING:
    from aiflame.agent.symbols.frames import SourceFrame

# SQLite's integers are signed: a lying file's addresses above are stored as unknown.
MAX_INTEGER = (1 << 63) - 1


class Names:
    """Functions and frames of the capture, each once, under ids that count from 0."""

    def __init__(self) -> None:
        self._binaries, self._functions, self._frames = Index(), Index(), Index()
        self._added: dict[str, list[tuple[Any, ...]]] = {
            "binaries": [],
            "functions": [],
            "frames": [],
        }

    def binary(self, path: str, build_id: str) -> int:
        """Returns the id of a binary."""
        known = self._binaries.find((path, build_id))
        if known is None:
            known = self._binaries.add((path, build_id))
            self._added["binaries"].append((known, path, build_id))
        return known

    def frame(self, kind: FrameKind, source: SourceFrame, binary: int | None, address: int) -> int:
        """Returns the id of a frame."""
        key = (int(kind), source.name, binary, source.file)
        function = self._functions.find(key)
        if function is None:
            function = self._functions.add(key)
            self._added["functions"].append((function, *key))
        address = address if address <= MAX_INTEGER else 0
        location = (function, source.line, address, int(source.inlined))
        frame = self._frames.find(location)
        if frame is None:
            frame = self._frames.add(location)
            self._added["frames"].append((frame, *location))
        return frame

    def write(self, writer: CaptureWriter) -> None:
        """Writes what a window added to the three tables."""
        for table, rows in self._added.items():
            writer.put(table, rows)
            rows.clear()
        for index in (self._binaries, self._functions, self._frames):
            index.turn()
