# SPDX-License-Identifier: Apache-2.0
"""Which launches may own a sample, and which probably does, queue by queue.

A launch can own a sample only between its enqueueing and the next known end of its queue's work. A
queue runs its launches in their order, so what is known of one sample bounds those before and after
it, also of other kernels. Where several launches remain, their order decides: a stretch of time,
from an enqueueing to a known end, is dealt to its launches one after the other, to each as much as
launches of its stack and kernel cost by all such stretches together (costs.py).

Whether a queue keeps to the order of its launches is not told by every API. Samples that contradict
it tell: then its order bounds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NO_END
from aiflame.gpu.attribution.cells import Sampled
from aiflame.gpu.attribution.costs import Costs, Stretches, costs_of, stretches_at
from aiflame.gpu.attribution.launches import UNNAMED

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.void]

# Bounds that samples put on each other travel along a queue; each round takes them past one more
# change of kernels. Less than all leaves more launches possible, never fewer.
_MOST_ROUNDS = 64

# Which tell where stretches are busy.
_LEAST_SAMPLES = 50

# From one stretch to the next; what is in a stretch is nearer than what is in another.
_STRETCH = 4.0
# Of a recording: 278 hours, and more samples than any has.
_LONGEST_NS = 1e15
_MOST_SAMPLES = 1e10
# Multiples of the golden ratio's fraction are spread evenly (Knuth, The Art of Computer Programming
# 3, 6.4).
_GOLDEN = 0.6180339887498949

# Many samples of a queue that is not in order contradict the order; of one that is, a few at
# most, whose time or place was read at the edge of a launch.
_MOST_CONTRADICTIONS = 0.02


@dataclass(frozen=True, slots=True)
class Queue:
    """The launches of one queue, by their order; all of shape (launches,).

    `begin` and `end` are where each probably ran, as `Timeline.positions` counts.
    """

    name: I64
    stack: I64
    is_one_thread: bool  # else the order in which launches began need not be the queue's
    first_ns: I64
    ended_ns: I64
    begin: F64
    end: F64
    # Where launches of each name are: (name << 32 | position), ascending.
    by_name: I64

    @property
    def known_from_ns(self) -> int:
        """From when on all that runs was launched under our eyes; NO_END for never."""
        return int(self.ended_ns.min(initial=NO_END))

    def positions(self, name: I64, low: I64, high: I64) -> tuple[I64, I64]:
        """Returns the range of `by_name` that is of a name and between two positions."""
        first = np.searchsorted(self.by_name, name << 32 | low, side="left")
        end = np.searchsorted(self.by_name, name << 32 | high, side="right")
        return first.astype(np.int64), end.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Possible:
    """The launches of one queue that may own samples: ranges of its `by_name`, empty for none."""

    queue: Queue
    first: I64
    end: I64
    is_in_order: bool = True

    @property
    def is_any(self) -> Mask:
        """Whether there is one; shape (samples,)."""
        found: Mask = self.end > self.first
        return found

    def stacks(self) -> tuple[I64, Mask]:
        """Returns a stack that may own each sample, and whether it is the only one."""
        stack = self.queue.stack[self.queue.by_name & 0xFFFFFFFF]
        changes = np.cumsum(np.append(0, stack[1:] != stack[:-1])) if len(stack) else stack
        at = np.minimum(self.first, max(len(stack) - 1, 0))
        last = np.clip(self.end - 1, at, None)
        return stack[at], changes[at] == changes[last]

    def nearest(self, position: F64) -> tuple[I64, F64]:
        """Returns the most probable stack of each sample, and how far off its position is."""
        order = self.queue.by_name & 0xFFFFFFFF
        begin, end = self.queue.begin[order], self.queue.end[order]
        name = self.queue.by_name >> 32
        # Positions rise within a name alone: those of a name are put after those of the one before.
        span = float(end.max()) + _STRETCH
        shift = np.cumsum(np.append(0.0, (name[1:] != name[:-1]) * span))
        of_sample = shift[np.minimum(self.first, len(order) - 1)]
        at = np.searchsorted(begin + shift, position + of_sample, side="right") - 1
        at = np.clip(at, self.first, self.end - 1)
        after = np.clip(at + 1, self.first, self.end - 1)
        off = _distance(position, begin[at], end[at])
        off_after = _distance(position, begin[after], end[after])
        chosen = np.where(off_after < off, after, at)
        return self.queue.stack[order[chosen]], np.minimum(off, off_after)


def _distance(position: F64, begin: F64, end: F64) -> F64:
    found: F64 = np.maximum(np.maximum(begin - position, position - end), 0.0)
    return found


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Rows of launches of all queues as they were enqueued, by stretch; shape (rows,)."""

    name: I64
    stack: I64
    count: F64
    costs: Costs


