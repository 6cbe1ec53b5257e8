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


_PARTY_BITS = 31


class _Masses:
    """The weight of ranges of parties in a pool."""

    def __init__(self, pools: Pools) -> None:
        self._keys = (pools.pool << _PARTY_BITS) | pools.party
        sums = np.bincount(pools.pool, pools.weight, pools.count)
        # Of one unit: a prefix sum over pools of very different weights would lose the small ones.
        shares = pools.weight / sums[pools.pool]
        self._before = np.concatenate(([0.0], np.cumsum(shares)))

    def between(self, pool: I64, low: I64, high: I64) -> F64:
        """Returns the weight of parties `low` to `high`; exactly 0 where the pool has none."""
        before: list[F64] = [
            self._before[np.searchsorted(self._keys, (pool << _PARTY_BITS) | party)]
            for party in (low, high)
        ]
        return before[1] - before[0]


def _take_left(counts: I64, left: F64, whole: F64) -> I64:
    """Divides each count in two, in order, so that the sum of left parts stays within one."""
    shares = counts * np.divide(left, whole, out=np.zeros_like(left), where=whole > 0)
    sure = np.minimum(np.floor(shares).astype(np.int64), counts)
    # Where the right has no party nothing may be left to it, not even by a rounded product.
    sure = np.where(left >= whole, counts, sure)
    # A half, to begin with, makes the last sum a rounded one instead of one rounded down.
    carried = np.floor(np.cumsum(np.clip(shares - sure, 0.0, 1.0)) + 0.5).astype(np.int64)
    given: I64 = np.minimum(sure + np.diff(carried, prepend=0), counts)
    return given


def divide(counts: I64, pool: I64, family: I64, pools: Pools) -> Parts:
    """Divides counts among the parties of their pools by weight.

    Args:
        counts: Not negative, shape (rows,).
        pool: Of each row; pools of one family share the numbers of their parties.
        family: Of each row's pool, ascending; rows of a family are divided in their order.
        pools: Who shares.

    Returns:
        Parts that add up to each row's count exactly. Within a family, a party is given what is due
        to it to within the number of halvings, where the weights are the same in all its pools;
        and about that where they differ.
    """
    masses = _Masses(pools)
    parties = int(pools.party.max(initial=0)) + 1
    row: I64 = np.flatnonzero(counts)
    low: I64
    counts, low = counts[row], np.zeros(len(row), np.int64)
    width = 1 << (parties - 1).bit_length()
    while width > 1:
        width //= 2
        at = pool[row]
        left = masses.between(at, low, low + width)
        taken = _take_left(counts, left, masses.between(at, low, low + 2 * width))
        row = np.concatenate((row, row))
        counts = np.concatenate((taken, counts - taken))
        low = np.concatenate((low, low + width))
        # Rows of a family that are divided among the same parties have to follow each other.
        kept = np.flatnonzero(counts)
        order = kept[np.lexsort((row[kept], low[kept], family[row[kept]]))]
        row, counts, low = row[order], counts[order], low[order]
    return Parts(row, low, counts)
