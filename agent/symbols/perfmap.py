# SPDX-License-Identifier: Apache-2.0
"""Names of code that a JIT made, from /tmp/perf-PID.map.

Node, the JVM's agents, Julia, .NET and `python -X perf` write lines of `START SIZE name`, in hex
(Linux: tools/perf/Documentation/jit-interface.txt). Memory is used again, so later lines win.

Anyone may write to /tmp, and what is read ends up in a capture. The file is opened beneath the
target's root and never through a link in its last part; it must be a regular file with one name
that belongs to the target's own user. A link or a second name (where fs.protected_hardlinks is 0)
would show the target's user a file that only somebody else may read. Of an oversized file the end
is read: it describes the code that is there now.

`open_perf_map` is for a process that opens files, `PerfMap` for one without rights (`worker`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.errors import AiflameError
from aiflame.agent.inspector.rootfs import open_beneath, open_root
from aiflame.agent.symbols.frames import clean_name
from aiflame.agent.symbols.intervals import Disjoint, find, flatten

U64 = npt.NDArray[np.uint64]

# About a million lines; a large JVM service writes 100,000.
DEFAULT_MAX_BYTES = 64 * 1024 * 1024
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
    _ranges: Disjoint
    _names: list[bytes]

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
        if skipped_bytes:
            _, _, text = text.partition(b"\n")
        starts: list[int] = []
        ends: list[int] = []
        names: list[bytes] = []
        malformed = 0
        # A line that is still being written has no newline yet, and is no error.
        for line in text[: text.rfind(b"\n") + 1].split(b"\n")[:-1]:
            entry = _entry(line)
            if entry is None:
                malformed += bool(line.strip())
                continue
            starts.append(entry[0])
            ends.append(entry[1])
            names.append(entry[2])
        ranges = flatten(
            np.array(starts, dtype=np.uint64),
            np.array(ends, dtype=np.uint64),
            np.arange(len(starts), dtype=np.int64),
        )
        return cls(malformed, skipped_bytes, ranges, names)

    def __len__(self) -> int:
        return len(self._names)

    def lookup(self, addresses: U64) -> list[str | None]:
        """Names for process virtual addresses, shape (n,); None outside every function."""
        found = find(self._ranges, addresses)
        rows = self._ranges.rows[found].tolist() if len(self._ranges.rows) else [0] * len(found)
        return [
            clean_name(self._names[row].decode("utf-8", "replace")) if hit >= 0 else None
            for hit, row in zip(found.tolist(), rows, strict=True)
        ]


def _read(fd: int, start: int, end: int) -> bytes:
    pieces = []
    while start < end:
        piece = os.pread(fd, min(_CHUNK_BYTES, end - start), start)
        if not piece:
            break  # It shrank meanwhile.
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _entry(line: bytes) -> tuple[int, int, bytes] | None:
    """Start, end and name; None for a line that is not of the format, or wraps around."""
    fields = line[:_MAX_LINE_BYTES].split(None, 2)
    if len(fields) < 3:
        return None
    try:
        start, size = int(fields[0], 16), int(fields[1], 16)
    except ValueError:
        return None
    if start < 0 or size <= 0 or start + size >= 1 << 64:
        return None
    return start, start + size, fields[2]
