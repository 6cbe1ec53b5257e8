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
from aiflame.agent.symbols.store import Store
from aiflame.agent.unwind.build import cache_name, load_cached
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
        self._builder = TableBuilders(cache, lambda fd: None, lambda binary: 0.0, lambda binary: 0)
        self.without: set[str] = set()

    def table_of(self, binary: int) -> UnwindTable | None:
        """Returns a binary's table, None where it cannot be had."""
        file, elf = self._binaries.files[binary], self._images.of(binary)
        table = None
        if file.fd is not None and elf is not None:
            with (
                self._binaries.guard.each_file(file.path, file.fd) as opened,
                contextlib.suppress(BadUnwindInfo),
            ):
                table = load_cached(opened, elf, self._store)
                if table is None:
                    path = f"/proc/{os.getpid()}/fd/{file.fd}"
                    self._build(binary, path, cache_name(opened, elf))
                    table = load_cached(opened, elf, self._store)
        if table is None:
            self.without.add(file.path)
        return table

    def _build(self, binary: int, path: str, name: str) -> None:
        self._builder.ask(binary, path, name)
        while binary not in self._builder.finished():  # it gives up on a file in the end
            self._builder.wait(_WAIT_S)

    def is_being_built(self, binary: int) -> bool:
        """Returns False: `table_of` waits."""
        return False

    def close(self) -> None:
        """Ends the builder, and takes away a cache of its own."""
        self._builder.close()
        if self._own_cache is not None:
            self._own_cache.cleanup()
