# SPDX-License-Identifier: Apache-2.0
"""Python frames of a process's threads, read from outside.

A thread's state is found by its pthread_self(), which is its FS base with glibc and musl on
x86-64: that holds in any pid namespace, and while the GIL is released. Of several states of one
thread (sub-interpreters) the one with frames is shown, of several with frames the newest.

Reads of a thread that runs meanwhile may be torn; the caller knows which threads slept.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple

from aiflame.agent.dumps.model import DumpFrame
from aiflame.agent.model.profile import FrameKind
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.interpreters import InterpreterFinder
from aiflame.agent.processes.table import ProcessImage, ProcessTable
from aiflame.agent.python.codes import CodeReader
from aiflame.agent.python.gil import gil_holder, is_held_by
from aiflame.agent.python.interpreter import LoadedInterpreter
from aiflame.agent.python.memory import Memory, NoMemoryAccess, ProcessMemory
from aiflame.agent.python.threads import ThreadState, list_threads
from aiflame.agent.python.walk import PythonFrame, Walk, WalkEnd, leaf_frame, walk

_PAGE_BYTES = mmap.PAGESIZE
_UNREAD = Walk((), WalkEnd.UNREADABLE)


class _Pages:
    """Memory a page at a time: from 3.11 on a thread's frames lie side by side.

    It is for one thread at one moment: pages are kept until they are `forgotten`.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._pages: dict[int, bytes | None] = {}

    def forget(self) -> None:
        """Has all be read anew."""
        self._pages.clear()

    def read(self, address: int, size: int) -> bytes | None:
        """Exactly `size` bytes from `address`, or None."""
        start = address & -_PAGE_BYTES
        if address + size > start + _PAGE_BYTES:
            return self._memory.read(address, size)
        if start not in self._pages:
            self._pages[start] = self._memory.read(start, _PAGE_BYTES)
        page = self._pages[start]
        return None if page is None else page[address - start : address - start + size]


class PythonStack(NamedTuple):
    """Python frames of one thread, and whether it holds the GIL (None: not known)."""

    walk: Walk
    holds_gil: bool | None


class PythonProcess:
    """The interpreter of one process.

    Args:
        interpreter: With the addresses of the process.
        binary: Index of the interpreter's file.
        memory: Of the process.
    """

    def __init__(self, interpreter: LoadedInterpreter, binary: int, memory: Memory) -> None:
        self.binary = binary
        self._interpreter = interpreter
        self._memory = memory
        self._pages = _Pages(memory)
        self._codes = CodeReader(memory, interpreter.layout)
        self._states: dict[int, ThreadState] = {}
        self._holders: dict[int, int | None] = {}
        self.is_complete = True

    @property
    def version(self) -> str:
        """As in "3.11"."""
        return "{}.{}".format(*self._interpreter.layout.version)

    @property
    def drops(self) -> dict[str, int]:
        """How many code objects were not read as they are, by reason (see `CodeReader`)."""
        return {reason: count for reason, count in self._codes.drops.items() if count}

    def is_eval(self, address: int) -> bool:
        """Whether an address is in the eval loop's code."""
        return self._interpreter.is_eval(address)

    def refresh(self) -> None:
        """Reads which threads there are."""
        layout, runtime = self._interpreter.layout, self._interpreter.runtime_address
        self._states.clear()
        self._pages.forget()
        try:
            listed = list_threads(self._pages, layout, runtime)
            for state in listed.threads:
                known = self._states.get(state.pthread)
                if known is None or not leaf_frame(self._pages, layout, known.address):
                    self._states[state.pthread] = state
        except NoMemoryAccess:
            self.is_complete = False
        else:
            self.is_complete = listed.complete

    def refresh_holders(self) -> None:
        """Reads who holds the GIL, within the time in which threads are shown not to have moved."""
        layout, runtime = self._interpreter.layout, self._interpreter.runtime_address
        try:
            self._holders = {
                interpreter: gil_holder(self._memory, layout, runtime, interpreter)
                for interpreter in {state.interpreter for state in self._states.values()}
            }
        except NoMemoryAccess:
            self._holders = {}

    def read(self, thread_pointer: int) -> PythonStack | None:
        """Walks a thread by its FS base; None for a thread without a thread state."""
        state = self._states.get(thread_pointer)
        if state is None:
            return None
        layout, holder = self._interpreter.layout, self._holders.get(state.interpreter)
        holds: bool | None = None
        self._pages.forget()
        try:
            walked = walk(self._pages, layout, state.address)
            holds = is_held_by(self._memory, layout, holder, state.address)
        except NoMemoryAccess:
            walked = _UNREAD
        return PythonStack(walked, holds)

    def frame(self, frame: PythonFrame) -> DumpFrame:
        """Names a frame."""
        try:
            code = self._codes.read(frame.code_address)
        except NoMemoryAccess:
            code = None
        if code is None:
            return DumpFrame(FrameKind.PYTHON, "[unreadable Python function]", "", 0, "")
        line = self._codes.line(code, frame.position)
        return DumpFrame(FrameKind.PYTHON, code.qualname, code.filename, line, "")


def find_python(
    image: ProcessImage,
    table: ProcessTable,
    images: ElfImages,
    tid: int,
    note: Callable[[str], None],
) -> PythonProcess | None:
    """Finds the interpreter of a process.

    Args:
        image: The process, with its mappings.
        table: Of which it is.
        images: Headers of its files.
        tid: A thread that is alive: a process whose first thread has ended is not read by its id.
        note: Told why there are no Python frames, where that is known.
    """
    finder = InterpreterFinder(table, images, lambda _, why: note(f"no Python frames: {why}"))
    found = finder.find(image)
    return None if found is None else PythonProcess(found.loaded, found.binary, ProcessMemory(tid))
