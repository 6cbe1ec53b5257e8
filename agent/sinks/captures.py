# SPDX-License-Identifier: Apache-2.0
"""Captures in a directory, the oldest removed when they are too many or too old.

Any of them opens with `aiflame report`. They are private to who runs the agent (mode 0600), and a
name is there once its file is whole. Files of other nodes stay: the directory may be one that hosts
share. So a host with another name at each start is to be given one (`node`).
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.limits import is_disk_full
from aiflame.agent.model.profile import NS_PER_S
from aiflame.agent.outfile import unfinished_outputs, write_output
from aiflame.agent.settings import Kind, setting

# When it began (UTC), and then the milliseconds, so that names sort by time.
_TIME = "%Y%m%dT%H%M%S"
_ENDING = ".aiflame"
# Writing takes seconds, on a slow file system minutes: who was at an older one was killed.
_UNFINISHED_S = 3600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Keys of [sinks.captures]."""

    directory: Path = setting(
        Kind.PATH, "where captures go; it is made where the directory above it is there"
    )
    max_size: int = setting(
        Kind.BYTES,
        "the most that all of this node may take; those of others stay (see `node`)",
        1 * 10**9,
        least=10**6,
    )
    max_age: float = setting(
        Kind.SECONDS,
        "older ones of this node are removed",
        24 * 3600.0,
        least=60,
        most=10 * 365 * 86400,
    )
    command_lines: bool = setting(
        Kind.FLAG, "also what processes were called with; what looks like a secret is masked", False
    )


class _File(NamedTuple):
    name: str
    size_bytes: int
    modified_s: float


class CaptureFiles:
    """The files of one directory.

    Args:
        settings: Where, and how many.
        node: Stands in their names.

    Attributes:
        has_command_lines: Whether command lines are for them.
    """

    def __init__(self, settings: Settings, node: str) -> None:
        self.has_command_lines = settings.command_lines
        self._settings = settings
        node = re.sub(r"[^A-Za-z0-9._-]", "_", node)
        self._prefix = f"aiflame-{node}-"
        name = re.escape(self._prefix) + r"\d{8}T\d{6}\.\d{3}Z" + re.escape(_ENDING)
        self._ours = re.compile(name)
        self._unfinished = unfinished_outputs(name)

    def put(self, capture: Path, begin_unix_ns: int) -> Path:
        """Copies a capture into the directory, and removes what is too much.

        Args:
            capture: A whole one, in a folder that nobody else may write to.
            begin_unix_ns: When it began.

        Returns:
            Its new path.

        Raises:
            AiflameError: It cannot be written there.
        """
        seconds, ns = divmod(begin_unix_ns, NS_PER_S)
        when = f"{time.strftime(_TIME, time.gmtime(seconds))}.{ns // 10**6:03}Z"
        path = self._settings.directory / f"{self._prefix}{when}{_ENDING}"
        with suppress(OSError):  # it is there, or writing says why it cannot be
            self._settings.directory.mkdir(mode=0o700)
        size_bytes = capture.stat().st_size
        left = self._make_room(size_bytes)
        while True:
            error = self._why_not_copied(capture, path)
            if error is None:
                return path
            # The newest is wanted, also where the disk has less room than `max_size` says. Unless
            # all that is here would not make enough.
            if not (is_disk_full(error) and self._may_have_room(size_bytes, left)):
                raise error
            if not self._remove(left.pop(0).name):
                raise error

    def _why_not_copied(self, capture: Path, path: Path) -> AiflameError | None:
        try:
            with capture.open("rb") as file:
                # The same stretch may be written again after a crash.
                write_output(path, file, force=True, is_named=False, is_private=True)
        except AiflameError as error:
            return error
        return None

    def _may_have_room(self, size_bytes: int, left: Sequence[_File]) -> bool:
        try:
            disk = os.statvfs(self._settings.directory)
        except OSError:
            return False
        free_bytes = disk.f_bavail * disk.f_frsize
        return bool(left) and free_bytes + sum(file.size_bytes for file in left) > size_bytes

    def _make_room(self, size_bytes: int) -> list[_File]:
        """Removes what is too old, and the oldest until there is room for a new one.

        Returns:
            Those that stay, the oldest first.
        """
        found = []
        with suppress(OSError), os.scandir(self._settings.directory) as entries:
            for entry in entries:
                # Other hosts' are left alone, and not even looked at: there may be thousands.
                is_whole = self._ours.fullmatch(entry.name) is not None
                if not (is_whole or self._unfinished.fullmatch(entry.name)):
                    continue
                with suppress(OSError):  # it has gone
                    facts = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(facts.st_mode):
                        continue
                    if is_whole:
                        found.append(_File(entry.name, facts.st_size, facts.st_mtime))
                    elif facts.st_mtime < time.time() - _UNFINISHED_S:
                        self._remove(entry.name)
        room = self._settings.max_size - size_bytes - sum(file.size_bytes for file in found)
        oldest_s = time.time() - self._settings.max_age
        left = []
        for file in sorted(found, key=lambda file: file.name):
            is_wanted = room >= 0 and file.modified_s >= oldest_s
            if is_wanted or not self._remove(file.name):
                left.append(file)
            else:
                room += file.size_bytes
        return left

    def _remove(self, name: str) -> bool:
        try:
            (self._settings.directory / name).unlink()
        except OSError:
            return False
        return True


def check(settings: Settings) -> None:
    """Refuses a directory that is not there, nor one to make it in.

    Raises:
        UsageError: It is not.
    """
    directory = settings.directory
    if not directory.is_dir() and (directory.exists() or not directory.parent.is_dir()):
        raise UsageError(
            f"sinks.captures.directory: no such directory: {settings.directory}",
            f"mkdir -p {settings.directory}",
        )


def make(settings: Settings, node: str) -> CaptureFiles:
    """Makes the sink."""
    return CaptureFiles(settings, node)


def describe(settings: Settings) -> str:
    """Says where they are."""
    hours = settings.max_age / 3600
    size_mb = settings.max_size / 1e6
    return f"files in {settings.directory}, the newest {size_mb:,.0f} MB of {hours:,.1f} hours"
