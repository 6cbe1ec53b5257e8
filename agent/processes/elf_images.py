# SPDX-License-Identifier: Apache-2.0
"""ELF headers of the binaries of a recording, each asked for once."""

from __future__ import annotations

from collections.abc import Collection

from aiflame.agent.elf.headers import HEADERS, Headers
from aiflame.agent.processes.binaries import BinaryTable
from aiflame.agent.processes.table import Mapping


class ElfImages:
    """Headers by binary index.

    Args:
        binaries: The files that targets map.
    """

    def __init__(self, binaries: BinaryTable) -> None:
        self._binaries = binaries
        self._headers: dict[int, Headers | None] = {}

    def of(self, binary: int) -> Headers | None:
        """Returns the headers, None for a file that could not be opened or is not sound."""
        if binary not in self._headers:
            found = self._headers[binary] = self._binaries.ask(binary, HEADERS)
            if found is not None and found.damage:
                self._binaries.guard.blame(self._binaries.files[binary].path, found.damage)
        return self._headers[binary]

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets headers of files that nobody maps any more."""
        for binary in binaries:
            self._headers.pop(binary, None)

    def bias(self, mapping: Mapping) -> int:
        """Returns what to subtract from an address in a mapping to get the binary's own."""
        elf = self.of(mapping.binary)
        if elf is None:
            return mapping.start - mapping.file_offset
        return elf.bias(mapping.start, mapping.file_offset)
