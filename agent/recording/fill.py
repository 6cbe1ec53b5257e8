# SPDX-License-Identifier: Apache-2.0
"""How full the kernel half's stores are: whether to empty one before the window is over.

A CPU asks for it each time that it has stored a share of a store, and counts on whatever was taken
out meanwhile: of one CPU's share nobody knows what the others have stored, and when. So it is
looked how much all have stored since the store was emptied last. A share is small enough that a
store which was left as it was is not full before the next question.

Stacks are emptied within a window: they are facts, and hold for all windows. Sums, and those of
calls, are of the window that is open, and end it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aiflame.agent.kernel import abi
from aiflame.agent.kernel.loader import ProgramOptions

# What all CPUs together store between two questions: a part of a store. One that was left with
# almost half of it in use has three quarters when it is looked at again.
_SHARE = 4


@dataclass(slots=True)
class Fill:
    """How much is in each store.

    Args:
        counters: Returns what programs have stored so far, by counter.
        options: How large stores are.
        cpus: That store.
    """

    counters: Callable[[], Mapping[abi.Counter, int]]
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
        self._note(abi.Counter.SUMS_STORED, abi.Counter.CALLS_STORED)

    def _note(self, *counters: abi.Counter) -> None:
        now = self.counters()
        self._emptied |= {counter: now[counter] for counter in counters}

    @property
    def are_stacks_many(self) -> bool:
        """Whether the store of stacks is to be emptied now: it is half full at the next question.

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

    def _stored(self, counter: abi.Counter) -> int:
        return self.counters()[counter] - self._emptied.get(counter, 0)
