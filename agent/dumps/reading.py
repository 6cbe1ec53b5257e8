# SPDX-License-Identifier: Apache-2.0
"""Reads all threads of a process, each at one moment, without stopping any.

Registers are read, then kernel frames, stacks and Python frames, then the registers again: where
both readings are equal, the thread did not run in between, and all that was read is of one moment.
One that moved is read again by itself, which takes a tenth of a millisecond, or where there are
very many threads with a few others; after a few tries it is marked. One that is on a CPU is marked
at once: to try until it sleeps would show the sleeps of busy threads only.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from aiflame.agent.dumps.model import Doubt
from aiflame.agent.dumps.pythons import PythonProcess
from aiflame.agent.inspector.memory import RemoteMemory, Span
from aiflame.agent.kernel.abi import PythonEnd
from aiflame.agent.processes.kernel_frames import KernelFrame, kernel_frames
from aiflame.agent.processes.python_threads import ThreadPython
from aiflame.agent.processes.stack_memory import StackMemory
from aiflame.agent.processes.table import ProcessImage
from aiflame.agent.processes.thread_walk import StackWalker, WalkedThread
from aiflame.agent.processes.threads import ThreadRegisters, thread_registers

# Threads read between two readings of all registers: few enough for those that wake up often.
_BATCH_THREADS = 64
# Each reading tells the registers of all threads of a process, a microsecond each, whichever are
# asked for. To walk one thread's stack takes as long as that for so many.
_REGISTERS_A_WALK = 100
_MAX_TRIES = 4
# Long enough to leave the CPU.
_SHORTEST_SLEEP_S = 0.0002
_CLOCK_TRIES = 5
# Most stacks are shorter; the rest is read page by page.
_PIECE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class RawThread:
    """One thread, unnamed.

    Attributes:
        registers: And what else the kernel said.
        read_ns: When that was, monotonic.
        kernel: Functions that it sleeps in, leaf first.
        walked: Its native user half; None where it cannot be read.
        python: Its Python frames; None where it has no thread state.
        doubt: Why this may not be of one moment.
    """

    registers: ThreadRegisters
    read_ns: int
    kernel: tuple[KernelFrame, ...]
    walked: WalkedThread | None
    python: ThreadPython | None
    doubt: Doubt | None


@dataclass(slots=True)
class Target:
    """A process of a dump.

    Attributes:
        image: With its mappings.
        python: Its interpreter.
        notes: What is missing, in words.
        threads: As last read.
    """

    image: ProcessImage
    python: PythonProcess | None = None
    notes: list[str] = field(default_factory=list)
    threads: list[RawThread] = field(default_factory=list)


class ThreadReader:
    """Reads threads.

    Args:
        program_fd: The loaded iterator program.
        walker: Walks native stacks.
        memory: Of the threads' processes.
    """

    def __init__(self, program_fd: int, walker: StackWalker, memory: RemoteMemory) -> None:
        self._program_fd = program_fd
        self._walker = walker
        self._memory = memory

    def read(self, image: ProcessImage, python: PythonProcess | None) -> list[RawThread]:
        """Reads all threads of a process, in the order of their ids; none of one that is gone."""
        if python is not None:
            python.refresh()
        tids = sorted(thread.tid for thread in self._registers(image.pid, None))
        found: dict[int, RawThread] = {}
        fewest = max(1, len(tids) // _REGISTERS_A_WALK)
        wanted, at_once = tids, max(_BATCH_THREADS, fewest)
        for _ in range(_MAX_TRIES):
            for first in range(0, len(wanted), at_once):
                for thread in self._attempt(image, python, wanted[first : first + at_once]):
                    found[thread.registers.tid] = thread
            wanted = [tid for tid in tids if tid in found and found[tid].doubt is Doubt.MOVED]
            at_once = fewest
        return [found[tid] for tid in tids if tid in found]

    def _registers(self, pid: int, tids: Collection[int] | None) -> list[ThreadRegisters]:
        return thread_registers(self._program_fd, [pid], tids)

    def _attempt(
        self, image: ProcessImage, python: PythonProcess | None, tids: Sequence[int]
    ) -> list[RawThread]:
        read_ns = time.monotonic_ns()
        before = self._registers(image.pid, tids)
        if python is not None:
            python.refresh_holders()
            python.prepare(thread.thread_pointer for thread in before)
        spans = [_span(thread) for thread in before]
        pieces = [answer.data for answer in self._memory.read(spans)]
        found = [
            self._thread(thread, read_ns, image, python, StackMemory(span, piece, self._memory))
            for thread, span, piece in zip(before, spans, pieces, strict=True)
        ]
        still = set(self._registers(image.pid, tids))
        return [thread if thread.registers in still else _moved(thread) for thread in found]

    def _thread(
        self,
        registers: ThreadRegisters,
        read_ns: int,
        image: ProcessImage,
        python: PythonProcess | None,
        memory: StackMemory,
    ) -> RawThread:
        stack = None if python is None else python.read(registers.thread_pointer)
        if registers.is_on_cpu:
            stack = _read_again(python, registers.thread_pointer, stack)
            return RawThread(registers, read_ns, (), None, stack, Doubt.RUNNING)
        # One that was switched out is in the kernel, and its registers of user space are saved.
        kernel = kernel_frames(registers.pid, registers.tid)
        walked = None
        if registers.has_user_half:
            walked = self._walker.walk_thread(image, registers, memory)
        return RawThread(registers, read_ns, kernel, walked, stack, None)

    def clock_offset_ns(self, tid: int, pid: int) -> int | None:
        """Returns monotonic time less the scheduler's clock; None where that is not known.

        The scheduler noted when the calling thread got its CPU back, a moment ago: the two clocks
        run at rates that differ by less than 500 ppm (NTP), but start apart. Of a few tries the
        shortest moment counts, and none in which the thread lost its CPU again.

        Args:
            tid: The calling thread.
            pid: Its process.
        """
        found: list[tuple[int, int]] = []
        for _ in range(_CLOCK_TRIES):
            time.sleep(_SHORTEST_SLEEP_S)
            now_ns = time.monotonic_ns()
            own = self._registers(pid, [tid])
            if not own or not own[0].stopped_ns:
                return None
            found.append((time.monotonic_ns() - now_ns, now_ns - own[0].stopped_ns))
        quickest = min(took_ns for took_ns, _ in found)
        return min(offset for took_ns, offset in found if took_ns <= 2 * quickest)


def _span(thread: ThreadRegisters) -> Span:
    is_wanted = thread.has_user_half and not thread.is_on_cpu
    size = _PIECE_BYTES if is_wanted else 0
    return Span(thread.pid, thread.tid, thread.stack_pointer, size)


def _read_again(
    python: PythonProcess | None, thread_pointer: int, stack: ThreadPython | None
) -> ThreadPython | None:
    """Returns a whole Python stack of a thread that runs, which enters and leaves functions."""
    for _ in range(1, _MAX_TRIES):
        if python is None or stack is None or stack.end is PythonEnd.COMPLETE:
            break
        python.prepare([thread_pointer])
        stack = python.read(thread_pointer)
    return stack


def _moved(thread: RawThread) -> RawThread:
    doubt = thread.doubt or Doubt.MOVED
    return RawThread(
        thread.registers, thread.read_ns, thread.kernel, thread.walked, thread.python, doubt
    )
