# SPDX-License-Identifier: Apache-2.0
"""Names of code that a JIT made, from /tmp/perf-PID.map.

Node, the JVM's agents, Julia, .NET and `python -X perf` write lines of `START SIZE name`, in hex
(Linux: tools/perf/Documentation/jit-interface.txt). Memory is used again, so later lines win.

Anyone may write to /tmp, and what is read ends up in a capture. The file is opened beneath the
target's root and never through a link in its last part; it must be a regular file with one name
that belongs to the target's own user. A link or a second name (where fs.protected_hardlinks is 0)
would show the target's user a file that only somebody else may read. Of an oversized file the end
is read, and of too many lines the last: they describe the code that is there now.

`open_perf_map` is for a process that opens files, `PerfMap` for one without rights (`worker`).
"""

from __future__ import annotations

import io
import os
from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.errors import AiflameError
from aiflame.agent.inspector.rootfs import open_beneath, open_root
from aiflame.agent.symbols.frames import clean_name

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# A large JVM service writes 100,000 lines, 6 MB. A million lines take 1 s to read.
DEFAULT_MAX_BYTES = 64 * 1024 * 1024
_MAX_LINES = 1_000_000
_MAX_LINE_BYTES = 10_000
_CHUNK_BYTES = 1024 * 1024


class BadPerfMap(AiflameError):
    """There is a map, but it may not be used."""


def perf_map_path(namespaced_pid: int) -> str:
    """Where a process's map is, by the pid that it has inside its own pid namespace."""
    return f"/tmp/perf-{namespaced_pid}.map"  # noqa: S108 - the place is the interface


def open_perf_map(root_path: str, path: str, uid: int) -> int | None:
    """Opens the map of a process; the caller closes it.

    Args:
        root_path: Its root directory, /proc/PID/root.
        path: From `perf_map_path`.
        uid: Its user id, as the host sees it.

    Returns:
        None where there is no map.

    Raises:
        BadPerfMap: It is a link, no regular file, belongs to someone else, has a second name, or
            cannot be opened.
    """
    try:
        root = open_root(root_path)
    except OSError:
        return None  # The process is gone, and its root with it.
    try:
        fd = open_beneath(root, path, follow_last=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadPerfMap(f"{path}: {error.strerror}") from error
    finally:
        os.close(root)
    facts = os.fstat(fd)
    if facts.st_uid == uid and facts.st_nlink <= 1:
        return fd
    os.close(fd)
    if facts.st_uid != uid:
        raise BadPerfMap(f"{path}: belongs to user {facts.st_uid}, not to {uid}")
    raise BadPerfMap(f"{path}: has {facts.st_nlink} names (hard links)")


@dataclass(frozen=True, slots=True)
class PerfMap:
    """The functions of one process's JITs, by process virtual address.

    Attributes:
        malformed_lines: Lines that are not of the format.
        skipped_bytes: Bytes at the head of an oversized file that were not read.
    """

    malformed_lines: int
    skipped_bytes: int
    _text: bytes
    _starts: U64
    _ends: U64
    _names: U64  # where in the text, and how many bytes; shape (functions, 2)

    @classmethod
    def read(cls, fd: int, max_bytes: int = DEFAULT_MAX_BYTES) -> PerfMap:
        """Reads the end of an open map.

        Raises:
            OSError: It cannot be read.
        """
        size = os.fstat(fd).st_size
        skipped = max(0, size - max_bytes)
        return cls.parse(_read(fd, skipped, size), skipped)

    @classmethod
    def parse(cls, text: bytes, skipped_bytes: int = 0) -> PerfMap:
        """Read the text of a map; with bytes skipped before it, its first line is only a part."""
        last_lines = _begin_of_last_lines(text)
        begin = max(last_lines, text.find(b"\n") + 1 if skipped_bytes else 0)
        functions = array("Q")
        malformed = 0
        at = begin
        lines = io.BytesIO(text)
        lines.seek(begin)
        for line in lines:
            # One that is still being written has no newline yet, and is no error.
            if line.endswith(b"\n"):
                entry = _entry(line[: min(len(line) - 1, _MAX_LINE_BYTES)])
                if entry is not None:
                    start, end, name_at, name_bytes = entry
                    functions.extend((start, end, at + name_at, name_bytes))
                else:
                    malformed += not line.isspace()
            at += len(line)
        rows = np.frombuffer(functions, np.uint64).reshape(-1, 4)
        skipped_bytes += last_lines
        return cls(malformed, skipped_bytes, text, rows[:, 0], rows[:, 1], rows[:, 2:])

    def __len__(self) -> int:
        return len(self._starts)

    def lookup(self, addresses: U64) -> list[str | None]:
        """Names for process virtual addresses, shape (n,); None outside every function."""
        if not len(self):
            return [None] * len(addresses)
        distinct, which = np.unique(addresses, return_inverse=True)
        found = _last_over(
            np.searchsorted(distinct, self._starts), np.searchsorted(distinct, self._ends), distinct
        )
        names = [self._name(row) if row >= 0 else None for row in found.tolist()]
        return [names[index] for index in which.tolist()]

    def _name(self, row: int) -> str:
        at, size = self._names[row].tolist()
        return clean_name(self._text[at : at + size].decode("utf-8", "replace"))


def _last_over(first: I64, end: I64, points: U64) -> I64:
    """Returns for each point the last range `first[i]:end[i]` of points that it is in, or -1.

    A range is two that may overlap, of a power of two of points; those of each power are halved
    into those of the next smaller one. So hostile maps, of which each range lies over the others,
    take no longer than others.
    """
    rows = np.flatnonzero(end > first)
    first, end = first[rows], end[rows]
    power = np.frexp(end - first)[1] - 1
    last = np.full(len(points), -1, np.int64)
    for at in range(int(power.max(initial=0)), -1, -1):
        width = 1 << at
        chosen = power == at
        for begin in (first[chosen], end[chosen] - width):
            np.maximum.at(last, begin, rows[chosen])
        if at:  # what begins a range of this width begins two of half of it
            half = width // 2
            last[half:] = np.maximum(last[half:], last[:-half])
    return last


def _read(fd: int, start: int, end: int) -> bytes:
    pieces = []
    while start < end:
        piece = os.pread(fd, min(_CHUNK_BYTES, end - start), start)
        if not piece:
            break  # It shrank meanwhile.
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _begin_of_last_lines(text: bytes) -> int:
    """Where the last lines begin, of which there are not too many."""
    left, end = _MAX_LINES, len(text)
    while end:
        start = max(0, end - _CHUNK_BYTES)
        found = text.count(b"\n", start, end)
        if found > left:
            newlines = np.flatnonzero(np.frombuffer(text, np.uint8)[start:end] == ord("\n"))
            return start + int(newlines[-left - 1]) + 1
        left, end = left - found, start
    return 0


def _entry(line: bytes) -> tuple[int, int, int, int] | None:
    """Start, end, and where in the line the name is, how long.

    None for a line that is not of the format, or whose function wraps around.
    """
    fields = line.split(None, 2)
    if len(fields) < 3:
        return None
    try:
        start, size = int(fields[0], 16), int(fields[1], 16)
    except ValueError:
        return None
    if start < 0 or size <= 0 or start + size >= 1 << 64:
        return None
    return start, start + size, len(line) - len(fields[2]), len(fields[2])
