# SPDX-License-Identifier: Apache-2.0
"""Time of waits that go on: it is told window by window, and becomes one row when they end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# A thread's number has 32 bits (window.THREAD_DTYPE) and a kind 2; the other 29 are for a row of
# stacks, more than there is memory for.
_THREAD_BITS, _KIND_BITS = 32, 2


class OpenTimes:
    """Time by row of a stack, thread and kind, in arrays: a host has tens of thousands."""

    def __init__(self) -> None:
        self._keys: I64 = np.zeros(0, np.int64)  # sorted
        self._ns: U64 = np.zeros(0, np.uint64)

    def add(self, keys: I64, ns: U64) -> None:
        """Adds time to keys, which may come several times."""
        keys, which = np.unique(np.concatenate([self._keys, keys]), return_inverse=True)
        sums = np.zeros(len(keys), np.uint64)
        np.add.at(sums, which, np.concatenate([self._ns, ns]))
        self._keys, self._ns = keys, sums

    def take(self, keys: I64) -> U64:
        """Returns the time of keys, and forgets it: of those that come several times at the first.

        Returns:
            Nanoseconds of each, 0 where there is none.
        """
        found = np.zeros(len(keys), np.uint64)
        distinct, first = np.unique(keys, return_index=True)
        is_there = np.isin(distinct, self._keys, assume_unique=True)
        at = np.searchsorted(self._keys, distinct[is_there])
        found[first[is_there]] = self._ns[at]
        self._keys, self._ns = np.delete(self._keys, at), np.delete(self._ns, at)
        return found

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Returns (row, thread, kind, ns) of all."""
        columns = (*parts_of(self._keys), self._ns)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def clear(self) -> None:
        """Forgets all."""
        self._keys, self._ns = self._keys[:0], self._ns[:0]


def keys_of(rows: I64, threads: npt.NDArray[np.uint32], kinds: npt.NDArray[np.uint8]) -> I64:
    """Returns a key for each row, thread and kind."""
    low = threads.astype(np.int64) << _KIND_BITS | kinds
    found: I64 = rows << (_THREAD_BITS + _KIND_BITS) | low
    return found


def parts_of(keys: I64) -> tuple[I64, I64, I64]:
    """Returns the rows, threads and kinds of keys."""
    threads = keys >> _KIND_BITS & ((1 << _THREAD_BITS) - 1)
    return keys >> (_THREAD_BITS + _KIND_BITS), threads, keys & ((1 << _KIND_BITS) - 1)
