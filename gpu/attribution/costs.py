# SPDX-License-Identifier: Apache-2.0
"""What a launch of each stack and kernel costs, from stretches of time with known launches in them.

The samples of a stretch, and its length, are the sum of what its launches cost, about. Where
stretches are made of different launches, what each costs can be told; where they are not, nothing
can, and launches of one kernel cost what their work items say. So costs begin as equal by work
item, and are moved by an expectation-maximisation with a prior at that rule: what stretches cannot
tell apart stays as it was. Samples count what was done, in grains; lengths are fine, and contain
what other programs did. Each counts for less the more it scatters.

The costs come out positive, and the whole is a fixed number of passes over the launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Keys = npt.NDArray[np.integer[Any]]

# Passes close in on the best costs ever more slowly; on real runs errors fall no more with more.
_PASSES = 200
# What a pass moves costs by where they have come close enough.
_CLOSE = 1e-4

# A wait that returns late, and the calls up to the next launch, are a part of each stretch.
LEAST_BUSY = 0.8

# Some thousands tell costs as well as all do, which may be millions.
MOST_STRETCHES = 10_000

# How many standard deviations above what chance gains a fit has to gain.
_SIGNIFICANT = 3.0

# What the prior is worth, in launches of the mean cost.
_PRIOR_LAUNCHES = 0.5


def _ratio(over: F64, under: F64) -> F64:
    found: F64 = np.divide(over, under, out=np.ones_like(over), where=under > 0)
    return found


@dataclass(frozen=True, slots=True)
class Stretches:
    """Stretches of time in which launches ran, and how long these were.

    Attributes:
        of_launch: Which one each launch is in, ascending, shape (launches,).
        begin_ns: Of each stretch, shape (stretches,).
        end_ns: NaN where that is not known.
        samples: How many were taken in each.
        by_rank: Where these tell better than times how far a stretch has come.
        busy: In which part of a stretch, from its beginning on, nearly all samples are, 0 to 1.
    """

    of_launch: I64
    begin_ns: F64
    end_ns: F64
    samples: F64
    by_rank: npt.NDArray[np.bool_]
    busy: float

    def at(self, time_ns: I64) -> I64:
        """Returns the stretch that times are in."""
        return stretches_at(self.begin_ns, time_ns)


def stretches_at(begin_ns: F64, time_ns: I64) -> I64:
    """Returns the stretch that times are in, from when stretches begin, ascending."""
    found = np.searchsorted(begin_ns, time_ns, side="right").astype(np.int64) - 1
    return np.maximum(found, 0)


@dataclass(frozen=True, slots=True)
class Costs:
    """What launches take.

    Attributes:
        took_ns: Each row of launches, above 0.
        belief: How far stretches or measurements told what those of each stack take, 0 to 1; else
            it is as their work items say.
    """

    took_ns: F64
    belief: float


def costs_of(
    launches: npt.NDArray[np.void], names: I64, stretches: Stretches, measured_ns: F64
) -> Costs:
    """Finds what each row of launches takes.

    Args:
        launches: LAUNCH_DTYPE, in their order.
        names: A number for the name of the kernel of each.
        stretches: That they are in.
        measured_ns: How long one of each is known to take, NaN where that was not measured.
    """
    if not len(launches):
        return Costs(np.zeros(0), belief=1.0)
    count = launches["count"].astype(np.float64)
    _, name = np.unique(names, return_inverse=True)
    has_work = np.bincount(name, launches["work"] == 0)[name] == 0
    weight = np.maximum(np.where(has_work, launches["work"].astype(np.float64), count), 1.0)
    stretch = stretches.of_launch
    known = np.flatnonzero(~np.isnan(stretches.end_ns))
    if len(known) > MOST_STRETCHES:  # by chance: programs have periods
        chosen = np.random.default_rng(0).permutation(len(known))[:MOST_STRETCHES]
        known = np.sort(known[chosen])
    rows = np.flatnonzero(np.isin(stretch, known))
    used, of_used = weight[rows], np.searchsorted(known, stretch[rows])
    samples = stretches.samples[known]
    lengths_ns = (stretches.end_ns - stretches.begin_ns)[known]
    # Of stretches that are mostly idle, lengths say what the host did.
    observed = [samples] if stretches.busy < LEAST_BUSY else [samples, lengths_ns]
    # Of a kernel first, then of each stack that launches it.
    mean_ns = lengths_ns.sum() / max(float(used.sum()), 1.0)
    plain = np.full(int(name.max()) + 1, max(mean_ns, 1.0))
    of_name, _ = _fitted(plain, name[rows], used, of_used, *observed)
    keys = name.astype(np.int64) << 32 | launches["stack"]
    _, a_row, pair = np.unique(keys, return_index=True, return_inverse=True)
    of_pair, belief = _fitted(of_name[name[a_row]], pair[rows], used, of_used, *observed)
    fitted: F64 = np.maximum(of_pair[pair] * weight, 1.0)
    is_measured = ~np.isnan(measured_ns)
    took_ns = np.where(is_measured, measured_ns * count, fitted)
    return Costs(took_ns, 1.0 if is_measured.all() else belief)


def _sums(key: Keys, values: F64, size: int) -> F64:
    return np.bincount(key, values, size).astype(np.float64)


def _fitted(
    plain: F64,
    key: Keys,
    used: F64,
    stretch: I64,
    *observed: F64,
) -> tuple[F64, float]:
    """Fits the costs of keys to what was observed of stretches, from plain ones.

    Args:
        plain: By key, above 0.
        key: Of each launch.
        used: Its weight.
        stretch: Of each launch.
        observed: By stretch, each in a unit of its own.

    Returns:
        The costs, and how far they are to be believed; 0: they are the plain ones.
    """
    parts: list[tuple[F64, F64]] = []
    others: list[tuple[F64, F64]] = []
    by_chance = _by_chance(len(plain), int(np.unique(stretch).size))
    for one in observed:
        scale = one.sum() / max(float((used * plain[key]).sum()), 1.0)
        if scale > 0:
            own = used * plain[key] * scale
            factor = _factors(own, key, stretch, one, len(plain))
            fit = _Fit.of(own, own * factor[key], stretch, one, len(plain))
            chosen = parts if fit.explained > by_chance else others
            chosen.append((own / fit.scatter, one / fit.scatter))
    if not parts:
        return plain, 0.0
    # Both as if they were stretches of their own.
    owns, ones = zip(*parts, strict=True)
    shift = np.repeat(np.arange(len(parts)), len(stretch)) * len(observed[0])
    own, one = np.concatenate(owns), np.concatenate(ones)
    keys, stretches = np.tile(key, len(parts)), np.tile(stretch, len(parts)) + shift
    factor = _factors(own, keys, stretches, one, len(plain))
    belief = _belief(_gained(own, own * factor[keys], stretches, one), len(plain))
    factor = factor**belief
    # Lengths contain what other programs did; what samples contradict is none of launches' costs.
    for own, one in others:
        if _belief(-_gained(own, own * factor[key], stretch, one), len(plain)):
            return plain, 0.0
    found: F64 = plain * factor
    return found, belief


def _factors(own: F64, key: Keys, stretch: Keys, observed: F64, size: int) -> F64:
    """Returns by what the costs of keys differ from plain ones, which make `own` of each launch."""
    expected = _sums(key, own, size)
    prior = _PRIOR_LAUNCHES * _ratio(expected, _sums(key, (own > 0).astype(float), size))
    factor: F64 = np.ones(size)
    for _ in range(_PASSES):
        ratio = _ratio(observed, _sums(stretch, own * factor[key], len(observed)))
        explained = _sums(key, own * factor[key] * ratio[stretch], size)
        before, factor = factor, _ratio(prior + explained, prior + expected)
        if bool((abs(factor - before) < _CLOSE).all()):
            break
    return factor


def _left(expected: F64, observed: F64, scale: F64) -> float:
    """Returns Pearson's statistic; what is more scatters more."""
    used = scale > 0
    return float(np.sum((observed[used] - expected[used]) ** 2 / scale[used]))


