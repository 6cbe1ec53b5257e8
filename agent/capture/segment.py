# SPDX-License-Identifier: Apache-2.0
"""Segments: windows in a file that is only ever appended to, through one descriptor.

A segment is what a recording has on disk while it goes on: whatever ends it, all windows that were
closed are there. It is read as it is, also while it is written, and by windows: a later part that
is cut or damaged costs nothing before it.

    header   magic, digest of the columns that windows have
    frame    length and CRC-32 of what follows, and that: facts of the recording, as JSON
    frame    length and CRC-32 of what follows, and that: one window, compressed by zlib
    frame    ...

What windows have in common (threads, mappings, stacks) is written once in a segment. For each
column whose rows have a key, and are no measures, a window has its new rows, and the numbers of all
its rows in the order in which the segment brought them.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from aiflame.agent.capture.seen_rows import NUMBERS, SeenRows
from aiflame.agent.losses import LossKind
from aiflame.agent.model.window import (
    COLUMNS,
    BadWindow,
    Cost,
    Rows,
    Window,
    check,
    lengths,
    packed,
    rows_of,
    with_texts,
)
from aiflame.agent.rows import join_rows, take_rows

MAGIC = b"AFLMSEG1"
_FRAME = struct.Struct("<II")
_HEAD = struct.Struct("<I")
# The fastest: a second of a busy host, some 400 KB, takes 5 ms and becomes a fifth.
_COMPRESSION_LEVEL = 1
# What is larger than any window is damage. Of the largest, 2**14 stacks of samples are 50 MB if all
# are as deep as can be, and 2**16 each of launches, calls and waits 20 MB.
_MAX_FRAME_BYTES = _MAX_WINDOW_BYTES = 1 << 27
# What is written is a little less: a frame may be larger than what it holds, by some hundredths of
# a percent (zlib.h, compressBound), and has a head.
_MOST_WRITTEN_BYTES = _MAX_WINDOW_BYTES - (1 << 20)
# Of a column: a host with thousands of processes has a million mappings.
_MAX_ROWS = 1 << 22
# Of stacks or chains: five times those of the largest window.
_MAX_OWNERS = 1 << 20
# Of addresses or Python frames, which rows of a forged window may share.
_MAX_PARTS = 1 << 24

# Columns whose rows are written once, and those that belong to rows of theirs.
_SHARED = tuple(name for name, c in COLUMNS.items() if c.key and not c.adds)
_PARTS = frozenset(column.parts for column in COLUMNS.values() if column.parts)


# What is known of processes besides that they are there: nothing refers to it.
_OF_PROCESSES = ("mappings", "code_objects", "code_lines", "jit_symbols")

# What decoding lets through on a window that was forged to fit its checksum.
_DAMAGE = (
    BadWindow,
    struct.error,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    OverflowError,
    RecursionError,
)


class BadSegment(ValueError):
    """No segment, or one of another version. The message says which."""


def _header() -> bytes:
    """Returns what a segment begins with: another version of the columns has another digest."""
    columns = [(name, column.dtype.descr, column.key) for name, column in COLUMNS.items()]
    return MAGIC + hashlib.sha256(repr(columns).encode()).digest()[:8]


class SegmentWriter:
    """Appends windows to a new file.

    Args:
        descriptor: Open for writing, and empty. It stays the caller's.
        facts: Of the whole recording, to be shown with it.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, descriptor: int, facts: Mapping[str, str | int] | None = None) -> None:
        self._fd = descriptor
        self._texts: dict[str, int] = {}
        self._seen = {name: SeenRows(COLUMNS[name].dtype) for name in _SHARED}
        self.size_bytes = 0
        words = json.dumps(dict(facts or {})).encode()
        self._append(_header() + _FRAME.pack(len(words), zlib.crc32(words)) + words)

    @property
    def known_rows(self) -> int:
        """How many rows it has that windows to come may mention."""
        return sum(map(len, self._seen.values()))

    def write(self, window: Window) -> None:
        """Appends a window, `reduced` to what readers take: it is in the file whole, or not at all.

        Raises:
            OSError: It cannot be written, for instance since the disk is full. The segment ends
                there: another is needed for what follows.
        """
        payload = zlib.compress(self._encoded(reduced(window)), _COMPRESSION_LEVEL)
        frame = _FRAME.pack(len(payload), zlib.crc32(payload))
        try:
            self._append(frame + payload)
        except OSError:
            os.ftruncate(self._fd, self.size_bytes)
            raise

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd, left) :]
        self.size_bytes += len(data)

    def _encoded(self, window: Window) -> bytes:
        translation = np.zeros(len(window.texts), NUMBERS)
        new_texts = []
        for index, text in enumerate(window.texts):
            if text not in self._texts:
                self._texts[text] = len(self._texts)
                new_texts.append(text)
            translation[index] = self._texts[text]
        counts: dict[str, tuple[int, int]] = {}
        chunks: dict[str, list[bytes]] = {}
        for name, column in COLUMNS.items():
            if name in _PARTS:
                continue
            rows = with_texts(window.rows(name), column, translation)
            numbers: npt.NDArray[np.uint32] = np.zeros(0, NUMBERS)
            if name in self._seen:
                is_new, numbers = self._shared(name, rows)
                rows = rows[is_new]
            if column.parts:
                rows, parts = packed(name, rows, window.rows(column.parts))
                counts[column.parts], chunks[column.parts] = (len(parts), 0), [parts.tobytes()]
            counts[name] = (len(rows), len(numbers))
            # Numbers mostly count up by one: their differences compress to nothing.
            steps = np.diff(numbers, prepend=NUMBERS.type(0)).astype(NUMBERS)
            chunks[name] = [rows.tobytes(), steps.tobytes()]
        head = json.dumps(
            {
                "number": window.number,
                "start_ns": window.start_ns,
                "end_ns": window.end_ns,
                "is_last": window.is_last,
                "cost": [window.cost.cpu_ns, window.cost.bpf_ns, window.cost.rss_bytes],
                "texts": new_texts,
                "counts": [counts[name] for name in COLUMNS],
            }
        ).encode()
        body = (chunk for name in COLUMNS for chunk in chunks[name])
        return b"".join([_HEAD.pack(len(head)), head, *body])

    def _shared(
        self, name: str, rows: Rows
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint32]]:
        """Returns which rows are new in the segment, and the number there of each."""
        column, seen = COLUMNS[name], self._seen[name]
        contents = rows
        if column.parts:  # where they are in the window is not what they are
            contents = rows.copy()
            contents["first"] = 0
        return seen.take(contents)


