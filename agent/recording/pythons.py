# SPDX-License-Identifier: Apache-2.0
"""The CPython interpreters of the recorded processes, and the Python frames of their samples.

The kernel half walks Python frames in a process once it has been told where its interpreter keeps
them. What it brings are addresses of code objects; their names and lines are read from the
process while it lives, once a drain for each code object, and checked against reuse of the address.

Not here: how a version lays things out (`aiflame.agent.python`), and putting Python frames into
native stacks (`splicing`).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.losses import LossKind
from aiflame.agent.model.window import COLUMNS, OpenWindow, rows_of
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.interpreters import InterpreterFinder
from aiflame.agent.processes.process_memory import ProcessMemory
from aiflame.agent.processes.table import NO_BINARY, ProcessImage, ProcessTable
from aiflame.agent.python.codes import Code, CodeReader
from aiflame.agent.python.evalcode import AddressRange
from aiflame.agent.python.gil import gil_holder, is_held_by
from aiflame.agent.python.interpreter import LoadedInterpreter
from aiflame.agent.python.layouts import ABSENT, GilHolder, Layout
from aiflame.agent.python.memory import NoMemoryAccess, Pages, read_u64
from aiflame.agent.python.questions import KEY_BLOCK_OF_LIBRARY, Unsupported
from aiflame.agent.python.threads import (
    KEY_BLOCK,
    UnsupportedLibc,
    read_tss_key,
    tss_slot_offset,
)
from aiflame.agent.python.walk import PythonFrame, WalkEnd, walk
from aiflame.agent.symbols.frames import SourceFrame, clean_name

# The C library that keeps pthread keys: before glibc 2.34 it was a library of its own.
_KEY_LIBRARIES = ("libc.so.6", "libpthread.so.0")

# An interpreter makes its thread key some 10 ms after its start; on a busy machine in seconds.
_STARTING_NS = 5_000_000_000
_STARTING_INTERVAL_NS = 20_000_000
# Names are read while the process lives, and many live shorter than the interval of a drain. Those
# that are young may be over soon.
_NAMING_INTERVAL_NS = 100_000_000
_YOUNG_NS = 1_000_000_000
_YOUNG_INTERVAL_NS = 20_000_000
_IDLE_INTERVAL_NS = 1_000_000_000

# Name and file of the code that the interpreter itself runs after a class's __init__
# (_Py_InitCleanup, v3.13.0 Python/specialize.c): no Python frame to anybody.
_CLEANUP_NAME = "__init__"

_GONE = SourceFrame("[exited before its name could be read]", "", 0, False)
_UNREADABLE = SourceFrame("[unreadable Python frame]", "", 0, False)

# What is kept between drains: chains that windows know, as many as these keep, and lines of a
# process, some MB where code is made all the time.
_KEPT_CHAINS = 1 << 15
_KEPT_LINES = 1 << 14

_END_LOSSES = {
    abi.PythonEnd.TOO_DEEP: LossKind.PYTHON_TOO_DEEP,
    abi.PythonEnd.UNREADABLE: LossKind.PYTHON_UNREADABLE_STACK,
    abi.PythonEnd.BAD_POINTER: LossKind.PYTHON_BAD_POINTER,
    abi.PythonEnd.LOOP: LossKind.PYTHON_LOOP,
}


@dataclass(frozen=True, slots=True)
class ThreadPython:
    """The Python half of a thread that is asleep.

    Attributes:
        frames: Leaf first; windows know what they are called.
        is_whole: The walk got to the outermost frame.
    """

    frames: tuple[PythonFrame, ...]
    is_whole: bool
    gil: abi.PythonGil


@dataclass(slots=True)
class PythonProcess:
    """An interpreter in a process image."""

    image: ProcessImage
    binary: int
    loaded: LoadedInterpreter
    reader: CodeReader
    memory: ProcessMemory
    has_exited: bool = False  # or may not be read any more
    found_ns: int = 0  # monotonic
    state_slot: int | None = None  # from the thread pointer; None until the interpreter has one
    # By id of the code object, which is kept with it so that no other can get it, and position.
    lines: OrderedDict[tuple[int, int], tuple[Code, SourceFrame]] = field(
        default_factory=OrderedDict
    )


class PythonProcesses:
    """All interpreters of a recording.

    Args:
        programs: Loaded programs.
        table: Process table.
        images: ELF headers of the binaries.
        window: Where Python frames go.
    """

    def __init__(
        self, programs: Programs, table: ProcessTable, images: ElfImages, window: OpenWindow
    ) -> None:
        self._window = window
        # What windows are to be told, each once.
        self._told: dict[str, dict[tuple[int, ...], None]] = {"code_objects": {}, "code_lines": {}}
        self._programs = programs
        self._table = table
        self._images = images
        self._finder = InterpreterFinder(table, images, self._refuse)
        self._key_blocks: dict[int, int | None] = {}  # by binary
        self._waiting: dict[int, PythonProcess] = {}  # by pid: the interpreter is starting
        self.by_image: dict[int, PythonProcess] = {}
        self._chains: OrderedDict[int, None] = OrderedDict()  # that windows know
        # Of threads that sleep: what was read since `prepare`.
        self._pages: dict[int, Pages] = {}  # by index of the process image
        self._checked: dict[tuple[int, int], Code | None] = {}
        self._latest_ns = 0  # when an interpreter was last found
        self.losses: Counter[LossKind] = Counter()
        self.loss_files: dict[LossKind, set[str]] = {}

    def look(self, image: ProcessImage) -> None:
        """Looks for an interpreter in a process whose mappings have just been read."""
        if image.index in self.by_image:
            return
        interpreter = self._finder.find(image)
        if interpreter is None:
            return
        memory = ProcessMemory(self._table.memory, image.pid)
        reader = CodeReader(memory, interpreter.loaded.layout)
        found = PythonProcess(image, interpreter.binary, interpreter.loaded, reader, memory)
        found.found_ns = self._latest_ns = time.monotonic_ns()
        self.by_image[image.index] = found
        self._waiting[image.pid] = found

    @property
    def interval_ns(self) -> int:
        """How soon to `poll` again."""
        now_ns = time.monotonic_ns()
        if any(process.found_ns > now_ns - _STARTING_NS for process in self._waiting.values()):
            return _STARTING_INTERVAL_NS
        if self._latest_ns > now_ns - _YOUNG_NS:
            return _YOUNG_INTERVAL_NS
        return _NAMING_INTERVAL_NS if self.by_image else _IDLE_INTERVAL_NS

    def poll(self) -> None:
        """Tells the kernel half of interpreters that have started, and reads new frames' names."""
        if self.by_image:
            self.take_chains()
        for pid, process in list(self._waiting.items()):
            if not self._table.is_current(process.image):
                del self._waiting[pid]
                continue
            try:
                key = read_tss_key(process.memory, process.loaded.tss_key_address)
                if key is None:
                    continue
                slot = tss_slot_offset(key, self._key_block(process.image))
            except (UnsupportedLibc, NoMemoryAccess):
                self._blame(process.binary, LossKind.PYTHON_THREADS_NOT_FOUND)
                del self._waiting[pid]
                continue
            del self._waiting[pid]
            process.state_slot = slot
            record = _record(process, slot)
            self._programs.pythons.update(pid.to_bytes(4, "little"), record.tobytes())

    def forget(self, pid: int) -> None:
        """Takes a process out of the kernel half."""
        self._waiting.pop(pid, None)
        self._programs.pythons.delete(pid.to_bytes(4, "little"))

    def forget_images(self, images: Collection[int]) -> None:
        """Forgets the interpreters of process images that have ended."""
        for image in images:
            self.by_image.pop(image, None)

    def forget_binaries(self, binaries: Collection[int]) -> None:
        """Forgets files that nobody maps any more."""
        self._finder.forget_binaries(binaries)
        for binary in binaries:
            self._key_blocks.pop(binary, None)

    def prepare(self, threads: Iterable[tuple[ProcessImage, int]]) -> None:
        """Reads where the walks of sleeping threads begin, those of all at once.

        What `of_thread` reads after this is of this moment or later: threads that sleep on until
        they have been walked are shown as they are.

        Args:
            threads: Process and FS base of each.
        """
        pointers: defaultdict[int, list[int]] = defaultdict(list)
        for image, thread_pointer in threads:
            pointers[image.index].append(thread_pointer)
        self._pages, self._checked = {}, {}
        for index, found in pointers.items():
            process = self.by_image.get(index)
            if process is None or process.state_slot is None:
                continue
            layout, pages = process.loaded.layout, Pages(process.memory)
            self._pages[index] = pages
            offsets = [process.state_slot, layout.thread_frame]
            if layout.cframe_frame != ABSENT:
                offsets.append(layout.cframe_frame)
            with contextlib.suppress(NoMemoryAccess):
                for offset in offsets:
                    addresses = [pointer + offset for pointer in found]
                    pages.fetch(addresses)
                    found = [read_u64(pages, address) or 0 for address in addresses]
                pages.fetch(found)

    def of_thread(self, image: ProcessImage, thread_pointer: int) -> ThreadPython | None:
        """Walks the Python frames of a thread that is asleep, None if it has none.

        To be called after `prepare`.

        Args:
            image: Its process.
            thread_pointer: Its FS base.
        """
        process = self.by_image.get(image.index)
        if process is None or process.state_slot is None:
            return None
        memory, loaded = self._pages.get(image.index), process.loaded
        if memory is None:
            return None
        try:
            state = read_u64(memory, thread_pointer + process.state_slot)
            if not state:
                return None
            walked = walk(memory, loaded.layout, state)
            interpreter = read_u64(memory, state + loaded.layout.thread_interpreter) or 0
            holder = gil_holder(memory, loaded.layout, loaded.runtime_address, interpreter)
            holds = is_held_by(memory, loaded.layout, holder, state)
        except NoMemoryAccess:
            return None
        for frame in walked.frames:
            self._tell(process, frame.code_address, frame.position, self._checked)
        gil = abi.PythonGil.UNKNOWN
        if holds is not None:
            gil = abi.PythonGil.HELD if holds else abi.PythonGil.NOT_HELD
        is_whole = walked.end is WalkEnd.COMPLETE
        return ThreadPython(walked.frames, is_whole, gil)

    def take_chains(self) -> None:
        """Empties the kernel's store of Python frames, and reads what they are called."""
        checked: dict[tuple[int, int], Code | None] = {}
        for keys, records in self._programs.python_chains.chunks(take=True):
            fresh = np.array([key not in self._chains for key in keys.tolist()], bool)
            self._read_codes(records[fresh], checked)
            for key, record in zip(keys[fresh].tolist(), records[fresh], strict=True):
                self._take_chain(key, record, checked)
        self._tell_codes()

    def _read_codes(
        self, records: npt.NDArray[np.void], checked: dict[tuple[int, int], Code | None]
    ) -> None:
        """Reads the code objects of chains, those of each process together."""
        wanted: defaultdict[int, set[int]] = defaultdict(set)
        for record in records:
            process = self._process(record)
            if process is not None:
                codes = record["frames"]["code"][: int(record["depth"])].tolist()
                wanted[process.image.index].update(codes)
        for index, found in wanted.items():
            process = self.by_image[index]
            addresses = [code for code in found if code and (index, code) not in checked]
            try:
                codes = process.reader.read_many(addresses)
            except NoMemoryAccess:
                process.has_exited = True
                continue
            checked.update(zip(((index, code) for code in addresses), codes, strict=True))

    def _process(self, record: np.void) -> PythonProcess | None:
        image = self._table.image(int(record["tgid"]), int(record["image"]))
        return self.by_image.get(image.index)

    def keep(self, chain: int, image: ProcessImage, python: ThreadPython) -> None:
        """Tells windows the Python frames of a stack that the host half walked, under an id."""
        end = abi.PythonEnd.COMPLETE if python.is_whole else abi.PythonEnd.UNREADABLE
        self._tell_chain(chain, image, python.frames, end)
        self._tell_codes()

    def _tell_chain(
        self, chain: int, image: ProcessImage, frames: Sequence[PythonFrame], end: int
    ) -> None:
        row = (chain, image.index, 0, len(frames), end)
        parts = [(frame.code_address, frame.position, frame.ends_run) for frame in frames]
        self._window.define(
            "chains", rows_of("chains", row), np.array(parts, COLUMNS["chain_frames"].dtype)
        )

    def _tell_codes(self) -> None:
        """Tells windows what was read of code objects since the last time."""
        for column, rows in self._told.items():
            if rows:
                self._window.define(column, np.array(list(rows), COLUMNS[column].dtype))
                rows.clear()

    def _take_chain(
        self, chain: int, record: np.void, checked: dict[tuple[int, int], Code | None]
    ) -> None:
        self._chains[chain] = None
        if len(self._chains) > _KEPT_CHAINS:
            self._chains.popitem(last=False)
        image = self._table.image(int(record["tgid"]), int(record["image"]))
        process = self.by_image.get(image.index)
        end = abi.PythonEnd(int(record["end"]))
        if end is not abi.PythonEnd.COMPLETE:
            self.losses[_END_LOSSES[end]] += 1
        frames = []
        for code, position, ends_run in record["frames"][: int(record["depth"])].tolist():
            frames.append(PythonFrame(code, position, bool(ends_run)))
            self._tell(process, code, position, checked)
        self._tell_chain(chain, image, frames, int(record["end"]))

    def _tell(
        self,
        process: PythonProcess | None,
        address: int,
        position: int,
        checked: dict[tuple[int, int], Code | None],
    ) -> None:
        """Tells windows what a frame is called; one that nobody tells of is unreadable."""
        if process is None or not address:
            return
        image = process.image.index
        found = self._source(process, address, position, checked)
        objects, lines = self._told["code_objects"], self._told["code_lines"]
        if found is None:
            objects[image, address, 0, 0, 0] = None
            return
        (source, first_line), text = found, self._window.text
        objects[image, address, text(source.name), text(source.file), first_line] = None
        lines[image, address, position, max(source.line, 0)] = None

    def _source(
        self,
        process: PythonProcess,
        address: int,
        position: int,
        checked: dict[tuple[int, int], Code | None],
    ) -> tuple[SourceFrame, int] | None:
        """Returns what a frame is called, and its function's first line; None for no frame."""
        key = (process.image.index, address)
        if key not in checked and not process.has_exited:
            try:
                checked[key] = process.reader.read(address)
            except NoMemoryAccess:
                process.has_exited = True
        if key not in checked:
            self.losses[LossKind.PYTHON_EXITED] += 1
            return _GONE, 0
        code = checked[key]
        if code is None:
            return _UNREADABLE, 0
        if code.name == code.filename == _CLEANUP_NAME:
            return None
        known = process.lines.get((id(code), position))
        if known is None:
            line = process.reader.line(code, position)
            source = SourceFrame(code.qualname, clean_name(code.filename), line, False)
            known = process.lines[(id(code), position)] = (code, source)
            if len(process.lines) > _KEPT_LINES:
                process.lines.popitem(last=False)
        return known[1], max(code.first_line, 0)

    def _refuse(self, binary: int, why: str) -> None:
        self._blame(binary, LossKind.PYTHON_UNSUPPORTED, why)

    def _key_block(self, image: ProcessImage) -> int:
        """Where the C library of a process keeps key data.

        Raises:
            UnsupportedLibc: It is not glibc.
        """
        for mapping in image.mappings:
            if mapping.binary == NO_BINARY:
                continue
            file = self._table.binaries.files[mapping.binary]
            if not file.path.endswith(_KEY_LIBRARIES) or self._images.of(mapping.binary) is None:
                continue
            if mapping.binary not in self._key_blocks:
                known = self._table.binaries.ask(mapping.binary, KEY_BLOCK_OF_LIBRARY)
                if isinstance(known, Unsupported):
                    raise UnsupportedLibc(known.why)
                self._key_blocks[mapping.binary] = known
            found = self._key_blocks[mapping.binary]
            if found is not None:
                return found
        return KEY_BLOCK

    def _blame(self, binary: int, kind: LossKind, what: str = "") -> None:
        self.losses[kind] += 1
        path = self._table.binaries.files[binary].path
        self.loss_files.setdefault(kind, set()).add(f"{path} ({what})" if what else path)


