# SPDX-License-Identifier: Apache-2.0
"""Short ways to write the entries of an API's table. Numbers are those of arguments, from 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from aiflame.agent.model.gpu import Direction, Operation
from aiflame.gpu.apis.base import Argument, Call, Grid, HandleFrom, Naming, WaitsFor


def launch(symbol: str, kernel: int, queue: Argument | int | None, grid: Grid) -> Call:
    """Returns a launch."""
    at = Argument(queue) if isinstance(queue, int) else queue
    return Call(symbol, Operation.LAUNCH, kernel=Argument(kernel), queue=at, grid=grid)


def wait(symbol: str, queue: int | None = None, waits_for: WaitsFor = WaitsFor.NOTHING) -> Call:
    """Returns a call that waits for the device."""
    return Call(symbol, Operation.SYNCHRONIZE, queue=_argument(queue), waits_for=waits_for)


def wait_for_queue(symbol: str, queue: int) -> Call:
    """Returns a call that waits for all that is on a queue."""
    return wait(symbol, queue, WaitsFor.QUEUE)


def wait_for_all(symbol: str) -> Call:
    """Returns a call that waits for all that the process has launched.

    In a process with several devices it may wait for one of them alone, whose queues are not known.
    """
    return wait(symbol, waits_for=WaitsFor.PROCESS)


def allocate(symbol: str, bytes_at: int | None, queue: int | None = None) -> Call:
    """Returns an allocation; `bytes_at` is None where no argument says how large it is."""
    return Call(symbol, Operation.ALLOCATE, bytes=_argument(bytes_at), queue=_argument(queue))


def free(symbol: str, queue: int | None = None) -> Call:
    """Returns a call that gives memory back."""
    return Call(symbol, Operation.FREE, queue=_argument(queue))


def copy(symbol: str, direction: Direction, bytes_at: int | None, queue: int | None = None) -> Call:
    """Returns a copy whose direction its name says, or nothing does."""
    return Call(
        symbol,
        Operation.COPY,
        bytes=_argument(bytes_at),
        queue=_argument(queue),
        direction=direction,
    )


def copy_of_kind(symbol: str, kind: int, bytes_at: int | None, queue: int | None = None) -> Call:
    """Returns a copy whose direction is an argument, a C enum."""
    return Call(
        symbol,
        Operation.COPY,
        bytes=_argument(bytes_at),
        queue=_argument(queue),
        kind=Argument(kind, size_bytes=4),
    )


def named_by(symbol: str) -> Naming:
    """Returns a naming of the form (handle out, module or library, name)."""
    return Naming(symbol, Argument(2), HandleFrom.POINTED, handle=Argument(0))


def same_as(symbol: str) -> Naming:
    """Returns a naming of the form (handle out, another handle or the host function)."""
    return Naming(symbol, None, HandleFrom.POINTED, handle=Argument(0), alias=Argument(1))


def with_variants(suffix: str, *calls: Call) -> Iterable[Call]:
    """Yields calls, each followed by its twin: the same under a name with a suffix.

    CUDA and HIP have twins of functions for which the default stream is each thread's own.
    """
    for call in calls:
        yield call
        yield replace(call, symbol=call.symbol + suffix)


def _argument(number: int | None) -> Argument | None:
    return None if number is None else Argument(number)
