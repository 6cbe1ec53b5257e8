# SPDX-License-Identifier: Apache-2.0
"""Divides rows of counts among parties in whole numbers that add up, without favouring any.

Rounding each row for itself would give a thousand samples of one row each, with weights of 3:1, all
to the first party. So the remainder of a row is carried over to the next one: along the rows, what
a party was given stays within one of what is due to it. That is simple for two parties; more than
two are halved until one is left, each half being divided in the same way.

The rows' order decides what is close to its due besides the whole: each run of neighbours is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pools:
    """Who shares, and how much: a pool has a few parties, numbered within a family of pools.

    Attributes:
        pool: Ascending, shape (entries,).
        party: Ascending within a pool, from 0 and below 2**31, shape (entries,).
        weight: Not negative, of whatever unit in each pool, shape (entries,).
        count: How many pools there are; each has at least one entry, and a weight above 0.
    """

    pool: I64
    party: I64
    weight: F64
    count: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What every row was divided into; parts of 0 are left out. All of shape (parts,)."""

    row: I64
    party: I64
    count: I64

    def where(self, chosen: npt.NDArray[np.bool_]) -> Parts:
        """Returns the chosen parts."""
        return Parts(self.row[chosen], self.party[chosen], self.count[chosen])


@dataclass(frozen=True, slots=True)
class _Level:
    """Every range of parties of some width that has any in a pool, and its two halves.

    All of shape (ranges,). A half is a number of the next level, whose right one is the number
    after the left one where both exist.
    """

    left: I64
    right: I64
    share: F64  # of the left half: exactly 0 or 1 where the other half, or this one, has no party


def _levels(pools: Pools) -> tuple[list[_Level], int]:
    """Returns the levels from the whole down to pairs, and the width of the first one."""
    sums = np.bincount(pools.pool, pools.weight, pools.count)
    pool, low, mass = pools.pool, pools.party, pools.weight / sums[pools.pool]
    levels = []
    width = 1
    while int(low.max(initial=0)) > 0:
        width *= 2
        above = low // width * width
        # Halves of one range are neighbours, so a range begins where its pool or position differs.
        is_first = np.append(True, (np.diff(pool) != 0) | (np.diff(above) != 0))
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(low)) - 1
        is_left = low[first] == above[first]
        whole = np.add.reduceat(mass, first)
        share = np.where(is_left, np.where(first == last, 1.0, mass[first] / whole), 0.0)
        levels.append(_Level(first, last, share))
        pool, low, mass = pool[first], above[first], whole
    return levels[::-1], width


def _take_left(counts: I64, share: F64) -> I64:
    """Divides each count in two, in order, so that the sum of left parts stays within one."""
    due = counts * share
    sure = np.minimum(due.astype(np.int64), counts)
    # Where there is no right half nothing may be left to it, not even by a rounded product.
    sure = np.where(share >= 1.0, counts, sure)
    due -= sure
    remainder = np.minimum(np.maximum(due, 0.0, out=due), 1.0, out=due)
    # A half, to begin with, makes the last sum a rounded one instead of one rounded down.
    carried = (np.cumsum(remainder) + 0.5).astype(np.int64)
    sure += carried
    sure[1:] -= carried[:-1]
    given: I64 = np.minimum(sure, counts, out=sure)
    return given


def divide(counts: I64, pool: I64, family: I64, pools: Pools) -> Parts:
    """Divides counts among the parties of their pools by weight.

    Args:
        counts: Not negative, shape (rows,).
        pool: Of each row; pools of one family share the numbers of their parties.
        family: Of each row's pool, ascending and below 2**31; rows of a family are divided in
            their order.
        pools: Who shares.

    Returns:
        Parts that add up to each row's count exactly. Within a family, a party is given what is due
        to it to within the number of halvings, where the weights are the same in all its pools;
        and about that where they differ.
    """
    levels, width = _levels(pools)
    row: I64 = np.flatnonzero(counts)
    counts, place = counts[row], pool[row]
    # Rows of a family that are divided among the same parties have to follow each other.
    group = family[row] << 32
    for level in levels:
        width //= 2
        taken = _take_left(counts, level.share[place])
        left, right = np.flatnonzero(taken), np.flatnonzero(counts - taken)
        both = np.concatenate((group[left], group[right] + width))
        # Two ascending runs, which a stable sort merges.
        order = np.argsort(both, kind="stable")
        group = both[order]
        row = np.concatenate((row[left], row[right]))[order]
        place = np.concatenate((level.left[place[left]], level.right[place[right]]))[order]
        counts = np.concatenate((taken[left], (counts - taken)[right]))[order]
    return Parts(row, group & 0xFFFFFFFF, counts)
