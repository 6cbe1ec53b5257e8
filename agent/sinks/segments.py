# SPDX-License-Identifier: Apache-2.0
"""Windows on disk while a recording goes on: its crash log, and the flight recorder.

A folder of segments (`capture.segment`), a new one each minute, so that old ones can be removed as
a whole. The folder is one that nobody else may write to.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from aiflame.agent.capture.segment import MAGIC, BadSegment, SegmentReader, SegmentWriter
from aiflame.agent.errors import DiskFull
from aiflame.agent.limits import room_hint
from aiflame.agent.model.window import COLUMNS, Window
from aiflame.agent.sinks.jit_symbols import jit_window, with_jit_symbols

_NAME = "segment-{:06}.windows"
_ALL = "segment-*.windows"
_JIT_NAME, _ALL_JIT = "jit-{:06}.windows", "jit-*.windows"
_SEGMENT_NS = 60_000_000_000
# What a segment's writer and readers know of it: 20 MB. A host that starts hundreds of processes a
# second brings as much in some seconds.
_MOST_ROWS = 1 << 17


class SegmentSink:
    """Appends windows to segments.

    Args:
        folder: Where they go.
        facts: Of the whole recording.
        keep_ns: How much of the newest is kept, None for all: a segment is removed once all that it
            holds is older.
        name: Of the files, with a number in it.
        first: The number of the first.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, str | int],
        keep_ns: int | None = None,
        name: str = _NAME,
        first: int = 0,
    ) -> None:
        self._folder = folder
        self._facts = dict(facts)
        self._keep_ns = keep_ns
        self._name = name
        self._count = first
        self._descriptor: int | None = None
        self._writer: SegmentWriter | None = None
        self._is_empty = True  # the segment that is being written
        self._begun_ns = 0
        self._kept: deque[tuple[Path, int]] = deque()  # with where the last window in each ends

    def put(self, window: Window) -> None:
        """Appends a window: it is on disk whole, or not at all.

        Raises:
            DiskFull: It cannot be written. What was written before is there.
        """
        try:
            writer = self._writer
            is_over = window.start_ns - self._begun_ns >= _SEGMENT_NS
            if writer is None or is_over or writer.known_rows > _MOST_ROWS:
                writer = self._begin(window)
            writer.write(window)
        except OSError as error:
            self._leave()
            raise DiskFull(f"cannot write {self._folder}: {error.strerror}", room_hint()) from error
        self._is_empty = False
        self._kept[-1] = (self._kept[-1][0], window.end_ns)
        self._forget(window.end_ns)

    def _begin(self, window: Window) -> SegmentWriter:
        self.close()
        path = self._folder / self._name.format(self._count)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._count += 1
        self._is_empty = True
        self._kept.append((path, window.end_ns))
        self._begun_ns = window.start_ns
        self._writer = SegmentWriter(self._descriptor, self._facts)
        return self._writer

    def _leave(self) -> None:
        """Ends a segment that cannot be written; who follows finds none that is cut or missing."""
        if self._descriptor is not None and self._is_empty:
            path, _ = self._kept.pop()
            with suppress(OSError):
                path.unlink()
                self._count -= 1
        self.close()

    def _forget(self, end_ns: int) -> None:
        """Removes segments of which all is older than what is kept."""
        while self._keep_ns is not None and self._kept[0][1] < end_ns - self._keep_ns:
            path, _ = self._kept.popleft()
            with suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Closes the segment that is being written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._writer = None


class JitSymbolSink:
    """Keeps names of generated code beside segments, for a capture that is made of these later.

    Args:
        folder: Of the segments.
    """

    def __init__(self, folder: Path) -> None:
        first = len([*folder.glob(_ALL_JIT)])  # the capture may be written for the second time
        self._segments = SegmentSink(folder, {}, name=_JIT_NAME, first=first)

    def put(self, window: Window, symbols: Mapping[tuple[int, int], str]) -> None:
        """Keeps names; where the disk is full, they are in the capture alone.

        Args:
            window: Whose stacks they are in.
            symbols: By process and address.
        """
        if symbols:
            with suppress(DiskFull):
                self._segments.put(jit_window(window, symbols))

    def close(self) -> None:
        """Closes the file."""
        self._segments.close()


