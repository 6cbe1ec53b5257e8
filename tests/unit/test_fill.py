# SPDX-License-Identifier: Apache-2.0
"""When stores of the kernel half are emptied before a window is over."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import ProgramOptions
from aiflame.agent.recording.fill import Fill
from breadth import cases

_OPTIONS = ProgramOptions(
    abi.Filter.ALL, period_ns=1, stacks_max=4096, sums_max=65536, calls_max=32768
)
_CPUS = 3
_STORES = {
    abi.Counter.STACKS_STORED: (abi.Setting.STACKS_DRAIN, _OPTIONS.stacks_max),
    abi.Counter.SUMS_STORED: (abi.Setting.SUMS_DRAIN, _OPTIONS.sums_max),
    abi.Counter.CALLS_STORED: (abi.Setting.CALLS_DRAIN, _OPTIONS.calls_max),
}


def _stores(stored: Counter[abi.Counter]) -> Fill:
    fill = Fill(stored.__getitem__, _OPTIONS, _CPUS)
    fill.note_stacks_taken()
    fill.note_sums_taken()
    return fill


@cases("counter", _STORES, ids=lambda counter: counter.name)
def test_no_store_fills_up(counter: abi.Counter) -> None:
    # GIVEN CPUs that store as it happens, and ask each time that one has stored its share
    setting, room = _STORES[counter]
    stored, by_cpu = Counter[abi.Counter](), [0] * _CPUS
    fill, rng, before = _stores(stored), random.Random(counter), 0
    most, emptied = 0, 0
    for _ in range(20 * room):
        cpu = rng.choices(range(_CPUS), (6, 3, 1))[0]
        stored[counter] += 1
        by_cpu[cpu] += 1
        most = max(most, stored[counter] - before)
        is_asked = by_cpu[cpu] % fill.shares()[setting] == 0
        # WHEN what has to be emptied is
        if is_asked and (fill.are_stacks_many or fill.are_sums_many):
            fill.note_stacks_taken()
            fill.note_sums_taken()
            before = stored[counter]
            emptied += 1
    # THEN a quarter was always left, and of stacks half, for chains have half the room
    assert most <= room * (1 / 2 if counter is abi.Counter.STACKS_STORED else 3 / 4)
    # AND nothing was emptied that was nearly empty
    assert emptied <= 20 * room / (room // 4)


def test_stacks_do_not_end_a_window() -> None:
    stored = Counter[abi.Counter]()
    fill = _stores(stored)
    # WHEN there are many stacks
    stored[abi.Counter.STACKS_STORED] += _OPTIONS.stacks_max // 2
    # THEN they are to be taken, and sums are not
    assert fill.are_stacks_many
    assert not fill.are_sums_many


def test_a_store_that_was_emptied_is_left() -> None:
    stored = Counter[abi.Counter]()
    fill = _stores(stored)
    stored[abi.Counter.SUMS_STORED] += _OPTIONS.sums_max // 2
    assert fill.are_sums_many
    fill.note_sums_taken()
    stored[abi.Counter.SUMS_STORED] += _OPTIONS.sums_max // 2 - 1
    assert not fill.are_sums_many


@pytest.mark.parametrize(
    ("calls_per_s", "seconds"), [(1_000, 4), (1_024, 4), (3_000, 2), (5_000, 1), (12_000, 1)]
)
def test_launches_that_come_fast_end_a_longer_window(calls_per_s: int, seconds: int) -> None:
    # GIVEN no more launches in a window that are told apart than half of the map holds
    stored = Counter({abi.Counter.CALLS: 100_000})
    fill, passed = _stores(stored), 0
    # WHEN so many come each second, of four at most
    while passed < 4 and not fill.are_calls_many:
        stored[abi.Counter.CALLS] += calls_per_s
        passed += 1
    # THEN seconds end the window long before that.
    assert passed == seconds
    assert seconds * calls_per_s <= _OPTIONS.calls_max // 2
