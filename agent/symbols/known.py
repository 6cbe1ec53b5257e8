# SPDX-License-Identifier: Apache-2.0
"""Which table of the cache belongs to a file that was read before, until the machine is booted.

The digest of a file's contents takes a quarter of a second for the largest libraries, and each
recording would have to take it anew. A file on a local file system that has the same device, inode,
length and times is the same: the time of the last change is the kernel's to set, and no file system
of another user's is local. Whoever owns the file can get around that, and gains a wrong table for
that very file, or for another of theirs: nothing is stored under a name that comes from here.

It is kept in a directory in memory, which is empty after a boot.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from aiflame.agent import kernelfs
from aiflame.agent.inspector.rootfs import is_local
from aiflame.agent.symbols.store import Store

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_ROOT_DIRECTORY = Path("/run/aiflame")
# Some 2,000 files, which take a page each.
_MAX_BYTES = 8 << 20
# A name of a table is shorter.
_MAX_TEXT_BYTES = 256
# The kernel's clock for files stands still for 10 ms at most (CONFIG_HZ=100): a file that changed
# just now may change again and look the same.
_SETTLED_NS = 1_000_000_000


def known_directory(kind: str) -> Path | None:
    """Where that is kept for tables of a kind; None for nowhere.

    Of root it is below /run, of others below $XDG_RUNTIME_DIR.
    """
    if os.geteuid() == 0:
        return _ROOT_DIRECTORY / kind
    configured = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    return configured / "aiflame" / kind if configured.is_absolute() else None


class Known:
    """Short texts by name, until the machine is booted.

    Args:
        directory: Where they are kept, None for nowhere.
        max_bytes: Of all.
        max_text_bytes: Of one.
    """

    def __init__(
        self,
        directory: Path | None,
        max_bytes: int = _MAX_BYTES,
        max_text_bytes: int = _MAX_TEXT_BYTES,
    ) -> None:
        self._store = Store(directory, max_bytes)
        self._max_text_bytes = max_text_bytes
        self._boot_id = kernelfs.read_text(_BOOT_ID).strip()

    def text(self, name: str) -> str:
        """Returns a text, "" where there is none."""
        found = self._store.descriptor(name)
        if found is None:
            return ""
        try:
            text = os.read(found, self._max_text_bytes).decode(errors="replace")
        finally:
            os.close(found)
        boot_id, _, text = text.partition(" ")
        return text if boot_id == self._boot_id else ""

    def keep(self, name: str, text: str) -> None:
        """Keeps a text, unless it is too long."""
        data = f"{self._boot_id} {text}".encode()
        if len(data) <= self._max_text_bytes:
            self._store.write(name, [data])


class KnownTables:
    """Names of tables by the files that they belong to.

    Args:
        directory: Where they are kept, None for nowhere.
    """

    def __init__(self, directory: Path | None) -> None:
        self._known = Known(directory)

    def name(self, fd: int) -> str:
        """Returns the name of a file's table, "" where it is not known.

        Args:
            fd: Of the file.
        """
        return self._known.text(file_key(os.fstat(fd))) if is_local(fd) else ""

    def keep(self, before: os.stat_result, fd: int, name: str) -> None:
        """Takes note of the name of a file's table.

        Args:
            before: The file when its contents began to be read.
            fd: Of the file.
            name: Of its table.
        """
        if is_settled(before, fd):
            self._known.keep(file_key(before), name)


def is_settled(before: os.stat_result, fd: int) -> bool:
    """Whether a file is the one that it was, and will look different once it changes again.

    Args:
        before: The file when its contents began to be read.
        fd: Of the file.
    """
    changed_ns = max(before.st_mtime_ns, before.st_ctime_ns)
    is_same = is_local(fd) and file_key(before) == file_key(os.fstat(fd))
    return is_same and time.time_ns() - changed_ns > _SETTLED_NS


def file_key(facts: os.stat_result) -> str:
    """Returns what a file is told by, on this machine until it is booted."""
    words = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
    return "-".join(f"{word:x}" for word in words)
