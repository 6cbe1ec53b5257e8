# SPDX-License-Identifier: Apache-2.0
"""Output files: whole or not there, never somebody else's, and owned by the user who calls sudo.

This is the only way in which aiflame opens what it writes for a user. Root writes into folders of
others, who may rename, replace and link whatever lies there at any moment. So each step works on
descriptors: the folder is opened once, all names are looked up in that descriptor, what has the
output's name is judged by fstat of the object itself, and a file is written through the
descriptor that created it (O_CREAT | O_EXCL | O_NOFOLLOW), changed by it, and linked by it. No
link in the last part of a path is ever followed.

A file is written under a hidden temporary name in the folder where it will be, and gets its name
once it is complete; a run that is killed, or a disk that fills, leaves no half file under a name
that somebody reads. Without `force` nothing that exists is replaced, also not what appears between
the first look and the last step.

It does not wait for the disk (fsync): a power cut may cost a new file, never an old one's name
with half a content on file systems that order renames after data, which is their default.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import select
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.limits import DISK_FULL, room_hint

# NAME_MAX of Linux file systems (limits.h), in bytes.
_NAME_MAX_BYTES = 255

# As path_resolution(7) has it.
_MAX_LINKS = 40

# What file systems without owners (vfat, some network mounts) answer to chown; link() gives the
# same ones where there are no hard links.
_NOT_SUPPORTED = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
)

# However often it is tried: rights, also those of root on a network mount, and read-only mounts.
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)

_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LOOK_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

# Names of descriptors that this process was given, as a shell's `-o >(gzip)` uses them. What
# /dev/stdout leads to would be replaced, or written from its start.
_OWN_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})", re.ASCII)
_STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}

_PRIVATE_MODE = 0o600
# Less what the umask takes away.
_PUBLIC_MODE = 0o666

# Of libraries that any process may load, and of their directory, whatever the umask is.
_INSTALLED_MODE = 0o755
_READ_BY_ALL = 0o555

_COPY_BYTES = 1 << 20

# Of a temporary name.
_RANDOM_BYTES = 4


class WaitingFile(io.FileIO):
    """A descriptor that is written to as if it would block, whoever shares it with this process."""

    def write(self, data: Any, /) -> int:
        """Writes some of it, and waits until it can."""
        while (written := super().write(data)) is None:
            poll = select.poll()
            poll.register(self.fileno(), select.POLLOUT)
            poll.poll()
        return written


class Owner(NamedTuple):
    """Whose a file is to be."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Tells a file from every other one, also from a later one under the same inode."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int


def sudo_ids() -> Owner | None:
    """Return user and group id of who typed sudo, None when nobody did."""
    uid, gid = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    if os.geteuid() != 0 or not (_is_id(uid) and _is_id(gid)):
        return None
    return Owner(int(uid), int(gid))