@dataclass(frozen=True, slots=True)
class Timeline:
    """The launches of a process, and its stretches of time.

    A position is _STRETCH times the number of a stretch, and from 0 to 1 where in it.
    """

    queues: list[Queue]
    stretches: Stretches
    rows: LaidOut

    def positions(self, time_ns: I64) -> F64:
        """Returns where samples are, ascending by time, shape (samples,).

        In a stretch that has more samples than launches that is their rank, else their time: what
        keeps a device's processors busy with other things keeps all launches waiting alike. A part
        of one sample is added that differs between stretches, as each may have the same launches.
        In one without a known end that is a part of the longest that there is.
        """
        which = self.stretches.at(time_ns)
        count = np.bincount(which, minlength=len(self.stretches.begin_ns))
        own = np.maximum(self.stretches.samples, 1.0)
        rank = np.arange(len(time_ns)) - (np.cumsum(count) - count)[which]
        by_rank = np.minimum((rank + which * _GOLDEN % 1) / own[which], 1.0)
        after_ns = np.maximum(time_ns - self.stretches.begin_ns[which], 0.0)
        length_ns = np.maximum(self.stretches.end_ns - self.stretches.begin_ns, 1.0)[which]
        by_time = self.stretches.done(after_ns / length_ns)
        is_open = np.isnan(length_ns)
        by_rank = np.where(is_open, np.minimum((rank + 0.5) / _MOST_SAMPLES, 1.0), by_rank)
        by_time = np.where(is_open, np.minimum(after_ns / _LONGEST_NS, 1.0), by_time)
        inside = np.where(self.stretches.by_rank[which], by_rank, by_time)
        found: F64 = which * _STRETCH + inside
        return found


def timeline_of(
    launches: Rows,
    names: I64,
    measured_ns: F64,
    sampled_ns: I64,
    sampled_name: I64,
    unordered: Rows,
) -> Timeline:
    """Puts launches in order, queue by queue.

    Args:
        launches: LAUNCH_DTYPE, of one process.
        names: A number for the name of each, UNNAMED for none.
        measured_ns: How long one of each is known to take, NaN where that was not measured.
        sampled_ns: When the process's samples were taken.
        sampled_name: And of which kernels.
        unordered: LAUNCH_DTYPE, those whose order was not kept.
    """
    order = np.lexsort((launches["last_ns"], launches["first_ns"]))
    launches, names, measured_ns = launches[order], names[order], measured_ns[order]
    queues, which = np.unique(launches["queue"], return_inverse=True)
    of_queue = [np.flatnonzero(which == queue) for queue in range(len(queues))]
    ended_ns = np.array(launches["ended_ns"])
    for own in of_queue:  # what had ended by then, had all before it
        ended_ns[own] = np.minimum.accumulate(ended_ns[own][::-1])[::-1]
    first_ns = launches["first_ns"].astype(np.int64)
    stretches, sampled = _stretches(
        first_ns, ended_ns, sampled_ns, sampled_name, unordered, is_one_queue=len(queues) == 1
    )
    is_in_order = len(queues) == 1 and len(np.unique(launches["thread"])) == 1
    costs = costs_of(launches, names, stretches, sampled, measured_ns, is_in_order=is_in_order)
    begin, end = _laid_out(
        first_ns.astype(np.float64), costs.took_ns, stretches, np.sort(sampled_ns)
    )
    stack = launches["stack"].astype(np.int64)
    found = [
        Queue(
            name=names[own],
            stack=stack[own],
            is_one_thread=len(np.unique(launches["thread"][own])) == 1,
            first_ns=first_ns[own],
            ended_ns=ended_ns[own],
            begin=begin[own],
            end=end[own],
            by_name=_by_name(names[own]),
        )
        for own in of_queue
    ]
    count = launches["count"].astype(np.float64)
    rows = LaidOut(names, stack, count, costs)
    return Timeline(found, stretches, rows)


