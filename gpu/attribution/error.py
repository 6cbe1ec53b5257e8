# SPDX-License-Identifier: Apache-2.0
"""By how much shared samples are probably with wrong stacks, estimated for the recording at hand.

Samples are shared in pools: those of one kernel name in one stretch of time, or in one second. Two
things are not known there, and both are told by the recording itself:

- How many of a pool's samples each launch has: it has a whole number, and does not always take the
  same. So what a stack has scatters by its launches. By how much is told by what stretches have,
  beside what their launches cost.
- What launches cost. Where stretches told it, they told it with an error (that of a fit by weighted
  least squares, which is what leaving out one stretch after the other comes to). Where they did
  not, launches were taken to cost what their work items say, and nothing in the recording tells
  whether they do: by how much it is off otherwise is an estimate of its own.

What is exact is right, and has no part in either. All is added up as variances of the samples that
each stack has; of several processes, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import pi, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NONE, SharingError
from aiflame.gpu.attribution.cells import UNEQUAL
from aiflame.gpu.attribution.costs import ALIKE, Costs, Stretches
from aiflame.gpu.attribution.rounding import Pools
from aiflame.gpu.attribution.sharing import INTERVAL_BITS, Windows
from aiflame.gpu.attribution.timeline import Timeline

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Samples: of a launch that takes several, how many it has scatters by one or so at its two ends (a
# number that is rounded, of two processors, has a variance of a sixth each).
_ENDS = 0.4
# And by this part of all that it has, as other programs and memory have it, where nothing tells
# better: what the truth programs scatter by on a busy machine.
_SCATTER = 0.15
# As much as is known of that beforehand, in stretches.
_PRIOR_STRETCHES = 4.0

# Costs that are told apart; what seldom runs is taken as one.
_MOST_COSTS = 64

# There may be a million, with so many costs each.
_POOLS_AT_ONCE = 4096

# The mean of a normal distribution's absolute value, in standard deviations.
_MEAN_ABSOLUTE = sqrt(2 / pi)


@dataclass(frozen=True, slots=True)
class Entries:
    """Launches that share the samples of pools; all of shape (entries,).

    Attributes:
        pool: Which pool, from 0.
        stack: Who launched them.
        count: How many launches.
        samples: How many of the pool's samples they have, by the estimate.
    """

    pool: I64
    stack: I64
    count: F64
    samples: F64


@dataclass(slots=True)
class Variances:
    """What is not known of the samples that stacks have; shape (stacks,), in samples squared.

    Attributes:
        of_launches: How many each launch had.
        of_costs: What launches cost, where that was told.
        if_unequal: And where it was not, if launches of equal work cost unequal time.
    """

    stacks: int
    of_launches: F64 = field(init=False)
    of_costs: F64 = field(init=False)
    if_unequal: F64 = field(init=False)

    def __post_init__(self) -> None:
        self.of_launches, self.of_costs, self.if_unequal = np.zeros((3, self.stacks))

    def add(self, entries: Entries, scatter: float, belief: float, costs: F64 | None) -> None:
        """Adds those of some pools.

        Args:
            entries: What shares them.
            scatter: As `scatter_of` says.
            belief: How far costs were told, 0 to 1.
            costs: By stack, the variance of what each has for what is not known of costs.
        """
        self.of_launches += _by_launches(entries, scatter, self.stacks)
        if costs is not None:
            self.of_costs += belief * costs
            self.if_unequal += (1 - belief) * costs

    def error(self, samples: int) -> SharingError:
        """Returns the error of a recording of so many samples."""
        if not samples:
            return SharingError(0.0, 0.0)
        told = self.of_launches + self.of_costs
        expected, if_unequal = (_off(v) / samples for v in (told, told + self.if_unequal))
        return SharingError(expected, if_unequal)


def add_by_time(
    variances: Variances, timeline: Timeline, samples: npt.NDArray[np.void], name: I64
) -> None:
    """Adds what is not known of samples that are shared by the order of launches.

    Args:
        variances: Where to.
        timeline: Of their process.
        samples: DEVICE_SAMPLE_DTYPE.
        name: A number for the name of the kernel of each.
    """
    stretches, rows = timeline.stretches, timeline.rows
    middle_ns = (samples["begin_ns"].astype(np.int64) + samples["end_ns"].astype(np.int64)) // 2
    of_sample = stretches.at(middle_ns) << 32 | name
    pools, pool = np.unique(of_sample, return_inverse=True)
    in_pool = _sums(pool, samples["count"], len(pools))
    of_row = stretches.of_launch << 32 | rows.name
    at = np.minimum(np.searchsorted(pools, of_row), len(pools) - 1)
    shares = np.flatnonzero((pools[at] == of_row) & (rows.stack != NONE))
    at, took_ns = at[shares], rows.costs.took_ns[shares]
    whole = _sums(at, took_ns, len(pools))
    entries = Entries(at, rows.stack[shares], rows.count[shares], in_pool[at] * took_ns / whole[at])
    scatter = scatter_of(stretches, rows.count, rows.costs.took_ns)
    stack = np.where(rows.stack == NONE, variances.stacks, rows.stack)
    costs = variance_by_costs(entries, variances.stacks, Told(rows.costs, stack))
    variances.add(entries, scatter, rows.costs.belief, costs)


def add_by_second(
    variances: Variances, windows: Windows, pools: Pools, in_pool: F64, times_ns: F64
) -> None:
    """Adds what is not known of samples that are shared by the second.

    Args:
        variances: Where to.
        windows: Of seconds.
        pools: Their weights.
        in_pool: How many samples each has, shape (pools,).
        times_ns: What launches were measured to take, NaN where they were not.
    """
    whole = _sums(pools.pool, pools.weight, pools.count)
    samples = (in_pool / whole)[pools.pool] * pools.weight
    chosen = (samples > 0) & (windows.launches.stack != NONE)
    launches = windows.launches.where(chosen)
    entries = Entries(pools.pool[chosen], launches.stack, launches.count, samples[chosen])
    is_measured = bool((times_ns > 0).all())
    costs = None if is_measured else variance_by_costs(entries, variances.stacks, None)
    variances.add(entries, _SCATTER, 0.0, costs)
    name = windows.keys >> INTERVAL_BITS
    goes_on = np.append(name[1:] == name[:-1], False)
    variances.of_launches += _by_crossing(entries, goes_on, variances.stacks)


def _by_crossing(entries: Entries, goes_on: Mask, stacks: int) -> F64:
    """Returns the variance for launches that run on into the next second, whose launches get it.

    What comes in at one end of a second goes out at the other, so that only what differs between
    the shares of the two is wrong; and of that all but what always runs on cancels out in the end.

    Args:
        entries: Of seconds; by pool.
        goes_on: Which pools another one of the same kernel follows, shape (pools,).
        stacks: How many there are.
    """
    size = len(goes_on)
    whole = np.maximum(_sums(entries.pool, entries.samples, size), 1e-12)
    part = entries.samples / whole[entries.pool]
    one = entries.samples / np.maximum(entries.count, 1.0)
    # What runs on is any part, as likely as any other, of the launch that is under way.
    mean_square = _sums(entries.pool, part * one**2 / 3, size)
    mean = _sums(entries.pool, part * one / 2, size)
    crossing = np.where(goes_on, mean_square - mean**2, 0.0)
    # Shares of this second, and less those of the one before.
    key = np.concatenate((entries.pool, entries.pool + 1)) * stacks + np.tile(entries.stack, 2)
    keys, at = np.unique(key, return_inverse=True)
    differs = _sums(at, np.concatenate((-part, part)), len(keys))
    boundary = keys // stacks - 1
    variance = np.where(boundary >= 0, crossing[np.clip(boundary, 0, size - 1)], 0.0) * differs**2
    return _sums(keys % stacks, variance, stacks)


def add_unseen(variances: Variances, name: I64, stack: I64, count: I64, one: F64) -> None:
    """Adds what is not known of samples that were taken before the first launch that was seen.

    They are of launches that were under way then, of which each may be any stack's.

    Args:
        variances: Where to.
        name: A number for the name of the kernel of each part.
        stack: That it was given to.
        count: How many samples.
        one: How many samples a launch has, by name.
    """
    is_known = stack != NONE
    name, stack, count = name[is_known], stack[is_known], count[is_known]
    keys, at = np.unique(name * variances.stacks + stack, return_inverse=True)
    given = _sums(at, count, len(keys))
    name, stack = keys // variances.stacks, keys % variances.stacks
    whole = _sums(name, given, len(one))[name]
    together = np.minimum(one[name], whole) / whole
    variances.of_launches += _sums(stack, given * (whole - given) * together, variances.stacks)


def _off(variance: F64) -> float:
    """Returns how many samples are with the wrong stack in the mean, all in all."""
    return 0.5 * _MEAN_ABSOLUTE * float(np.sqrt(np.maximum(variance, 0.0)).sum())


def _variance_of_launches(count: F64, samples: F64, scatter: float) -> F64:
    """Returns the variance of how many samples rows of launches have."""
    one = samples / np.maximum(count, 1.0)
    found: F64 = count * np.minimum(one, _ENDS + scatter * one)
    return found


def _by_launches(entries: Entries, scatter: float, stacks: int) -> F64:
    """Returns the variance of what each stack has, the sum of each pool being known."""
    variance = _variance_of_launches(entries.count, entries.samples, scatter)
    key = entries.pool * stacks + entries.stack
    keys, at = np.unique(key, return_inverse=True)
    of_key = _sums(at, variance, len(keys))
    pool, stack = keys // stacks, keys % stacks
    of_pool = _sums(pool, of_key)[pool] if len(pool) else of_key
    left = of_key - np.divide(of_key**2, of_pool, out=np.zeros_like(of_key), where=of_pool > 0)
    return _sums(stack, left, stacks)


def scatter_of(stretches: Stretches, count: F64, took_ns: F64) -> float:
    """Returns by which part of its samples what a launch has scatters, 0 to 1.

    Args:
        stretches: In which launches are.
        count: How many launches each row stands for.
        took_ns: What each row takes.
    """
    size = len(stretches.begin_ns)
    took = _sums(stretches.of_launch, took_ns, size)
    used = stretches.is_known & (took > 0)
    rate = stretches.samples[used].sum() / max(took[used].sum(), 1.0)
    expected = took * rate
    ends = _variance_of_launches(count, took_ns * rate, 0.0)
    by_ends = _sums(stretches.of_launch, ends, size)[used]
    left = float(((stretches.samples[used] - expected[used]) ** 2).sum() - by_ends.sum())
    whole = float(expected[used].sum())
    prior = _PRIOR_STRETCHES * whole / max(int(used.sum()), 1)
    found = (left + _SCATTER * prior) / max(whole + prior, 1e-9)
    return min(max(found, 0.0), 1.0)


def variance_by_costs(entries: Entries, stacks: int, told: Told | None) -> F64:
    """Returns the variance of what each stack has for what is not known of launches' costs.

    Args:
        entries: What shares pools.
        stacks: How many there are.
        told: What tells costs; None: nothing does.
    """
    weight = _sums(entries.stack, entries.samples, stacks)
    most = np.argsort(-weight, kind="stable")[: _MOST_COSTS - 1]
    of_stack = np.full(stacks, len(most))  # the rest
    of_stack[most] = np.arange(len(most))
    size = len(most) + 1
    slope = _slope(entries, of_stack, size)
    information = _information(np.append(of_stack, len(most)), size, told)
    # What is known beforehand is added where nothing is told, which an inversion would not survive.
    values, vectors = np.linalg.eigh(information)
    along = slope @ vectors
    variance = along**2 @ (1 / (np.maximum(values, 0.0) + UNEQUAL**-2))
    found = np.zeros(stacks)
    found[most] = variance[: len(most)]
    return found


def _slope(entries: Entries, of_stack: I64, size: int) -> F64:
    """Returns by how much the samples of each change with the logarithm of another one's cost."""
    order = np.argsort(entries.pool, kind="stable")
    pool, cost = entries.pool[order], of_stack[entries.stack[order]]
    samples = entries.samples[order]
    found: F64 = np.zeros((size, size))
    at = 0
    while at < len(pool):
        first = int(pool[at])
        end = int(np.searchsorted(pool, first + _POOLS_AT_ONCE))
        shape = (_POOLS_AT_ONCE, size)
        by_cost = _table(pool[at:end] - first, cost[at:end], samples[at:end], shape)
        whole = np.maximum(by_cost.sum(axis=1, keepdims=True), 1e-12)
        found += np.diag(by_cost.sum(axis=0)) - (by_cost / whole).T @ by_cost
        at = end
    return found


