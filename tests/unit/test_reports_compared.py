# SPDX-License-Identifier: Apache-2.0
"""Two recordings of a program that has not changed: how often chance is taken for a growth."""

from __future__ import annotations

import math

import numpy as np
from aiflame.agent.model.profile import Profile, StopReason
from aiflame.agent.reports import View
from aiflame.agent.reports.change import FALSE_ALARM, grown
from aiflame.agent.reports.compared import compare
from aiflame.agent.reports.joined import joined
from profiles import MS, Sample, profile_of

_FUNCTIONS = 30
_HZ = 99
_SECONDS = 64
_PHASE_S = 0.05


def _recorded(random: np.random.Generator) -> Profile:
    """A thread that is in one function for a while, then in another, sampled by the clock."""
    phases = _SECONDS * 100
    ends = np.cumsum(random.exponential(_PHASE_S, size=phases))
    assert ends[-1] > _SECONDS
    at = np.arange(_SECONDS * _HZ) / _HZ
    function = random.integers(_FUNCTIONS, size=phases)[np.searchsorted(ends, at)]
    cells = np.bincount(function * _SECONDS + at.astype(int), minlength=_FUNCTIONS * _SECONDS)
    return profile_of(
        *(
            Sample(
                f"main;f{cell // _SECONDS}", count * 10 * MS, count=count, first_s=cell % _SECONDS
            )
            for cell, count in enumerate(cells.tolist())
            if count
        )
    )


def test_a_program_that_has_not_changed_seldom_gives_alarm() -> None:
    # GIVEN the same program on both sides WHEN it is compared 100 times, with no growth allowed
    random, trials, alarms = np.random.default_rng(64), 100, 0
    for _ in range(trials):
        both, difference = joined(_recorded(random), _recorded(random), ("base", "new"), View.CPU)
        found = compare(both, difference, is_self=True, least_share=0.002)
        assert len(found.functions) == _FUNCTIONS
        alarms += bool(grown(found.functions, 0.0))
    # THEN alarms are as rare as promised: 5 %, and three standard deviations of 100 trials
    assert alarms / trials <= FALSE_ALARM + 3 * math.sqrt(FALSE_ALARM * (1 - FALSE_ALARM) / trials)


def test_time_whose_stack_was_lost_is_in_no_share() -> None:
    # GIVEN a program that has not changed, and whose stacks were lost for some seconds on one side
    def recorded(lost_s: int) -> Profile:
        return profile_of(
            *(
                Sample("", 100 * MS, end=StopReason.LOST, count=10, first_s=second)
                if second < lost_s
                else Sample(f"main;f{part}", 50 * MS, count=5, first_s=second)
                for second in range(_SECONDS)
                for part in range(2)
            )
        )

    both, difference = joined(recorded(0), recorded(_SECONDS // 2), ("base", "new"), View.CPU)
    # WHEN it is compared THEN nothing has changed, and it says what was left out
    for is_self in (False, True):
        found = compare(both, difference, is_self=is_self, least_share=0.002)
        assert {one.change.difference for one in found.functions} == {0.0}
        words = found.table(10, is_sure=True).whole
        assert "without time whose stack was lost, 0.0 % of base and 66.7 % of new" in words
    # AND where there is none else, it is compared
    both, difference = joined(recorded(0), recorded(_SECONDS), ("base", "new"), View.CPU)
    found = compare(both, difference, is_self=False, least_share=0.002)
    assert found.lost == (0.0, 1.0)
    assert not grown(found.functions, 0.0)