class RecordedWindows:
    """The windows of a folder of segments, or of one segment, oldest first.

    Args:
        path: Of the folder or file. It may be written meanwhile.

    Attributes:
        facts: Of the recording, from the first segment whose header is whole.
        damage: What could not be read of files that are read, each with its name.
        removed: How many files went before they were read: what is old, or all once a recording
            has ended.

    Raises:
        BadSegment: There is no segment that can be read.
    """

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else None
        self._paths = [path] if folder is None else sorted(folder.glob(_ALL))
        self._jit_paths = [] if folder is None else sorted(folder.glob(_ALL_JIT))
        self.facts: dict[str, str | int] = {}
        self.damage: list[str] = []
        self.removed = 0
        reason = "no segment of a recording is there"
        for each in self._paths:
            try:
                with each.open("rb") as file:
                    reader = SegmentReader(file)
            except FileNotFoundError:
                continue
            except BadSegment as error:
                reason = str(error)
                continue
            if not reader.damage:
                self.facts = reader.facts
                return
            reason = reader.damage
        raise BadSegment(reason)

    def __iter__(self) -> Iterator[Window]:
        return with_jit_symbols(self._windows(self._paths), self._windows(self._jit_paths))

    def _windows(self, paths: Sequence[Path]) -> Iterator[Window]:
        for path in paths:
            try:
                file = path.open("rb")
            except FileNotFoundError:
                self.removed += 1
                continue
            with file:
                try:
                    reader = SegmentReader(file)
                except BadSegment as error:  # as a file system leaves one that lost its power
                    self.damage.append(f"{path.name}: {error}")
                    continue
                yield from reader
                if reader.damage:
                    self.damage.append(f"{path.name}: {reader.damage}")


class FollowedWindows:
    """The windows of a folder of segments that is being written.

    Args:
        folder: Of the segments.
        columns: As of `SegmentReader`.

    Attributes:
        facts: Of the recording, once a window was taken.
    """

    def __init__(self, folder: Path, columns: Collection[str] = COLUMNS) -> None:
        self._folder = folder
        self._columns = columns
        self._next = 0
        self._file: BinaryIO | None = None
        self._reader: SegmentReader | None = None
        self.facts: dict[str, str | int] = {}

    def take(self, count: int) -> Iterator[Window]:
        """Yields the windows that come next, which are all there.

        Raises:
            BadSegment: They are not.
        """
        while count:
            window = None if self._reader is None else next(iter(self._reader), None)
            if window is None:
                self._open_next()
                continue
            count -= 1
            yield window

    def unread_bytes(self) -> int:
        """Returns how much of the folder no window was read from yet."""
        sizes = 0 if self._file is None else os.fstat(self._file.fileno()).st_size
        read = 0 if self._file is None else self._file.tell()
        with suppress(FileNotFoundError):
            for number in itertools.count(self._next):
                sizes += (self._folder / _NAME.format(number)).stat().st_size
        return sizes - read

    def _open_next(self) -> None:
        if self._reader is not None and self._reader.damage:
            raise BadSegment(self._reader.damage)
        self.close()
        try:
            self._file = (self._folder / _NAME.format(self._next)).open("rb")
        except FileNotFoundError as error:
            raise BadSegment("a window is missing") from error
        self._reader = SegmentReader(self._file, self._columns)
        self.facts = self._reader.facts
        self._next += 1

    def close(self) -> None:
        """Closes the segment that is being read, and forgets what its windows share."""
        if self._file is not None:
            self._file.close()
        self._file = self._reader = None


def newest(windows: Iterator[Window], keep_ns: int, end_ns: int) -> Iterator[Window]:
    """Yields those windows that end within `keep_ns` before `end_ns`."""
    return (window for window in windows if window.end_ns > end_ns - keep_ns)


def are_segments(path: Path) -> bool:
    """Whether a path is a segment, or a folder of some."""
    try:
        if path.is_dir():
            return next(path.glob(_ALL), None) is not None
        if not path.is_file():  # reading a FIFO would wait for somebody to write
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
