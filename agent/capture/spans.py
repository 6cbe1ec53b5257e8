# SPDX-License-Identifier: Apache-2.0
"""When the time of samples was, by the second.

A capture has the time of each second's drain. Time off the CPU is counted where it ended: all of a
wait of ten seconds is in the last of them. Waits that the capture lists one by one are taken out of
there and put into the seconds that they were in. What is not listed is divided evenly over the time
of its interval, where that is not a second: on the CPU, waits shorter than the recording's
--min-wait, those that were lost as events, and time preempted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import NS_PER_S, SPAN_DTYPE, SampleClass
from aiflame.agent.model.spans import not_empty, spread_evenly

I64 = npt.NDArray[np.int64]

# Seconds are 32 bits: 136 years.
_MAX_NS = (2**32 - 1) * NS_PER_S


def spread_waits(
    spans: npt.NDArray[np.void],
    samples: npt.NDArray[np.void],
    waits: npt.NDArray[np.void],
    bounds_ns: Mapping[int, tuple[int, int]],
) -> npt.NDArray[np.void]:
    """Returns spans with the time of single waits in the seconds that they were in.

    Args:
        spans: As drained: of one second each, in the order of (sample, first_s), none twice. They
            are one of the largest parts of a profile: this takes them over.
        samples: SAMPLE_DTYPE, in the order of (stack, thread, class).
        waits: WAIT_DTYPE.
        bounds_ns: From when to when intervals were that are no second each, by their number.

    Raises:
        ValueError: A wait ends later than any recording.
    """
    if not len(waits) or not len(spans):
        return _evenly(spans, bounds_ns)
    columns = [waits[name].astype(np.float64) for name in ("start_ns", "blocked_ns", "runnable_ns")]
    if float(np.sum(columns, axis=0).max()) >= _MAX_NS:
        raise ValueError("a wait later than there can be")
    order = spans["sample"].astype(np.int64) << 32
    order |= spans["first_s"]
    threads = 1 + int(max(samples["thread"].max(initial=0), waits["thread"].max(initial=0)))
    known = _keys(samples, threads)
    known += samples["klass"]
    start_ns = waits["start_ns"].astype(np.int64)
    woken_ns = start_ns + waits["blocked_ns"].astype(np.int64)
    end_ns = woken_ns + waits["runnable_ns"].astype(np.int64)
    pieces = []
    longest_ns = max((end - begin for begin, end in bounds_ns.values()), default=NS_PER_S)
    longest_s = -(-longest_ns // NS_PER_S)
    for klass, began_ns, to_ns in (
        (SampleClass.BLOCKED, start_ns, woken_ns),
        (SampleClass.WAITING_TO_RUN, woken_ns, end_ns),
    ):
        # What is missing of one was counted with the one before, if that ended in the same window.
        wanted = _keys(waits, threads) + klass
        sample = _found(known, wanted, np.searchsorted(known, wanted))
        ended = sample << 32 | end_ns // NS_PER_S
        row = _rows_of(spans["ns"], order, ended, to_ns - began_ns, longest_s)
        missing_ns = to_ns - began_ns - spans["ns"][row].astype(np.int64)
        is_part = (missing_ns > 0) & (missing_ns < longest_s * NS_PER_S)
        from_ns = began_ns + np.where(is_part, missing_ns, 0)
        chosen = np.flatnonzero((row >= 0) & (to_ns > from_ns))
        row = row[chosen]
        # Most are short, and lie in the second that they were counted in.
        first_s, last_s = from_ns[chosen] // NS_PER_S, (to_ns[chosen] - 1) // NS_PER_S
        counted_s = spans["first_s"][row].astype(np.int64)
        is_elsewhere = (first_s != counted_s) | (last_s != counted_s)
        row, chosen = row[is_elsewhere], chosen[is_elsewhere]
        rows, which = np.unique(row, return_inverse=True)
        moved_ns = np.zeros(len(rows), np.uint64)
        np.add.at(moved_ns, which, (to_ns - from_ns)[chosen].astype(np.uint64))
        # More than was counted there: which of the waits it was is not known, so they stay.
        is_there = moved_ns <= spans["ns"][rows]
        spans["ns"][rows[is_there]] -= moved_ns[is_there]
        chosen = chosen[is_there[which]]
        pieces += _pieces(sample[chosen], from_ns[chosen], to_ns[chosen])
    spans = _evenly(not_empty(spans), bounds_ns)
    return np.concatenate([spans, *map(not_empty, pieces)])


def _evenly(
    spans: npt.NDArray[np.void], bounds_ns: Mapping[int, tuple[int, int]]
) -> npt.NDArray[np.void]:
    """Returns spans divided over the seconds that their intervals were in, by how much of each.

    What cannot be divided is in the first second.
    """
    if not bounds_ns:
        return spans
    known = np.array(sorted(bounds_ns), np.int64)
    at = np.minimum(np.searchsorted(known, spans["first_s"]), len(known) - 1)
    is_known = known[at] == spans["first_s"]
    begin_ns, end_ns = np.array([bounds_ns[one] for one in known.tolist()]).T[:, at[is_known]]
    return np.concatenate([spans[~is_known], *spread_evenly(spans[is_known], begin_ns, end_ns)])


def _keys(rows: npt.NDArray[np.void], threads: int) -> I64:
    """Returns (stack, thread, class) of rows in one number, the class being 0."""
    found: I64 = rows["stack"].astype(np.int64)
    found *= threads
    found += rows["thread"]
    found *= len(SampleClass)
    return found


def _rows_of(
    counted_ns: npt.NDArray[np.uint64], order: I64, ended: I64, ns: I64, longest_s: int
) -> I64:
    """Returns the span that each wait is counted in, -1 for none.

    That is of the second in which it ended, or of the one before if only that one has so much: a
    drain comes some milliseconds late.

    Args:
        counted_ns: Of each span.
        order: Sample and second of each span in one number, ascending.
        ended: Sample and second in which each wait ended; negative without a sample.
        ns: Of each wait.
        longest_s: How long intervals are at most.
    """
    row = np.searchsorted(order, ended, side="right") - 1
    before, counted = np.maximum(row - 1, 0), counted_ns.astype(np.int64)
    row -= (
        (row > 0)
        & (counted[row] < ns)
        & (counted[before] >= ns)
        & (order[before] >= ended - longest_s)
    )
    is_own = (row >= 0) & (order[row] >> 32 == ended >> 32)
    return np.where(is_own, row, -1)


def _found(known: I64, wanted: I64, at: npt.NDArray[np.intp]) -> I64:
    if not len(known):
        return np.full(len(wanted), -1, np.int64)
    near = np.minimum(at, len(known) - 1)
    return np.where(known[near] == wanted, near, -1).astype(np.int64)


def _pieces(sample: I64, from_ns: I64, to_ns: I64) -> list[npt.NDArray[np.void]]:
    """Returns spans of the first, the whole, and the last seconds of waits."""
    first_s, last_s = from_ns // NS_PER_S, (to_ns - 1) // NS_PER_S
    is_one = first_s == last_s
    head_ns = np.where(is_one, to_ns, (first_s + 1) * NS_PER_S) - from_ns
    has_middle = last_s - first_s > 1
    middle_s = (last_s - first_s - 1)[has_middle]
    parts = (
        (sample, first_s, np.ones_like(first_s), head_ns),
        (sample[has_middle], first_s[has_middle] + 1, middle_s, np.full_like(middle_s, NS_PER_S)),
        (sample, last_s, np.ones_like(last_s), np.where(is_one, 0, to_ns - last_s * NS_PER_S)),
    )
    made: list[npt.NDArray[np.void]] = []
    for columns in parts:
        piece = np.zeros(len(columns[0]), SPAN_DTYPE)
        for name, column in zip(("sample", "first_s", "seconds", "ns"), columns, strict=True):
            piece[name] = column
        made.append(piece)
    return made
