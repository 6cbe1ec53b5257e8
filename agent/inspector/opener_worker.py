# SPDX-License-Identifier: Apache-2.0
"""The process that opens files of targets, and reads those of /proc that may hang, for `opener`.

Nothing that it does is sure to end: a file may lie on a file system that its own user serves, and
what /proc tells of a process's memory waits for whoever is changing that. Then this process is
killed. It parses nothing that a target wrote, hands descriptors and bytes on, and has given up all
that it does not need. It stays the user that its parent is: a file system in user space lets in
none but its owner, unless it was told to.

A question is one message: fields with zero bytes in between, the first of which says which one it
is. An answer is one, or several where there is more to read. Imports little, since this is started
before a recording, which waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
import struct
import sys

# The whole of `socket` takes 5 ms more to import.
from _socket import CMSG_LEN, SCM_RIGHTS, SOL_SOCKET, socket
from collections.abc import Callable, Sequence

from aiflame.agent.inspector import rootfs, sandbox

# Error number, 0 for none; whether this message is not the last; and of a file whether this kernel
# alone has its bytes, device, inode, size in bytes, user, and how many names.
ANSWER = struct.Struct("<i??QQQIQ")
_DESCRIPTOR = struct.Struct("<i")
_MAX_QUESTION_BYTES = 16384  # two paths of 4,096 bytes each, and more
# Finds room in a socket's buffer (net.core.wmem_default is 212,992).
CHUNK_BYTES = 1 << 17

_PAGE_BYTES = 4096
_PROT_READ, _MAP_PRIVATE = 1, 2
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(3 * (ctypes.c_int,)), ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class _Opener:
    """Answers questions.

    Args:
        connection: Brings them.
    """

    def __init__(self, connection: socket) -> None:
        self._connection = connection
        self._kinds: dict[bytes, Callable[..., None]] = {
            b"mapped": self._mapped,
            b"beneath": self._beneath,
            b"directory": self._directory,
            b"root": self._root,
            b"pipe": self._pipe,
            b"proc": self._proc,
            b"read": self._read,
        }

    def serve(self) -> None:
        """Answers until nobody asks any more."""
        while True:
            question, control, _, _ = self._connection.recvmsg(
                _MAX_QUESTION_BYTES, CMSG_LEN(_DESCRIPTOR.size)
            )
            if not question:
                return
            fds = [_DESCRIPTOR.unpack(data)[0] for _, _, data in control]
            kind, *fields = question.split(b"\0")
            try:
                self._kinds[kind](*fields, *fds)
            except OSError as error:
                self._answer(error=error.errno or errno.EIO)
            finally:
                for fd in fds:
                    os.close(fd)

    def _answer(
        self,
        data: bytes = b"",
        *,
        error: int = 0,
        has_more: bool = False,
        is_local: bool = True,
        facts: os.stat_result | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        known = (0,) * 5
        if facts is not None:
            known = facts.st_dev, facts.st_ino, facts.st_size, facts.st_uid, facts.st_nlink
        head = ANSWER.pack(error, has_more, is_local, *known)
        rights = [(SOL_SOCKET, SCM_RIGHTS, _DESCRIPTOR.pack(fd)) for fd in fds]
        self._connection.sendmsg([head, data], rights)

    def _mapped(
        self,
        pid: bytes,
        span: bytes,
        device: bytes,
        inode: bytes,
        own_root: bytes,
        path: bytes,
        other_root: bytes,
    ) -> None:
        """Opens what a process has mapped: by the kernel's own link to it, else by its path.

        That is looked for in its own root directory, or in another one if it is gone.
        """
        ways: tuple[Callable[[], int], ...] = (
            # The file itself, also a deleted one (v4.3 for CAP_SYS_ADMIN, v5.9 for
            # CAP_CHECKPOINT_RESTORE).
            lambda: os.open(b"/proc/%b/map_files/%b" % (pid, span), rootfs.LOOK_FLAGS),
            lambda: _look_beneath(own_root if _is_there(own_root) else other_root, path),
        )
        failure = OSError(errno.ENOENT, "no such mapping")
        for way in ways:
            try:
                found = way()
            except OSError as error:
                failure = error
                continue
            try:
                self._give(found, lambda fd: _is_file(fd, device, int(inode)))
                return
            except OSError as error:
                failure = error
            finally:
                os.close(found)
        raise failure

    def _beneath(self, root: bytes, path: bytes, follows_last: bytes) -> None:
        """Opens a file by its path inside a root directory."""
        found = _look_beneath(root, path, follows_last == b"1")
        try:
            self._give(found)
        finally:
            os.close(found)

    def _directory(self, root: bytes, path: bytes) -> None:
        """Finds a directory by its path inside a root directory, if its file system is local."""
        found = _look_beneath(root, path, follows_last=False)
        try:
            facts = os.fstat(found)
            if not stat.S_ISDIR(facts.st_mode) or not rootfs.is_local(found):
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            self._answer(facts=facts, fds=[found])
        finally:
            os.close(found)

    def _give(self, found: int, is_wanted: Callable[[int], bool] = lambda fd: True) -> None:
        """Hands a file over: to be read, or to be looked at only where reading it may hang.

        Raises:
            OSError: It is not a regular file, or not the one that is wanted (ESTALE).
        """
        fd = rootfs.reopen_regular(found, "")
        try:
            if not is_wanted(fd):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            facts, is_local = os.fstat(fd), rootfs.is_local(fd)
            if is_local:
                self._answer(is_local=True, facts=facts, fds=[fd])
                return
        finally:
            os.close(fd)  # which may hang as well, so the answer comes after it
        self._answer(is_local=False, facts=facts, fds=[found])

    def _root(self, pid: bytes) -> None:
        """Opens a process's root directory."""
        root = os.open(b"/proc/%b/root" % pid, rootfs.LOOK_FLAGS | os.O_DIRECTORY)
        try:
            self._answer(facts=os.fstat(root), fds=[root])
        finally:
            os.close(root)

    def _pipe(self, pid: bytes, number: bytes) -> None:
        """Finds a pipe of a process's by its descriptor there: none that has a name anywhere."""
        found = os.open(b"/proc/%b/fd/%b" % (pid, number), rootfs.LOOK_FLAGS)
        try:
            if not rootfs.is_anonymous_pipe(found):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self._answer(facts=os.fstat(found), fds=[found])
        finally:
            os.close(found)

    def _proc(self, name: bytes, limit: bytes) -> None:
        """Reads a file of /proc to its end, or a limit."""
        fd = os.open(b"/proc/%b" % name, os.O_RDONLY | os.O_CLOEXEC)
        left, has_more = int(limit), True
        try:
            while has_more:
                chunk = b""
                size = min(left, CHUNK_BYTES)
                while len(chunk) < size and (part := os.read(fd, size - len(chunk))):
                    chunk += part
                left -= len(chunk)
                has_more = len(chunk) == CHUNK_BYTES and left > 0
                self._answer(chunk, has_more=has_more)
        finally:
            os.close(fd)

    def _read(self, size: bytes, offset: bytes, found: int) -> None:
        """Reads of a file that was handed over to be looked at."""
        fd = rootfs.reopen_regular(found, "")
        try:
            data = os.pread(fd, min(int(size), CHUNK_BYTES), int(offset))
        finally:
            os.close(fd)
        self._answer(data)


