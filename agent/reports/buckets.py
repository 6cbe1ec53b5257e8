# SPDX-License-Identifier: Apache-2.0
"""Time in buckets: how the page knows when the time of its rows was.

A bucket is a second. Of recordings longer than an hour it is longer, and so it is where a recording
has so much in it that telling seconds apart would make the page too large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# Spans (SPAN_DTYPE), and the owner of each sample that they are of.
Part = tuple[npt.NDArray[np.void], I64]

# A strip on a wide screen has some 2,000 pixels, and an hour is to be seen by the second.
MAX_BUCKETS = 3_600

# What telling buckets apart may add to a page's rows: each is 5 to 7 bytes of the file, 14 MB in
# all, and 20 bytes of the browser's memory.
MAX_SPLITS = 2_000_000

# A part of the owners with about as many spans tells how many pieces all of them make.
_PROBED_SPANS = 250_000

# Lengths that a reader knows; past an hour, hours.
_WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600)


@dataclass(frozen=True, slots=True)
class Grid:
    """Buckets of equal length, in seconds since the start of the recording."""

    start_s: int
    width_s: int
    buckets: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """Weights by owner and time, none twice: `weight` in each of `length` buckets from `first` on.

    In the order of (owner, first, length). All columns have the same shape.
    """

    owner: I64
    first: I32
    length: I32
    weight: U64


def choose_grid(
    start_s: int, end_s: int, parts: Sequence[Part], least_s: int = 1
) -> tuple[Grid, list[Pieces]] | None:
    """Return the finest grid that a page can have, and the pieces of each part in it.

    Args:
        start_s: The first second of what is shown.
        end_s: The one after the last.
        parts: What has weights.
        least_s: Buckets are of this length, or of a multiple of it.

    Returns:
        None where nothing has, or for less than two buckets: there is nothing to choose from.
    """
    if not any(len(spans) for spans, _ in parts):
        return None
    seconds = end_s - start_s
    stride = 1 + sum(len(spans) for spans, _ in parts) // _PROBED_SPANS
    probes = [_some(part, stride) for part in parts]
    for width_s in _widths(least_s):
        grid = Grid(start_s, width_s, -(-seconds // width_s))
        if grid.buckets > MAX_BUCKETS:
            continue
        if grid.buckets < 2:
            break
        if stride > 1 and _splits([_pieces(probe, grid) for probe in probes]) * stride > MAX_SPLITS:
            continue
        pieces = [_pieces(part, grid) for part in parts]
        # What was probed need not be quite like the rest.
        if _splits(pieces) <= (MAX_SPLITS if stride == 1 else 2 * MAX_SPLITS):
            return grid, pieces
    return None


def _some(part: Part, stride: int) -> Part:
    """Return what belongs to one in `stride` owners."""
    spans, owner = part
    return spans[owner[spans["sample"]] % stride == 0], owner


def _splits(pieces: Sequence[Pieces]) -> int:
    """Return by how many the pieces outnumber their owners."""
    return sum(len(one.owner) - np.count_nonzero(np.diff(one.owner, prepend=-1)) for one in pieces)


def _widths(least_s: int) -> Iterator[int]:
    if least_s == 1:
        yield from _WIDTHS_S
        least_s = 2 * _WIDTHS_S[-1]
    yield from (least_s * 2**power for power in count())


def width_of(seconds: int, least_s: int, most: int) -> int:
    """Return the least length of a bucket that a reader knows, in seconds.

    Args:
        seconds: All of the time.
        least_s: It is a multiple of this: what comes this often is then in each bucket alike.
        most: Buckets there may be.
    """
    known = (width for width in _WIDTHS_S if not width % least_s and width * most >= seconds)
    return next(known, least_s * max(1, -(-seconds // (least_s * most))))


def _pieces(part: Part, grid: Grid) -> Pieces:
    spans, owner = part[0], part[1][part[0]["sample"]]
    width = grid.width_s
    first_s = spans["first_s"].astype(np.int64) - grid.start_s
    if width == 1:
        return _added_up(owner, first_s, spans["seconds"], spans["ns"], grid)
    last_s = first_s + spans["seconds"] - 1
    first, last = first_s // width, last_s // width
    is_one = first == last
    long = np.flatnonzero(~is_one)
    # What goes on for several buckets has a part of the first, whole ones, and a part of the last.
    head_s = np.where(is_one, last_s + 1, (first + 1) * width) - first_s
    middle = long[last[long] - first[long] > 1]
    columns = (
        (owner, first, np.ones_like(first), head_s, spans["ns"]),
        (
            owner[middle],
            first[middle] + 1,
            last[middle] - first[middle] - 1,
            np.full_like(middle, width),
            spans["ns"][middle],
        ),
        (
            owner[long],
            last[long],
            np.ones_like(long),
            last_s[long] + 1 - last[long] * width,
            spans["ns"][long],
        ),
    )
    owner, first, length, seconds, ns = (
        np.concatenate(found) for found in zip(*columns, strict=True)
    )
    return _added_up(owner, first, length, ns * seconds.astype(np.uint64), grid)


def _added_up(
    owner: I64, first: I64, length: npt.NDArray[np.integer[Any]], weight: U64, grid: Grid
) -> Pieces:
    """Return one piece of each (owner, first, length); takes `owner` and `first` over."""
    radix = grid.buckets + 1
    keys = owner
    keys *= radix
    keys += first
    keys *= radix
    keys += length
    del owner, first
    if not weight.all():
        kept = np.flatnonzero(weight)
        keys, weight = keys[kept], weight[kept]
    order = np.argsort(keys)
    keys, weight = keys[order], weight[order]
    del order
    starts = np.flatnonzero(np.diff(keys, prepend=np.int64(-1)))
    if len(starts) < len(keys):
        keys, weight = keys[starts], np.add.reduceat(weight, starts)
    # Two of the columns are small: a page has no more than some thousand buckets.
    lengths = (keys % radix).astype(np.int32)
    keys //= radix
    buckets = (keys % radix).astype(np.int32)
    keys //= radix
    return Pieces(keys, buckets, lengths, weight)
