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
from aiflame.gpu.attribution.cells import Launched, Observed, Sampled, samples_of_cells

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Keys = npt.NDArray[np.integer[Any]]

# Passes close in on the best costs ever more slowly; on real runs errors fall no more with more.
_PASSES = 200
# What a pass moves costs by where they have come close enough.
_CLOSE = 1e-4

# A wait that returns late, and the calls up to the next launch, are a part of each stretch.
LEAST_BUSY = 0.8
# Of samples, which tell up to where stretches are busy; a few that were taken late tell nothing.
_NEARLY_ALL = 0.98

# Some thousands tell costs as well as all do, which may be millions.
MOST_STRETCHES = 10_000

# To what part of them no two stretches of the same launches are alike.
ALIKE = 0.01

# How many standard deviations above what chance gains a fit has to gain.
_SIGNIFICANT = 3.0

# What the prior is worth, in launches of the mean cost.
_PRIOR_LAUNCHES = 0.5

# As if each kernel had been seen by so many more: one that was not costs something.
_PRIOR_SAMPLES = 0.5


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
        is_whole: Where all launches were seen.
        samples: How many were taken in each.
        by_rank: Where these tell better than times how far a stretch has come.
        parts: At which parts of stretches samples are, 0 to 1, ascending.
    """

    of_launch: I64
    begin_ns: F64
    end_ns: F64
    is_whole: npt.NDArray[np.bool_]
    samples: F64
    by_rank: npt.NDArray[np.bool_]
    parts: F64

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Which ones tell what launches cost; shape (stretches,)."""
        found: npt.NDArray[np.bool_] = self.is_whole & ~np.isnan(self.end_ns)
        return found

    @property
    def busy(self) -> float:
        """In which part of a stretch, from its beginning on, nearly all samples are, 0 to 1."""
        return min(float(np.quantile(self.parts, _NEARLY_ALL)) / _NEARLY_ALL, 1.0)

    def done(self, part: F64) -> F64:
        """Returns how much of a stretch's work is done when parts of its time are over, 0 to 1.

        Work begins late, and ends before a wait is over; samples show when it is done.
        """
        size = len(self.parts)
        found: F64 = np.interp(part, self.parts, (np.arange(size) + 0.5) / size)
        return found

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
        told: Some rows of launches, which are in stretches of known length.
        observed: What tells of costs, of cells of these rows.
    """

    took_ns: F64
    belief: float
    told: I64
    observed: tuple[Observed, ...]


def costs_of(
    launches: npt.NDArray[np.void],
    names: I64,
    stretches: Stretches,
    sampled: Sampled,
    measured_ns: F64,
    *,
    is_in_order: bool,
) -> Costs:
    """Finds what each row of launches takes.

    Args:
        launches: LAUNCH_DTYPE, in their order.
        names: A number for the name of the kernel of each.
        stretches: That they are in.
        sampled: What was sampled there.
        measured_ns: How long one of each is known to take, NaN where that was not measured.
        is_in_order: Whether they are of one queue, and ran in their order.
    """
    if not len(launches):
        return Costs(np.zeros(0), 1.0, np.zeros(0, np.int64), ())
    count = launches["count"].astype(np.float64)
    numbers, name = np.unique(names, return_inverse=True)
    has_work = np.bincount(name, launches["work"] == 0)[name] == 0
    weight = np.maximum(np.where(has_work, launches["work"].astype(np.float64), count), 1.0)
    keys = name.astype(np.int64) << 32 | launches["stack"]
    _, a_row, pair = np.unique(keys, return_index=True, return_inverse=True)
    known = np.flatnonzero(stretches.is_known)
    if len(known) > MOST_STRETCHES:  # by chance: programs have periods
        chosen = np.random.default_rng(0).permutation(len(known))[:MOST_STRETCHES]
        known = np.sort(known[chosen])
    rows = np.flatnonzero(np.isin(stretches.of_launch, known))
    launched = Launched(stretches.of_launch[rows], names[rows], pair[rows], weight[rows])
    samples = samples_of_cells(launched, sampled, is_in_order=is_in_order)
    lengths_ns = (stretches.end_ns - stretches.begin_ns)[known]
    # Samples name their kernel: they tell what a work item of each costs.
    name_of_cell = np.zeros(len(samples.value), np.int64)
    name_of_cell[samples.cell] = name[rows]
    of_name = _sums(name_of_cell, samples.value, len(numbers)) + _PRIOR_SAMPLES
    work = _sums(name[rows], weight[rows], len(numbers)) + 1.0
    plain = of_name / work * max(float(lengths_ns.sum()) / float(of_name.sum()), 1.0)
    observed = [samples]
    if stretches.busy >= LEAST_BUSY:
        # Of stretches that are mostly idle, lengths say what the host did.
        observed.append(Observed(np.searchsorted(known, launched.stretch), lengths_ns))
    free = len(a_row) - len(numbers)
    of_pair, belief = _fitted(plain[name[a_row]], pair[rows], weight[rows], observed, free)
    fitted: F64 = np.maximum(of_pair[pair] * weight, 1.0)
    is_measured = ~np.isnan(measured_ns)
    took_ns = np.where(is_measured, measured_ns * count, fitted)
    belief = 1.0 if is_measured.all() else belief
    return Costs(took_ns, belief, rows, tuple(observed))


def _sums(key: Keys, values: F64, size: int) -> F64:
    return np.bincount(key, values, size).astype(np.float64)


def _fitted(
    plain: F64, key: Keys, used: F64, observed: list[Observed], free: int
) -> tuple[F64, float]:
    """Fits the costs of keys to what was observed, from plain ones.

    Args:
        plain: By key, above 0.
        key: Of each launch.
        used: Its weight.
        observed: Each in a unit of its own.
        free: How many costs there are that nothing has told yet.

    Returns:
        The costs, and how far they are to be believed; 0: they are the plain ones.
    """
    parts: list[tuple[F64, Observed]] = []
    others: list[tuple[F64, Observed]] = []
    for one in observed:
        scale = one.value.sum() / max(float((used * plain[key]).sum()), 1.0)
        if scale > 0:
            own = used * plain[key] * scale
            factor = _factors(own, key, one, len(plain))
            fit = _Fit.of(own, own * factor[key], one, free)
            chosen = parts if fit.explained > _by_chance(free, len(one.value)) else others
            chosen.append((own / fit.scatter, Observed(one.cell, one.value / fit.scatter)))
    if not parts:
        return plain, 0.0
    # All as if they were cells of one.
    own = np.concatenate([of_part for of_part, _ in parts])
    shift = np.cumsum([0, *(len(one.value) for _, one in parts)])
    cell = np.concatenate([one.cell + first for (_, one), first in zip(parts, shift, strict=False)])
    together = Observed(cell, np.concatenate([one.value for _, one in parts]))
    keys = np.tile(key, len(parts))
    factor = _factors(own, keys, together, len(plain))
    belief = _belief(_gained(own, own * factor[keys], together), free)
    factor = factor**belief
    # Lengths contain what other programs did; what samples contradict is none of launches' costs.
    for own, one in others:
        if _belief(-_gained(own, own * factor[key], one), free):
            return plain, 0.0
    found: F64 = plain * factor
    return found, belief


def _factors(own: F64, key: Keys, observed: Observed, size: int) -> F64:
    """Returns by what the costs of keys differ from plain ones, which make `own` of each launch."""
    expected = _sums(key, own, size)
    prior = _PRIOR_LAUNCHES * _ratio(expected, _sums(key, (own > 0).astype(float), size))
    factor: F64 = np.ones(size)
    for _ in range(_PASSES):
        ratio = _ratio(observed.value, observed.sums(own * factor[key]))
        explained = _sums(key, own * factor[key] * ratio[observed.cell], size)
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
    def of(cls, before: F64, after: F64, observed: Observed, free: int) -> _Fit:
        scale = observed.sums(before)
        freedom = int((scale > 0).sum()) - free - 1
        left = _left(observed.sums(after), observed.value, scale)
        left_before = _left(scale, observed.value, scale)
        least = ALIKE**2 * float(scale.mean()) if len(scale) else 1.0
        scatter = max(left / freedom, least, 1e-9) if freedom > 0 else 1.0
        return cls(scatter, 1 - left / left_before if left_before > 0 else 0.0)


def _by_chance(free: int, cells: int) -> float:
    """Returns what part of the scatter of cells a fit of so many costs that are alike may explain.

    That part has a beta distribution (as R2 of a regression on noise): its mean and some standard
    deviations. It is beyond 1 where there are few cells for each cost.
    """
    by_chance, freedom = float(free), float(max(cells - 1, 1))
    mean = by_chance / freedom
    variance = 2 * by_chance * max(freedom - by_chance, 0.0) / (freedom**2 * (freedom + 2))
    return mean + _SIGNIFICANT * variance**0.5 if mean < 1 else 1.0


def _gained(before: F64, after: F64, observed: Observed) -> float:
    """Returns by how much nearer to what was observed a fit is, in what that scatters by."""
    scale = observed.sums(before)
    return _left(scale, observed.value, scale) - _left(observed.sums(after), observed.value, scale)


def most_by_chance(free: int) -> float:
    """Returns what a fit of so many costs gains at most where they are alike.

    Chance alone gains as much as there are costs, with twice the variance.
    """
    return float(free + _SIGNIFICANT * (2 * free) ** 0.5)


def _belief(gained: float, free: int) -> float:
    """Returns how much of a fit is to be believed, 0 to 1.

    One that gains no more than chance does is none. Of one that does, the part beyond (James and
    Stein, 1961).
    """
    if gained <= most_by_chance(free):
        return 0.0
    return 1 - free / gained
