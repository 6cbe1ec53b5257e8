# SPDX-License-Identifier: Apache-2.0
"""Whether a capture's columns hold what schema.sql says.

SQLite keeps whatever is put into a column, and a capture may come from anywhere: a report that
meets a number instead of a name would end in an internal error. Of the large tables, all of whose
columns the reader turns into integers itself, only the kind is looked at.
"""

from __future__ import annotations

import contextlib
import sqlite3

from aiflame.agent.capture.schema import (
    COLUMNS_SINCE_VERSION_5,
    COLUMNS_SINCE_VERSION_6,
    COLUMNS_SINCE_VERSION_7,
    COLUMNS_SINCE_VERSION_8,
    COLUMNS_SINCE_VERSION_11,
    SINCE_VERSION_2,
    SINCE_VERSION_3,
    SINCE_VERSION_4,
    SINCE_VERSION_5,
    SINCE_VERSION_8,
    SINCE_VERSION_9,
    SINCE_VERSION_10,
    schema_sql,
)

_READ_AS_INTEGERS = frozenset(
    {
        *("samples", "waits", "api_calls", "api_events", "device_samples", "kernel_times"),
        *("launches", "device_readings", "intervals", "thread_accounts"),
    }
)
# Mostly not read by rows: `check_table` is asked where they are.
_SELDOM_READ = frozenset({"stacks", "mappings"})


# Characters of a text, bytes of a blob. 381 frames with all that compilers inline into them take
# 100 KB; the recorder cuts command lines and names far below.
_MAX_LENGTH = 1 << 20
# But for code objects: the largest that is kept, if nothing of it can be compressed.
_MAX_LENGTHS = {("code_objects", "content"): (64 << 20) + (1 << 20)}


def check_columns(database: sqlite3.Connection, version: int) -> None:
    """Looks at the type of every value that is read by rows.

    Args:
        database: An open capture.
        version: Its schema's.

    Raises:
        ValueError: A table is missing or is a view, or a value is of another type or too large.
        sqlite3.Error: A column is missing, or the file is damaged.
    """
    # A view could compute forever.
    found = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE rootpage")}
    for table, condition in _conditions(version).items():
        if table not in found:
            raise ValueError(f"no table {table}")
        if table not in _READ_AS_INTEGERS | _SELDOM_READ:
            _check(database, table, condition)


def check_table(database: sqlite3.Connection, version: int, table: str) -> None:
    """Looks at the type of every value of one table, as `check_columns` does."""
    _check(database, table, _conditions(version)[table])


def _check(database: sqlite3.Connection, table: str, condition: str) -> None:
    query = f"SELECT 1 FROM {table} WHERE {condition} LIMIT 1"  # noqa: S608 - our own names
    if database.execute(query).fetchone():
        raise ValueError(f"a value in {table} is of the wrong type, or larger than any")


def _conditions(version: int) -> dict[str, str]:
    """Returns for each table of the schema what is true of a row that holds another type."""
    with contextlib.closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(schema_sql())
        tables = empty.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {
            table: " OR ".join(
                _is_wrong(table, name, kind, bool(not_null or key))
                for _, name, kind, not_null, _, key in empty.execute(f"PRAGMA table_info({table})")
                if (version > 1 or (table, name) not in SINCE_VERSION_2)
                and (version > 4 or (table, name) not in COLUMNS_SINCE_VERSION_5)
                and (version > 5 or (table, name) not in COLUMNS_SINCE_VERSION_6)
                and (version > 6 or (table, name) not in COLUMNS_SINCE_VERSION_7)
                and (version > 7 or (table, name) not in COLUMNS_SINCE_VERSION_8)
                and (version > 10 or (table, name) not in COLUMNS_SINCE_VERSION_11)
            )
            for (table,) in tables
            if (version > 2 or table not in SINCE_VERSION_3)
            and (version > 3 or table not in SINCE_VERSION_4)
            and (version > 4 or table not in SINCE_VERSION_5)
            and (version > 7 or table not in SINCE_VERSION_8)
            and (version > 8 or table not in SINCE_VERSION_9)
            and (version > 9 or table not in SINCE_VERSION_10)
        }


def _is_wrong(table: str, column: str, kind: str, is_required: bool) -> str:
    allowed = f"'{kind.lower()}'" if is_required else f"'{kind.lower()}', 'null'"
    wrong = f'typeof("{column}") NOT IN ({allowed})'
    if kind in ("TEXT", "BLOB"):
        most = _MAX_LENGTHS.get((table, column), _MAX_LENGTH)
        wrong += f' OR length("{column}") > {most}'
    return wrong
