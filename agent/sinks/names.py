# SPDX-License-Identifier: Apache-2.0
"""The functions, frames and binaries of a capture, each stored once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.model.profile import FrameKind

if TYPE_CHECKING:
    from aiflame.agent.symbols.frames import SourceFrame

# SQLite's integers are signed: a lying file's addresses above are stored as unknown.
MAX_INTEGER = (1 << 63) - 1


@dataclass(slots=True)
class Names:
    """Functions and frames of the capture, each once, under ids that count from 0."""

    functions: dict[tuple[int, str, int | None, str], int] = field(default_factory=dict)
    frames: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    binaries: dict[tuple[str, str], int] = field(default_factory=dict)
    _written: dict[str, int] = field(default_factory=dict)

    def binary(self, path: str, build_id: str) -> int:
        """Returns the id of a binary."""
        return self.binaries.setdefault((path, build_id), len(self.binaries))

    def frame(self, kind: FrameKind, source: SourceFrame, binary: int | None, address: int) -> int:
        """Returns the id of a frame."""
        key = (int(kind), source.name, binary, source.file)
        function = self.functions.setdefault(key, len(self.functions))
        address = address if address <= MAX_INTEGER else 0
        place = (function, source.line, address, int(source.inlined))
        return self.frames.setdefault(place, len(self.frames))

    def write(self, writer: CaptureWriter) -> None:
        """Writes what was added to the three tables since the last call."""
        tables: dict[str, Mapping[tuple[Any, ...], int]] = {
            "binaries": self.binaries,
            "functions": self.functions,
            "frames": self.frames,
        }
        for table, known in tables.items():
            added = islice(known.items(), self._written.get(table, 0), None)
            writer.put(table, [(i, *key) for key, i in added])
            self._written[table] = len(known)
