# SPDX-License-Identifier: Apache-2.0
"""What was used lately: memory that neither grows with time nor with what a host brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Keeps what was used in this generation or in the one before.

    A cache that only has a size grows until it is full, which may take hours. Here what is not used
    goes after so many turns, so that a few minutes show how large it becomes.

    Args:
        turns: After so many, a new generation begins.
        size: With so many entries, it begins early. Twice as many are kept at most.
        leaving: Is given what is dropped.
    """

    def __init__(
        self,
        turns: int,
        size: int,
        leaving: Callable[[Mapping[Key, Value]], None] | None = None,
    ) -> None:
        self._turns = turns
        self._size = size
        self._leaving = leaving
        self._young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}
        self._age = 0  # of the generation, in turns

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, key: Key) -> bool:
        return key in self._young or key in self._old

    def find(self, key: Key) -> Value | None:
        """Returns an entry, None for one that is not there."""
        found = self._young.get(key)
        if found is None and key in self._old:
            found = self._old[key]
            self.keep(key, found)
        return found

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Returns an entry, made now if it is not there."""
        if key in self._young:
            return self._young[key]
        value = self._old[key] if key in self._old else make()
        self.keep(key, value)
        return value

    def keep(self, key: Key, value: Value) -> None:
        """Adds an entry, or replaces the one that is there."""
        self._old.pop(key, None)
        self._young[key] = value
        if len(self._young) >= self._size:
            self._begin()

    def turn(self) -> None:
        """Tells that a turn is over: a window, where windows are what uses it."""
        self._age += 1
        if self._age >= self._turns:
            self._begin()

    def _begin(self) -> None:
        leaving, self._old, self._young = self._old, self._young, {}
        self._age = 0
        if self._leaving is not None and leaving:
            self._leaving(leaving)
