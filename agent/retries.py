# SPDX-License-Identifier: Apache-2.0
"""When something is tried again that failed, maybe for a moment only."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

# No room for a process or a descriptor may last for a minute. What fails for a day costs a try each
# hour.
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 60_000_000_000, 3_600_000_000_000

Key = TypeVar("Key", bound=Hashable)


class Retries(Generic[Key]):
    """Things that failed, by a key: each is due again after a pause, twice as long each time."""

    def __init__(self) -> None:
        self._pauses_ns: dict[Key, int] = {}
        self._due_ns: dict[Key, int] = {}
        self._next_ns = 0

    def note(self, key: Key) -> None:
        """Takes note that something failed, once until it is due."""
        if key in self._due_ns:
            return
        pause_ns = min(2 * self._pauses_ns.get(key, _FIRST_PAUSE_NS // 2), _LONGEST_PAUSE_NS)
        due_ns = time.monotonic_ns() + pause_ns
        self._next_ns = min(self._next_ns, due_ns) if self._due_ns else due_ns
        self._pauses_ns[key], self._due_ns[key] = pause_ns, due_ns

    def take_due(self) -> set[Key]:
        """Returns what is to be tried now."""
        now_ns = time.monotonic_ns()
        if not self._due_ns or now_ns < self._next_ns:
            return set()
        due = {key for key, due_ns in self._due_ns.items() if due_ns <= now_ns}
        for key in due:
            del self._due_ns[key]
        self._next_ns = min(self._due_ns.values(), default=0)
        return due

    def forget(self, keys: Collection[Key]) -> None:
        """Tries no more."""
        for key in keys:
            self._pauses_ns.pop(key, None)
            self._due_ns.pop(key, None)
