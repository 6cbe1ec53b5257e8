# SPDX-License-Identifier: Apache-2.0
"""The files that naming reads: of a recording that goes on, or of one that is over."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from aiflame.agent.elf.headers import HEADERS
from aiflame.agent.inspector.opener import Opener, RemoteFile
from aiflame.agent.symbols.file_facts import FileFacts


class OpenFile(NamedTuple):
    """A file that processes had mapped.

    Attributes:
        fd: None where it could not be opened.
        root: Openable path of a root directory in which its debug files may be, or "".
    """

    fd: int | None
    root: str


class JitProcess(NamedTuple):
    """A process that makes code: under which root its perf map is, and to whom it belongs."""

    root: str
    uid: int


NO_FILE = OpenFile(None, "")


class Files(Protocol):
    """Opens what windows mention by number, path and build id."""

    def open(self, binary: int, path: str, build_id: str) -> OpenFile:
        """Returns a mapped file; its descriptor stays this object's."""

    def jit_process(self, process: int) -> JitProcess | None:
        """Returns where the perf map of a process is, None where that is not known."""


# Descriptors of files that nobody maps any more: a program that builds and loads some all the time
# must not use up those of all others.
_MOST_HELD = 256


class GivenFiles:
    """Files that the recorder has open, and hands over."""

    def __init__(self) -> None:
        self._files: dict[int, OpenFile] = {}
        self._processes: dict[int, JitProcess] = {}
        self._is_held = False
        self._forgotten: set[int] = set()

    def add(self, binary: int, file: OpenFile) -> None:
        """Takes a file over."""
        self._forgotten.discard(binary)
        _close([self._files.pop(binary, NO_FILE)])
        self._files[binary] = file

    def forget(self, binary: int) -> None:
        """Closes a file that nobody maps any more, at once or when no window waits."""
        if self._is_held and len(self._forgotten) < _MOST_HELD:
            self._forgotten.add(binary)
        else:
            _close([self._files.pop(binary, NO_FILE)])

    def hold(self, is_held: bool) -> None:
        """Tells whether windows wait for their names, which may mention what is forgotten now."""
        self._is_held = is_held
        if not is_held:
            _close([self._files.pop(binary, NO_FILE) for binary in self._forgotten])
            self._forgotten.clear()

    def add_process(self, process: int, jit: JitProcess) -> None:
        """Takes note of a process that makes code."""
        self._processes[process] = jit

    def forget_process(self, process: int) -> None:
        """Forgets a process that is gone."""
        self._processes.pop(process, None)

    def open(self, binary: int, path: str, build_id: str) -> OpenFile:
        """As `Files.open`."""
        return self._files.get(binary, NO_FILE)

    def jit_process(self, process: int) -> JitProcess | None:
        """As `Files.jit_process`."""
        return self._processes.get(process)

    def close(self) -> None:
        """Closes every file."""
        _close(self._files.values())
        self._files.clear()


class FoundFiles:
    """Files that are still where they were, and have the build id that was recorded.

    Args:
        file_facts: Tells which they have; closing it stays the caller's.
        opener: Opens them: who has mapped a file may serve it himself, and never answer. Closing it
            stays the caller's.
        roots: Returns root directories in which a file may be besides the host's, by its number:
            those of processes that have it mapped.
        kept: Returns a descriptor of a copy that is ours, by the file's number; None for none.
    """

    def __init__(
        self,
        file_facts: FileFacts,
        opener: Opener,
        roots: Callable[[int], Iterable[str]] = lambda _: (),
        kept: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        self._kept = kept
        self._file_facts = file_facts
        self._opener = opener
        self._roots = roots
        self._of_host: dict[tuple[str, str], OpenFile] = {}
        # By number: one container must not name another's frames by a file that looks the same.
        self._of_roots: dict[int, OpenFile] = {}

    def open(self, binary: int, path: str, build_id: str) -> OpenFile:
        """As `Files.open`."""
        can_be_told = path.startswith("/") and "\0" not in path and build_id
        key = (path, build_id)
        if key not in self._of_host:
            self._of_host[key] = self._find(("/",), path, build_id) if can_be_told else NO_FILE
        if self._of_host[key].fd is not None:
            return self._of_host[key]
        if binary not in self._of_roots:
            roots = self._roots(binary) if can_be_told else ()
            found = self._find(roots, path, build_id)
            if found.fd is None and (kept := self._kept(binary)) is not None:
                found = OpenFile(kept, "")
            self._of_roots[binary] = found
        return self._of_roots[binary]

    def _find(self, roots: Iterable[str], path: str, build_id: str) -> OpenFile:
        for root in roots:
            fd = self._open_same(root, path, build_id)
            if fd is not None:
                return OpenFile(fd, root)
        return NO_FILE

    def _open_same(self, root: str, path: str, build_id: str) -> int | None:
        """Opens a file if it is the one that was recorded."""
        try:
            found = self._opener.beneath(root, path)
        except (OSError, ValueError):
            return None
        remote = self._file_facts.guard.remote
        if not found.is_local:
            remote[found.fd] = RemoteFile(self._opener, found, 0, path)
        headers = self._file_facts.ask(path, found.fd, HEADERS)
        if headers is not None and headers.build_id == build_id:
            return found.fd
        remote.pop(found.fd, None)
        os.close(found.fd)
        return None

    def jit_process(self, process: int) -> JitProcess | None:
        """None: what has the process's id by now may be another."""
        return None

    def close(self) -> None:
        """Closes every file."""
        for known in (self._of_host, self._of_roots):
            for file in known.values():
                if file.fd is not None:
                    self._file_facts.guard.remote.pop(file.fd, None)
            _close(known.values())
            known.clear()


def _close(files: Iterable[OpenFile]) -> None:
    for file in files:
        if file.fd is not None:
            os.close(file.fd)
