# SPDX-License-Identifier: Apache-2.0
"""Reads a capture into a Profile, bulk columns through numpy.

A capture whose recording was cut short has stacks without frames: they are shown by module and
offset from the mappings, so that nothing recorded is lost.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.allocator import without_garbage_collection
from aiflame.agent.capture.columns import check_columns, check_table
from aiflame.agent.capture.equal_stacks import with_equal_stacks_merged
from aiflame.agent.capture.gpu_reader import GpuReader
from aiflame.agent.capture.integer_tables import Integers, IntegerTables, Words
from aiflame.agent.capture.labels import read_labels
from aiflame.agent.capture.processes import processes_of
from aiflame.agent.capture.raw_frames import RawFrames
from aiflame.agent.capture.schema import (
    APPLICATION_ID,
    FACT_PREFIX,
    READABLE_VERSIONS,
    SCHEMA_VERSION,
)
from aiflame.agent.capture.spans import spread_waits
from aiflame.agent.errors import CaptureError
from aiflame.agent.model.accounts import DELAY_CAUSES, THREAD_ACCOUNT_DTYPE, Accounts, Delay
from aiflame.agent.model.batch import Labels
from aiflame.agent.model.gpu import GpuProfile
from aiflame.agent.model.profile import (
    FRAME_DTYPE,
    NS_PER_S,
    SAMPLE_DTYPE,
    SPAN_DTYPE,
    WAIT_DTYPE,
    Binary,
    FrameKind,
    Function,
    GilState,
    Loss,
    Profile,
    Recording,
    SampleClass,
    Stacks,
    StopReason,
    Thread,
)

I64 = npt.NDArray[np.int64]

# Of a number that is not negative.
_INT64_BITS = 63

# An interval begins in it at most, and is no longer.
_LAST_SECOND = 2**31

# Stacks are as large as all the rest: so many are Python objects at a time.
_STACKS_AT_ONCE = 4_096

_NO_INTEGERS: I64 = np.zeros(0, np.int64)
_NO_WORDS: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)


def read_capture(path: Path, *, with_spans: bool = True) -> Profile:
    """Reads a whole capture.

    Args:
        path: Of the file.
        with_spans: Also in which seconds time was, which takes as much memory as all the rest.

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
            with path.open("rb") as file, without_garbage_collection():
                return _Reader(database, file.fileno(), version).profile(with_spans)
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
    def __init__(self, database: sqlite3.Connection, file: int, version: int) -> None:
        self._database = database
        self._version = version
        self._tables = IntegerTables(database, file)
        self._raw = RawFrames(database)

    def _rows(self, query: str) -> list[Any]:
        return self._database.execute(query).fetchall()

    def _ids(self, table: str) -> Integers:
        return self._tables.columns(table, ("id",))[0]

    def _indexes(self, table: str) -> dict[int, int]:
        return {row: index for index, row in enumerate(self._ids(table).tolist())}

    def profile(self, with_spans: bool) -> Profile:
        process_index = self._indexes("processes")
        binary_index = self._indexes("binaries")
        stack_ids, stacks, functions, frames = self._stacks(binary_index)
        samples, spans = self._samples(stack_ids, with_spans)
        waits = self._waits(stack_ids)
        threads = self._threads(process_index)
        gpu = GpuProfile()
        if self._version > 2:
            gpu = GpuReader(self._database, self._tables, self._version).profile()
        bounds_ns = self._interval_bounds()
        return Profile(
            recording=replace(self._recording(), window_s=_longest_s(bounds_ns)),
            processes=processes_of(self._database),
            threads=threads,
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
            gpu=with_equal_stacks_merged(gpu, stacks, threads),
            labels=self._labels(process_index),
            spans=spread_waits(spans, samples, waits, bounds_ns),
            accounts=self._accounts(process_index),
        )

    def _accounts(self, process_index: dict[int, int]) -> Accounts:
        if self._version < 10:
            return Accounts()
        names = ["on_cpu_ns", "run_queue_ns", "timeslices", "misaligned_ns", "open_wait_ns"]
        names += ["has_ended"] if self._version > 10 else []
        thread, *times = self._integers("thread_accounts", ("thread_id", *names))
        rows = np.zeros(len(thread), THREAD_ACCOUNT_DTYPE)
        rows["thread"] = _positions(thread, self._ids("threads"))
        if len(np.unique(thread)) != len(thread):
            raise ValueError("several accounts of a thread")
        for name, column in zip(names, times, strict=True):
            rows[name] = column
            if float(np.sum(column, dtype=float)) >= 1 << _INT64_BITS:
                raise ValueError("more time than there is")
        delays = []
        for process, cause, count, ns in self._rows("SELECT * FROM delays ORDER BY rowid"):
            if cause in DELAY_CAUSES:  # a later kernel may tell of more
                if count < 0 or ns < 0:
                    raise ValueError("a negative number")
                delays.append(Delay(process_index[process], cause, count, ns))
        found = self._rows("SELECT value FROM meta WHERE key = 'interrupted_ns'")
        return Accounts(rows, _number(found[0][0]) if found else 0, tuple(delays))

    def _labels(self, process_index: dict[int, int]) -> tuple[Labels | None, ...]:
        if self._version < 9:
            return ()
        return read_labels(
            self._rows("SELECT process_id, name, value FROM process_labels"), process_index
        )

    def _threads(self, process_index: dict[int, int]) -> tuple[Thread, ...]:
        names = ("process_id", "tid", "on_cpu_ns", "observed_ns")
        process, tid, on_cpu_ns, observed_ns = (
            column.tolist() for column in self._tables.columns("threads", names)
        )
        words = chain.from_iterable(self._rows("SELECT name FROM threads ORDER BY id"))
        processes = map(process_index.__getitem__, process)
        return tuple(map(Thread, processes, tid, words, on_cpu_ns, observed_ns))

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
            started_unix_ns=_number(meta["started_unix_ns"]),
            duration_ns=_number(meta.get("duration_ns", "0")),
            period_ns=_number(meta["period_ns"]),
            command=meta["command"],
            target=meta["target"],
            recorder_cpu_ns=_number(meta.get("recorder_cpu_ns", "0")),
            recorder_peak_rss_bytes=_number(meta.get("recorder_peak_rss_bytes", "0")),
            facts=tuple(facts),
        )

    def _stacks(
        self, binary_index: dict[int, int]
    ) -> tuple[I64, Stacks, tuple[Function, ...], npt.NDArray[np.void]]:
        """Returns the ids of stacks, the stacks, and what they are made of."""
        kinds = {int(kind): kind for kind in FrameKind}
        functions = [
            Function(kinds[kind], name, None if binary is None else binary_index[binary], file)
            for kind, name, binary, file in self._rows(
                "SELECT kind, name, binary_id, file FROM functions ORDER BY id"
            )
        ]
        frame_ids, frames = self._frames()
        columns = ("id", "end_reason", *(("gil",) if self._version > 1 else ()))
        found = self._tables.columns_and_words("stacks", columns, "frames")
        if found is None:
            found = self._stacks_by_rows(columns)
        (ids, ends, *gils), words = found
        flat, offsets = _positions(words.words, frame_ids), _offsets(words.lengths)
        if words.is_null.any():
            flat, offsets, frames = self._with_raw(
                flat, offsets, words.is_null, functions, frames, binary_index
            )
        gil = gils[0] if gils else np.zeros(len(ids), np.int32)
        stacks = Stacks(offsets, flat, _values(ends, StopReason), _values(gil, GilState))
        return ids, stacks, tuple(functions), frames

    def _frames(self) -> tuple[Integers, npt.NDArray[np.void]]:
        """Returns the ids of frames, and these."""
        names = ("id", "function_id", "line", "address", "inlined")
        ids, function, line, address, inlined = self._integers("frames", names)
        if int(line.max(initial=0)) >> 32:
            raise ValueError("a line that no file has")
        frames = np.zeros(len(ids), FRAME_DTYPE)
        frames["function"] = _positions(function, self._ids("functions"))
        frames["line"], frames["address"], frames["inlined"] = line, address, inlined
        return ids, frames

    def _stacks_by_rows(self, columns: Sequence[str]) -> tuple[list[Integers], Words]:
        check_table(self._database, self._version, "stacks")
        query = f"SELECT {', '.join(columns)}, frames FROM stacks ORDER BY id"  # noqa: S608
        found = self._database.execute(query)
        integers: list[list[I64]] = [[_NO_INTEGERS] for _ in columns]
        lengths: list[I64] = [_NO_INTEGERS]
        is_null: list[npt.NDArray[np.bool_]] = [_NO_INTEGERS > 0]
        words: list[npt.NDArray[np.uint32]] = [_NO_WORDS]
        while rows := found.fetchmany(_STACKS_AT_ONCE):
            *parts, blobs = zip(*rows, strict=True)
            for column, part in zip(integers, parts, strict=True):
                column.append(np.fromiter(part, np.int64))
            whole = [blob or b"" for blob in blobs]
            lengths.append(np.fromiter(map(len, whole), np.int64) // 4)
            is_null.append(np.array([blob is None for blob in blobs]))
            words.append(np.frombuffer(b"".join(whole), "<u4"))
        return (
            [np.concatenate(column) for column in integers],
            Words(np.concatenate(lengths), np.concatenate(is_null), np.concatenate(words)),
        )

    def _with_raw(
        self,
        flat: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.uint64],
        is_raw: npt.NDArray[np.bool_],
        functions: list[Function],
        frames: npt.NDArray[np.void],
        binary_index: dict[int, int],
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64], npt.NDArray[np.void]]:
        """Returns frames and offsets of all stacks, with those that have no frames yet.

        And all frames, with those that these made.
        """
        made = [*map(tuple, frames.tolist())]
        parts = [flat[offsets[i] : offsets[i + 1]] for i in range(len(is_raw))]
        for table in ("stacks", "mappings"):
            check_table(self._database, self._version, table)
        # Only here: the raw addresses are twice as large as all the rest of a capture.
        raw = self._rows(
            "SELECT process_id, kernel_depth, addresses FROM stacks WHERE frames IS NULL"
            " ORDER BY id"
        )
        for index, (process, depth, addresses) in zip(
            np.flatnonzero(is_raw).tolist(), raw, strict=True
        ):
            parts[index] = self._raw.frames(
                process, depth, addresses, functions, made, binary_index
            )
        lengths = np.fromiter(map(len, parts), np.int64)
        return np.concatenate(parts), _offsets(lengths), np.array(made, FRAME_DTYPE)

    def _integers(self, table: str, columns: Sequence[str]) -> list[Integers]:
        found = self._tables.columns(table, columns)
        if any(int(column.min(initial=0)) < 0 for column in found):
            raise ValueError("a negative number")
        return found

    def _samples(
        self, stack_ids: I64, with_spans: bool
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        # Added up here: as a GROUP BY, SQLite's sorting takes longer than all the rest of a report.
        columns = ("interval", "stack_id", "thread_id", "class", "count", "ns")
        interval, stack, thread, klass, count, ns = self._integers("samples", columns)
        if int(klass.max(initial=0)) > max(SampleClass) or float(np.sum(ns, dtype=float)) >= 2**63:
            raise ValueError("an unknown class, or more time than there is")
        if int(interval.max(initial=0)) >> 32:
            raise ValueError("a sample later than there can be")
        thread_ids = self._ids("threads")
        keys = _positions(stack, stack_ids).astype(np.int64)
        thread_bits, class_bits = len(thread_ids).bit_length(), max(SampleClass).bit_length()
        keys <<= thread_bits
        keys |= _positions(thread, thread_ids)
        keys <<= class_bits
        keys |= klass
        del stack, thread, klass
        order = _order(keys, interval)
        # Each replaces what it is made of: these are the largest arrays of a report.
        keys = keys[order]
        interval = interval[order]
        count = count[order]
        ns = ns[order]
        del order
        is_first = np.diff(keys, prepend=np.int64(-1)) != 0
        first = np.flatnonzero(is_first)
        rows = np.zeros(len(first), SAMPLE_DTYPE)
        keys = keys[first]
        rows["klass"] = keys & (1 << class_bits) - 1
        rows["thread"] = keys >> class_bits & (1 << thread_bits) - 1
        rows["stack"] = keys >> class_bits + thread_bits
        del keys
        rows["count"], rows["ns"] = _sums(count, first), _sums(ns, first)
        if not with_spans:
            return rows, np.zeros(0, SPAN_DTYPE)
        # A second may have been drained more than once.
        part = np.flatnonzero(is_first | (np.diff(interval, prepend=np.int64(-1)) != 0))
        spans = np.zeros(len(part), SPAN_DTYPE)
        spans["sample"] = (np.cumsum(is_first, dtype=np.int32) - 1)[part]
        spans["first_s"] = interval[part]
        spans["seconds"] = 1
        spans["count"], spans["ns"] = _sums(count, part), _sums(ns, part)
        return rows, spans

    def _interval_bounds(self) -> dict[int, tuple[int, int]]:
        """Returns from when to when intervals were that are no second each."""
        if self._version < 9:
            return {}
        if self._version < 11:
            interval, seconds = self._integers("intervals", ("interval", "seconds"))
            if max(int(interval.max(initial=0)), int(seconds.max(initial=0))) > _LAST_SECOND:
                raise ValueError("an interval later or longer than there can be")
            begin_ns = interval.astype(np.int64) * NS_PER_S
            end_ns = begin_ns + np.maximum(seconds, 1).astype(np.int64) * NS_PER_S
        else:
            names = ("interval", "begin_ns", "end_ns")
            interval, begin_ns, end_ns = self._integers("intervals", names)
            if int(end_ns.max(initial=0)) > _LAST_SECOND * NS_PER_S or (begin_ns >= end_ns).any():
                raise ValueError("an interval that ends later than there can be, or at once")
        bounds = zip(begin_ns.tolist(), end_ns.tolist(), strict=True)
        return dict(zip(interval.tolist(), bounds, strict=True))

    def _waits(self, stack_ids: I64) -> npt.NDArray[np.void]:
        columns = ("stack_id", "thread_id", "start_ns", "blocked_ns", "runnable_ns")
        stack, thread, start_ns, blocked_ns, runnable_ns = self._integers("waits", columns)
        order = np.lexsort((thread, start_ns))
        rows = np.zeros(len(order), WAIT_DTYPE)
        rows["stack"] = _positions(stack, stack_ids)[order]
        rows["thread"] = _positions(thread, self._ids("threads"))[order]
        rows["start_ns"] = start_ns[order]
        rows["blocked_ns"] = blocked_ns[order]
        rows["runnable_ns"] = runnable_ns[order]
        return rows


def _longest_s(bounds_ns: Mapping[int, tuple[int, int]]) -> int:
    """Returns how long intervals are at most; some milliseconds are of a busy host."""
    lengths_ns = [end - begin for begin, end in bounds_ns.values()]
    return max(1, round(max(lengths_ns, default=0) / NS_PER_S))


def _number(text: str) -> int:
    """Returns a number of the recording; the largest are as those of its tables."""
    number = int(text)
    if not 0 <= number < 1 << _INT64_BITS:
        raise ValueError("a number of the recording is out of range")
    return number


def _order(keys: I64, interval: Integers) -> npt.NDArray[np.intp]:
    """Returns the order of rows by key and, of one key, in time."""
    columns = (keys, interval, np.arange(len(keys), dtype=np.int64))
    bits = [int(column.max(initial=0)).bit_length() for column in columns]
    if sum(bits) > _INT64_BITS:
        order: npt.NDArray[np.intp] = np.lexsort((interval, keys))
        return order
    # As one number each: numpy sorts those ten times as fast as it finds out their order.
    numbers: I64 = keys << bits[1]
    numbers |= interval
    numbers <<= bits[2]
    numbers |= columns[2]
    numbers.sort()
    numbers &= (1 << bits[2]) - 1
    return numbers


def _sums(values: Integers, starts: npt.NDArray[np.intp]) -> Integers:
    """Returns the sums of parts that begin at `starts`."""
    if len(starts) == len(values):  # also where there are none
        return values
    sums: I64 = np.add.reduceat(values, starts, dtype=np.int64)
    return sums


def _values(column: Integers, known: type[StopReason] | type[GilState]) -> npt.NDArray[np.uint8]:
    if bool(((column < 0) | (column > max(known))).any()):
        raise ValueError(f"an unknown {known.__name__} of a stack")
    return column.astype(np.uint8)


def _offsets(lengths: I64) -> npt.NDArray[np.uint64]:
    return np.cumsum(np.concatenate([[0], lengths])).astype(np.uint64)


def _positions(
    ids: npt.NDArray[np.integer[Any]], ordered: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.uint32]:
    """Turns ids into their positions in an ordered array of all ids, none of them twice."""
    if len(ordered) and int(ordered[0]) == 0 and int(ordered[-1]) == len(ordered) - 1:
        # As aiflame writes them: each id is its own position.
        at = ids.astype(np.uint32, copy=False)
        is_missing = bool((ids >= len(ordered)).any())
    else:
        at = np.searchsorted(ordered, ids).astype(np.uint32)
        is_missing = len(ids) > 0 and (
            not len(ordered) or bool((ordered[np.minimum(at, len(ordered) - 1)] != ids).any())
        )
    if is_missing:
        raise ValueError("a row refers to another that is missing")
    return at
