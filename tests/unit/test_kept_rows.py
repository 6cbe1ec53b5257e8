# SPDX-License-Identifier: Apache-2.0
"""Stacks that are kept between windows."""

from __future__ import annotations

import numpy as np
from aiflame.agent.model.window import COLUMNS
from aiflame.agent.recording.kept_rows import KeptRows

_HERE = np.array([1, 2], np.uint32)


def _put(kept: KeptRows, stack: int, process: int, *addresses: int) -> None:
    row = (stack, 0, process, 0, 0, len(addresses), 0, 0, False, 0, 0)
    rows = np.array([row], COLUMNS["stacks"].dtype)
    kept.put(rows, np.array(addresses, np.uint64).view(COLUMNS["addresses"].dtype))


def test_rows_are_taken_with_their_parts_where_their_process_is_there() -> None:
    kept = KeptRows("stacks")
    for stack, process, addresses in ((10, 1, (5, 6)), (11, 3, (7,)), (12, 2, (8, 9))):
        _put(kept, stack, process, *addresses)
    numbers = np.array([9, 10, 11, 12], np.uint64)
    is_there, rows, parts = kept.take(numbers, _HERE)
    assert is_there.tolist() == [False, True, False, True]
    assert rows["stack"].tolist() == [10, 12]
    assert np.frombuffer(parts, np.uint64).tolist() == [5, 6, 8, 9]


def test_what_a_row_has_become_takes_its_place() -> None:
    kept = KeptRows("stacks")
    _put(kept, 10, 1, 5, 6)
    _put(kept, 10, 2, 7)
    found = kept.get(10)
    assert found is not None and int(found[0]["process"]) == 2
    assert np.frombuffer(found[1], np.uint64).tolist() == [7]
    assert len(kept) == 1


def test_those_mentioned_last_are_kept() -> None:
    kept = KeptRows("stacks")
    for stack in range(1, 3_001):
        _put(kept, stack, 1, stack)
    kept.mention(2)
    kept.take(np.array([4, 5], np.uint64), _HERE)
    kept.drop_oldest(2_000)
    _put(kept, 1, 1, 1)
    kept.mention(1_004)
    kept.drop_oldest(1_998)
    assert {*kept.rows["stack"].tolist()} == {1, 2, 4, 5, 1_004, *range(1_008, 3_001)}
    assert len(kept) == 1_998


def test_those_of_processes_that_are_gone_leave_room() -> None:
    kept = KeptRows("stacks")
    for stack, process in ((10, 1), (11, 3), (12, 2)):
        _put(kept, stack, process, stack)
    kept.drop_gone(_HERE)
    assert 11 not in kept and kept.mention(11) is None
    _put(kept, 13, 1, 13)
    assert np.sort(np.frombuffer(kept.parts, np.uint64)).tolist() == [10, 12, 13]


def test_equal_parts_are_kept_once_and_none_for_ever() -> None:
    kept = KeptRows("stacks")
    _put(kept, 10, 1, 5, 6)
    _put(kept, 11, 2, 5, 6)
    first, second = kept.get(10), kept.get(11)
    assert first is not None and second is not None and first[1] is second[1]
    for address in range(20_000):
        _put(kept, 12, 1, address)
    assert len(kept._shared) < 3_000


def test_parts_of_what_was_dropped_can_be_dropped_at_once() -> None:
    kept = KeptRows("stacks")
    for stack in range(1, 501):
        _put(kept, stack, 1, stack)
    kept.drop_oldest(10)
    kept.drop_unused_parts()
    assert len(kept._shared) <= 11  # and what free slots have
    assert len(np.frombuffer(kept.parts, np.uint64)) == 10


def test_parts_of_what_was_dropped_take_little_room_where_many_are_kept() -> None:
    kept = KeptRows("stacks")
    for stack in range(1, 40_001):
        _put(kept, stack, 1, stack)
        if not stack % 1_000:
            kept.drop_oldest(10_000)
    assert len(kept) == 10_000
    assert len(kept._shared) < 13_000
