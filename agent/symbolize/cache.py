# SPDX-License-Identifier: Apache-2.0
"""A bounded cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """Keeps what was asked for last.

    Args:
        size: How many entries are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Returns an entry, made now if it is not there."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        value = self._entries[key] = make()
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return value
