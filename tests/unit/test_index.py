# SPDX-License-Identifier: Apache-2.0
"""Numbers for more things than are kept in memory."""

from __future__ import annotations

import random

from aiflame.agent.model.profile import FrameKind
from aiflame.agent.sinks.index import Index, Key
from aiflame.agent.symbols.frames import SourceFrame


def test_each_key_has_one_number_however_many_there_are() -> None:
    index, dice = Index(kept=100), random.Random(1)
    numbers: dict[Key, int] = {}
    for _ in range(40_000):
        number = dice.randrange(20_000)
        key: Key = number if number % 3 else (number, f"name \udc80 {number}", None)
        found = index.find(key)
        assert found == numbers.get(key)
        if found is None:
            numbers[key] = index.add(key)
    assert len(index) == len(numbers)
    assert sorted(numbers.values()) == list(range(len(numbers)))
    source = SourceFrame("f", "", 1, False)
    assert index.find((int(FrameKind.PYTHON), source.name, None, source.file)) is None