def _by_name(names: I64) -> I64:
    position = np.flatnonzero(names != UNNAMED)
    found: I64 = np.sort(names[position] << 32 | position)
    return found


def _stretches(
    first_ns: I64,
    ended_ns: I64,
    sampled_ns: I64,
    sampled_name: I64,
    unordered: Rows,
    *,
    is_one_queue: bool,
) -> tuple[Stretches, Sampled]:
    """Finds the stretches of time in which launches ran, from one enqueueing to a known end.

    And the samples that are in them.

    On one queue launches have their known end in common. Those of several queues are taken as one
    after the other too: a kernel that fills the device leaves others no room. There a stretch ends
    where all that was launched had ended.
    """
    has_end = ended_ns < NO_END
    # Launches that nobody waits for end no stretch of others.
    latest = np.maximum.accumulate(np.where(has_end, ended_ns, first_ns))
    is_new = np.ones(len(first_ns), bool)
    is_new[1:] = ended_ns[1:] != ended_ns[:-1] if is_one_queue else first_ns[1:] >= latest[:-1]
    first = np.flatnonzero(is_new)
    end_ns = latest[np.append(first[1:], len(first_ns)) - 1].astype(np.float64)
    of_launch = np.cumsum(is_new) - 1
    is_known = np.bincount(of_launch, has_end, len(first)) > 0
    begin_ns = first_ns[first].astype(np.float64)
    begin_ns[1:] = np.maximum(begin_ns[1:], np.where(is_known[:-1], end_ns[:-1], 0.0))
    end_ns = np.where(is_known, end_ns, np.nan)
    begun = np.searchsorted(np.sort(unordered["first_ns"]), end_ns, side="right")
    over = np.searchsorted(np.sort(unordered["last_ns"]), begin_ns, side="left")
    which = stretches_at(begin_ns, sampled_ns)
    part = (sampled_ns - begin_ns[which]) / np.maximum(end_ns - begin_ns, 1.0)[which]
    is_inside = ~(part > 1)  # past an end it is of a launch that is not known
    sampled = Sampled(which[is_inside], part[is_inside], sampled_name[is_inside])
    samples = np.bincount(sampled.stretch, minlength=len(first)).astype(np.float64)
    stretches = Stretches(
        of_launch=of_launch,
        begin_ns=begin_ns,
        end_ns=end_ns,
        is_whole=begun <= over,
        samples=samples,
        by_rank=samples >= np.bincount(of_launch, minlength=len(first)),
        parts=_parts(sampled.part),
    )
    return stretches, sampled


def _parts(part: F64) -> F64:
    """Returns the parts of stretches at which samples are, ascending; evenly if they are few."""
    part = part[part >= 0]
    if len(part) < _LEAST_SAMPLES:
        return np.linspace(0.0, 1.0, _LEAST_SAMPLES, dtype=np.float64)
    found: F64 = np.sort(part)
    return found


