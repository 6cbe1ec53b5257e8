# SPDX-License-Identifier: Apache-2.0
"""Reads integers, and rows of 32-bit words, straight from the pages of an SQLite file.

SQLite hands out rows one by one, and Python makes an object of each number: for a million samples
that takes longer than all the rest of a report. The file format is fixed and simple, so numpy
decodes some dozens of pages at once: https://www.sqlite.org/fileformat2.html, sections 1.6 (pages)
and 2.1 (records).

A table with a row that is larger than a page is left to SQLite, as is one that holds something else
than what is asked for: what is here only has to know what it does not understand.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
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

# Of a table's page: a larger row goes on elsewhere (section 1.6).
_NOT_OF_ROW_BYTES = 35

# In the file's header: how many bytes of each page are for others.
_RESERVED_AT = 20

# The root page of a table of 2**32 pages is no further from its leaves.
_MAX_LEVELS = 20

# Some MB of arrays at a time stay in the processor's cache.
_PAGES_AT_ONCE = 64

# The longest varint of a row's number that is understood: 2**35 rows. That of a length has three: a
# page has at most 64 KB.
_MAX_ROWID_BYTES, _MAX_LENGTH_BYTES = 5, 3

# Numbers are loaded as eight bytes, the last of which may lie past the last page, as may be the
# number of a row that a damaged page places there.
_WORD_BYTES = 8

# By serial type: how many bytes the value has, and the value where it has none. 7 is no integer, 10
# and 11 are nothing; from 12 on, they are blobs and texts by turns.
_BYTES_OF_TYPE = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0])
_VALUE_OF_TYPE = np.array([NULL, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0])
_NULL_TYPE, _FLOAT_TYPE, _LAST_INTEGER_TYPE, _FIRST_BLOB_TYPE = 0, 7, 9, 12
_WORD = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Words:
    """A column of blobs that are rows of 32-bit words.

    Attributes:
        lengths: How many words each row has, 0 where it has no blob.
        is_null: Whether it has none.
        words: Of all rows, one after the other.
    """

    lengths: I64
    is_null: npt.NDArray[np.bool_]
    words: npt.NDArray[np.uint32]


class IntegerTables:
    """The tables of a capture.

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
            return _from_pages(_Pages(self._database, self._file), table, names)[0]
        except _NotUnderstoodError:
            return self._from_rows(table, names)

    def columns_and_words(
        self, table: str, names: Sequence[str], words: str
    ) -> tuple[list[Integers], Words] | None:
        """Reads columns as `columns` does, and one of blobs; None where SQLite has to.

        Raises:
            OSError: The file cannot be read.
            sqlite3.Error: It is damaged.
        """
        try:
            integers, found = _from_pages(_Pages(self._database, self._file), table, names, words)
        except _NotUnderstoodError:
            return None
        lengths, is_null, parts = zip(*found, strict=True)
        return integers, Words(
            np.concatenate(lengths), np.concatenate(is_null), np.concatenate(parts)
        )

    def _from_rows(self, table: str, names: Sequence[str]) -> list[Integers]:
        chosen = ", ".join(f"coalesce({name}, {NULL})" for name in names)
        rows = self._database.execute(f"SELECT {chosen} FROM {table} ORDER BY rowid")  # noqa: S608
        numbers = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
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
        (reserved,) = os.pread(file, 1, _RESERVED_AT)
        # The most that a row may have without going on elsewhere.
        self.most_of_row = self.size - reserved - _NOT_OF_ROW_BYTES

    def root(self, table: str) -> int:
        """Returns the number of a table's first page."""
        query = "SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?"
        (number,) = self._database.execute(query, (table,)).fetchone()
        return int(number)

    def places(self, table: str, names: Sequence[str]) -> tuple[list[int], list[bool]]:
        """Returns where in a row columns are, and of each column there whether it is the number.

        The column that is the row's number (lang_createtable.html, 5) is NULL in the row.
        """
        stored = self._database.execute(f"PRAGMA table_xinfo({table})").fetchall()
        known = [name for _, name, *_ in stored]
        keys = [(kind, key) for _, _, kind, _, _, key, _ in stored if key]
        is_hidden = any(hidden for *_, hidden in stored)  # a generated column is nowhere
        if is_hidden or not set(names) <= set(known) or keys not in ([], [("INTEGER", 1)]):
            raise _NotUnderstoodError
        return [known.index(name) for name in names], [bool(key) for *_, key, _ in stored]

    def read(self, numbers: I64) -> U8:
        """Returns pages one after the other, and room for a word after the last."""
        if int(numbers.min()) < 1 or int(numbers.max()) > self.count:
            raise _NotUnderstoodError
        buffer = np.zeros(len(numbers) * self.size + _WORD_BYTES, np.uint8)
        # Mostly some pages of a table lie one after the other.
        edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1) != 1)
        for begin, end in itertools.pairwise(edges.tolist()):
            target = buffer.data[begin * self.size : end * self.size]
            if os.preadv(self._file, [target], (int(numbers[begin]) - 1) * self.size) < len(target):
                raise _NotUnderstoodError
        return buffer


