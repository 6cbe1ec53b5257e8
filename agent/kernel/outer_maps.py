# SPDX-License-Identifier: Apache-2.0
"""Changes of maps of maps, made beside the recorder.

Programs see a change at once, but whoever makes it waits until no program runs any more that may
have seen what was there before: 8 to 15 ms on two busy processors (maybe_wait_bpf_programs of
kernel/bpf/syscall.c, v6.18). A process that has called exec maps its libraries within that time,
and may go to sleep with the stack that it then keeps: its recorder must not wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Mapping
from typing import Protocol

from aiflame.agent import priority

# Those that wait cost nothing, and share one wait of the kernel's: a change finds one that is free.
_THREADS = 4


class Entries(Protocol):
    """What is asked of a map of maps, as `sysbpf.Map` has it."""

    def update_many(self, entries: Mapping[int, int]) -> list[int]: ...

    def delete_many(self, keys: Collection[int]) -> None: ...


class OuterMap:
    """A map of maps. Changes are made at once, and by threads once `go_beside` was called.

    Of one key there is one change at a time; of those that wait for it only the last is made.

    Args:
        entries: The map itself.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._asked: dict[int, int | None] = {}  # by key: a descriptor, None to take out
        self._changing: set[int] = set()
        self._refused: list[int] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._changed = threading.Condition()

    def go_beside(self) -> None:
        """Has threads make changes from now on; they have the rights that the caller has now."""
        with self._changed:
            for _ in range(_THREADS):
                thread = threading.Thread(target=self._work, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more may be started: changes are waited for as before
                    break
                self._threads.append(thread)

    def put(self, fds: Mapping[int, int]) -> None:
        """Puts maps in by key; their descriptors are closed once that is done."""
        self._ask(dict(fds))

    def take_out(self, keys: Collection[int]) -> None:
        """Takes out what is there under keys, if anything is."""
        self._ask(dict.fromkeys(keys))

    def _ask(self, changes: dict[int, int | None]) -> None:
        if not changes:
            return
        if not self._threads:
            self._refused += self._make(changes)
            return
        with self._changed:
            for key in changes.keys() & self._asked.keys():
                _close(self._asked[key])
            self._asked.update(changes)
            self._changed.notify()

    def _make(self, changes: Mapping[int, int | None]) -> list[int]:
        """Makes changes, and waits for them; returns the keys of maps that were refused."""
        fds = {key: fd for key, fd in changes.items() if fd is not None}
        try:
            refused = self._entries.update_many(fds) if fds else []
            gone = [key for key, fd in changes.items() if fd is None]
            if gone:
                self._entries.delete_many(gone)
        finally:
            for fd in fds.values():
                os.close(fd)
        return refused

    def _work(self) -> None:
        priority.begin_urgent_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._due())
                if self._is_closed:
                    return
                changes = self._due()
                for key in changes:
                    del self._asked[key]
                self._changing.update(changes)
            refused = [key for key, fd in changes.items() if fd is not None]
            with contextlib.suppress(MemoryError):  # the recorder says so; who waits is let go
                refused = self._make(changes)
            with self._changed:
                self._refused += refused
                self._changing.difference_update(changes)
                self._changed.notify_all()

    def _due(self) -> dict[int, int | None]:
        """Changes of keys of which none is being made: puts first, they are waited for."""
        due = {key: fd for key, fd in self._asked.items() if key not in self._changing}
        return {key: fd for key, fd in due.items() if fd is not None} or due

    def take_refused(self) -> list[int]:
        """Returns the keys of maps that the kernel did not take since last."""
        with self._changed:
            refused, self._refused = self._refused, []
        return refused

    def wait(self) -> None:
        """Waits until all changes are made, and no program sees what was there before."""
        with self._changed:
            self._changed.wait_for(lambda: not self._asked and not self._changing)

    def close(self) -> None:
        """Ends the threads; changes that were not begun are not made."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for fd in self._asked.values():
            _close(fd)
        self._threads, self._asked = [], {}


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
