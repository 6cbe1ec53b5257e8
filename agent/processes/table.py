# SPDX-License-Identifier: Apache-2.0
"""The process table: who the recorded processes and threads are, and what they have mapped.

A process image is a pid between two execs. What it has mapped is what the kernel told when that
happened, or is read from /proc when the kernel half announces its first sample; it is read again
some milliseconds later, and when a sample has an address in no known mapping. Mappings that were
replaced stay where newer ones do not cover them: old samples still mean the old file.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.processes import procfs
from aiflame.agent.processes.binaries import BinaryTable
from aiflame.agent.processes.cgroup_ids import CgroupIds
from aiflame.agent.processes.identity import REMOVED, identity_of
from aiflame.agent.processes.lives import Life, Lives
from aiflame.agent.processes.procfs import MapsLine
from aiflame.agent.processes.shares import payer_of
from aiflame.agent.python.thread_names import MAX_THREADS, shown_name
from aiflame.agent.symbols.file_facts import FileFacts
from aiflame.agent.symbols.intervals import Disjoint, find
from intervaltree import Interval, IntervalTree

# Anonymous executable memory: code that a JIT made.
NO_BINARY = -1

# Intervals between reads of mappings that brought nothing: a minute.
_MAX_READS_TO_SKIP = 64

# Of programs that were not entered yet: each has its first sample, or its end, within a second.
_MAX_ARGUMENTS = 1024

# Of one process: those that run, and as many that have ended before they were entered.
_MAX_PYTHON_NAMES = 2 * MAX_THREADS

# How often the kernel half tells of an image without a reason: first, and once it is settled.
_TOLD_OF = 2

# Names of short-lived processes of a cgroup that are told apart, and what others are called.
_MOST_JOINED_NAMES, _OTHERS = 64, "[short-lived]"
# Images of which others stand for them, in a window: 100 bytes each, twice.
_MOST_STAND_INS = 1 << 15
# Of pids, PID_MAX_LIMIT (include/linux/threads.h): a number with its image tells a process, and
# takes a third of a pair's memory.
_PID_BITS = 22

# A command in a pipe is a child of a shell's child, of which there may have been no sample.
_MAX_GENERATIONS = 4

# Layouts that came last, whose equals are looked for among them: a host has some hundred kinds of
# processes. Larger ones are few; together at most 5 MB.
_MAX_SHARED, _MAX_SHARED_MAPPINGS = 256, 64
# Names, paths and command lines that came last, likewise; one has 4 KB at most, and 50 mostly.
_MAX_WORDS = 1 << 10


class Mapping(NamedTuple):
    """[start, end) of a process shows `binary` from `file_offset` on; NO_BINARY: JIT memory."""

    start: int
    end: int
    file_offset: int
    binary: int


_Layout: TypeAlias = tuple[Mapping, ...]
_T = TypeVar("_T")


def _once_for_equal(make: Callable[[_Layout], _T]) -> Callable[[_Layout], _T]:
    """Has one result made of equal layouts: processes that were forked from one have the same."""
    made = functools.lru_cache(maxsize=_MAX_SHARED)(make)
    return lambda layout: (made if len(layout) <= _MAX_SHARED_MAPPINGS else make)(layout)


@functools.lru_cache(maxsize=_MAX_WORDS)
def _once(words: str) -> str:
    """Returns an equal text that was there before, if any: some Pythons 3.12 keep interned ones."""
    return words


@_once_for_equal
def _shared(layout: _Layout) -> _Layout:
    return layout


@_once_for_equal
def _binaries_of(layout: _Layout) -> npt.NDArray[np.int64]:
    return np.array([mapping.binary for mapping in layout], np.int64)


@_once_for_equal
def _ranges_of(layout: _Layout) -> Disjoint:
    starts = np.array([mapping.start for mapping in layout], np.uint64)
    ends = np.array([mapping.end for mapping in layout], np.uint64)
    return Disjoint(starts, ends, np.arange(len(layout)))


@dataclass(slots=True)
class ProcessImage:
    """One process image. Times are monotonic ns; `index` counts from 0.

    What short processes have mapped is looked at when somebody asks for it: nobody does where no
    stack is theirs. `lays` lays it out then; `laid` is what was until now.
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
    cgroup_id: int = 0  # as programs have it: of v2, 0 where it is not known
    namespaced_pid: int = 0
    owner_uid: int = -1
    root: str = ""
    exited_ns: int | None = None
    is_over: bool = False  # it has exited, or called exec
    is_joined: bool = False  # it stands for several short-lived ones
    was_read: bool = False
    fruitless_reads: int = 0
    reads_to_skip: int = 0
    times_seen: int = 0
    laid: _Layout = ()
    lays: Callable[[ProcessImage], object] | None = None
    # Made when they are asked for: nobody looks an address up in most short-lived processes.
    _known_ranges: Disjoint | None = None
    _known_binaries: npt.NDArray[np.int64] | None = None
    makes_code: bool = False  # it has executable memory that is no file's

    @property
    def mappings(self) -> _Layout:
        """What is mapped, disjoint and in address order."""
        if self.lays is not None:
            lays, self.lays = self.lays, None
            lays(self)
        return self.laid

    @property
    def _ranges(self) -> Disjoint:
        mappings = self.mappings  # which may change what is known
        if self._known_ranges is None:
            self._known_ranges = _ranges_of(mappings)
        return self._known_ranges

    def find(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Returns for each address the index of its mapping in `mappings`, -1 for none."""
        return find(self._ranges, addresses)

    @property
    def bounds(self) -> npt.NDArray[np.uint64]:
        """Starts and ends of the mappings, shape (2, mappings)."""
        return np.stack([self._ranges.starts, self._ranges.ends])

    def binaries_at(self, found: npt.NDArray[np.int64]) -> list[int]:
        """Returns the binaries of mappings that `find` found, one for each address in a file."""
        if self._known_binaries is None:
            self._known_binaries = _binaries_of(self.laid)
        binaries = self._known_binaries[found[found >= 0]]
        known: list[int] = binaries[binaries != NO_BINARY].tolist()
        return known

    @property
    def payer(self) -> str:
        """Who pays for what it takes of what all processes share."""
        return payer_of(self.cgroup, self.owner_uid)

    def replace_mappings(self, found: Collection[Mapping]) -> bool:
        """Lays what was found over what is known; returns whether any of it was new.

        Known mappings, or parts of them, that nothing found covers stay.
        """
        fresh = set(found)
        known = set(self.laid)
        if fresh <= known:
            return False
        self._known_ranges = self._known_binaries = None
        self.makes_code = any(mapping.binary == NO_BINARY for mapping in fresh | known)
        if known <= fresh:  # as of most: they are read or told once
            self.laid = _shared(tuple(sorted(fresh)))
            return True
        gone = IntervalTree.from_tuples((m.start, m.end, m) for m in known - fresh)
        for mapping in fresh - known:
            if gone.overlaps(mapping.start, mapping.end):
                gone.chop(mapping.start, mapping.end)
        self.laid = _shared(tuple(sorted(fresh | {_remainder(interval) for interval in gone})))
        return True


def _remainder(interval: Interval) -> Mapping:
    """Returns what is left of a mapping after others were laid over parts of it."""
    whole: Mapping = interval.data
    file_offset = whole.file_offset + interval.begin - whole.start
    return Mapping(interval.begin, interval.end, file_offset, whole.binary)


def _name_of(life: Life | None) -> str:
    """The name that the kernel told, "" where it may have told of a later one that is lost.

    In the middle of an exec the kernel half sees the name of the program that comes.
    """
    return "" if life is None or life.has_gap else life.name


def _maker_of(image: ProcessImage, life: Life | None) -> int:
    """Returns the pid of whoever forked an image; one that is gone is its parent no more.

    Of one that has called exec, which may be long after that, it is its parent.
    """
    told = 0 if life is None or life.is_exec else life.parent_pid
    return told or image.parent_pid


def _is_copy(image: ProcessImage, ancestor: ProcessImage, life: Life | None) -> bool:
    """Whether an image is its maker's, forked, as far as is known without its own mappings."""
    has_called_exec = image.name != ancestor.name if life is None else life.is_exec
    return ancestor.pid == _maker_of(image, life) and not has_called_exec


@dataclass(slots=True)
class ThreadInfo:
    """One thread of one image."""

    index: int
    image: ProcessImage
    tid: int
    name: str
    has_ended: bool = False
    python_name: str = ""

    @property
    def shown_name(self) -> str:
        """What windows are told."""
        inherited = (self.image.name, self.image.executable.rpartition("/")[2])
        return shown_name(self.name, self.python_name, inherited)


class ProcessTable:
    """The images and threads of a recording, until they are forgotten.

    Args:
        start_ns: Identity of the images that are there before the recording begins, and until
            `start_ns` is set, when it began; monotonic.
        current_image: Tells which image of a pid the kernel half knows now, None for none.
        inspector: Opens files of targets, and reads their memory.
        facts: Answers questions about those files; it is closed with them.
        lives: What the kernel told of processes, which may be gone.

    Attributes:
        images: Those that are not forgotten, by index.
        code_makers: Those of them that make code, likewise.
        joined: How many images were joined so far.
    """

    def __init__(
        self,
        start_ns: int,
        current_image: Callable[[int], int | None],
        inspector: Inspector,
        facts: FileFacts | None = None,
        lives: Lives | None = None,
    ) -> None:
        self.start_ns = self.first_image = start_ns
        self._current_image = current_image
        self.images: dict[int, ProcessImage] = {}
        self.code_makers: dict[int, ProcessImage] = {}
        self._opener = inspector.opener
        self.memory = inspector.memory
        self.binaries = BinaryTable(inspector, facts)
        self._lives = lives or Lives()
        self._cgroup_ids = CgroupIds()
        self._by_key: dict[tuple[int, int], ProcessImage] = {}
        self._latest: dict[int, ProcessImage] = {}
        self._arguments: OrderedDict[tuple[int, int], tuple[bytes, bool]] = OrderedDict()
        self._threads: dict[int, dict[int, ThreadInfo]] = {}  # by index of the image, and tid
        self._python_names: dict[int, dict[int, str]] = {}  # likewise
        self._next_image = self._next_thread = 0
        self._ended: list[ProcessImage] = []
        self._ended_threads: list[ThreadInfo] = []
        self._changed: dict[int, ProcessImage] = {}
        self._remapped: dict[int, ProcessImage] = {}
        self._changed_threads: dict[int, ThreadInfo] = {}
        self._current_since: dict[int, int] = {}
        self.joined = 0
        self._joined: dict[str, dict[str, ProcessImage]] = {}  # by cgroup and name
        # In the open window and the one before, by id of the cgroup, parent and name.
        self._joined_now: dict[tuple[int, int, str], ProcessImage] = {}
        self._joined_before: dict[tuple[int, int, str], ProcessImage] = {}
        # What stands for each joined image, of the open window and the one before: there may be
        # sums of it in the window after its end.
        self._stand_ins: dict[int, ProcessImage] = {}
        self._stand_ins_before: dict[int, ProcessImage] = {}

    def expect_ends(self, current_since: dict[int, int]) -> None:
        """Takes note of images that are over, as events tell that are still to be taken in.

        Args:
            current_since: By pid, before which image all are; in place of what was noted before.
        """
        self._current_since = current_since

    def is_current(self, image: ProcessImage) -> bool:
        """Whether the kernel half knows an image as what its pid runs now."""
        if image.is_over or image.image < self._current_since.get(image.pid, 0):
            return False
        return self._current_image(image.pid) == image.image

    def _is_shown(self, image: ProcessImage) -> bool:
        """Whether what /proc has shown of a pid until now was that image."""
        return self.is_current(image) and not self._lives.is_past(image.pid, image.image)

    def take_changed(self) -> tuple[list[ProcessImage], list[ThreadInfo]]:
        """Returns the images and threads that are new, or of which more is known, since last."""
        images, threads = [*self._changed.values()], [*self._changed_threads.values()]
        self._changed.clear()
        self._changed_threads.clear()
        return images, threads

    def take_ended(self) -> tuple[list[ProcessImage], list[ThreadInfo]]:
        """Returns the images and threads that have ended since last."""
        self._end_joined()
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
            self._map_late(image, self._lives.find(image.pid, image.image))

    def threads_of(self, image: ProcessImage) -> list[ThreadInfo]:
        """Returns the threads of an image that are known."""
        return [*self._threads.get(image.index, {}).values()]

    def forget(self, images: Collection[ProcessImage], threads: Collection[ThreadInfo]) -> None:
        """Forgets images, with all of their threads, and single threads."""
        for image in images:
            self.images.pop(image.index, None)
            self.code_makers.pop(image.index, None)
            self._by_key.pop((image.pid, image.image), None)
            self._threads.pop(image.index, None)
            self._python_names.pop(image.index, None)
            if self._latest.get(image.pid) is image:
                del self._latest[image.pid]
        for thread in threads:
            known = self._threads.get(thread.image.index, {})
            if known.get(thread.tid) is thread:  # and not another one that has its id by now
                del known[thread.tid]

    def forget_roots(self) -> None:
        """Closes root directories that no process has any more; to be called now and then."""
        images = [*self.images.values()]
        used = {"", *(image.root for image in images)}
        files = self.binaries.files
        left = {file.index for file in files.values() if file.root not in used}
        # Those of a container that is gone which others have mapped as well, as drivers.
        for image in images if left else ():
            for mapping in image.laid:
                if mapping.binary in left:
                    self.binaries.move(mapping.binary, image.root)
                    left.remove(mapping.binary)
        self.binaries.forget_roots({*used, *(files[binary].root for binary in left)})

    def take_remapped(self) -> list[ProcessImage]:
        """Returns the images of which new mappings were read since last."""
        images = [*self._remapped.values()]
        self._remapped.clear()
        return images

    def open_again(self, binaries: Collection[int]) -> None:
        """Tries to open files once more, by one of those that map each and that live."""
        left = {*binaries}
        for image in [*self.images.values()]:
            if not left:
                return
            mapped = left.intersection(mapping.binary for mapping in image.laid)
            if mapped and self.is_current(image):
                left -= mapped
                self.read_mappings(image)

    def look_again(self, binaries: Collection[int]) -> None:
        """Has it told of all who map some files as if they had just mapped them."""
        for image in self.images.values():
            if any(mapping.binary in binaries for mapping in image.laid):
                self._changed[image.index] = self._remapped[image.index] = image

    def rename(self, thread: ThreadInfo, name: str) -> None:
        """Gives a thread the name that it has now, unless that is empty."""
        if name and name != thread.name:
            thread.name = name
            self._changed_threads[thread.index] = thread

    def name_python_threads(self, image: ProcessImage, names: dict[int, str]) -> None:
        """Gives threads of a process the names that Python has for them, by tid.

        Threads are often entered later than they are named, at the end of a window.
        """
        if not names:
            return
        known = self._python_names.setdefault(image.index, {})
        known.update(names)
        while len(known) > _MAX_PYTHON_NAMES:
            del known[next(iter(known))]
        threads = self._threads.get(image.index, {})
        for tid, name in names.items():
            thread = threads.get(tid)
            if thread is not None and thread.python_name != name and not thread.has_ended:
                thread.python_name = name
                self._changed_threads[thread.index] = thread

    def image(
        self, pid: int, image: int, parent_pid: int = 0, name: str = "", cgroup_id: int = 0
    ) -> ProcessImage:
        """Returns a process image, entered now if it was not known.

        Args:
            pid: The process.
            image: Its identity.
            parent_pid, name, cgroup_id: To enter it under, as for `seen`.
        """
        known = self.known(pid, image)
        if known is not None:
            return known
        return self._enter(pid, image, image, parent_pid, name, cgroup_id)

    def join(self, pid: int, image: int, parent_pid: int, name: str, cgroup_id: int) -> None:
        """Has an image that is not known, and is over, be one with others of its cgroup and name.

        All of its threads are one, too. Whoever asks for it by its identity gets what stands for
        them all.

        Args: as for `seen`.
        """
        stands = self._joined_to(image, cgroup_id, parent_pid, name)
        self._stand_ins[image << _PID_BITS | pid] = stands
        self.joined += 1

    @property
    def is_filling(self) -> bool:
        """Whether many images were joined, each by itself, in the open window."""
        return len(self._stand_ins) > _MOST_STAND_INS

    def name_told(self, pid: int, image: int) -> str:
        """Returns what the kernel told that an image is called, "" where it did not."""
        return _name_of(self._lives.find(pid, image))

    def join_all(
        self, images: int, ns: int, parent_pid: int, name: str, cgroup_id: int
    ) -> ThreadInfo:
        """Joins so many images at once of which nothing else is known; returns their thread.

        Their parent may be gone by now, and their cgroup. One of them was joined at its end, but
        for chance.

        Args:
            images: How many.
            ns: When they were over at the latest, monotonic.
            parent_pid, name, cgroup_id: as for `seen`.
        """
        self.joined += images
        return self.thread(self._joined_to(ns, cgroup_id, parent_pid, name), 0)

    def _joined_to(self, ns: int, cgroup_id: int, parent_pid: int, name: str) -> ProcessImage:
        """Returns what stands for short-lived images of a parent that it has, or had, at a time."""
        called = (cgroup_id, parent_pid, name)
        stands = self._joined_now.get(called)
        if stands is None:
            # What is told at the beginning of a window comes while that before is being closed.
            stands = self._joined_before.get(called) or self._stand_in(ns, *called)
            self._joined_now[called] = stands
        return stands

    def _stand_in(self, ns: int, cgroup_id: int, parent_pid: int, name: str) -> ProcessImage:
        """Returns what stands for short-lived images of a cgroup and a name."""
        ancestor = self._ancestor(ProcessImage(-1, 0, ns, ns, parent_pid))
        inherited = "" if ancestor is None else ancestor.cgroup
        cgroup = self._likely_cgroup(inherited, cgroup_id)
        known = self._joined.setdefault(cgroup, {})
        # A child that calls exec is its parent until then.
        name = name or (_OTHERS if ancestor is None else ancestor.name)
        if name not in known and len(known) >= _MOST_JOINED_NAMES:
            name = _OTHERS
        stands = known.get(name)
        if stands is None:
            # A pid that nobody has, and a number of its own: so it is known as others are.
            number = self._next_image
            stands = ProcessImage(number, 0, number, max(ns, self.start_ns))
            known[name] = self._by_key[(0, number)] = stands
            self._next_image += 1
            stands.is_joined = stands.is_over = True
            stands.name, stands.cgroup, stands.cgroup_id = name, cgroup, cgroup_id
            stands.owner_uid = -1 if ancestor is None else ancestor.owner_uid
            self.images[stands.index] = self._changed[stands.index] = stands
            self.thread(stands, 0).has_ended = True
        return stands

    def _end_joined(self) -> None:
        """Has those be over that stood for nobody in the window that was closed."""
        used = {stands.index for stands in self._joined_now.values()}
        self._joined_before, self._joined_now = self._joined_now, {}
        for cgroup, known in [*self._joined.items()]:
            for name in [name for name, stands in known.items() if stands.index not in used]:
                self._ended.append(known.pop(name))
            if not known:
                del self._joined[cgroup]
        self._stand_ins_before, self._stand_ins = self._stand_ins, {}

    def known(self, pid: int, image: int) -> ProcessImage | None:
        """Returns a process image if it was entered, or what it was joined to."""
        known = self._by_key.get((pid, image))
        if known is None:
            number = image << _PID_BITS | pid
            known = self._stand_ins.get(number) or self._stand_ins_before.get(number)
        return known

    def latest(self, pid: int) -> ProcessImage | None:
        """Returns the image of a pid that was entered last, if it is still known."""
        return self._latest.get(pid)

    def seen(
        self, pid: int, image: int, parent_pid: int, name: str, ns: int, cgroup_id: int = 0
    ) -> ProcessImage:
        """Enters a process image of which a sample was just taken, and reads it.

        At first, what the kernel told is all of it, and there at once, also of one that is gone.

        Args:
            pid: The process.
            image: Its identity.
            parent_pid: 0 when unknown.
            name: "" when unknown.
            ns: When, monotonic.
            cgroup_id: Of its cgroup of v2, 0 when unknown.
        """
        before = self._by_key.get((pid, image))
        known = before or self._enter(pid, image, ns, parent_pid, name, cgroup_id)
        known.parent_pid = parent_pid or known.parent_pid
        has_moved = bool(cgroup_id and known.cgroup_id) and cgroup_id != known.cgroup_id
        known.cgroup_id = cgroup_id or known.cgroup_id
        if has_moved and not self._follow_cgroup(known):
            known.cgroup = self._likely_cgroup(known.cgroup, cgroup_id)
        self._lives.update(ns)  # else what it has mapped since it was last seen may be missing
        life = self._lives.find(pid, image)
        known.name = _name_of(life) or name or known.name
        self._changed[known.index] = known
        known.times_seen += 1
        if known.is_over:
            self._map_late(known, life)
        elif self._is_enough(life):
            # The kernel half tells of each twice, and again where it met an unknown address.
            is_new = self._map(known, life.lines())
            if not is_new and known.times_seen > _TOLD_OF:
                self.read_mappings(known)
        elif before is not None or not known.was_read:
            self.read_mappings(known)
        return known

    def has_become(self, pid: int, image: int, arguments: bytes, *, is_whole: bool = False) -> None:
        """Takes note of the arguments of a program, which may be gone before it is entered.

        Args:
            pid: The process.
            image: Its identity from here on.
            arguments: Of these, the first bytes; a NUL after each.
            is_whole: These are all, and /proc need not be asked.
        """
        known = self._by_key.get((pid, image))
        if known is None:
            self._arguments[(pid, image)] = arguments, is_whole
            if len(self._arguments) > _MAX_ARGUMENTS:
                self._arguments.popitem(last=False)
        elif not known.command_line:
            known.command_line = procfs.joined_arguments(arguments)
            self._changed[known.index] = known

    def _is_enough(self, life: Life | None) -> TypeGuard[Life]:
        """Whether what was told of a life is all that it has mapped, and /proc need not be read.

        Files are opened as /proc has them: kernels from v6.8 to v6.17 tell of others than that
        for what is on overlayfs (v6.8 def3ae83da02, "fs: store real path instead of fake path").
        """
        return (
            life is not None
            and life.is_whole
            and all(self.binaries.has_open(line) for line in life.mapped.values())
        )

    def follow_cgroups(self, processes: Iterable[tuple[int, int]]) -> list[ProcessImage]:
        """Looks at which cgroups processes are in now; returns the images that have moved.

        Args:
            processes: Pids and images; those that are not known, or are over, are left out.
        """
        found = map(self._by_key.get, processes)
        return [each for each in found if each is not None and self._follow_cgroup(each)]

    def _follow_cgroup(self, image: ProcessImage) -> bool:
        """Takes note of the cgroup that an image is in now; whether it is another one."""
        if image.is_over or not image.cgroup:
            return False
        cgroup = procfs.cgroups(image.pid).telling
        if cgroup in ("", image.cgroup) or cgroup.endswith(REMOVED) or not self._is_shown(image):
            return False
        image.cgroup = _once(cgroup)
        image.cgroup_id = self._cgroup_ids.id_of(cgroup) or image.cgroup_id
        self._changed[image.index] = image
        return True

    def know_cgroups(self, paths: dict[int, str]) -> None:
        """Takes note of cgroups that are there, by id: they may be gone when somebody asks."""
        self._cgroup_ids.know(paths)

    def cgroup_id_of(self, image: ProcessImage) -> int:
        """Returns the id of the cgroup that an image has the path of.

        It is 0 where nobody has told it yet, and where the path is of a hierarchy of v1: by v2 the
        process is in another one.
        """
        is_told = self._cgroup_ids.path_of(image.cgroup_id) == image.cgroup
        return image.cgroup_id if is_told else 0

    def _enter(
        self,
        pid: int,
        image: int,
        ns: int,
        parent_pid: int = 0,
        name: str = "",
        cgroup_id: int = 0,
    ) -> ProcessImage:
        entered = ProcessImage(self._next_image, pid, image, max(ns, self.start_ns), parent_pid)
        self._next_image += 1
        self.images[entered.index] = entered
        self._changed[entered.index] = entered
        self._by_key[(pid, image)] = entered
        if not self.is_current(entered):  # asked once: what is over stays so
            entered.is_over = True
            self._ended.append(entered)
        self._identify(entered, name, cgroup_id)
        latest = self._latest.get(pid)
        if latest is None or latest.image < image:
            self._latest[pid] = entered
            if latest is not None:
                self._end(latest)  # it has called exec
        if not self.is_current(entered):
            self._end(entered)
        return entered

    def _identify(self, image: ProcessImage, name: str, cgroup_id: int) -> None:
        """Finds out who a process image is: by /proc, or by what was told if it is over.

        Words that many have are kept once.
        """
        pid = image.pid
        arguments, is_whole = self._arguments.pop((pid, image.image), (b"", False))
        image.command_line = procfs.joined_arguments(arguments)
        if not self._is_shown(image):
            self._inherit(image, name, cgroup_id)
            return
        cgroup, status = procfs.cgroups(pid).telling, procfs.status(pid)
        name_now = "" if name else procfs.comm(pid)
        executable = procfs.executable(pid)
        # A process of its own reads it, which takes longer than all else here.
        command_line = "" if is_whole else procfs.command_line(self._opener, pid)
        if not cgroup or not self._is_shown(image):
            # It is gone, or has become another program by exec.
            self._inherit(image, name, cgroup_id)
            return
        image.name = _once(name or name_now or f"pid {pid}")
        image.cgroup, image.executable = _once(cgroup), _once(executable)
        image.command_line = _once(command_line or image.command_line)
        image.parent_pid = image.parent_pid or status.parent_pid
        image.namespaced_pid, image.owner_uid = status.namespaced_pid, status.owner_uid
        image.root = self.binaries.root_of(pid, image.payer)

    def _inherit(self, image: ProcessImage, name: str, cgroup_id: int) -> None:
        """Makes up for what cannot be read of an image that is over.

        It ran as whom its parent does, and where, unless its cgroup is still there. A child that
        has not called exec is its parent in all else.
        """
        life = self._lives.find(image.pid, image.image)
        if life is not None:
            image.parent_pid = image.parent_pid or life.parent_pid
            image.executable = life.executable
        image.name = _name_of(life) or name or f"pid {image.pid}"
        ancestor = self._ancestor(image)
        if ancestor is not None:
            image.cgroup, image.root = ancestor.cgroup, ancestor.root
            image.owner_uid = ancestor.owner_uid
            if _is_copy(image, ancestor, life):
                image.name = _name_of(life) or name or ancestor.name
                image.executable = ancestor.executable
                image.command_line = ancestor.command_line
        image.cgroup = self._likely_cgroup(image.cgroup, cgroup_id)
        self._map_late(image, life)

    def _likely_cgroup(self, inherited: str, cgroup_id: int) -> str:
        """Returns the cgroup of what is over, by its ancestor's and by the id that was told."""
        told = self._cgroup_ids.path_of(cgroup_id)
        # An engine may group by v1 alone: then by v2 its containers are with itself.
        if told not in ("", "/") and (
            identity_of(told).containers or not identity_of(inherited).containers
        ):
            return told
        return inherited

    def _ancestor(self, image: ProcessImage) -> ProcessImage | None:
        """Returns the nearest ancestor that is known, and was what it is when it made a child."""
        pid = _maker_of(image, self._lives.find(image.pid, image.image))
        for _ in range(_MAX_GENERATIONS):
            latest = self._latest.get(pid)
            if latest is not None and latest is not image and latest.image <= image.image:
                if not latest.was_read:
                    self._map(latest, self._lines_shown(latest))
                return latest
            life = self._lives.find(pid, image.image)
            if life is None:
                break
            pid = life.parent_pid
        return None

    def forked_from(self, image: ProcessImage) -> Iterator[ProcessImage]:
        """Yields the images that one was forked from, one from the other, the nearest first.

        Whoever forked it may be gone, and its parent another one then. Of an image that nobody has
        told of it is its parent, which it may not have been forked from.
        """
        life = self._lives.find(image.pid, image.image)
        if life is None or not (life.is_exec or life.parent_pid):
            parent = self._latest.get(image.parent_pid)
            if parent is not None:
                yield parent
            return
        for _ in range(_MAX_GENERATIONS):
            if life.is_exec or not life.parent_pid:
                return
            maker, forked_ns = self._latest.get(life.parent_pid), life.begun_ns
            life = self._lives.find(life.parent_pid, forked_ns) or Life(0)
            until_ns = max(forked_ns, self.first_image)
            # It may have called exec since, or before that, which nobody has seen a sample of.
            if maker is not None and life.begun_ns <= maker.image <= until_ns:
                yield maker

    def read_mappings(self, image: ProcessImage) -> bool:
        """Reads the mappings again; returns whether anything new was found.

        A process that is gone, or has called exec since, has what was known and what was told. One
        that is exiting has none any more, before the kernel half hears of that.
        """
        lines = self._lines_shown(image)
        if lines:
            return self._map(image, lines)
        return self._map_as_told(image, self._lives.find(image.pid, image.image))

    def _lines_shown(self, image: ProcessImage) -> list[MapsLine]:
        """Returns what /proc shows of an image, none if it is over.

        That is asked after the read as well, so that one image never gets another's mappings.
        """
        if not self.is_current(image):
            return []
        lines = procfs.executable_mappings(self._opener, image.pid)
        return lines if self._is_shown(image) else []

    def shared_memory(self, image: ProcessImage, name: str) -> list[MapsLine]:
        """Returns memory that an image shares and whose name begins so, none if it is over."""
        if not self.is_current(image):
            return []
        lines = procfs.shared_mappings(self._opener, image.pid, name)
        return lines if self._is_shown(image) else []

    def environment(self, image: ProcessImage) -> dict[str, str]:
        """Returns the variables that an image was started with, none if it is over."""
        found = procfs.environment(self._opener, image.pid) if self.is_current(image) else {}
        return found if self._is_shown(image) else {}

    def _map_late(self, image: ProcessImage, life: Life | None) -> None:
        """Takes in what the kernel told of an image that is over, once that is asked for.

        At once where a file is to be opened for it, which may be gone then.
        """
        if self._is_enough(life):
            # Not of the image: thousands would wait for a search for cyclic garbage.
            image.lays = functools.partial(self._map_as_told, life=life)
        else:
            self._map_as_told(image, life)

    def _map_as_told(self, image: ProcessImage, life: Life | None) -> bool:
        """Takes in what the kernel told of an image that is over, and what it had from its parent.

        Returns:
            Whether any of it was new.
        """
        if image.was_read and (life is None or life.has_gap):
            return False  # what was read may be newer than what is left of what was told
        lines = [] if life is None else life.lines()
        read = {(mapping.start, mapping.end, mapping.file_offset) for mapping in image.laid}
        is_new = False
        is_told = life is not None and life.is_whole
        if not image.was_read and not is_told and (life or not self.is_current(image)):
            ancestor = self._ancestor(image)
            if ancestor is not None and _is_copy(image, ancestor, life):
                is_new = self._lay(image, ancestor.mappings)
        # What was read of a file is right where that is told of by other numbers.
        lines = [
            line
            for line in lines
            if (line.start, line.end, line.offset) not in read or self.binaries.has_open(line)
        ]
        return self._map(image, lines) or is_new

    def _map(self, image: ProcessImage, lines: Sequence[MapsLine]) -> bool:
        """Takes mappings of an image in; returns whether any of them was new."""
        found = []
        payer = image.payer
        for line in lines:
            file = self.binaries.of_mapping(image.pid, payer, line, image.root)
            binary = NO_BINARY if file is None else file.index
            found.append(Mapping(line.start, line.end, line.offset, binary))
        return self._lay(image, found)

    def _lay(self, image: ProcessImage, found: Collection[Mapping]) -> bool:
        image.was_read = image.was_read or bool(found)
        is_new = image.replace_mappings(found)
        # One that is forgotten may have mappings of files that were closed since: nobody is told.
        if is_new and image.index in self.images:
            self._changed[image.index] = image
            self._remapped[image.index] = image
            if image.makes_code:
                self.code_makers[image.index] = image
            else:
                self.code_makers.pop(image.index, None)
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
        # The next of that id is another.
        self._python_names.get(thread.image.index, {}).pop(thread.tid, None)
        self._ended_threads.append(thread)

    def known_thread(self, image: ProcessImage, tid: int) -> ThreadInfo | None:
        """Returns a thread if it was entered."""
        return self._threads.get(image.index, {}).get(tid)

    def thread(self, image: ProcessImage, tid: int) -> ThreadInfo:
        """Returns a thread, entered now with the name it has now if it was not known."""
        if image.is_joined:
            tid = 0
        threads = self._threads.setdefault(image.index, {})
        known = threads.get(tid)
        if known is None:
            name = "" if image.is_over else procfs.comm(image.pid, tid)
            if tid == image.pid and not self._is_shown(image):
                name = ""  # of the program that it became by exec
            name = _once(name) or image.name
            known = threads[tid] = ThreadInfo(self._next_thread, image, tid, name)
            known.python_name = self._python_names.get(image.index, {}).get(tid, "")
            self._next_thread += 1
            self._changed_threads[known.index] = known
        return known
