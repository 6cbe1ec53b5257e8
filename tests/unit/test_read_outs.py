# SPDX-License-Identifier: Apache-2.0
"""Times in which devices named launches, and what ran in them."""

from __future__ import annotations

import numpy as np
import pytest
from aiflame.agent.model.read_outs import NOWHERE, ReadOutSpans
from aiflame.agent.model.window import NO_TIME, Timing, rows_of
from aiflame.agent.sinks import named_read_outs
from aiflame.agent.sinks.named_read_outs import NamedReadOuts


def _columns(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, 3).T


def test_read_outs_that_follow_each_other_are_a_stretch() -> None:
    # GIVEN read-outs of two processes in any order, some of them twice
    rows = [(1, 20, 30), (0, 10, 20), (1, 50, 60), (0, 10, 20), (0, 20, 25), (1, 10, 20)]
    found = ReadOutSpans.of(*_columns(*rows))
    assert [*zip(found.process, found.begin_ns, found.end_ns, strict=True)] == [
        (0, 10, 25),
        (1, 10, 30),
        (1, 50, 60),
    ]
    # THEN what lies in one as a whole is of that
    asked = [(0, 10, 25), (0, 10, 26), (0, 9, 12), (1, 28, 30), (1, 28, 52), (2, 12, 13)]
    assert found.at(*_columns(*asked)).tolist() == [0, NOWHERE, NOWHERE, 1, NOWHERE, NOWHERE]


def test_where_there_are_none_nothing_is_in_any() -> None:
    found = ReadOutSpans.of(*_columns())
    assert found.at(*_columns((0, 1, 2))).tolist() == [NOWHERE]
    assert found.at(*_columns()).tolist() == []


def _samples(*times: tuple[int, int]) -> np.ndarray:
    return rows_of(
        "device_samples",
        *((0, 0, 0, 0, 7, int(Timing.INTERVAL), begin, end, 1) for begin, end in times),
    )


def _times(*times: tuple[int, int]) -> np.ndarray:
    return rows_of("kernel_times", *((0, 0, 0, 7, begin, end, 1, 1, 0) for begin, end in times))


def _put(told: NamedReadOuts, *times: tuple[int, int]) -> None:
    told.put(np.zeros(len(times), np.int64), _samples(*times))


def test_kernels_that_come_in_a_later_window_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    told = NamedReadOuts()
    # GIVEN a serialised window that goes on after the window that tells of it
    _put(told, (100, 110), (110, 120), (500, 500), (NO_TIME, NO_TIME))
    _put(told, (120, 130))
    (within, other, before) = told.at(np.zeros(3, np.int64), _times((101, 129), (130, 131), (9, 9)))
    assert within != NOWHERE and {other, before} == {NOWHERE}
    # WHEN others come, THEN the oldest are forgotten
    monkeypatch.setattr(named_read_outs, "_MOST_KEPT", 2)
    _put(told, (300, 310), (400, 410))
    asked = _times((101, 102), (301, 302), (401, 402))
    assert [at != NOWHERE for at in told.at(np.zeros(3, np.int64), asked)] == [False, True, True]
