# SPDX-License-Identifier: Apache-2.0
"""Reads the device half of a capture."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.capture.integer_tables import NULL, IntegerTables
from aiflame.agent.capture.schema import SINCE_VERSION_8
from aiflame.agent.model.gpu import (
    BUSY_UNKNOWN,
    CALL_DTYPE,
    CALL_EVENT_DTYPE,
    DEVICE_READING_DTYPE,
    DEVICE_SAMPLE_DTYPE,
    KERNEL_TIME_DTYPE,
    LAUNCH_DTYPE,
    LONGEST_READING_NS,
    MOST_PERMILLE,
    NO_END,
    NO_SIZE,
    NONE,
    ApiFunction,
    CodeObject,
    Device,
    Direction,
    GpuProfile,
    Instruction,
    Kernel,
    KernelCode,
    Operation,
    StallReason,
    Tier,
)
from aiflame.agent.model.profile import NS_PER_S

I64 = npt.NDArray[np.int64]

# Of the tables that are read row by row, what no number in them is.
_NEGATIVE = {
    "devices": "period_ns < 0",
    "kernel_codes": "size_bytes < 0",
    "code_objects": "size_bytes < 0",
    "instructions": "offset < 0 OR line < 0",
}

# Of which some kernel has no instructions: they are most of a capture, and nobody asks for others.
_UNLISTED_OBJECTS = (
    "SELECT id, family, size_bytes, content FROM code_objects WHERE id IN"
    " (SELECT object_id FROM kernel_codes WHERE id NOT IN"
    " (SELECT code_id FROM instructions WHERE text <> '')) ORDER BY id"
)

# Sums of these columns are taken in 64 bits.
_LARGEST_SUM = 2**63

# Seconds that are numbers of nanoseconds.
_LAST_INTERVAL = 2**32

# Times are added to each other, and buckets of the page to them.
_LAST_READING_NS = 2**62


class GpuReader:
    """Reads it once.

    Args:
        database: An open capture of a version that has it, its columns checked.
        tables: The same capture.
        version: Of its schema.

    Raises:
        ValueError, sqlite3.Error: From every method, for a damaged capture.
    """

    def __init__(self, database: sqlite3.Connection, tables: IntegerTables, version: int) -> None:
        self._database = database
        self._tables = tables
        self._version = version
        self._ids: dict[str, I64] = {}

    def profile(self) -> GpuProfile:
        """Returns it all."""
        for table, condition in _NEGATIVE.items():
            if self._version < 8 and table in SINCE_VERSION_8:
                continue
            query = f"SELECT 1 FROM {table} WHERE {condition} LIMIT 1"  # noqa: S608 - our own names
            if self._database.execute(query).fetchone():
                raise ValueError("a negative number")
        objects = self._rows(_UNLISTED_OBJECTS) if self._version > 7 else []
        details = "details" if self._version > 6 else "''"
        return GpuProfile(
            devices=tuple(
                Device(family, name, Tier(tier), *rest)
                for family, name, tier, *rest in self._rows(
                    f"SELECT family, name, tier, limit_reason, period_ns, {details} FROM devices"  # noqa: S608 - our own names
                    " ORDER BY id"
                )
            ),
            functions=tuple(
                ApiFunction(api, name, Operation(operation))
                for api, name, operation in self._rows(
                    "SELECT api, name, operation FROM api_functions ORDER BY id"
                )
            ),
            kernels=tuple(
                Kernel(self._index("processes", process), *words)
                for process, *words in self._rows(
                    "SELECT process_id, api, name, unnamed FROM kernels ORDER BY id"
                )
            ),
            codes=tuple(self._codes(objects)),
            objects=tuple(CodeObject(*words) for _, *words in objects),
            instructions=tuple(
                Instruction(self._index("kernel_codes", code), *rest)
                for code, *rest in self._rows(
                    "SELECT code_id, offset, text, file, line FROM instructions"
                    " ORDER BY code_id, offset"
                )
            ),
            reasons=tuple(
                StallReason(*row)
                for row in self._rows("SELECT family, name FROM stall_reasons ORDER BY id")
            ),
            calls=self._calls(),
            events=self._events(),
            launches=self._launches(),
            samples=self._samples(),
            times=self._times(),
            readings=self._readings(),
        )

    def _codes(self, objects: list[Any]) -> Iterator[KernelCode]:
        object_at = {row[0]: at for at, row in enumerate(objects)}
        object_id = "object_id" if self._version > 7 else "NULL"
        for kernel, binary, size_bytes, of in self._rows(
            f"SELECT kernel_id, binary_id, size_bytes, {object_id} FROM kernel_codes"  # noqa: S608 - our own names
            " ORDER BY id"
        ):
            binary_at = None if binary is None else self._index("binaries", binary)
            if of is not None:
                self._index("code_objects", of)
            kernel_at = self._index("kernels", kernel)
            yield KernelCode(kernel_at, binary_at, size_bytes, object_at.get(of))

    def _rows(self, query: str) -> list[Any]:
        return self._database.execute(query).fetchall()

    def _all_ids(self, table: str) -> I64:
        if table not in self._ids:
            self._ids[table] = self._tables.columns(table, ("id",))[0].astype(np.int64)
        return self._ids[table]

    def _index(self, table: str, row_id: int) -> int:
        ids = self._all_ids(table)
        at = int(np.searchsorted(ids, row_id))
        if at == len(ids) or int(ids[at]) != row_id:
            raise ValueError(f"a row refers to one of {table} that is missing")
        return at

    def _columns(self, table: str, columns: Sequence[str]) -> dict[str, I64]:
        found = dict(zip(columns, self._tables.columns(table, columns), strict=True))
        least = {"kernel_id": NULL, "ended_ns": NULL, **dict.fromkeys(_MAY_BE_UNKNOWN, NULL)}
        if any(bool((found[name] < least.get(name, 0)).any()) for name in columns):
            raise ValueError("a negative number")
        return found

    def _positions(self, table: str, values: I64) -> npt.NDArray[np.uint32]:
        if not len(values):  # as of most captures: there may be many stacks and threads
            return np.zeros(0, np.uint32)
        ids = self._all_ids(table)
        is_none = values < 0
        at = np.searchsorted(ids, values)
        is_known = (at < len(ids)) & (np.append(ids, -1)[np.minimum(at, len(ids))] == values)
        if not bool((is_known | is_none).all()):
            raise ValueError(f"a row refers to one of {table} that is missing")
        return np.where(is_none, NONE, at).astype(np.uint32)

    def _directions(self, values: I64) -> I64:
        if len(values) and int(values.max()) > max(Direction):
            raise ValueError("an unknown direction of a copy")
        return values

    def _filled(
        self, dtype: np.dtype[np.void], found: dict[str, I64], tables: dict[str, str]
    ) -> npt.NDArray[np.void]:
        """Puts columns into records, ids as positions in their tables."""
        count = len(next(iter(found.values())))
        records = np.zeros(count, dtype)
        for name, values in found.items():
            table = tables.get(name)
            field = name.removesuffix("_id") if table else name
            if not table and len(values):
                _check_range(values, dtype[field].itemsize)
            records[field] = self._positions(table, values) if table else values
        return records

    def _calls(self) -> npt.NDArray[np.void]:
        names = ("interval", "stack_id", "thread_id", "function_id", "kernel_id", "direction")
        found = self._columns("api_calls", (*names, "count", "work", "bytes"))
        self._directions(found["direction"])
        for name in ("count", "work", "bytes"):
            if float(np.sum(found[name], dtype=float)) >= _LARGEST_SUM:
                raise ValueError("more calls than there can be")
        return self._filled(CALL_DTYPE, found, _CALL_TABLES)

    def _events(self) -> npt.NDArray[np.void]:
        names = ("start_ns", "stack_id", "thread_id", "function_id", "kernel_id", "direction")
        axes = [f"{kind}_{axis}" for kind in ("grid", "block") for axis in "xyz"]
        found = self._columns("api_events", (*names, "queue", *axes, "bytes"))
        self._directions(found["direction"])
        sizes = [found.pop(name) for name in axes]
        for values in sizes:
            if len(values):
                _check_range(values, 4)
        records = self._filled(CALL_EVENT_DTYPE, found, _CALL_TABLES)
        records["grid"] = np.stack(sizes[:3], axis=1)
        records["block"] = np.stack(sizes[3:], axis=1)
        return records

    def _launch_stacks(
        self, table: str, column: str = "stack_id", since: int = 6
    ) -> npt.NDArray[np.uint32]:
        """Returns the stacks of rows of which a device has named the launch, NONE for others.

        Args:
            table: Of the rows.
            column: Which names the stack.
            since: The version that brought it.
        """
        if self._version < since:
            return np.full(len(self._tables.columns(table, ("count",))[0]), NONE, np.uint32)
        (found,) = self._tables.columns(table, (column,))
        if bool((found < NULL).any()):
            raise ValueError("a negative number")
        return self._positions("stacks", found)

    def _samples(self) -> npt.NDArray[np.void]:
        names = ["interval", "device_id", "code_id", "offset", "reason_id", "count"]
        if self._version > 4:
            names += ["begin_ns", "end_ns"]
        found = self._columns("device_samples", names)
        if self._version < 5:
            seconds = found["interval"].astype(np.int64)
            found["begin_ns"] = np.minimum(seconds, _LAST_INTERVAL) * NS_PER_S
            found["end_ns"] = found["begin_ns"] + NS_PER_S
        if bool((found["begin_ns"] > found["end_ns"]).any()):
            raise ValueError("a device sample that ends before it begins")
        if float(np.sum(found["count"], dtype=float)) >= _LARGEST_SUM:
            raise ValueError("more device samples than there can be")
        records = self._filled(DEVICE_SAMPLE_DTYPE, found, _SAMPLE_TABLES)
        records["stack"] = self._launch_stacks("device_samples")
        return records

    def _launches(self) -> npt.NDArray[np.void]:
        if self._version < 5:
            return np.zeros(0, LAUNCH_DTYPE)
        names = ("stack_id", "thread_id", "function_id", "kernel_id", "queue", "first_ns")
        found = self._columns("launches", (*names, "last_ns", "ended_ns", "count", "work"))
        if bool((found["kernel_id"] < 0).any()):
            raise ValueError("a launch of no kernel")
        if bool((found["first_ns"] > found["last_ns"]).any()):
            raise ValueError("a launch that ends before it begins")
        if float(np.sum(found["count"], dtype=float)) >= _LARGEST_SUM:
            raise ValueError("more launches than there can be")
        ended_ns = found["ended_ns"].astype(np.int64)
        if bool(((ended_ns >= 0) & (ended_ns < found["last_ns"])).any()):
            raise ValueError("a launch that had ended before it was enqueued")
        found["ended_ns"] = np.where(ended_ns < 0, NO_END, ended_ns)
        return self._filled(LAUNCH_DTYPE, found, _CALL_TABLES)

    def _times(self) -> npt.NDArray[np.void]:
        if self._version < 4:
            return np.zeros(0, KERNEL_TIME_DTYPE)
        names = ("device_id", "kernel_id", "queue", "begin_ns", "end_ns", "count")
        found = self._columns("kernel_times", (*names, "duration_ns"))
        if any(
            float(np.sum(found[n], dtype=float)) >= _LARGEST_SUM for n in ("count", "duration_ns")
        ):
            raise ValueError("more kernel times than there can be")
        if len(found["kernel_id"]) and int(found["kernel_id"].min()) < 0:
            raise ValueError("a kernel time of no kernel")
        records = self._filled(KERNEL_TIME_DTYPE, found, _TIME_TABLES)
        records["stack"] = self._launch_stacks("kernel_times")
        records["built"] = self._launch_stacks("kernel_times", "built_stack_id", 8)
        return records

    def _readings(self) -> npt.NDArray[np.void]:
        if self._version < 8:
            return np.zeros(0, DEVICE_READING_DTYPE)
        found = self._columns(
            "device_readings", ("device_id", "begin_ns", "end_ns", *_MAY_BE_UNKNOWN)
        )
        busy, used, total = (found[name].astype(np.int64) for name in _MAY_BE_UNKNOWN)
        if bool((found["begin_ns"] > found["end_ns"]).any()):
            raise ValueError("a reading of a device that ends before it begins")
        if bool((found["end_ns"] > _LAST_READING_NS).any()) or bool(
            (found["end_ns"] - found["begin_ns"] > LONGEST_READING_NS).any()
        ):
            raise ValueError("a reading of a device that took longer than any")
        if bool((busy > MOST_PERMILLE).any()):
            raise ValueError("a device that was busier than all the time")
        if bool((used > total).any()) or bool(((used < 0) != (total < 0)).any()):
            raise ValueError("a device that used more memory than it has")
        is_sized = total >= 0
        found["busy_permille"] = np.where(busy < 0, BUSY_UNKNOWN, busy)
        found["used_bytes"], found["total_bytes"] = used * is_sized, total * is_sized
        records = self._filled(DEVICE_READING_DTYPE, found, _TIME_TABLES)
        records["used_bytes"][~is_sized] = NO_SIZE
        return records


_MAY_BE_UNKNOWN = ("busy_permille", "used_bytes", "total_bytes")
_CALL_TABLES = {
    "stack_id": "stacks",
    "thread_id": "threads",
    "function_id": "api_functions",
    "kernel_id": "kernels",
}
_TIME_TABLES = {"device_id": "devices", "kernel_id": "kernels"}
_SAMPLE_TABLES = {
    "device_id": "devices",
    "code_id": "kernel_codes",
    "reason_id": "stall_reasons",
}


def _check_range(values: I64, n_bytes: int) -> None:
    if n_bytes < 8 and int(values.max()) >= 1 << 8 * n_bytes:
        raise ValueError("a number out of range")
