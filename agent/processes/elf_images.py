# SPDX-License-Identifier: Apache-2.0
"""ELF headers of the binaries of a recording, each parsed once."""

from __future__ import annotations

import os

from aiflame.agent.processes.binaries import BinaryTable
from aiflame.agent.processes.table import Mapping
from aiflame.agent.symbols.elf import ElfImage, NotElf

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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

    def bias(self, mapping: Mapping) -> int:
        """Returns what to subtract from an address in a mapping to get the binary's own."""
        elf = self.of(mapping.binary)
        offset = mapping.file_offset
        for load in () if elf is None else elf.loads:
            # The loader maps whole pages, also what stands before the segment in its first one.
            first = load.file_offset & -_PAGE_BYTES
            is_inside = first <= offset < load.file_offset + load.file_size
            if load.executable and is_inside:
                return mapping.start - (offset - load.file_offset + load.virtual_address)
        return mapping.start - offset
