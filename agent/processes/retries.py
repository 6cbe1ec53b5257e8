# SPDX-License-Identifier: Apache-2.0
"""When something is tried again that failed, maybe for a moment only."""

from __future__ import annotations

import time
from collections.abc import Collection

# No room for a process or a descriptor may last for a minute. What fails for a day costs a try each
# hour.
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 60_000_000_000, 3_600_000_000_000


class Retries:
    """Things that failed, by number: each is due again after a pause, twice as long each time."""

    def __init__(self) -> None:
        self._pauses_ns: dict[int, int] = {}
        self._due_ns: dict[int, int] = {}
        self._next_ns = 0

    def note(self, number: int) -> None:
        """Takes note that something failed, once until it is due."""
        if number in self._due_ns:
            return
        pause_ns = min(2 * self._pauses_ns.get(number, _FIRST_PAUSE_NS // 2), _LONGEST_PAUSE_NS)
        due_ns = time.monotonic_ns() + pause_ns
        self._next_ns = min(self._next_ns, due_ns) if self._due_ns else due_ns
        self._pauses_ns[number], self._due_ns[number] = pause_ns, due_ns

    def take_due(self) -> set[int]:
        """Returns what is to be tried now."""
        now_ns = time.monotonic_ns()
        if not self._due_ns or now_ns < self._next_ns:
            return set()
        due = {number for number, due_ns in self._due_ns.items() if due_ns <= now_ns}
        for number in due:
            del self._due_ns[number]
        self._next_ns = min(self._due_ns.values(), default=0)
        return due

    def forget(self, numbers: Collection[int]) -> None:
        """Tries no more."""
        for number in numbers:
            self._pauses_ns.pop(number, None)
            self._due_ns.pop(number, None)
