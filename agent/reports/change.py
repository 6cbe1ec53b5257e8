# SPDX-License-Identifier: Apache-2.0
"""Whether shares of time differ by more than chance.

A sample is not independent of the next one: a host that is in a phase stays there, and hosts
differ. So the variance of a share is not that of a coin. It is taken from groups: of (host, window)
in a store, of seconds in a recording. For the ratio p = sum(x) / sum(n) over m groups, with
d = x - p n of each,

    var(p) = m / (m - 1) * sum(d^2) / sum(n)^2

(Cochran, Sampling Techniques, 3rd ed. 1977, 6.3 and 9.8: ratio estimator, ultimate clusters). The
share then counts as one of n_eff = p (1 - p) / var(p) independent samples, at most as many as there
were (effective sample size: Kish, Survey Sampling 1965, 8.2); what one side shows of that holds for
the other, too. The interval of the difference of two shares is Newcombe's hybrid score
interval (Statistics in Medicine 17, 1998, 873-890, method 10), which keeps its level with small
shares, with Student's t for the normal quantile, of as many degrees of freedom as Welch and
Satterthwaite give it.

All functions are compared at once: an error of 5 % for all of them together is 5 % divided by their
number for one (Bonferroni).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.errors import AiflameError
from aiflame.agent.reports.table import Table, percent
from aiflame.agent.reports.words import showable

F64 = npt.NDArray[np.float64]

# Of a side. Fewer say nothing about functions of some percent, whatever the formula.
LEAST_SAMPLES = 1_000

# Of a side: with fewer, the variance itself is little known, and the interval is wider than any
# change that one looks for.
LEAST_GROUPS = 8

# That any function is called grown that has not.
FALSE_ALARM = 0.05


class TooFewSamples(AiflameError):
    """A comparison that would say nothing."""

    exit_code = 5


@dataclass(frozen=True, slots=True)
class Side:
    """One function on one side of a comparison.

    Attributes:
        own: Time of the function by group; shape (groups,).
        whole: Time of all functions by group; shape (groups,).
        samples: How many that were, of all functions.
        hosts: Of how many, where groups are of hosts and these differ by how they are used; 0 where
            groups are parts of time, or of waits, which differ by themselves.
    """

    own: F64
    whole: F64
    samples: int
    hosts: int = 0

    @property
    def share(self) -> float:
        """Of the function, 0 to 1."""
        whole = float(self.whole.sum())
        return float(self.own.sum()) / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """How a share changed, 0 to 1.

    Attributes:
        before: The share on one side.
        after: On the other.
        low: The difference is above this.
        high: And below this, each with the confidence asked for.
    """

    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """After less before."""
        return self.after - self.before


def change(before: Side, after: Side, compared: int = 1, error: float = FALSE_ALARM) -> Change:
    """Returns how a function's share changed, and what chance leaves open.

    Args:
        before: One side.
        after: The other.
        compared: How many functions are looked at in all.
        error: Chance that any of all lower bounds is above the truth; the same for upper ones.
    """
    base, new = _Size.of(before), _Size.of(after)
    sizes = [max(base, new.lent(base), key=_inflation), max(new, base.lent(new), key=_inflation)]
    counts = [size.samples / size.inflation for size in sizes]
    shares = (before.share, after.share)
    variances = [p * (1 - p) / n for p, n in zip(shares, counts, strict=True)]
    freedom = _freedom(variances, [size.groups for size in sizes])
    critical = t_quantile(1 - error / max(1, compared), freedom)
    (low0, high0), (low1, high1) = (
        wilson(p, n, critical) for p, n in zip(shares, counts, strict=True)
    )
    p0, p1 = shares
    difference = p1 - p0
    return Change(
        p0,
        p1,
        difference - math.hypot(p1 - low1, high0 - p0),
        difference + math.hypot(high1 - p1, p0 - low0),
    )


def with_lost(found: Change, lost: tuple[float, float]) -> Change:
    """Returns it with bounds that hold whatever the time was of whose stack was lost.

    What has no time to be named, or no room, is not what comes by chance: the rarest stacks.

    Args:
        found: Of shares of what has a stack.
        lost: Part of each side's time that has none, 0 to 1.
    """
    (base, new), before, after = lost, found.before, found.after
    low = found.low - after * new - (1 - before) * base
    high = found.high + before * base + (1 - after) * new
    return replace(found, low=max(low, -1.0), high=min(high, 1.0))


@dataclass(frozen=True, slots=True)
class _Size:
    inflation: float  # of the variance, over that of independent samples; 1 at least
    groups: int
    samples: int
    hosts: int

    @classmethod
    def of(cls, side: Side) -> _Size:
        used = side.whole > 0
        own, whole = side.own[used], side.whole[used]
        groups, p = len(whole), side.share
        inflation = 1.0
        if groups >= 2 and 0 < p < 1:
            residual = own - p * whole
            variance = groups / (groups - 1) * float(residual @ residual)
            variance /= float(whole.sum()) ** 2
            inflation = max(inflation, variance * side.samples / (p * (1 - p)))
        return cls(inflation, groups, side.samples, side.hosts)

    def lent(self, to: _Size) -> _Size:
        """Returns what another side's size is by what this one shows: the program is the same.

        A rare long wait, of a function that mostly waits for little, may be on one side only, and
        the other one tells nothing of its kind. With each side's own, half of all comparisons of
        blocked time with itself found that something grew. Where it is hosts that differ, the part
        of the variance that is theirs is over m samples of a host (m - 1) rho times that of
        independent ones (design effect: Kish, Survey Sampling 1965, 8.2).
        """
        excess = self.inflation - 1
        if self.hosts and to.hosts and self.samples:
            excess *= (to.samples / to.hosts) / (self.samples / self.hosts)
        return _Size(1 + excess, self.groups, to.samples, to.hosts)


def _inflation(size: _Size) -> float:
    return size.inflation


def _freedom(variances: list[float], groups: list[int]) -> int:
    whole = sum(variances)
    if not whole:
        return max(1, min(groups) - 1)
    parts = sum((v / whole) ** 2 / max(1, m - 1) for v, m in zip(variances, groups, strict=True))
    return max(1, math.floor(1 / parts))


def wilson(share: float, samples: float, critical: float) -> tuple[float, float]:
    """Returns Wilson's score interval of a share (JASA 22, 1927, 209-212)."""
    square = critical * critical
    middle = (share + square / (2 * samples)) / (1 + square / samples)
    half = critical / (1 + square / samples)
    half *= math.sqrt(share * (1 - share) / samples + square / (4 * samples * samples))
    # At its ends rounding would leave the interval without its share.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


