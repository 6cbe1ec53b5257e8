# SPDX-License-Identifier: Apache-2.0
"""Slots of ids."""

from __future__ import annotations

import random

from aiflame.agent.recording.id_slots import IdSlots


def test_each_id_has_a_slot_until_it_is_dropped() -> None:
    slots = IdSlots()
    assert [slots.add(number) for number in (7, 1 << 63, 0)] == [0, 1, 2]
    assert [slots.get(number) for number in (7, 1 << 63, 0, 8)] == [0, 1, 2, None]
    slots.drop(1)
    assert (slots.get(1 << 63), len(slots)) == (None, 2)
    assert slots.add(9) == 1


def test_ids_that_belong_together_are_found_after_others_were_dropped() -> None:
    chance = random.Random(1)
    # Bits from 48 on say nothing of where an id belongs: many belong at the same position.
    numbers = [chance.randrange(64) << 48 | chance.randrange(1 << 8) for _ in range(3_000)]
    slots, expected = IdSlots(), dict[int, int]()
    for step in range(20_000):
        number = chance.choice(numbers)
        assert slots.get(number) == expected.get(number)
        if number not in expected:
            expected[number] = slots.add(number)
        elif step % 3:
            slots.drop(expected.pop(number))
    assert len(slots) == len(expected)
    assert all(slots.get(number) == slot for number, slot in expected.items())


def test_ids_that_were_counted_lie_apart() -> None:
    slots = IdSlots()
    for kind in range(4):  # as those of stacks that the host half makes
        for number in range(8_000):
            slots.add(0x51EE_9E55 << 32 | kind << 28 | number)
    taken = "".join("x" if found else " " for found in slots._buckets)
    assert max(map(len, taken.split())) < 100
