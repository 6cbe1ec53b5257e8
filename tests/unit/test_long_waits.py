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
    assert sorted(walks.asked) == [1, 2, 3]


def test_threads_without_any_stack_and_the_longest_waits_take_turns(
    waits: LongWaits, walks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN two threads of which a long wait was walked
    waits.poll()
    waits.thrift = 250
    # WHEN they wait again, and so do new ones, where one may be walked at a time
    monkeypatch.setattr(
        long_waits, "swept_threads", lambda _: _swept({2: 900, 3: 5_000, 4: 600, 5: 700})
    )
    walks.asked.clear()
    for _ in range(4):
        waits.sweep()
    # THEN nobody keeps others from it: neither new threads nor those that have always been there
    assert walks.asked == [5, 3, 4, 3]
    # AND what was known long ago is known no more.
    walks.asked.clear()
    now_ns = time.monotonic_ns() + 300_000 * _MS
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    waits.sweep()
    waits.sweep()
    assert walks.asked == [3, 3]


def test_a_wait_whose_walk_fails_has_what_is_known_after_some_tries(
    waits: LongWaits, walks: Any, taken_ns: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a process whose tables are being built, and time for a walk now and then
    walks.are_possible = True
    taken_ns["walk"] = 20 * _MS
    waits.thrift = 4
    now_ns = time.monotonic_ns()
    begun_ns = now_ns - 5_000 * _MS
    found = _swept({7: 0})
    found["switched_ns"] = begun_ns
    monkeypatch.setattr(long_waits, "swept_threads", lambda _: found)
    # WHEN it sleeps on for a minute
    for _ in range(120):
        now_ns += 500 * _MS
        monkeypatch.setattr(time, "monotonic_ns", lambda ns=now_ns: ns)
        waits.poll()
    # THEN looks without a walk between its tries are none of these
    assert waits.walked > 0
    assert len(walks.asked) >= 3


@pytest.fixture
def taken_ns(walks: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What a look at all threads takes of a CPU, the walk of one, and all of them so far."""
    taken = {"look": 0, "walk": 0, "now": 0}

    def walk(sleepers: list[object]) -> tuple[()]:
        taken["now"] += taken["walk"] * len(sleepers)
        return ()

    def swept(_: int) -> npt.NDArray[np.void]:
        taken["now"] += taken["look"]
        return _swept({2: 600, 3: 5_000})

    monkeypatch.setattr(walks, "walk", walk)
    monkeypatch.setattr(long_waits, "swept_threads", swept)
    monkeypatch.setattr(time, "thread_time_ns", lambda: taken["now"])
    return taken


def test_who_is_thrifty_sweeps_more_seldom_where_looks_take_long(
    waits: LongWaits, walks: Any, taken_ns: dict[str, int]
) -> None:
    # GIVEN a host of so many threads that a look at them takes 20 ms of a CPU
    taken_ns["look"] = 20 * _MS
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


def test_who_is_thrifty_walks_as_many_as_it_has_time_for(
    waits: LongWaits, walks: Any, taken_ns: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN walks of 25 ms, and one that gives them a two-hundredth of a CPU
    taken_ns["walk"] = 25 * _MS
    waits.thrift = 4
    now_ns = time.monotonic_ns()
    # WHEN there is a look each half second, for a minute
    for _ in range(120):
        now_ns += 500 * _MS
        monkeypatch.setattr(time, "monotonic_ns", lambda ns=now_ns: ns)
        waits.poll()
    # THEN twelve are walked in that, or a few more as what they take was learned.
    assert 10 <= len(walks.asked) <= 16


def test_what_the_ends_of_windows_take_is_owed_for_seconds_only(
    waits: LongWaits, walks: Any, taken_ns: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a hundred windows that ended, each of which took more than was saved up
    taken_ns["walk"] = 25 * _MS
    waits.thrift = 4
    for _ in range(100):
        waits.sweep()
    walks.asked.clear()
    # WHEN there is a look each half second THEN walks are made again within half a minute
    now_ns = time.monotonic_ns()
    for _ in range(60):
        now_ns += 500 * _MS
        monkeypatch.setattr(time, "monotonic_ns", lambda ns=now_ns: ns)
        waits.poll()
    assert walks.asked


def test_looks_that_take_little_are_as_close_as_may_be(
    waits: LongWaits, taken_ns: dict[str, int]
) -> None:
    # GIVEN one that does less of all else, looks of half a millisecond, and walks of ten
    taken_ns["look"], taken_ns["walk"] = _MS // 2, 10 * _MS
    waits.thrift = 4
    before_ns = time.monotonic_ns()
    waits.sweep()
    assert 400 * _MS < waits.due_ns - before_ns < 1_000 * _MS
