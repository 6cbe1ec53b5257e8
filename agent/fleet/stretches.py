# SPDX-License-Identifier: Apache-2.0
"""Stretches of a recording on disk: a folder of segments each, the newest kept for a while.

A stretch is done once what it has is in the queues of all sinks. One that is not done when the
agent ends, whatever ends it, is named and sent when the agent is started again.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from aiflame.agent.errors import AiflameError, EnvironmentUnfit
from aiflame.agent.fleet.log import Log
from aiflame.agent.model.profile import NS_PER_S
from aiflame.agent.model.window import Window
from aiflame.agent.outfile import private_directory
from aiflame.agent.sinks.segments import SegmentSink

_FOLDER = "stretches"
# A stretch begins now at the latest; the clock may be set while that is looked at.
_AHEAD_NS = 60_000_000_000
_NAME = re.compile(r"\d{20}")  # when it began
_DONE = "done"
_TRIES = "tries"
_KERNEL_FILE = "kernel-"

# What it takes to name a stretch may end a process; after so many, it is given up.
TRIES = 3


class Stretch:
    """The stretch that is being written.

    Args:
        folder: A new one, for its segments.
        facts: Of the recording.
        started_ns: Where its first window begins, since the recording's start.
    """

    def __init__(self, folder: Path, facts: Mapping[str, str | int], started_ns: int) -> None:
        self.folder = folder
        self.started_ns = started_ns
        self.windows = 0
        self._segments = SegmentSink(folder, facts)

    def put(self, window: Window) -> None:
        """Appends a window.

        Raises:
            DiskFull: It is not there; all before are.
        """
        self._segments.put(window)
        self.windows += 1

    def remove(self) -> None:
        """Removes it: nothing is in it."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Closes its file."""
        self._segments.close()


class Stretches:
    """The stretches of a host.

    Args:
        directory: Of the agent; it alone may write there.
        log: Takes a line for each event.

    Raises:
        EnvironmentUnfit: There is no such directory.
    """

    def __init__(self, directory: Path, log: Log) -> None:
        own = private_directory(directory)
        folder = None if own is None else private_directory(own / _FOLDER)
        if folder is None:
            raise EnvironmentUnfit(
                f"{directory} cannot be made, or others may write to it",
                f"mkdir -p {directory} && chmod 700 {directory}, or set `directory`",
            )
        self._folder = folder
        self._log = log

    def begin(self, facts: Mapping[str, str | int], window: Window) -> Stretch:
        """Begins a stretch with a window that is not in it yet.

        Raises:
            AiflameError: It cannot be made.
        """
        begin_unix_ns = int(facts["started_unix_ns"]) + window.start_ns
        path = self._folder / f"{begin_unix_ns:020d}"
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise AiflameError(f"cannot make {path}: {error.strerror}") from error
        return Stretch(path, facts, window.start_ns)

    def all(self) -> list[Path]:
        """Returns the folders of all, oldest first."""
        return folders_of(self._folder.parent)

    def undone(self) -> list[Path]:
        """Returns the folders of those that are not done, oldest first."""
        return [path for path in self.all() if not is_done(path)]

    def trim(self, current: Path | None, now_unix_ns: int, keep_s: float, bytes_max: int) -> int:
        """Removes what is done and old, and then the oldest until the rest may stay.

        Args:
            current: What is written to.
            now_unix_ns: The time.
            keep_s: How long the newest stay.
            bytes_max: How much they may take.

        Returns:
            How many were removed that had not been sent.
        """
        found = self.all()
        sizes = {path: _size_bytes(path) for path in found}
        total = sum(sizes.values())
        # Each lasted until the next began.
        following = {one: int(other.name) for one, other in itertools.pairwise(found)}
        for path in self.done(current):
            age_ns = now_unix_ns - following.get(path, now_unix_ns)
            is_old = age_ns > keep_s * NS_PER_S or age_ns < -_AHEAD_NS
            if is_old or total > bytes_max:
                total -= sizes[path]
                shutil.rmtree(path, ignore_errors=True)
        unsent = 0
        for path in [path for path in found if path != current and path.is_dir()]:
            if total > bytes_max:
                unsent += 1
                total -= sizes[path]
                shutil.rmtree(path, ignore_errors=True)
                self._log.say_seldom(
                    "stretch dropped", f"stretch {path.name} dropped unsent: more than `keep_size`"
                )
        return unsent

    def done(self, current: Path | None) -> list[Path]:
        """Returns the folders of those that are done, oldest first.

        Args:
            current: What is written to, which is not.
        """
        return [path for path in self.all() if path != current and is_done(path)]

    def drop_oldest(self, current: Path | None, most: int) -> int:
        """Removes the oldest that are done, however new they are: there is no room on the disk.

        Args:
            current: What is written to.
            most: How many.

        Returns:
            How many were.
        """
        for path in (found := self.done(current)[:most]):
            shutil.rmtree(path, ignore_errors=True)
        return sum(not path.exists() for path in found)


def folders_of(directory: Path) -> list[Path]:
    """Returns the folders of the stretches of an agent with that directory, oldest first.

    Those of a clock that was ahead come before all others: no time will make them the oldest.
    """
    with suppress(OSError):
        # What else is there, as the lost+found of a file system, is not ours.
        found = (path for path in (directory / _FOLDER).iterdir() if _NAME.fullmatch(path.name))
        until_ns = time.time_ns() + _AHEAD_NS
        return sorted(
            (path for path in found if path.is_dir()),
            key=lambda path: (int(path.name) <= until_ns, path.name),
        )
    return []


def keep_kernel_file(folder: Path, binary: int, data: bytes) -> None:
    """Keeps a file of kernels in a stretch: a capture may be asked for when it is gone elsewhere.

    Args:
        folder: Of the stretch.
        binary: The file's number.
        data: The file.
    """
    path = folder / f"{_KERNEL_FILE}{binary}"
    new = path.with_suffix(".new")
    with suppress(OSError):  # where there is no room it is missing
        new.write_bytes(data)
        new.rename(path)


def kept_kernel_file(folders: Iterable[Path], binary: int) -> int | None:
    """Returns a descriptor of a file of kernels that any of some stretches keeps, None if none."""
    for folder in folders:
        with suppress(OSError):
            return os.open(folder / f"{_KERNEL_FILE}{binary}", os.O_RDONLY | os.O_CLOEXEC)
    return None


def is_done(folder: Path) -> bool:
    """Whether all that a stretch has is in the queues of sinks."""
    return (folder / _DONE).exists()


def mark_done(folder: Path) -> None:
    """Takes note of that; where the disk is full, it is sent once more after the next start."""
    with suppress(OSError):
        (folder / _DONE).touch(mode=0o600)


def count_try(folder: Path) -> int:
    """Takes note of a try to name a stretch; returns the number of this one."""
    path = folder / _TRIES
    try:
        with path.open("ab") as file:
            file.write(b".")
            return file.tell()
    except OSError:
        return 1


def forget_tries(folder: Path) -> None:
    """Has none of the tries so far count."""
    with suppress(OSError):
        (folder / _TRIES).unlink(missing_ok=True)


def _size_bytes(folder: Path) -> int:
    total = 0
    with suppress(OSError):
        for path in folder.iterdir():
            total += path.stat().st_size
    return total
