# SPDX-License-Identifier: Apache-2.0
"""The files that targets map: each opened once, when first seen, and kept open.

An open descriptor outlives the process, its mount namespace and the file's name, so that symbols
can be read when the recording has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from aiflame.agent.elf.headers import HEADERS
from aiflame.agent.file_questions import Question
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.inspector.memory import Span
from aiflame.agent.inspector.opener import RemoteFile
from aiflame.agent.kernel.descriptors import for_targets, keep
from aiflame.agent.memory_file import memory_file
from aiflame.agent.processes.procfs import MapsLine
from aiflame.agent.processes.shares import Shares
from aiflame.agent.retries import Retries
from aiflame.agent.symbols.file_facts import FileFacts, facts_directory
from aiflame.agent.target_files import FileGuard

T = TypeVar("T")

_HOST_ROOT = "/proc/1/root"

VDSO_PATH = "[vdso]"
DELETED = " (deleted)"

# A vDSO is two pages on x86-64; the bound only keeps a lying maps line from costing memory.
_MAX_VDSO_BYTES = 1 << 20

# Containers that are gone whose numbers are not given out again yet. Names may be asked for minutes
# later; a host that starts one each second has so many in four.
_MOST_RETIRED = 256


@dataclass(frozen=True, slots=True)
class BinaryFile:
    """One mapped file. `fd` is None when it could not be opened; `index` counts from 0."""

    index: int
    path: str
    fd: int | None
    root: str  # openable path of a root directory in which its debug files may lie, or ""


class _Root(NamedTuple):
    """A root directory that is held open, and for whom."""

    fd: int
    pid: int
    payer: str

    @property
    def path(self) -> str:
        """What others open it by."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"


def _identity(line: MapsLine) -> tuple[str, int, str] | None:
    """What tells a mapped file from others, None for anonymous memory."""
    if line.path == VDSO_PATH:
        return "", 0, VDSO_PATH
    return (line.device, line.inode, "") if line.inode else None


