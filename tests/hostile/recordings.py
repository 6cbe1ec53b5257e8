# SPDX-License-Identifier: Apache-2.0
"""Segments and captures that were changed so that their checksums still fit."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from aiflame.agent.capture import segment
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.seen_rows import NUMBERS
from aiflame.agent.capture.segment import BadSegment, SegmentReader, SegmentWriter
from aiflame.agent.errors import AiflameError, CaptureError
from aiflame.agent.reports import FORMATS, ReportOptions
from aiflame.agent.sinks.rebuilt import capture_of_windows
from hostile.outcome import Outcome, forget_peak
from windows import RandomRecording

_FRAME = struct.Struct("<II")
_ODD = (0, 1, 2, 3, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, 1 << 63)
_ODD = (*_ODD, (1 << 64) - 1, (1 << 64) - 2)
_ODD_WORDS = ("-1", "1e300", "NaN", "null", "[]", "{}", '"x"', "true", "9" * 400, "[[[[1]]]]")
_ODD_VALUES: tuple[object, ...] = (
    *(None, 0, 1, -1, 7, 255, 1 << 31, 1 << 32, (1 << 63) - 1, -(1 << 63), 2.5, "", "x", "7"),
    *("\x00<script>", "x" * 5_000, b"", b"\xff" * 7, b"\x00" * 64),
)
_FACTS = {"started_unix_ns": 1_795_000_000 * 10**9, "period_ns": 10**7, "command": "aiflame record"}
_MEANT = {"aiflame_version": "1", "target": "all", "duration_ns": 10**10, "complete": 1}

# How many of the cases also go through what follows reading.
_RENDERED = 10


def _payloads(dice: random.Random, folder: Path) -> list[bytes]:
    """The contents of the frames of a sound segment, uncompressed; the first are the facts."""
    path = folder / "seed"
    windows = RandomRecording(dice.randrange(1 << 32)).windows(dice.choice((1, 2, 4)))
    with path.open("wb", buffering=0) as file:
        writer = SegmentWriter(file.fileno(), {**_FACTS, **_MEANT})
        for window in windows:
            writer.write(window)
    data, found = path.read_bytes(), []
    at = len(segment._header())
    while at < len(data):
        length, _ = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size :][:length]
        found.append(payload if not found else zlib.decompress(payload))
        at += _FRAME.size + length
    return found


def _framed(payloads: list[bytes]) -> bytes:
    frames = [payloads[0], *(zlib.compress(payload, 1) for payload in payloads[1:])]
    return segment._header() + b"".join(_FRAME.pack(len(f), zlib.crc32(f)) + f for f in frames)


def _changed(payload: bytes, has_head: bool, dice: random.Random) -> bytes:
    """Changes a few numbers of a frame."""
    if not has_head:
        return _changed_words(payload, dice)
    (size,) = struct.unpack_from("<I", payload)
    head, body = payload[4 : 4 + size], bytearray(payload[4 + size :])
    if dice.random() < 0.3:
        head = _changed_words(head, dice)
    for _ in range(dice.choice((1, 2, 8))):
        width = dice.choice((1, 4, 8))
        if len(body) > width:
            at = dice.randrange(len(body) - width)
            value = dice.choice((*_ODD, dice.randrange(1 << 64))) % (1 << 8 * width)
            body[at : at + width] = value.to_bytes(width, "little")
    if dice.random() < 0.1:
        del body[dice.randrange(len(body) + 1) :]
    return struct.pack("<I", len(head)) + head + body


def _changed_words(text: bytes, dice: random.Random) -> bytes:
    """Replaces a number of a JSON text."""
    numbers = list(re.finditer(rb"-?\d+|true|false", text))
    if not numbers:
        return text
    chosen = dice.choice(numbers)
    words = dice.choice((*_ODD_WORDS, str(dice.choice(_ODD)))).encode()
    return text[: chosen.start()] + words + text[chosen.end() :]


def read_segments(count: int, folder: Path, random_seed: int) -> Iterator[Outcome]:
    """Reads changed segments, and makes captures of some."""
    dice = random.Random(random_seed)
    outcome = Outcome("segments")
    capture = folder / "capture.aiflame"
    for number in range(count):
        if number % 200 == 0:
            payloads = _payloads(dice, folder)
        changed = list(payloads)
        at = dice.randrange(len(changed))
        changed[at] = _changed(changed[at], at > 0, dice)
        data = _framed(changed)
        outcome.cases += 1
        with outcome.reading("segment", BadSegment):
            reader = SegmentReader(io.BytesIO(data))
            for _ in reader:
                pass
            outcome.refused[re.sub(r"\d+", "N", reader.damage)[:60]] += bool(reader.damage)
        if number % _RENDERED == 0:
            capture.unlink(missing_ok=True)
            with outcome.reading("capture of a segment", BadSegment, AiflameError):
                reader = SegmentReader(io.BytesIO(data))
                capture_of_windows(capture, reader, reader.facts, with_names=False)
                _render(capture, dice)
    yield outcome


def _render(path: Path, dice: random.Random) -> None:
    profile = read_capture(path)
    FORMATS[dice.choice(list(FORMATS))].render(profile, ReportOptions())


def read_captures(count: int, folder: Path, random_seed: int) -> Iterator[Outcome]:
    """Reads changed captures, and renders those that can be read."""
    dice = random.Random(random_seed)
    outcome = Outcome("captures")
    path = folder / "changed.aiflame"
    for number in range(count):
        if number % 500 == 0:
            seed = _capture(dice, folder)
        path.write_bytes(seed)
        if dice.random() < 0.5:
            _change_values(path, dice)
        else:
            path.write_bytes(_changed_file(seed, dice))
        outcome.cases += 1
        with outcome.reading("capture", CaptureError):
            _render(path, dice)
    yield outcome


def _capture(dice: random.Random, folder: Path) -> bytes:
    path = folder / "sound.aiflame"
    path.unlink(missing_ok=True)
    windows = RandomRecording(dice.randrange(1 << 32)).windows(3)
    capture_of_windows(path, windows, {**_FACTS, **_MEANT}, with_names=False)
    return path.read_bytes()


def _change_values(path: Path, dice: random.Random) -> None:
    """Puts odd values into some rows; SQLite takes nearly any."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for _ in range(dice.choice((1, 1, 3))):
            (table,) = dice.choice(names)
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            (rows,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608
            row = f"(SELECT rowid FROM {table} LIMIT 1 OFFSET {dice.randrange(rows + 1)})"  # noqa: S608
            query = f"UPDATE {table} SET {dice.choice(columns)} = ? WHERE rowid = {row}"  # noqa: S608
            with contextlib.suppress(sqlite3.Error):
                database.execute(query, (dice.choice(_ODD_VALUES),))
        database.commit()


def _changed_file(data: bytes, dice: random.Random) -> bytes:
    """Changes bytes, those of pages' headers more often than by chance."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 2, 10, 100))):
        page = dice.randrange(len(data) // 4096) * 4096
        at = page + dice.choice((0, 3, 4, 5, 8, 9, dice.randrange(4096), dice.randrange(4096)))
        changed[at] = dice.choice((0, 1, 5, 13, 0x7F, 0x80, 0xFF, dice.randrange(256)))
    return bytes(changed[: dice.randrange(len(data))] if dice.random() < 0.05 else changed)


def _bombs() -> Iterator[bytes]:
    """Segments that are small and whose one window is as large as any."""
    payload = zlib.compress(bytes(segment._MAX_WINDOW_BYTES - 1), 9)
    head = segment._header() + _FRAME.pack(2, zlib.crc32(b"{}")) + b"{}"
    yield head + _FRAME.pack(len(payload), zlib.crc32(payload)) + payload
    for column in range(len(segment.COLUMNS)):
        for of_numbers in (0, 1):
            counts = [[0, 0] for _ in segment.COLUMNS]
            dtype = list(segment.COLUMNS.values())[column].dtype
            size = NUMBERS.itemsize if of_numbers else dtype.itemsize
            name = list(segment.COLUMNS)[column]
            most = segment._MAX_PARTS if name in segment._PARTS else segment._MAX_ROWS
            most = segment._MAX_OWNERS if segment.COLUMNS[name].parts else most
            fitting = (segment._MAX_WINDOW_BYTES - 4_096) // size
            counts[column][of_numbers] = min(most, fitting)
            words = json.dumps(
                {"number": 0, "start_ns": 0, "end_ns": 1, "is_last": True, "cost": [0, 0, 0],
                 "texts": [""], "counts": counts}
            ).encode()  # fmt: skip
            body = struct.pack("<I", len(words)) + words
            body += bytes(counts[column][of_numbers] * size)
            payload = zlib.compress(body, 1)
            yield head + _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def read_bombs(count: int, _: Path, __: int) -> Iterator[Outcome]:
    """Reads small segments of large windows, as many as are asked for."""
    outcome = Outcome("small segments of large windows")
    bombs = list(itertools.islice(_bombs(), count))
    forget_peak()
    for data in bombs:
        outcome.cases += 1
        with outcome.reading("segment", BadSegment):
            reader = SegmentReader(io.BytesIO(data))
            for _window in reader:
                pass
            outcome.refused[reader.damage[:60]] += bool(reader.damage)
    yield outcome
