# SPDX-License-Identifier: Apache-2.0
"""Rows of structured arrays are the same, however they are moved."""

from __future__ import annotations

import numpy as np
import pytest
from aiflame.agent.rows import join_rows, take_rows

_INNER = np.dtype([("ns", "<u8"), ("class", "u1")])
# Not aligned, and with rows in it.
_DTYPE = np.dtype([("tid", "<u4"), ("inner", _INNER, (2,)), ("is_on", "?")])


def _made(count: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    rows = np.zeros(count, _DTYPE)
    rows["tid"] = np.arange(count)
    rows["inner"]["ns"] = np.arange(2 * count).reshape(count, 2) << 40
    return rows


def test_rows_join_in_order() -> None:
    rows = _made(9)
    joined = join_rows([rows[:2], rows[2:2], rows[2:]], _DTYPE)
    assert joined.dtype == _DTYPE and np.array_equal(joined, rows)
    assert join_rows([], _DTYPE).dtype == _DTYPE and len(join_rows([], _DTYPE)) == 0
    # AND numbers do, too
    assert join_rows([np.arange(2), np.arange(1)], np.dtype(np.int64)).tolist() == [0, 1, 0]


def test_rows_are_taken_by_mask_and_by_number_as_copies() -> None:
    rows = _made(9)
    is_odd = rows["tid"] % 2 == 1
    for which in (is_odd, np.flatnonzero(is_odd)):
        taken = take_rows(rows, which)
        assert np.array_equal(taken, rows[is_odd])
        taken["tid"] = 99
    assert np.array_equal(rows, _made(9))


def test_rows_of_rows_that_do_not_follow_each_other_are_taken() -> None:
    rows = _made(9)
    for part in (rows[::3], rows["inner"][:, 1]):
        assert np.array_equal(take_rows(part, np.array([2, 0])), part[[2, 0]])


def test_other_rows_do_not_join() -> None:
    with pytest.raises(TypeError):
        join_rows([_made(1), np.zeros(1, f"V{_DTYPE.itemsize}")], _DTYPE)
