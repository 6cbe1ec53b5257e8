# SPDX-License-Identifier: Apache-2.0
"""The cache on disk: finished symbol tables and line tables, one file each.

Files are written under a temporary name and renamed, so readers see whole files or none. When the
total goes over the bound, or the disk is full, the files used longest ago go. Nothing here may fail
a recording: a directory that cannot be made or written means working without a cache.

What a file holds, and whether it is sound, is the business of its reader.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from aiflame.agent.limits import DISK_FULL
from aiflame.agent.outfile import private_directory
from aiflame.agent.user_folders import user_folder

# A PyTorch process needs about 300 MB; a few of those, and never a surprising part of a disk.
DEFAULT_MAX_BYTES = 1024 * 1024 * 1024
# Trim to this share, so that not every following write trims again.
_TRIM_TO = 0.8
# A full disk is full of this where it has so much of what is on it.
_OURS = 0.3
# The total is taken when so much of the bound was written, on average: it may be over by a few
# times that.
_TRIM_EVERY = 0.01
# Files that come within a tick of the kernel's clock of each other leave one time of change: 10 ms
# at most (CONFIG_HZ_100).
_TICK_NS = 20_000_000
# What a file takes at least, in memory and on most disks; and what st_blocks counts (stat(2)).
_PAGE_BYTES, _BLOCK_BYTES = 4096, 512
_ROOT_CACHE = Path("/var/cache/aiflame")


def cache_dir() -> Path:
    """Where symbol tables are kept between runs.

    Root, sudo included, uses /var/cache/aiflame: one warm cache for all users of a machine, and
    root never writes into a directory where someone else can plant links. Others use
    $XDG_CACHE_HOME/aiflame, by default ~/.cache/aiflame.

    Raises:
        EnvironmentUnfit: Nothing says where that is.
    """
    if os.geteuid() == 0:
        return _ROOT_CACHE
    return user_folder("XDG_CACHE_HOME", ".cache") / "aiflame"


def store_key(*cache_keys: str) -> str:
    """One file name for what was made from these ELF images: build id first, for the reader."""
    digest = hashlib.sha256("\n".join(cache_keys).encode()).hexdigest()[:24]
    return f"{cache_keys[0].split('-', 1)[0][:40]}-{digest}"


class Cache(Protocol):
    """What is kept between runs, by name; `Store` says what each does."""

    def open(self, name: str) -> mmap.mmap | None: ...

    def write(self, name: str, chunks: Iterable[bytes | memoryview | mmap.mmap]) -> bool: ...

    def remove(self, name: str) -> None: ...


class Store:
    """A bounded directory of cache files.

    Args:
        directory: Made if missing, with mode 0700; None works without a cache.
        max_bytes: Bound on what all files take on disk.
    """

    def __init__(self, directory: Path | None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._directory = private_directory(directory) if directory else None
        self._max_bytes = max_bytes
        # All names, a line each, and the directory's time of change that they are as of.
        self._names, self._names_of_ns = "", 0

    @property
    def usable(self) -> bool:
        """Whether there is a directory to keep files in."""
        return self._directory is not None

    def open(self, name: str) -> mmap.mmap | None:
        """Map a cache file read-only and mark it as used; None when there is none."""
        fd = self.descriptor(name)
        if fd is None:
            return None
        try:
            return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: the file is empty
            return None
        finally:
            os.close(fd)

    def descriptor(self, name: str) -> int | None:
        """Open a cache file and mark it as used; None when there is none. The caller closes it."""
        if self._directory is None:
            return None
        try:
            fd = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(fd)
        return fd

    def write(self, name: str, chunks: Iterable[bytes | memoryview | mmap.mmap]) -> bool:
        """Write one file whole; False when it could not be written (the cache is then as before).

        Args:
            name: File name without a directory.
            chunks: Contents, in order.
        """
        if self._directory is None:
            return False
        try:
            fd, temporary = tempfile.mkstemp(dir=self._directory, prefix=".new-")
        except OSError as error:
            self._make_room(error)
            return False
        try:
            with os.fdopen(fd, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                size_bytes = file.tell()
            Path(temporary).rename(self._directory / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            self._make_room(error)
            return False
        # With thousands of small files looking at all takes far longer than writing one. Many
        # processes write some files each: chance needs nobody to count for all of them.
        taken_bytes = max(size_bytes, _PAGE_BYTES)
        if random.random() * self._max_bytes * _TRIM_EVERY < taken_bytes:  # noqa: S311 - no secret
            self._trim(self._directory)
        return True

    def _make_room(self, error: OSError) -> None:
        """Removes what was used longest ago where the disk is full of it, for the next file.

        Where others have filled it, they would have that, too.
        """
        if self._directory is not None and error.errno in DISK_FULL:
            with contextlib.suppress(OSError):
                disk = os.statvfs(self._directory)
                used_bytes = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
                self._trim(self._directory, full_of_bytes=used_bytes)

    def holds(self, part: str) -> bool:
        """Whether there is a file with this in its name."""
        if self._directory is None:
            return False
        with contextlib.suppress(OSError):
            # 8,000 files take 5 ms to list, and are asked for four times a second.
            changed_ns = self._directory.stat().st_mtime_ns
            if changed_ns != self._names_of_ns:
                is_settled = time.time_ns() - changed_ns > _TICK_NS
                with os.scandir(self._directory) as entries:
                    self._names = "\n".join(entry.name for entry in entries)
                self._names_of_ns = changed_ns if is_settled else 0
            return part in self._names
        return False

    def remove(self, name: str) -> None:
        """Forget a file, for instance a damaged one."""
        if self._directory is not None:
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()

    def _trim(self, directory: Path, full_of_bytes: int = 0) -> None:
        files: list[tuple[float, str, int]] = []
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    taken_bytes = max(facts.st_size, facts.st_blocks * _BLOCK_BYTES)
                    files.append((facts.st_mtime, entry.name, taken_bytes))
        total = sum(size for _, _, size in files)
        is_ours = full_of_bytes > 0 and total > full_of_bytes * _OURS
        bound = total if is_ours else self._max_bytes
        if total <= bound and not is_ours:
            return
        for _, name, size in sorted(files):
            if total <= bound * _TRIM_TO:
                return
            self.remove(name)
            total -= size
