# SPDX-License-Identifier: Apache-2.0
"""Symbol tables in bulk: which function holds an address.

The functions of a file and of its debug file (`elf.functions`) are made disjoint (`intervals`), and
only names that are looked up are ever looked at. What is stored on disk is the finished index with
its names, mapped by later runs.

Sizes are respected: an address outside every symbol has no name. Only symbols of size 0 in a full
.symtab (hand-written assembly) reach to the next symbol of their section; in a .dynsym the
functions between are unknown, so there they name nothing. Where there is no .symtab, Go's own table
has the names of Go's functions, and it is known of functions without a symbol where they begin, if
unwind information says so.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf import records as elf
from aiflame.agent.elf.functions import Functions, concatenate, read_functions, resolve_sizes
from aiflame.agent.elf.go_table import BadGoTable, read_go_functions
from aiflame.agent.elf.image import BadElf, ElfImage
from aiflame.agent.elf.symbols import MAX_NAME_BYTES, read_strings
from aiflame.agent.elf.unwound import Bounds, function_bounds
from aiflame.agent.symbols.frames import Range
from aiflame.agent.symbols.intervals import Disjoint, TooManyOverlaps, find, flatten
from aiflame.agent.symbols.plt import find_stubs
from aiflame.agent.target_files import TargetFile

U64 = npt.NDArray[np.uint64]
Buffer = bytes | memoryview | mmap.mmap

# Functions inside others, which only assembly has: none in libtorch, node and glibc.
_MAX_OVERLAPPING = 100_000

_MAGIC = b"AFSYM\0\0\x05"  # the last byte is the version of layout and content
_HEADER = struct.Struct("<8sQQII")  # magic, ranges, bytes of names, crc of the rest, reserved
_PIECE_BYTES = 128 << 10  # of names that are searched at once: it fits the second-level cache
_BLOCK_BYTES = 4096  # names are checked by blocks, when one of theirs is first used
_NO_NAME = np.uint64((1 << 64) - 1)  # stands for the name of a function that has none


class CorruptCache(Exception):
    """A cache file is not what was written; the caller builds the table again."""


class SymbolSource(NamedTuple):
    """A file to take symbols from: the binary, its debug file, or its mini debug data."""

    image: ElfImage
    file: TargetFile


class _Names:
    """Zero-terminated names in a few blobs, addressed as if they were one."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Buffer]] = []
        self._total = 0

    def add(self, part: Buffer) -> int:
        """Append a blob; its base offset, a multiple of the block size."""
        base = self._total
        self._parts.append((base, part))
        self._total += -(-len(part) // _BLOCK_BYTES) * _BLOCK_BYTES
        return base

    def at(self, offset: int) -> bytes:
        for base, part in reversed(self._parts):
            if offset >= base:
                begin = offset - base
                return bytes(part[begin : begin + MAX_NAME_BYTES]).split(b"\0", 1)[0]
        return b""

    def lengths(self, offsets: U64) -> npt.NDArray[np.int64]:
        """How long names are, at most `MAX_NAME_BYTES`."""
        found = np.zeros(len(offsets), np.int64)
        order = np.argsort(offsets)
        ascending = offsets[order].astype(np.int64)
        for base, part in self._parts:
            letters = np.frombuffer(part, np.uint8)
            first, last = np.searchsorted(ascending, (base, base + len(part))).tolist()
            while first < last:
                begin = int(ascending[first])
                after = min(int(np.searchsorted(ascending, begin + _PIECE_BYTES)), last)
                piece = letters[begin - base : begin - base + _PIECE_BYTES + MAX_NAME_BYTES]
                zeros = np.append(np.flatnonzero(piece == 0), len(piece))
                starts = ascending[first:after] - begin
                found[order[first:after]] = zeros[np.searchsorted(zeros, starts)] - starts
                first = after
        return np.minimum(found, MAX_NAME_BYTES)

    def blocks(self) -> list[Buffer]:
        """All blobs, each padded to whole blocks."""
        padded: list[Buffer] = []
        for _, part in self._parts:
            padded += [part, bytes(-len(part) % _BLOCK_BYTES)]
        return padded


class _StoredNames(_Names):
    """The names of a cache file; each block is checked before its first use."""

    def __init__(self, blob: memoryview, checksums: npt.NDArray[np.uint32]) -> None:
        super().__init__()
        self.add(blob)
        self._blob = blob
        self._checksums = checksums
        self._sound: set[int] = set()

    def at(self, offset: int) -> bytes:
        name = super().at(offset)
        first, last = offset // _BLOCK_BYTES, (offset + len(name)) // _BLOCK_BYTES
        for block in range(first, min(last + 1, len(self._checksums))):
            if block not in self._sound:
                begin = block * _BLOCK_BYTES
                if zlib.crc32(self._blob[begin : begin + _BLOCK_BYTES]) != self._checksums[block]:
                    raise CorruptCache("a block of names does not match its checksum")
                self._sound.add(block)
        return name


class SymbolTable:
    """The functions of one binary, by its own virtual addresses."""

    def __init__(self, ranges: Disjoint, name_offsets: U64, names: _Names) -> None:
        self._ranges = ranges
        self._name_offsets = name_offsets
        self._names = names

    def __len__(self) -> int:
        return len(self._ranges.starts)

    @classmethod
    def build(cls, sources: Sequence[SymbolSource]) -> SymbolTable:
        """Merge the symbol tables of a binary and its debug files.

        Args:
            sources: The binary first. From each file the .symtab is taken, or else the .dynsym.

        Raises:
            BadElf: A table has more symbols, or longer names, than that of any real file.
            BadTargetFile: As `TargetFile.read`.
        """
        names = _Names()
        is_stripped = all(image.section_of_type(elf.SHT_SYMTAB) is None for image, _ in sources)
        parts = []
        stubs = []
        for image, file in sources:
            functions, strings = read_functions(file, image)
            if strings is not None and len(functions.starts):
                base = np.uint64(names.add(read_strings(file, strings)))
                parts.append(functions._replace(names=functions.names + base))
            found = find_stubs(file, image)
            stubs.append((found, names.add(found.names)) if len(found.starts) else (found, 0))
        # A debug file has no unwind information, and no code that Go's runtime would look up.
        of_program = sources[:1] if is_stripped else ()
        parts += [_functions_of_go(file, image, names) for image, file in of_program]
        merged = resolve_sizes(concatenate(parts))
        rows = _best_names(merged, names)
        starts = np.concatenate([merged.starts[rows], *(stub.starts for stub, _ in stubs)])
        ends = np.concatenate([merged.ends[rows], *(stub.ends for stub, _ in stubs)])
        offsets = [stub.name_offsets + np.uint64(base) for stub, base in stubs]
        name_offsets = np.concatenate([merged.names[rows], *offsets])
        ranks = np.empty(len(starts), dtype=np.int64)
        # Innermost wins: the later start, and of equal starts the earlier end.
        ranks[np.lexsort((~ends, starts))] = np.arange(len(starts))
        try:
            ranges = flatten(starts, ends, ranks, _MAX_OVERLAPPING)
        except TooManyOverlaps as error:
            raise BadElf(str(error)) from error
        name_offsets = name_offsets[ranges.rows]
        for image, file in of_program:
            bounds = function_bounds(file, image)
            ranges, name_offsets = _with_nameless(ranges, name_offsets, bounds)
        return cls(ranges, name_offsets, names)

    def raw_names(self, addresses: U64) -> list[bytes | None]:
        """Names as the linker knows them; None outside every symbol.

        Raises:
            CorruptCache: The table came from a cache file that is damaged.
        """
        found = find(self._ranges, addresses)
        found[self._is_nameless(found)] = -1
        offsets = self._name_offsets[found].tolist() if len(self) else [0] * len(found)
        return [
            self._names.at(offset) if row >= 0 else None
            for row, offset in zip(found.tolist(), offsets, strict=True)
        ]

    def ranges(self, addresses: U64) -> list[Range | None]:
        """The addresses around each that are in the same function; None outside of all.

        Others may lie within a function: then it is what is between them.
        """
        found = find(self._ranges, addresses)
        if not len(self):
            return [None] * len(found)
        starts, ends = self._ranges.starts[found], self._ranges.ends[found]
        return [
            Range(start, end) if row >= 0 else None
            for row, start, end in zip(found.tolist(), starts.tolist(), ends.tolist(), strict=True)
        ]

    def _is_nameless(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        if not len(self):
            return np.zeros(len(rows), bool)
        is_nameless: npt.NDArray[np.bool_] = self._name_offsets[rows] == _NO_NAME
        return is_nameless & (rows >= 0)

    def to_chunks(self) -> list[Buffer]:
        """The contents of a cache file, for `from_mapping`."""
        blocks = self._names.blocks()
        checksums = np.array(_block_checksums(blocks), dtype="<u4")
        arrays: list[Buffer] = [
            array.tobytes()
            for array in (self._ranges.starts, self._ranges.ends, self._name_offsets, checksums)
        ]
        crc = 0
        for array in arrays:
            crc = zlib.crc32(array, crc)
        names_bytes = sum(len(block) for block in blocks)
        return [_HEADER.pack(_MAGIC, len(self), names_bytes, crc, 0), *arrays, *blocks]

    @classmethod
    def from_mapping(cls, mapping: mmap.mmap) -> SymbolTable:
        """Use a cache file in place.

        Raises:
            CorruptCache: It is cut, damaged, or of another version.
        """
        data = memoryview(mapping)
        if len(data) < _HEADER.size:
            raise CorruptCache("cut inside the header")
        magic, count, names_bytes, crc, _ = _HEADER.unpack_from(data)
        blocks = names_bytes // _BLOCK_BYTES
        names_at = _HEADER.size + 24 * count + 4 * blocks
        if magic != _MAGIC or len(data) != names_at + names_bytes:
            raise CorruptCache("another version, or cut")
        if zlib.crc32(data[_HEADER.size : names_at]) != crc:
            raise CorruptCache("the index does not match its checksum")
        columns = np.frombuffer(data, "<u8", 3 * count, _HEADER.size).reshape(3, count)
        checksums = np.frombuffer(data, "<u4", blocks, _HEADER.size + 24 * count)
        ranges = Disjoint(columns[0], columns[1], np.zeros(0, dtype=np.int64))
        return cls(ranges, columns[2], _StoredNames(data[names_at:], checksums))


def _block_checksums(blocks: list[Buffer]) -> list[int]:
    """CRC of every block; each pair in the list is a blob and its padding."""
    checksums = []
    for blob, padding in zip(blocks[::2], blocks[1::2], strict=True):
        view = memoryview(blob)
        for begin in range(0, len(view), _BLOCK_BYTES):
            piece = view[begin : begin + _BLOCK_BYTES]
            crc = zlib.crc32(piece)
            checksums.append(zlib.crc32(padding, crc) if len(piece) < _BLOCK_BYTES else crc)
    return checksums


def _functions_of_go(file: TargetFile, image: ElfImage, names: _Names) -> Functions:
    try:
        go = read_go_functions(file, image)
    except BadGoTable:
        go = None  # these are without names, as in other stripped files
    if go is None:
        return concatenate([])
    texts = go.data[go.names_at]
    offsets = go.names - go.names_at.start
    has_name = (offsets >= 0) & (offsets < len(texts))
    base = np.uint64(names.add(texts))
    functions = Functions(
        starts=go.starts,
        ends=go.ends,
        limits=go.ends,
        sizeless=np.zeros(len(offsets), bool),
        bindings=np.zeros(len(offsets), np.int64),  # of a name that C gave it, that one is shown
        names=offsets.astype(np.uint64) + base,
    )
    return functions.chosen(has_name)


def _with_nameless(named: Disjoint, names: U64, bounds: Bounds) -> tuple[Disjoint, U64]:
    """Adds functions that share no byte with one that has a name."""
    starts, ends = bounds
    if len(named.starts):
        before = np.searchsorted(named.starts, ends, "left") - 1
        is_free = (before < 0) | (named.ends[np.maximum(before, 0)] <= starts)
        starts, ends = starts[is_free], ends[is_free]
    rows = np.concatenate([named.rows, np.full(len(starts), -1, np.int64)])
    starts = np.concatenate([named.starts, starts])
    order = np.argsort(starts)
    ends = np.concatenate([named.ends, ends])[order]
    names = np.concatenate([names, np.full(len(order) - len(names), _NO_NAME)])[order]
    return Disjoint(starts[order], ends, rows[order]), names


def _best_names(symbols: Functions, names: _Names) -> npt.NDArray[np.int64]:
    """One row for each distinct range: global before local, then the shortest, then the first."""
    order = np.lexsort((symbols.names, -symbols.bindings, ~symbols.ends, symbols.starts))
    starts, ends, bindings = (
        column[order] for column in (symbols.starts, symbols.ends, symbols.bindings)
    )
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = (starts[1:] != starts[:-1]) | (ends[1:] != ends[:-1])
    chosen: npt.NDArray[np.int64] = order[opens]
    ranges = np.cumsum(opens) - 1
    # Of ranges with several names of the best binding, these.
    tied = np.flatnonzero(bindings == bindings[opens][ranges])
    tied = tied[np.bincount(ranges[tied])[ranges[tied]] > 1]
    if len(tied):
        lengths = names.lengths(symbols.names[order[tied]])
        tied = tied[np.lexsort((tied, lengths, ranges[tied]))]
        is_first = np.ones(len(tied), dtype=bool)
        is_first[1:] = ranges[tied[1:]] != ranges[tied[:-1]]
        best = tied[is_first]
        chosen[ranges[best]] = order[best]
    return chosen
