# SPDX-License-Identifier: Apache-2.0
"""Reads a capture into a Profile, bulk columns through numpy.

A capture whose recording was cut short has stacks without frames: they are shown by module and
offset from the mappings, so that nothing recorded is lost.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.capture.raw_frames import RawFrames
from aiflame.agent.capture.schema import APPLICATION_ID, FACT_PREFIX, SCHEMA_VERSION
from aiflame.agent.errors import CaptureError
from aiflame.agent.model import (
    FRAME_DTYPE,
    SAMPLE_DTYPE,
    WAIT_DTYPE,
    Binary,
    FrameKind,
    Function,
    Loss,
    Process,
    Profile,
    Recording,
    Stacks,
    Thread,
)

# The id columns that rows of other tables refer to.
_IDS_OF = {
    "processes": "SELECT id FROM processes ORDER BY id",
    "threads": "SELECT id FROM threads ORDER BY id",
    "binaries": "SELECT id FROM binaries ORDER BY id",
    "functions": "SELECT id FROM functions ORDER BY id",
    "stacks": "SELECT id FROM stacks ORDER BY id",
}


def read_capture(path: Path) -> Profile:
    """Reads a whole capture.

    Raises:
        CaptureError: No such file, cut, foreign, damaged, or of a newer schema.
    """
    if not path.is_file():
        raise CaptureError(f"no such capture: {path}")
    try:
        with path.open("rb") as file:
            magic = file.read(16)
        if magic != b"SQLite format 3\0":
            raise CaptureError(f"not an aiflame capture: {path}")
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            _check_header(database, path)
            return _Reader(database).profile()
        finally:
            database.close()
    except OSError as error:
        raise CaptureError(f"cannot read {path}: {error.strerror}") from error
    except (sqlite3.Error, KeyError, ValueError, IndexError, TypeError, OverflowError) as error:
        raise CaptureError(
            f"damaged capture: {path}: {error}", "record again; a copy may have been cut short"
        ) from error


def _check_header(database: sqlite3.Connection, path: Path) -> None:
    if database.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise CaptureError(f"not an aiflame capture: {path}")
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise CaptureError(
            f"{path} has schema {version}, this aiflame reads {SCHEMA_VERSION}",
            "use the version of aiflame that recorded it, or a newer one",
        )


class _Reader:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._raw = RawFrames(database)

    def _rows(self, query: str) -> list[Any]:
        return self._database.execute(query).fetchall()

    def _indexes(self, table: str) -> dict[int, int]:
        ids = self._rows(_IDS_OF[table])
        return {row[0]: index for index, row in enumerate(ids)}

    def _table(self, query: str, dtype: np.dtype[Any]) -> npt.NDArray[np.void]:
        return np.array(self._rows(query), dtype=dtype)

    def profile(self) -> Profile:
        process_index = self._indexes("processes")
        binary_index = self._indexes("binaries")
        stacks, functions, frames = self._stacks(binary_index)
        return Profile(
            recording=self._recording(),
            processes=tuple(
                Process(*row)
                for row in self._rows(
                    "SELECT pid, parent_pid, name, executable, command_line, cgroup, container_id,"
                    " started_ns, exited_ns FROM processes ORDER BY id"
                )
            ),
            threads=tuple(
                Thread(process_index[row[0]], *row[1:])
                for row in self._rows(
                    "SELECT process_id, tid, name, on_cpu_ns, observed_ns FROM threads ORDER BY id"
                )
            ),
            binaries=tuple(
                Binary(*row)
                for row in self._rows("SELECT path, build_id FROM binaries ORDER BY id")
            ),
            functions=functions,
            frames=frames,
            stacks=stacks,
            samples=self._samples(),
            waits=self._waits(),
            losses=tuple(Loss(*row) for row in self._rows("SELECT * FROM losses ORDER BY name")),
        )

    def _recording(self) -> Recording:
        meta = dict(self._rows("SELECT key, value FROM meta ORDER BY rowid"))
        facts = [
            (key.removeprefix(FACT_PREFIX), value)
            for key, value in meta.items()
            if key.startswith(FACT_PREFIX)
        ]
        if meta.get("complete") != "1":
            facts.append(("incomplete", "the recording did not end in order"))
        return Recording(
            aiflame_version=meta["aiflame_version"],
            started_unix_ns=int(meta["started_unix_ns"]),
            duration_ns=int(meta.get("duration_ns", 0)),
            period_ns=int(meta["period_ns"]),
            command=meta["command"],
            target=meta["target"],
            recorder_cpu_ns=int(meta.get("recorder_cpu_ns", 0)),
            recorder_peak_rss_bytes=int(meta.get("recorder_peak_rss_bytes", 0)),
            facts=tuple(facts),
        )

    def _stacks(
        self, binary_index: dict[int, int]
    ) -> tuple[Stacks, tuple[Function, ...], npt.NDArray[np.void]]:
        function_index = self._indexes("functions")
        functions = [
            Function(FrameKind(kind), name, None if binary is None else binary_index[binary], file)
            for kind, name, binary, file in self._rows(
                "SELECT kind, name, binary_id, file FROM functions ORDER BY id"
            )
        ]
        frame_rows = self._rows("SELECT id, function_id, line, address, inlined FROM frames")
        frame_rows.sort()
        frames = [(function_index[f], line, a, inl) for _, f, line, a, inl in frame_rows]
        # Frame ids count up from 0 in captures that aiflame wrote; other writers' are mapped.
        frame_ids = np.array([row[0] for row in frame_rows], np.uint32)
        rows = self._rows(
            "SELECT process_id, kernel_depth, end_reason, addresses, frames FROM stacks ORDER BY id"
        )
        blobs = [row[4] or b"" for row in rows]
        ids = _positions(np.frombuffer(b"".join(blobs), "<u4"), frame_ids)
        lengths = np.array([len(blob) // 4 for blob in blobs], np.uint64)
        offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(lengths)])
        if any(row[4] is None for row in rows):
            parts = [ids[offsets[i] : offsets[i + 1]] for i in range(len(rows))]
            for index, (process, depth, _, addresses, blob) in enumerate(rows):
                if blob is None:
                    parts[index] = self._raw.frames(
                        process, depth, addresses, functions, frames, binary_index
                    )
            ids = np.concatenate(parts)
            lengths = np.array([len(part) for part in parts], np.uint64)
            offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(lengths)])
        return (
            Stacks(
                offsets=offsets.astype(np.uint64),
                frames=ids.astype(np.uint32),
                ends=np.array([row[2] for row in rows], np.uint8),
            ),
            tuple(functions),
            np.array(frames, FRAME_DTYPE),
        )

    def _samples(self) -> npt.NDArray[np.void]:
        rows = self._table(
            "SELECT stack_id, thread_id, class, SUM(count), SUM(ns) FROM samples"
            " GROUP BY stack_id, thread_id, class ORDER BY stack_id, thread_id, class",
            SAMPLE_DTYPE,
        )
        return self._renumbered(rows)

    def _waits(self) -> npt.NDArray[np.void]:
        rows = self._table(
            "SELECT stack_id, thread_id, start_ns, blocked_ns, runnable_ns FROM waits"
            " ORDER BY start_ns, thread_id",
            WAIT_DTYPE,
        )
        return self._renumbered(rows)

    def _renumbered(self, rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        for column, table_name in (("stack", "stacks"), ("thread", "threads")):
            table = np.array([row[0] for row in self._rows(_IDS_OF[table_name])], np.uint32)
            rows[column] = _positions(rows[column], table)
        return rows


def _positions(
    ids: npt.NDArray[np.uint32], ordered: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Turns ids into their positions in an ordered array of all ids."""
    at = np.searchsorted(ordered, ids).astype(np.uint32)
    if len(ids) and (
        not len(ordered) or bool((ordered[np.minimum(at, len(ordered) - 1)] != ids).any())
    ):
        raise ValueError("a row refers to another that is missing")
    return at
