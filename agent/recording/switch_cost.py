# SPDX-License-Identifier: Apache-2.0
"""What programs at context switches take, by the kernel's own count.

The kernel counts where kernel.bpf_stats_enabled is set, or where somebody asks by a descriptor
(BPF_ENABLE_STATS, v5.8), which takes CAP_SYS_ADMIN. It costs two readings of a clock for each run
of any program of the host: so it is asked for the first seconds alone, which tell the prices of
this machine, before the right to ask is given up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Protocol

from aiflame.agent.kernel.sysbpf import ProgramCost
from aiflame.agent.processes import procfs

# For how long it is counted: prices are settled by a few thousand switches (fleet/cost.py).
_COUNTED_NS = 10_000_000_000

# Both counts are read one after the other, which takes less than a millisecond.
_WHOLE = 0.95

_PROGRAMS = ("on_switch", "on_waking")


class _Programs(Protocol):
    def costs(self) -> Mapping[str, ProgramCost]: ...


class SwitchCost:
    """Of the programs of one recording.

    Others may have the kernel count as well, from and until any moment. The program at switches
    runs at each of the host: a window in which fewer runs were counted was counted in part.

    Args:
        programs: Loaded.
        count: Has the kernel count until the descriptor that it returns is closed; raises OSError
            where that is not allowed.
        switches: Tells how often CPUs of the host have switched so far, 0 where that is unknown.
    """

    def __init__(
        self,
        programs: _Programs,
        count: Callable[[], int],
        switches: Callable[[], int] = procfs.host_switches,
    ) -> None:
        self._programs = programs
        self._count = count
        self._switches = switches
        self._counting: int | None = None
        self._counted_ns = 0
        self._told: tuple[int, int] | None = None
        self._told_switches: int | None = None

    def begin(self) -> None:
        """Has the kernel count for some seconds, if it may be asked."""
        with contextlib.suppress(OSError):
            self._counting = self._count()

    def take(self, window_ns: int) -> int | None:
        """Returns the ns that programs took in the window that ends now.

        Args:
            window_ns: How long it was.

        Returns:
            None where nobody counted, or for a part of the window alone.
        """
        costs = self._programs.costs()
        found = [costs[name] for name in _PROGRAMS]
        told, now = self._told, (sum(cost.run_time_ns for cost in found), found[0].run_count)
        self._told = now
        self._counted_ns += window_ns if told is not None else 0  # the first is not whole
        if self._counting is not None and self._counted_ns >= _COUNTED_NS:
            self.end()
            self._told = None
        runs = now[1] - (0 if told is None else told[1])
        before, self._told_switches = self._told_switches, self._switches() if runs else None
        # Of a part of the window it would be too little: it counts from the second one on.
        if told is None or before is None or not runs:
            return None
        assert self._told_switches is not None  # noqa: S101 - for mypy
        if runs < _WHOLE * (self._told_switches - before):
            return None
        return now[0] - told[0]

    def end(self) -> None:
        """Has the kernel count for us no more."""
        if self._counting is not None:
            os.close(self._counting)
            self._counting = None
