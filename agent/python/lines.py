# SPDX-License-Identifier: Apache-2.0
"""From a code object's line table to the line of an instruction: pure decoders of all formats.

Three formats since 3.8: `co_lnotab` up to 3.9 (v3.9.18 Objects/lnotab_notes.txt), `co_linetable` of
3.10 (v3.10.13 Objects/lnotab_notes.txt), and the location table from 3.11 on (v3.11.7
Objects/locations.md). Tables come from the target: each decoder reads a byte at most once and ends
where the table ends.

Positions are bytes from the first instruction on every version (an instruction has two).
Columns are not decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from aiflame.agent.python.layouts import LineTable

NO_LINE = 0

# Location table, high bit of an entry's first byte, then 4 bits of kind and 3 of length - 1.
_SHORT_KINDS = range(0, 10)
_ONE_LINE_KINDS = range(10, 13)
_NO_COLUMNS, _LONG = 13, 14
# Longest number that a sound table holds: 32 bits in groups of 6.
_MAX_VARINT_BYTES = 6
# Lines are C ints (v3.11.7 Include/cpython/code.h). A table that says more is none any more: its
# process has ended, or made it so.
_MOST_LINE = (1 << 31) - 1


def line_of(kind: LineTable, table: bytes, first_line: int, position: int) -> int:
    """The line that an instruction belongs to.

    Args:
        kind: Format of the table.
        table: The line table's bytes.
        first_line: `co_firstlineno`.
        position: Bytes from the first instruction; before it the first line is meant.

    Returns:
        The line, `NO_LINE` where the table has none for it, or none that can be.
    """
    if position < 0:
        return _possible(first_line)
    for end, line in _RANGES[kind](table, first_line):
        if position < end:
            return _possible(line)
    return NO_LINE


def _possible(line: int) -> int:
    return line if NO_LINE <= line <= _MOST_LINE else NO_LINE


def _lnotab(table: bytes, first_line: int) -> Iterator[tuple[int, int]]:
    """Pairs of byte and line increments; increments of the line are signed."""
    address, line = 0, first_line
    for index in range(0, len(table) - 1, 2):
        step = table[index]
        if step:
            address += step
            yield address, line
        line += _signed(table[index + 1])
    yield 1 << 62, line


def _linetable(table: bytes, first_line: int) -> Iterator[tuple[int, int]]:
    """Pairs of byte and line increments, the line's first; -128 is code without a line."""
    address, line = 0, first_line
    for index in range(0, len(table) - 1, 2):
        address += table[index]
        delta = _signed(table[index + 1])
        if delta == -128:
            yield address, NO_LINE
        else:
            line += delta
            yield address, line


def _locations(table: bytes, first_line: int) -> Iterator[tuple[int, int]]:
    """Entries of code units; each entry starts with a byte that has its high bit set."""
    address, line, index = 0, first_line, 0
    while index < len(table):
        head = table[index]
        kind = head >> 3 & 15
        delta = 0
        if kind in _ONE_LINE_KINDS:
            delta = kind - _ONE_LINE_KINDS.start
        elif kind in (_NO_COLUMNS, _LONG):
            delta = _signed_varint(table, index + 1)
        line += delta
        address += 2 * ((head & 7) + 1)
        has_line = kind in _SHORT_KINDS or _ONE_LINE_KINDS.start <= kind <= _LONG
        yield address, line if has_line else NO_LINE
        index += 1
        while index < len(table) and table[index] < 0x80:
            index += 1


def _signed_varint(table: bytes, index: int) -> int:
    """Six bits a byte, lowest first, bit 6 says more; the lowest bit of all is the sign."""
    value = 0
    for shift, byte in enumerate(table[index : index + _MAX_VARINT_BYTES]):
        value |= (byte & 0x3F) << 6 * shift
        if not byte & 0x40:
            break
    return -(value >> 1) if value & 1 else value >> 1


def _signed(byte: int) -> int:
    return byte - 256 if byte >= 128 else byte


_RANGES: Mapping[LineTable, Callable[[bytes, int], Iterator[tuple[int, int]]]] = {
    LineTable.LNOTAB: _lnotab,
    LineTable.LINETABLE: _linetable,
    LineTable.LOCATIONS: _locations,
}
