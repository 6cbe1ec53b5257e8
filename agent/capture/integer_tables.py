# SPDX-License-Identifier: Apache-2.0
"""Reads tables of integers straight from the pages of an SQLite file.

SQLite hands out rows one by one, and Python makes an object of each number: for a million samples
that takes longer than all the rest of a report. The file format is fixed and simple, so numpy
decodes some dozens of pages at once: https://www.sqlite.org/fileformat2.html, sections 1.6 (pages)
and 2.1 (records).

A table that holds anything but integers of one page's rows is left to SQLite: what is here only has
to know what it does not understand.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.signedinteger[Any]]
U8 = npt.NDArray[np.uint8]

# Stands for NULL; a capture holds no negative number.
NULL = -1

# The first byte of a page.
_INTERIOR_PAGE, _LEAF_PAGE = 5, 13
_INTERIOR_HEADER_BYTES, _LEAF_HEADER_BYTES = 12, 8

# The root page of a table of 2**32 pages is no further from its leaves.
_MAX_LEVELS = 20

# Some MB of arrays at a time stay in the processor's cache.
_PAGES_AT_ONCE = 64

# The longest varint of a row's number that is understood: 2**35 rows.
_MAX_ROWID_BYTES = 5

# Numbers are loaded as eight bytes, the last of which may lie past the last page, as may be the
# number of a row that a damaged page places there.
_WORD_BYTES = 8

# By serial type: how many bytes the value has, and the value where it has none. All others are no
# integers.
_BYTES_OF_TYPE = np.full(256, -1, np.int64)
_BYTES_OF_TYPE[[0, 1, 2, 3, 4, 5, 6, 8, 9]] = [0, 1, 2, 3, 4, 6, 8, 0, 0]
_VALUE_OF_TYPE = np.zeros(256, np.int64)
_VALUE_OF_TYPE[[0, 9]] = [NULL, 1]


class IntegerTables:
    """The tables of a capture that hold nothing but integers.

    Args:
        database: An open capture, which nobody writes.
        file: A descriptor of the same file.
    """

    def __init__(self, database: sqlite3.Connection, file: int) -> None:
        self._database = database
        self._file = file

    def columns(self, table: str, names: Sequence[str]) -> list[Integers]:
        """Reads columns of a table, in the order of its rows; `NULL` for what is NULL.

        They are as wide as their largest number needs, of 32 and 64 bits.

        Raises:
            OSError: The file cannot be read.
            sqlite3.Error, ValueError, TypeError, OverflowError: It is damaged, or holds other
                values than integers.
        """
        try:
            return _from_pages(_Pages(self._database, self._file), table, names)
        except _NotUnderstoodError:
            return self._from_rows(table, names)

    def _from_rows(self, table: str, names: Sequence[str]) -> list[Integers]:
        chosen = ", ".join(f"coalesce({name}, {NULL})" for name in names)
        rows = self._database.execute(f"SELECT {chosen} FROM {table} ORDER BY rowid")  # noqa: S608
        numbers = np.fromiter(chain.from_iterable(rows), np.int64)
        return [numbers[i :: len(names)] for i in range(len(names))]


class _NotUnderstoodError(Exception):
    """Something that only SQLite can read."""


class _Pages:
    """The pages of a file."""

    def __init__(self, database: sqlite3.Connection, file: int) -> None:
        self._database = database
        self._file = file
        self.size: int = database.execute("PRAGMA page_size").fetchone()[0]
        self.count: int = database.execute("PRAGMA page_count").fetchone()[0]

    def root(self, table: str) -> int:
        """Returns the number of a table's first page."""
        query = "SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?"
        (number,) = self._database.execute(query, (table,)).fetchone()
        return int(number)

    def places(self, table: str, names: Sequence[str]) -> tuple[list[int], int]:
        """Returns where in a row columns are, and how many columns a row has."""
        stored = self._database.execute(f"PRAGMA table_xinfo({table})").fetchall()
        known = [name for _, name, *_ in stored]
        # A primary key is elsewhere than in its row, a generated column nowhere.
        if any(key or hidden for *_, key, hidden in stored) or not set(names) <= set(known):
            raise _NotUnderstoodError
        return [known.index(name) for name in names], len(known)

    def read(self, numbers: I64) -> U8:
        """Returns pages one after the other, and room for a word after the last."""
        if int(numbers.min()) < 1 or int(numbers.max()) > self.count:
            raise _NotUnderstoodError
        buffer = np.zeros(len(numbers) * self.size + _WORD_BYTES, np.uint8)
        for i, number in enumerate(numbers.tolist()):
            target = buffer.data[i * self.size : (i + 1) * self.size]
            if os.preadv(self._file, [target], (number - 1) * self.size) != self.size:
                raise _NotUnderstoodError
        return buffer


