# SPDX-License-Identifier: Apache-2.0
"""A few named symbols, and bytes by address, of an ELF file.

An interpreter has 10,000 symbols of which four are wanted, data among them; the table of the
symbolizer keeps functions only, and takes longer to make.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.symbols.elf import ElfImage, Section

# libtorch_cpu has 120 MB of names; an interpreter 0.5 MB.
_MAX_TABLE_BYTES = 64 * 1024 * 1024
# Elf64_Sym, elf.h
_ENTRY = np.dtype("<u4,u1,u1,<u2,<u8,<u8")
_ENTRY.names = ("name", "info", "other", "shndx", "value", "size")
_Entries = npt.NDArray[np.void]
# More places than this for one short name only in a table made to be slow.
_MAX_PLACES = 1024


@dataclass(frozen=True, slots=True)
class Symbol:
    """Where a symbol is; `size` in bytes, 0 where the table does not say."""

    address: int
    size: int


def find_symbols(fd: int, image: ElfImage, names: Iterable[bytes]) -> dict[bytes, Symbol]:
    """Symbols by exact name, from .symtab or else .dynsym.

    Raises:
        OSError: The file cannot be read.
    """
    wanted = tuple(names)
    found: dict[bytes, Symbol] = {}
    for entries, strings in _tables(fd, image):
        for name in wanted:
            if name not in found:
                symbol = _find(entries, strings, name)
                if symbol is not None:
                    found[name] = symbol
    return found


def symbols_beginning(fd: int, image: ElfImage, prefix: bytes) -> dict[bytes, Symbol]:
    """All symbols whose name begins with a prefix, from both tables.

    Raises:
        OSError: The file cannot be read.
    """
    found: dict[bytes, Symbol] = {}
    for entries, strings in _tables(fd, image):
        for place in _places(strings, prefix):
            end = strings.find(b"\0", place)
            name = strings[place:end]
            symbol = _find(entries, strings, name)
            if symbol is not None:
                found.setdefault(name, symbol)
    return found


def at_address(fd: int, image: ElfImage, address: int, size: int) -> bytes | None:
    """Up to `size` bytes of the file that are mapped from a virtual address on, or None."""
    for load in image.loads:
        inside = address - load.virtual_address
        if 0 <= inside < load.file_size:
            length = min(size, load.file_size - inside)
            return os.pread(fd, length, load.file_offset + inside) or None
    return None


def _tables(fd: int, image: ElfImage) -> list[tuple[_Entries, bytes]]:
    found = []
    for name in (".symtab", ".dynsym"):
        section = image.section(name)
        if section is None or section.entry_size != _ENTRY.itemsize:
            continue
        if not 0 <= section.link < len(image.sections):
            continue
        data, strings = _bytes(fd, section), _bytes(fd, image.sections[section.link])
        whole = len(data) // _ENTRY.itemsize * _ENTRY.itemsize
        found.append((np.frombuffer(data[:whole], _ENTRY), strings))
    return found


def _bytes(fd: int, section: Section) -> bytes:
    if section.size > _MAX_TABLE_BYTES:
        return b""
    return os.pread(fd, section.size, section.file_offset)


def _find(entries: _Entries, strings: bytes, name: bytes) -> Symbol | None:
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
