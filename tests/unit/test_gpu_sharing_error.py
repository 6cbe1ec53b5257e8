# SPDX-License-Identifier: Apache-2.0
"""By how much shared samples are off, measured against a simulated device."""

from __future__ import annotations

import pytest
from aiflame.gpu.attribution import Certainty
from gpu_simulator import SCENARIOS, Simulated, attribute_by, error, simulate

_BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}

# Largest share of samples with the wrong stack, in the sum of a recording: with work known, without
# it, and with measured times. What is large here is what sharing cannot know; see the comments.
_BOUNDS = {
    "two call sites, sizes 3:1": (0.01, 0.27, 0.01),  # nothing tells which of two is larger
    "two call sites, 130 samples": (0.10, 0.35, 0.10),  # chance alone is off by that much
    "cost not linear, steady mixture": (0.11, 0.36, 0.01),
    "cost not linear, mixture changes": (0.09, 0.28, 0.01),
    "linear cost, mixture changes": (0.01, 0.21, 0.01),
    "linear cost, mixture changes, 130 samples": (0.10, 0.28, 0.10),
    "cost independent of size": (0.20, 0.01, 0.01),
    "sizes scatter, cost not linear": (0.09, 0.28, 0.01),
    "ten call sites": (0.02, 0.21, 0.02),
    "ten call sites, cost not linear": (0.10, 0.29, 0.02),
    "two queues side by side": (0.01, 0.21, 0.01),
    # Of a queue's backlog nothing is known.
    "queue behind by some seconds": (0.12, 0.28, 0.12),
    "device drops samples of busy seconds": (0.02, 0.20, 0.02),
    "late attach, all named": (0.01, 0.23, 0.01),
    # A fifth of the samples belongs to launches that could not be named.
    "late attach, a third caller unnamed": (0.22, 0.33, 0.22),
    "20 % of launches not counted": (0.01, 0.21, 0.01),
}


@pytest.fixture(scope="module")
def simulated() -> dict[str, Simulated]:
    return {name: simulate(scenario) for name, scenario in _BY_NAME.items()}


def test_every_scenario_has_a_bound() -> None:
    assert set(_BOUNDS) == set(_BY_NAME)


@pytest.mark.parametrize("name", _BY_NAME)
def test_sharing_is_as_exact_as_stated(name: str, simulated: dict[str, Simulated]) -> None:
    rules = ("work", "count", "time")
    for rule, bound in zip(rules, _BOUNDS[name], strict=True):
        assert error(simulated[name], attribute_by(simulated[name], rule)) <= bound, rule


def test_samples_of_an_unseen_launcher_alone_stay_unattributed() -> None:
    # GIVEN a kernel whose only caller's handle has no name
    scenario = _BY_NAME["late attach, a third caller unnamed"]
    alone = simulate(type(scenario)("alone", scenario.callers[2:], duration_s=5))
    rows = attribute_by(alone, "work")
    # THEN its samples are in the flame graph, and said to be of nobody.
    assert set(rows["certainty"].tolist()) == {Certainty.UNATTRIBUTED}
    assert int(rows["count"].sum()) == int(alone.gpu.samples["count"].sum()) > 100


def test_a_shared_sample_says_so(simulated: dict[str, Simulated]) -> None:
    rows = attribute_by(simulated["two call sites, sizes 3:1"], "work")
    assert set(rows["certainty"].tolist()) == {Certainty.SHARED}
