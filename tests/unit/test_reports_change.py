# SPDX-License-Identifier: Apache-2.0
"""Whether a share has grown: against tables, and against sampling of programs that have not."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from aiflame.agent.reports.change import (
    FALSE_ALARM,
    Side,
    TooFewSamples,
    change,
    refuse_too_few,
    t_quantile,
    wilson,
    with_lost,
)

_FUNCTIONS = 30
_GROUPS = 64
_HZ = 19
_WINDOW_S = 60


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [  # of printed tables
        (0.95, 1, 6.314),
        (0.975, 2, 4.303),
        (0.95, 5, 2.015),
        (0.995, 10, 3.169),
        (0.975, 30, 2.042),
        (0.9995, 7, 5.408),
    ],
)
def test_quantiles_of_t(probability: float, freedom: int, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, abs=6e-4)


def test_t_becomes_normal() -> None:
    for probability in (0.9, 0.99, 0.9999):
        normal = NormalDist().inv_cdf(probability)
        assert t_quantile(probability, 100_001) == pytest.approx(normal, rel=1e-3)


def test_wilson_of_a_printed_example() -> None:
    # Newcombe 1998 (Statistics in Medicine 17, 857-872), table I: 81 of 263, method 3
    low, high = wilson(81 / 263, 263, NormalDist().inv_cdf(0.975))
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    # and 0 of 20
    assert wilson(0.0, 20, NormalDist().inv_cdf(0.975)) == (0.0, pytest.approx(0.1611, abs=1e-4))


def test_difference_of_a_printed_example() -> None:
    # Newcombe 1998 (873-890), table II (a): 56/70 less 48/80, method 10; samples that are
    # independent, in as many groups as there are samples
    def side(own: int, whole: int) -> Side:
        values = np.zeros(whole)
        values[:own] = 1
        return Side(values, np.ones(whole), whole)

    found = change(side(48, 80), side(56, 70), error=0.025)
    assert found.difference == pytest.approx(0.2)
    # Student's t in place of the normal quantile, and m - 1, make it a little wider.
    assert found.low == pytest.approx(0.0524, abs=0.003)
    assert found.high == pytest.approx(0.3339, abs=0.003)


def _sampled(random: np.random.Generator, hosts: int, windows: int, alike: bool) -> Side:
    """Samples 19 times a second what programs do, by function (the sides are of matrices).

    A program is in one function for seconds, then in another: neighbouring samples are nearly the
    same. Each host has its own mix of them, unless they are alike.
    """
    common = np.full(_FUNCTIONS, 1 / _FUNCTIONS)
    own = np.zeros((_FUNCTIONS, _GROUPS))
    whole = np.zeros(_GROUPS)
    for host in range(hosts):
        mix = common if alike else random.dirichlet(common * 60)
        seconds = windows * _WINDOW_S
        phases = random.choice(_FUNCTIONS, size=seconds, p=mix)
        lengths = random.exponential(2.0, size=seconds) + 0.05
        ends = np.cumsum(lengths)
        at = np.arange(seconds * _HZ) / _HZ
        function = phases[np.minimum(np.searchsorted(ends, at), seconds - 1)]
        window = (at // _WINDOW_S).astype(int)
        group = np.full(len(at), host % _GROUPS) if hosts >= 8 else (window + host * 17) % _GROUPS
        cells = np.bincount(function * _GROUPS + group, minlength=_FUNCTIONS * _GROUPS)
        own += cells.reshape(_FUNCTIONS, _GROUPS)
        whole += np.bincount(group, minlength=_GROUPS)
    return Side(own, whole, int(whole.sum()))


def _of(side: Side, function: int) -> Side:
    return Side(side.own[function], side.whole, side.samples)


def _alarms(
    random: np.random.Generator, trials: int, hosts: int, windows: int, alike: bool
) -> tuple[float, float]:
    """How many comparisons of the same program call a function grown: ours, and naive ones."""
    ours = naive = 0
    critical = NormalDist().inv_cdf(1 - FALSE_ALARM / _FUNCTIONS)
    for _ in range(trials):
        base, new = (_sampled(random, hosts, windows, alike) for _ in range(2))
        changes = [
            change(_of(base, f), _of(new, f), compared=_FUNCTIONS) for f in range(_FUNCTIONS)
        ]
        ours += any(found.low > 0 for found in changes)
        naive += any(
            found.difference
            > critical
            * math.sqrt(
                found.before * (1 - found.before) / base.samples
                + found.after * (1 - found.after) / new.samples
            )
            for found in changes
        )
    return ours / trials, naive / trials


@pytest.mark.parametrize(
    ("hosts", "windows", "alike"),
    [(40, 3, False), (12, 5, False), (3, 20, True), (64, 1, True)],
)
@pytest.mark.breadth
def test_a_program_that_has_not_changed_seldom_gives_alarm(
    hosts: int, windows: int, alike: bool
) -> None:
    # GIVEN the same program on both sides WHEN it is compared 200 times, with no growth allowed
    random = np.random.default_rng([hosts, windows])
    ours, naive = _alarms(random, 200, hosts, windows, alike)
    # THEN alarms are as rare as promised: 5 %, and three standard deviations of 200 trials
    assert ours <= FALSE_ALARM + 3 * math.sqrt(FALSE_ALARM * (1 - FALSE_ALARM) / 200)
    # and the formula for independent samples, which these are not, would be wrong most of the time
    assert naive > 0.5


def test_a_rare_long_wait_seldom_gives_alarm() -> None:
    # GIVEN functions that wait for little in each window, and a thousand times as long in some
    random = np.random.default_rng(5)
    windows, functions, trials = 24, 40, 100
    alarms = 0
    for _ in range(trials):
        sides = []
        for _ in range(2):
            rest = random.gamma(400, 1 / 400, size=windows)
            is_long = random.random((functions, windows)) < 0.03
            short = random.gamma(50, 1e-5 / 50, size=(functions, windows))
            own = short + is_long * random.exponential(0.01, size=is_long.shape)
            whole = rest + own.sum(axis=0)
            sides.append([Side(one, whole, 100_000) for one in own])
        alarms += any(
            change(before, after, compared=functions).low > 0
            for before, after in zip(*sides, strict=True)
        )
    # THEN alarms are as rare as promised: 5 %, and three standard deviations of 100 trials
    assert alarms / trials <= FALSE_ALARM + 3 * math.sqrt(FALSE_ALARM * (1 - FALSE_ALARM) / trials)


def test_a_growth_is_found() -> None:
    # GIVEN a function that grew from 20 % to 26 %, on 40 hosts that differ
    random = np.random.default_rng(7)
    found = 0
    for _ in range(50):
        sides = []
        for mean in (0.20, 0.26):
            share = random.beta(mean * 200, (1 - mean) * 200, size=40)
            whole = np.full(40, 5_000.0)
            sides.append(Side(random.binomial(5_000, share).astype(float), whole, 200_000))
        found += change(*sides, compared=100).low > 0.02
    # THEN it is nearly always known to be more than 2 points
    assert found >= 45


def _of_hosts(
    random: np.random.Generator, mean: float, hosts: int, each: int, spread: float = 0.02
) -> Side:
    """A function on hosts that differ, in as many groups as a store has."""
    share = np.clip(random.normal(mean, spread, size=hosts), 0, 1)
    group = np.arange(hosts) % _GROUPS
    own = np.bincount(group, random.binomial(each, share), minlength=_GROUPS)
    whole = np.bincount(group, np.full(hosts, each), minlength=_GROUPS).astype(np.float64)
    return Side(own, whole, hosts * each, hosts)


@pytest.mark.parametrize(
    ("base", "new"),
    [((100, 168_000), (100, 1_000)), ((1_000, 1_000), (10, 1_000)), ((10, 1_000), (1_000, 1_000))],
)
def test_sides_of_unequal_size_are_told_apart_no_more_and_no_less(
    base: tuple[int, int], new: tuple[int, int]
) -> None:
    # GIVEN hosts that differ by 2 points, a week of them beside an hour, or few beside many
    random = np.random.default_rng([*base, *new])
    alarms = found = 0
    for _ in range(300):
        before = _of_hosts(random, 0.2, *base)
        alarms += change(before, _of_hosts(random, 0.2, *new)).low > 0
        found += change(before, _of_hosts(random, 0.26, *new)).low > 0.02
    # THEN alarms without a growth are as rare as promised, and one of six points is found
    assert alarms / 300 <= FALSE_ALARM + 3 * math.sqrt(FALSE_ALARM * (1 - FALSE_ALARM) / 300)
    assert found > 270


def test_lost_time_may_have_been_of_anything() -> None:
    whole = np.full(40, 1_000.0)
    sides = [Side(np.full(40, share * 1_000), whole, 40_000) for share in (0.2, 0.3)]
    found = change(*sides)
    assert found.low > 0.09
    # Of base 5 % are lost: all of it may be this function's. Of new as much: none of it may be.
    bounded = with_lost(found, (0.05, 0.05))
    assert bounded.low == pytest.approx(found.low - 0.05 * 0.8 - 0.05 * 0.3)
    assert bounded.high == pytest.approx(found.high + 0.05 * 0.2 + 0.05 * 0.7)
    worst = (0.95 * 0.3) - (0.95 * 0.2 + 0.05)
    assert bounded.difference == found.difference and bounded.low < worst
    assert with_lost(found, (0.0, 0.0)) == found


def test_what_was_never_there_and_what_is_everything() -> None:
    whole = np.full(20, 100.0)
    nothing, everything = Side(np.zeros(20), whole, 2_000), Side(whole, whole, 2_000)
    same = change(nothing, nothing, compared=50)
    assert same.low < 0 < same.high
    assert change(everything, everything, compared=50).low < 0
    assert change(nothing, everything, compared=50).low > 0.9
    empty = Side(np.zeros(20), np.zeros(20), 0)
    assert empty.share == 0


def test_too_few_samples_are_refused() -> None:
    names = ("version 1", "version 2")
    words = {"group_words": "seconds", "cure": "a longer recording", "sampling": "a higher -F"}
    refuse_too_few((1_000, 1_000), (8, 8), names, **words)
    with pytest.raises(TooFewSamples, match="version 2 has 999") as caught:
        refuse_too_few((1_000, 999), (8, 8), names, **words)
    assert (caught.value.exit_code, caught.value.hint) == (5, "a longer recording, or a higher -F")
    with pytest.raises(TooFewSamples, match="seconds to compare: version 1 has 7"):
        refuse_too_few((5_000, 5_000), (7, 8), names, **words)
