# SPDX-License-Identifier: Apache-2.0
"""Which rows of a column a segment has already: for windows that mention tens of thousands."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.window import Rows

NUMBERS = np.dtype("<u4")

# An odd number, and a shift that brings what a product has mixed back to where the next one mixes
# (Knuth, The Art of Computer Programming 3, 6.4).
_MIX, _SHIFT = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(29)


class SeenRows:
    """Numbers rows by their contents, in the order of their coming.

    Rows are looked for by a hash, and compared: contents come from targets, who may have two of one
    hash. Of these the second is new each time that it comes, which costs room and nothing else. A
    dictionary took four times the memory, and a Python object for each row of each window.

    Args:
        dtype: Of the rows.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._rows: Rows = np.zeros(0, dtype)
        self._hashes: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)  # sorted
        self._numbers: npt.NDArray[np.uint32] = np.zeros(0, NUMBERS)  # of each hash

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, rows: Rows) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint32]]:
        """Adds the rows that are new.

        Args:
            rows: Of the dtype, shape (n,).

        Returns:
            Which are new, and the number of each, shape (n,).
        """
        hashes = _hashes(rows)
        is_new = np.ones(len(rows), bool)
        numbers: npt.NDArray[np.uint32] = np.zeros(len(rows), NUMBERS)
        if len(self._rows):
            at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            numbers = self._numbers[at]
            is_new = self._hashes[at] != hashes
            is_new[~is_new] = _differ(rows[~is_new], self._rows[numbers[~is_new]])
        new = rows[is_new]
        numbers[is_new] = np.arange(len(self._rows), len(self._rows) + len(new))
        if len(new):
            self._rows = np.concatenate([self._rows, new])
            hashes = np.concatenate([self._hashes, hashes[is_new]])
            order = np.argsort(hashes, kind="stable")
            self._hashes = hashes[order]
            self._numbers = np.concatenate([self._numbers, numbers[is_new]])[order]
        return is_new, numbers


def _bytes_of(rows: Rows) -> npt.NDArray[np.uint8]:
    """Returns rows as bytes, shape (n, itemsize)."""
    return np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), rows.dtype.itemsize)


def _differ(rows: Rows, others: Rows) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (_bytes_of(rows) != _bytes_of(others)).any(axis=1)
    return found


def _hashes(rows: Rows) -> npt.NDArray[np.uint64]:
    size = rows.dtype.itemsize
    padded = np.zeros((len(rows), -(-size // 8) * 8), np.uint8)
    padded[:, :size] = _bytes_of(rows)
    found = np.zeros(len(rows), np.uint64)
    for word in padded.view("<u8").T:
        found = (found ^ word) * _MIX
        found ^= found >> _SHIFT
    return found