def reduced(window: Window) -> Window:
    """Returns a window without what would make it larger than readers take; counts that.

    First to go is what is known of the processes of which most is known: where a million mappings
    are one process's, the others keep theirs. Where even all of that is not enough, the window only
    says how much is missing.
    """
    left_bytes = _MOST_WRITTEN_BYTES - _size_bytes(window)
    left_rows = {name: _most_rows(name) - len(window.rows(name)) for name in COLUMNS}
    if _fits(left_bytes, left_rows):
        return window
    known = {name: Counter(window.rows(name)["process"].tolist()) for name in _OF_PROCESSES}
    row_bytes = {name: COLUMNS[name].dtype.itemsize + NUMBERS.itemsize for name in _OF_PROCESSES}
    bytes_of: Counter[int] = Counter()
    for name, rows_of_process in known.items():
        for process, count in rows_of_process.items():
            bytes_of[process] += count * row_bytes[name]
    leaving = []
    for process, size_bytes in bytes_of.most_common():
        leaving.append(process)
        left_bytes += size_bytes
        for name in _OF_PROCESSES:
            left_rows[name] += known[name][process]
        if _fits(left_bytes, left_rows):
            columns = {name: window.rows(name) for name in COLUMNS}
            for name in _OF_PROCESSES:
                columns[name] = columns[name][~np.isin(columns[name]["process"], leaving)]
            count = sum(known[name][process] for name in known for process in leaving)
            return _with_loss(window, columns, count)
    weight_ns = int(window.samples["weight_ns"].sum())
    return _with_loss(window, {"losses": window.losses}, 1, weight_ns)