def private_directory(directory: Path) -> Path | None:
    """Make a directory of mode 0700; None unless only this user can have put files there."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.stat()
    except OSError:
        return None
    writable_by_others = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if facts.st_uid != os.geteuid() or writable_by_others:
        return None
    return directory


def refuse_shared_directory(directory: Path) -> None:
    """Refuse what `private_directory` cannot be made of, as far as that is seen; nothing is made.

    Raises:
        UsageError: A file is in the way, or others may write to the directory.
    """
    for each in (directory, *directory.parents):
        try:
            facts = each.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return  # of another user's, who is to make it
        if not stat.S_ISDIR(facts.st_mode):
            raise UsageError(f"{directory} cannot be made: {each} is no directory")
        # Who checks need not be who will use it, but root is.
        is_others = os.geteuid() == 0 != facts.st_uid
        if each == directory and (is_others or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise UsageError(
                f"others may write to {directory}",
                f"chmod 700 {directory}, and chown it to who uses it; or name another one",
            )
        return


def public_directory(directory: Path) -> None:
    """Make a directory that all may read, and only this user or root can put files into.

    Raises:
        UsageError: Others can, in it or in one above it, or may not read it.
        AiflameError: It cannot be made.
    """
    refuse_unfit_for_libraries(directory)
    try:
        if not directory.exists():
            directory.mkdir()
            directory.chmod(_INSTALLED_MODE)
    except OSError as error:
        raise _cannot_write(directory, error) from error
    refuse_unfit_for_libraries(directory)  # somebody may have been faster


def refuse_unfit_for_libraries(directory: Path) -> None:
    """Refuse what `public_directory` cannot be made of; nothing is made.

    Raises:
        UsageError: Others can put files into it or one above it, or may not read it, or the one
            above is not there.
        AiflameError: It cannot be looked at.
    """
    try:
        above = [parent.stat() for parent in directory.resolve().parents]
        facts = directory.stat() if directory.exists() else None
    except (FileNotFoundError, NotADirectoryError) as error:
        parent = directory.parent
        raise UsageError(f"no such directory: {parent}", f"mkdir -p {parent}") from error
    except OSError as error:
        raise _cannot_write(directory, error) from error
    others = stat.S_IWGRP | stat.S_IWOTH
    # In a directory like /tmp others can make files, and not replace those of ours.
    is_ours = all(one.st_mode & stat.S_ISVTX or not one.st_mode & others for one in above)
    own = () if facts is None else (facts,)
    is_ours &= {one.st_uid for one in (*own, *above)} <= {0, os.geteuid()}
    if not is_ours or any(one.st_mode & others for one in own):
        raise UsageError(
            f"others than root can put files into {directory}", "name another directory"
        )
    if any(one.st_mode & _READ_BY_ALL != _READ_BY_ALL for one in own):
        raise UsageError(f"not everybody may read {directory}", f"chmod 755 {directory}")


def install(path: Path, content: bytes, name: str) -> None:
    """Put a library that all may load into a directory, and a link to it beside; each at once.

    Args:
        path: Of the link.
        content: Of the library.
        name: Of the library's file. One that has the name has the content.

    Raises:
        AiflameError: The file system refused.
    """
    try:
        with _folder_of(path) as folder:
            if not _is_file(folder, name):
                with _temporary(folder, name, _PRIVATE_MODE) as (temporary, file):
                    _fill(file, content)
                    os.fchmod(file.fileno(), _INSTALLED_MODE)
                    _publish(folder, temporary, file.fileno(), path.with_name(name), True)
            link = f".{path.name}.{secrets.token_hex(4)}.tmp"
            os.symlink(name, link, dir_fd=folder)
            os.rename(link, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _is_file(folder: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def refuse_existing(path: Path, force: bool, is_named: bool = True) -> None:
    """Refuse a path that cannot be written; a check before long work, and cheap.

    Args:
        path: Where the output will go.
        force: Whether an existing file may be replaced.
        is_named: Whether the user gave this very name: only then may it be a device or a FIFO.

    Raises:
        UsageError: The name is taken and `force` is false, or it cannot be a file's.
        AiflameError: No file can be made in its folder.
    """
    try:
        if (own := own_descriptor(path)) is not None:
            _refuse_own(path, own, is_named)
            return
        with (
            _folder_of(path) as folder,
            _judged(folder, path, force, is_named, None) as special,
        ):
            if special is None:  # what rights and mounts allow is known when it is tried
                with _temporary(folder, path.name, _PRIVATE_MODE):
                    pass
    except OSError as error:
        raise _cannot_write(path, error) from error


def try_folder(path: Path) -> None:
    """Make a file in a folder, and take it away again.

    Raises:
        UsageError: A link of another user's leads there.
        OSError: No file can be made there.
    """
    folder = _open_folder(path)
    try:
        with _temporary(folder, "aiflame", _PRIVATE_MODE):
            pass
    finally:
        os.close(folder)


def write_output(
    path: Path,
    content: bytes | BinaryIO,
    force: bool,
    *,
    is_named: bool = True,
    is_private: bool = False,
    replaces: FileIdentity | None = None,
    owner: Owner | None = None,
) -> FileIdentity | None:
    """Write a whole file.

    A device or a FIFO that the user named (`-o /dev/null`) is written into; it is never replaced
    by a file. So is a descriptor of this process (`-o /dev/stdout`), whatever it leads to.

    Args:
        path: Its final name.
        content: All of it, or a file that is read from where it stands.
        force: Whether an existing file is replaced.
        is_named: Whether the user gave this very name: only then may it be a device or a FIFO.
        is_private: Mode 0600; otherwise the umask decides.
        replaces: A file that may be replaced even so, if the name still means it.
        owner: Whose it is to be; the user who typed sudo when None.

    Returns:
        What has the name now; None for a device, a FIFO or a descriptor.

    Raises:
        UsageError: The name is taken and `force` is false, or it cannot be a file's.
        AiflameError: The file system refused; nothing is left of it.
    """
    try:
        if (own := own_descriptor(path)) is not None:
            _refuse_own(path, own, is_named)
            with io.BufferedWriter(WaitingFile(os.dup(own), "wb")) as opened:
                _fill(opened, content)
            return None
        with (
            _folder_of(path) as folder,
            _judged(folder, path, force, is_named, replaces) as special,
        ):
            if special is not None:
                _write_special(special, path, content)
                return None
            mode = _PRIVATE_MODE if is_private else _PUBLIC_MODE
            with _temporary(folder, path.name, mode) as (temporary, file):
                _fill(file, content)
                _give(file.fileno(), owner or sudo_ids())
                may_replace = force or (replaces is not None and _is(folder, path.name, replaces))
                _publish(folder, temporary, file.fileno(), path, may_replace)
                return _identity(os.fstat(file.fileno()))
    except OSError as error:
        raise _cannot_write(path, error) from error


def own_descriptor(path: Path) -> int | None:
    """Returns the descriptor of this process that a path names, None where it names none."""
    found = _OWN_DESCRIPTOR.fullmatch(str(path))
    return int(found[1]) if found else _STANDARD.get(str(path))


def _refuse_own(path: Path, own: int, is_named: bool) -> None:
    """Raises UsageError where a descriptor may not be written into."""
    hint = "choose another name with -o"
    if not is_named:
        raise UsageError(f"not a file, and in the way: {path}", hint)
    try:
        # What this process has opened itself, a capture for instance, would not survive an exec.
        is_given = not fcntl.fcntl(own, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    except OSError:
        is_given = False
    if not is_given or fcntl.fcntl(own, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise UsageError(f"not open for writing: {path}", hint)


def unfinished_outputs(name: str) -> re.Pattern[str]:
    """Returns a pattern of what `write_output` leaves where it is killed.

    Args:
        name: A pattern of the outputs' names, of which none is nearly as long as names can be.
    """
    return re.compile(rf"\.{name}\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}\.tmp")


def make_folder(path: Path) -> None:
    """Make a folder for output files if there is none, owned by the user who typed sudo.

    Raises:
        UsageError: There is no folder to make it in.
        AiflameError: The file system refused.
    """
    try:
        with _folder_of(path) as folder:
            try:
                os.mkdir(path.name, dir_fd=folder)
            except FileExistsError:
                return
            # Another folder may have that name by now, but a descriptor of it is no other file's.
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            made = os.open(path.name, flags, dir_fd=folder)
            try:
                if os.fstat(made).st_uid == os.geteuid() and not any(os.scandir(made)):
                    _give(made, sudo_ids())
            finally:
                os.close(made)
    except OSError as error:
        raise _cannot_write(path, error) from error


@contextlib.contextmanager
def _folder_of(path: Path) -> Iterator[int]:
    """Yields a descriptor of the folder that a file is to be in."""
    try:
        folder = _open_folder(path.parent)
    except FileNotFoundError:
        raise UsageError(f"no such folder: {path.parent}", f"mkdir -p {path.parent}") from None
    try:
        yield folder
    finally:
        os.close(folder)


def _open_folder(path: Path) -> int:
    """Opens a folder; for root, a link of another user's may only lead to a folder of that user.

    Otherwise whoever owns a folder above would choose where root creates a file. The kernel has
    that rule for links in /tmp alone, and only where fs.protected_symlinks is set.
    """
    if os.geteuid() != 0:
        return os.open(path, _FOLDER_FLAGS)
    proc_device = Path("/proc").stat().st_dev
    current = os.open("/" if path.is_absolute() else ".", _FOLDER_FLAGS)
    left = list(reversed(path.parts))
    owners = set()
    links = 0
    try:
        while left:
            part = left.pop()
            following = os.open(part, _LOOK_FLAGS, dir_fd=current)
            facts = os.fstat(following)
            if stat.S_ISLNK(facts.st_mode):
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                target = os.readlink("", dir_fd=following)
                os.close(following)
                if facts.st_dev != proc_device:
                    owners.add(facts.st_uid)
                    left += reversed(Path(target).parts)
                    continue
                # What such a link names need not have that path here: /proc/PID/root.
                following = os.open(part, _FOLDER_FLAGS, dir_fd=current)
            elif not stat.S_ISDIR(facts.st_mode):
                os.close(following)
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            os.close(current)
            current = following
        if not owners <= {0, os.fstat(current).st_uid}:
            raise UsageError(
                f"a link of another user's leads to the folder {path}",
                f"name the folder itself: -o {path.resolve()}/...",
            )
    except BaseException:  # also a Ctrl-C: the descriptor is nobody else's yet
        os.close(current)
        raise
    return current


@contextlib.contextmanager
def _judged(
    folder: int, path: Path, force: bool, is_named: bool, replaces: FileIdentity | None
) -> Iterator[int | None]:
    """Yields a descriptor of the device or FIFO to write into, None if a file is to be made.

    Raises:
        UsageError: Neither may be.
    """
    if not path.name:
        raise _is_folder(path)
    try:
        found = os.open(path.name, _LOOK_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        found = -1
    try:
        facts = None if found < 0 else os.fstat(found)
        if facts is None or _is_replaceable(path, facts, force, replaces):
            yield None
        else:
            _refuse_special(path, facts, is_named)
            yield found
    finally:
        if found >= 0:
            os.close(found)


def _is_replaceable(
    path: Path, facts: os.stat_result, force: bool, replaces: FileIdentity | None
) -> bool:
    """Whether a file may take the name; False for what is no file.

    Raises:
        UsageError: A folder, or a file that may not be replaced, has the name.
    """
    if stat.S_ISDIR(facts.st_mode):
        raise _is_folder(path)
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISLNK(facts.st_mode)):
        return False
    if not force and _identity(facts) != replaces:
        raise _exists(path)
    return True


def _refuse_special(path: Path, facts: os.stat_result, is_named: bool) -> None:
    hint = "choose another name with -o"
    if not is_named:
        raise UsageError(f"not a file, and in the way: {path}", f"remove it, or {hint}")
    if not (stat.S_ISCHR(facts.st_mode) or stat.S_ISFIFO(facts.st_mode)):
        raise UsageError(f"neither a file, a terminal nor a FIFO: {path}", hint)
    # What lies here under a name that was meant for a new file could be another user's trap: a
    # FIFO that hands the output on, or a second name of a device.
    sudo = sudo_ids()
    trusted = {0, os.geteuid()} | ({sudo.uid} if sudo else set())
    if stat.S_ISFIFO(facts.st_mode) and facts.st_uid not in trusted:
        raise UsageError(f"a FIFO of user {facts.st_uid}: {path}", hint)
    if facts.st_nlink > 1:
        raise UsageError(f"a second name (hard link) of something: {path}", hint)


def _write_special(special: int, path: Path, content: bytes | BinaryIO) -> None:
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        # The very object that was judged, whatever has its name by now.
        opened = os.open(f"/proc/self/fd/{special}", flags)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise AiflameError(
            f"cannot write {path}: nobody reads from this FIFO", "start its reader first"
        ) from None
    os.set_blocking(opened, True)
    with os.fdopen(opened, "wb") as file:
        _fill(file, content)


@contextlib.contextmanager
def _temporary(folder: int, name: str, mode: int) -> Iterator[tuple[str, BinaryIO]]:
    """Yields a new file and its name; the name is free again afterwards."""
    # Nobody can take a name beforehand that nobody can know.
    suffix = f".{secrets.token_hex(_RANDOM_BYTES)}.tmp"
    room = _NAME_MAX_BYTES - len(suffix) - 1
    temporary = f".{os.fsdecode(os.fsencode(name)[:room])}{suffix}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    made = os.open(temporary, flags, mode, dir_fd=folder)
    try:
        with os.fdopen(made, "wb") as file:
            yield temporary, file
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)


def _fill(file: BinaryIO, content: bytes | BinaryIO) -> None:
    if isinstance(content, bytes):
        file.write(content)
    else:
        shutil.copyfileobj(content, file, _COPY_BYTES)
    file.flush()
    # Some file systems (NFS, quotas) tell of a full disk no sooner than at a close.
    os.close(os.dup(file.fileno()))


def _give(descriptor: int, owner: Owner | None) -> None:
    """Changes the owner; a file system that has no owners leaves the file as it is."""
    if owner is None:
        return
    try:
        os.fchown(descriptor, *owner)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise


def _publish(folder: int, temporary: str, made: int, path: Path, may_replace: bool) -> None:
    if not may_replace:
        try:
            # Fails where the name exists, atomically; rename() would replace. By the descriptor,
            # since another file may have the temporary name by now.
            os.link(f"/proc/self/fd/{made}", path.name, dst_dir_fd=folder)
        except FileExistsError:
            raise _exists(path) from None
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            # No hard links: nor are there owners, from whom a file would have to be kept.
            with _judged(folder, path, False, False, None):
                pass
        else:
            return
    os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    if not _is(folder, path.name, _identity(os.fstat(made))):
        raise AiflameError(f"cannot write {path}: somebody replaced it meanwhile")


def _is(folder: int, name: str, identity: FileIdentity) -> bool:
    try:
        return _identity(os.stat(name, dir_fd=folder, follow_symlinks=False)) == identity
    except FileNotFoundError:
        return False


def _identity(facts: os.stat_result) -> FileIdentity:
    return FileIdentity(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_folder(path: Path) -> UsageError:
    return UsageError(f"is a folder: {path}", "name a file in it with -o")


def _exists(path: Path) -> UsageError:
    return UsageError(f"file exists: {path}", "use --force")


def _cannot_write(path: Path, error: OSError) -> AiflameError:
    hint = None
    if error.errno in DISK_FULL:
        hint = "free some space, or choose another folder with -o"
    elif error.errno == errno.EFBIG:
        hint = room_hint()
    elif error.errno in NOT_ALLOWED:
        hint = "choose another folder with -o"
    elif error.errno == errno.ENOENT:
        hint = "its folder was removed: change to another one, or choose one with -o"
    return AiflameError(f"cannot write {path}: {(error.strerror or str(error)).lower()}", hint)
