# SPDX-License-Identifier: Apache-2.0
"""Files of targets, and what /proc tells of their memory, without waiting for ever.

An open may never end, as on a file system that the target serves itself, or whose server is gone;
so a child opens (see `opener_worker`). One that gets nowhere is killed, and what it was at is not
tried again. Files of which reads may hang as well are never open for reading here: the child reads
them, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from aiflame.agent.inspector import opener_worker as worker
from aiflame.agent.inspector.child import Child, Children, Message, began
from aiflame.agent.losses import LossKind

# A file on a busy disk opens in a tenth of the first, on a network file system in a fifth. Each
# one that takes longer halves the patience with the next, down to the last.
_PATIENCE_S, _LEAST_PATIENCE_S = 1.0, 0.05
# What all files of one process may take together: whoever has a thousand that all answer slowly
# must not stop a recording. Three hundred on a busy network file system take 2 s.
_PATIENCE_WITH_PROCESS_S = 5.0
# What a target with 10,000 files has stuck is not for anybody to read.
_MAX_NAMES = 256
# Processes whose waiting is added up: those that came last.
_MAX_PROCESSES = 4096

# Headers, tables of sections and notes are at both ends of a file: two blocks hold them.
_BLOCK_BYTES = 1 << 16
_MAX_BLOCKS = 8


class OpenedFile(NamedTuple):
    """A file of a target. The descriptor is the receiver's.

    Attributes:
        fd: To be read where `is_local`; else O_PATH, for children, and for `Opener.read`.
        is_local: Whether nobody but this kernel has its bytes, so that reads end.
        device: As stat(2) tells of it, as are the others.
        inode: Of the file.
        size_bytes: When it was opened.
        owner_uid: As this user namespace sees it.
        links: How many names it has.
    """

    fd: int
    is_local: bool
    device: int
    inode: int
    size_bytes: int
    owner_uid: int
    links: int


class Opener:
    """Opens files. The child is started on first use."""

    def __init__(self) -> None:
        self._children = Children(lambda: Child("opener_worker"))
        self._stuck: dict[str, str] = {}
        self._given_up = self._era = 0
        self._waited_s: OrderedDict[int, float] = OrderedDict()
        # Of those with which something was given up: another one may have a number by now.
        self._began: dict[int, bytes] = {}

    @property
    def losses(self) -> dict[LossKind, int]:
        """What is missing since it did not open."""
        return {
            LossKind.FILES_STUCK: max(self._children.stuck, self._given_up),
            LossKind.OPENER_DIED: self._children.deaths,
        }

    @property
    def loss_files(self) -> dict[LossKind, set[str]]:
        """What was given up."""
        return {LossKind.FILES_STUCK: {*self._stuck.values()}}

    @property
    def failures(self) -> str:
        """What the child could not give up before it began, in words."""
        return self._children.failures

    @property
    def pid(self) -> int | None:
        """Of the child, None where there is none."""
        return self._children.pid

    def start(self) -> None:
        """Starts the child, for who will need it soon."""
        self._children.start()

    def mapped(
        self, pid: int, start: int, end: int, device: str, inode: int, path: str, root: str = ""
    ) -> OpenedFile:
        """Opens the very file that a process has mapped, also a deleted one.

        Where the kernel's own link to it is not permitted, or gone with the process, the file at
        its path is opened, if it is the same.

        Args:
            pid: The process.
            start: Where the mapping begins.
            end: Where it ends.
            device: Of the file, as /proc/PID/maps has it.
            inode: The same.
            path: The same.
            root: A root directory in which to look for the path where the process's own is gone,
                "" for none.

        Raises:
            OSError: It is gone, not permitted, not a regular file (EINVAL), another one (ESTALE),
                or does not open in time (ETIMEDOUT).
        """
        span, own_root = f"{start:x}-{end:x}", f"/proc/{pid}/root"
        question = ("mapped", str(pid), span, device, str(inode), own_root, path, root)
        return self._open(f"{device} {inode}", path, pid, *question)

    def beneath(self, root: str, path: str, *, follows_last: bool = True) -> OpenedFile:
        """Opens a file inside a root directory, which no link leads out of.

        Args:
            root: Path of the directory.
            path: As who has that root sees it.
            follows_last: Whether the last part may be a link.

        Raises:
            OSError: As `mapped`.
        """
        question = ("beneath", root, path, str(int(follows_last)))
        return self._open(f"{root} {path}", path, None, *question)

    def directory(self, root: str, path: str) -> OpenedFile:
        """Finds a directory inside a root directory, which no link leads out of: it is O_PATH.

        Looking into it by /proc/self/fd waits for nobody.

        Args:
            root: Path of the root directory.
            path: As who has that root sees it; the last part may not be a link.

        Raises:
            OSError: It is gone, not permitted, no directory or on a file system that is not local
                (ENOTDIR), or not found in time (ETIMEDOUT).
        """
        return self._open(f"{root} {path}", path, None, "directory", root, path)

    def root(self, pid: int) -> OpenedFile:
        """Opens a process's root directory, to find others beneath.

        Raises:
            OSError: As `mapped`.
        """
        words = f"root directory of process {pid}"
        return self._open(words, words, pid, "root", str(pid))

    def pipe(self, pid: int, number: int) -> OpenedFile:
        """Finds a pipe that a process has, to be opened by /proc/self/fd: it is O_PATH.

        Args:
            pid: The process.
            number: Its descriptor there.

        Raises:
            OSError: There is none, or it is no pipe, or one that has a name (EINVAL).
        """
        words = f"descriptor {number} of process {pid}"
        return self._open(words, words, pid, "pipe", str(pid), str(number))

    def proc(self, pid: int, name: str, limit: int) -> bytes:
        """Returns up to so many bytes of a file in /proc/PID; none where it cannot be read."""
        words = f"{name} of process {pid}"
        parts = []
        with contextlib.suppress(OSError):  # what was read before stands
            message: Message | None = self._ask(
                words, words, pid, ("proc", f"{pid}/{name}", str(limit))
            )
            while message is not None:
                error, has_more, *_ = worker.ANSWER.unpack_from(message.data)
                parts.append(message.data[worker.ANSWER.size :])
                if error or not has_more:
                    break
                message = self._wait(words, words, pid)
        return b"".join(parts)

    def read(self, fd: int, size: int, offset: int, pid: int, words: str) -> bytes:
        """Returns up to `size` bytes of a file that is not local, none where it has none.

        Args:
            fd: From here.
            size: In bytes.
            offset: The same.
            pid: Of a process that has mapped it.
            words: What it is called, for the user.

        Raises:
            OSError: It cannot be read, or not in time (ETIMEDOUT).
        """
        parts = []
        while size > 0:
            asked = min(size, worker.CHUNK_BYTES)
            message = self._ask(words, words, pid, ("read", str(asked), str(offset)), (fd,))
            _check(message)
            part = message.data[worker.ANSWER.size :]
            parts.append(part)
            if len(part) < asked:
                break
            size, offset = size - asked, offset + asked
        return b"".join(parts)

    def _open(self, key: str, words: str, pid: int | None, *question: str) -> OpenedFile:
        message = self._ask(key, words, pid, question)
        try:
            _check(message)
            (fd,) = message.fds
        except (OSError, ValueError):
            for one in message.fds:
                os.close(one)
            raise
        _, _, *facts = worker.ANSWER.unpack_from(message.data)
        return OpenedFile(fd, *facts)

    def _ask(
        self,
        key: str,
        words: str,
        pid: int | None,
        question: Sequence[str],
        fds: Sequence[int] = (),
    ) -> Message:
        """Asks a question, and returns the first message of the answer.

        Args:
            key: What it is about.
            words: The same for the user.
            pid: Whose patience it is, None for nobody's.
            question: As of `opener_worker`.
            fds: Descriptors that go with it.

        Raises:
            OSError: There is none (ETIMEDOUT, or EIO where there is no child any more).
        """
        self._children.look()
        if self._era != self._children.era:
            self._era = self._children.era
            self._stuck.clear()
            self._waited_s.clear()
            self._began.clear()
        if pid in self._began:
            self._forget_earlier(pid)
        if pid is not None and self._waited_s.get(pid, 0) >= _PATIENCE_WITH_PROCESS_S:
            words = f"further ones of process {pid}"
            self._give_up(words, words, pid)
        if key in self._stuck:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        data = b"\0".join(map(os.fsencode, question))
        while True:
            child = self._children.start()
            if child is None:
                raise OSError(errno.EIO, "nobody opens files any more")
            with contextlib.suppress(ConnectionError):  # it died: `_wait` notices
                child.send(data, fds)
            message = self._wait(key, words, pid)
            if message is not None:
                return message

    def _wait(self, key: str, words: str, pid: int | None) -> Message | None:
        """Returns the child's next message, None if it died.

        Raises:
            OSError: It got nowhere (ETIMEDOUT).
        """
        child, stuck = self._children.child, self._children.stuck
        if child is None:
            return None
        has_begun, begun_s = child.is_ready, time.monotonic()
        patience_s = max(_PATIENCE_S / 2**self._children.recently_stuck, _LEAST_PATIENCE_S)
        message = self._children.wait(child, patience_s)
        if pid is not None and has_begun:
            self._waited_s[pid] = self._waited_s.pop(pid, 0) + time.monotonic() - begun_s
            if self._waited_s[pid] >= _PATIENCE_WITH_PROCESS_S and pid not in self._began:
                self._began[pid] = began(pid)
            if len(self._waited_s) > _MAX_PROCESSES:
                self._waited_s.popitem(last=False)
        if self._children.stuck > stuck:
            self._give_up(key, words, pid)
        return message

    def _forget_earlier(self, pid: int) -> None:
        """Forgets what was given up of a process whose number another one has by now."""
        if self._began[pid] == began(pid):
            return
        del self._began[pid]
        self._waited_s.pop(pid, None)
        for key in [key for key in self._stuck if key.endswith(f" process {pid}")]:
            del self._stuck[key]

    def _give_up(self, key: str, words: str, pid: int | None) -> NoReturn:
        if pid is not None and pid not in self._began:
            self._began[pid] = began(pid)
        if key not in self._stuck and len(self._stuck) < _MAX_NAMES:
            self._stuck[key] = words
            self._given_up += 1
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def is_stuck(self, key: str) -> bool:
        """Whether something was given up, by the name that `read` was told."""
        return key in self._stuck

    def close(self) -> None:
        """Ends the child."""
        self._children.close()


class RemoteFile:
    """A file of which reads may hang, read by the opener's child.

    Args:
        opener: Opened it.
        file: What it opened.
        pid: Of a process that has mapped it.
        path: What it is called, for the user.

    Attributes:
        identity: Device and inode.
        size_bytes: When it was opened.
        owner: User id.
    """

    def __init__(self, opener: Opener, file: OpenedFile, pid: int, path: str) -> None:
        self._opener = opener
        self._file = file
        self._pid = pid
        self._path = path
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self.identity = file.device, file.inode
        self.size_bytes = file.size_bytes
        self.owner = file.owner_uid

    @property
    def is_stuck(self) -> bool:
        """Whether a read of it got nowhere."""
        return self._opener.is_stuck(self._path)

    def read(self, size: int, offset: int) -> bytes:
        """Returns up to `size` bytes.

        Raises:
            OSError: It cannot be read, or not in time (ETIMEDOUT).
        """
        first, last = offset // _BLOCK_BYTES, (offset + size - 1) // _BLOCK_BYTES
        if last - first >= _MAX_BLOCKS:
            return self._read(size, offset)
        data = b"".join(self._block(number) for number in range(first, last + 1))
        begin = offset - first * _BLOCK_BYTES
        return data[begin : begin + size]

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            self._blocks[number] = self._read(_BLOCK_BYTES, number * _BLOCK_BYTES)
            if len(self._blocks) > _MAX_BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[number]

    def _read(self, size: int, offset: int) -> bytes:
        return self._opener.read(self._file.fd, size, offset, self._pid, self._path)


def _check(message: Message) -> None:
    error, *_ = worker.ANSWER.unpack_from(message.data)
    if error:
        raise OSError(error, os.strerror(error))
