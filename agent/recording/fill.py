# SPDX-License-Identifier: Apache-2.0
"""How full the kernel half's stores are: whether to empty one before the window is over.

Programs ask for that (EVENT_DRAIN) each time that a CPU has stored a certain share of a store. They
do not know what other CPUs have stored, nor when the store was emptied last: so the counters of all
CPUs are read here, and compared with what they were then. Shares are so small that a store which is
left as it is cannot be full before programs ask the next time.

Stacks are taken within a window: a stack is described once, for all windows. Sums, also of calls,
belong to the open window: taking them ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import ProgramOptions

# All CPUs together store a quarter of a store at most between two times that programs ask: one that
# was left with almost half of it in use has three quarters in use then.
_SHARE = 4


@dataclass(slots=True)
class Fill:
    """How much is in each store.

    Args:
        counted: Returns what all CPUs have counted so far.
        options: How large stores are.
        cpus: That store.
    """

    counted: Callable[[abi.Counter], int]
    options: ProgramOptions
    cpus: int
    _emptied: dict[abi.Counter, int] = field(default_factory=dict, init=False)

    def shares(self) -> dict[abi.Setting, int]:
        """Returns after how many entries of its own a CPU asks."""
        options, parts = self.options, _SHARE * self.cpus
        return {
            abi.Setting.STACKS_DRAIN: max(options.stacks_max // parts, 1),
            abi.Setting.SUMS_DRAIN: max(options.sums_max // parts, 1),
            abi.Setting.CALLS_DRAIN: max(options.calls_max // parts, 1),
        }

    def note_stacks_taken(self) -> None:
        """Takes note that the store of stacks is about to be emptied."""
        self._note(abi.Counter.STACKS_STORED)

    def note_sums_taken(self) -> None:
        """Takes note that programs write other stores of sums from now on."""
        self._note(abi.Counter.SUMS_STORED, abi.Counter.CALLS_STORED, abi.Counter.CALLS)

    def _note(self, *counters: abi.Counter) -> None:
        self._emptied |= {counter: self.counted(counter) for counter in counters}

    @property
    def are_stacks_many(self) -> bool:
        """Whether the store of stacks is to be emptied now: the next time it may be half full.

        That of Python chains has half as many entries, and a stack has one at most.
        """
        return self._stored(abi.Counter.STACKS_STORED) >= self.options.stacks_max // _SHARE

    @property
    def are_sums_many(self) -> bool:
        """Whether a window is to end now: a store of sums is half full."""
        return (
            self._stored(abi.Counter.SUMS_STORED) >= self.options.sums_max // 2
            or self._stored(abi.Counter.CALLS_STORED) >= self.options.calls_max // 2
        )

    @property
    def are_calls_many(self) -> bool:
        """Whether a window that is longer than a second is to end now: launches come fast.

        No more are told apart in a window than half of the map of calls holds, and nobody knows
        which calls are launches: a quarter of that leaves room for a second of as many again.
        """
        return self._stored(abi.Counter.CALLS) >= self.options.calls_max // 8

    def _stored(self, counter: abi.Counter) -> int:
        return self.counted(counter) - self._emptied.get(counter, 0)
