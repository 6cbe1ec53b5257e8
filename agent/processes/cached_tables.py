# SPDX-License-Identifier: Apache-2.0
"""Unwind tables of binaries: from the cache on disk, which a child fills where one is missing.

A child, since a file may be made to crash or stall whoever reads it. Those of tiny files come from
the parsers that answer questions about files (`unwind.questions`), and are not in the cache.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from aiflame.agent.processes.binaries import BinaryTable
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.symbols.known import KnownTables, known_directory
from aiflame.agent.symbols.store import Store
from aiflame.agent.target_files import MAX_CPU_S
from aiflame.agent.unwind.build import load, require_supported
from aiflame.agent.unwind.questions import TINY_FILE_BYTES, TINY_TABLE
from aiflame.agent.unwind.table import UnwindTable
from aiflame.agent.unwind.table_builder import TableBuilders
from aiflame.agent.user_folders import temporary_folder

# Below NO_BINARY.
_FIRST_EXPECTED = -2
_DONE = -1


class CachedTables:
    """Tables by binary index.

    Args:
        binaries: The files that targets map.
        images: Their headers.
        cache: Directory of the cache, None for one that goes with this object.
        watch: Told of a descriptor that becomes readable when `finished` has something to say.
        urgency: Of a binary; the greatest is built next.
        memory_bytes: As for `TableBuilders`.
    """

    def __init__(
        self,
        binaries: BinaryTable,
        images: ElfImages,
        cache: Path | None,
        watch: Callable[[int], None] = lambda fd: None,
        urgency: Callable[[int], float] = lambda binary: 0.0,
        memory_bytes: int = 0,
    ) -> None:
        self._binaries = binaries
        self._images = images
        self._own_cache: tempfile.TemporaryDirectory[str] | None = None
        if cache is None or not Store(cache).usable:
            self._own_cache = tempfile.TemporaryDirectory(
                prefix="aiflame-unwind-", dir=temporary_folder()
            )
            cache = Path(self._own_cache.name)
        self._store = Store(cache)
        self._known = KnownTables(known_directory("unwind"))
        self._names: dict[int, str] = {}  # of tables of files that were read before
        self._unanswered: set[int] = set()  # tiny files whose tables a builder has to make
        # Descriptors of files that are not mapped yet, by numbers below those of binaries.
        self._expected: dict[int, int] = {}
        self._builder = TableBuilders(
            binaries.facts.server,
            cache,
            watch,
            lambda binary: urgency(binary) if binary >= 0 else 1 / self.size_bytes(binary),
            self.size_bytes,
            memory_bytes,
        )

    def load(self, binary: int) -> UnwindTable | None:
        """Returns a binary's table, None where there is none yet, or nobody maps it any more.

        Raises:
            BadUnwindInfo: None can be made.
        """
        file = self._binaries.files.get(binary)
        elf = None if file is None else self._images.of(binary)
        if file is None or file.fd is None or elf is None:
            return None
        require_supported(elf)
        if elf.size_bytes <= TINY_FILE_BYTES and binary not in self._unanswered:
            table = self._answered(file.path, file.fd, binary)
            if table is not None:
                return table
        name = self._builder.name(binary) or self._names.get(binary)
        if name is None:
            name = self._names[binary] = self._known_name(binary)
        return load(name, self._store) if name else None

    def _answered(self, path: str, fd: int, binary: int) -> UnwindTable | None:
        """Returns the table of a tiny file, None where a builder has to make it."""
        table, guard = None, self._binaries.guard
        # Reading a remote one may take for ever. Who has not much of the parsers' time left needs
        # it for what nobody else tells of a file.
        if fd not in guard.remote and guard.allowance_s(os.fstat(fd).st_uid) >= MAX_CPU_S:
            table = self._binaries.facts.ask(path, fd, TINY_TABLE)
        if table is None:
            self._unanswered.add(binary)
        return table

    def _known_name(self, binary: int) -> str:
        """Returns the name of a table without reading all that it is made of, "" for none."""
        file, guard = self._binaries.files[binary], self._binaries.guard
        if file.fd is None or file.fd in guard.remote:
            return ""
        return self._known.name(file.fd)

    def build(self, binary: int) -> bool:
        """Has a binary's table built; returns False for a file that cannot be read."""
        fd = self._binaries.files[binary].fd
        if fd is None or self._images.of(binary) is None:
            return False
        self._builder.ask(binary, f"/proc/{os.getpid()}/fd/{fd}")
        return True

    def expect(self, fd: int) -> None:
        """Has the table of a file built that nobody has mapped yet, if the cache has none.

        That of a tiny file is made at once when somebody maps it.

        Args:
            fd: Of the file; it stays the caller's.
        """
        if os.fstat(fd).st_size <= TINY_FILE_BYTES:
            return
        name = self._known.name(fd)
        if name and load(name, self._store) is not None:
            return
        number = _FIRST_EXPECTED - len(self._expected)
        self._expected[number] = os.dup(fd)
        self._builder.ask(number, f"/proc/{os.getpid()}/fd/{self._expected[number]}")

    @property
    def is_expecting(self) -> bool:
        """Whether tables are being built of files that nobody has mapped yet."""
        return any(fd >= 0 for fd in self._expected.values())

    def finished(self) -> list[int]:
        """Returns the binaries that are done with, whether there is a table now or not."""
        done = self._builder.finished()
        for number in self._expected.keys() & set(done):
            os.close(self._expected[number])
            self._expected[number] = _DONE
        return [binary for binary in done if binary >= 0]

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets files that nobody maps any more: their tables are not built for nobody."""
        for binary in binaries:
            self._names.pop(binary, None)
            self._unanswered.discard(binary)
        self._builder.forget(binaries)

    def take_spent_s(self) -> dict[int, float]:
        """Returns how long the binaries took that were done with since last."""
        return self._builder.take_spent_s()

    def is_given_up(self, binary: int) -> bool:
        """Whether a table could not be built for another reason than what the file says."""
        return binary in self._builder.given_up

    @property
    def is_at_work(self) -> bool:
        """Whether tables are being built: `finished` will have something to say."""
        return self._builder.is_at_work

    def wait(self, timeout_s: float) -> bool:
        """Waits until `finished` has something to say; returns whether it has."""
        return self._builder.wait(timeout_s)

    def size_bytes(self, binary: int) -> int:
        """Returns the size of a file, at least 1."""
        if binary < 0:
            fd = self._expected.get(binary, _DONE)
            return max(os.fstat(fd).st_size, 1) if fd != _DONE else 1
        elf = self._images.of(binary)
        return elf.size_bytes if elf is not None else 1

    def close(self) -> None:
        """Ends the child, and removes a cache of its own."""
        self._builder.close()
        for fd in self._expected.values():
            if fd != _DONE:
                os.close(fd)
        self._expected = {}
        if self._own_cache is not None:
            self._own_cache.cleanup()
