# SPDX-License-Identifier: Apache-2.0
"""Which stacks launched which kernel, how often, with how much work, second by second.

Kernels are told apart by process and linkage name, since the two sides number them differently: a
launch knows a handle, a sample knows machine code. A kernel without a name matches nothing: that
two unnamed things are left over does not make them the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NONE, GpuProfile, Operation

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_NS_PER_S = 1_000_000_000
# Of a row of runs: three times what an agent's longest window has. What lasts longer is damaged.
_MOST_SECONDS = 60

# Of a kernel that has no name.
UNNAMED = -1


def name_ids(gpu: GpuProfile) -> I64:
    """Returns a number for each kernel's (process, name), or UNNAMED; shape (kernels,)."""
    known: dict[tuple[int, str], int] = {}
    ids = [
        known.setdefault((kernel.process, kernel.name), len(known)) if kernel.name else UNNAMED
        for kernel in gpu.kernels
    ]
    return np.array(ids, np.int64)


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of named kernels summed by (name, interval, stack), in that order.

    All of shape (rows,); `name` as `name_ids` has it.
    """

    name: I64
    interval: I64
    stack: I64
    count: F64
    work: F64  # NaN where some of these calls did not say it

    def __len__(self) -> int:
        return len(self.name)

    def where(self, chosen: Mask | I64) -> Launches:
        """Returns the chosen rows."""
        return Launches(
            self.name[chosen],
            self.interval[chosen],
            self.stack[chosen],
            self.count[chosen],
            self.work[chosen],
        )


def starts_of_runs(*columns: I64) -> Mask:
    """Returns where a row differs from the one before it in any column; the first row does."""
    differs = np.ones(len(columns[0]), bool)
    differs[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return differs


def order_by(first: I64, second: I64, third: I64) -> tuple[I64, Mask]:
    """Orders rows by three columns of numbers below 2**32, the first one below 2**31.

    A sort of single whole numbers is many times faster than one of several columns.

    Returns:
        The order, in which rows that are alike come in any; and where a row, so ordered, differs
        from the one before it.
    """
    above = (first << 32) | second
    order = np.argsort(above)
    rank = np.cumsum(starts_of_runs(above[order]))
    whole = (rank << 32) | third[order]
    finer = np.argsort(whole)
    return order[finer], starts_of_runs(whole[finer])


def launches_of(gpu: GpuProfile) -> Launches:
    """Sums a profile's launches; those of unnamed kernels are left out."""
    operations = np.array([function.operation for function in gpu.functions], np.int64)
    is_launch = (gpu.calls["kernel"] != NONE) & (gpu.calls["count"] > 0)
    is_launch[is_launch] = operations[gpu.calls["function"][is_launch]] == Operation.LAUNCH
    calls = gpu.calls[is_launch]
    name = name_ids(gpu)[calls["kernel"]]
    calls, name = calls[name != UNNAMED], name[name != UNNAMED]

    interval, stack = calls["interval"].astype(np.int64), calls["stack"].astype(np.int64)
    order, is_first = order_by(name, interval, stack)
    name, interval, stack, calls = name[order], interval[order], stack[order], calls[order]
    starts = np.flatnonzero(is_first)
    # Whole numbers are summed first: the sum of floats depends on the order of rows.
    count = np.add.reduceat(calls["count"], starts) if len(calls) else calls["count"]
    work = np.add.reduceat(calls["work"], starts) if len(calls) else calls["work"]
    least = np.minimum.reduceat(calls["work"], starts) if len(calls) else calls["work"]
    return Launches(
        name[starts],
        interval[starts],
        stack[starts],
        count.astype(np.float64),
        np.where(least > 0, work.astype(np.float64), np.nan),
    )


def launches_that_ran(gpu: GpuProfile) -> Launches:
    """Returns `launches_of`, but of kernels whose runs are known by launch, these runs instead.

    A launch of a graph runs kernels that the call does not name, and one that is captured runs
    nothing. A run counts for the second in which it ended; of those that are one row, where their
    ends are spread evenly.
    """
    called = launches_of(gpu)
    names = name_ids(gpu)
    times = gpu.times[(gpu.times["stack"] != NONE) & (gpu.times["count"] > 0)]
    name = names[times["kernel"]]
    times, name = times[name != UNNAMED], name[name != UNNAMED]
    if not len(times):
        return called
    row, interval, count = _by_second(times)
    name, stack = name[row], times["stack"][row].astype(np.int64)
    order, is_first = order_by(name, interval, stack)
    starts = np.flatnonzero(is_first)
    count = np.add.reduceat(count[order], starts).astype(np.float64)
    first, called = order[starts], called.where(~np.isin(called.name, name))
    whole = Launches(
        np.concatenate((called.name, name[first])),
        np.concatenate((called.interval, interval[first])),
        np.concatenate((called.stack, stack[first])),
        np.concatenate((called.count, count)),
        np.concatenate((called.work, np.full(len(first), np.nan))),
    )
    return whole.where(np.argsort(whole.name, kind="stable"))


def stacks_by_name(launches: Launches, names: int) -> tuple[I64, I64]:
    """Returns how many stacks launched each name, and one of them; shape (names,) each."""
    order = np.argsort((launches.name << 32) | launches.stack)
    name, stack = launches.name[order], launches.stack[order]
    first = starts_of_runs(name, stack)
    one = np.full(names, NONE, np.int64)
    one[name[first]] = stack[first]
    return np.bincount(name[first], minlength=names), one


def _by_second(times: npt.NDArray[np.void]) -> tuple[I64, I64, I64]:
    """Divides the runs of rows among the seconds that these last for.

    Returns:
        The row, the second and the number of runs of each part that has some.
    """
    begin_ns, end_ns = times["begin_ns"].astype(np.int64), times["end_ns"].astype(np.int64)
    last = end_ns // _NS_PER_S
    seconds = last - begin_ns // _NS_PER_S + 1
    seconds[(seconds < 1) | (seconds > _MOST_SECONDS)] = 1
    row = np.repeat(np.arange(len(times)), seconds)
    left = np.cumsum(seconds)[row] - 1 - np.arange(len(row))
    second = last[row] - left
    length_ns = np.maximum(end_ns - begin_ns, 1)[row]
    part = np.where(left, ((second + 1) * _NS_PER_S - begin_ns[row]) / length_ns, 1.0)
    until = (times["count"][row] * part).astype(np.int64)
    count = np.diff(until, prepend=0)
    is_first = starts_of_runs(row)
    count[is_first] = until[is_first]
    has_some = count > 0
    return row[has_some], second[has_some], count[has_some]
