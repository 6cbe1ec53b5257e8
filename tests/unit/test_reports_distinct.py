# SPDX-License-Identifier: Apache-2.0
"""Distinct keys: as numpy finds them, however they are found."""

from __future__ import annotations

import numpy as np
from aiflame.agent.reports.distinct import distinct, occurring
from hypothesis import given
from hypothesis import strategies as st


@given(
    keys=st.lists(st.integers(0, 1 << 20), max_size=60),
    factor=st.sampled_from([1, 1 << 16, 1 << 42]),
    room=st.sampled_from([1, 1000]),
)
def test_keys_are_those_of_numpy(keys: list[int], factor: int, room: int) -> None:
    column = np.array(keys, np.int64) % 50 * factor  # small, large, and too large to be packed
    found, places = distinct(column.copy(), int(column.max(initial=0)) + room)
    expected, expected_places = np.unique(column, return_inverse=True)
    assert found.tolist() == expected.tolist()
    assert places.tolist() == expected_places.tolist()
    small = column % 50
    assert occurring(small, 50).tolist() == sorted({*small.tolist()})
