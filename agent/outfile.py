# SPDX-License-Identifier: Apache-2.0
"""Output files: whole or not there, never somebody else's, and owned by the user behind sudo.

A file is written under a hidden temporary name in the folder where it will be, and renamed once
it is complete; a run that is killed, or a disk that fills, leaves no half file under a name that
somebody reads. Without `force` nothing that exists is replaced, also not what appears between the
first look and the rename.

It does not wait for the disk (fsync): a power cut may cost a new file, never an old one's name
with half a content on file systems that order renames after data, which is their default.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from aiflame.agent.errors import AiflameError, UsageError

# NAME_MAX of Linux file systems (limits.h), in bytes.
_NAME_MAX_BYTES = 255

# What file systems without owners (vfat, some network mounts) answer to chown; link() gives the
# same ones where there are no hard links.
_NOT_SUPPORTED = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
)

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def refuse_existing(path: Path, force: bool) -> None:
    """Raise UsageError if `path` may not be written; a check before long work, and cheap.

    Args:
        path: Where the output will go. A device or a FIFO may always be written into.
        force: Whether an existing file may be replaced.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink() and not force:
            raise _exists(path) from None
        if not path.parent.is_dir():
            raise UsageError(f"no such folder: {path.parent}", f"mkdir -p {path.parent}") from None
        return
    except OSError as error:
        raise _cannot_write(path, error) from error
    if stat.S_ISDIR(mode):
        raise UsageError(f"is a folder: {path}", "name a file in it with -o")
    if stat.S_ISREG(mode) and not force:
        raise _exists(path)


def temporary_name(path: Path) -> Path:
    """Return a hidden name beside `path`, of this process, that fits the file system's limit."""
    suffix = f".{os.getpid()}.tmp"
    room = _NAME_MAX_BYTES - len(suffix) - 1
    stem = os.fsdecode(os.fsencode(path.name)[:room])
    return path.with_name(f".{stem}{suffix}")


def sudo_ids() -> tuple[int, int] | None:
    """Return user and group id of who typed sudo, None when nobody did."""
    uid, gid = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    if os.geteuid() != 0 or not (_is_id(uid) and _is_id(gid)):
        return None
    return int(uid), int(gid)


def chown_to_sudo_user(path: Path) -> None:
    """Give a file to the user who typed sudo; does nothing when there is none.

    A file system that has no owners leaves the file as it is.

    Raises:
        AiflameError: The file is not there, or the file system is read-only.
    """
    ids = sudo_ids()
    if ids is None:
        return
    try:
        os.chown(path, *ids, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise _cannot_write(path, error) from error


def publish(temporary: Path, path: Path, force: bool) -> None:
    """Move a complete file to its name, and to its owner.

    Args:
        temporary: A file from `temporary_name(path)`; gone afterwards, also on failure.
        path: Its final name.
        force: Whether an existing file is replaced.

    Raises:
        UsageError: `path` exists and `force` is false.
        AiflameError: The file system refused.
    """
    try:
        chown_to_sudo_user(temporary)
        if force:
            temporary.replace(path)
        else:
            _rename_to_new(temporary, path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_output(path: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary path to write to; publish it on success, remove it on any failure.

    OSErrors inside the block become AiflameErrors that name `path` and, where the disk is full,
    say so.
    """
    refuse_existing(path, force)
    temporary = temporary_name(path)
    try:
        yield temporary
        publish(temporary, path, force)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_output(path: Path, data: bytes, force: bool) -> None:
    """Write a whole file.

    A device or a FIFO (`-o /dev/null`) is written into; it is never replaced by a file.

    Raises:
        UsageError: The file exists and `force` is false, or the path is a folder.
        AiflameError: The file system refused; nothing is left behind.
    """
    refuse_existing(path, force)
    if _is_special(path):
        try:
            path.write_bytes(data)
        except OSError as error:
            raise _cannot_write(path, error) from error
        return
    # "x" is O_EXCL: as root in a folder of others, a link placed under the temporary name must not
    # be followed.
    with atomic_output(path, force) as temporary, temporary.open("xb") as file:
        file.write(data)


def _rename_to_new(temporary: Path, path: Path) -> None:
    # link() fails where the name exists, atomically; rename() would replace.
    try:
        os.link(temporary, path, follow_symlinks=False)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        refuse_existing(path, force=False)
        temporary.replace(path)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _exists(path: Path) -> UsageError:
    return UsageError(f"file exists: {path}", "use --force")


def _cannot_write(path: Path, error: OSError) -> AiflameError:
    hint = None
    if error.errno in _DISK_FULL:
        hint = "free some space, or choose another place with -o"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "choose another place with -o"
    return AiflameError(f"cannot write {path}: {(error.strerror or str(error)).lower()}", hint)
