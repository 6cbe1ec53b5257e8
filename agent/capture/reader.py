# SPDX-License-Identifier: Apache-2.0
"""Reads a capture into a Profile, bulk columns through numpy.

A capture whose recording was cut short has stacks without frames: they are shown by module and
offset from the mappings, so that nothing recorded is lost.
"""

from __future__ import annotations

import sqlite3
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.capture.columns import check_columns
from aiflame.agent.capture.gpu_reader import GpuReader
from aiflame.agent.capture.raw_frames import RawFrames
from aiflame.agent.capture.schema import (
    APPLICATION_ID,
    FACT_PREFIX,
    READABLE_VERSIONS,
    SCHEMA_VERSION,
)
from aiflame.agent.capture.spans import spread_waits
from aiflame.agent.errors import CaptureError
from aiflame.agent.model.gpu import GpuProfile
from aiflame.agent.model.profile import (
    FRAME_DTYPE,
    SAMPLE_DTYPE,
    SPAN_DTYPE,
    WAIT_DTYPE,
    Binary,
    FrameKind,
    Function,
    GilState,
    Loss,
    Process,
    Profile,
    Recording,
    SampleClass,
    StackEnd,
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
    try:
        if not path.exists():
            raise CaptureError(f"no such capture: {path}")
        if not path.is_file():  # reading a FIFO would wait for somebody to write
            raise CaptureError(f"not a file: {path}")
        with path.open("rb") as file:
            magic = file.read(16)
        if magic != b"SQLite format 3\0":
            raise CaptureError(f"not an aiflame capture: {path}")
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            version = _checked_version(database, path)
            check_columns(database, version)
            return _Reader(database, version).profile()
        finally:
            database.close()
    except OSError as error:
        raise CaptureError(f"cannot read {path}: {error.strerror}") from error
    except (sqlite3.Error, KeyError, ValueError, IndexError, TypeError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CaptureError(
            f"damaged capture: {path}: {reason}", "record again; a copy may have been cut short"
        ) from error


def _checked_version(database: sqlite3.Connection, path: Path) -> int:
    if database.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise CaptureError(f"not an aiflame capture: {path}")
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    if version not in READABLE_VERSIONS:
        raise CaptureError(
            f"{path} has schema {version}, this aiflame reads up to {SCHEMA_VERSION}",
            "use the version of aiflame that recorded it, or a newer one",
        )
    pages, page_bytes = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
    )
    # SQLite itself fills a last page that is not whole with zeros.
    if pages * page_bytes > path.stat().st_size:
        raise ValueError("the end is missing")
    return version


class _Reader:
    def __init__(self, database: sqlite3.Connection, version: int) -> None:
        self._database = database
        self._version = version
        self._raw = RawFrames(database)

    def _rows(self, query: str) -> list[Any]:
        return self._database.execute(query).fetchall()

    def _indexes(self, table: str) -> dict[int, int]:
        ids = self._rows(_IDS_OF[table])
        return {row[0]: index for index, row in enumerate(ids)}

    def _integers(self, query: str, columns: int) -> list[npt.NDArray[np.int64]]:
        """Returns the columns of a query; a million rows never exist as Python objects at once."""
        numbers = np.fromiter(chain.from_iterable(self._database.execute(query)), np.int64)
        if bool((numbers < 0).any()):
            raise ValueError("a negative number")
        return [numbers[column::columns] for column in range(columns)]

    def profile(self) -> Profile:
        process_index = self._indexes("processes")
        binary_index = self._indexes("binaries")
        stacks, functions, frames = self._stacks(binary_index)
        samples, spans = self._samples()
        waits = self._waits()
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
            samples=samples,
            waits=waits,
            losses=tuple(Loss(*row) for row in self._rows("SELECT * FROM losses ORDER BY name")),
            gpu=GpuReader(self._database, has_times=self._version > 3).profile()
            if self._version > 2
            else GpuProfile(),
            spans=spread_waits(spans, samples, waits),
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
            "SELECT process_id, kernel_depth, end_reason, frames FROM stacks ORDER BY id"
        )
        blobs = [row[3] or b"" for row in rows]
        ids = _positions(np.frombuffer(b"".join(blobs), "<u4"), frame_ids)
        offsets = _offsets([len(blob) // 4 for blob in blobs])
        unresolved = [index for index, row in enumerate(rows) if row[3] is None]
        if unresolved:
            parts = [ids[offsets[i] : offsets[i + 1]] for i in range(len(rows))]
            # Only here: the raw addresses are twice as large as all the rest of a capture.
            addresses = self._rows("SELECT addresses FROM stacks WHERE frames IS NULL ORDER BY id")
            for index, (raw,) in zip(unresolved, addresses, strict=True):
                process, depth = rows[index][:2]
                parts[index] = self._raw.frames(
                    process, depth, raw, functions, frames, binary_index
                )
            ids = np.concatenate(parts)
            offsets = _offsets([len(part) for part in parts])
        return (
            Stacks(offsets, ids, _values([row[2] for row in rows], StackEnd), self._gil()),
            tuple(functions),
            np.array(frames, FRAME_DTYPE),
        )

    def _gil(self) -> npt.NDArray[np.uint8]:
        if self._version < 2:
            return np.zeros(0, np.uint8)
        return _values(
            [row[0] for row in self._rows("SELECT gil FROM stacks ORDER BY id")], GilState
        )

    def _samples(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        # Added up here: as a GROUP BY, SQLite's sorting takes longer than all the rest of a report.
        interval, stack, thread, klass, count, ns = self._integers(
            "SELECT interval, stack_id, thread_id, class, count, ns FROM samples", 6
        )
        if int(klass.max(initial=0)) > max(SampleClass) or float(np.sum(ns, dtype=float)) >= 2**63:
            raise ValueError("an unknown class, or more time than there is")
        if int(interval.max(initial=0)) >> 32:
            raise ValueError("a sample later than there can be")
        stacks, threads = self._ids("stacks"), self._ids("threads")
        keys = _positions(stack, stacks).astype(np.int64)
        keys = (keys * len(threads) + _positions(thread, threads)) * len(SampleClass) + klass
        order = np.argsort(keys, kind="stable")
        if bool((np.diff(interval) < 0).any()):  # not in the order of time, as recordings are
            order = np.lexsort((interval, keys))
        keys, interval, count, ns = keys[order], interval[order], count[order], ns[order]
        is_first = np.diff(keys, prepend=np.int64(-1)) != 0
        first = np.flatnonzero(is_first)
        rows = np.zeros(len(first), SAMPLE_DTYPE)
        rows["klass"] = keys[first] % len(SampleClass)
        rows["thread"] = keys[first] // len(SampleClass) % max(len(threads), 1)
        rows["stack"] = keys[first] // len(SampleClass) // max(len(threads), 1)
        # A second may have been drained more than once.
        part = np.flatnonzero(is_first | (np.diff(interval, prepend=np.int64(-1)) != 0))
        spans = np.zeros(len(part), SPAN_DTYPE)
        spans["sample"] = (np.cumsum(is_first) - 1)[part]
        spans["first_s"] = interval[part]
        spans["seconds"] = 1
        if len(first):
            rows["count"] = np.add.reduceat(count, first)
            rows["ns"] = np.add.reduceat(ns, first)
            spans["count"] = np.add.reduceat(count, part)
            spans["ns"] = np.add.reduceat(ns, part)
        return rows, spans

    def _waits(self) -> npt.NDArray[np.void]:
        stack, thread, start_ns, blocked_ns, runnable_ns = self._integers(
            "SELECT stack_id, thread_id, start_ns, blocked_ns, runnable_ns FROM waits"
            " ORDER BY start_ns, thread_id",
            5,
        )
        rows = np.zeros(len(stack), WAIT_DTYPE)
        rows["stack"] = _positions(stack, self._ids("stacks"))
        rows["thread"] = _positions(thread, self._ids("threads"))
        rows["start_ns"], rows["blocked_ns"], rows["runnable_ns"] = (
            start_ns,
            blocked_ns,
            runnable_ns,
        )
        return rows

    def _ids(self, table: str) -> npt.NDArray[np.int64]:
        return np.fromiter(chain.from_iterable(self._database.execute(_IDS_OF[table])), np.int64)


def _values(values: list[int], known: type[StackEnd] | type[GilState]) -> npt.NDArray[np.uint8]:
    column = np.array(values, np.int64)
    if bool(((column < 0) | (column > max(known))).any()):
        raise ValueError(f"an unknown {known.__name__} of a stack")
    return column.astype(np.uint8)


def _offsets(lengths: list[int]) -> npt.NDArray[np.uint64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.uint64)]).astype(np.uint64)


def _positions(
    ids: npt.NDArray[np.integer[Any]], ordered: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.uint32]:
    """Turns ids into their positions in an ordered array of all ids, none of them twice."""
    if len(ordered) and int(ordered[0]) == 0 and int(ordered[-1]) == len(ordered) - 1:
        at = ids.astype(np.uint32)  # as aiflame writes them: each id is its own position
        is_missing = bool((ids >= len(ordered)).any())
    else:
        at = np.searchsorted(ordered, ids).astype(np.uint32)
        is_missing = len(ids) > 0 and (
            not len(ordered) or bool((ordered[np.minimum(at, len(ordered) - 1)] != ids).any())
        )
    if is_missing:
        raise ValueError("a row refers to another that is missing")
    return at
