# SPDX-License-Identifier: Apache-2.0
"""Where the functions of an ELF file are, as its symbols say it: .symtab, or else .dynsym.

A table of 530,000 symbols is never a Python list: the records stay columns. What is no named code
inside its own section is left out, and no function reaches past the section that it is in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.elf import records as elf
from aiflame.agent.elf.image import ElfImage, NotElf, Section
from aiflame.agent.elf.symbols import (
    MAX_NAME_BYTES,
    U64,
    Records,
    first_letters,
    read_names,
    read_symbols,
    symbol_sections,
)
from aiflame.agent.file_questions import BadAnswer, Json, Question, rows, text
from aiflame.agent.target_files import TargetFile

# Which of two names for the same code wins: global, then weak, then local.
_BINDING_SCORE = np.zeros(16, dtype=np.int64)
_BINDING_SCORE[[elf.STB_GLOBAL, elf.STB_GNU_UNIQUE]] = 2
_BINDING_SCORE[elf.STB_WEAK] = 1

Bools = npt.NDArray[np.bool_]


class Functions(NamedTuple):
    """Symbols of functions, one a row, in no particular order.

    Attributes:
        starts: Virtual addresses.
        ends: After the last byte; the start where the symbol has no size.
        limits: Where the symbol's section ends.
        sizeless: Which have no size (assembly written by hand).
        bindings: The higher, the better the name.
        names: Offsets in the string table.
    """

    starts: U64
    ends: U64
    limits: U64
    sizeless: Bools
    bindings: npt.NDArray[np.int64]
    names: U64

    def chosen(self, rows: Bools | npt.NDArray[np.int64]) -> Functions:
        """Some of the rows."""
        columns: Iterator[npt.NDArray[Any]] = (column[rows] for column in self)
        return Functions(*columns)


def concatenate(parts: Sequence[Functions]) -> Functions:
    """All rows of several tables."""
    none = np.zeros(0, dtype=np.uint64)
    empty = Functions(none, none, none, none.astype(bool), none.astype(np.int64), none)
    return Functions(*(np.concatenate(column) for column in zip(empty, *parts, strict=True)))


class FunctionTable(NamedTuple):
    """The functions of one file, and the section that has their names, None where there are none.

    In a .dynsym symbols without a size are left out: the functions between its symbols are unknown.
    """

    functions: Functions
    strings: Section | None


def read_functions(file: TargetFile, image: ElfImage) -> FunctionTable:
    """The symbols of functions of one file.

    Raises:
        BadElf: There are more symbols than in any real file.
        BadTargetFile: As `TargetFile.read`.
    """
    tables = symbol_sections(image)
    if not tables:
        return FunctionTable(concatenate([]), None)
    symbols, strings = tables[0]
    homes = _Homes(image.sections)
    pieces = read_symbols(file, image, symbols)
    functions = concatenate([_functions(records, homes, strings) for records in pieces])
    if tables[0].is_dynamic:
        return FunctionTable(functions.chosen(~functions.sizeless), strings)
    is_mark = functions.sizeless & (functions.bindings == 0)
    is_mark[is_mark] = _is_mark(file, strings, functions.names[is_mark])
    return FunctionTable(functions.chosen(~is_mark), strings)


def function_ranges(file: TargetFile, image: ElfImage) -> tuple[U64, U64]:
    """Where the functions of one file begin and end, sorted and distinct, shape (n,) each.

    Raises:
        BadElf: As `read_functions`.
        BadTargetFile: As `TargetFile.read`.
    """
    functions = resolve_sizes(read_functions(file, image).functions)
    order = np.lexsort((functions.ends, functions.starts))
    starts, ends = functions.starts[order], functions.ends[order]
    is_last = np.ones(len(starts), bool)
    is_last[:-1] = starts[1:] != starts[:-1]
    return starts[is_last], ends[is_last]


def resolve_sizes(functions: Functions) -> Functions:
    """Let those without a size reach to the next one, unless another already covers them."""
    sizeless = np.flatnonzero(functions.sizeless)
    if not len(sizeless):
        return functions
    starts, limits = functions.starts[sizeless], functions.limits[sizeless]
    every = np.unique(functions.starts)
    following = np.searchsorted(every, starts, side="right")
    reach = np.append(every, np.uint64(0))[following]
    ends = functions.ends.copy()
    ends[sizeless] = np.minimum(np.where(following < len(every), reach, limits), limits)

    sized = np.flatnonzero(~functions.sizeless)
    order = sized[np.argsort(functions.starts[sized], kind="stable")]
    kept = np.ones(len(ends), bool)
    if len(order):
        covered_to = np.maximum.accumulate(functions.ends[order])
        before = np.searchsorted(functions.starts[order], starts, side="right") - 1
        kept[sizeless] = (before < 0) | (covered_to[np.maximum(before, 0)] <= starts)
    return functions._replace(ends=ends).chosen(kept)


class _Homes:
    """Sections by index, as columns."""

    def __init__(self, sections: tuple[Section, ...]) -> None:
        self.count = min(len(sections), elf.SHN_LORESERVE)
        self.executable = np.array([s.executable for s in sections], dtype=bool)
        self.lows = np.array([s.virtual_address for s in sections], dtype=np.uint64)
        self.highs = np.array([s.end_address for s in sections], dtype=np.uint64)


def _functions(records: Records, homes: _Homes, strings: Section) -> Functions:
    """Named code inside its own section."""
    kind = records["info"] & 15
    is_likely = (kind == elf.STT_FUNC) | (kind == elf.STT_GNU_IFUNC) | (kind == elf.STT_NOTYPE)
    is_likely &= (records["name"] != 0) & (records["name"] < strings.size)
    is_likely &= (records["section"] != elf.SHN_UNDEF) & (records["section"] < homes.count)
    rows = records[is_likely]
    home, starts = rows["section"], rows["value"].astype(np.uint64)
    is_code = homes.executable[home] & (starts >= homes.lows[home]) & (starts < homes.highs[home])
    rows, starts = rows[is_code], starts[is_code]
    limits = homes.highs[rows["section"]]
    # It starts before the limit, so this cannot wrap, whatever size it claims.
    sizes = np.minimum(rows["size"].astype(np.uint64), limits - starts)
    return Functions(
        starts=starts,
        ends=starts + sizes,
        limits=limits,
        sizeless=sizes == 0,
        bindings=_BINDING_SCORE[rows["info"] >> 4],
        names=rows["name"].astype(np.uint64),
    )


def _is_mark(file: TargetFile, strings: Section, names: U64) -> Bools:
    """Which names are `$x` or `$d`: marks between code and data, by the Arm and RISC-V ABIs."""
    found: Bools = first_letters(file, strings, names) == ord("$")
    return found


class FunctionNames:
    """The names of the functions of a file, mangled, by address; each is read when asked for.

    Args:
        file: The file.
        image: Its headers.

    Raises:
        BadElf: As `read_functions`.
        BadTargetFile: As `TargetFile.read`.
    """

    def __init__(self, file: TargetFile, image: ElfImage) -> None:
        functions, self._strings = read_functions(file, image)
        functions = functions.chosen(~functions.sizeless)
        # Of several names for one address the best is the last, and so the one that is found.
        order = np.lexsort((functions.bindings, functions.starts))
        self._starts = functions.starts[order]
        self._ends = functions.ends[order]
        self._names = functions.names[order]

    def at(self, file: TargetFile, address: int) -> bytes:
        """Returns the name of the function that an address is in, b"" for none.

        Raises:
            BadTargetFile: As `TargetFile.read`.
        """
        if self._strings is None or not 0 <= address < 1 << 64:
            return b""
        row = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        if row < 0 or address >= int(self._ends[row]):
            return b""
        return read_names(file, self._strings, self._names[row : row + 1])[0]


def names_at(file: TargetFile, *addresses: int) -> Json:
    """Reads the names of the functions at some virtual addresses, "" where there is none."""
    try:
        names = FunctionNames(file, ElfImage.read(file))
    except NotElf:
        return [""] * len(addresses)
    return [names.at(file, address).decode(errors="replace") for address in addresses]


def function_names(addresses: Sequence[int]) -> Question[list[str]]:
    """The mangled names of the functions at some virtual addresses, "" where there is none."""

    def check(answer: Json) -> list[str]:
        found = [text(name, MAX_NAME_BYTES) for name in rows(answer, len(addresses))]
        if len(found) != len(addresses):
            raise BadAnswer("not a name for each address")
        return found

    return Question(names_at, check, tuple(addresses), is_kept=False)
