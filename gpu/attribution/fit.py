# SPDX-License-Identifier: Apache-2.0
"""Learns what a launch costs on each stack from how samples follow launches over the seconds.

Samples of one kernel in one second are about the sum, over the stacks that launched it there, of
weight times cost. Where the mixture of stacks differs between seconds, the costs can be told; where
it does not, nothing can. So the costs begin as equal, which is the plain rule, and are moved by an
expectation-maximisation of the Poisson likelihood with a prior at that rule: what seconds cannot
tell apart stays as it was.

A fit is believed on two conditions, else the plain rule stands. It has to explain the samples
better than chance would. And it has to leave little to explain: where a queue runs behind, or a
device drops what is too much, samples are not the sum of a second's launches, and no costs make
them so, though some come closer than others.

The costs come out positive, and the whole is a fixed number of passes over the rows of launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

# What the prior is worth, in samples; it keeps costs of rare stacks from running to 0 or far up.
_PRIOR_SAMPLES = 1.0

# Passes close in on the best costs ever more slowly; the simulator's errors fall no more with more.
_PASSES = 100

# How many standard deviations above what chance gains a fit has to gain.
_SIGNIFICANT = 3.0

# How much of what scatters beyond chance by the plain rule a fit may leave. In the simulator right
# fits leave 0 to 0.1; those of devices that drop samples, or are behind, 0.26 and more.
_MAX_LEFT = 0.2


@dataclass(frozen=True, slots=True)
class Rows:
    """Launches by window, ascending; all of shape (rows,)."""

    window: I64
    kernel: I64
    party: I64
    weight: F64


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of them; all of shape (windows,).

    Attributes:
        samples: Of each window.
        is_sampled: Whether the device was looked at: else the absence of samples tells nothing.
    """

    samples: F64
    is_sampled: npt.NDArray[np.bool_]


def _ratio(over: F64, under: F64) -> F64:
    found: F64 = np.divide(over, under, out=np.zeros_like(over), where=under > 0)
    return found


class _Fit:
    """The fit of all kernels at once; a pair is a kernel and a party."""

    def __init__(self, rows: Rows, seen: Seen) -> None:
        self._rows = rows
        is_used = seen.is_sampled | (seen.samples > 0)
        self._samples = seen.samples
        self._kernels = int(rows.kernel[-1]) + 1
        self._kernel = np.zeros(len(is_used), np.int64)
        self._kernel[rows.window] = rows.kernel
        keys, self._pair = np.unique((rows.kernel << 32) | rows.party, return_inverse=True)
        self._parties = np.bincount(keys >> 32, minlength=self._kernels)
        used = rows.weight * is_used[rows.window]
        in_all = np.bincount(rows.kernel, used, self._kernels).astype(np.float64)
        rate = _ratio(self._by_kernel(self._samples), in_all)
        self._plain = used * rate[rows.kernel]
        self._freedom = self._by_kernel(is_used.astype(np.float64)) - self._parties

    def _by_kernel(self, values: F64) -> F64:
        return np.bincount(self._kernel, values, self._kernels).astype(np.float64)

    def _by_window(self, values: F64) -> F64:
        return np.bincount(self._rows.window, values, len(self._samples)).astype(np.float64)

    def costs(self) -> F64:
        """Returns the cost of each pair relative to the plain rule."""
        in_all = np.bincount(self._pair, self._plain)
        costs: F64 = np.ones(len(in_all))
        for _ in range(_PASSES):
            ratio = _ratio(self._samples, self._by_window(costs[self._pair] * self._plain))
            explained = np.bincount(self._pair, self._plain * ratio[self._rows.window])
            costs = (_PRIOR_SAMPLES + costs * explained) / (_PRIOR_SAMPLES + in_all)
        return costs

    def is_believed(self, costs: F64) -> npt.NDArray[np.bool_]:
        """Whether costs are to be used, by kernel.

        Twice the gain in logarithmic likelihood has the mean and half the variance of a chi-squared
        of that many free costs, were the plain rule right and samples were Poisson; what scatters
        more counts for less. The scatter is Pearson's statistic by degree of freedom.
        """
        plain = self._by_window(self._plain)
        fitted = self._by_window(costs[self._pair] * self._plain)
        gain = self._by_kernel(self._samples * np.log(_ratio(fitted, plain) + (plain <= 0)))
        gain += self._by_kernel(plain - fitted)
        beyond_chance = [
            np.maximum(_ratio(self._by_kernel(_ratio(off**2, expected)), self._freedom) - 1, 0.0)
            for expected, off in ((plain, self._samples - plain), (fitted, self._samples - fitted))
        ]
        free = self._parties - 1.0
        needed = (free + _SIGNIFICANT * np.sqrt(2 * free)) * (1 + beyond_chance[1])
        leaves_little = beyond_chance[1] <= _MAX_LEFT * beyond_chance[0]
        believed: npt.NDArray[np.bool_] = (self._freedom > 0) & (2 * gain > needed) & leaves_little
        return believed

    def by_row(self, costs: F64) -> F64:
        """Returns the costs to use for each row."""
        believed = self.is_believed(costs)[self._rows.kernel]
        found: F64 = np.where(believed, costs[self._pair], 1.0)
        return found


def fitted(rows: Rows, seen: Seen) -> F64:
    """Fits costs to samples.

    Returns:
        The cost of a unit of weight in each row, relative to that of the kernel's launches in all;
        1 where no fit is believed. Shape (rows,), above 0.
    """
    fit = _Fit(rows, seen)
    return fit.by_row(fit.costs())