def _is_there(root: bytes) -> bool:
    """Whether a process's root directory is still to be had."""
    try:
        os.close(rootfs.open_root(os.fsdecode(root)))
    except OSError:
        return False
    return True


def _look_beneath(root: bytes, path: bytes, follows_last: bool = True) -> int:
    root_fd = rootfs.open_root(os.fsdecode(root))
    try:
        return rootfs.look_beneath(root_fd, os.fsdecode(path), follows_last)
    finally:
        os.close(root_fd)


def _is_file(fd: int, device: bytes, inode: int) -> bool:
    """Whether a file is the one of that device and inode, as /proc/PID/maps tells of them."""
    facts = os.fstat(fd)
    own = b"%02x:%02x" % (os.major(facts.st_dev), os.minor(facts.st_dev))
    # btrfs and overlayfs tell fstat(2) of other numbers than those who map a file.
    return (own, facts.st_ino) == (device, inode) or _as_mapped(fd) == (device, inode)


def _as_mapped(fd: int) -> tuple[bytes, int]:
    """Returns the device and inode of a file as /proc/self/maps tells of them."""
    address = _libc.mmap(None, _PAGE_BYTES, _PROT_READ, _MAP_PRIVATE, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    maps = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while part := os.read(maps, CHUNK_BYTES):
            text += part
    finally:
        os.close(maps)
        _libc.munmap(address, _PAGE_BYTES)
    for line in text.split(b"\n"):
        if line.startswith(b"%x-" % address):
            _, _, _, device, inode = line.split(None, 5)[:5]
            return device, int(inode)
    return b"", 0


def main() -> None:
    """Serves until the socket is closed; arguments as of `child`."""
    number, parent_pid = map(int, sys.argv[1:])
    connection = socket(fileno=number)
    # It writes nothing.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    calls = {**sandbox.BASE_CALLS, **sandbox.OPENING_CALLS}
    # Where an old tool granted the one that was split up.
    is_split = sandbox.has(sandbox.CAP_CHECKPOINT_RESTORE)
    kept = (
        sandbox.CAP_DAC_READ_SEARCH,
        sandbox.CAP_SYS_PTRACE,
        sandbox.CAP_CHECKPOINT_RESTORE if is_split else sandbox.CAP_SYS_ADMIN,
    )
    failures = sandbox.enter(calls.values(), parent_pid, kept, becomes_nobody=False)
    connection.sendmsg([f"ready {'; '.join(failures)}".encode()])
    _Opener(connection).serve()


if __name__ == "__main__":
    main()
