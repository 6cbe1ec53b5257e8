# SPDX-License-Identifier: Apache-2.0
"""Memory of one process, as readers of Python's objects and of names ask for it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from aiflame.agent.inspector.memory import RemoteMemory, Span
from aiflame.agent.python.memory import MAX_READ_BYTES, NoMemoryAccess, sound_address


class ProcessMemory:
    """Memory of one process, for readers of Python's objects.

    Args:
        remote: Reads it.
        pid: Process id in this pid namespace, or the id of one of its threads.
    """

    __slots__ = ("_remote", "pid")

    def __init__(self, remote: RemoteMemory, pid: int) -> None:
        self._remote = remote
        self.pid = pid

    def read(self, address: int, size: int) -> bytes | None:
        """Exactly `size` bytes, or None where they are not mapped or not to be asked for.

        Raises:
            NoMemoryAccess: Permission is missing, or the process has ended.
        """
        return self.read_many([(address, size)])[0]

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """The same for many (address, size) at once, which takes little longer than for one."""
        spans = [
            Span(self.pid, self.pid, address, size if _is_sound(address, size) else 0)
            for address, size in ranges
        ]
        answers = self._remote.read(spans)
        for answer in answers:
            if answer.error:
                raise NoMemoryAccess(
                    f"cannot read the memory of process {self.pid}: {os.strerror(answer.error)}"
                )
        return [
            answer.data if len(answer.data) == size and size else None
            for answer, (_, size) in zip(answers, ranges, strict=True)
        ]


def _is_sound(address: int, size: int) -> bool:
    return sound_address(address) and 0 < size <= MAX_READ_BYTES