def _from_pages(
    pages: _Pages, table: str, names: Sequence[str], words: str = ""
) -> tuple[list[Integers], list[_WordParts]]:
    """Returns columns of a table, and the parts of one of words if there is one."""
    places, is_number = pages.places(table, [*names, *([words] if words else [])])
    place_of_words = places.pop() if words else None
    found: list[list[Integers]] = [[] for _ in names]
    found_words: list[_WordParts] = []
    for flat in _leaf_pages(pages, table):
        records = _records(flat, pages)
        columns = _columns(flat, records, is_number, {*places, place_of_words})
        for parts, place in zip(found, places, strict=True):
            parts.append(_narrowed(_integers(flat, columns[place])))
        if place_of_words is not None:
            found_words.append(_words(flat, columns[place_of_words]))
    # One after the other: together they are as large as all that a report has of the table.
    return [np.concatenate(found.pop(0)) for _ in names], found_words


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


@dataclass(frozen=True, slots=True)
class _Records:
    """The rows of some pages: where each begins and ends, and its number."""

    begin: I64
    end: I64
    number: I64


@dataclass(frozen=True, slots=True)
class _Values:
    """One column of some rows: serial types, where the values are, and how many bytes these have.

    Attributes:
        number: In the place of the values, where the column is the row's number.
    """

    kind: I64
    at: I64
    n_bytes: I64
    number: I64 | None


# Lengths, whether they are NULL, and words.
_WordParts = tuple[I64, npt.NDArray[np.bool_], npt.NDArray[np.uint32]]


def _records(flat: U8, pages: _Pages) -> _Records:
    """Returns all rows of some pages; see `_Pages.read`."""
    heads = flat[:-_WORD_BYTES].reshape(-1, pages.size)
    _expect(heads[:, 0] == _LEAF_PAGE)
    cells = heads[:, 3].astype(np.int64) << 8 | heads[:, 4]
    _expect(_LEAF_HEADER_BYTES + 2 * cells <= pages.size)
    start = np.repeat(np.arange(len(heads)) * pages.size, cells)
    in_page = np.arange(len(start)) - np.repeat(np.cumsum(cells) - cells, cells)
    pointer = start + _LEAF_HEADER_BYTES + 2 * in_page
    cell = start + (flat[pointer].astype(np.int64) << 8 | flat[pointer + 1])

    # A cell: how long the record is, the row's number, the record.
    _expect(cell < start + pages.size)
    size, at = _varint(flat, cell, _MAX_LENGTH_BYTES)
    number, begin = _varint(flat, at, _MAX_ROWID_BYTES)
    end = begin + size
    _expect((size <= pages.most_of_row) & (end <= start + pages.size))
    return _Records(begin, end, number)


def _columns(
    flat: U8, records: _Records, is_number: Sequence[bool], wanted: Collection[int | None]
) -> dict[int, _Values]:
    """Returns the columns of rows, by their places in these."""
    # A record: how long its header is, the type of each column, the columns.
    value = records.begin + flat[records.begin]
    at = records.begin + 1
    _expect((flat[records.begin] < 0x80) & (value <= records.end))
    found = {}
    for place, is_row_number in enumerate(is_number):
        _expect(at < value)
        kind, at = _varint(flat, at, _MAX_LENGTH_BYTES)
        n_bytes = _BYTES_OF_TYPE[np.minimum(kind, _FIRST_BLOB_TYPE - 1)]
        is_long = kind >= _FIRST_BLOB_TYPE
        if bool(is_long.any()):
            n_bytes = np.where(is_long, (kind - _FIRST_BLOB_TYPE) >> 1, n_bytes)
        _expect(value + n_bytes <= records.end)
        if place in wanted:
            number = records.number if is_row_number else None
            found[place] = _Values(kind, value, n_bytes, number)
        value = value + n_bytes
    _expect(at == records.begin + flat[records.begin])
    return found


def _varint(flat: U8, at: I64, most: int) -> tuple[I64, I64]:
    """Returns numbers of at most so many bytes, and where each ends."""
    byte = flat[at]
    number, goes_on = (byte & 0x7F).astype(np.int64), byte >= 0x80
    at = at + 1
    for _ in range(1, most):
        if not bool(goes_on.any()):
            break
        byte = flat[at]
        number = np.where(goes_on, number << 7 | byte & 0x7F, number)
        at = at + goes_on
        goes_on &= byte >= 0x80
    _expect(~goes_on)
    return number, at


def _integers(flat: U8, column: _Values) -> I64:
    kind = column.kind
    if column.number is not None:
        _expect(kind == _NULL_TYPE)
        return column.number
    _expect((kind <= _LAST_INTEGER_TYPE) & (kind != _FLOAT_TYPE))
    # The eight bytes from each one on, as a number.
    words: I64 = np.ndarray(len(flat) - _WORD_BYTES + 1, ">i8", flat, strides=(1,))
    number = words[column.at].astype(np.int64) >> (8 * (_WORD_BYTES - column.n_bytes) & 63)
    return np.where(column.n_bytes == 0, _VALUE_OF_TYPE[kind], number)


def _words(flat: U8, column: _Values) -> _WordParts:
    is_null, is_blob = column.kind == _NULL_TYPE, column.kind >= _FIRST_BLOB_TYPE
    _expect(is_null | is_blob & (column.kind % 2 == 0) & (column.n_bytes % _WORD.itemsize == 0))
    lengths = column.n_bytes // _WORD.itemsize
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    every: npt.NDArray[np.uint32] = np.ndarray(
        len(flat) - _WORD.itemsize + 1, _WORD, flat, strides=(1,)
    )
    words = every[np.repeat(column.at, lengths) + _WORD.itemsize * within]
    return lengths, is_null, words.astype(np.uint32)


def _expect(is_so: npt.NDArray[np.bool_]) -> None:
    if not bool(is_so.all()):
        raise _NotUnderstoodError
