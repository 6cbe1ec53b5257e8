# SPDX-License-Identifier: Apache-2.0
"""The stacks or the Python chains that are known between windows: rows with their parts, by id.

There are tens of thousands, and each would be an object of its own. So rows lie in one array, and
parts that are equal are kept once: the processes that were forked from one have the same addresses.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.window import COLUMNS, Rows, lengths
from aiflame.agent.recording.id_slots import IdSlots

# Slots at first; each time that there is none left, half as many more.
_FIRST_SLOTS = 1 << 10
# Of parts, beyond what is in use, until those that are in no use are dropped; an eighth of what is
# in use where that is more.
_MOST_UNUSED_PARTS = 1 << 10


class KeptRows:
    """Rows of one column, each in a slot, and which were mentioned last.

    Args:
        column: Its name; it has parts.
    """

    def __init__(self, column: str) -> None:
        self._column = column
        self._key = COLUMNS[column].key[0]
        self._dtype = COLUMNS[column].dtype
        self._slots = IdSlots()
        self._rows: Rows = np.zeros(0, self._dtype)
        self._parts: list[bytes] = []
        # When each was mentioned last, counted in mentions; 0 for a slot that is free.
        self._mentioned: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._mentions = 0
        self._oldest = self._from_oldest()
        self._shared: dict[bytes, bytes] = {}
        self._most_shared = _MOST_UNUSED_PARTS

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, number: int) -> bool:
        return self._slots.get(number) is not None

    @property
    def rows(self) -> Rows:
        """All rows, in no order."""
        return self._rows[self._mentioned > 0]

    @property
    def parts(self) -> bytes:
        """The parts of all `rows`, one after the other."""
        return b"".join(self._parts)  # free slots have none

    def put(self, rows: Rows, parts: Rows) -> None:
        """Adds rows, or what they have become, as those that are mentioned last.

        Args:
            rows: With `first`, where in `parts` theirs begin.
            parts: Of all of them.
        """
        numbers, firsts = rows[self._key].tolist(), rows["first"].tolist()
        slots = [self._slot(number) for number in numbers]
        self._rows[slots] = rows
        counts = lengths(self._column, rows).tolist()
        for slot, first, count in zip(slots, firsts, counts, strict=True):
            self._parts[slot] = self._interned(parts[first : first + count].tobytes())
            self._mention(slot)

    def mention(self, number: int) -> int | None:
        """Takes note that a row is needed; returns its process, None if it is not known."""
        slot = self._slots.get(number)
        if slot is None:
            return None
        self._mention(slot)
        return int(self._rows["process"][slot])

    def get(self, number: int) -> tuple[np.void, bytes] | None:
        """Returns a row and its parts, None if it is not known."""
        slot = self._slots.get(number)
        return None if slot is None else (self._rows[slot].copy(), self._parts[slot])

    def take(
        self, numbers: npt.NDArray[np.uint64], processes: npt.NDArray[np.uint32]
    ) -> tuple[npt.NDArray[np.bool_], Rows, bytes]:
        """Takes note of rows that are needed, and returns those of processes that are there.

        Args:
            numbers: Their ids, each once, shape (n,).
            processes: The processes.

        Returns:
            Which of them these are, shape (n,); the rows, without a valid `first`; and the parts of
            all of these.
        """
        found = [self._slots.get(number) for number in numbers.tolist()]
        is_there = np.array([slot is not None for slot in found], np.bool_)
        slots = np.array([slot for slot in found if slot is not None], np.int64)
        is_of_these = np.isin(self._rows["process"][slots], processes)
        is_there[is_there] = is_of_these
        slots = slots[is_of_these]
        self._mentioned[slots] = self._mentions + 1 + np.arange(len(slots))
        self._mentions += len(slots)
        parts = b"".join([self._parts[slot] for slot in slots.tolist()])
        return is_there, self._rows[slots], parts

    def drop_oldest(self, most: int) -> None:
        """Drops those whose last mention is the oldest until no more than so many are left."""
        while len(self._slots) > most:
            self._drop(next(self._oldest))

    def drop_gone(self, processes: npt.NDArray[np.uint32]) -> None:
        """Drops those of processes that are not among some."""
        is_gone = (self._mentioned > 0) & ~np.isin(self._rows["process"], processes)
        for slot in np.flatnonzero(is_gone).tolist():
            self._drop(slot)

    def drop_unused_parts(self) -> None:
        """Drops parts that no row has any more, as is done from time to time."""
        self._shared = {used: used for used in self._parts}
        used = len(self._shared)
        self._most_shared = used + max(used // 8, _MOST_UNUSED_PARTS)

    def _slot(self, number: int) -> int:
        """Returns the slot of an id, a free one if it is new."""
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots.add(number)
            if slot == len(self._rows):
                self._grow()
        return slot

    def _grow(self) -> None:
        more = max(len(self._rows) // 2, _FIRST_SLOTS)
        self._rows = np.concatenate([self._rows, np.zeros(more, self._dtype)])
        self._mentioned = np.concatenate([self._mentioned, np.zeros(more, np.int64)])
        self._parts += [b""] * more

    def _mention(self, slot: int) -> None:
        self._mentions += 1
        self._mentioned[slot] = self._mentions

    def _drop(self, slot: int) -> None:
        self._slots.drop(slot)
        self._parts[slot], self._mentioned[slot] = b"", 0

    def _from_oldest(self) -> Iterator[int]:
        """Yields slots by when they were mentioned last, without end; each is dropped then.

        They are put in order once for many of them: that takes 2 ms where there are 30,000.
        """
        while True:
            used = np.flatnonzero(self._mentioned)
            oldest = used[np.argsort(self._mentioned[used])][: len(used) // 16 + 1]
            for slot, mentioned in zip(
                oldest.tolist(), self._mentioned[oldest].tolist(), strict=True
            ):
                if self._mentioned[slot] == mentioned:  # and not again since
                    yield slot

    def _interned(self, parts: bytes) -> bytes:
        """Returns equal parts that are there already, if any."""
        if len(self._shared) >= self._most_shared:
            self.drop_unused_parts()
        return self._shared.setdefault(parts, parts)
