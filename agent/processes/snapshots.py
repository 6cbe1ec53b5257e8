# SPDX-License-Identifier: Apache-2.0
"""Registers and stacks of sleeping threads, of one moment each, while all else goes on.

Registers are read, then the stacks, then the registers again: where both readings are equal, the
thread slept in between, and its stack is as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from aiflame.agent.inspector.memory import RemoteMemory, Span
from aiflame.agent.kernel.syscalls import SHORT
from aiflame.agent.processes.stack_memory import StackMemory
from aiflame.agent.processes.threads import ThreadRegisters, thread_registers

# An idle thread's stack, from its stack pointer to its end, is mostly shorter than this.
PIECE_BYTES = 16384


class Snapshot(NamedTuple):
    """A sleeping thread, and the bytes from its stack pointer on."""

    registers: ThreadRegisters
    piece: bytes

    def without_piece(self) -> Snapshot:
        """The same, to be read again when it is walked."""
        return Snapshot(self.registers, b"")


class Snapshots:
    """Takes them.

    Args:
        program_fd: The iterator program; None where the kernel has none.
        memory: Of the threads' processes.
    """

    def __init__(self, program_fd: int | None, memory: RemoteMemory) -> None:
        self._program_fd = program_fd
        self._memory = memory

    @property
    def are_possible(self) -> bool:
        """Whether the kernel tells registers."""
        return self._program_fd is not None

    def take(
        self, threads: Sequence[tuple[int, int]], piece_bytes: int = PIECE_BYTES
    ) -> dict[int, Snapshot]:
        """Returns the snapshots, by thread id, of those that sleep on meanwhile.

        Args:
            threads: (pid, tid) of each.
            piece_bytes: How much is read of each stack, at most.
        """
        pids, tids = {pid for pid, _ in threads}, {tid for _, tid in threads}
        asleep = [thread for thread in self._registers(pids, tids) if thread.is_asleep]
        pieces = self._memory.read(
            [_span(thread, piece_bytes if thread.has_user_half else 0) for thread in asleep]
        )
        still = set(self._registers(pids, tids))
        return {
            thread.tid: Snapshot(thread, piece.data)
            for thread, piece in zip(asleep, pieces, strict=True)
            if thread in still
        }

    def memory_of(self, snapshot: Snapshot, is_live: bool) -> StackMemory:
        """Returns the thread's memory as of the snapshot.

        Args:
            snapshot: Of the thread.
            is_live: What is not in the piece is read from the thread as it is now: whoever makes
                it read pages asks `still_asleep` after. Else it is unreadable.
        """
        registers, piece = snapshot
        return StackMemory(_span(registers, len(piece)), piece, self._memory if is_live else None)

    def still_asleep(self, snapshots: Sequence[Snapshot]) -> set[int]:
        """Returns the ids of those threads that have not moved since."""
        before = [snapshot.registers for snapshot in snapshots]
        now = self._registers({t.pid for t in before}, {t.tid for t in before})
        return {thread.tid for thread in set(before).intersection(now)}

    def _registers(self, pids: Collection[int], tids: Collection[int]) -> list[ThreadRegisters]:
        if self._program_fd is None or not pids:
            return []
        try:
            return thread_registers(self._program_fd, pids, tids)
        except OSError as error:
            if error.errno not in SHORT:  # iterators are switched off
                self._program_fd = None
            return []


def _span(thread: ThreadRegisters, size: int) -> Span:
    return Span(thread.pid, thread.tid, thread.stack_pointer, size)
