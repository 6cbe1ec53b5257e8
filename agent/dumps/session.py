# SPDX-License-Identifier: Apache-2.0
"""Takes a dump: gets ready by a rehearsal, then reads all threads and names what was read.

The rehearsal builds the unwind tables that are needed, reads symbol tables and code objects: the
dump itself then takes a few milliseconds, and is of the moment that it says it is.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from aiflame.agent.allocator import without_garbage_collection
from aiflame.agent.dumps.model import Dump, ProcessDump, ThreadDump
from aiflame.agent.dumps.naming import NamedThread, ThreadNamer
from aiflame.agent.dumps.pythons import find_python
from aiflame.agent.dumps.reading import RawThread, Target, ThreadReader
from aiflame.agent.dumps.waits import causes_of, state_of, waited_ns
from aiflame.agent.errors import AiflameError, EnvironmentUnfit
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.kernel.loader import load_thread_iterator
from aiflame.agent.losses import LossKind
from aiflame.agent.processes import procfs
from aiflame.agent.processes.cached_tables import CachedTables
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.processes.thread_walk import StackWalker
from aiflame.agent.processes.threads import thread_registers
from aiflame.agent.processes.waiting_tables import WaitingTables
from aiflame.agent.python.thread_names import shown_name
from aiflame.agent.symbols.frames import Problem, clean_name
from aiflame.agent.symbols.service import SymbolService

# There is no recording that would tell images of one pid apart.
_IMAGE = 1


class DumpSession:
    """What a dump needs, held while it is taken. A context manager.

    Args:
        cache: Directory for compiled programs, unwind tables and symbols; None for none.
        service: Resolves symbols.

    Raises:
        EnvironmentUnfit: The kernel does not tell registers of threads.
    """

    def __init__(self, cache: Path | None, service: SymbolService) -> None:
        self._begun_ns = time.monotonic_ns()
        service.start()
        with contextlib.ExitStack() as parts:
            self._program_fd = load_thread_iterator(cache)
            parts.callback(os.close, self._program_fd)
            self._inspector = Inspector()
            parts.callback(self._inspector.close)
            self._inspector.start()
            self._memory = self._inspector.memory
            self._table = ProcessTable(0, lambda pid: _IMAGE, self._inspector)
            parts.callback(self._table.binaries.close)
            self._images = ElfImages(self._table.binaries)
            tables = CachedTables(self._table.binaries, self._images, cache)
            parts.callback(tables.close)
            walker = StackWalker(WaitingTables(tables), self._images)
            self._reader = ThreadReader(self._program_fd, walker, self._memory)
            self._namer = ThreadNamer(self._table, self._images, service)
            self._parts = parts.pop_all()
        self._clock_offset_ns: int | None = None

    @property
    def problems(self) -> list[Problem]:
        """What was not read of targets, or not all of it."""
        guard = self._table.binaries.guard
        bad = [Problem(LossKind.BINARY_NOT_READ, f"{p}: {why}") for p, why in guard.bad.items()]
        stuck = self._inspector.opener.loss_files[LossKind.FILES_STUCK]
        return [*bad, *(Problem(LossKind.FILES_STUCK, words) for words in sorted(stuck))]

    def __enter__(self) -> DumpSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def take(self, pids: Sequence[int]) -> Dump:
        """Takes a dump of processes.

        Raises:
            AiflameError: None of them is there any more.
            EnvironmentUnfit: The kernel does not run the iterator.
        """
        try:
            targets = [self._target(pid) for pid in pids]
            self._read(targets)
            self._named(targets)
            tid, pid = threading.get_native_id(), os.getpid()
            self._clock_offset_ns = self._reader.clock_offset_ns(tid, pid)
            with without_garbage_collection():
                ready_ns = time.monotonic_ns()
                self._read(targets)
                read_ns = time.monotonic_ns()
                processes = self._named(targets)
                named_ns = time.monotonic_ns()
        except OSError as error:
            raise EnvironmentUnfit(f"threads cannot be read: {error.strerror}") from error
        if not any(process.threads for process in processes):
            gone = ", ".join(str(pid) for pid in pids)
            raise AiflameError(f"no thread could be read: process {gone} has ended")
        return Dump(processes, ready_ns - self._begun_ns, read_ns - ready_ns, named_ns - ready_ns)

    def _target(self, pid: int) -> Target:
        target = Target(self._table.seen(pid, _IMAGE, 0, "", 0))
        alive = thread_registers(self._program_fd, [pid])
        if alive:
            target.python = find_python(
                target.image, self._table, self._images, alive[0].tid, target.notes.append
            )
        return target

    def _read(self, targets: Sequence[Target]) -> None:
        for target in targets:
            target.threads = self._reader.read(target.image, target.python)

    def _named(self, targets: Sequence[Target]) -> tuple[ProcessDump, ...]:
        named = self._namer.name(targets)
        return tuple(map(self._process, targets, named))

    def _process(self, target: Target, named: Sequence[NamedThread]) -> ProcessDump:
        image, python = target.image, target.python
        distinct = list({id(found): found for found in named}.values())
        causes = causes_of([(found.frames, found.gil) for found in distinct])
        cause_of = dict(zip(map(id, distinct), causes, strict=True))
        names = {} if python is None else python.thread_names()
        inherited = (image.name, image.executable.rpartition("/")[2])
        threads = tuple(
            self._thread(
                raw,
                found,
                shown_name(
                    raw.registers.comm.decode(errors="replace"),
                    names.get(raw.registers.tid, ""),
                    inherited,
                ),
                cause_of[id(found)],
                python is not None,
            )
            for raw, found in zip(target.threads, named, strict=True)
        )
        notes = list(target.notes)
        if not threads:
            notes.append("the process has ended")
        elif python is not None and not python.is_complete:
            notes.append("the interpreter's list of threads could not be read to its end")
        dropped = {} if python is None else python.drops
        notes += [f"Python code: {name.replace('_', ' ')} ({n})" for name, n in dropped.items()]
        if image.pid in self._memory.stuck:
            notes.append("its memory could not be read in time: frames and names are missing")
        return ProcessDump(
            image.pid,
            clean_name(procfs.comm(image.pid) or image.name),
            clean_name(image.command_line),
            "" if python is None else python.version,
            tuple(notes),
            threads,
        )

    def _thread(
        self, raw: RawThread, found: NamedThread, name: str, cause: str, has_interpreter: bool
    ) -> ThreadDump:
        registers = raw.registers
        waited = waited_ns(registers, raw.read_ns, self._clock_offset_ns)
        is_waiting = waited is not None or registers.is_asleep
        return ThreadDump(
            registers.tid,
            clean_name(name),
            state_of(registers),
            cause if is_waiting else "",
            clean_name(raw.kernel[0].name) if raw.kernel and is_waiting else "",
            waited,
            found.gil if has_interpreter else None,
            found.frames,
            found.cut,
            found.python_cut,
            raw.doubt,
        )
