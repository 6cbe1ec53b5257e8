# SPDX-License-Identifier: Apache-2.0
"""Numbers for things that come again and again, however many there are of them."""

from __future__ import annotations

import marshal
import sqlite3
from collections import OrderedDict
from itertools import islice

# Of a busy host's stacks and frames nearly all that come again within minutes: 10 MB.
_KEPT = 1 << 16
# Written at once.
_BATCH = 1 << 12

Key = int | tuple[int | str | None, ...]


class Index:
    """Gives each key a number, counting from 0.

    Keys that were asked for last are in memory; all others lie in a file without a name.

    Args:
        kept: How many are in memory.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._known: OrderedDict[Key, int] = OrderedDict()
        self._count = 0
        self._spilled: sqlite3.Connection | None = None

    def __len__(self) -> int:
        return self._count

    def find(self, key: Key) -> int | None:
        """Returns the number of a key, None if it has none."""
        number = self._known.get(key)
        if number is not None:
            self._known.move_to_end(key)
            return number
        if self._spilled is None:
            return None
        row = self._spilled.execute(
            "SELECT number FROM spilled WHERE key = ?", (_bytes(key),)
        ).fetchone()
        if row is None:
            return None
        self._keep(key, row[0])
        return int(row[0])

    def add(self, key: Key) -> int:
        """Returns the number of a key that has none, given out now."""
        number = self._count
        self._count += 1
        self._keep(key, number)
        return number

    def _keep(self, key: Key, number: int) -> None:
        self._known[key] = number
        if len(self._known) > self._kept + _BATCH:
            self._spill()

    def _spill(self) -> None:
        if self._spilled is None:
            # A temporary database on disk, which nobody else can open (sqlite.org/inmemorydb.html).
            self._spilled = sqlite3.connect("", isolation_level=None)
            self._spilled.execute(
                "CREATE TABLE spilled (key BLOB PRIMARY KEY, number INTEGER) WITHOUT ROWID"
            )
        oldest = list(islice(self._known.items(), _BATCH))
        self._spilled.execute("BEGIN")
        self._spilled.executemany(
            "INSERT OR IGNORE INTO spilled VALUES (?, ?)",
            [(_bytes(key), number) for key, number in oldest],
        )
        self._spilled.execute("COMMIT")
        for key, _ in oldest:
            del self._known[key]


def _bytes(key: Key) -> bytes:
    # From version 3 on equal keys may be written in different bytes (Python's library, marshal).
    return marshal.dumps(key, 2)