@functools.lru_cache(maxsize=4_096)
def t_quantile(probability: float, freedom: int) -> float:
    """Returns the quantile of Student's t distribution, of a probability above 0.5."""
    low, high = 0.0, 1.0
    while _t_probability(high, freedom) < probability and high < 1e9:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if _t_probability(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high


def _t_probability(t: float, freedom: int) -> float:
    # Finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4: A(t|n) is that of |T| < t.
    angle = math.atan(t / math.sqrt(freedom))
    square, term = math.cos(angle) ** 2, 1.0
    if freedom % 2:
        total, term = 0.0, math.cos(angle)
        for k in range(3, freedom + 1, 2):
            total += term
            term *= square * (k - 1) / k
        inside = 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))
    else:
        total = 1.0
        for k in range(2, freedom, 2):
            term *= square * (k - 1) / k
            total += term
        inside = math.sin(angle) * total
    return (1 + inside) / 2


@dataclass(frozen=True, slots=True)
class Compared:
    """One function of a comparison.

    Attributes:
        name: Of the function.
        change: How its share changed.
    """

    name: str
    change: Change


def by_difference(functions: Sequence[Compared]) -> tuple[Compared, ...]:
    """Returns functions, the largest difference first."""
    return tuple(sorted(functions, key=lambda f: (-abs(f.change.difference), f.name)))


def grown(functions: Sequence[Compared], by: float) -> tuple[Compared, ...]:
    """Returns those that have grown by more than this, 0 to 1, and not by chance."""
    return tuple(found for found in functions if found.change.low > by)


def whose_time(*, is_self: bool) -> str:
    """Returns which time of a function shares are of, for the caption of a table."""
    if is_self:
        return "by itself, waits without the kernel, libc and Python's own"
    return "with all that it calls"


def lost_words(lost: tuple[float, float]) -> str:
    """Returns how much of each side's time has no stack, and is in no share.

    Args:
        lost: Of base and new, 0 to 1.
    """
    base, new = (percent(round(part * 10**6), 10**6) for part in lost)
    return f"{base} of base and {new} of new"


def lost_note(lost: tuple[float, float], *, is_sure: bool = True) -> str:
    """Returns the same for the line above a table; "" where none is lost."""
    if not any(lost):
        return ""
    bounds = ": low and high hold whatever that was of" if is_sure else ""
    return f"; without time whose stack was lost, {lost_words(lost)}{bounds}"


def changes_table(
    functions: Sequence[Compared], limit: int, whole: str, *, is_sure: bool = True
) -> Table:
    """Returns functions as a table.

    Args:
        functions: In their order.
        limit: At most so many rows.
        whole: What shares are of, and what chance is; one sentence.
        is_sure: There is enough on both sides to tell what chance leaves open.
    """
    shown = functions[:limit]
    rows = []
    for found in shown:
        of = found.change
        shares = (f"{100 * share:.2f} %" for share in (of.before, of.after))
        bounds = (of.low, of.high) if is_sure else ()
        points = (f"{100 * value:+.2f}" for value in (of.difference, *bounds))
        rows.append((*shares, *points, showable(found.name)))
    return Table(
        "Functions whose share differs",
        whole,
        (">base", ">new", ">points", *((">low", ">high") if is_sure else ()), "function"),
        tuple(rows),
        len(functions) - len(shown),
    )


def refuse_too_few(
    samples: tuple[int, int],
    groups: tuple[int, int],
    names: tuple[str, str],
    *,
    group_words: str,
    cure: str,
    sampling: str,
) -> None:
    """Raises TooFewSamples where a comparison would say nothing.

    Args:
        samples: Of each side.
        groups: Of each side that there is anything of.
        names: Of each side, in words.
        group_words: What groups are.
        cure: How to have more groups.
        sampling: How else to have more samples.
    """
    for count, group_count, name in zip(samples, groups, names, strict=True):
        if count < LEAST_SAMPLES:
            raise TooFewSamples(
                f"too few samples to compare: {name} has {count:,}, {LEAST_SAMPLES:,} are needed",
                f"{cure}, or {sampling}",
            )
        if group_count < LEAST_GROUPS:
            raise TooFewSamples(
                f"too few {group_words} to compare: {name} has {group_count:,},"
                f" {LEAST_GROUPS:,} are needed to tell a change from chance",
                cure,
            )
