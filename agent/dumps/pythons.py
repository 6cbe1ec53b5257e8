# SPDX-License-Identifier: Apache-2.0
"""Python frames of a process's threads, read from outside.

A thread's state is found by its pthread_self(), which is its FS base with glibc and musl on
x86-64: that holds in any pid namespace, and while the GIL is released. Of several states of one
thread (sub-interpreters) the one with frames is shown, of several with frames the newest.

Reads of a thread that runs meanwhile may be torn; the caller knows which threads slept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.interpreters import InterpreterFinder
from aiflame.agent.processes.process_memory import ProcessMemory
from aiflame.agent.processes.python_facts import ProcessCode
from aiflame.agent.processes.python_thread_names import read_thread_names
from aiflame.agent.processes.python_threads import (
    UNREADABLE_THREAD,
    ThreadPython,
    fetch_leaf_frames,
    walk_thread,
)
from aiflame.agent.processes.table import ProcessImage, ProcessTable
from aiflame.agent.python.codes import CodeReader
from aiflame.agent.python.gil import gil_holder
from aiflame.agent.python.interpreter import LoadedInterpreter
from aiflame.agent.python.memory import BatchMemory, NoMemoryAccess, Pages
from aiflame.agent.python.thread_names import thread_name_reader
from aiflame.agent.python.threads import ThreadState, list_threads
from aiflame.agent.python.walk import leaf_frame


class PythonProcess:
    """The interpreter of one process.

    Args:
        image: The process.
        interpreter: With the addresses of the process.
        memory: Of the process.

    Attributes:
        code: Its code objects.
        is_complete: The list of its threads was read to the end.
    """

    def __init__(
        self, image: ProcessImage, interpreter: LoadedInterpreter, memory: BatchMemory
    ) -> None:
        self._image = image
        self._interpreter = interpreter
        self._memory = memory
        self._pages = Pages(memory)
        self._states: dict[int, ThreadState] = {}
        self._holders: dict[int, int | None] = {}
        self._names = thread_name_reader(memory, interpreter)
        self.code = ProcessCode(image.index, (CodeReader(memory, interpreter.layout),))
        self.is_complete = True

    @property
    def version(self) -> str:
        """As in "3.11"."""
        return "{}.{}".format(*self._interpreter.layout.version)

    @property
    def drops(self) -> dict[str, int]:
        """How many code objects were not read as they are, by reason (see `CodeReader`)."""
        return {reason: count for reason, count in self.code.readers[0].drops.items() if count}

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
        states = (self._states.get(pointer) for pointer in thread_pointers)
        addresses = [state.address for state in states if state is not None]
        self._pages.forget()
        fetch_leaf_frames(self._pages, self._interpreter.layout, addresses)

    def thread_names(self) -> dict[int, str]:
        """Reads what Python calls threads, by tid; none where the kernel knows as well."""
        if self._names is None:
            return {}
        try:
            return read_thread_names(self._image, self._names)
        except NoMemoryAccess:
            return {}

    def read(self, thread_pointer: int) -> ThreadPython | None:
        """Walks a thread by its FS base; None for a thread without a thread state."""
        state = self._states.get(thread_pointer)
        if state is None:
            return None
        layout, holder = self._interpreter.layout, self._holders.get(state.interpreter)
        try:
            return walk_thread(self._pages, self._memory, layout, state.address, holder)
        except NoMemoryAccess:
            return UNREADABLE_THREAD


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
    return PythonProcess(image, found.loaded, ProcessMemory(table.memory, tid))
