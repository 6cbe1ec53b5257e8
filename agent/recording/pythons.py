# SPDX-License-Identifier: Apache-2.0
"""The CPython interpreters of the recorded processes, and the Python frames of their samples.

The kernel half walks Python frames in a process once it has been told where its interpreter keeps
them. What it brings are addresses of code objects, which `python_facts` names while the process
lives.

Not here: how a version lays things out (`aiflame.agent.python`), and putting Python frames into
native stacks (`symbolize`).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import Programs
from aiflame.agent.losses import LossKind, blame
from aiflame.agent.model.window import OpenWindow
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.interpreters import InterpreterFinder
from aiflame.agent.processes.process_memory import ProcessMemory
from aiflame.agent.processes.python_facts import MAX_READERS, ProcessCode, PythonFacts
from aiflame.agent.processes.python_threads import ThreadPython, fetch_leaf_frames, walk_thread
from aiflame.agent.processes.table import NO_BINARY, ProcessImage, ProcessTable
from aiflame.agent.python.codes import CodeReader
from aiflame.agent.python.gil import gil_holder
from aiflame.agent.python.interpreter import LoadedInterpreter, may_hold_interpreter
from aiflame.agent.python.layouts import ABSENT, GilHolder, Layout
from aiflame.agent.python.memory import NoMemoryAccess, Pages, read_u64
from aiflame.agent.python.questions import KEY_BLOCK_OF_LIBRARY, Unsupported, interpreter_in
from aiflame.agent.python.thread_names import ThreadNameReader, thread_name_reader
from aiflame.agent.python.thread_state import find_slot
from aiflame.agent.python.threads import KEY_BLOCK, UnsupportedLibc
from aiflame.agent.python.walk import PythonFrame

# The C library that keeps pthread keys: before glibc 2.34 it was a library of its own.
_KEY_LIBRARIES = ("libc.so.6", "libpthread.so.0")

# An interpreter makes its thread key some 10 ms after its start; on a busy machine in seconds.
_STARTING_NS = 5_000_000_000
_STARTING_INTERVAL_NS = 20_000_000
# Names are read while the process lives, and many live shorter than the interval of a drain. Those
# that are young may be over soon.
_NAMING_INTERVAL_NS, _LONGEST_NAMING_INTERVAL_NS = 100_000_000, 1_000_000_000
_YOUNG_INTERVAL_NS = 20_000_000
# A process that ends misses the names of one interval at most: a tenth of its life.
_YOUNG_INTERVALS = 10
_IDLE_INTERVAL_NS = 1_000_000_000

# Stacks are taken in up to a second after they were walked.
_NEW_NS = 1_500_000_000

# Chains that wait for their names, of 3 KB each.
_MOST_UNNAMED = 1 << 10

_END_LOSSES = {
    abi.PythonEnd.TOO_DEEP: LossKind.PYTHON_TOO_DEEP,
    abi.PythonEnd.UNREADABLE: LossKind.PYTHON_UNREADABLE_STACK,
    abi.PythonEnd.BAD_POINTER: LossKind.PYTHON_BAD_POINTER,
    abi.PythonEnd.LOOP: LossKind.PYTHON_LOOP,
}


@dataclass(slots=True)
class PythonProcess:
    """An interpreter in a process image."""

    image: ProcessImage
    binary: int
    loaded: LoadedInterpreter
    code: ProcessCode
    memory: ProcessMemory
    thread_names: ThreadNameReader | None
    found_ns: int = 0  # monotonic
    told_ns: int = 0  # when the kernel half was told of it
    state_slot: int | None = None  # from the thread pointer; None until the interpreter has one


class PythonProcesses:
    """All interpreters of a recording.

    Args:
        programs: Loaded programs.
        table: Process table.
        images: ELF headers of the binaries.
        window: Where Python frames go.

    Attributes:
        by_image: Interpreters, by the index of their process image.
        losses: What could not be read.
        loss_files: Of what.
        thrift: How many times less often frames of processes are named that are not young.
    """

    def __init__(
        self, programs: Programs, table: ProcessTable, images: ElfImages, window: OpenWindow
    ) -> None:
        self._programs = programs
        self._table = table
        self._images = images
        self._finder = InterpreterFinder(table, images, self._refuse)
        self._key_blocks: dict[int, int | None] = {}  # by binary
        self._waiting: dict[int, PythonProcess] = {}  # by pid: the interpreter is starting
        self._told: set[int] = set()  # by pid: what the kernel half was told of from here
        self.by_image: dict[int, PythonProcess] = {}
        self._unnamed: dict[int, np.void] = {}  # chains that have come since
        self._named_ns = 0  # when all of them were last named
        self.thrift = 1
        # Of threads that sleep: what was read since `prepare`.
        self._pages: dict[int, Pages] = {}  # by index of the process image
        self._latest_ns = 0  # when an interpreter was last found
        self.losses: Counter[LossKind] = Counter()
        self._window = window
        self._facts = PythonFacts(window, self.losses)
        self.loss_files: dict[LossKind, set[str]] = {}

    def expect(self, fd: int, path: Path) -> None:
        """Asks about a file what will be asked once a process maps it, and is waited for then.

        Args:
            fd: Of the file.
            path: As processes will have it, without symbolic links.
        """
        facts = self._table.binaries.facts
        if may_hold_interpreter(str(path), ""):
            facts.ask(str(path), fd, interpreter_in(str(path)))
        if path.name in _KEY_LIBRARIES:
            facts.ask(str(path), fd, KEY_BLOCK_OF_LIBRARY)

    def look(self, image: ProcessImage) -> None:
        """Looks for an interpreter in a process whose mappings have just been read."""
        if image.index in self.by_image:
            return
        interpreter = self._finder.find(image)
        if interpreter is None:
            return
        parent, loaded = self._parent(image), interpreter.loaded
        if parent is not None and parent.loaded.runtime_address != loaded.runtime_address:
            parent = None  # it has called exec: address spaces are laid out at random
        found = self._process(image, interpreter.binary, loaded, parent)
        found.found_ns = self._latest_ns = time.monotonic_ns()
        self.by_image[image.index] = found
        self._waiting[image.pid] = found

    def _parent(self, image: ProcessImage) -> PythonProcess | None:
        """Returns the interpreter that a process was forked with, if it is still known."""
        makers = (self.by_image.get(maker.index) for maker in self._table.forked_from(image))
        return next((maker for maker in makers if maker is not None), None)

    def _process(
        self,
        image: ProcessImage,
        binary: int,
        loaded: LoadedInterpreter,
        parent: PythonProcess | None,
    ) -> PythonProcess:
        """Returns what reads the code objects of a process, forked from a parent or not."""
        memory = ProcessMemory(self._table.memory, image.pid)
        reader = CodeReader(memory, loaded.layout)
        readers = (reader, *(() if parent is None else parent.code.readers))
        code = ProcessCode(image.index, readers[:MAX_READERS])
        names = thread_name_reader(memory, loaded)
        return PythonProcess(image, binary, loaded, code, memory, names)

    def _process_of(self, image: ProcessImage) -> PythonProcess | None:
        """Returns the interpreter of a process in which the kernel half has walked Python frames.

        One of which it was not told is that of the process that this one was forked from.
        """
        found = self.by_image.get(image.index)
        parent = self._parent(image) if found is None else None
        if parent is not None:
            found = self._process(image, parent.binary, parent.loaded, parent)
            found.state_slot = parent.state_slot
            self.by_image[image.index] = found
        return found

    @property
    def interval_ns(self) -> int:
        """How soon to `poll` again."""
        now_ns = time.monotonic_ns()
        if any(process.found_ns > now_ns - _STARTING_NS for process in self._waiting.values()):
            return _STARTING_INTERVAL_NS
        if self._latest_ns > now_ns - self._young_ns:
            return _YOUNG_INTERVAL_NS
        return self._naming_interval_ns if self.by_image else _IDLE_INTERVAL_NS

    @property
    def _naming_interval_ns(self) -> int:
        return min(_NAMING_INTERVAL_NS * self.thrift, _LONGEST_NAMING_INTERVAL_NS)

    @property
    def _young_ns(self) -> int:
        return _YOUNG_INTERVALS * self._naming_interval_ns

    def is_starting(self, image: ProcessImage) -> bool:
        """Whether the kernel half may not have known a process's interpreter a moment ago."""
        process = self.by_image.get(image.index)
        if process is None:
            return False
        since_ns = process.found_ns if process.state_slot is None else process.told_ns
        lasts_ns = _STARTING_NS if process.state_slot is None else _NEW_NS
        return time.monotonic_ns() - since_ns < lasts_ns

    def poll(self) -> None:
        """Tells the kernel half of interpreters that have started, and reads new frames' names."""
        now_ns = time.monotonic_ns()
        # Each reading of a process is a question to another one, for one chain or for fifty.
        is_due = now_ns - self._named_ns >= self._naming_interval_ns
        if self.by_image and (is_due or self._latest_ns > now_ns - self._young_ns):
            self._collect_chains()
            self._name_chains([*self._unnamed] if is_due else self._of_young(now_ns))
        if is_due:
            self._named_ns = now_ns
        for pid, process in list(self._waiting.items()):
            if not self._table.is_current(process.image):
                del self._waiting[pid]
                continue
            try:
                slot = self._slot(process)
                if slot is None:
                    continue
            except (UnsupportedLibc, NoMemoryAccess):
                self._blame(process.binary, LossKind.PYTHON_THREADS_NOT_FOUND)
                del self._waiting[pid]
                continue
            del self._waiting[pid]
            process.state_slot, process.told_ns = slot, time.monotonic_ns()
            record = _record(process, slot)
            self._programs.pythons.update(pid.to_bytes(4, "little"), record.tobytes())
            self._told.add(pid)

    def forget(self, pid: int) -> None:
        """Takes a process out of the kernel half, if it may have been told of it after its end.

        At the end of a process the kernel half takes it out itself.
        """
        self._waiting.pop(pid, None)
        if pid in self._told:
            self._told.remove(pid)
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
        self._pages = {}
        self._facts.begin_round()
        for index, found in pointers.items():
            process = self.by_image.get(index)
            if process is None or process.state_slot is None:
                continue
            pages = self._pages[index] = Pages(process.memory)
            slots = [pointer + process.state_slot for pointer in found]
            with contextlib.suppress(NoMemoryAccess):
                pages.fetch(slots)
                states = [read_u64(pages, slot) or 0 for slot in slots]
                fetch_leaf_frames(pages, process.loaded.layout, states)

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
        pages, loaded = self._pages.get(image.index), process.loaded
        if pages is None:
            return None
        try:
            state = read_u64(pages, thread_pointer + process.state_slot)
            if not state:
                return None
            interpreter = read_u64(pages, state + loaded.layout.thread_interpreter) or 0
            holder = gil_holder(pages, loaded.layout, loaded.runtime_address, interpreter)
            found = walk_thread(pages, pages, loaded.layout, state, holder)
        except NoMemoryAccess:
            return None
        # It may be gone when windows are told of it.
        return replace(found, frames=self._facts.name(process.code, found.frames))

    def tell(self) -> None:
        """Tells windows all that was named so far: numbers of texts hold until one is closed."""
        self._facts.flush()

    def take_chains(self) -> None:
        """Empties the kernel's store of Python frames, and reads what they are called."""
        self._collect_chains()
        self._name_chains([*self._unnamed])
        self.tell()  # of what `of_thread` has named, too

    def _collect_chains(self) -> None:
        for keys, records in self._programs.python_chains.chunks(take=True):
            for key, record in zip(keys.tolist(), records, strict=True):
                if not self._window.is_kept("chains", key):
                    self._unnamed[key] = record.copy()  # a view would keep all of its chunk
            if len(self._unnamed) >= _MOST_UNNAMED:
                self._name_chains([*self._unnamed])

    def _name_chains(self, chains: Collection[int]) -> None:
        if not chains:
            return
        self._facts.begin_round()
        records = [self._unnamed.pop(chain) for chain in chains]
        self._read_codes(records)
        for chain, record in zip(chains, records, strict=True):
            self._take_chain(chain, record)
        self._facts.flush()

    def _of_young(self, now_ns: int) -> list[int]:
        """Returns the chains of young processes, which may be over before the others are due."""
        return [
            chain
            for chain, record in self._unnamed.items()
            if self._image(record).started_ns > now_ns - self._young_ns
        ]

    def _read_codes(self, records: Iterable[np.void]) -> None:
        """Reads the code objects of chains, those of each process together."""
        wanted: defaultdict[int, set[int]] = defaultdict(set)
        for record in records:
            process = self._process_of(self._image(record))
            if process is not None:
                wanted[process.image.index].update(frame.code_address for frame in _frames(record))
        for index, found in wanted.items():
            self._facts.read(self.by_image[index].code, found)

    def _image(self, record: np.void) -> ProcessImage:
        return self._table.image(int(record["tgid"]), int(record["image"]))

    def keep(self, chain: int, image: ProcessImage, python: ThreadPython) -> None:
        """Tells windows the Python frames of a stack that the host half walked, under an id."""
        self._facts.tell_chain(chain, image.index, python.frames, python.end)
        self._facts.flush()

    def _take_chain(self, chain: int, record: np.void) -> None:
        image, end = self._image(record), abi.PythonEnd(int(record["end"]))
        process = self.by_image.get(image.index)
        frames: Sequence[PythonFrame] = _frames(record)
        is_gone = end is abi.PythonEnd.UNREADABLE and not frames and self._calls_exec(image)
        if end is not abi.PythonEnd.COMPLETE and not is_gone:
            self.losses[_END_LOSSES[end]] += 1
        if process is not None:  # else they are unreadable
            frames = self._facts.name(process.code, frames)
        self._facts.tell_chain(chain, image.index, frames, end)

    def _calls_exec(self, image: ProcessImage) -> bool:
        """Whether a process of which nothing could be read was inside exec.

        There the old program's memory is gone, and no Python frame is lost. It is taken to be so
        where the process was forked a moment ago, or is another program or over by now.
        """
        is_new = time.monotonic_ns() - image.image < _NEW_NS
        return is_new or not self._table.is_current(image)

    def _refuse(self, binary: int, why: str) -> None:
        self._blame(binary, LossKind.PYTHON_UNSUPPORTED, why)

    def _slot(self, process: PythonProcess) -> int | None:
        loaded = process.loaded
        return find_slot(
            process.memory,
            loaded.layout,
            loaded.runtime_address,
            loaded.state_place,
            lambda: self._key_block(process.image),
        )

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
        blame(self.loss_files, kind, f"{path} ({what})" if what else path)


