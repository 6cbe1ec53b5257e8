# SPDX-License-Identifier: Apache-2.0
"""Where a mapped file defines functions of a device API, as places to put a uprobe.

Every file that any target maps is asked, most define none of the names, and some have 90 MB of
them. So the string tables are searched first, for the last bytes of the names: linkers let a name
be the end of a longer one (`cudaLaunchKernel` of `__cudaLaunchKernel`), hence a name is where its
zero byte is, whatever stands before it. Only a file with a hit has its symbols read.

A file without section headers names nothing, nor do separate debug files. Of several functions of
one name (versions, or local ones of several sources) one is taken, a global one before others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.symbols.elf import BadElf, ElfImage, Section
from aiflame.agent.target_files import TargetFile

# The largest tables of real programs have 2-3 million symbols.
_MAX_SYMBOLS = 8_000_000
# How often one table may have names asked for; real ones have each once or twice.
_MAX_HITS = 4096
# What is read at a time: it fits the second-level cache of most processors.
_CHUNK_BYTES = 1 << 20
# The code of a function is wanted for its first bytes and for jumps to them.
_MAX_CODE_BYTES = 64 * 1024
# A function without a size is assembly, seldom longer.
_SIZELESS_CODE_BYTES = 4096
# Of a name's end that is compared for all names at once: one machine word.
_TAIL_BYTES = 8

# elf.h: Elf64_Sym
_SYMBOL = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("section", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)
_TABLES = ("SHT_DYNSYM", "SHT_SYMTAB")
_STT_FUNC = 2
_SHN_LORESERVE = 0xFF00
# STB_LOCAL, STB_GLOBAL, STB_WEAK; what else there may be comes last.
_BINDING_ORDER = {1: 0, 2: 1, 0: 2}

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class FunctionPlace:
    """A function in a file.

    Attributes:
        name: As the symbol table has it.
        file_offset: Of its first byte, in bytes.
        size_bytes: As the symbol says it; 0 where it does not.
        code: Its first bytes, at most 64 KiB.
        before_bytes: How much code of its library stands before it; 0 in a program that it was
            linked into, whose other code is not the library's.
        after_bytes: Likewise, from its first byte on; there, `size_bytes`.
    """

    name: str
    file_offset: int
    size_bytes: int
    code: bytes
    before_bytes: int = 0
    after_bytes: int = 0


class _Found(NamedTuple):
    """A symbol: order of preference, place in the file and size, and the code around it."""

    order: int
    offset: int
    size_bytes: int
    before_bytes: int
    after_bytes: int


def find_functions(
    file: TargetFile, names: frozenset[str], image: ElfImage | None = None
) -> dict[str, FunctionPlace]:
    """Returns which of the functions a file defines, by name.

    Args:
        file: The file.
        names: The functions' names, without versions.
        image: Its headers, where the caller has them already.

    Raises:
        BadTargetFile: The file is damaged, or costs more to read than any real one.
    """
    if not names:
        return {}
    elf = ElfImage.read(file) if image is None else image
    if elf.bits != 64:
        return {}
    wanted = {name.encode(): name for name in names}
    found: dict[str, _Found] = {}
    hits: dict[int, dict[int, str]] = {}  # by string table: two symbol tables may share one
    for kind in _TABLES:
        # The gABI allows one of each; 2,000 that share a string table are made to take long.
        table = next((section for section in elf.sections if section.type == kind), None)
        if table is None or table.link >= len(elf.sections):
            continue
        if table.link not in hits:
            hits[table.link] = _find_names(file, elf.sections[table.link], wanted)
        if hits[table.link]:
            _find_symbols(file, elf, table, hits[table.link], found)
    return {name: _place(file, name, row) for name, row in found.items()}


def _find_names(file: TargetFile, strings: Section, wanted: dict[bytes, str]) -> dict[int, str]:
    """Returns where in a string table which names begin."""
    if strings.type != "SHT_STRTAB" or strings.size == 0:
        return {}
    longest = max(map(len, wanted)) + 1
    width = min(_TAIL_BYTES, *map(len, wanted))
    tails = np.unique(
        np.frombuffer(b"".join(name[-width:].rjust(_TAIL_BYTES, b"\0") for name in wanted), "<u8")
    )
    hits: dict[int, str] = {}
    for start, data in _chunks(file, strings, longest):
        ends = _ends(data, tails, width)
        if len(ends) + len(hits) > _MAX_HITS:
            raise BadElf("names of functions repeat too often")
        for end in ends.tolist():
            before = data[max(0, end - longest) : end]
            for name in wanted:
                if before.endswith(name):
                    hits[start + end - len(name)] = wanted[name]
    return hits


def _chunks(file: TargetFile, strings: Section, overlap: int) -> Iterator[tuple[int, bytes]]:
    """Yields pieces of a section that share their ends, and where each is in it."""
    for start in range(0, strings.size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES + overlap, strings.size - start)
        yield start, file.read(length, strings.file_offset + start)


def _ends(data: bytes, tails: U64, width: int) -> npt.NDArray[np.int64]:
    """Returns where zero bytes are that follow one of the tails, `width` bytes of each."""
    letters = np.frombuffer(data, np.uint8)
    zeros = np.flatnonzero(letters == 0)
    zeros = zeros[zeros >= width]
    # The bytes before each zero as one number, the last of them highest, as in `tails`.
    words = np.zeros(len(zeros), np.uint64)
    for byte in range(width):
        shift = np.uint64(8 * (_TAIL_BYTES - 1 - byte))
        words |= letters[zeros - 1 - byte].astype(np.uint64) << shift
    at = np.minimum(np.searchsorted(tails, words), len(tails) - 1)
    ends: npt.NDArray[np.int64] = zeros[tails[at] == words]
    return ends


def _find_symbols(
    file: TargetFile,
    elf: ElfImage,
    table: Section,
    names: dict[int, str],
    found: dict[str, _Found],
) -> None:
    """Adds the functions that a symbol table defines: order of preference, offset and size."""
    if table.size // _SYMBOL.itemsize > _MAX_SYMBOLS:
        raise BadElf(f"{table.size // _SYMBOL.itemsize} symbols")
    offsets = np.array(sorted(names), np.uint32)
    left = _MAX_HITS
    step = _CHUNK_BYTES // _SYMBOL.itemsize * _SYMBOL.itemsize
    for start in range(0, table.size, step):
        data = file.read(min(step, table.size - start), table.file_offset + start)
        rows = np.frombuffer(data, _SYMBOL, len(data) // _SYMBOL.itemsize)
        chosen = (rows["info"] & 15 == _STT_FUNC) & (rows["section"] != 0)
        chosen &= rows["section"] < _SHN_LORESERVE
        chosen &= np.isin(rows["name"], offsets)
        left -= np.count_nonzero(chosen)
        if left < 0:
            raise BadElf("functions of one name repeat too often")
        for row in rows[chosen]:
            name = names[int(row["name"])]
            place = _file_offset(elf, int(row["value"]))
            order = _BINDING_ORDER.get(int(row["info"]) >> 4, len(_BINDING_ORDER))
            if place is not None and (name not in found or order < found[name].order):
                size = int(row["size"])
                around = (place[1], place[2]) if table.type == "SHT_DYNSYM" else (0, size)
                found[name] = _Found(order, place[0], size, *around)


def _file_offset(elf: ElfImage, address: int) -> tuple[int, int, int] | None:
    """Returns where in the file an address is, and how much code of its segment lies before it and
    from it on; None where no code is mapped from it.
    """
    for load in elf.loads:
        inside = address - load.virtual_address
        if load.executable and 0 <= inside < load.file_size:
            offset = load.file_offset + inside
            if offset < elf.size_bytes:
                return offset, inside, load.file_size - inside
            return None
    return None


def _place(file: TargetFile, name: str, found: _Found) -> FunctionPlace:
    length = min(found.size_bytes or _SIZELESS_CODE_BYTES, _MAX_CODE_BYTES)
    code = file.read(length, found.offset)
    around = (found.before_bytes, found.after_bytes)
    return FunctionPlace(name, found.offset, found.size_bytes, code, *around)
