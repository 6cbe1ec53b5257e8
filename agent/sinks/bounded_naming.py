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
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.model.window import Window
from aiflame.agent.processes.owners import owners_of, past_fair_share
from aiflame.agent.symbolize.namer import Namer
from aiflame.agent.symbolize.raw_stacks import RawRow
from aiflame.agent.symbolize.stacks import LEFT_OUT, NamedStack, UnnamedStack

# Named at once: it takes 0.1 s. What a window says of processes is gone through for each.
NAMED_AT_ONCE = 256
# Of these, those that containers share fairly. The rest goes by time alone: a host is of use for
# what works most on it.
_DIVIDED = NAMED_AT_ONCE // 2


F64 = npt.NDArray[np.float64]


def by_importance(window: Window, is_named: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Returns the order of a window's stacks without names: by what would be lost without each.

    That is the sum of three shares: of the time on the CPU, of the waits, and of what devices did
    for its launches. So the first ones leave least without frames. Who has a stack for each sample
    on the CPU, some thousand, would else leave no time for the few that launch all kernels, nor for
    those of most waits.

    Of those that are named in any case, one half is divided fairly among containers, whose stacks
    come before all others: one that makes up a stack for each sample takes no other's place there.

    Args:
        window: One.
        is_named: Which of its stacks have names from windows before; shape (stacks,).
    """
    stacks, samples, launches = window.stacks["stack"], window.samples, window.launches
    if not len(stacks):
        return np.zeros(0, np.int64)
    order = np.argsort(stacks, kind="stable")

    def shares(keys: npt.NDArray[np.uint64], values: F64) -> F64:
        at = order[np.searchsorted(stacks, keys, sorter=order) % len(stacks)]
        is_there = stacks[at] == keys
        return _shares(_sums(at[is_there], values[is_there], len(stacks)))

    is_on_cpu = samples["kind"] == SampleClass.ON_CPU
    weights = samples["weight_ns"].astype(np.float64)
    importance = shares(launches["stack"], _weights_of_launches(window))
    for is_so in (is_on_cpu, ~is_on_cpu):
        importance += shares(samples["stack"][is_so], weights[is_so])
    found: npt.NDArray[np.int64] = np.argsort(-importance, kind="stable")
    found = found[~is_named[found]]
    if len(found) <= NAMED_AT_ONCE:
        return found
    facts = {"cgroups": window.cgroups, "processes": window.processes}
    owners = owners_of(window.stacks["process"][found], facts, window.texts)
    is_past = past_fair_share(owners, _DIVIDED)
    return found[np.argsort(is_past, kind="stable")]


def _weights_of_launches(window: Window) -> F64:
    """Returns what devices did for the launches of each row, as far as the window tells.

    Each kernel's part is divided by the number of launches. It is its share of the times and of
    the samples, or, where there is neither, of the launches.
    """
    launches, samples, times = window.launches, window.device_samples, window.kernel_times
    kernel, counts = launches["kernel"], launches["count"].astype(np.float64)
    if not len(samples) and not len(times):
        return counts
    codes = window.codes[np.argsort(window.codes["code"])]
    sampled = codes["kernel"][np.searchsorted(codes["code"], samples["code"])]
    _, at = np.unique(np.concatenate([kernel, times["kernel"], sampled]), return_inverse=True)
    of_launch, of_time, of_sample = np.split(at, np.cumsum([len(kernel), len(times)]))
    parts = _shares(_sums(of_time, times["duration_ns"], len(at)))
    parts += _shares(_sums(of_sample, samples["count"], len(at)))
    launched = _sums(of_launch, counts, len(at))
    weights: F64 = counts * parts[of_launch] / np.maximum(launched[of_launch], 1)
    return weights


def _sums(at: npt.NDArray[np.int64], values: npt.NDArray[Any], size: int) -> F64:
    found = np.zeros(size)
    np.add.at(found, at, values)
    return found


def _shares(values: F64) -> F64:
    return values / max(float(values.sum()), 1e-300)


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
