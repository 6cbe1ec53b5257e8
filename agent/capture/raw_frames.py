# SPDX-License-Identifier: Apache-2.0
"""Frames by module and offset for stacks whose symbols were never resolved."""

from __future__ import annotations

import bisect
import sqlite3

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import FrameKind, Function


class RawFrames:
    """Makes `[module+0xoffset]` frames from raw addresses and the mappings of a capture."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._mappings: dict[int, list[tuple[int, int, int, int, str]]] | None = None
        self._known: dict[tuple[FrameKind, str], int] = {}

    def _of_process(self, process: int) -> list[tuple[int, int, int, int, str]]:
        if self._mappings is None:
            self._mappings = {}
            for owner, *mapping in self._database.execute(
                "SELECT process_id, start, end, bias, binary_id, path FROM mappings"
                " JOIN binaries ON binaries.id = binary_id ORDER BY process_id, start"
            ):
                self._mappings.setdefault(owner, []).append(tuple(mapping))
        return self._mappings.get(process, [])

    def frames(
        self,
        process: int,
        kernel_depth: int,
        addresses: bytes,
        functions: list[Function],
        frames: list[tuple[int, int, int, int]],
        binary_index: dict[int, int],
    ) -> npt.NDArray[np.uint32]:
        """Returns indexes of frames, root first, appending to `functions` and `frames`."""
        ids = []
        for position, address in enumerate(np.frombuffer(addresses, "<u8").tolist()):
            kind = FrameKind.KERNEL if position < kernel_depth else FrameKind.NATIVE
            name, binary, offset = self._name(process, kind, address)
            known = self._known.get((kind, name))
            if known is None:
                known = self._known[(kind, name)] = len(frames)
                index = None if binary is None else binary_index[binary]
                frames.append((len(functions), 0, offset, 0))
                functions.append(Function(kind, name, index, ""))
            ids.append(known)
        return np.array(ids[::-1], np.uint32)

    def _name(self, process: int, kind: FrameKind, address: int) -> tuple[str, int | None, int]:
        if kind is FrameKind.NATIVE:
            mappings = self._of_process(process)
            at = bisect.bisect_right(mappings, address, key=lambda m: m[0]) - 1
            if at >= 0 and address < mappings[at][1]:
                _, _, bias, binary, path = mappings[at]
                offset = address - bias
                return f"[{path.rpartition('/')[2]}+{offset:#x}]", binary, offset
        return f"[{kind.name.lower()} {address:#x}]", None, 0
