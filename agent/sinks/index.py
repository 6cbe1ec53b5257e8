# SPDX-License-Identifier: Apache-2.0
"""Numbers for things that come again and again, however many there are of them."""

from __future__ import annotations

import marshal
import sqlite3
from collections.abc import Mapping

from aiflame.agent.symbolize.recent import Recent

# Of a busy host's stacks and frames nearly all that come again do so within a minute, and what does
# not is found in the file: 20 us. 16,384 keys of frames are 4 MB.
_TURNS, _KEPT = 60, 1 << 14
# Of the file in memory. Keys come in no order, so that a larger part would not be found there more
# often; the kernel has what was read lately.
_FILE_CACHE_KB = 256

Key = int | tuple[int | str | None, ...]


class Numbers:
    """A number for each key, which can be changed.

    Keys that were used lately are in memory; all others lie in a file without a name.

    Args:
        kept: How many are in memory at least before any goes to the file early.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._recent: Recent[Key, int] = Recent(_TURNS, kept, self._spill)
        self._spilled: sqlite3.Connection | None = None

    def find(self, key: Key) -> int | None:
        """Returns the number of a key, None if it has none."""
        number = self._recent.find(key)
        if number is not None or self._spilled is None:
            return number
        row = self._spilled.execute(
            "SELECT number FROM spilled WHERE key = ?", (_bytes(key),)
        ).fetchone()
        if row is None:
            return None
        self._recent.keep(key, row[0])
        return int(row[0])

    def set(self, key: Key, number: int) -> None:
        """Gives a key a number of at most 63 bits."""
        self._recent.keep(key, number)

    def turn(self) -> None:
        """Tells that a window is over."""
        self._recent.turn()

    def _spill(self, leaving: Mapping[Key, int]) -> None:
        if self._spilled is None:
            # A temporary database on disk, which nobody else can open (sqlite.org/inmemorydb.html).
            self._spilled = sqlite3.connect("", isolation_level=None)
            self._spilled.execute("PRAGMA journal_mode = OFF")
            self._spilled.execute(f"PRAGMA cache_size = -{_FILE_CACHE_KB}")
            self._spilled.execute(
                "CREATE TABLE spilled (key BLOB PRIMARY KEY, number INTEGER) WITHOUT ROWID"
            )
        rows = sorted((_bytes(key), number) for key, number in leaving.items())
        self._spilled.execute("BEGIN")
        self._spilled.executemany("INSERT OR REPLACE INTO spilled VALUES (?, ?)", rows)
        self._spilled.execute("COMMIT")


class Index:
    """Gives each key a number, counting from 0.

    Args:
        kept: As of `Numbers`.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._numbers = Numbers(kept)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, key: Key) -> int | None:
        """Returns the number of a key, None if it has none."""
        return self._numbers.find(key)

    def add(self, key: Key) -> int:
        """Returns the number of a key that has none, given out now."""
        number = self._count
        self._count += 1
        self._numbers.set(key, number)
        return number

    def turn(self) -> None:
        """Tells that a window is over."""
        self._numbers.turn()


def _bytes(key: Key) -> bytes:
    # From version 3 on equal keys may be written in different bytes (Python's library, marshal).
    return marshal.dumps(key, 2)
