# SPDX-License-Identifier: Apache-2.0
"""Addresses of one binary to source frames: symbols, debug files, lines and cache put together.

DWARF gives the chain of inlined functions with their lines; where it says nothing about an
address, the ELF symbol that covers it gives the one name; where there is none, there is no frame,
and the caller shows `[module fn@0xstart]` where it is known where the function begins, else
`[module+0xoffset]`.

Each failure costs only what it concerns and becomes a `Problem`. What no `except` can catch
(crashes inside libraries, endless loops, memory) is the reason why recordings use `service`,
which runs this class in a process for all files that one user can change (`worker`).
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.demangle import Demangler
from aiflame.agent.elf.image import BadElf
from aiflame.agent.inspector.rootfs import open_regular, path_in_root
from aiflame.agent.losses import LossKind
from aiflame.agent.symbols.debugfiles import (
    Candidate,
    Checksums,
    OpenElf,
    find_debug_file,
    open_candidates,
)
from aiflame.agent.symbols.frames import (
    Problem,
    Range,
    RawFrame,
    Resolved,
    SourceFrame,
    clean_name,
)
from aiflame.agent.symbols.lines import (
    DEFAULT_MAX_DWARF_BYTES,
    BadDebugInfo,
    DebugInfoTooLarge,
    LineTable,
)
from aiflame.agent.symbols.store import Cache, Store, store_key
from aiflame.agent.symbols.table import CorruptCache, SymbolSource, SymbolTable
from aiflame.agent.target_files import BadTargetFile

U64 = npt.NDArray[np.uint64]

# Tables kept in memory. They are mapped from the cache where there is one; a PyTorch process has
# some 150 binaries.
_MAX_TABLES = 256
# With the version of its layout: two versions of aiflame may share a cache.
_TABLE_SUFFIX, _LINES_SUFFIX = ".symbols03", ".lines"


class _Tables(NamedTuple):
    key: str
    symbols: SymbolTable
    lines: LineTable | None
    problems: tuple[Problem, ...]
    # What they take of memory and of the address space; infinite where that is not known, or where
    # another try may do better.
    own_bytes: float
    mapped_bytes: float


class LoadedTables:
    """Tables that are at hand, the latest of them.

    Args:
        most: How many.
        own_bytes: Those that take more memory are not kept,
        mapped_bytes: nor are those of which more is mapped from the cache.
    """

    def __init__(
        self,
        most: int = _MAX_TABLES,
        own_bytes: float = math.inf,
        mapped_bytes: float = math.inf,
    ) -> None:
        self._most = most
        self._own_bytes = own_bytes
        self._mapped_bytes = mapped_bytes
        self._tables: OrderedDict[tuple[str, bool], _Tables] = OrderedDict()

    def find(self, name: str, plain: bool) -> _Tables | None:
        """Returns those of that name, None where there are none."""
        found = self._tables.get((name, plain))
        if found is not None:
            self._tables.move_to_end((name, plain))
        return found

    def keep(self, name: str, plain: bool, tables: _Tables) -> None:
        """Keeps them, instead of those that were asked for longest ago."""
        if tables.own_bytes > self._own_bytes or tables.mapped_bytes > self._mapped_bytes:
            return
        self._tables[name, plain] = tables
        if len(self._tables) > self._most:
            self._tables.popitem(last=False)

    def forget(self, key: str) -> None:
        """Forgets those of a file of the cache."""
        for name, tables in [*self._tables.items()]:
            if tables.key == key:
                del self._tables[name]


class Access(Protocol):
    """What a resolver takes from outside: it opens nothing itself.

    Attributes:
        identity: Of the binary and of what may be its debug files; no others have it. "" where that
            is not known before they are read.
    """

    identity: str

    @property
    def store(self) -> Cache:
        """Finished tables."""

    def open(self, path: str) -> int:
        """Opens a binary; OSError as `open_regular`."""

    def path_inside(self, path: str) -> str:
        """As `path_in_root`."""

    def candidates(
        self, build_id: str, link: str, inside: str, root_path: str
    ) -> Iterator[Candidate]:
        """As `open_candidates`."""

    def checksum(self, candidate: Candidate) -> int:
        """CRC-32 of a candidate."""


class DirectAccess:
    """Opens files in this process.

    Args:
        cache: Directory for finished tables, usually `store.cache_dir()`; None for none.
    """

    identity = ""

    def __init__(self, cache: Path | None) -> None:
        self.store = Store(cache)
        self._checksums = Checksums()

    def open(self, path: str) -> int:
        """Opens a binary."""
        return open_regular(path)

    def path_inside(self, path: str) -> str:
        """As `path_in_root`."""
        return path_in_root(path)

    def candidates(
        self, build_id: str, link: str, inside: str, root_path: str
    ) -> Iterator[Candidate]:
        """As `open_candidates`."""
        return open_candidates(build_id, link, inside, root_path)

    def checksum(self, candidate: Candidate) -> int:
        """CRC-32 of a candidate."""
        return self._checksums.of(candidate.fd)


class Resolver:
    """Resolves addresses in this process, but for the demangling of names.

    Args:
        access: Opens files.
        max_dwarf_bytes: Debug information larger than this is not read.
        tables: Where they are kept; None for here.

    Attributes:
        problems: What went wrong so far, in order.
    """

    def __init__(
        self,
        access: Access,
        *,
        max_dwarf_bytes: int = DEFAULT_MAX_DWARF_BYTES,
        tables: LoadedTables | None = None,
    ) -> None:
        self._access = access
        self._store = access.store
        self._max_dwarf_bytes = max_dwarf_bytes
        self._tables = LoadedTables() if tables is None else tables
        self.problems: list[Problem] = []

    def resolve(
        self, path: str, root_path: str, addresses: U64, *, plain: bool = False
    ) -> Resolved:
        """Frames for virtual addresses of one binary.

        A return address must be lowered by one by the caller, so that it lies in the call.

        Args:
            path: An openable path, for instance /proc/PID/fd/N.
            root_path: The target's root directory, for debug files; "" uses the host's only.
            addresses: Shape (n,).
            plain: Leave out what runs other people's parsers: DWARF.

        Returns:
            Of a binary that cannot be read, nothing for every address.
        """
        tables = self._load(path, root_path, plain)
        if tables is None:
            return Resolved.nothing(len(addresses))
        try:
            names = tables.symbols.raw_names(addresses)
        except CorruptCache:
            self._forget(tables.key)
            tables = self._load(path, root_path, plain)
            if tables is None:
                return Resolved.nothing(len(addresses))
            names = tables.symbols.raw_names(addresses)
        chains = [
            _chain(tables.lines, address, name)
            for address, name in zip(addresses.tolist(), names, strict=True)
        ]
        ranges = tables.symbols.ranges(addresses)
        if tables.lines is not None:
            ranges = [
                _range_beside_lines(address, chain, function)
                for address, chain, function in zip(addresses.tolist(), chains, ranges, strict=True)
            ]
        return Resolved(chains, ranges)

    def prepare(self, path: str, root_path: str, *, plain: bool = False) -> None:
        """Build or load the tables of a binary ahead of `resolve`."""
        self._load(path, root_path, plain)

    def _problem(self, reason: LossKind, detail: object) -> None:
        self.problems.append(Problem(reason, clean_name(str(detail))))

    def _load(self, path: str, root_path: str, plain: bool) -> _Tables | None:
        identity = self._access.identity
        known = self._tables.find(identity, plain) if identity else None
        if known is None:
            return self._read(path, root_path, plain)
        self.problems += known.problems
        return known

    def _read(self, path: str, root_path: str, plain: bool) -> _Tables | None:
        try:
            binary = OpenElf(self._access.open(path))
        except OSError as error:
            self._problem(LossKind.UNREADABLE_BINARY, f"{path}: {error.strerror}")
            return None
        except BadElf as error:
            self._problem(LossKind.BAD_ELF, f"{self._access.path_inside(path) or path}: {error}")
            return None
        inside = self._access.path_inside(path)
        link = "" if binary.image.debuglink is None else binary.image.debuglink.name
        candidates = self._access.candidates(binary.image.build_id, link, inside, root_path)
        debug = find_debug_file(binary, candidates, self._access.checksum, self.problems)
        files = [binary] if debug is None else [binary, debug]
        try:
            return self._tables_of(files, inside or path, plain)
        finally:
            for file in files:
                file.close()

    def _tables_of(self, files: list[OpenElf], label: str, plain: bool) -> _Tables:
        key = store_key(*(file.image.cache_key for file in files))
        name = self._access.identity or key
        tables = self._tables.find(name, plain)
        if tables is None:
            before = len(self.problems)
            if files[0].image.damage:
                self._problem(LossKind.BAD_SYMBOL_TABLE, f"{label}: {files[0].image.damage}")
            symbols, own_bytes, mapped_bytes = self._symbols(key, files, label)
            lines, more_bytes = (None, 0.0) if plain else self._lines(key, files, label)
            problems = tuple(self.problems[before:])
            tables = _Tables(key, symbols, lines, problems, own_bytes + more_bytes, mapped_bytes)
            self._tables.keep(name, plain, tables)
        return tables

    def _forget(self, key: str) -> None:
        self._store.remove(key + _TABLE_SUFFIX)
        self._tables.forget(key)

    def _symbols(
        self, key: str, files: list[OpenElf], label: str
    ) -> tuple[SymbolTable, float, float]:
        """Returns a table, what memory it has of its own, and what of it is mapped."""
        stored = self._stored_symbols(key)
        if stored is not None:
            return stored[0], 0, stored[1]
        try:
            table = SymbolTable.build([SymbolSource(file.image, file.file) for file in files])
        except BadElf as error:
            self._problem(LossKind.TOO_MANY_SYMBOLS, f"{label}: {error}")
            return SymbolTable.build([]), 0, 0
        except (BadTargetFile, ValueError, MemoryError) as error:
            self._problem(LossKind.BAD_SYMBOL_TABLE, f"{label}: {type(error).__name__}: {error}")
            return SymbolTable.build([]), math.inf if isinstance(error, MemoryError) else 0, 0
        if self._store.write(key + _TABLE_SUFFIX, table.to_chunks()):
            # The mapped copy costs no memory of our own, and lets go of the target's file.
            stored = self._stored_symbols(key)
        return (table, math.inf, 0) if stored is None else (stored[0], 0, stored[1])

    def _stored_symbols(self, key: str) -> tuple[SymbolTable, int] | None:
        mapping = self._store.open(key + _TABLE_SUFFIX)
        if mapping is None:
            return None
        try:
            return SymbolTable.from_mapping(mapping), len(mapping)
        except CorruptCache:
            self._store.remove(key + _TABLE_SUFFIX)
            return None

    def _lines(
        self, key: str, files: Iterable[OpenElf], label: str
    ) -> tuple[LineTable | None, float]:
        """Returns a table, None where there are no lines, and what memory it has of its own."""
        source = next((file for file in files if file.has_lines), None)
        if source is None:
            return None, 0
        mapping = self._store.open(key + _LINES_SUFFIX)
        if mapping is not None:
            try:
                return LineTable.from_mapping(mapping), len(mapping)
            except BadDebugInfo:
                self._store.remove(key + _LINES_SUFFIX)
        try:
            table = LineTable.build(source, self._max_dwarf_bytes)
        except DebugInfoTooLarge as error:
            self._problem(LossKind.DEBUG_INFO_TOO_LARGE, f"{label}: {error}")
            return None, 0
        except BadDebugInfo as error:
            self._problem(LossKind.BAD_DEBUG_INFO, f"{label}: {error}")
            return None, 0
        chunks = table.to_chunks()
        if chunks:
            self._store.write(key + _LINES_SUFFIX, chunks)
        return table, sum(map(len, chunks)) or math.inf


def readable(
    chains: Sequence[tuple[RawFrame, ...]], demangler: Demangler | None
) -> list[tuple[SourceFrame, ...]]:
    """Frames as they are shown: names demangled, if that is wanted, and cleaned."""
    raw = list(dict.fromkeys(frame.name for chain in chains for frame in chain))
    names = [os.fsencode(name) for name in raw]
    if demangler is not None:
        names = demangler.names(names)
    shown = {
        name: clean_name(found.decode("utf-8", "replace"))
        for name, found in zip(raw, names, strict=True)
    }
    return [
        tuple(
            SourceFrame(
                name=shown[frame.name] or "[inlined]",
                file=clean_name(frame.file),
                line=frame.line,
                inlined=index + 1 < len(chain),
            )
            for index, frame in enumerate(chain)
        )
        for chain in chains
    ]


def _range_beside_lines(
    address: int, chain: tuple[RawFrame, ...], function: Range | None
) -> Range | None:
    """The range of an address where others of its function may have another line."""
    if chain:
        return Range(address, address + 1)
    return None if function is None else Range(function.begin, address + 1)


def _chain(lines: LineTable | None, address: int, symbol: bytes | None) -> tuple[RawFrame, ...]:
    name = None if symbol is None else os.fsdecode(symbol)
    found = lines.lookup(address) if lines is not None else ()
    if not found:
        return () if name is None else (RawFrame(name, "", 0),)
    outermost = found[-1]
    if name is not None:
        # The symbol covers this very address. DWARF has one name for a function with a part
        # elsewhere, which may be that of the part (gcc 13 and 14: `worker.cold` for `worker`).
        outermost = outermost._replace(name=name)
    if not outermost.name and len(found) == 1:
        return ()
    return (*found[:-1], outermost)
