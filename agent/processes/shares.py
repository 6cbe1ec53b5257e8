# SPDX-License-Identifier: Apache-2.0
"""Leaves something of what there is only so much of to those who have taken little.

Descriptors and probes are there for all processes of a machine. Whoever maps ten thousand files
may have them as long as there are enough; the last ones are for processes that have few, and the
very last for users and containers that have few. A limit for each process is not enough, as
processes are cheap; who is behind them is told by their cgroup, which only root and container
engines choose. A limit below all that there is would cost the one large process of a small machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from aiflame.agent.processes.owners import owner_of

# Of the whole: what is kept for processes that have little, and, as part of that, for payers.
_FOR_PROCESSES, _FOR_PAYERS = 1 / 16, 1 / 32
# Of the whole: what is little. A shell with its libraries has a dozen files, most of them shared.
_LITTLE = 1 / 32


def payer_of(cgroup: str, uid: int) -> str:
    """Returns who pays for what a process takes: a user, or else its container or service.

    Args:
        cgroup: Path of its cgroup, "" where that is not known.
        uid: Of its owner, who pays where cgroups do not group processes.
    """
    owner = owner_of(cgroup)
    return owner if owner not in ("", "/") else f"user {uid}"


class Shares:
    """Keeps account of what is taken.

    Args:
        whole: How much there is for all.
    """

    def __init__(self, whole: Callable[[], int]) -> None:
        self._whole = whole
        self._taken = 0
        self._of_process: Counter[int] = Counter()
        self._of_payer: Counter[str] = Counter()

    def take(self, pid: int, payer: str, count: int = 1) -> bool:
        """Takes some for a process; returns whether it may have that."""
        if not self._may_take(pid, payer, count):
            return False
        self._taken += count
        self._of_process[pid] += count
        self._of_payer[payer] += count
        return True

    def _may_take(self, pid: int, payer: str, count: int) -> bool:
        whole = self._whole()
        left = whole - self._taken - count
        if left >= _FOR_PROCESSES * whole:
            return True
        if self._of_process[pid] + count > _LITTLE * whole:
            return False
        has_little = self._of_payer[payer] + count <= _LITTLE * whole
        return left >= _FOR_PAYERS * whole or (has_little and left >= 0)

    def give_back(self, pid: int, payer: str, count: int = 1) -> None:
        """Gives back what was taken."""
        self._taken -= count
        self._of_process[pid] -= count
        self._of_payer[payer] -= count
        if not self._of_process[pid]:
            del self._of_process[pid]
        if not self._of_payer[payer]:
            del self._of_payer[payer]
