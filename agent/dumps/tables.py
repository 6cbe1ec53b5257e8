# SPDX-License-Identifier: Apache-2.0
"""Unwind tables for a walk in Python, waited for where the cache has none.

A child builds them, since a file may be made to crash or stall whoever reads it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from aiflame.agent.processes.binaries import BinaryTable
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.symbols.known import KnownTables, known_directory
from aiflame.agent.symbols.store import Store
from aiflame.agent.unwind.build import load, require_supported
from aiflame.agent.unwind.records import BadUnwindInfo
from aiflame.agent.unwind.table import UnwindTable
from aiflame.agent.unwind.table_builder import TableBuilders

# How often it is asked whether it has given up.
_WAIT_S = 1.0


class WaitingTables:
    """A source of tables that waits for what is not there yet.

    Args:
        binaries: The files that targets map.
        images: Their headers.
        cache: Directory of the cache on disk, None for none.

    Attributes:
        without: Paths of binaries whose table could not be had.
    """

    def __init__(self, binaries: BinaryTable, images: ElfImages, cache: Path | None) -> None:
        self._binaries = binaries
        self._images = images
        self._own_cache: tempfile.TemporaryDirectory[str] | None = None
        if cache is None or not Store(cache).usable:
            self._own_cache = tempfile.TemporaryDirectory(prefix="aiflame-unwind-")
            cache = Path(self._own_cache.name)
        self._store = Store(cache)
        self._known = KnownTables(known_directory("unwind"))
        self._builder = TableBuilders(cache, lambda fd: None, lambda binary: 0.0, lambda binary: 0)
        self.without: set[str] = set()

    def table_of(self, binary: int) -> UnwindTable | None:
        """Returns a binary's table, None where it cannot be had."""
        file, elf = self._binaries.files[binary], self._images.of(binary)
        table = None
        if file.fd is not None and elf is not None:
            with contextlib.suppress(BadUnwindInfo):
                require_supported(elf)
                is_local = file.fd not in self._binaries.guard.remote
                name = self._known.name(file.fd) if is_local else ""
                table = load(name, self._store) if name else None
                if table is None:
                    name = self._build(binary, f"/proc/{os.getpid()}/fd/{file.fd}")
                    table = load(name, self._store) if name else None
        if table is None:
            self.without.add(file.path)
        return table

    def _build(self, binary: int, path: str) -> str:
        """Returns the name of a binary's table, "" where there can be none."""
        self._builder.ask(binary, path)
        while binary not in self._builder.finished():  # it gives up on a file in the end
            self._builder.wait(_WAIT_S)
        return self._builder.name(binary)

    def is_being_built(self, binary: int) -> bool:
        """Returns False: `table_of` waits."""
        return False

    def close(self) -> None:
        """Ends the builder, and takes away a cache of its own."""
        self._builder.close()
        if self._own_cache is not None:
            self._own_cache.cleanup()