def _fits(left_bytes: int, left_rows: Mapping[str, int]) -> bool:
    return left_bytes >= 0 and min(left_rows.values()) >= 0


def _most_rows(name: str) -> int:
    return _MAX_OWNERS if COLUMNS[name].parts else _MAX_PARTS if name in _PARTS else _MAX_ROWS


def _size_bytes(window: Window) -> int:
    """Returns what a window takes at most before it is compressed."""
    rows = sum(window.rows(name).nbytes for name in COLUMNS)
    numbers = sum(NUMBERS.itemsize * len(window.rows(name)) for name in _SHARED)
    # In JSON a character takes up to twelve bytes, and a text two quotes and a comma with a space.
    texts = sum(12 * len(text) + 4 for text in window.texts)
    if texts > _MOST_WRITTEN_BYTES // 4:
        texts = len(json.dumps(window.texts))
    return rows + numbers + texts


def _with_loss(window: Window, columns: dict[str, Rows], count: int, thread_ns: int = 0) -> Window:
    """Returns a window of other columns, with a loss of what it was too large for."""
    texts = (*window.texts, LossKind.WINDOW_TOO_LARGE.stored_name)
    loss = rows_of("losses", (len(texts) - 1, count, thread_ns))
    columns["losses"] = np.concatenate([columns["losses"], loss])
    used = [columns[name][text] for name in columns for text in COLUMNS[name].texts]
    found = np.unique(np.concatenate([np.zeros(1, NUMBERS), *used]))
    translation = np.zeros(len(texts), NUMBERS)
    translation[found] = np.arange(len(found))
    return Window.of(
        window.number,
        window.start_ns,
        window.end_ns,
        {name: with_texts(rows, COLUMNS[name], translation) for name, rows in columns.items()},
        texts=tuple(texts[index] for index in found.tolist()),
        is_last=window.is_last,
        cost=window.cost,
    )