def _from_pages(pages: _Pages, table: str, names: Sequence[str]) -> list[Integers]:
    """Returns columns of a table."""
    places, width = pages.places(table, names)
    found: list[list[Integers]] = [[] for _ in names]
    for flat in _leaf_pages(pages, table):
        for parts, part in zip(found, _decoded(flat, pages.size, places, width), strict=True):
            parts.append(_narrowed(part))
    # One after the other: together they are as large as all that a report has of the table.
    return [np.concatenate(found.pop(0)) for _ in names]


def _narrowed(values: I64) -> Integers:
    """Returns the same numbers in half the bytes where they fit."""
    narrow = values.astype(np.int32)
    return narrow if bool((narrow == values).all()) else values


def _leaf_pages(pages: _Pages, table: str) -> Iterator[U8]:
    """Yields the pages with a table's rows, some at a time and in order; see `_Pages.read`."""
    level = np.array([pages.root(table)])
    for _ in range(_MAX_LEVELS):
        parts = (
            pages.read(level[start : start + _PAGES_AT_ONCE])
            for start in range(0, len(level), _PAGES_AT_ONCE)
        )
        if pages.read(level[:1])[0] == _LEAF_PAGE:
            yield from parts
            return
        below: list[I64] = []
        for part in parts:
            above = part[:-_WORD_BYTES].reshape(-1, pages.size)
            below += [_children(page) for page in above]
            if sum(map(len, below)) > pages.count:
                raise _NotUnderstoodError
        level = np.concatenate(below)
    raise _NotUnderstoodError


def _children(page: U8) -> I64:
    """Returns the numbers of the pages below one that holds no rows."""
    cells = int(page[3]) << 8 | int(page[4])
    end = _INTERIOR_HEADER_BYTES + 2 * cells
    if page[0] != _INTERIOR_PAGE or end > len(page):
        raise _NotUnderstoodError
    at = page[_INTERIOR_HEADER_BYTES:end].view(">u2").astype(np.int64)
    if len(at) and int(at.max()) + 4 > len(page):
        raise _NotUnderstoodError
    left = page[at[:, None] + np.arange(4)].view(">u4").ravel()
    right = page[8:_INTERIOR_HEADER_BYTES].view(">u4")
    children: I64 = np.concatenate([left, right]).astype(np.int64)
    return children


def _decoded(flat: U8, page_bytes: int, places: Sequence[int], width: int) -> list[I64]:
    """Returns columns of all rows of some pages; see `_Pages.read`."""
    pages = flat[:-_WORD_BYTES].reshape(-1, page_bytes)
    _expect(pages[:, 0] == _LEAF_PAGE)
    # The eight bytes from each one on, as a number.
    words: I64 = np.ndarray(len(flat) - _WORD_BYTES + 1, ">i8", flat, strides=(1,))

    cells = pages[:, 3].astype(np.int64) << 8 | pages[:, 4]
    _expect(_LEAF_HEADER_BYTES + 2 * cells <= page_bytes)
    start = np.repeat(np.arange(len(pages)) * page_bytes, cells)
    in_page = np.arange(len(start)) - np.repeat(np.cumsum(cells) - cells, cells)
    pointer = start + _LEAF_HEADER_BYTES + 2 * in_page
    cell = start + (flat[pointer].astype(np.int64) << 8 | flat[pointer + 1])

    # A cell: how long the record is, the row's number, the record.
    _expect(cell < start + page_bytes)
    record, goes_on = cell + 2, np.ones(len(cell), np.bool_)
    for i in range(1, _MAX_ROWID_BYTES + 1):
        goes_on &= flat[cell + i] >= 0x80
        record += goes_on
    end = record + flat[cell]
    _expect(~goes_on & (flat[cell] < 0x80) & (end <= start + page_bytes))

    # A record: how long its header is, the type of each column, the columns.
    value = record + 1 + width
    _expect((flat[record] == 1 + width) & (value <= end))
    found: dict[int, I64] = {}
    for column in range(width):
        kind = flat[record + 1 + column]
        n_bytes = _BYTES_OF_TYPE[kind]
        _expect((n_bytes >= 0) & (value + n_bytes <= end))
        if column in places:
            number = words[value].astype(np.int64) >> (8 * (_WORD_BYTES - n_bytes) & 63)
            found[column] = np.where(n_bytes == 0, _VALUE_OF_TYPE[kind], number)
        value += n_bytes
    return [found[place] for place in places]


def _expect(is_so: npt.NDArray[np.bool_]) -> None:
    if not bool(is_so.all()):
        raise _NotUnderstoodError
