# SPDX-License-Identifier: Apache-2.0
"""Symbol tables in bulk: which function holds an address.

A table of 530,000 symbols is never a Python list: the records are a numpy view of the mapped
file, filtered, sorted and made disjoint (`intervals`), and only names that are looked up are ever
read. What is stored on disk is the finished index with its names, mapped again by later runs.

Sizes are respected: an address outside every symbol has no name. Only symbols of size 0 in a full
.symtab (hand-written assembly) reach to the next symbol of their section; in a .dynsym the
functions between are unknown, so there they name nothing.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.symbols.elf import BadElf, ElfImage, Section
from aiflame.agent.symbols.intervals import Disjoint, find, flatten
from aiflame.agent.symbols.plt import find_stubs

# The largest tables of real programs (browsers, statically linked servers) have 2-3 million.
MAX_SYMBOLS = 8_000_000
# Bytes read for one name; longer ones are cut (the demangler takes no more either).
MAX_NAME_BYTES = 10_001

U64 = npt.NDArray[np.uint64]
Buffer = bytes | memoryview | mmap.mmap

# elf.h: Elf32_Sym, Elf64_Sym
_SYMBOL_TYPES = {
    32: np.dtype(
        [
            ("name", "<u4"),
            ("value", "<u4"),
            ("size", "<u4"),
            ("info", "u1"),
            ("other", "u1"),
            ("section", "<u2"),
        ]
    ),
    64: np.dtype(
        [
            ("name", "<u4"),
            ("info", "u1"),
            ("other", "u1"),
            ("section", "<u2"),
            ("value", "<u8"),
            ("size", "<u8"),
        ]
    ),
}
_STT_NOTYPE, _STT_FUNC, _STT_GNU_IFUNC = 0, 2, 10
_SHN_LORESERVE = 0xFF00
# Which of two names for the same code wins: global, then weak, then local.
_BINDING_SCORE = np.zeros(16, dtype=np.int64)
_BINDING_SCORE[[1, 10]] = 2  # STB_GLOBAL, STB_GNU_UNIQUE
_BINDING_SCORE[2] = 1  # STB_WEAK

_MAGIC = b"AFSYM\0\0\x02"  # the last byte is the version of layout and content
_HEADER = struct.Struct("<8sQQII")  # magic, ranges, bytes of names, crc of the rest, reserved
_BLOCK_BYTES = 4096  # names are checked by blocks, when one of theirs is first used


class CorruptCache(Exception):
    """A cache file is not what was written; the caller builds the table again."""


class SymbolSource(NamedTuple):
    """A file to take symbols from: the binary, its debug file, or its mini debug data."""

    image: ElfImage
    data: memoryview


class _Candidates(NamedTuple):
    """Symbols from all sources, one row each."""

    starts: U64
    ends: U64
    limits: U64  # end of the symbol's section
    sizeless: npt.NDArray[np.bool_]
    bindings: npt.NDArray[np.int64]
    names: U64


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
            BadElf: A table has more than `MAX_SYMBOLS` entries.
        """
        names = _Names()
        parts = []
        stubs = []
        for image, data in sources:
            parts += _candidates(image, data, names)
            found = find_stubs(image, data)
            stubs.append((found, names.add(found.names)) if len(found.starts) else (found, 0))
        merged = _resolve_sizes(_concatenate(parts))
        rows = _best_names(merged, names)
        starts = np.concatenate([merged.starts[rows], *(stub.starts for stub, _ in stubs)])
        ends = np.concatenate([merged.ends[rows], *(stub.ends for stub, _ in stubs)])
        offsets = [stub.name_offsets + np.uint64(base) for stub, base in stubs]
        name_offsets = np.concatenate([merged.names[rows], *offsets])
        ranks = np.empty(len(starts), dtype=np.int64)
        # Innermost wins: the later start, and of equal starts the earlier end.
        ranks[np.lexsort((~ends, starts))] = np.arange(len(starts))
        ranges = flatten(starts, ends, ranks)
        return cls(ranges, name_offsets[ranges.rows], names)

    def raw_names(self, addresses: U64) -> list[bytes | None]:
        """Names as the linker knows them; None outside every symbol.

        Raises:
            CorruptCache: The table came from a cache file that is damaged.
        """
        found = find(self._ranges, addresses)
        offsets = self._name_offsets[found].tolist() if len(self) else [0] * len(found)
        return [
            self._names.at(offset) if row >= 0 else None
            for row, offset in zip(found.tolist(), offsets, strict=True)
        ]

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


def function_ranges(image: ElfImage, data: memoryview) -> tuple[U64, U64]:
    """Returns where the functions of one file begin and end, sorted and distinct, shape (n,) each.

    Args:
        image: Its headers.
        data: All of it.

    Raises:
        BadElf: It has more than `MAX_SYMBOLS` symbols.
    """
    symbols = _resolve_sizes(_concatenate(_candidates(image, data, _Names())))
    order = np.lexsort((symbols.ends, symbols.starts))
    starts, ends = symbols.starts[order], symbols.ends[order]
    is_last = np.ones(len(starts), bool)
    is_last[:-1] = starts[1:] != starts[:-1]
    return starts[is_last], ends[is_last]


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


