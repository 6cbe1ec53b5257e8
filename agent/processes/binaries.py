# SPDX-License-Identifier: Apache-2.0
"""The files that targets map: each opened once, when first seen, and kept open.

An open descriptor outlives the process, its mount namespace and the file's name, so that symbols
can be read when the recording has ended. A file is looked for at its path beneath the target's
root, never following links out of it; when what is found there is another file (deleted,
replaced, mounted over), the kernel's own link in map_files leads to the right one.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent.kernel.descriptors import keep
from aiflame.agent.processes.procfs import MapsLine
from aiflame.agent.symbols.rootfs import open_beneath
from aiflame.agent.target_files import FileGuard

VDSO_PATH = "[vdso]"
DELETED = " (deleted)"

# A vDSO is two pages on x86-64; the bound only keeps a lying maps line from costing memory.
_MAX_VDSO_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BinaryFile:
    """One mapped file. `fd` is None when it could not be opened; `index` counts from 0."""

    index: int
    path: str
    fd: int | None
    root: str  # openable path of a root directory in which its debug files may lie, or ""


class BinaryTable:
    """All files mapped executable by any target, told apart by device and inode.

    Args:
        guard: Inside which the files are read; one of its own where none is given.
    """

    def __init__(self, guard: FileGuard | None = None) -> None:
        self.guard = guard or FileGuard()
        self.files: list[BinaryFile] = []
        self.unopened = 0
        self._by_identity: dict[tuple[str, int, str], BinaryFile] = {}
        self._roots: dict[tuple[int, int], str] = {}
        self._fds: list[int] = []

    def of_mapping(self, pid: int, line: MapsLine) -> BinaryFile | None:
        """Returns the file that a mapping shows, None for anonymous memory.

        The file is opened now if this is the first mapping of it that is seen.
        """
        if line.path == VDSO_PATH:
            identity = ("", 0, VDSO_PATH)
        elif line.inode:
            identity = (line.device, line.inode, "")
        else:
            return None
        known = self._by_identity.get(identity)
        if known is not None and known.fd is not None:
            return known
        fd = self._dump_vdso(pid, line) if line.path == VDSO_PATH else self._open(pid, line)
        if known is not None and fd is None:
            return known
        index = len(self.files) if known is None else known.index
        file = BinaryFile(index, line.path.removesuffix(DELETED), fd, self.root_of(pid))
        if known is None:
            self.files.append(file)
            self.unopened += fd is None
        else:
            self.files[index] = file
            self.unopened -= 1
        self._by_identity[identity] = file
        return file

    def add(self, file: BinaryFile) -> None:
        """Adds a file that somebody else has opened, and whose index is the next."""
        self.files.append(file)
        if file.fd is not None:
            self._fds.append(file.fd)

    def _open(self, pid: int, line: MapsLine) -> int | None:
        try:
            root_fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fd = open_beneath(root_fd, line.path.removesuffix(DELETED))
            finally:
                os.close(root_fd)
        except OSError:
            fd = None
        if fd is not None and os.fstat(fd).st_ino != line.inode:
            os.close(fd)
            fd = None
        if fd is None:
            fd = _open_map_file(pid, line)
        fd = keep(fd)
        if fd is not None:
            self._fds.append(fd)
        return fd

    def _dump_vdso(self, pid: int, line: MapsLine) -> int | None:
        try:
            with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
                memory.seek(line.start)
                image = memory.read(min(line.end - line.start, _MAX_VDSO_BYTES))
        except (OSError, OverflowError):
            return None
        fd = keep(os.memfd_create("vdso", os.MFD_CLOEXEC))
        if fd is not None:
            os.write(fd, image)
            self._fds.append(fd)
        return fd

    def root_of(self, pid: int) -> str:
        """Returns an openable path of a process's root directory that stays valid with us."""
        try:
            fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return ""
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino)
        if identity in self._roots:
            os.close(fd)
        elif keep(fd) is None:
            return ""
        else:
            self._fds.append(fd)
            self._roots[identity] = f"/proc/{os.getpid()}/fd/{fd}"
        return self._roots[identity]

    def close(self) -> None:
        """Closes every file."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _open_map_file(pid: int, line: MapsLine) -> int | None:
    # /proc/PID/map_files (v4.3 for CAP_SYS_ADMIN, v5.9 for CAP_CHECKPOINT_RESTORE) opens the very
    # file that is mapped. O_NONBLOCK, and the check, since a target may map a device.
    link = Path(f"/proc/{pid}/map_files/{line.start:x}-{line.end:x}")
    try:
        fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return fd
