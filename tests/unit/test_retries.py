# SPDX-License-Identifier: Apache-2.0
"""What failed for a moment is tried again, and what fails for good seldom."""

from __future__ import annotations

import time

import pytest
from aiflame.agent.retries import Retries

_MINUTE_NS = 60_000_000_000


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1_000 * _MINUTE_NS
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)

    def minutes_until_due(self, retries: Retries[int]) -> int:
        for minutes in range(1, 100):
            self.now_ns += _MINUTE_NS
            if retries.take_due():
                return minutes
        return 0


def test_what_fails_again_is_due_after_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, retries = _Clock(monkeypatch), Retries[int]()
    found = []
    for _ in range(9):
        retries.note(7)
        retries.note(7)  # as often as it fails until then
        found.append(clock.minutes_until_due(retries))
    assert found == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    # AND what has not failed since is not due
    assert clock.minutes_until_due(retries) == 0


def test_each_is_due_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, retries = _Clock(monkeypatch), Retries[int]()
    retries.note(1)
    clock.now_ns += _MINUTE_NS // 2
    retries.note(2)
    clock.now_ns += _MINUTE_NS // 2
    assert retries.take_due() == {1}
    retries.note(1)
    clock.now_ns += _MINUTE_NS // 2
    assert retries.take_due() == {2}


def test_what_is_forgotten_is_never_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, retries = _Clock(monkeypatch), Retries[int]()
    retries.note(1)
    retries.forget([1, 2])
    assert clock.minutes_until_due(retries) == 0
    # AND begins anew
    retries.note(1)
    assert clock.minutes_until_due(retries) == 1
