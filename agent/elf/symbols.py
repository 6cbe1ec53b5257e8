# SPDX-License-Identifier: Apache-2.0
"""The symbol tables of an ELF file, read in pieces: records as arrays, names only where asked for.

Names are searched for backwards: a linker lets a name be the end of a longer one
(`cudaLaunchKernel` of `__cudaLaunchKernel`), so a name is where its zero byte is, whatever precedes
it. The string tables are searched first, and only a file with a hit has its symbols read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf import records as elf
from aiflame.agent.elf.image import BadElf, ElfImage, Section
from aiflame.agent.target_files import TargetFile

# The largest tables of real programs (browsers, statically linked servers) have 2-3 million.
MAX_SYMBOLS = 8_000_000
# The 500,000 names of libtorch_cpu have 76 MB.
MAX_STRINGS_BYTES = 256 << 20
# Longer names are cut; the demangler takes no more either.
MAX_NAME_BYTES = 10_000
# Of all names that are read at once: libtorch's 43,000 stubs have 5 MB.
_MAX_NAMES_BYTES = 64 << 20
# How often one table may have names asked for; real ones have each once or twice.
_MAX_HITS = 4096
# What is read at a time. It fits the second-level cache, and larger buffers are mapped anew by
# malloc each time: pieces of 1 MiB take twice as long.
_CHUNK_BYTES = 128 << 10
# Of a name's end that is compared for all names at once: one machine word.
_TAIL_BYTES = 8

U64 = npt.NDArray[np.uint64]
Records = npt.NDArray[np.void]  # as `records` describes them


class SymbolSections(NamedTuple):
    """A symbol table and the names that belong to it."""

    symbols: Section
    strings: Section

    @property
    def is_dynamic(self) -> bool:
        """Has what the dynamic linker needs only."""
        return self.symbols.type == elf.SHT_DYNSYM


class Symbol(NamedTuple):
    """One symbol that a section of its file defines.

    Attributes:
        name: As the table has it, mangled, without a version.
        address: Virtual address.
        size: In bytes, 0 where the table does not say.
        kind: STT_*.
        binding: STB_*.
        is_dynamic: It was found in .dynsym.
    """

    name: bytes
    address: int
    size: int
    kind: int
    binding: int
    is_dynamic: bool


def symbol_sections(image: ElfImage) -> list[SymbolSections]:
    """The symbol tables of a file: .symtab, then .dynsym, where it has them.

    The gABI allows one of each; of more, as made to take long, the first counts.
    """
    found = []
    for kind in (elf.SHT_SYMTAB, elf.SHT_DYNSYM):
        symbols = image.section_of_type(kind)
        if symbols is None or not symbols.size or symbols.link >= len(image.sections):
            continue
        strings = image.sections[symbols.link]
        if strings.type == elf.SHT_STRTAB and strings.size:
            found.append(SymbolSections(symbols, strings))
    return found


def read_symbols(file: TargetFile, image: ElfImage, symbols: Section) -> Iterator[Records]:
    """Yields the records of a symbol table, in pieces, as 64-bit ones.

    Raises:
        BadElf: There are more than `MAX_SYMBOLS`.
        BadTargetFile: As `TargetFile.read`.
    """
    layout = elf.SYMBOL[image.bits]
    count = symbols.size // layout.itemsize
    if count > MAX_SYMBOLS:
        raise BadElf(f"{count} symbols, over the limit of {MAX_SYMBOLS}")
    for records in read_records(file, symbols, layout):
        if image.bits == 64:
            yield records
        else:
            wide = np.zeros(len(records), elf.SYMBOL[64])
            for field in elf.SYMBOL[64].names or ():
                wide[field] = records[field]
            yield wide


def read_records(
    file: TargetFile, section: Section, layout: np.dtype[np.void]
) -> Iterator[Records]:
    """Yields the records of a section, in pieces.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    step = _CHUNK_BYTES // layout.itemsize * layout.itemsize
    for start in range(0, section.size, step):
        data = file.read(min(step, section.size - start), section.file_offset + start)
        yield np.frombuffer(data, layout, len(data) // layout.itemsize)


def read_strings(file: TargetFile, strings: Section) -> bytes:
    """All names of a symbol table.

    Raises:
        BadElf: They are longer than any real ones.
        BadTargetFile: As `TargetFile.read`.
    """
    if strings.size > MAX_STRINGS_BYTES:
        raise BadElf(f"{strings.size} bytes of names, over the limit of {MAX_STRINGS_BYTES}")
    return file.read(strings.size, strings.file_offset)


def read_names(file: TargetFile, strings: Section, offsets: U64) -> list[bytes]:
    """The names at offsets of a string table, each cut at `MAX_NAME_BYTES`; b"" outside of it.

    Raises:
        BadElf: They are longer than any real ones.
        BadTargetFile: As `TargetFile.read`.
    """
    distinct, rows = np.unique(offsets, return_inverse=True)
    names: list[bytes] = []
    left = _MAX_NAMES_BYTES
    for wanted, start, data in _windows(file, strings, distinct, MAX_NAME_BYTES + 1):
        for begin in (wanted.astype(np.int64) - start).tolist():
            name = _name_at(data, begin)
            left -= len(name)
            if left < 0:
                raise BadElf("names that are longer than any real ones")
            names.append(name)
    names += [b""] * (len(distinct) - len(names))
    return [names[row] for row in rows.tolist()]


def first_letters(file: TargetFile, strings: Section, offsets: U64) -> npt.NDArray[np.uint8]:
    """The first byte of the name at each offset of a string table, 0 outside of it.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    distinct, rows = np.unique(offsets, return_inverse=True)
    letters = np.zeros(len(distinct), np.uint8)
    done = 0
    for wanted, start, data in _windows(file, strings, distinct, 1):
        inside = wanted.astype(np.int64) - start
        inside = inside[inside < len(data)]
        letters[done : done + len(inside)] = np.frombuffer(data, np.uint8)[inside]
        done += len(wanted)
    found: npt.NDArray[np.uint8] = letters[rows]
    return found


def _windows(
    file: TargetFile, strings: Section, offsets: U64, tail: int
) -> Iterator[tuple[U64, int, bytes]]:
    """Yields pieces of a string table that hold ascending offsets and `tail` bytes from each on.

    Returns:
        The offsets that are in a piece, where it begins, and its bytes; offsets outside the table
        are left out, they are the last.
    """
    offsets = offsets[offsets < strings.size]
    position = 0
    while position < len(offsets):
        start = int(offsets[position])
        end = int(np.searchsorted(offsets, np.uint64(start + _CHUNK_BYTES)))
        length = min(int(offsets[end - 1]) + tail, strings.size) - start
        yield offsets[position:end], start, file.read(length, strings.file_offset + start)
        position = end


def find_symbols(file: TargetFile, image: ElfImage, names: Iterable[bytes]) -> list[Symbol]:
    """Returns all symbols of some names, those of .symtab before those of .dynsym.

    Raises:
        BadElf: The names, or symbols of them, repeat as in no real file.
        BadTargetFile: As `TargetFile.read`.
    """
    wanted = frozenset(names)
    return _find(file, image, _ExactNames(wanted)) if wanted else []


def find_symbols_beginning(file: TargetFile, image: ElfImage, prefix: bytes) -> list[Symbol]:
    """Returns all symbols whose names begin with a prefix, likewise.

    Raises:
        BadElf: As `find_symbols`.
        BadTargetFile: As `TargetFile.read`.
    """
    return _find(file, image, _Prefix(prefix))


def first_symbols(file: TargetFile, image: ElfImage, names: Iterable[bytes]) -> dict[bytes, Symbol]:
    """Returns the first symbol of each name that a file defines.

    Raises:
        BadElf: As `find_symbols`.
        BadTargetFile: As `TargetFile.read`.
    """
    found = find_symbols(file, image, names)
    return {symbol.name: symbol for symbol in reversed(found)}


class _Pattern(Protocol):
    """What names are searched for; none is longer than `longest`."""

    longest: int

    def find_in(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields where in a piece of a string table which names begin."""


class _ExactNames:
    """Names that are known whole."""

    def __init__(self, names: frozenset[bytes]) -> None:
        self.longest = max(map(len, names))
        self._names = names
        self._lengths = sorted({len(name) for name in names})
        width = min(_TAIL_BYTES, self._lengths[0])
        self._mask = np.uint64((1 << 64) - (1 << (8 * (_TAIL_BYTES - width))))
        tails = {name[-width:].rjust(_TAIL_BYTES, b"\0") for name in names}
        self._tails = np.unique(np.frombuffer(b"".join(tails), "<u8"))

    def find_in(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        ends = self._ends(data)
        if len(ends) > _MAX_HITS:
            raise BadElf("names of symbols repeat too often")
        for end in ends.tolist():
            for length in self._lengths:
                name = data[max(0, end - length) : end]
                if name in self._names:
                    yield end - length, name

    def _ends(self, data: bytes) -> npt.NDArray[np.int64]:
        """Where zero bytes are that follow the last bytes of one of the names."""
        letters = np.frombuffer(data, np.uint8)
        if not letters.any():  # a hole of a sparse file would take longer than any names
            return np.zeros(0, np.int64)
        zeros = np.flatnonzero(letters == 0)
        # At each byte the word that ends before it, the last of its bytes highest.
        words: U64 = np.ndarray(len(data) + 1, "<u8", bytes(_TAIL_BYTES) + data, strides=(1,))
        tails = words[zeros] & self._mask
        at = np.minimum(np.searchsorted(self._tails, tails), len(self._tails) - 1)
        ends: npt.NDArray[np.int64] = zeros[self._tails[at] == tails]
        return ends


class _Prefix:
    """Names of which the beginning is known."""

    longest = MAX_NAME_BYTES

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix

    def find_in(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        begin = data.find(self._prefix)
        while begin >= 0:
            yield begin, _name_at(data, begin)
            begin = data.find(self._prefix, begin + 1)


def _name_at(data: bytes, begin: int) -> bytes:
    end = data.find(b"\0", begin, begin + MAX_NAME_BYTES)
    return data[begin : end if end >= 0 else begin + MAX_NAME_BYTES]


def _find(file: TargetFile, image: ElfImage, pattern: _Pattern) -> list[Symbol]:
    found: list[Symbol] = []
    hits: dict[Section, dict[int, bytes]] = {}  # two symbol tables may share their names
    for sections in symbol_sections(image):
        if sections.strings not in hits:
            hits[sections.strings] = _hits(file, sections.strings, pattern)
        if hits[sections.strings]:
            found += _symbols_named(file, image, sections, hits[sections.strings])
    return found


def _hits(file: TargetFile, strings: Section, pattern: _Pattern) -> dict[int, bytes]:
    """Where in a string table which of the names begin."""
    hits: dict[int, bytes] = {}
    for start in range(0, strings.size, _CHUNK_BYTES):
        # Pieces share their ends; what is cut at the end of one is whole in the next.
        length = min(_CHUNK_BYTES + pattern.longest + 1, strings.size - start)
        for offset, name in pattern.find_in(file.read(length, strings.file_offset + start)):
            hits[start + offset] = name
            if len(hits) > _MAX_HITS:
                raise BadElf("names of symbols repeat too often")
    return hits


def _symbols_named(
    file: TargetFile, image: ElfImage, sections: SymbolSections, names: dict[int, bytes]
) -> Iterator[Symbol]:
    """Yields the symbols of one table that have one of the names and a section."""
    offsets = np.array(sorted(names), np.uint32)
    left = _MAX_HITS
    for records in read_symbols(file, image, sections.symbols):
        chosen = (records["section"] != elf.SHN_UNDEF) & (records["section"] < elf.SHN_LORESERVE)
        chosen &= np.isin(records["name"], offsets)
        left -= np.count_nonzero(chosen)
        if left < 0:
            raise BadElf("symbols of one name repeat too often")
        for row in records[chosen]:
            info = int(row["info"])
            yield Symbol(
                name=names[int(row["name"])],
                address=int(row["value"]),
                size=int(row["size"]),
                kind=info & 15,
                binding=info >> 4,
                is_dynamic=sections.is_dynamic,
            )