def _record(process: PythonProcess, slot: int) -> npt.NDArray[np.void]:
    """What the kernel half is told of an interpreter: struct python_process."""
    loaded, layout = process.loaded, process.loaded.layout
    record = np.zeros(1, abi.PYTHON_PROCESS_DTYPE)
    row = record[0]
    row["image"] = process.image.image
    for index, code in enumerate(loaded.all_ranges[: abi.PYTHON_EVAL_RANGES]):
        row["eval_start"][index], row["eval_bytes"][index] = code.begin, code.end - code.begin
    in_runtime = layout.gil_kind is GilHolder.RUNTIME
    row["gil"] = loaded.runtime_address + layout.gil if in_runtime else 0
    row["state_slot"] = slot % (1 << 64)  # it may lie below the thread pointer
    describe_layout(layout, row)
    return record


def describe_layout(layout: Layout, row: np.void) -> None:
    """Writes what a layout decides into a row of PYTHON_PROCESS_DTYPE."""
    for name in (
        *("thread_frame", "thread_status", "cframe_frame", "frame_code", "frame_previous"),
        *("frame_position", "frame_mark", "frame_bytes", "code_instructions", "code_tags"),
        *("code_copies", "frame_copy"),
    ):
        row[name] = max(getattr(layout, name), 0)
    row["has_cframe"] = layout.cframe_frame != ABSENT
    row["position_kind"] = layout.position.value
    row["run_end"] = layout.run_end.value
    row["gil_kind"] = layout.gil_kind.value


def _frames(chain: np.void) -> list[PythonFrame]:
    """The frames of an abi.PYTHON_CHAIN_DTYPE, leaf first."""
    depth = int(chain["depth"])
    codes, positions = chain["codes"][:depth].tolist(), chain["positions"][:depth].tolist()
    return [
        PythonFrame(code & ~abi.PYTHON_ENDS_RUN, position, bool(code & abi.PYTHON_ENDS_RUN))
        for code, position in zip(codes, positions, strict=True)
    ]
