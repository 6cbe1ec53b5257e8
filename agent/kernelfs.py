# SPDX-License-Identifier: Apache-2.0
"""Reads files that the kernel makes as they are read: those of /proc and /sys.

They are the kernel's word, of no size, and may be gone or refused at any moment. Nothing below
/proc/PID/root, cwd or map_files is one of them: that is the target's own (`inspector/rootfs.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# The kernel fills at most a page of most files in one read, but more of maps.
_READ_BYTES = 1 << 17


def read_text(path: str | Path, limit: int = 65536) -> str:
    """Returns up to `limit` bytes of a small file, "" when it cannot be read."""
    parts = []
    # Bare system calls: with 10,000 threads to read, file objects are most of the cost.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        while limit > 0 and (part := os.read(fd, min(limit, _READ_BYTES))):
            parts.append(part)
            limit -= len(part)
    except OSError:
        pass  # it ended meanwhile: what was read before stands
    finally:
        os.close(fd)
    return b"".join(parts).decode(errors="replace")


def read_bytes(path: str | Path) -> bytes:
    """Returns all of a file.

    Raises:
        OSError: It cannot be read.
    """
    return Path(path).read_bytes()


def lines(path: str | Path) -> Iterator[bytes]:
    """Yields the lines of a long file, each with its end, as far as it can be read.

    One at a time: that takes no memory of which holes would be left.
    """
    with contextlib.suppress(OSError), Path(path).open("rb", _READ_BYTES) as file:
        yield from file
