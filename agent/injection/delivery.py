# SPDX-License-Identifier: Apache-2.0
"""Brings a library to where a target can load it.

A memory file is best, which the target makes for itself: it needs no directory that can be written
to, nor one that may be executed from, and leaves nothing behind. Where it cannot be had, or the
target sees no /proc, a file in a new directory of ours is next; it is gone as soon as it is loaded.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiflame.agent import kernelfs
from aiflame.agent.injection.tracer import InjectionRefused
from aiflame.agent.inspector import rootfs

_NAME_BITS = 32
_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - looked at before use
_PREFIX = ".aiflame-"
# Nobody loads for so long: who made it was killed.
_STALE_S = 600
_DIRECTORY_MODE, _FILE_MODE = 0o711, 0o444
# What only its user is to see, as all is that is not finished.
_OWN_DIRECTORY_MODE, _OWN_FILE_MODE = 0o700, 0o400
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 1 << 20


def memory_path(fd: int) -> str:
    """Returns a path of a target's own descriptor, another one each time.

    The dynamic loader takes two libraries of one path for the same, also when the descriptor is
    another file's by now (_dl_map_object in elf/dl-load.c of glibc).
    """
    bits = secrets.randbits(_NAME_BITS)
    parts = ("./" if bits >> bit & 1 else "/" for bit in range(_NAME_BITS))
    return f"/proc/self/fd/{''.join(parts)}{fd}"


def fill_memory(pid: int, fd: int, library: bytes) -> None:
    """Writes a library into a memory file of a target, which is empty.

    Only if it is memory: a target could put another file there, also one that it serves itself, and
    who asks that for anything, or closes it, may wait for ever and cannot be killed. A descriptor
    from O_PATH asks nothing of it, and the kernel tells in which mount that is
    (proc_pid_fdinfo(5)).

    Args:
        pid: The target.
        fd: The file's number there.
        library: What is written.

    Raises:
        OSError: It cannot be.
    """
    found = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        if _mount_of(found) != _memory_mount():
            raise OSError(0, "it is another file by now")
        there = os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(found)
    try:
        facts = os.fstat(there)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size:
            raise OSError(0, "it is another file by now")
        _write(there, library)
    finally:
        os.close(there)


def _memory_mount() -> int:
    """Returns the mount of all memory files: one inside the kernel has them (mm/shmem.c)."""
    fd = os.memfd_create("aiflame", os.MFD_CLOEXEC)
    try:
        return _mount_of(fd)
    finally:
        os.close(fd)


def _mount_of(fd: int) -> int:
    for line in kernelfs.read_text(f"/proc/self/fdinfo/{fd}").splitlines():
        name, _, value = line.partition(":")
        if name == "mnt_id":
            return int(value)
    raise OSError(0, "the kernel does not tell its mount")


def _write(fd: int, data: bytes) -> None:
    for at in range(0, len(data), _PIECE_BYTES):
        if os.write(fd, data[at : at + _PIECE_BYTES]) != len(data[at : at + _PIECE_BYTES]):
            raise OSError(0, "there is no room for all of it")


@dataclass(frozen=True, slots=True)
class DeliveredFile:
    """A file that a target can load or run, and what is beside it.

    Attributes:
        path: As the target sees it.
        names: Of all files that may be in its directory.
        directory_fd: The directory that is removed with it.
        parent_fd: The one that has that.
    """

    path: str
    names: tuple[str, ...]
    directory_fd: int
    parent_fd: int

    def has(self, name: str) -> bool:
        """Whether a file is still beside it."""
        try:
            os.stat(name, dir_fd=self.directory_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def take(self, name: str) -> bool:
        """Removes one of its files; False where the target was first."""
        try:
            os.unlink(name, dir_fd=self.directory_fd)
        except FileNotFoundError:
            return False
        return True

    def remove(self) -> None:
        """Removes it, and its directory; what was loaded stays."""
        directory = self.path.split("/")[-2]
        for name in self.names:
            with contextlib.suppress(OSError):  # it may not have been made, or is gone
                os.unlink(name, dir_fd=self.directory_fd)
        with contextlib.suppress(OSError):  # somebody may have put something there
            os.rmdir(directory, dir_fd=self.parent_fd)
        os.close(self.directory_fd)
        os.close(self.parent_fd)


@dataclass(frozen=True, slots=True)
class _Delivery:
    """What is put into a directory of a target.

    Attributes:
        names: What its files may be called; the first is that whose path is asked for.
        files: Those that are made, by name; it is told the directory's path.
        owner_uid: The target's user.
        is_private: They are for that user alone, who may also take them away, and are not executed.
    """

    names: tuple[str, ...]
    files: Callable[[str], Mapping[str, bytes]]
    owner_uid: int
    is_private: bool


def deliver_file(pid: int, owner_uid: int, name: str, library: bytes) -> DeliveredFile:
    """Puts a library into a directory of a target.

    No link of anybody's is followed, and only directories are used in which nobody but root and the
    target's user can put another file in place of it.

    Args:
        pid: The target.
        owner_uid: Its user.
        name: What the file is called.
        library: What is in it.

    Raises:
        InjectionRefused: There is no directory for it.
    """
    return _deliver(pid, _Delivery((name,), lambda _: {name: library}, owner_uid, is_private=False))


def deliver_own_files(
    pid: int,
    owner_uid: int,
    names: tuple[str, ...],
    files: Callable[[str], Mapping[str, bytes]],
) -> DeliveredFile:
    """Puts files into a directory of a target's user, where nobody else sees them.

    As `deliver_file`; the target may rename and remove them.

    Args:
        pid: The target.
        owner_uid: The user it opens files as.
        names: What they are called, or the target may call them.
        files: Returns what is in those that are made, when it is told the directory's path there.

    Returns:
        The first of them.

    Raises:
        InjectionRefused: There is no directory for them.
    """
    return _deliver(pid, _Delivery(names, files, owner_uid, is_private=True))


def _deliver(pid: int, delivery: _Delivery) -> DeliveredFile:
    complaints = []
    try:
        root_fd = rootfs.open_root(f"/proc/{pid}/root")
    except OSError as error:
        raise InjectionRefused(f"its root directory cannot be seen: {error.strerror}") from error
    try:
        for path in _DIRECTORIES:
            try:
                return _deliver_into(root_fd, path, delivery)
            except OSError as error:  # noqa: PERF203 - each directory fails by itself
                complaints.append(f"{path}: {error.strerror or error}")
    finally:
        os.close(root_fd)
    raise InjectionRefused(
        f"it has no directory for the library ({'; '.join(complaints)})",
        "give it a directory that can be written to and executed from, such as /tmp",
    )


def _deliver_into(root_fd: int, path: str, delivery: _Delivery) -> DeliveredFile:
    parent_fd = rootfs.look_beneath(root_fd, path, follow_last=False)
    directory_fd = -1
    try:
        facts = os.fstat(parent_fd)
        if not stat.S_ISDIR(facts.st_mode):
            raise OSError(0, "no directory")
        if not facts.st_mode & stat.S_ISVTX and facts.st_uid not in (0, delivery.owner_uid):
            raise OSError(0, "another user's")
        _remove_stale(parent_fd, delivery)
        directory = f"{_PREFIX}{secrets.token_hex(8)}"
        os.mkdir(directory, _OWN_DIRECTORY_MODE, dir_fd=parent_fd)
        directory_fd = os.open(directory, _DIRECTORY_FLAGS, dir_fd=parent_fd)
        there = f"{path}/{directory}"
        delivered = DeliveredFile(
            f"{there}/{delivery.names[0]}", delivery.names, directory_fd, parent_fd
        )
        try:
            if not delivery.is_private and os.fstatvfs(directory_fd).f_flag & os.ST_NOEXEC:
                raise OSError(0, "mounted noexec")
            for name, data in delivery.files(there).items():
                _make_file(directory_fd, name, data, delivery)
            # Last: from here on its owner may put there what it likes.
            if delivery.is_private:
                os.fchown(directory_fd, delivery.owner_uid, -1)
            else:
                os.fchmod(directory_fd, _DIRECTORY_MODE)  # whatever our umask says
        except OSError:
            directory_fd = parent_fd = -1
            delivered.remove()
            raise
        return delivered
    except OSError:
        for fd in (directory_fd, parent_fd):
            if fd >= 0:
                os.close(fd)
        raise


def _make_file(directory_fd: int, name: str, data: bytes, delivery: _Delivery) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, _OWN_FILE_MODE, dir_fd=directory_fd)
    try:
        _write(fd, data)
        if delivery.is_private:
            os.fchown(fd, delivery.owner_uid, -1)
        else:
            os.fchmod(fd, _FILE_MODE)
    finally:
        os.close(fd)


def _remove_stale(parent_fd: int, delivery: _Delivery) -> None:
    """Removes what others left that were killed: directories of ours with nothing but the files."""
    try:
        readable_fd = os.open(".", _DIRECTORY_FLAGS, dir_fd=parent_fd)
    except OSError:
        return  # there is none to be found
    try:
        with os.scandir(readable_fd) as entries:
            found = [entry.name for entry in entries if entry.name.startswith(_PREFIX)]
    finally:
        os.close(readable_fd)
    for directory in found:
        with contextlib.suppress(OSError):  # it is another's, or has gone
            _remove_if_stale(parent_fd, directory, delivery)


def _remove_if_stale(parent_fd: int, directory: str, delivery: _Delivery) -> None:
    owner_uid = delivery.owner_uid if delivery.is_private else os.geteuid()
    fd = os.open(directory, _DIRECTORY_FLAGS, dir_fd=parent_fd)
    try:
        facts = os.fstat(fd)
        if facts.st_uid == owner_uid and facts.st_mtime < time.time() - _STALE_S:
            for name in delivery.names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
            os.rmdir(directory, dir_fd=parent_fd)
    finally:
        os.close(fd)
