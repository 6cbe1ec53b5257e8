# SPDX-License-Identifier: Apache-2.0
"""Overlapping address ranges made disjoint, so that one binary search answers a lookup.

Symbols nest, and a JIT's map describes the same memory again and again. Both need "which range
wins here?"; the rank says it: the innermost symbol, the latest line of a map. Ranges that overlap
nothing (nearly all) never leave numpy; only clusters that do are swept in Python.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from aiflame.agent.errors import AiflameError

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


class Disjoint(NamedTuple):
    """Ranges sorted by start that do not overlap. `rows` are indexes into the ranges given."""

    starts: U64
    ends: U64
    rows: I64


class TooManyOverlaps(AiflameError):
    """More ranges overlap than were allowed."""


def flatten(starts: U64, ends: U64, ranks: I64, max_overlapping: int | None = None) -> Disjoint:
    """Cut overlapping half-open ranges into disjoint ones; where they overlap the rank decides.

    Args:
        starts: First addresses, shape (n,).
        ends: Addresses after the last, shape (n,). Empty ranges are dropped.
        ranks: The highest rank wins, shape (n,); ranks of overlapping ranges differ.
        max_overlapping: How many ranges may overlap another, None for any number: they are looked
            at one by one, at 2 us and 500 bytes each.

    Returns:
        Disjoint ranges; one range can come back in several pieces.

    Raises:
        TooManyOverlaps: More do.
    """
    kept = np.flatnonzero(ends > starts)
    order = kept[np.argsort(starts[kept], kind="stable")]
    if len(order) == 0:
        return Disjoint(starts[order], ends[order], order)
    low, high = starts[order], ends[order]
    reach = np.maximum.accumulate(high)
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = low[1:] >= reach[:-1]
    first = np.flatnonzero(opens)
    counts = np.diff(np.append(first, len(order)))
    alone = np.repeat(counts == 1, counts)
    if alone.all():
        return Disjoint(low, high, order)
    overlapping = len(alone) - int(np.count_nonzero(alone))
    if max_overlapping is not None and overlapping > max_overlapping:
        raise TooManyOverlaps(f"{overlapping} overlapping ranges")
    pieces = _sweep_clusters(low, high, ranks[order], first[counts > 1], counts[counts > 1])
    starts_out = np.concatenate([low[alone], np.array([p[0] for p in pieces], dtype=np.uint64)])
    ends_out = np.concatenate([high[alone], np.array([p[1] for p in pieces], dtype=np.uint64)])
    swept = order[np.array([p[2] for p in pieces], dtype=np.int64)]
    index_out = np.concatenate([order[alone], swept])
    final = np.argsort(starts_out, kind="stable")
    return Disjoint(starts_out[final], ends_out[final], index_out[final])


def _sweep_clusters(
    low: U64, high: U64, ranks: I64, first: I64, counts: I64
) -> list[tuple[int, int, int]]:
    pieces: list[tuple[int, int, int]] = []
    for begin, count in zip(first.tolist(), counts.tolist(), strict=True):
        span = slice(begin, begin + count)
        ranges = zip(low[span].tolist(), high[span].tolist(), ranks[span].tolist(), strict=True)
        heap: list[tuple[int, int, int]] = []
        position = 0
        for offset, (start, end, rank) in enumerate(ranges):
            position = _emit(heap, position, start, pieces)
            heapq.heappush(heap, (-rank, end, begin + offset))
        _emit(heap, position, None, pieces)
    return pieces


def _emit(
    heap: list[tuple[int, int, int]],
    position: int,
    until: int | None,
    pieces: list[tuple[int, int, int]],
) -> int:
    """Give [position, until) to the best ranges of the heap; None: until the heap is empty."""
    while heap and (until is None or position < until):
        _, end, index = heap[0]
        if end <= position:
            heapq.heappop(heap)
            continue
        stop = end if until is None else min(end, until)
        pieces.append((position, stop, index))
        position = stop
    return position if until is None else until


def find(ranges: Disjoint, addresses: U64) -> I64:
    """Which range holds each address, as an index into `ranges`; -1 where none does."""
    if len(ranges.starts) == 0 or len(addresses) == 0:
        return np.full(len(addresses), -1, dtype=np.int64)
    found = np.searchsorted(ranges.starts, addresses, side="right").astype(np.int64) - 1
    inside = (found >= 0) & (addresses < ranges.ends[np.maximum(found, 0)])
    return np.where(inside, found, -1)