@dataclass(frozen=True, slots=True)
class _Fit:
    """How well fitted costs explain what was observed of stretches.

    Attributes:
        scatter: The variance of what was observed in units of its mean, as the fit leaves it.
        explained: What part of the scatter that plain costs leave is explained, 0 to 1.
    """

    scatter: float
    explained: float

    @classmethod
    def of(cls, before: F64, after: F64, stretch: Keys, observed: F64, keys: int) -> _Fit:
        size = len(observed)
        scale = _sums(stretch, before, size)
        freedom = int((scale > 0).sum()) - keys
        left = _left(_sums(stretch, after, size), observed, scale)
        left_before = _left(scale, observed, scale)
        scatter = max(left / freedom, 1e-9) if freedom > 0 else 1.0
        return cls(scatter, 1 - left / left_before if left_before > 0 else 0.0)


def _by_chance(keys: int, stretches: int) -> float:
    """Returns what part of the scatter of stretches a fit of keys that are alike may explain.

    That part has a beta distribution (as R2 of a regression on noise): its mean and some standard
    deviations. It is beyond 1 where there are few stretches for each key.
    """
    by_chance, freedom = float(keys - 1), float(max(stretches - 1, 1))
    mean = by_chance / freedom
    variance = 2 * by_chance * max(freedom - by_chance, 0.0) / (freedom**2 * (freedom + 2))
    return mean + _SIGNIFICANT * variance**0.5 if mean < 1 else 1.0


def _gained(before: F64, after: F64, stretch: Keys, observed: F64) -> float:
    """Returns by how much nearer to what was observed a fit is, in what that scatters by."""
    size = len(observed)
    scale = _sums(stretch, before, size)
    return _left(scale, observed, scale) - _left(_sums(stretch, after, size), observed, scale)


def _belief(gained: float, keys: int) -> float:
    """Returns how much of a fit is to be believed, 0 to 1.

    Chance alone gains as much as there are costs, with twice the variance: a fit that gains no more
    than that, and three deviations, is none. Of one that does, the part beyond (James and Stein,
    1961).
    """
    by_chance = float(keys - 1)
    if gained <= by_chance + _SIGNIFICANT * (2 * by_chance) ** 0.5:
        return 0.0
    return 1 - by_chance / gained