def _table(row: I64, column: I64, values: F64, shape: tuple[int, int]) -> F64:
    """Returns sums by row and column."""
    flat = _sums(row * shape[1] + column, values, shape[0] * shape[1])
    found: F64 = flat.reshape(shape)
    return found


def _sums(key: npt.NDArray[np.integer[Any]], values: npt.NDArray[Any], size: int = 0) -> F64:
    """Returns the sums of values by key."""
    return np.bincount(key, values, size).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Told:
    """What tells costs, and of which stack each row of launches is."""

    costs: Costs
    stack: I64


def _information(of_stack: I64, size: int, told: Told | None) -> F64:
    """Returns what was observed tells of the logarithms of costs: an inverse covariance."""
    found: F64 = np.zeros((size, size))
    if told is None:
        return found
    rows = told.costs.told
    for one in told.costs.observed:
        shape = (len(one.value), size)
        took = _table(one.cell, of_stack[told.stack[rows]], told.costs.took_ns[rows], shape)
        whole = took.sum(axis=1)
        freedom = len(one.value) - int((took.sum(axis=0) > 0).sum())
        if freedom <= 0:
            continue
        rate = one.value.sum() / max(float(whole.sum()), 1.0)
        expected = np.maximum(whole * rate, 1e-12)
        left = float(((one.value - expected) ** 2 / expected).sum())
        unit = max(left / freedom, ALIKE**2 * float(expected.mean()))
        scaled = took * rate / np.sqrt(expected * unit)[:, None]
        by_one = scaled.T @ scaled
        found = by_one if np.trace(by_one) > np.trace(found) else found
    return found
