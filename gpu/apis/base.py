# SPDX-License-Identifier: Apache-2.0
"""How a device API is described: which functions are probed, and where their arguments are.

The descriptions are data. The kernel half interprets them (struct api_call in bpf/aiflame.h), so
that a new API is a new table and no new program. Arguments are those of the System V calling
convention for x86-64 (psABI 1.0, section 3.2.3): numbers 0 to 5 are registers, further ones lie on
the stack. Structures above 16 bytes that are passed by value lie there as well; a dim3 of three
32-bit numbers takes two arguments, x and y packed in the first.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from aiflame.agent.model.gpu import Direction, Operation


class Grid(enum.IntEnum):
    """How a launch says what it launches. Values are shared with bpf/aiflame.h."""

    NONE = 0
    DIM3 = 1  # (function, dim3 grid, dim3 block, ...): arguments 1 to 4
    NUMBERS = 2  # (function, grid x, y, z, block x, y, z, ...): arguments 1 to 6
    CONFIG = 3  # argument 0 points to six 32-bit numbers: grid x, y, z, block x, y, z
    OPENCL = 4  # arguments 2, 4, 5: dimensions, and pointers to global and local sizes (size_t)
    COUNTS = 5  # argument 2 points to three 32-bit numbers: groups in x, y, z


class WaitsFor(enum.IntEnum):
    """What has ended once a call returns. Values are shared with bpf/aiflame.h."""

    NOTHING = 0  # or what cannot be told
    QUEUE = 1  # all that was on its queue when it began
    PROCESS = 2  # all that was on any queue of the process
    EVENTS = 3  # (count, list of events, ...): the launches of these, and what was before each


@dataclass(frozen=True, slots=True)
class Argument:
    """Where a value is.

    Attributes:
        number: Of the argument, from 0.
        offset: None: the argument is the value. Else it points to a structure (or, with 0, to the
            value itself), and this is the value's offset in it, in bytes.
        size_bytes: 4 or 8.
    """

    number: int
    offset: int | None = None
    size_bytes: int = 8


@dataclass(frozen=True, slots=True)
class Call:
    """A function that is recorded with its stack.

    Attributes:
        symbol: Its name in .dynsym or .symtab.
        operation: What it does.
        kernel: Of a launch: handle or host address of the kernel.
        queue: Stream, queue or list.
        bytes: What is copied or allocated.
        grid: Of a launch.
        direction: Of a copy, where the function's name says it.
        kind: Of a copy whose direction is an argument: which, as `Api.directions` lists it.
        event: Of a launch: the argument that points to where its event will be.
        waits_for: What has ended when it returns.
        blocking: Where it is 0, the call waits for nothing after all.
        launch_id: Of a launch: its number, by which a device's samples and times name it; unique in
            a process, 0 where it has none. A call that tells it inside of a launch that does not
            tells that one's, and counts as nothing more.
    """

    symbol: str
    operation: Operation
    kernel: Argument | None = None
    queue: Argument | None = None
    bytes: Argument | None = None
    grid: Grid = Grid.NONE
    direction: Direction = Direction.UNKNOWN
    kind: Argument | None = None
    event: Argument | None = None
    waits_for: WaitsFor = WaitsFor.NOTHING
    blocking: Argument | None = None
    launch_id: Argument | None = None


class HandleFrom(enum.IntEnum):
    """Where a function that names a kernel leaves its handle. Shared with bpf/aiflame.h."""

    ARGUMENT = 0  # it is given as an argument
    POINTED = 1  # it is written to where an argument points, known at the return
    RETURNED = 2


@dataclass(frozen=True, slots=True)
class Naming:
    """A function that ties a kernel's name to its handle.

    Attributes:
        symbol: Its name.
        name: A pointer to a zero-terminated name.
        handle_from: How the handle is known.
        handle: The argument that is the handle, or that points to where it will be; None where it
            is returned.
        alias: Instead of `name`: a handle or host address whose name it shares.
    """

    symbol: str
    name: Argument | None
    handle_from: HandleFrom
    handle: Argument | None = None
    alias: Argument | None = None


@dataclass(frozen=True, slots=True)
class Bell:
    """A function that a helper calls when something is in the memory that it shares.

    For what should not wait until the memory is read again, within a second: that it is there at
    all, or that code was loaded which may be gone by then. It counts as nothing.

    Attributes:
        symbol: Its name.
        gone: Of one that is called when the process ends and nobody has taken what it shared: how
            many kernel times that had.
    """

    symbol: str
    gone: Argument | None = None


Probed = Call | Naming | Bell


@dataclass(frozen=True, slots=True)
class Api:
    """One device API.

    Attributes:
        name: As in reports: "cuda", "opencl".
        calls: What is recorded. A call inside another one of the same API is not counted again.
        namings: What tells names.
        bells: Of a helper (see `Family.probes`).
        directions: Of a copy by `Call.kind`.
        libraries: How the names of its libraries begin, for those that a program may yet load.
        skip_files: Names of files (regular expression) that hold these symbols and are not probed,
            since a loader in front of them is.
    """

    name: str
    calls: tuple[Call, ...]
    namings: tuple[Naming, ...] = ()
    bells: tuple[Bell, ...] = ()
    directions: tuple[Direction, ...] = ()
    libraries: tuple[str, ...] = ()
    skip_files: str = ""

    @property
    def probed(self) -> tuple[Probed, ...]:
        """All functions."""
        return (*self.calls, *self.namings, *self.bells)
