# SPDX-License-Identifier: Apache-2.0
"""Writes a capture: rows in bulk, one transaction an interval.

The file lies where only the recorder can reach it (see `workspace`); what was committed is a
readable capture as long as its writer lives. Writing knows nothing of how rows came about.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from aiflame.agent.capture.labels import label_rows
from aiflame.agent.capture.processes import processes_of
from aiflame.agent.capture.removal import remove_processes
from aiflame.agent.capture.schema import APPLICATION_ID, SCHEMA_VERSION, schema_sql
from aiflame.agent.errors import AiflameError, DiskFull
from aiflame.agent.limits import room_hint
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.profile import Process

# Columns of each table that rows are given for: the first ones of schema.sql.
_COLUMNS = {
    "processes": 10,
    "process_labels": 3,
    "threads": 6,
    "binaries": 3,
    "mappings": 6,
    "functions": 5,
    "frames": 5,
    "stacks": 7,
    "samples": 6,
    "intervals": 3,
    "waits": 5,
    "thread_accounts": 7,
    "delays": 4,
    "losses": 3,
    "devices": 7,
    "api_functions": 4,
    "kernels": 5,
    "kernel_codes": 5,
    "code_objects": 4,
    "instructions": 5,
    "stall_reasons": 3,
    "api_calls": 9,
    "api_events": 14,
    "launches": 10,
    "device_samples": 9,
    "kernel_times": 9,
    "device_readings": 6,
}


class CaptureWriter:
    """An open capture.

    Args:
        path: A file in a directory that nobody else may write to: SQLite opens it, and its journal,
            by path.
        is_new: It is not there yet; else more is written to it.

    Raises:
        AiflameError: The file cannot be made.
    """

    def __init__(self, path: Path, *, is_new: bool = True) -> None:
        self.path = path
        try:
            self._database = sqlite3.connect(path, isolation_level=None)
            # A crash leaves the segments that it is made of (sinks.segments); what is needed is
            # that rows which are not committed can be taken back.
            self._database.execute("PRAGMA synchronous = OFF")
            self._database.execute("PRAGMA journal_mode = MEMORY")
            if is_new:
                self._database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                self._database.executescript(schema_sql())
            self._insert = {table: self._statement(table) for table in _COLUMNS}
            self._database.execute("BEGIN")
        except sqlite3.Error as error:
            raise _explained(error, path) from error

    def _statement(self, table: str) -> str:
        # Columns after these have a default.
        found = self._database.execute(f"PRAGMA table_info({table})").fetchall()
        names = ", ".join(row[1] for row in found[: _COLUMNS[table]])
        marks = ", ".join("?" * _COLUMNS[table])
        return f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"  # noqa: S608 - our own

    def put(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        """Inserts rows, replacing those with the same key.

        Raises:
            DiskFull: Nothing of the open transaction is kept.
        """
        self._many(self._insert[table], rows)

    def put_threads(self, rows: Iterable[tuple[int, int, int, str]]) -> None:
        """Enters (id, process_id, tid, name), or gives those that are there this name."""
        self._many(
            "INSERT INTO threads VALUES (?, ?, ?, ?, 0, 0) ON CONFLICT (id)"
            " DO UPDATE SET name = excluded.name WHERE name <> excluded.name",
            rows,
        )

    def add_thread_times(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """Adds (on_cpu_ns, observed_ns, id) to threads."""
        self._many(
            "UPDATE threads SET on_cpu_ns = on_cpu_ns + ?, observed_ns = observed_ns + ?"
            " WHERE id = ?",
            rows,
        )

    def processes(self) -> tuple[Process, ...]:
        """Returns the processes in it, in the order of their ids."""
        return processes_of(self._database)

    def put_labels(self, labels: Sequence[Labels | None]) -> None:
        """Writes whose processes were, in the order of their ids; None of one that is nobody's."""
        ids = self._database.execute("SELECT id FROM processes ORDER BY id").fetchall()
        self.put("process_labels", label_rows([id_ for (id_,) in ids], labels))

    def remove_processes(self, is_removed: Sequence[bool]) -> None:
        """Removes processes with all that was known through them alone.

        Args:
            is_removed: Of each process, in the order of their ids.

        Raises:
            DiskFull: Nothing of the open transaction is kept.
        """
        ids = [id_ for (id_,) in self._database.execute("SELECT id FROM processes ORDER BY id")]
        try:
            removed = [id_ for id_, is_out in zip(ids, is_removed, strict=True) if is_out]
            remove_processes(self._database, removed)
        except sqlite3.Error as error:
            raise _explained(error, self.path) from error

    def remove_command_lines(self) -> None:
        """Removes what processes were called with.

        Raises:
            DiskFull: Nothing of the open transaction is kept.
        """
        self._many("UPDATE processes SET command_line = '' WHERE command_line <> ''", [()])

    def put_meta(self, facts: dict[str, str | int]) -> None:
        """Writes key/value facts; words of a command line need not be UTF-8."""
        rows = (
            (key, os.fsencode(str(value)).decode(errors="replace")) for key, value in facts.items()
        )
        self._many("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def ids(self, table: str) -> set[int]:
        """Returns the ids in a table."""
        return {id_ for (id_,) in self._database.execute(f"SELECT id FROM {table}")}  # noqa: S608

    def newest_threads(self) -> dict[tuple[int, int], int]:
        """Returns the ids of threads by pid and tid, of those that came again the newest one's."""
        query = "SELECT p.pid, t.tid, t.id FROM threads t JOIN processes p ON p.id = t.process_id"
        rows = self._database.execute(f"{query} ORDER BY t.id")
        return {(pid, tid): id_ for pid, tid, id_ in rows}

    def newest_processes(self) -> dict[int, int]:
        """Returns the ids of processes by pid, of those that came again the newest one's."""
        return dict(self._database.execute("SELECT pid, id FROM processes ORDER BY id"))

    def drop_meta(self, key: str) -> None:
        """Takes a fact back."""
        self._many("DELETE FROM meta WHERE key = ?", [(key,)])

    def drop_mappings(self, processes: Iterable[int]) -> None:
        """Removes the mappings of processes, which are then written anew."""
        self._many("DELETE FROM mappings WHERE process_id = ?", ((row,) for row in processes))

    def set_losses(self, rows: Iterable[tuple[str, int, str]]) -> None:
        """Writes losses as (name, count, meaning) in the place of those that are there."""
        self._many("DELETE FROM losses", [()])
        self.put("losses", rows)

    def binary_id(self, path: str, build_id: str) -> int:
        """Returns the id of a binary, which is added if it is not there."""
        words = (path, build_id)
        find = "SELECT id FROM binaries WHERE path = ? AND build_id = ?"
        found = self._database.execute(find, words).fetchone()
        if found is None:
            add = "INSERT INTO binaries (path, build_id) VALUES (?, ?)"
            self._many(add, [words])
            found = self._database.execute(find, words).fetchone()
        return int(found[0])

    def _many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        try:
            self._database.executemany(statement, rows)
        except sqlite3.Error as error:
            raise _explained(error, self.path) from error

    def commit(self) -> None:
        """Makes everything so far part of the readable capture."""
        try:
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise _explained(error, self.path) from error
        finally:
            if not self._database.in_transaction:
                self._database.execute("BEGIN")

    def rollback(self) -> None:
        """Forgets what was not committed."""
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")
        self._database.execute("BEGIN")

    def close(self) -> None:
        """Closes the file; what was not committed is forgotten."""
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")
        self._database.close()


def _explained(error: sqlite3.Error, path: Path) -> AiflameError:
    if "full" in str(error) or "disk I/O" in str(error):
        return DiskFull(f"cannot write {path}: {error}", room_hint())
    return AiflameError(f"cannot write {path}: {error}")
