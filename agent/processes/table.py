# SPDX-License-Identifier: Apache-2.0
"""The process table: who the recorded processes and threads are, and what they have mapped.

A process image is a pid between two execs. It is read from /proc when the kernel half announces
its first sample, and read again when a sample has an address in no known mapping. Mappings that
were replaced stay where newer ones do not cover them: old samples still mean the old file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.processes import procfs
from aiflame.agent.processes.binaries import BinaryTable
from aiflame.agent.processes.shares import payer_of
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.symbols.intervals import Disjoint, find
from intervaltree import Interval, IntervalTree

# Anonymous executable memory: code that a JIT made.
NO_BINARY = -1

# Intervals between reads of mappings that brought nothing: a minute.
_MAX_READS_TO_SKIP = 64


class Mapping(NamedTuple):
    """[start, end) of a process shows `binary` from `file_offset` on; NO_BINARY: JIT memory."""

    start: int
    end: int
    file_offset: int
    binary: int


def _ranges_of(mappings: Sequence[Mapping]) -> Disjoint:
    starts = np.array([mapping.start for mapping in mappings], np.uint64)
    ends = np.array([mapping.end for mapping in mappings], np.uint64)
    return Disjoint(starts, ends, np.arange(len(mappings)))


@dataclass(slots=True)
class ProcessImage:
    """One process image. Times are monotonic ns; `index` counts from 0.

    `mappings` are disjoint and in address order.
    """

    index: int
    pid: int
    image: int
    started_ns: int
    parent_pid: int = 0
    name: str = ""
    executable: str = ""
    command_line: str = ""
    cgroup: str = ""
    namespaced_pid: int = 0
    owner_uid: int = -1
    root: str = ""
    exited_ns: int | None = None
    is_over: bool = False  # it has exited, or called exec
    was_read: bool = False
    fruitless_reads: int = 0
    reads_to_skip: int = 0
    mappings: list[Mapping] = field(default_factory=list)
    _ranges: Disjoint = field(default_factory=lambda: _ranges_of([]))
    _binaries: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    _makes_code: bool = False

    def find(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Returns for each address the index of its mapping in `mappings`, -1 for none."""
        return find(self._ranges, addresses)

    @property
    def makes_code(self) -> bool:
        """Whether it has executable memory that is no file's."""
        return self._makes_code

    @property
    def bounds(self) -> npt.NDArray[np.uint64]:
        """Starts and ends of the mappings, shape (2, mappings)."""
        return np.stack([self._ranges.starts, self._ranges.ends])

    def binaries_at(self, found: npt.NDArray[np.int64]) -> list[int]:
        """Returns the binaries of mappings that `find` found, one for each address in a file."""
        binaries = self._binaries[found[found >= 0]]
        known: list[int] = binaries[binaries != NO_BINARY].tolist()
        return known

    @property
    def payer(self) -> str:
        """Who pays for what it takes of what all processes share."""
        return payer_of(self.cgroup, self.owner_uid)

    def replace_mappings(self, found: list[Mapping]) -> bool:
        """Lays what was found over what is known; returns whether any of it was new.

        Known mappings, or parts of them, that nothing found covers stay.
        """
        fresh = set(found)
        known = set(self.mappings)
        if fresh <= known:
            return False
        gone = IntervalTree.from_tuples((m.start, m.end, m) for m in known - fresh)
        for mapping in fresh - known:
            if gone.overlaps(mapping.start, mapping.end):
                gone.chop(mapping.start, mapping.end)
        self.mappings = sorted(fresh | {_remainder(interval) for interval in gone})
        self._ranges = _ranges_of(self.mappings)
        self._binaries = np.array([mapping.binary for mapping in self.mappings], np.int64)
        self._makes_code = bool((self._binaries == NO_BINARY).any())
        return True


def _remainder(interval: Interval) -> Mapping:
    """Returns what is left of a mapping after others were laid over parts of it."""
    whole: Mapping = interval.data
    file_offset = whole.file_offset + interval.begin - whole.start
    return Mapping(interval.begin, interval.end, file_offset, whole.binary)


@dataclass(slots=True)
class ThreadInfo:
    """One thread of one image."""

    index: int
    image: ProcessImage
    tid: int
    name: str
    has_ended: bool = False


