# SPDX-License-Identifier: Apache-2.0
"""ELF headers of the binaries of a recording, each parsed once."""

from __future__ import annotations

from collections.abc import Collection

from aiflame.agent.elf.image import ElfImage, NotElf
from aiflame.agent.processes.binaries import BinaryTable
from aiflame.agent.processes.table import Mapping


class ElfImages:
    """Headers by binary index.

    Args:
        binaries: The files that targets map.
    """

    def __init__(self, binaries: BinaryTable) -> None:
        self._binaries = binaries
        self._images: dict[int, ElfImage | None] = {}

    def of(self, binary: int) -> ElfImage | None:
        """Returns the headers, None for a file that could not be opened or is not sound."""
        if binary not in self._images:
            self._images[binary] = self._read(binary)
        return self._images[binary]

    def _read(self, binary: int) -> ElfImage | None:
        known, guard = self._binaries.files[binary], self._binaries.guard
        if known.fd is None:
            return None
        with guard.each_file(known.path, known.fd) as file:
            try:
                image = ElfImage.read(file)
            except NotElf:  # code that a runtime made and keeps in a file: nothing is wrong with it
                return None
            if image.damage:
                guard.blame(known.path, image.damage)
            return image
        return None

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets headers of files that nobody maps any more."""
        for binary in binaries:
            self._images.pop(binary, None)

    def bias(self, mapping: Mapping) -> int:
        """Returns what to subtract from an address in a mapping to get the binary's own."""
        elf = self.of(mapping.binary)
        if elf is None:
            return mapping.start - mapping.file_offset
        return elf.bias(mapping.start, mapping.file_offset)
