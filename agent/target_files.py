# SPDX-License-Identifier: Apache-2.0
"""Reads files that targets chose, so that a bad one costs its own contents and nothing else.

A file that any user's program maps is parsed by a recorder with root's rights, in its main thread.
It may lie about every number in it, be cut while it is read, or be made to take hours: 400 symbol
tables that share one sparse string table of 1 GB fit into 48 KB of disk. So whoever reads one in
the recorder, in a dump or in doctor does it inside `FileGuard.each_file`, through the `TargetFile`
that it hands out:

- one budget of bytes and of CPU time for each file, and a pool of CPU time for all files of one
  owner, which a thousand files that each just keep to the budget would use up;
- one catch for each file: whatever parsing raises becomes an entry in `FileGuard.bad`.

Nothing is mapped: a file that shrinks under a mapping kills its reader with SIGBUS.

A read that may never return, as from a file system that the target serves itself, is a child's:
`FileGuard.remote` has those files.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from aiflame.agent.errors import AiflameError

# libtorch_cpu, among the largest libraries that exist, has 76 MB of names and 13 MB of symbols,
# and takes 0.2 s.
MAX_BYTES = 512 << 20
MAX_CPU_S = 2.0
# For all files of one owner, who has it again after an hour. Three thousand sound ones take 1 s.
_POOL_CPU_S, _POOL_FILLS_S = 20.0, 3600.0
# What a file gets once the pool of its owner is empty: of 928 system libraries one takes over 5 ms.
_LEAST_CPU_S = 0.05

# pread(2) takes a signed offset.
_MAX_OFFSET = (1 << 63) - 1
# Those that came last: a program may make bad ones all day.
_MAX_BAD = 1024
_MAX_REASON_CHARACTERS = 100


class BadTargetFile(AiflameError):
    """A file is damaged, cannot be read, or costs more to read than any real one."""


class RemoteFile(Protocol):
    """A file of which nothing is asked here but by way of somebody who may wait for ever.

    Attributes:
        identity: Device and inode.
        size_bytes: Its length.
        owner: User id.
    """

    identity: tuple[int, int]
    size_bytes: int
    owner: int

    @property
    def is_stuck(self) -> bool:
        """Whether a read of it got nowhere."""

    def read(self, size: int, offset: int) -> bytes:
        """Returns up to `size` bytes; OSError as of pread(2), or that there is no answer."""


class TargetFile:
    """An open file, read within a budget.

    Args:
        fd: Descriptor; stays the caller's, its position is left alone.
        remote: What is asked instead of the descriptor, if anything.
        max_bytes: The budget.

    Attributes:
        fd: The descriptor.
        size_bytes: Length of the file when it was first looked at; nothing is read past it.
        owner: User id; -1 where the file cannot be asked.
    """

    def __init__(
        self, fd: int, remote: RemoteFile | None = None, max_bytes: int = MAX_BYTES
    ) -> None:
        self.fd = fd
        self._remote = remote
        if remote is not None:
            self.size_bytes, self.owner = remote.size_bytes, remote.owner
        else:
            self.size_bytes, self.owner = _size_and_owner(fd)
        self._bytes_left = max_bytes
        self._deadline_s = float("inf")

    def limit_cpu(self, cpu_s: float) -> None:
        """Has reading refused once this thread has used so much more CPU time."""
        self._deadline_s = time.thread_time() + cpu_s

    def read(self, size: int, offset: int) -> bytes:
        """Returns up to `size` bytes, none where the file has none.

        Raises:
            BadTargetFile: The budget is used up, or the file cannot be read.
        """
        size = min(size, self.size_bytes - offset)
        if size <= 0 or not 0 <= offset <= _MAX_OFFSET:
            self.spend(0)
            return b""
        self.spend(size)
        try:
            if self._remote is not None:
                return self._remote.read(size, offset)
            return os.pread(self.fd, size, offset)
        except OSError as error:
            raise BadTargetFile(f"cannot read: {error.strerror}") from error

    def spend(self, size: int) -> None:
        """Takes note of bytes that are scanned once more.

        Raises:
            BadTargetFile: The budget is used up.
        """
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise BadTargetFile("more to read than any real file has")
        if time.thread_time() > self._deadline_s:
            raise BadTargetFile("takes longer to read than any real file")


def _size_and_owner(fd: int) -> tuple[int, int]:
    try:
        status = os.fstat(fd)
    except OSError:
        return 0, -1
    return status.st_size, status.st_uid


@dataclass(frozen=True, slots=True)
class GuardNotes:
    """What a guard has taken note of, for the process that this one is a copy of.

    Attributes:
        bad: As of a guard.
        bad_count: The same.
        pools_s: By user id, CPU time that the files of an owner may still take, and since when.
    """

    bad: dict[str, str]
    bad_count: int
    pools_s: dict[int, tuple[float, float]]


class FileGuard:
    """Keeps account of the files of targets in one recording or dump.

    Args:
        told: Is told of bad files in its place.

    Attributes:
        bad: Why a file was not read, or not all of it, by its path: of those that came last.
        bad_count: How many were.
        remote: Those that must not be read here, by descriptor.
    """

    def __init__(self, told: FileGuard | None = None) -> None:
        self.bad: dict[str, str] = {}
        self.bad_count = 0
        self.remote: dict[int, RemoteFile] = {}
        self._told = told
        self._pools_s: dict[int, tuple[float, float]] = {}

    def notes(self) -> GuardNotes:
        """Returns what it has taken note of."""
        return GuardNotes(self.bad, self.bad_count, self._pools_s)

    def learn(self, notes: GuardNotes) -> None:
        """Takes what it has noted in a copy of this process, which had all that this one has."""
        self.bad, self.bad_count, self._pools_s = notes.bad, notes.bad_count, notes.pools_s

    def each_file(self, path: str, fd: int = -1) -> GuardedFile:
        """Returns a context in which one file is read; whatever is raised there ends it quietly.

        Other errors of our own get through: they are answers that callers expect (an interpreter of
        an unknown version), or the second Ctrl-C.

        Args:
            path: What the file is called, for the user.
            fd: Of the file; -1 where only what was read before is used.
        """
        return GuardedFile(self, path, fd)

    def blame(self, path: str, why: str) -> None:
        """Takes note that a file was not read, or not all of it."""
        if self._told is not None:
            self._told.blame(path, why)
        elif path not in self.bad:
            self.bad[path] = why[:_MAX_REASON_CHARACTERS]
            self.bad_count += 1
            if len(self.bad) > _MAX_BAD:
                del self.bad[next(iter(self.bad))]

    def allowance_s(self, owner: int) -> float:
        """Returns how much CPU time the next file of an owner may take."""
        return min(MAX_CPU_S, max(self._left_s(owner, time.monotonic()), _LEAST_CPU_S))

    def charge(self, owner: int, cpu_s: float) -> None:
        """Takes what a file took from the pool of its owner."""
        now_s = time.monotonic()
        left_s = max(self._left_s(owner, now_s) - cpu_s, -_POOL_CPU_S)
        self._pools_s[owner] = left_s, now_s

    def _left_s(self, owner: int, now_s: float) -> float:
        left_s, since_s = self._pools_s.get(owner, (_POOL_CPU_S, now_s))
        return min(left_s + (now_s - since_s) * _POOL_CPU_S / _POOL_FILLS_S, _POOL_CPU_S)


class GuardedFile:
    """The context of `FileGuard.each_file`."""

    def __init__(self, guard: FileGuard, path: str, fd: int) -> None:
        self._guard = guard
        self._path = path
        self._fd = fd
        self._owner = -1
        self._begun_s = 0.0

    def __enter__(self) -> TargetFile:
        self._begun_s = time.thread_time()
        file = TargetFile(self._fd, self._guard.remote.get(self._fd))
        self._owner = file.owner
        file.limit_cpu(self._guard.allowance_s(file.owner))
        return file

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._guard.charge(self._owner, time.thread_time() - self._begun_s)
        if isinstance(error, BadTargetFile):
            self._guard.blame(self._path, str(error))
            return True
        if isinstance(error, AiflameError) or not isinstance(error, Exception):
            return False
        # Any exception: parsers and numpy have raised a dozen kinds on made-up files,
        # and each that was not thought of would end the recording.
        self._guard.blame(self._path, f"{type(error).__name__}: {error}")
        return True
