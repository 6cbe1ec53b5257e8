# SPDX-License-Identifier: Apache-2.0
"""Names of native frames: symbols, inlined functions and lines, as in a recording.

What was named once is kept, so that a dump after a rehearsal asks for little.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
from aiflame.agent.dumps.model import DumpFrame
from aiflame.agent.model.profile import FrameKind
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import NO_BINARY, ProcessImage, ProcessTable
from aiflame.agent.python.trampolines import trampoline_source
from aiflame.agent.symbols import roots
from aiflame.agent.symbols.frames import clean_name
from aiflame.agent.symbols.service import Request, SymbolService

Chain = tuple[DumpFrame, ...]


class NativeNames:
    """Names addresses of any process.

    Args:
        table: The processes.
        images: ELF headers of their files.
        service: Resolves symbols.
    """

    def __init__(self, table: ProcessTable, images: ElfImages, service: SymbolService) -> None:
        self._table = table
        self._images = images
        self._service = service
        self._chains: dict[tuple[int, int], Chain] = {}  # by binary and its own address
        self._generated: dict[tuple[int, int], Chain] = {}  # by process and address

    def location(self, image: ProcessImage, address: int) -> tuple[int, int]:
        """Returns the binary and the address in it; NO_BINARY and the address itself for none."""
        at = int(image.find(np.array([address], np.uint64))[0])
        if at < 0 or image.mappings[at].binary == NO_BINARY:
            return NO_BINARY, address
        mapping = image.mappings[at]
        return mapping.binary, (address - self._images.bias(mapping)) % (1 << 64)

    def learn(self, image: ProcessImage, locations: Iterable[tuple[int, int]]) -> None:
        """Asks for the names of locations, all at once."""
        wanted: dict[int, list[int]] = {}
        generated = []
        for binary, address in set(locations):
            if binary == NO_BINARY:
                if (image.index, address) not in self._generated:
                    generated.append(address)
            elif (binary, address) not in self._chains:
                wanted.setdefault(binary, []).append(address)
        self._learn_generated(image, generated)
        requests = [self._request(binary, addresses) for binary, addresses in wanted.items()]
        results = self._service.resolve_many(requests)
        for (binary, addresses), result in zip(wanted.items(), results, strict=True):
            path = self._table.binaries.files[binary].path
            for address, sources in zip(addresses, result.frames, strict=True):
                self._chains[binary, address] = tuple(
                    DumpFrame(FrameKind.NATIVE, s.name, s.file, s.line, clean_name(path))
                    for s in sources
                ) or (self._unnamed(binary, address),)

    def _request(self, binary: int, addresses: list[int]) -> Request:
        file = self._table.binaries.files[binary]
        path = "" if file.fd is None else f"/proc/{os.getpid()}/fd/{file.fd}"
        return Request(path, file.root, np.array(addresses, np.uint64))

    def _learn_generated(self, image: ProcessImage, addresses: list[int]) -> None:
        if not addresses:
            return
        looked_up = np.array(addresses, np.uint64)
        is_mapped = (image.find(looked_up) >= 0).tolist()
        owner = image.root, image.namespaced_pid, image.owner_uid
        names = self._service.resolve_generated(*owner, looked_up)
        for address, name, known in zip(addresses, names, is_mapped, strict=True):
            text = name or ("[generated code]" if known else "[unmapped memory]")
            frame = DumpFrame(FrameKind.NATIVE, clean_name(text), "", 0, "")
            source = trampoline_source(frame.name)
            if source is not None:
                frame = DumpFrame(FrameKind.PYTHON, source.name, source.file, 0, "")
            self._generated[image.index, address] = (frame,)

    def chain(self, image: ProcessImage, location: tuple[int, int]) -> Chain:
        """Returns the frames of a location that was learnt, innermost inlined function first."""
        if location[0] == NO_BINARY:
            return self._generated[image.index, location[1]]
        return self._chains[location]

    def _unnamed(self, binary: int, address: int) -> DumpFrame:
        path = clean_name(self._table.binaries.files[binary].path)
        name = self._name_by_code(binary, address)
        name = name or f"[{path.rpartition('/')[2]}+{address:#x}]"
        return DumpFrame(FrameKind.NATIVE, name, "", 0, path)

    def _name_by_code(self, binary: int, address: int) -> str:
        """Names what stripped libraries have at the root of every stack."""
        file, elf = self._table.binaries.files[binary], self._images.of(binary)
        if file.fd is None or elf is None:
            return ""
        with self._table.binaries.guard.each_file(file.path, file.fd) as opened:
            return roots.name_by_code(opened, elf, address)[0]
        return ""
