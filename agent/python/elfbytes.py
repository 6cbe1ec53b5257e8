# SPDX-License-Identifier: Apache-2.0
"""A few named symbols, and bytes by address, of an ELF file.

An interpreter has 10,000 symbols of which four are wanted, data among them; the table of the
symbolizer keeps functions only, and takes longer to make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.symbols.elf import SHT_NOBITS, ElfImage, Section
from aiflame.agent.target_files import TargetFile

# libtorch_cpu has 120 MB of names; an interpreter 0.5 MB.
_MAX_TABLE_BYTES = 64 * 1024 * 1024
# Elf64_Sym, elf.h
_ENTRY = np.dtype("<u4,u1,u1,<u2,<u8,<u8")
_ENTRY.names = ("name", "info", "other", "shndx", "value", "size")
_Entries = npt.NDArray[np.void]
_STT_FUNC, _STB_LOCAL = 2, 0
# As much as a demangler takes.
_MAX_NAME_BYTES = 10_000
# More places than this for one short name only in a table made to be slow.
_MAX_PLACES = 1024


@dataclass(frozen=True, slots=True)
class Symbol:
    """Where a symbol is; `size` in bytes, 0 where the table does not say."""

    address: int
    size: int


def find_symbols(file: TargetFile, image: ElfImage, names: Iterable[bytes]) -> dict[bytes, Symbol]:
    """Symbols by exact name, from .symtab or else .dynsym.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    wanted = set(names)
    found: dict[bytes, Symbol] = {}
    for entries, strings in _tables(file, image):
        for name in wanted - found.keys():
            symbol = _find(file, entries, strings, name)
            if symbol is not None:
                found[name] = symbol
        if wanted == found.keys():
            break
    return found


def symbols_beginning(file: TargetFile, image: ElfImage, prefix: bytes) -> dict[bytes, Symbol]:
    """All symbols whose name begins with a prefix, from both tables.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """
    found: dict[bytes, Symbol] = {}
    for entries, strings in _tables(file, image):
        for place in _places(strings, prefix):
            end = strings.find(b"\0", place)
            name = strings[place : end if end >= 0 else place]
            symbol = _find(file, entries, strings, name) if name not in found else None
            if symbol is not None:
                found[name] = symbol
    return found


def at_address(file: TargetFile, image: ElfImage, address: int, size: int) -> bytes | None:
    """Up to `size` bytes of the file that are mapped from a virtual address on, or None."""
    for load in image.loads:
        inside = address - load.virtual_address
        if 0 <= inside < load.file_size:
            length = min(size, load.file_size - inside)
            return file.read(length, load.file_offset + inside) or None
    return None


def _tables(file: TargetFile, image: ElfImage) -> Iterator[tuple[_Entries, bytes]]:
    """The symbol tables and their names, the one of all symbols first."""
    for name in (".symtab", ".dynsym"):
        section = image.section(name)
        if section is None or section.entry_size != _ENTRY.itemsize:
            continue
        if not 0 <= section.link < len(image.sections):
            continue
        data, strings = _bytes(file, section), _bytes(file, image.sections[section.link])
        yield np.frombuffer(data, _ENTRY, len(data) // _ENTRY.itemsize), strings


def _bytes(file: TargetFile, section: Section) -> bytes:
    if section.size > _MAX_TABLE_BYTES or section.type == SHT_NOBITS:
        return b""
    return file.read(section.size, section.file_offset)


def _find(file: TargetFile, entries: _Entries, strings: bytes, name: bytes) -> Symbol | None:
    file.spend(len(strings) + entries.nbytes)
    places = _places(strings, name + b"\0")
    rows = np.flatnonzero(np.isin(entries["name"], places) & (entries["shndx"] != 0))
    if not len(rows):
        return None
    return Symbol(int(entries["value"][rows[0]]), int(entries["size"][rows[0]]))


def _places(strings: bytes, text: bytes) -> list[int]:
    """Where a text stands in a string table; a name may be the tail of a longer one."""
    found: list[int] = []
    place = strings.find(text)
    while place >= 0 and len(found) < _MAX_PLACES:
        found.append(place)
        place = strings.find(text, place + 1)
    return found


class FunctionNames:
    """The functions of a file as its symbols name them, mangled, from .symtab or else .dynsym.

    Args:
        file: The file.
        image: Its headers.

    Raises:
        BadTargetFile: As `TargetFile.read`.
    """

    def __init__(self, file: TargetFile, image: ElfImage) -> None:
        entries, self._strings = next(_tables(file, image), (np.zeros(0, _ENTRY), b""))
        file.spend(entries.nbytes)
        kept = (entries["info"] & 15 == _STT_FUNC) & (entries["shndx"] != 0)
        kept &= entries["size"] > 0
        functions = entries[kept]
        # Of several names for one place a global one is the last, and so the one that is found.
        is_local = functions["info"] >> 4 == _STB_LOCAL
        order = np.lexsort((~is_local, functions["value"]))
        self._starts = functions["value"][order]
        self._sizes = functions["size"][order]
        self._names = functions["name"][order]

    def at(self, address: int) -> bytes:
        """Returns the name of the function that an address is in, b"" for none."""
        if not 0 <= address < 1 << 64:
            return b""
        row = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        if row < 0 or address - int(self._starts[row]) >= int(self._sizes[row]):
            return b""
        begin = int(self._names[row])
        end = self._strings.find(b"\0", begin, begin + _MAX_NAME_BYTES)
        return self._strings[begin : end if end >= 0 else begin + _MAX_NAME_BYTES]
