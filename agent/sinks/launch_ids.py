# SPDX-License-Identifier: Apache-2.0
"""The stacks of launches that devices name by their numbers.

A launch and what a device tells of it may come in different windows, the launch first. Its number
is the process's own: one that it has given to launches from several stacks tells nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.window import COLUMNS, NO_STACK, NONE, Rows, Window

U64 = npt.NDArray[np.uint64]

# The newest: at 16,384 launches with numbers a second, as many as the kernel half tells apart,
# those of the last 8 s. A device is seldom so far behind.
_MOST_KEPT = 1 << 17
# A graph is replayed for hours after it was built: 14 MB.
_MOST_BUILDERS = 1 << 16


class LaunchIds:
    """Launches of windows that have numbers.

    Attributes:
        builders_lost: How many launches that have built nodes of graphs found no room.
    """

    def __init__(self) -> None:
        self._builders: dict[tuple[int, int], int] = {}
        self.builders_lost = 0
        self._launches: Rows = np.zeros(0, COLUMNS["launches"].dtype)

    def put(self, window: Window) -> None:
        """Takes the launches of a window."""
        numbered = window.launches[window.launches["launch_id"] != 0]
        if len(numbered):
            self._launches = np.concatenate([self._launches, numbered])[-_MOST_KEPT:]

    def stacks(self, process: npt.NDArray[np.int64], launch_id: U64) -> U64:
        """Returns the stacks of launches, NO_STACK for those that are not known.

        Args:
            process: Who has launched, shape (n,).
            launch_id: The number of the launch there, 0 for none.
        """
        return self._told("stack", NO_STACK, process, launch_id)

    def builders(self, process: npt.NDArray[np.int64], launch_id: U64) -> U64:
        """Returns the stacks of launches by whose capture nodes of graphs were built.

        They are kept from when they are asked for first. Arguments and result as of `stacks`.
        """
        pairs, at = np.unique(
            np.stack((process.astype(np.uint64), launch_id)), axis=1, return_inverse=True
        )
        found = self.stacks(pairs[0].astype(np.int64), pairs[1])
        keys = zip(*pairs.tolist(), strict=True)
        for number, (key, stack) in enumerate(zip(keys, found.tolist(), strict=True)):
            known = self._builders.get(key)
            if known is not None:
                found[number] = known
            elif stack != NO_STACK and len(self._builders) < _MOST_BUILDERS:
                self._builders[key] = stack
            elif stack != NO_STACK:
                self.builders_lost += 1
        return found[at.reshape(-1)]

    def kernels(self, process: npt.NDArray[np.int64], launch_id: U64) -> U64:
        """Returns the kernels of launches, NONE for those not known; arguments as `stacks`."""
        return self._told("kernel", NONE, process, launch_id)

    def _told(
        self, column: str, nothing: int, process: npt.NDArray[np.int64], launch_id: U64
    ) -> U64:
        found = np.full(len(launch_id), nothing, np.uint64)
        is_numbered = launch_id != 0
        for one in np.unique(process[is_numbered]).tolist():
            own = is_numbered & (process == one)
            launches = self._launches[self._launches["process"] == one]
            found[own] = _told_by(launches, launch_id[own], column, nothing)
        return found


def _told_by(launches: Rows, launch_id: U64, column: str, nothing: int) -> U64:
    """Returns a column of launches of one process by their numbers."""
    if not len(launches):
        return np.full(len(launch_id), nothing, np.uint64)
    launches = launches[np.argsort(launches["launch_id"], kind="stable")]
    first, value = launches["launch_id"], launches[column].astype(np.uint64)
    last = first + (np.maximum(launches["count"], 1) - np.uint64(1))
    # Of a number that was given twice; the runs before one end where it begins, or overlap it.
    is_again = np.append(first[1:] <= np.maximum.accumulate(last)[:-1], False)
    is_again[:-1] &= value[1:] != value[:-1]
    is_again[1:] |= is_again[:-1].copy()
    value[is_again] = nothing
    at = np.searchsorted(first, launch_id, side="right") - 1
    is_known = (at >= 0) & (launch_id <= last[at])
    found: U64 = np.where(is_known, value[at], np.uint64(nothing))
    return found
