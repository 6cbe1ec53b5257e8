# SPDX-License-Identifier: Apache-2.0
"""Opens files inside a target's root directory without ever leaving it.

A container can plant a symbolic link, a FIFO or a device node under any name that a profiler
reads. The kernel resolves the path (openat2 with RESOLVE_IN_ROOT, Linux 5.6), so that links,
absolute ones included, stay inside. The file is first opened with O_PATH, which has no effect on
what it names, and is only opened for reading once it is known to be a regular file: opening some
devices is already an action.

It does not protect against a file that shrinks while it is mapped: readers use pread. Nor against
one that never opens, as on a file system that the target serves: that is why the `opener` runs
this in a child. Imports little, since that is started before a recording, which waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct

# System calls added since Linux 5.1 share one number on every architecture but alpha (asm/unistd.h
# of Linux 6.1).
_SYS_OPENAT2 = {"x86_64": 437, "aarch64": 437}.get(os.uname().machine)

# linux/openat2.h, Linux 5.6.
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10

# linux/magic.h, and those of ZFS and bcachefs. Others without a device of blocks ask somebody:
# another machine, or a program.
_FUSE = 0x65735546
_PIPEFS = 0x50495045
_LOCAL = {
    0x01021994,  # tmpfs
    0x858458F6,  # ramfs
    0x958458F6,  # hugetlbfs
    0x794C7630,  # overlayfs
    0x61756673,  # aufs
    0x9123683E,  # btrfs
    0x2FC12FC1,  # ZFS
    0xCA451A4E,  # bcachefs
}
_STATFS_BYTES = 120  # asm-generic/statfs.h

# The kernel answers EAGAIN when a rename or mount raced with a "..", and asks for a retry.
_RACE_RETRIES = 8

LOOK_FLAGS = os.O_PATH | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class _OpenHow(ctypes.Structure):
    """`struct open_how` of linux/openat2.h."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def _openat2(root_fd: int, path: str, flags: int) -> int:
    """O_PATH descriptor of `path` inside the root; OSError(ENOSYS) where the call is missing."""
    if _SYS_OPENAT2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)
    how = _OpenHow(flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    for _ in range(_RACE_RETRIES):
        result = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(root_fd),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if result >= 0:
            return int(result)
        if ctypes.get_errno() != errno.EAGAIN:
            break
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), path)


def _walk(root_fd: int, path: str) -> int:
    """The same for kernels and sandboxes without openat2; refuses every link and "..".

    Paths from /proc/PID/maps have no links left, so only a linked debug directory loses here.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise OSError(errno.EXDEV, "path would leave the root", path)
    current = os.dup(root_fd)
    try:
        for index, part in enumerate(parts):
            flags = LOOK_FLAGS | os.O_NOFOLLOW
            if index + 1 < len(parts):
                flags |= os.O_DIRECTORY
            following = os.open(part, flags, dir_fd=current)
            os.close(current)
            current = following
        if stat.S_ISLNK(os.fstat(current).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    except OSError:
        os.close(current)
        raise
    return current


def open_root(root_path: str) -> int:
    """Open a root directory, such as /proc/PID/root, for `open_beneath`.

    Raises:
        OSError: The process is gone or may not be looked at.
    """
    return os.open(root_path, LOOK_FLAGS | os.O_DIRECTORY)


def look_beneath(root_fd: int, path: str, follow_last: bool = True) -> int:
    """Find a file inside a target's root directory; it is not opened for reading.

    Args:
        root_fd: The root directory, from `open_root`.
        path: Path as the target sees it. Links are followed as the target would, and ".." stops
            at the root.
        follow_last: Whether the last part may be a link; otherwise the link itself is found.

    Returns:
        An O_PATH descriptor that the caller closes.

    Raises:
        OSError: It is missing, or not permitted.
    """
    if "\0" in path:
        raise OSError(errno.EINVAL, "path holds a zero byte", path)
    try:
        return _openat2(root_fd, path, LOOK_FLAGS if follow_last else LOOK_FLAGS | os.O_NOFOLLOW)
    except OSError as error:
        # EPERM: sandboxes of 2020 answer so to calls that they do not know.
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    return _walk(root_fd, path)


def open_beneath(root_fd: int, path: str, follow_last: bool = True) -> int:
    """Open a regular file for reading inside a target's root directory, as `look_beneath` finds it.

    Raises:
        OSError: It is missing, not permitted, or not a regular file (EINVAL).
    """
    found = look_beneath(root_fd, path, follow_last)
    try:
        return reopen_regular(found, path)
    finally:
        os.close(found)


def reopen_regular(path_fd: int, path: str) -> int:
    """Turn an O_PATH descriptor into one for reading, if it is a regular file.

    Raises:
        OSError: EINVAL for anything but a regular file, or what the kernel says.
    """
    if not stat.S_ISREG(os.fstat(path_fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return os.open(f"/proc/self/fd/{path_fd}", _READ_FLAGS)


def open_regular(path: str) -> int:
    """Open a file of the host for reading, if it is a regular file.

    Raises:
        OSError: As `open_beneath`.
    """
    path_fd = os.open(path, LOOK_FLAGS)
    try:
        return reopen_regular(path_fd, str(path))
    finally:
        os.close(path_fd)


def is_local(fd: int) -> bool:
    """Whether reads of a file wait for nobody but this kernel and its disks."""
    facts = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, facts):
        return False
    (kind,) = struct.unpack_from("<q", facts)
    return kind in _LOCAL or (kind != _FUSE and os.major(os.fstat(fd).st_dev) != 0)


def is_anonymous_pipe(fd: int) -> bool:
    """Whether a descriptor is of a pipe that has no name in any file system."""
    facts = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, facts):
        return False
    (kind,) = struct.unpack_from("<q", facts)
    return bool(kind == _PIPEFS)


def path_in_root(path: str) -> str:
    """The path of /proc/PID/fd/N as its own root sees it, or the path itself."""
    if not path.startswith("/proc/"):
        return path
    try:
        target = os.readlink(path)  # noqa: PTH115 - no more is imported than is needed
    except OSError:
        return ""
    return target.removesuffix(" (deleted)") if target.startswith("/") else ""
