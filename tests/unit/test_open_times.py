# SPDX-License-Identifier: Apache-2.0
"""Time of waits that go on: none is lost, and none is counted twice."""

from __future__ import annotations

from collections import Counter

import numpy as np
from aiflame.agent.sinks.open_times import OpenTimes, keys_of
from hypothesis import given, settings
from hypothesis import strategies as st

_LARGEST = (1 << 29) - 1, (1 << 32) - 1, 3


def _keys(*keys: tuple[int, int, int]) -> np.ndarray:
    rows, threads, kinds = zip(*keys, strict=True)
    return keys_of(np.array(rows, np.int64), np.array(threads, "<u4"), np.array(kinds, "u1"))


def test_time_is_taken_once() -> None:
    times = OpenTimes()
    times.add(_keys((1, 2, 1), (1, 2, 1), (1, 2, 2)), np.array([5, 6, 7], np.uint64))
    assert times.take(_keys((1, 2, 1), (3, 2, 1), (1, 2, 1))).tolist() == [11, 0, 0]
    assert times.take(_keys((1, 2, 1))).tolist() == [0]
    assert times.rows() == [(1, 2, 2, 7)]


def test_the_largest_numbers_come_back() -> None:
    times = OpenTimes()
    times.add(_keys((0, 0, 0), _LARGEST), np.array([1, 2], np.uint64))
    assert times.rows() == [(0, 0, 0, 1), (*_LARGEST, 2)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3), st.integers(1, 9))))
def test_they_are_as_in_a_dictionary(steps: list[tuple[bool, int, int, int]]) -> None:
    times, known = OpenTimes(), Counter[tuple[int, int, int]]()
    for is_over, row, thread, ns in steps:
        key = (row, thread, 1)
        if is_over:
            assert times.take(_keys(key)).tolist() == [known.pop(key, 0)]
        else:
            times.add(_keys(key), np.array([ns], np.uint64))
            known[key] += ns
    assert times.rows() == sorted((*key, ns) for key, ns in known.items())
