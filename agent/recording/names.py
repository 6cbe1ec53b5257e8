# SPDX-License-Identifier: Apache-2.0
"""The functions, frames and binaries of a capture, each stored once."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.model import FrameKind
from aiflame.agent.symbols.frames import SourceFrame

# SQLite's integers are signed: a lying file's addresses above are stored as unknown.
MAX_INTEGER = (1 << 63) - 1


@dataclass(slots=True)
class Names:
    """Functions and frames of the capture, each once, under ids that count from 0."""

    functions: dict[tuple[int, str, int | None, str], int] = field(default_factory=dict)
    frames: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    binaries: dict[tuple[str, str], int] = field(default_factory=dict)

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
        """Writes all three tables."""
        binaries = ((i, path, build_id) for (path, build_id), i in self.binaries.items())
        writer.put("binaries", binaries)
        writer.put("functions", ((i, *key) for key, i in self.functions.items()))
        writer.put("frames", ((i, *key) for key, i in self.frames.items()))
