# SPDX-License-Identifier: Apache-2.0
"""What `np.unique` finds, for keys of a million rows in less time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

# How many times as many keys as rows a table of all keys may have.
_MAX_TABLE = 4

# Of a number that is not negative.
_INT64_BITS = 63


def distinct(keys: I64, limit: int) -> tuple[I64, I64]:
    """Return the distinct keys in order, and for each row the place of its key among them.

    Args:
        keys: None of them negative. They are among the largest arrays of a report: this takes them
            over.
        limit: Above all of them.
    """
    if limit <= _MAX_TABLE * len(keys):
        return _by_table(keys, limit)
    row_bits = len(keys).bit_length()
    if limit.bit_length() + row_bits > _INT64_BITS:
        found, index = np.unique(keys, return_inverse=True)
        return found, index.astype(np.int64)
    # Key and row as one number: numpy sorts those in less time than it finds out their order.
    numbers = keys
    numbers <<= row_bits
    numbers |= np.arange(len(keys))
    numbers.sort()
    rows = (numbers & ((1 << row_bits) - 1)).astype(np.uint32 if row_bits <= 32 else np.int64)
    numbers >>= row_bits
    is_first = np.ones(len(keys), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=is_first[1:])
    found = numbers[is_first]
    places = np.empty(len(keys), np.int64)
    np.cumsum(is_first, out=numbers)
    numbers -= 1
    places[rows] = numbers
    return found, places


def occurring(values: npt.NDArray[np.integer[Any]], limit: int) -> I64:
    """Return which numbers occur, in order.

    Args:
        values: None of them negative.
        limit: Above all of them; few enough for a table.
    """
    is_there = np.zeros(limit, np.bool_)
    is_there[values] = True
    return np.flatnonzero(is_there)


def _by_table(keys: I64, limit: int) -> tuple[I64, I64]:
    """Do it without sorting: most often there are no more possible keys than rows."""
    is_there = np.zeros(limit, np.bool_)
    is_there[keys] = True
    place_of = np.cumsum(is_there, dtype=np.int64) - 1
    return np.flatnonzero(is_there), place_of[keys]
