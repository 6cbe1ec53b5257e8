# SPDX-License-Identifier: Apache-2.0
"""What a dump says: processes, their threads, and the frames of each, as plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from aiflame.agent.model.profile import FrameKind, GilState


class ThreadState(enum.Enum):
    """What a thread was doing; the values appear in the text and in JSON."""

    RUNNING = "running"
    RUNNABLE = "waiting for a CPU"
    SLEEPING = "sleeping"
    UNINTERRUPTIBLE = "sleeping uninterruptibly"
    STOPPED = "stopped"
    TRACED = "stopped by a debugger"
    FROZEN = "frozen"


class Doubt(enum.Enum):
    """Why frames may be incomplete or of different moments; the values appear likewise."""

    RUNNING = "running: frames may have moved, native frames cannot be read"
    MOVED = "it moved each time it was read: frames are of different moments"


@dataclass(frozen=True, slots=True)
class DumpFrame:
    """One frame.

    Attributes:
        kind: Of the code.
        name: Qualified for Python, demangled for native code; cleaned.
        file: Python or source file, "" where unknown.
        line: The executing line, 0 where unknown.
        module: Path of the binary, "" for Python frames and memory in no file.
        is_glue: The interpreter calling itself: shown only where all frames are.
    """

    kind: FrameKind
    name: str
    file: str
    line: int
    module: str
    is_glue: bool = False


@dataclass(frozen=True, slots=True)
class ThreadDump:
    """One thread at its moment.

    Attributes:
        tid: Kernel thread id, as this pid namespace has it.
        name: What Python calls it, else as the kernel has it; cleaned.
        state: What it did.
        cause: What kind of thing it waits for, "" where it does not or this is not known.
        wait_channel: The kernel function that it sleeps in, "" likewise.
        waited_ns: Since it was last on a CPU; None where it is on one or the kernel does not say.
        gil: What it has to do with the GIL; None in a process without an interpreter.
        frames: Leaf first.
        cut: Why the native stack has no root, "" where it has one.
        python_cut: Why Python frames are missing or of uncertain position, "" where all is well.
        doubt: Why frames may not be of one moment; None where they are.
    """

    tid: int
    name: str
    state: ThreadState
    cause: str
    wait_channel: str
    waited_ns: int | None
    gil: GilState | None
    frames: tuple[DumpFrame, ...]
    cut: str
    python_cut: str
    doubt: Doubt | None


@dataclass(frozen=True, slots=True)
class ProcessDump:
    """One process.

    Attributes:
        pid: Process id.
        name: Of its first thread, cleaned.
        command_line: Its arguments joined by spaces, cleaned.
        python: "3.11" where it runs CPython, else "".
        notes: What is missing, in words.
        threads: In the order of their ids.
    """

    pid: int
    name: str
    command_line: str
    python: str
    notes: tuple[str, ...]
    threads: tuple[ThreadDump, ...]


@dataclass(frozen=True, slots=True)
class Dump:
    """A whole dump.

    Attributes:
        processes: In the order in which they were asked for.
        start_ns: Time that getting ready took: programs, tables, names.
        read_ns: Time in which all threads were read, after that.
        total_ns: Time from the first read to the last name.
    """

    processes: tuple[ProcessDump, ...]
    start_ns: int
    read_ns: int
    total_ns: int
