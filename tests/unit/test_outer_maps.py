# SPDX-License-Identifier: Apache-2.0
"""Changes of maps of maps that threads make: in order, none lost, and nobody waits for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Mapping

import pytest
from aiflame.agent.kernel.outer_maps import OuterMap

_PATIENCE_S = 30


class _Slow:
    """A map of maps in a kernel that waits after each change, until it is told to go on."""

    def __init__(self) -> None:
        self.content: dict[int, int] = {}  # inode of the descriptor, by key
        self.refuses: set[int] = set()
        self.made = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)

    def update_many(self, entries: Mapping[int, int]) -> list[int]:
        refused = [key for key in entries if key in self.refuses]
        for key, fd in entries.items():
            if key not in refused:
                self.content[key] = os.fstat(fd).st_ino
        self._wait()
        return refused

    def delete_many(self, keys: Collection[int]) -> None:
        for key in keys:
            self.content.pop(key, None)
        self._wait()

    def _wait(self) -> None:
        self.made.release()
        assert self.may_go_on.acquire(timeout=_PATIENCE_S)


@pytest.fixture
def slow() -> _Slow:
    return _Slow()


@pytest.fixture
def outer(slow: _Slow) -> Iterator[OuterMap]:
    made = OuterMap(slow)
    made.go_beside()
    yield made
    slow.may_go_on.release(100)
    made.close()


def _file() -> tuple[int, int]:
    """A descriptor, and what it is told by."""
    fd = os.memfd_create("inner")
    return fd, os.fstat(fd).st_ino


def test_a_change_is_made_while_the_kernel_waits_for_another(outer: OuterMap, slow: _Slow) -> None:
    (first, first_inode), (second, second_inode) = _file(), _file()
    outer.put({1: first})
    assert slow.made.acquire(timeout=_PATIENCE_S)
    outer.put({2: second})
    assert slow.made.acquire(timeout=_PATIENCE_S)
    assert slow.content == {1: first_inode, 2: second_inode}


def test_changes_of_one_key_are_made_in_order(outer: OuterMap, slow: _Slow) -> None:
    # GIVEN a change that the kernel is at
    (first, _), (second, _), (third, third_inode) = _file(), _file(), _file()
    outer.put({1: first})
    assert slow.made.acquire(timeout=_PATIENCE_S)
    # WHEN others of the same key come meanwhile
    outer.take_out([1])
    outer.put({1: second})
    outer.put({1: third})
    slow.may_go_on.release(100)
    outer.wait()
    # THEN the last one holds, and no descriptor is left open
    assert slow.content == {1: third_inode}
    for fd in (first, second, third):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_what_is_taken_out_last_is_gone(outer: OuterMap, slow: _Slow) -> None:
    slow.may_go_on.release(100)
    outer.put({1: _file()[0], 2: _file()[0]})
    outer.take_out([1])
    outer.wait()
    assert set(slow.content) == {2}


def test_what_is_refused_is_told_once(outer: OuterMap, slow: _Slow) -> None:
    slow.refuses = {7}
    slow.may_go_on.release(100)
    outer.put({7: _file()[0], 8: _file()[0]})
    outer.wait()
    assert (outer.take_refused(), outer.take_refused()) == ([7], [])
    assert set(slow.content) == {8}


def test_without_threads_changes_are_made_at_once(slow: _Slow) -> None:
    slow.may_go_on.release(100)
    slow.refuses = {3}
    outer = OuterMap(slow)
    outer.put({1: _file()[0], 2: _file()[0], 3: _file()[0]})
    outer.take_out([2])
    assert set(slow.content) == {1}
    assert outer.take_refused() == [3]
    outer.close()


def test_closing_leaves_no_descriptor_open(outer: OuterMap, slow: _Slow) -> None:
    # GIVEN one change that is being made, and one that waits for it
    first, second = _file()[0], _file()[0]
    outer.put({1: first})
    assert slow.made.acquire(timeout=_PATIENCE_S)
    outer.put({1: second})
    # WHEN all ends
    slow.may_go_on.release(100)
    outer.close()
    # THEN nothing is left open, whether it was made or not
    for fd in (first, second):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_whoever_waits_is_let_go_when_there_is_no_memory_for_a_change() -> None:
    # GIVEN a change that this process has no memory for
    class Poor(_Slow):
        def update_many(self, entries: Mapping[int, int]) -> list[int]:
            raise MemoryError

    outer = OuterMap(Poor())
    outer.go_beside()
    # WHEN it is asked for
    outer.put({1: _file()[0]})
    # THEN nobody waits for it for ever, and it counts as refused
    outer.wait()
    assert outer.take_refused() == [1]
    outer.close()
