# SPDX-License-Identifier: Apache-2.0
"""What container engines tell of containers, read while these are there.

An engine may forget a container as soon as it ends (`podman run --rm`), which is often before the
window is closed in which it ran. So what engines keep on disk (`processes.container_names`) is read
whenever it changes, which inotify(7) tells, and kept for whoever asks later.

podman writes a container's name to one file and its labels to another, some 20 ms later. So labels
that are not there yet are looked for again after a while.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from aiflame.agent.processes.container_names import (
    EngineFacts,
    docker_files,
    facts_in,
    facts_of,
    is_state_directory,
    labelled,
    state_directories,
)

# Containers whose facts are kept: as many as have labels at a time (labels.py).
_MAX_KNOWN = 8192
# Directories of single containers of docker, each watched until its file is there.
_MAX_WATCHED = 1024
# How soon an engine is noticed that was not installed, or had no container yet.
_LOOK_S = 10.0
# Lists of many containers take long to read, and change with each of them: reading may take this
# share of one CPU at most.
_READING_SHARE = 0.05

# When labels are looked for that were not there with the name, from then on: until 6 s have passed,
# on slow disks. Others are read when somebody asks for the container.
_AGAIN_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)

# include/uapi/linux/inotify.h; struct inotify_event is followed by a name of `len` bytes.
_EVENT = struct.Struct("iIII")
_CLOSE_WRITE, _MOVED_TO, _CREATE, _OVERFLOW = 0x8, 0x80, 0x100, 0x4000
_IGNORED, _ONLYDIR, _DONT_FOLLOW = 0x8000, 0x0100_0000, 0x0200_0000
# Of what is in a directory.
CHANGES = _CLOSE_WRITE | _MOVED_TO | _CREATE | _ONLYDIR
_WATCHED = CHANGES | _DONT_FOLLOW
_BUFFER_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class EngineWatch:
    """Keeps what engines tell, in a thread of its own.

    Where the kernel has no watch left, what is asked for is read when it is asked for.

    Args:
        root: Where the engines' files are; another one in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._known: OrderedDict[str, EngineFacts] = OrderedDict()
        self._lock = threading.Lock()
        self._watched: dict[int, Path] = {}
        self._of_containers: OrderedDict[Path, int] = OrderedDict()
        # Of docker's files, by path: what tells another one.
        self._versions: OrderedDict[str, tuple[int, int]] = OrderedDict()
        # Of containers whose labels are to be looked for: after how many times, and when.
        self._unlabelled: dict[str, tuple[int, float]] = {}
        self._inotify = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._ends, self._end = os.pipe2(os.O_CLOEXEC)
        self._look()
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._thread.start()

    def facts_of(self, ids: Iterable[str]) -> dict[str, EngineFacts]:
        """Returns what engines told of containers, also of those that are gone.

        Args:
            ids: 64 hex digits each.
        """
        wanted = [*ids]
        found = self._held_of(wanted)
        known = {key for key, facts in found.items() if not facts.may_have_labels}
        return found | facts_of([key for key in wanted if key not in known], self._root)

    def names_of(self, ids: Iterable[str]) -> dict[str, str]:
        """Returns the names that containers have now, as far as engines tell.

        podman's are those of a list that is watched. docker has a file of each container, which is
        read again where it is another one than last time.

        Args:
            ids: 64 hex digits each.
        """
        wanted = [*ids]
        for path in docker_files(wanted, self._root):
            self._read_again(path)
        return {key: facts.name for key, facts in self._held_of(wanted).items()}

    def _read_again(self, path: str) -> None:
        """Reads docker's file of a container, which a change replaces by another one."""
        try:
            found = os.stat(path)  # noqa: PTH116 - of each container, with each window
        except OSError:  # it is podman's, or gone
            return
        version = (found.st_ino, found.st_mtime_ns)
        if self._versions.get(path) == version:
            return
        facts = facts_in(Path(path))
        if facts:  # else it is damaged, and is tried again
            self._keep(facts)
            self._versions[path] = version
            self._versions.move_to_end(path)
            if len(self._versions) > _MAX_KNOWN:
                self._versions.popitem(last=False)

    def _held_of(self, ids: Iterable[str]) -> dict[str, EngineFacts]:
        """Returns what was read of containers when engines wrote it."""
        with self._lock:
            return {key: self._known[key] for key in ids if key in self._known}

    def stop(self) -> None:
        """Ends the thread."""
        os.close(self._end)
        self._thread.join()
        os.close(self._ends)
        if self._inotify >= 0:
            os.close(self._inotify)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._ends, select.POLLIN)
        if self._inotify >= 0:
            poll.register(self._inotify, select.POLLIN)
        looked_s, changed = time.monotonic(), set[Path]()
        ready_s = 0.0
        while True:
            now_s = time.monotonic()
            wait_s = ready_s if changed else looked_s + _LOOK_S
            wait_s = min(wait_s, max(self._again_s(), ready_s)) - now_s
            if any(fd == self._ends for fd, _ in poll.poll(max(wait_s, 0) * 1000)):
                return
            for path in self._events():
                changed.add(path)
            begun_s = time.monotonic()
            if begun_s - looked_s >= _LOOK_S:
                looked_s = begun_s
                self._look()
            if (changed or begun_s >= self._again_s()) and begun_s >= ready_s:
                begun_cpu_s = time.thread_time()
                for path in changed:
                    self._read(path)
                changed.clear()
                self._look_for_labels()
                taken_s = time.thread_time() - begun_cpu_s
                ready_s = time.monotonic() + taken_s / _READING_SHARE

    def _look(self) -> None:
        """Watches the directories that there are; one that is watched already stays so."""
        for folder in state_directories(self._root):
            self._watch(folder)

    def _watch(self, folder: Path) -> int:
        if self._inotify < 0:
            return -1
        number = int(_libc.inotify_add_watch(self._inotify, os.fsencode(folder), _WATCHED))
        if number >= 0:
            self._watched[number] = folder
        return number

    def _events(self) -> Iterator[Path]:
        """Yields the paths of files and directories that have changed."""
        while data := _read(self._inotify):
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                at += _EVENT.size + length
                if mask & _OVERFLOW:
                    yield from (
                        path for folder in self._watched.values() for path in _files(folder)
                    )
                elif mask & _IGNORED:  # the directory is gone
                    self._of_containers.pop(self._watched.pop(number, Path()), None)
                elif number in self._watched and name:
                    yield self._watched[number] / os.fsdecode(name)

    def _read(self, path: Path) -> None:
        if path.is_dir():
            if is_state_directory(path):
                self._enter(path)
            return
        found = facts_in(path)
        if path.parent.name in found:  # a file for one container: of it, only the name changes
            self._leave(path.parent)
        new = {}
        for key, facts in found.items():
            known = self._known.get(key)
            if known is None:
                new[key] = facts
            elif facts.may_have_labels:  # of a list: names change, labels do not
                found[key] = replace(
                    facts, labels=known.labels, may_have_labels=known.may_have_labels
                )
        new = labelled(new, self._root)
        self._keep(found | new)
        self._look_again(new, dict.fromkeys(new, 0))

    def _keep(self, found: Mapping[str, EngineFacts]) -> None:
        with self._lock:
            for key, facts in found.items():
                self._known[key] = facts
                self._known.move_to_end(key)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def _look_again(self, found: Mapping[str, EngineFacts], tries: Mapping[str, int]) -> None:
        """Has labels that are not there yet looked for after a while.

        Args:
            found: By ids of containers.
            tries: How often theirs were already.
        """
        now_s = time.monotonic()
        for key, facts in found.items():
            if facts.may_have_labels and tries[key] < len(_AGAIN_S):
                self._unlabelled[key] = (tries[key] + 1, now_s + _AGAIN_S[tries[key]])

    def _again_s(self) -> float:
        return min((when_s for _, when_s in self._unlabelled.values()), default=float("inf"))

    def _look_for_labels(self) -> None:
        now_s = time.monotonic()
        due = {key: count for key, (count, when_s) in self._unlabelled.items() if when_s <= now_s}
        for key in due:
            del self._unlabelled[key]
        found = {key: self._known[key] for key in due if key in self._known}
        if found:
            found = labelled(found, self._root)
            self._keep(found)
            self._look_again(found, due)

    def _enter(self, folder: Path) -> None:
        """Watches a new directory, of a container or of a storage driver."""
        number = self._watch(folder)
        if number >= 0:
            self._of_containers[folder] = number
            if len(self._of_containers) > _MAX_WATCHED:
                self._leave(next(iter(self._of_containers)))
        for path in _files(folder):  # they may have been there first
            self._read(path)

    def _leave(self, folder: Path) -> None:
        number = self._of_containers.pop(folder, None)
        if number is not None:
            _libc.inotify_rm_watch(self._inotify, number)


def _read(inotify: int) -> bytes:
    try:
        return os.read(inotify, _BUFFER_BYTES)
    except OSError:  # there is none
        return b""


def _files(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:  # it is gone
        return
    yield from found