class BinaryTable:
    """All files mapped executable by any target, told apart by device and inode.

    Args:
        inspector: Opens them.
        facts: Answers questions about them; it is closed with them.
    """

    def __init__(self, inspector: Inspector, facts: FileFacts | None = None) -> None:
        self._inspector = inspector
        self.facts = facts or FileFacts(
            inspector.server, FileGuard(), (HEADERS,), facts_directory()
        )
        self.guard = self.facts.guard
        # For what is no file: whoever made it has nobody else's time.
        self._bytes_facts = FileFacts(inspector.server, FileGuard(self.guard))
        self.files: dict[int, BinaryFile] = {}  # by index
        self._next = 0
        self.unopened = 0
        self._by_identity: dict[tuple[str, int, str], BinaryFile] = {}
        self._roots: dict[tuple[int, int], _Root] = {}  # by device and inode
        self._unused_roots: set[str] = set()
        self._retired: deque[_Root] = deque()
        self._fds: set[int] = set()
        self._shares = Shares(for_targets)
        self._payers: dict[int, tuple[int, str]] = {}  # of descriptors, by index
        self._opened_late: set[int] = set()
        self._unopened, self._unanswered = Retries[int](), Retries[int]()

    def of_mapping(self, pid: int, payer: str, line: MapsLine, root: str = "") -> BinaryFile | None:
        """Returns the file that a mapping shows, None for anonymous memory.

        The file is opened now if this is the first mapping of it that is seen, unless the process
        or its payer have their share of descriptors.

        Args:
            pid: Of the process.
            payer: As of `payer_of`.
            line: The mapping.
            root: A root directory in which to look for the file if the process is gone, "" for
                the host's.
        """
        identity = _identity(line)
        if identity is None:
            return None
        known = self._by_identity.get(identity)
        if known is not None and known.fd is not None:
            return known
        fd = None
        if self._shares.take(pid, payer):
            fd = self._fd_of(pid, line, root)
            if fd is None:
                self._shares.give_back(pid, payer)
        index = self._next if known is None else known.index
        if fd is None:
            self._unopened.note(index)
            if known is not None:
                return known
        else:
            self._payers[index] = pid, payer
        root = self.root_of(pid, payer) or root
        file = BinaryFile(index, line.path.removesuffix(DELETED), fd, root)
        if known is None:
            self._next += 1
            self.unopened += fd is None
        else:
            self.unopened -= 1
            self._opened_late.add(index)
            self._unopened.forget([index])
        self.files[index] = file
        self._by_identity[identity] = file
        return file

    def take_unopened(self) -> set[int]:
        """Returns files that could not be opened, and that are to be tried again now."""
        return self._unopened.take_due()

    def take_renewed(self) -> set[int]:
        """Returns files about which all is to be asked anew.

        They were opened since last, later than others asked about them; or nobody could be asked
        for a moment, some time ago.
        """
        if self.facts.unanswered:
            unanswered, self.facts.unanswered = self.facts.unanswered, set()
            for file in self.files.values():
                if file.fd in unanswered:
                    self._unanswered.note(file.index)
        late, self._opened_late = self._opened_late, set()
        return late | self._unanswered.take_due()

    def has_open(self, line: MapsLine) -> bool:
        """Whether what a mapping shows is open already, if it is a file."""
        identity = _identity(line)
        known = None if identity is None else self._by_identity.get(identity)
        return identity is None or (known is not None and known.fd is not None)

    def ask(self, binary: int, question: Question[T]) -> T | None:
        """Answers a question about a file; None where it could not be opened, or is bad."""
        file = self.files[binary]
        return None if file.fd is None else self.facts.ask(file.path, file.fd, question)

    def ask_about(self, name: str, data: bytes, question: Question[T]) -> T | None:
        """Answers a question about bytes of a target's; None where they are bad."""
        try:
            with memory_file("bytes") as file:
                file.write(data)
                file.flush()
                return self._bytes_facts.ask(name, file.fileno(), question)
        except OSError as error:
            self.guard.blame(name, f"cannot read: {error.strerror}")
            return None

    def bytes_at(self, binary: int, offset: int, size: int) -> bytes:
        """Returns bytes of a local file, fewer at its end; none of one that could not be opened."""
        file = self.files.get(binary)
        if file is None or file.fd is None or file.fd in self.guard.remote:
            return b""
        try:
            return os.pread(file.fd, size, offset)
        except OSError:
            return b""

    def hold_shared(self, pid: int, payer: str, line: MapsLine) -> int | None:
        """Opens memory that a process shares; None where it is no memory, or not to be had.

        Args:
            pid: Of the process.
            payer: As of `payer_of`.
            line: The mapping.

        Returns:
            A descriptor, for `release_shared`.
        """
        if not self._shares.take(pid, payer):
            return None
        opener = self._inspector.opener
        fd = None
        with contextlib.suppress(OSError):
            opened = opener.mapped(pid, line.start, line.end, line.device, line.inode, line.path)
            fd = keep(opened.fd)
            if fd is not None and not opened.is_local:  # a file that is called so
                os.close(fd)
                fd = None
        if fd is None:
            self._shares.give_back(pid, payer)
        return fd

    def hold_pipe(self, pid: int, payer: str, number: int) -> int | None:
        """Opens a pipe of a process's for writing, which never waits; None where that cannot be.

        Args:
            pid: Of the process.
            payer: As of `payer_of`.
            number: The descriptor of the pipe's other end there, as it says itself.

        Returns:
            A descriptor, for `release_shared`.
        """
        if not self._shares.take(pid, payer):
            return None
        fd = None
        with contextlib.suppress(OSError):
            found = self._inspector.opener.pipe(pid, number).fd
            try:
                own = f"/proc/self/fd/{found}"
                fd = keep(os.open(own, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            finally:
                os.close(found)
        if fd is None:
            self._shares.give_back(pid, payer)
        return fd

    def release_shared(self, pid: int, payer: str, fd: int) -> None:
        """Closes what `hold_shared` or `hold_pipe` has opened."""
        os.close(fd)
        self._shares.give_back(pid, payer)

    def readable(self, file: BinaryFile) -> int | None:
        """Returns a file's descriptor for a child to read, None where a read of it got nowhere."""
        remote = None if file.fd is None else self.guard.remote.get(file.fd)
        return None if remote is not None and remote.is_stuck else file.fd

    def forget(self, binaries: Collection[int]) -> None:
        """Closes files that nobody maps any more; their indexes are not used again."""
        self._opened_late.difference_update(binaries)
        for retries in (self._unopened, self._unanswered):
            retries.forget(binaries)
        for binary in binaries:
            file = self.files.pop(binary, None)
            if file is not None and file.fd is not None:
                self.guard.remote.pop(file.fd, None)
                self._fds.discard(file.fd)
                self._shares.give_back(*self._payers.pop(binary))
                os.close(file.fd)
        gone = [key for key, file in self._by_identity.items() if file.index not in self.files]
        for key in gone:
            del self._by_identity[key]

    def _fd_of(self, pid: int, line: MapsLine, root: str) -> int | None:
        if line.path == VDSO_PATH:
            return self._dump_vdso(pid, line)
        return self._open(pid, line, root or _HOST_ROOT)

    def _open(self, pid: int, line: MapsLine, root: str) -> int | None:
        path = line.path.removesuffix(DELETED)
        opener = self._inspector.opener
        try:
            opened = opener.mapped(pid, line.start, line.end, line.device, line.inode, path, root)
        except OSError:
            return None
        fd = keep(opened.fd)
        if fd is not None:
            self._fds.add(fd)
            if not opened.is_local:
                self.guard.remote[fd] = RemoteFile(opener, opened, pid, path)
        return fd

    def _dump_vdso(self, pid: int, line: MapsLine) -> int | None:
        span = Span(pid, pid, line.start, min(line.end - line.start, _MAX_VDSO_BYTES))
        (answer,) = self._inspector.memory.read([span])
        if not answer.data:
            return None
        try:
            fd = keep(os.memfd_create("vdso", os.MFD_CLOEXEC))
            if fd is not None:
                self._fds.add(fd)
                os.write(fd, answer.data)
        except OSError:  # there is no descriptor, or no memory, just now
            return None
        return fd

    def root_of(self, pid: int, payer: str) -> str:
        """Returns an openable path of a process's root directory that stays valid with us."""
        try:
            root = self._inspector.opener.root(pid)
        except OSError:
            return ""
        fd, identity = root.fd, (root.device, root.inode)
        if identity in self._roots:
            os.close(fd)
        elif not self._shares.take(pid, payer):  # a process may have many, one after the other
            os.close(fd)
            return ""
        elif keep(fd) is None:
            self._shares.give_back(pid, payer)
            return ""
        else:
            self._fds.add(fd)
            self._roots[identity] = _Root(fd, pid, payer)
        return self._roots[identity].path

    def move(self, binary: int, root: str) -> None:
        """Has debug files of a mapped file be looked for in another root directory."""
        self.files[binary] = replace(self.files[binary], root=root)

    def forget_roots(self, used: Collection[str]) -> None:
        """Closes root directories that are used no more since it was last called.

        Else what is left of a container would stay mounted. Whoever names what was recorded has
        them as paths, which lead nowhere then, and only much later to what is opened next.

        Args:
            used: Paths of those that processes or files have.
        """
        unused = {root.path for root in self._roots.values()}.difference(used)
        gone = unused & self._unused_roots
        for identity, root in [*self._roots.items()]:
            if root.path in gone:
                with contextlib.suppress(OSError):  # no descriptor: it is looked at again
                    _lead_nowhere(root.fd)
                    del self._roots[identity]
                    self._retired.append(root)
        self._unused_roots = unused - gone
        while len(self._retired) > _MOST_RETIRED:
            fd, pid, payer = self._retired.popleft()
            self._fds.discard(fd)
            self._shares.give_back(pid, payer)
            os.close(fd)

    def close(self) -> None:
        """Closes every file, and ends those who read them."""
        self.facts.close()
        self._bytes_facts.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def _lead_nowhere(fd: int) -> None:
    """Closes what a descriptor is of, and keeps its number."""
    nowhere = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
    os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)
