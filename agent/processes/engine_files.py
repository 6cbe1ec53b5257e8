# SPDX-License-Identifier: Apache-2.0
"""Opens the files of container engines: only those that are root's, or our own, and never waits."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yields a descriptor of a regular file that root or this process's user owns.

    Args:
        path: Its last part is not followed if it is a link.

    Raises:
        OSError: It is not there, not readable, or another user's.
    """
    # A FIFO would have us wait for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "not a file of root's", str(path))
        yield fd
    finally:
        os.close(fd)


def content(path: Path, limit: int) -> bytes:
    """Returns what such a file has; nothing where it cannot be opened, or is larger.

    Args:
        path: As for `opened`.
        limit: In bytes.
    """
    try:
        with opened(path) as fd:
            text = read_at(fd, 0, limit + 1)
    except OSError:
        return b""
    return text if len(text) <= limit else b""


def read_at(fd: int, offset: int, size: int) -> bytes:
    """Returns up to `size` bytes from an offset on, fewer only where the file ends.

    Raises:
        OSError: As of pread(2).
    """
    parts = []
    while size > 0 and (part := os.pread(fd, size, offset)):
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)
