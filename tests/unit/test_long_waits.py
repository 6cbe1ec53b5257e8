# SPDX-License-Identifier: Apache-2.0
"""Which long waits are walked when."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.recording import long_waits
from aiflame.agent.recording.long_waits import LongWaits

_MS = 1_000_000


class _Walks:
    """Walks nothing, and takes note of whom it was asked for."""

    are_wanted = are_possible = False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def take(self, threads: list[tuple[int, int]]) -> dict[int, Any]:
        self.asked += [tid for _, tid in threads]
        return {}

    def walk(self, _: object) -> tuple[()]:
        return ()

    walk_python = walk

    def forget(self) -> None:
        pass


def _swept(ages_ms: dict[int, int]) -> npt.NDArray[np.void]:
    found = np.zeros(len(ages_ms), abi.SWEPT_THREAD_DTYPE)
    found["tid"] = [*ages_ms]
    now_ns = time.monotonic_ns()
    found["switched_ns"] = [now_ns - age * _MS for age in ages_ms.values()]
    return found


@pytest.fixture
def walks() -> Any:
    return _Walks()


@pytest.fixture
def waits(walks: Any, monkeypatch: pytest.MonkeyPatch) -> LongWaits:
    # Threads that have slept for so many milliseconds.
    monkeypatch.setattr(long_waits, "swept_threads", lambda _: _swept({1: 150, 2: 600, 3: 5_000}))
    image = SimpleNamespace(was_read=True, index=0)
    programs: Any = SimpleNamespace(
        sweep_iterator_fd=0, swept_stacks=SimpleNamespace(update=lambda *_: None)
    )
    table: Any = SimpleNamespace(image=lambda *_: image)
    pythons: Any = SimpleNamespace()
    stacks: Any = SimpleNamespace(row=lambda _: None, add_made=lambda *_: None)
    return LongWaits(programs, table, walks, pythons, stacks)


def test_between_windows_those_are_walked_that_may_be_long_before_the_next_sweep(
    waits: LongWaits, walks: Any
) -> None:
    waits.poll()
    assert walks.asked == [3, 2]
    # WHEN a window closes, which tells of those that go on whatever will become of them
    walks.asked.clear()
    waits.sweep()
    assert walks.asked == [3, 2, 1]


def test_who_is_thrifty_sweeps_more_seldom_where_sweeps_take_long(
    waits: LongWaits, walks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a host of so many threads that a sweep, and its walks, take 20 ms of a CPU
    clock_ns = iter(range(0, 1_000 * _MS, 20 * _MS))
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(clock_ns))
    before_ns = time.monotonic_ns()
    waits.poll()
    assert waits.due_ns - before_ns < 4_000 * _MS
    # THEN one that does less of all else gives it a two-hundredth of a CPU.
    waits.thrift = 4
    waits.sweep()
    assert waits.due_ns - before_ns >= 4_000 * _MS
    walks.asked.clear()
    waits.poll()
    assert walks.asked == []


def test_sweeps_that_take_little_are_as_close_as_may_be(
    waits: LongWaits, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN one that does less of all else, and sweeps of half a millisecond
    clock_ns = iter(range(0, 1_000 * _MS, _MS // 2))
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(clock_ns))
    waits.thrift = 4
    before_ns = time.monotonic_ns()
    waits.sweep()
    assert 400 * _MS < waits.due_ns - before_ns < 1_000 * _MS