def _candidates(image: ElfImage, data: memoryview, names: _Names) -> list[_Candidates]:
    """The function symbols of one file."""
    full = image.section(".symtab")
    section = full if full is not None and full.size else image.section(".dynsym")
    if section is None or section.size == 0 or section.link >= len(image.sections):
        return []
    strings = image.sections[section.link]
    if strings.type != "SHT_STRTAB" or strings.size == 0:
        return []
    layout = _SYMBOL_TYPES[image.bits]
    count = section.size // layout.itemsize
    if count > MAX_SYMBOLS:
        raise BadElf(f"{count} symbols, over the limit of {MAX_SYMBOLS}")
    records = np.frombuffer(data, layout, count, section.file_offset)
    text = data[strings.file_offset : strings.file_offset + strings.size]
    chosen, limits = _functions(records, image.sections, text)
    rows = records[chosen]
    starts = rows["value"].astype(np.uint64)
    # The symbol starts before the limit, so this cannot wrap, whatever size it claims.
    sizes = np.minimum(rows["size"].astype(np.uint64), limits - starts)
    sizeless = sizes == 0
    named = np.full(len(rows), True) if section is full else ~sizeless
    base = np.uint64(names.add(text))
    return [
        _Candidates(
            starts=starts[named],
            ends=(starts + sizes)[named],
            limits=limits[named],
            sizeless=sizeless[named],
            bindings=_BINDING_SCORE[rows["info"] >> 4][named],
            names=(rows["name"].astype(np.uint64) + base)[named],
        )
    ]


def _functions(
    records: npt.NDArray[np.void], sections: tuple[Section, ...], text: memoryview
) -> tuple[npt.NDArray[np.int64], U64]:
    """Which records are named code inside their own section, and where that section ends."""
    executable = np.array([s.executable for s in sections], dtype=bool)
    lows = np.array([s.virtual_address for s in sections], dtype=np.uint64)
    highs = np.array([s.end_address for s in sections], dtype=np.uint64)
    kind = records["info"] & 15
    likely = np.isin(kind, (_STT_FUNC, _STT_GNU_IFUNC, _STT_NOTYPE))
    likely &= (records["name"] != 0) & (records["name"] < len(text))
    likely &= (records["section"] != 0) & (records["section"] < min(len(sections), _SHN_LORESERVE))
    rows = np.flatnonzero(likely)
    home = records["section"][rows]
    value = records["value"][rows].astype(np.uint64)
    fits = executable[home] & (value >= lows[home]) & (value < highs[home])
    # "$x", "$d": marks that the Arm and RISC-V ABIs put between code and data.
    letters = np.frombuffer(text, np.uint8)
    mark = (letters[records["name"][rows]] == ord("$")) & (kind[rows] == _STT_NOTYPE)
    fits &= ~mark
    return rows[fits], highs[home[fits]]


def _concatenate(parts: list[_Candidates]) -> _Candidates:
    if not parts:
        none = np.zeros(0, dtype=np.uint64)
        return _Candidates(none, none, none, none.astype(bool), none.astype(np.int64), none)
    return _Candidates(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _resolve_sizes(symbols: _Candidates) -> _Candidates:
    """Let size-0 symbols reach to the next one, unless a sized symbol already covers them."""
    if not symbols.sizeless.any():
        return symbols
    every = np.unique(symbols.starts)
    following = np.searchsorted(every, symbols.starts, side="right")
    last = following == len(every)
    reach = np.where(last, symbols.limits, every[np.minimum(following, len(every) - 1)])
    ends = np.where(symbols.sizeless, np.minimum(reach, symbols.limits), symbols.ends)

    sized = np.flatnonzero(~symbols.sizeless)
    order = sized[np.argsort(symbols.starts[sized], kind="stable")]
    kept = np.full(len(ends), True)
    if len(order):
        covered_to = np.maximum.accumulate(symbols.ends[order])
        before = np.searchsorted(symbols.starts[order], symbols.starts, side="right") - 1
        covered = (before >= 0) & (covered_to[np.maximum(before, 0)] > symbols.starts)
        kept = ~(symbols.sizeless & covered)
    return _Candidates(*(column[kept] for column in symbols._replace(ends=ends)))


def _best_names(symbols: _Candidates, names: _Names) -> npt.NDArray[np.int64]:
    """One row for each distinct range: global before local, then the shortest, then the first."""
    order = np.lexsort((symbols.names, -symbols.bindings, ~symbols.ends, symbols.starts))
    starts, ends = symbols.starts[order], symbols.ends[order]
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = (starts[1:] != starts[:-1]) | (ends[1:] != ends[:-1])
    first = np.flatnonzero(opens)
    counts = np.diff(np.append(first, len(order)))
    chosen: npt.NDArray[np.int64] = order[first]
    for group in np.flatnonzero(counts > 1).tolist():
        rows = order[first[group] : first[group] + counts[group]]
        top = rows[symbols.bindings[rows] == symbols.bindings[rows[0]]]
        if len(top) > 1:
            chosen[group] = min(
                top.tolist(), key=lambda row: len(names.at(int(symbols.names[row])))
            )
    return chosen