def _record(process: PythonProcess, slot: int) -> npt.NDArray[np.void]:
    """What the kernel half is told of an interpreter: struct python_process."""
    loaded, layout = process.loaded, process.loaded.layout
    record = np.zeros(1, abi.PYTHON_PROCESS_DTYPE)
    row = record[0]
    row["image"] = process.image.image
    ranges: list[AddressRange] = list(loaded.eval_ranges)[: abi.PYTHON_EVAL_RANGES]
    for index, code in enumerate(ranges):
        row["eval_start"][index], row["eval_bytes"][index] = code.begin, code.end - code.begin
    in_runtime = layout.gil_kind is GilHolder.RUNTIME
    row["gil"] = loaded.runtime_address + layout.gil if in_runtime else 0
    row["state_slot"] = slot
    describe_layout(layout, row)
    return record


def describe_layout(layout: Layout, row: np.void) -> None:
    """Writes what a layout decides into a row of PYTHON_PROCESS_DTYPE."""
    for name in (
        *("thread_frame", "thread_status", "cframe_frame", "frame_code", "frame_previous"),
        *("frame_position", "frame_mark", "frame_bytes", "code_instructions", "code_tags"),
    ):
        row[name] = max(getattr(layout, name), 0)
    row["has_cframe"] = layout.cframe_frame != ABSENT
    row["position_kind"] = layout.position.value
    row["run_end"] = layout.run_end.value
    row["gil_kind"] = layout.gil_kind.value
