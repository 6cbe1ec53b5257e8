# SPDX-License-Identifier: Apache-2.0
"""Naming within a time, for an agent that is behind: what matters most comes first.

A host on which programs start all the time has ten thousands of distinct stacks a minute, most of
them of short waits. Where there is no time for all, those left out keep their time, and lose their
frames unless a later window tells of them, and there is time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.model.window import Window
from aiflame.agent.symbolize.namer import Namer
from aiflame.agent.symbolize.raw_stacks import RawRow
from aiflame.agent.symbolize.stacks import LEFT_OUT, NamedStack, UnnamedStack

# Named at once: it takes 0.1 s. What a window says of processes is gone through for each.
NAMED_AT_ONCE = 256


def by_importance(window: Window) -> npt.NDArray[np.int64]:
    """Returns the order of a window's stacks: on the CPU, launches, and then by time."""
    stacks, samples = window.stacks["stack"], window.samples
    weights = np.zeros(len(stacks), np.uint64)
    if not len(stacks):
        return np.zeros(0, np.int64)
    order = np.argsort(stacks, kind="stable")
    at = order[np.searchsorted(stacks, samples["stack"], sorter=order) % len(stacks)]
    is_there = stacks[at] == samples["stack"]
    np.add.at(weights, at[is_there], samples["weight_ns"][is_there])
    urgent = samples["stack"][samples["kind"] == SampleClass.ON_CPU]
    is_first = np.isin(stacks, np.concatenate([urgent, window.launches["stack"]]))
    found: npt.NDArray[np.int64] = np.lexsort((-weights.astype(np.int64), ~is_first))
    return found


class BoundedNamer:
    """Names the first of the stacks of each window, for as long as there is time.

    Args:
        namer: Names them.
        budget_s: How long a window may take, None for as long as it takes.

    Attributes:
        jit_symbols: As `Namer.jit_symbols`.
    """

    def __init__(self, namer: Namer, budget_s: Callable[[Window], float | None]) -> None:
        self._namer = namer
        self._budget_s = budget_s
        self.jit_symbols: dict[tuple[int, int], str] = {}

    @property
    def losses(self) -> Counter[LossKind]:
        """What could not be named."""
        return self._namer.losses

    def expect(self, windows: Sequence[tuple[Window, Sequence[RawRow]]]) -> None:
        """As `Namer.expect`."""
        self._namer.expect(windows)

    def name(self, window: Window, stacks: Sequence[UnnamedStack]) -> list[NamedStack]:
        """Names stacks of a window, in their order; LEFT_OUT those that there is no time for."""
        budget_s = self._budget_s(window)
        chunk = len(stacks) if budget_s is None else NAMED_AT_ONCE
        until_s = time.monotonic() + (budget_s or 0)
        found: list[NamedStack] = []
        self.jit_symbols = {}
        while len(found) < len(stacks) and (not found or time.monotonic() < until_s):
            found += self._namer.name(window, stacks[len(found) : len(found) + chunk])
            self.jit_symbols.update(self._namer.jit_symbols)
        return found + [LEFT_OUT] * (len(stacks) - len(found))
