# SPDX-License-Identifier: Apache-2.0
"""The stacks of one process's samples, by when they were taken."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NO_END, NONE
from aiflame.gpu.attribution.timeline import Possible, Timeline, possible

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Samples of a longer stretch of time are shared by how much of it each stack took.
_MOMENT_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class Found:
    """What was found; of shape (samples,).

    `stack` is NONE where nothing was; `is_exact`: only one stack can have launched it.
    """

    stack: I64
    is_exact: Mask


def stacks_by_time(
    timeline: Timeline,
    samples: npt.NDArray[np.void],
    name: I64,
    unordered: npt.NDArray[np.void],
) -> Found:
    """Finds the stack of each sample whose moment is known.

    Args:
        timeline: Of the process.
        samples: DEVICE_SAMPLE_DTYPE, of the process.
        name: A number for the name of the kernel of each.
        unordered: LAUNCH_DTYPE, launches of the process whose order was not kept: while there were
            such, times tell nothing.
    """
    begin_ns, end_ns = samples["begin_ns"].astype(np.int64), samples["end_ns"].astype(np.int64)
    ends = [queue.ended_ns for queue in timeline.queues]
    is_moment = (end_ns - begin_ns <= _MOMENT_NS) & ~_is_within(unordered, ends, begin_ns)
    queues = timeline.queues
    launched_on = [np.isin(name, queue.name) for queue in queues]
    is_alone = np.sum(launched_on, axis=0) == 1
    found = [
        possible(queue, name, begin_ns, end_ns, in_order=is_alone & is_on & is_moment)
        for queue, is_on in zip(queues, launched_on, strict=True)
    ]
    time_ns = (begin_ns + end_ns) // 2
    order = np.argsort(time_ns, kind="stable")
    positions = np.zeros(len(samples))
    positions[order] = timeline.positions(time_ns[order])
    nearest = _nearest(found, positions)
    is_exact = _is_exact(found, begin_ns)
    if np.isnan(timeline.stretches.end_ns).all():
        # Nothing tells how long anything takes.
        nearest[~is_exact] = NONE
    nearest[~is_moment] = NONE
    return Found(nearest, is_exact & (nearest != NONE))


def _is_within(launches: npt.NDArray[np.void], ends: list[I64], time_ns: I64) -> Mask:
    """Whether each time is between the first of some row of launches and a known end after them.

    Args:
        launches: LAUNCH_DTYPE.
        ends: Known ends, of each queue.
        time_ns: The times.
    """
    known = np.sort(np.concatenate([*ends, [NO_END]]))
    over_ns = known[np.searchsorted(known, launches["last_ns"], side="right")]
    begun = np.searchsorted(np.sort(launches["first_ns"]), time_ns, side="right")
    ended = np.searchsorted(np.sort(over_ns), time_ns, side="left")
    found: Mask = begun > ended
    return found


def _is_exact(found: list[Possible], begin_ns: I64) -> Mask:
    """Whether all launches that may own a sample are of one stack, and all such were seen."""
    only = np.full(len(begin_ns), NONE, np.int64)
    is_exact = np.ones(len(begin_ns), bool)
    for one in found:
        if not len(one.queue.by_name):
            continue
        stack, is_only = one.stacks()
        is_any = one.is_any
        is_exact &= ~is_any | (is_only & ((only == NONE) | (only == stack)))
        is_exact &= ~is_any | (one.is_in_order & (begin_ns >= one.queue.known_from_ns))
        only[is_any] = stack[is_any]
    found_all: Mask = is_exact & (only != NONE)
    return found_all


def _nearest(found: list[Possible], position: npt.NDArray[np.float64]) -> I64:
    """Returns the stack of the launch that most probably ran at each position, NONE for none."""
    best = np.full(len(position), NONE, np.int64)
    best_off = np.full(len(position), np.inf)
    for one in found:
        rows = np.flatnonzero(one.is_any)
        if not len(rows):
            continue
        some = Possible(one.queue, one.first[rows], one.end[rows])
        stack, off = some.nearest(position[rows])
        is_better = off < best_off[rows]
        best[rows[is_better]] = stack[is_better]
        best_off[rows[is_better]] = off[is_better]
    return best
