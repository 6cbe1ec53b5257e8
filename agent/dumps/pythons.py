# SPDX-License-Identifier: Apache-2.0
"""Python frames of a process's threads, read from outside.

A thread's state is found by its pthread_self(), which is its FS base with glibc and musl on
x86-64: that holds in any pid namespace, and while the GIL is released. Of several states of one
thread (sub-interpreters) the one with frames is shown, of several with frames the newest.

Reads of a thread that runs meanwhile may be torn; the caller knows which threads slept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from aiflame.agent.dumps.model import DumpFrame
from aiflame.agent.model.profile import FrameKind
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.interpreters import InterpreterFinder
from aiflame.agent.processes.process_memory import ProcessMemory
from aiflame.agent.processes.table import ProcessImage, ProcessTable
from aiflame.agent.python.codes import Code, CodeReader
from aiflame.agent.python.gil import gil_holder, is_held_by
from aiflame.agent.python.interpreter import LoadedInterpreter
from aiflame.agent.python.layouts import ABSENT
from aiflame.agent.python.memory import BatchMemory, NoMemoryAccess, Pages, read_u64
from aiflame.agent.python.threads import ThreadState, list_threads
from aiflame.agent.python.walk import PythonFrame, Walk, WalkEnd, leaf_frame, walk

_UNREAD = Walk((), WalkEnd.UNREADABLE)


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

    def __init__(self, interpreter: LoadedInterpreter, binary: int, memory: BatchMemory) -> None:
        self.binary = binary
        self._interpreter = interpreter
        self._memory = memory
        self._pages = Pages(memory)
        self._codes = CodeReader(memory, interpreter.layout)
        self._named: dict[int, Code | None] = {}
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

    def prepare(self, thread_pointers: Iterable[int]) -> None:
        """Reads where the walks of threads begin; what they read is of this moment or later."""
        layout, pages = self._interpreter.layout, self._pages
        states = (self._states.get(pointer) for pointer in thread_pointers)
        addresses = [state.address + layout.thread_frame for state in states if state is not None]
        steps = [0] if layout.cframe_frame == ABSENT else [layout.cframe_frame, 0]
        pages.forget()
        with contextlib.suppress(NoMemoryAccess):
            for offset in steps:
                pages.fetch(addresses)
                addresses = [(read_u64(pages, address) or 0) + offset for address in addresses]
            pages.fetch(addresses)

    def read(self, thread_pointer: int) -> PythonStack | None:
        """Walks a thread by its FS base; None for a thread without a thread state."""
        state = self._states.get(thread_pointer)
        if state is None:
            return None
        layout, holder = self._interpreter.layout, self._holders.get(state.interpreter)
        holds: bool | None = None
        try:
            walked = walk(self._pages, layout, state.address)
            holds = is_held_by(self._memory, layout, holder, state.address)
        except NoMemoryAccess:
            walked = _UNREAD
        return PythonStack(walked, holds)

    def learn(self, stacks: Iterable[PythonStack]) -> None:
        """Reads what the frames of stacks are called; to be called before `frame`."""
        frames = (frame for stack in stacks for frame in stack.walk.frames)
        addresses = list({frame.code_address for frame in frames if frame.code_address})
        self._named = {}
        with contextlib.suppress(NoMemoryAccess):
            codes = self._codes.read_many(addresses)
            self._named = dict(zip(addresses, codes, strict=True))

    def frame(self, frame: PythonFrame) -> DumpFrame:
        """Names a frame."""
        code = self._named.get(frame.code_address)
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
    if found is None:
        return None
    return PythonProcess(found.loaded, found.binary, ProcessMemory(table.memory, tid))
