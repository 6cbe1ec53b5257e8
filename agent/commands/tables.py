# SPDX-License-Identifier: Apache-2.0
"""Tables in the terminal.

As wide as COLUMNS or the terminal, with headings in bold in a terminal; in a pipe or a file as wide
as their cells. Paths lose their first folders where there is no room; all else is wrapped.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterable
from typing import Any

from aiflame.agent.reports.table import Table, path_columns, text_columns
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

_GAP = "  "

# Of what has lines of its own.
_INDENT = "    "

# Columns of text keep at least this much, even in a very narrow terminal: the name of a thread.
_LEAST_TEXT_COLUMNS = 15

# And what their longest words need, up to this: most names of functions in C.
_MOST_WORD_COLUMNS = 24

# What the last parts of paths keep, before names are wrapped.
_MOST_PATH_COLUMNS = 40

# Where there is room for all, one long name does not move the columns of all rows.
_MOST_PADDED_COLUMNS = 100

_CUT_HEAD = "\u2026/"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves what nobody reads on to the caller: rich exits with 1, by which a diff alarms."""
        raise BrokenPipeError


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables to standard output."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A function's name may hold what the terminal's encoding can't say.
        sys.stdout.reconfigure(errors="replace")
    others = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    # A Console with COLUMNS=0, which some shells leave behind, prints nothing.
    console = _Console(markup=False, emoji=False, highlight=False, soft_wrap=True, _environ=others)
    width = _columns(console)
    for table in tables:
        for line in _layout(table, width):
            console.print(line)


def add_limit(parser: Any, default: int | None, rows: str = "rows") -> None:
    """Adds -n, which says how many rows a table has; `rows` says of what."""
    parser.add_argument(
        "-n",
        "--limit",
        metavar="N",
        type=positive,
        default=default,
        help=f"{rows} (default: %(default)s)",
    )


def positive(text: str) -> int:
    """Return a number above 0; for argparse."""
    value = int(text)  # argparse turns a ValueError into a usage error
    if value < 1:
        raise argparse.ArgumentTypeError(f"not a number above 0: {text}")
    return value


def _columns(console: Console) -> int:
    """Return how many columns there are."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    return console.width if console.is_terminal else sys.maxsize


def _layout(table: Table, width: int) -> list[Text]:
    lines = [Text(table.title, style="bold"), *map(Text, _folded(table.whole, width))]
    if table.rows:
        headings = tuple(heading.lstrip(">/") for heading in table.columns)
        widths = _widths(table, headings, width)
        lines += [Text(line, style="dim") for line in _lines(table, headings, widths, width)]
        for row in table.rows:
            lines += map(Text, _lines(table, row, widths, width))
    else:
        lines.append(Text("none"))
    if table.left_out:
        lines.append(Text(f"... and {table.left_out:,} more (-n)"))
    return [*lines, Text("")]


def _folded(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines += chop_cells(word, width) if cell_len(word) > width else [word]
    return lines


def _widths(table: Table, headings: tuple[str, ...], width: int) -> list[int]:
    # Numbers keep their width; texts share what is left, paths and then the longest giving way.
    columns = [*zip(headings, *table.rows, strict=True)]
    paths, texts = path_columns(table), text_columns(table)
    needed = [
        max(0 if _is_below(table, i, cell, width) else cell_len(cell) for cell in column)
        for i, column in enumerate(columns)
    ]
    if width == sys.maxsize:
        # Longer cells move the rest of their own line only.
        return [min(most, _MOST_PADDED_COLUMNS) for most in needed]
    # First as far as nothing is cut, then by headings of several lines, and then as far as cells
    # are still columns: what does not fit in one stands below.
    whole = {i: _least_whole(columns[i], is_path=i in paths) for i in texts}
    words = {i: max(map(_longest_word, columns[i])) for i in range(len(columns)) if i not in texts}
    narrow = {i: min(whole[i], max(_longest_word(headings[i]), _LEAST_TEXT_COLUMNS)) for i in texts}
    names = {i: min(whole[i], _longest_word(headings[i])) for i in texts}
    for least in (whole, narrow, words, names):
        while sum(needed) + len(_GAP) * (len(needed) - 1) > width:
            narrower = [i for i in least if needed[i] > least[i]]
            narrower = [i for i in narrower if i in paths] or narrower
            if not narrower:
                break
            needed[max(narrower, key=lambda i: (needed[i], i))] -= 1
    return needed


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _least_whole(column: tuple[str, ...], *, is_path: bool) -> int:
    """Return in how much room names of a column are in one piece, but for very long ones."""
    if is_path:
        return min(_MOST_PATH_COLUMNS, max(cell_len(_path_end(cell, 0)) for cell in column))
    return min(_MOST_WORD_COLUMNS, max(_LEAST_TEXT_COLUMNS, *map(_longest_word, column)))


def _is_below(table: Table, column: int, cell: str, width: int) -> bool:
    """Whether a cell stands on lines of its own, as it would be too tall in its column."""
    return column < len(table.columns) - 1 and cell_len(cell) > width // 2


def _lines(table: Table, cells: tuple[str, ...], widths: list[int], width: int) -> list[str]:
    texts, paths = set(text_columns(table)), set(path_columns(table))
    columns, below = [], []
    for i, (cell, room) in enumerate(zip(cells, widths, strict=True)):
        shown = _path_end(cell, room) if i in paths and cell_len(cell) > room else cell
        if cell_len(shown) > room and width < sys.maxsize:
            if _is_below(table, i, cell, width) or _longest_word(shown) > room:
                cell = _path_end(cell, width - len(_INDENT)) if i in paths else cell
                below += [_INDENT + piece for piece in _folded(cell, width - len(_INDENT))]
                shown = ""
            columns.append(_folded(shown, room))
        else:
            columns.append([shown])
    lines = []
    for k in range(max(map(len, columns))):
        parts = []
        for i, (pieces, room) in enumerate(zip(columns, widths, strict=True)):
            piece = pieces[k] if k < len(pieces) else ""
            padding = " " * (room - cell_len(piece))
            parts.append(piece + padding if i in texts else padding + piece)
        lines.append(_GAP.join(parts).rstrip())
    return lines + below


def _path_end(path: str, width: int) -> str:
    """Return as many of the last parts of a path as there is room for, the last one always."""
    *folders, shown = path.split("/")
    if not folders or cell_len(path) <= width:
        return path
    for folder in reversed(folders):
        longer = f"{folder}/{shown}"
        if cell_len(_CUT_HEAD) + cell_len(longer) > width:
            break
        shown = longer
    return _CUT_HEAD + shown