class ProcessTable:
    """The images and threads of a recording, until they are forgotten.

    Args:
        start_ns: Identity of the images that are there before the recording begins, and until
            `start_ns` is set, when it began; monotonic.
        current_image: Tells which image of a pid the kernel half knows now, None for none.
        inspector: Opens files of targets, and reads their memory.
        facts: Answers questions about those files; it is closed with them.
    """

    def __init__(
        self,
        start_ns: int,
        current_image: Callable[[int], int | None],
        inspector: Inspector,
        facts: FileFacts | None = None,
    ) -> None:
        self.start_ns = self.first_image = start_ns
        self._current_image = current_image
        self.images: dict[int, ProcessImage] = {}  # by index
        self._opener = inspector.opener
        self.memory = inspector.memory
        self.binaries = BinaryTable(inspector, facts)
        self._by_key: dict[tuple[int, int], ProcessImage] = {}
        self._latest: dict[int, ProcessImage] = {}
        self._threads: dict[int, dict[int, ThreadInfo]] = {}  # by index of the image, and tid
        self._next_image = self._next_thread = 0
        self._ended: list[ProcessImage] = []
        self._ended_threads: list[ThreadInfo] = []
        self._changed: dict[int, ProcessImage] = {}
        self._remapped: dict[int, ProcessImage] = {}
        self._changed_threads: dict[int, ThreadInfo] = {}

    def is_current(self, image: ProcessImage) -> bool:
        """Whether the kernel half knows an image as what its pid runs now."""
        return self._current_image(image.pid) == image.image

    def take_changed(self) -> tuple[list[ProcessImage], list[ThreadInfo]]:
        """Returns the images and threads that are new, or of which more is known, since last."""
        images, threads = [*self._changed.values()], [*self._changed_threads.values()]
        self._changed.clear()
        self._changed_threads.clear()
        return images, threads

    def take_ended(self) -> tuple[list[ProcessImage], list[ThreadInfo]]:
        """Returns the images and threads that have ended since last."""
        ended = self._ended, self._ended_threads
        self._ended, self._ended_threads = [], []
        return ended

    def ended_images(self) -> set[int]:
        """Returns the indexes of the images that `take_ended` will return."""
        return {image.index for image in self._ended}

    def look_for_ended(self) -> None:
        """Finds images of whose end nobody has told: events may be lost."""
        for image in [image for image in self.images.values() if not image.is_over]:
            if not self.is_current(image):
                self._end(image)

    def _end(self, image: ProcessImage) -> None:
        if not image.is_over:
            image.is_over = True
            self._ended.append(image)

    def threads_of(self, image: ProcessImage) -> list[ThreadInfo]:
        """Returns the threads of an image that are known."""
        return [*self._threads.get(image.index, {}).values()]

    def forget(self, images: Collection[ProcessImage], threads: Collection[ThreadInfo]) -> None:
        """Forgets images, with all of their threads, and single threads."""
        for image in images:
            self.images.pop(image.index, None)
            self._by_key.pop((image.pid, image.image), None)
            self._threads.pop(image.index, None)
            if self._latest.get(image.pid) is image:
                del self._latest[image.pid]
        for thread in threads:
            self._threads.get(thread.image.index, {}).pop(thread.tid, None)

    def take_remapped(self) -> list[ProcessImage]:
        """Returns the images of which new mappings were read since last."""
        images = [*self._remapped.values()]
        self._remapped.clear()
        return images

    def rename(self, thread: ThreadInfo, name: str) -> None:
        """Gives a thread the name that it has now, unless that is empty."""
        if name and name != thread.name:
            thread.name = name
            self._changed_threads[thread.index] = thread

    def image(self, pid: int, image: int, parent_pid: int = 0, name: str = "") -> ProcessImage:
        """Returns a process image, entered now, under that parent and name, if it was not known."""
        known = self._by_key.get((pid, image))
        return known if known is not None else self._enter(pid, image, image, parent_pid, name)

    def known(self, pid: int, image: int) -> ProcessImage | None:
        """Returns a process image if it was entered."""
        return self._by_key.get((pid, image))

    def latest(self, pid: int) -> ProcessImage | None:
        """Returns the image of a pid that was entered last, if it is still known."""
        return self._latest.get(pid)

    def seen(self, pid: int, image: int, parent_pid: int, name: str, ns: int) -> ProcessImage:
        """Enters a process image whose first sample was just taken, and reads it."""
        known = self._by_key.get((pid, image)) or self._enter(pid, image, ns, parent_pid, name)
        known.parent_pid = parent_pid or known.parent_pid
        known.name = name or known.name
        self._changed[known.index] = known
        self.read_mappings(known)
        return known

    def _enter(
        self, pid: int, image: int, ns: int, parent_pid: int = 0, name: str = ""
    ) -> ProcessImage:
        entered = ProcessImage(self._next_image, pid, image, max(ns, self.start_ns), parent_pid)
        self._next_image += 1
        entered.name = name or procfs.comm(pid) or f"pid {pid}"
        self.images[entered.index] = entered
        self._changed[entered.index] = entered
        self._by_key[(pid, image)] = entered
        self._read_identity(entered)
        before = self._latest.get(pid)
        if before is not None and before.image < image:
            self._end(before)  # it has called exec
        self._latest[pid] = entered
        return entered

    def _read_identity(self, image: ProcessImage) -> None:
        pid = image.pid
        cgroup = procfs.cgroups(pid).telling
        executable, command_line = procfs.executable(pid), procfs.command_line(self._opener, pid)
        if not cgroup or not self.is_current(image):
            self._inherit(image)  # it is gone, or has become another program by exec
            return
        image.cgroup, image.executable, image.command_line = cgroup, executable, command_line
        image.parent_pid = image.parent_pid or procfs.parent_pid(pid)
        image.namespaced_pid = procfs.namespaced_pid(pid)
        image.owner_uid = procfs.owner_uid(pid)
        image.root = self.binaries.root_of(pid, image.payer)

    def _inherit(self, image: ProcessImage) -> None:
        """A forked child that is gone had its parent's mappings, unless it called exec."""
        parent = self._latest.get(image.parent_pid)
        if parent is None or parent.name != image.name:
            return
        image.executable, image.cgroup = parent.executable, parent.cgroup
        image.command_line, image.root = parent.command_line, parent.root
        image.replace_mappings(parent.mappings)

    def read_mappings(self, image: ProcessImage) -> bool:
        """Reads the mappings again; returns whether anything new was found.

        A process that is gone, or has called exec since, keeps what was known: the kernel half is
        asked after the read, so that one image never gets another's mappings.
        """
        found = []
        payer = image.payer
        for line in procfs.executable_mappings(self._opener, image.pid):
            file = self.binaries.of_mapping(image.pid, payer, line)
            binary = NO_BINARY if file is None else file.index
            found.append(Mapping(line.start, line.end, line.offset, binary))
        if not self.is_current(image):
            return False
        image.was_read = image.was_read or bool(found)
        is_new = image.replace_mappings(found)
        if is_new:
            self._changed[image.index] = image
            self._remapped[image.index] = image
        return is_new

    def unknown_address(self, image: ProcessImage, is_certain: bool) -> None:
        """Reads mappings again since a sample had an address in none.

        Args:
            image: Whose sample it was.
            is_certain: The address was executing. A caller's address may be a frame pointer's
                junk: reads that found nothing new are repeated ever more rarely for those.
        """
        if not is_certain and image.reads_to_skip > 0:
            image.reads_to_skip -= 1
            return
        if self.read_mappings(image):
            image.fruitless_reads = 0
        else:
            image.fruitless_reads += 1
        image.reads_to_skip = min(1 << image.fruitless_reads, _MAX_READS_TO_SKIP)

    def exited(self, pid: int, image: int, ns: int) -> None:
        """Notes the end of a process."""
        known = self._by_key.get((pid, image))
        if known is not None:
            known.exited_ns = ns
            self._changed[known.index] = known
            self._end(known)

    def thread_ended(self, thread: ThreadInfo) -> None:
        """Notes the end of a thread."""
        thread.has_ended = True
        self._ended_threads.append(thread)

    def known_thread(self, image: ProcessImage, tid: int) -> ThreadInfo | None:
        """Returns a thread if it was entered."""
        return self._threads.get(image.index, {}).get(tid)

    def thread(self, image: ProcessImage, tid: int) -> ThreadInfo:
        """Returns a thread, entered now with the name it has now if it was not known."""
        threads = self._threads.setdefault(image.index, {})
        known = threads.get(tid)
        if known is None:
            name = procfs.comm(image.pid, tid) or image.name
            known = threads[tid] = ThreadInfo(self._next_thread, image, tid, name)
            self._next_thread += 1
            self._changed_threads[known.index] = known
        return known
