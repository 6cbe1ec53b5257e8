# SPDX-License-Identifier: Apache-2.0
"""Tables in the terminal.

Of at most 100 columns when standard output is no terminal; as wide as the terminal, with headings
in bold, when it is one.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable

from aiflame.agent.reports.table import Table, text_columns
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

# Fits side by side on a common screen, and in a mail.
_PLAIN_COLUMNS = 100

_GAP = "  "

# A text column keeps at least this much, even in a very narrow terminal.
_LEAST_TEXT_COLUMNS = 8


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables to standard output."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A function's name may hold what the terminal's encoding can't say.
        sys.stdout.reconfigure(errors="replace")
    console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    width = console.width if console.is_terminal else _PLAIN_COLUMNS
    for table in tables:
        for line in _layout(table, width):
            console.print(line)


def positive(text: str) -> int:
    """Return a number above 0; for argparse."""
    value = int(text)  # argparse turns a ValueError into a usage error
    if value < 1:
        raise argparse.ArgumentTypeError(f"not a number above 0: {text}")
    return value


def _layout(table: Table, width: int) -> list[Text]:
    lines = [Text(table.title, style="bold"), *map(Text, _folded(table.whole, width))]
    if table.rows:
        headings = tuple(heading.lstrip(">") for heading in table.columns)
        widths = _widths(table, headings, width)
        lines.append(Text(_line(table, headings, widths), style="dim"))
        for row in table.rows:
            lines += [Text(_line(table, cells, widths)) for cells in _wrapped(table, row, widths)]
    else:
        lines.append(Text("none"))
    if table.left_out:
        lines.append(Text(f"... and {table.left_out:,} more (-n)"))
    return [*lines, Text("")]


def _folded(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _widths(table: Table, headings: tuple[str, ...], width: int) -> list[int]:
    # Numbers are never cut; texts share what is left, the longest giving way first.
    columns = zip(headings, *table.rows, strict=True)
    needed = [max(cell_len(cell) for cell in column) for column in columns]
    texts = text_columns(table)
    while sum(needed) + len(_GAP) * (len(needed) - 1) > width:
        longest = max(texts, key=lambda i: (needed[i], i), default=None)
        if longest is None or needed[longest] <= _LEAST_TEXT_COLUMNS:
            break
        needed[longest] -= 1
    return needed


def _wrapped(table: Table, row: tuple[str, ...], widths: list[int]) -> list[tuple[str, ...]]:
    if not table.is_prose or cell_len(row[-1]) <= widths[-1]:
        return [row]
    pieces = _folded(row[-1], widths[-1]) or [""]
    blank = ("",) * (len(row) - 1)
    return [(*row[:-1], pieces[0]), *((*blank, piece) for piece in pieces[1:])]


def _line(table: Table, cells: tuple[str, ...], widths: list[int]) -> str:
    texts = set(text_columns(table))
    shown = []
    for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        if i not in texts:
            shown.append(cell.rjust(width))
        elif cell_len(cell) > width:
            shown.append(set_cell_size(cell, width - 3) + "...")
        else:
            shown.append(set_cell_size(cell, width))
    return _GAP.join(shown).rstrip()