def _laid_out(
    first_ns: F64, took_ns: F64, stretches: Stretches, sampled_ns: I64
) -> tuple[F64, F64]:
    """Returns the positions at which launches probably ran: in their order, in their stretch.

    Args:
        first_ns: When each was enqueued, ascending.
        took_ns: What each took.
        stretches: That they are in.
        sampled_ns: When samples were taken, ascending.
    """
    which = stretches.of_launch
    first = np.searchsorted(which, np.arange(len(stretches.begin_ns)))
    # Each takes its part of a stretch of known length.
    total = np.cumsum(took_ns)
    before = total - took_ns
    whole = np.bincount(which, took_ns)[which]
    part_begin = (before - before[first][which]) / whole
    part_end = (total - before[first][which]) / whole
    is_open = np.isnan(stretches.end_ns)[which]
    if not is_open.any():
        return which * _STRETCH + part_begin, which * _STRETCH + part_end
    # Else one after the other, none before it is enqueued: by time, or by samples, of which one has
    # as many for what it took as in stretches of known length.
    by_rank = stretches.by_rank[which]
    rate = stretches.samples[np.unique(which[~is_open])].sum() / max(took_ns[~is_open].sum(), 1.0)
    sampled = (
        np.searchsorted(sampled_ns, first_ns)
        - np.searchsorted(sampled_ns, stretches.begin_ns)[which]
    )
    after_ns = first_ns - stretches.begin_ns[which]
    most = np.where(by_rank, _MOST_SAMPLES, _LONGEST_NS)
    after = np.maximum(np.where(by_rank, sampled, after_ns) / most, 0.0)[is_open]
    took = (np.where(by_rank, took_ns * rate, took_ns) / most)[is_open]
    begin, end = _one_after_the_other(after, took, which[is_open])
    part_begin[is_open], part_end[is_open] = np.minimum(begin, 1.0), np.minimum(end, 1.0)
    return which * _STRETCH + part_begin, which * _STRETCH + part_end


def _one_after_the_other(first: F64, took: F64, stretch: I64) -> tuple[F64, F64]:
    """Returns where launches begin and end: end[i] = max(first[i], end[i-1]) + took[i].

    In each stretch alone, whose launches follow each other.
    """
    before = np.cumsum(took) - took
    least = first - before
    # What a stretch begins with is above all that was before.
    span = float(np.ptp(least)) * 1.01
    shift = np.cumsum(np.append(0, np.diff(stretch) != 0)) * span
    begin = np.maximum.accumulate(least + shift) - shift + before
    return begin, begin + took


def possible(queue: Queue, name: I64, begin_ns: I64, end_ns: I64, *, in_order: Mask) -> Possible:
    """Finds the launches that may own samples.

    Args:
        queue: Of which they may be.
        name: Of the kernel of each sample, shape (samples,).
        begin_ns: When each was taken at the earliest.
        end_ns: And at the latest.
        in_order: Which samples are of this queue for sure, and taken at a known moment: these bound
            each other.
    """
    low = np.searchsorted(queue.ended_ns, begin_ns, side="left").astype(np.int64)
    high = np.searchsorted(queue.first_ns, end_ns, side="right").astype(np.int64) - 1
    first, end = queue.positions(name, low, high)
    if not queue.is_one_thread:
        return Possible(queue, first, end, is_in_order=False)
    chosen = np.flatnonzero(in_order & (end > first) & (begin_ns >= queue.known_from_ns))
    chosen = chosen[np.argsort(begin_ns[chosen], kind="stable")]
    most = _MOST_CONTRADICTIONS * len(chosen)
    left = chosen
    while len(left) and len(chosen) - len(left) <= most:
        bounded_first, bounded_end = _aligned(queue, name[left], low[left], high[left])
        holds = bounded_end > bounded_first
        if holds.all():
            first[left], end[left] = bounded_first, bounded_end
            return Possible(queue, first, end)
        left = left[holds]
    return Possible(queue, first, end, is_in_order=not len(chosen))


def _aligned(queue: Queue, name: I64, low: I64, high: I64) -> tuple[I64, I64]:
    """Narrows ranges of samples in the order of their times: none is before one before it."""
    for _ in range(_MOST_ROUNDS):
        first, end = queue.positions(name, low, high)
        if not len(first) or bool((end <= first).any()):
            return first, end
        position = queue.by_name & 0xFFFFFFFF
        new_low = np.maximum.accumulate(position[first])
        new_high = np.minimum.accumulate(position[end - 1][::-1])[::-1]
        if np.array_equal(new_low, low) and np.array_equal(new_high, high):
            break
        low, high = new_low, new_high
    return first, end
