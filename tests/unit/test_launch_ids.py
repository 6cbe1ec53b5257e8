# SPDX-License-Identifier: Apache-2.0
"""Stacks of launches that devices name by numbers, and what a number tells that is given twice."""

from __future__ import annotations

import numpy as np
import pytest
from aiflame.agent.model.window import NO_STACK, Window, join_runs, rows_of
from aiflame.agent.sinks import launch_ids
from aiflame.agent.sinks.launch_ids import LaunchIds
from aiflame.agent.sinks.launch_order import LaunchOrder


def _launch(launch_id: int, stack: int, process: int = 0, count: int = 1) -> tuple[int, ...]:
    return (process, 0, 9, stack, 0, 0, launch_id, 100, 100, count, 64)


def _window(*launches: tuple[int, ...]) -> Window:
    return Window.of(0, 0, 1000, {"launches": rows_of("launches", *launches)})


def _stacks(ids: LaunchIds, *asked: int, process: int = 0) -> list[int]:
    processes = np.full(len(asked), process, np.int64)
    return ids.stacks(processes, np.array(asked, np.uint64)).tolist()


def test_a_launch_is_known_in_later_windows_and_in_its_process_alone() -> None:
    ids = LaunchIds()
    ids.put(_window(_launch(8, 1), _launch(5, 2), _launch(8, 3, process=1), _launch(0, 4)))
    ids.put(_window(_launch(20, 1)))
    assert _stacks(ids, 5, 8, 20, 0, 6, 21, 1 << 63) == [2, 1, 1, *[NO_STACK] * 4]
    assert _stacks(ids, 8, 5, process=1) == [3, NO_STACK]
    assert _stacks(ids, 8, process=2) == [NO_STACK]
    assert _stacks(ids) == []


def test_a_run_has_all_its_numbers_and_a_row_without_a_count_one() -> None:
    ids = LaunchIds()
    ids.put(_window(_launch(10, 1, count=3), _launch(20, 2, count=0)))
    assert _stacks(ids, 9, 10, 12, 13, 20, 21) == [0, 1, 1, 0, 2, 0]


@pytest.mark.parametrize(
    "launches",
    [
        [_launch(7, 1), _launch(7, 2)],
        [_launch(7, 1), _launch(7, 1), _launch(7, 2)],
        [_launch(5, 1, count=4), _launch(7, 2)],
        [_launch(7, 1, count=1 << 63), _launch(7, 2)],
    ],
)
def test_a_number_of_several_stacks_tells_nothing(launches: list[tuple[int, ...]]) -> None:
    ids = LaunchIds()
    ids.put(_window(*launches, _launch(3, 4), _launch(7, 9, process=1)))
    assert _stacks(ids, 7, 3) == [NO_STACK, 4]
    assert _stacks(ids, 7, process=1) == [9]


def test_a_number_that_one_stack_has_twice_is_its() -> None:
    ids = LaunchIds()
    ids.put(_window(_launch(7, 1), _launch(7, 1)))
    assert _stacks(ids, 7) == [1]


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_ids, "_MOST_KEPT", 10)
    ids = LaunchIds()
    for number in range(1, 31):
        ids.put(_window(_launch(number, number)))
    assert _stacks(ids, 20, 21, 30) == [NO_STACK, 21, 30]


def test_rows_that_tell_numbers_alone_are_no_launches() -> None:
    order = LaunchOrder()
    window = _window(_launch(0, 1), _launch(7, 1, count=0))
    kept = [rows for rows, _ in (*order.put(window), *order.finish())]
    assert sum(int(rows["count"].sum()) for rows in kept) <= 1
    assert all((rows["count"] > 0).all() for rows in kept)


def test_launches_with_numbers_join_what_follows_them_alone() -> None:
    waits = rows_of("queue_waits")

    def joined(*launches: tuple[int, ...]) -> list[tuple[int, int]]:
        found = join_runs(rows_of("launches", *launches), waits)
        return [(int(row["launch_id"]), int(row["count"])) for row in found]

    assert joined(_launch(7, 1), _launch(8, 1)) == [(7, 2)]
    assert joined(_launch(7, 1), _launch(9, 1)) == [(7, 1), (9, 1)]
    # One without a number before, or after.
    assert joined(_launch(0, 1, count=5), _launch(5, 1)) == [(0, 5), (5, 1)]
    assert joined(_launch(5, 1), _launch(0, 1)) == [(5, 1), (0, 1)]
    assert joined(_launch(0, 1), _launch(1, 1, count=0)) == [(0, 1), (1, 0)]
    assert joined(_launch(0, 1), _launch(0, 1)) == [(0, 2)]
