# SPDX-License-Identifier: Apache-2.0
"""Which slot of an array each of many 64-bit ids has: in 20 bytes for one, where a dict takes 140.

It is a hash table with linear probing and multiplicative hashing (Knuth, The Art of Computer
Programming 3, 6.4). Some ids are hashes, others are counted, those of several kinds from 0 on.
Nobody chooses them: the hashes begin with when a program was started, in ns (bpf/walk.h).
"""

from __future__ import annotations

from array import array

_LEAST_BUCKETS = 1 << 10
# 2^64 by the golden ratio: ids that were counted lie far apart then.
_MULTIPLIER = 0x9E37_79B9_7F4A_7C15


class IdSlots:
    """The slots of ids. A new one gets the slot that was given up last, else a new slot."""

    def __init__(self) -> None:
        self._ids = array("Q")  # by slot
        self._free: list[int] = []
        # Slots, each plus 1, 0 for an empty bucket: an id is in its own bucket, or in one of those
        # behind it up to the first empty one. A power of two.
        self._buckets = array("I", [0]) * _LEAST_BUCKETS

    def __len__(self) -> int:
        return len(self._ids) - len(self._free)

    def get(self, number: int) -> int | None:
        """Returns the slot of an id, None if it has none."""
        found = self._buckets[self._bucket(number)]
        return found - 1 if found else None

    def id_of(self, slot: int) -> int:
        """Returns the id that a slot was given to last."""
        return self._ids[slot]

    def add(self, number: int) -> int:
        """Gives an id that has none a slot; returns it."""
        if 2 * len(self) >= len(self._buckets):
            self._grow()
        if self._free:
            slot = self._free.pop()
            self._ids[slot] = number
        else:
            slot = len(self._ids)
            self._ids.append(number)
        self._buckets[self._bucket(number)] = slot + 1
        return slot

    def drop(self, slot: int) -> None:
        """Takes a slot from its id."""
        buckets, mask = self._buckets, len(self._buckets) - 1
        hole = at = self._bucket(self._ids[slot])
        buckets[hole] = 0
        self._free.append(slot)
        # Those that a search would miss from here on are moved into the hole.
        while found := buckets[at := at + 1 & mask]:
            home = self._ids[found - 1] * _MULTIPLIER >> 32 & mask
            if (at - home & mask) >= (at - hole & mask):
                buckets[hole], buckets[at] = found, 0
                hole = at

    def _bucket(self, number: int) -> int:
        """Returns the bucket that an id is in, or would be put into."""
        ids, buckets, mask = self._ids, self._buckets, len(self._buckets) - 1
        at = number * _MULTIPLIER >> 32 & mask
        while (found := buckets[at]) and ids[found - 1] != number:
            at = at + 1 & mask
        return at

    def _grow(self) -> None:
        """Makes the table twice as large."""
        before = self._buckets
        self._buckets = array("I", [0]) * (2 * len(before))
        for found in filter(None, before):
            self._buckets[self._bucket(self._ids[found - 1])] = found