class SegmentReader:
    """Reads the windows of a segment, oldest first.

    Args:
        file: At its beginning.
        columns: The others are empty in what is read. They refer to none of these.

    Attributes:
        facts: Of the whole recording.
        damage: After the last window, why there is no other; empty where the file simply ended.

    Raises:
        BadSegment: It is none of this version.
    """

    def __init__(self, file: BinaryIO, columns: Collection[str] = COLUMNS) -> None:
        self._file = file
        self._wanted = columns
        self._texts: list[str] = []
        self._shared: dict[str, Rows] = {
            name: np.zeros(0, COLUMNS[name].dtype) for name in (*_SHARED, *_PARTS)
        }
        self.damage = ""
        header = file.read(len(_header()))
        if header[: len(MAGIC)] != MAGIC[: len(header)]:
            raise BadSegment("it is no segment of a recording")
        if header != _header()[: len(header)]:
            raise BadSegment("it was written by another version")
        if len(header) < len(_header()):
            self.damage = "it is cut in its header"
        self.facts: dict[str, str | int] = {} if self.damage else self._read_facts()

    def _read_facts(self) -> dict[str, str | int]:
        payload = self._payload(self._file.read(_FRAME.size))
        if payload is None:
            self.damage = "it is cut in its header"
            return {}
        try:
            facts = json.loads(payload)
            return {
                str(key): value if isinstance(value, int) else str(value)
                for key, value in facts.items()
            }
        except (ValueError, AttributeError, RecursionError) as error:
            raise BadSegment("its header is damaged") from error

    def __iter__(self) -> Iterator[Window]:
        while not self.damage:
            frame = self._file.read(_FRAME.size)
            if not frame:
                return
            payload = self._payload(frame)
            if payload is None:
                return
            try:
                window = self._decoded(payload)
                check(window)
            except _DAMAGE as error:
                self.damage = f"a window in it is damaged ({error})"
                return
            yield window

    def _payload(self, frame: bytes) -> bytes | None:
        """Returns the next window's bytes, None where they are not there or not what they were."""
        if len(frame) == _FRAME.size:
            length, crc = _FRAME.unpack(frame)
            if length > _MAX_FRAME_BYTES:
                self.damage = "a window in it claims to be larger than any"
                return None
            payload = self._file.read(length)
            if len(payload) == length:
                if zlib.crc32(payload) == crc:
                    return payload
                self.damage = "a window in it is damaged"
                return None
        self.damage = "it is cut in a window"
        return None

    def _decoded(self, payload: bytes) -> Window:
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(payload, _MAX_WINDOW_BYTES)
        except zlib.error as error:
            raise BadWindow(str(error)) from error
        if not unpacker.eof:
            raise BadWindow("it is larger than any")
        (size_bytes,) = _HEAD.unpack_from(data)
        at = _HEAD.size + size_bytes
        head: dict[str, Any] = json.loads(data[_HEAD.size : at])
        new: dict[str, Rows] = {}
        numbers: dict[str, npt.NDArray[np.int64]] = {}
        for (name, column), (rows, mentioned) in zip(COLUMNS.items(), head["counts"], strict=True):
            most = _most_rows(name)
            if not (0 <= rows <= most and 0 <= mentioned <= (most if name in _SHARED else 0)):
                raise BadWindow(f"{name}: more rows than any window has, or fewer than none")
            new[name] = np.frombuffer(data, column.dtype, rows, at)
            at += new[name].nbytes
            steps = np.frombuffer(data, NUMBERS, mentioned, at)
            at += steps.nbytes
            numbers[name] = np.cumsum(steps, dtype=NUMBERS).astype(np.int64)
        self._texts += [str(text) for text in head["texts"]]
        columns = self._columns(new, numbers)
        texts = self._localise(columns)
        return Window.of(
            int(head["number"]),
            int(head["start_ns"]),
            int(head["end_ns"]),
            columns,
            texts=texts,
            is_last=bool(head["is_last"]),
            cost=Cost(*(int(value) for value in head["cost"])),
        )

    def _columns(
        self, new: dict[str, Rows], numbers: dict[str, npt.NDArray[np.int64]]
    ) -> dict[str, Rows]:
        columns: dict[str, Rows] = {}
        for name, column in COLUMNS.items():
            if name in _PARTS or name not in self._wanted:
                continue
            if name not in self._shared:
                # A window that waits for its names would keep all that is decoded with it.
                columns[name] = new[name].copy()
                continue
            added = new[name]
            if column.parts:
                owned = new[column.parts]
                ends = added["first"].astype(np.int64) + lengths(name, added)
                if len(added) and int(ends.max()) > len(owned):
                    raise BadWindow(f"{name}: a row goes past the end of {column.parts}")
                added = added.copy()
                added["first"] += np.uint32(len(self._shared[column.parts]))
                owned = join_rows([self._shared[column.parts], owned], COLUMNS[column.parts].dtype)
                self._shared[column.parts] = owned
            self._shared[name] = join_rows([self._shared[name], added], column.dtype)
            if len(np.unique(numbers[name])) != len(numbers[name]):
                raise BadWindow(f"{name}: a row is there twice")
            columns[name] = take_rows(self._shared[name], numbers[name])
            if column.parts:
                if lengths(name, columns[name]).sum() > _MAX_PARTS:
                    raise BadWindow(f"{name}: more {column.parts} than any window has")
                owned = self._shared[column.parts]
                columns[name], columns[column.parts] = packed(name, columns[name], owned)
        return columns

    def _localise(self, columns: dict[str, Rows]) -> tuple[str, ...]:
        """Gives columns texts of the window's own; returns these."""
        used: list[npt.NDArray[np.uint32]] = [np.zeros(1, NUMBERS)]
        for name, rows in columns.items():
            used += [rows[text] for text in COLUMNS[name].texts]
        found, which = np.unique(np.concatenate(used), return_inverse=True)
        texts = tuple(self._texts[index] for index in found.tolist())
        at = 1
        for name, rows in columns.items():
            if COLUMNS[name].texts and len(rows):
                columns[name] = rows.copy()
            for text in COLUMNS[name].texts:
                if len(rows):
                    columns[name][text] = which[at : at + len(rows)]
                at += len(rows)
        return texts
