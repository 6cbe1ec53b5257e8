# SPDX-License-Identifier: Apache-2.0
"""Who launched what, on real runs whose samples tell it themselves (launch_truth.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import launch_truth
import numpy as np
import pytest
import record_long_windows
from aiflame.agent.reports.device_facts import error_words
from aiflame.gpu.attribution import attribution_of
from breadth import cases
from launch_truth import SCENARIOS, Measured, Scenario, measure, without_times

pytestmark = pytest.mark.bpf

# Those that take the time of a test; `launch_truth.py` prints a table of all.
_LENGTH_MS = 4000
_BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
_ONE_BY_ONE = [
    "2 sites, 100 ms, one by one",
    "10 sites, 20 ms, one by one",
    "4 sites, 1 ms, one by one",
    "4 sites, 20 ms, by event",
    "4 sites, 20 ms, by a blocking read",
    "4 sites, 20 ms, cost not by work",
    "4 sites, 20 ms, one by one, late attach",
]
_QUEUED = [
    "2 sites, 100 ms, queued by 8",
    "4 sites, 5 ms, queued by 16",
    "4 sites, 5 ms, queued by 16, cost not by work",
    "4 sites, 20 ms, 3 queues",
    "4 sites, 2 kernels in turn, 200 us",
    "4 sites, 2 kernels in turn, 2 ms, cost not by work",
]


@pytest.fixture(scope="module")
def program(workload: Callable[..., Path]) -> Path:
    return workload("clsites", "-lOpenCL")


@pytest.mark.breadth
def test_without_times_a_second_is_shared_by_work(program: Path, tmp_path: Path) -> None:
    shorter = replace(_BY_NAME["4 sites, 1 ms, one by one"], length_ms=_LENGTH_MS)
    ended = launch_truth.record(replace(shorter, options=("-F", "997")), program, tmp_path)
    found = measure(without_times(ended.profile))
    assert found.exact == 0
    assert found.off < 0.03 + 4 * 0.5 / np.sqrt(found.samples)


def _measure(name: str, program: Path, folder: Path) -> Measured:
    scenario: Scenario = _BY_NAME[name]
    length_ms = _LENGTH_MS + 2000 * scenario.is_late  # a recorder takes a second to start
    shorter = replace(scenario, length_ms=length_ms, options=("-F", "997"))
    return measure(launch_truth.record(shorter, program, folder).profile)


@cases("name", _ONE_BY_ONE)
def test_launch_and_wait_in_turn_is_exact(name: str, program: Path, tmp_path: Path) -> None:
    found = _measure(name, program, tmp_path)
    assert found.samples > 300
    # All but what ran before the first wait was over.
    assert found.exact > 0.85
    assert found.exact_wrong < 0.005
    assert found.wrong < 0.02
    # And no error is told, but of the launch that was under way when the recording began.
    assert found.told < 0.005 or _BY_NAME[name].is_late


@cases("name", _QUEUED)
def test_what_is_queued_is_shared_by_the_time_that_it_took(
    name: str, program: Path, tmp_path: Path
) -> None:
    found = _measure(name, program, tmp_path)
    assert found.samples > 300
    assert found.exact_wrong < 0.005
    # Two points, and four standard deviations of as many samples of four sites; other programs
    # make a queue's stretches longer than its launches take.
    # Where a busy machine left too few to tell what launches cost, they may cost anything, which is
    # told.
    bound = 0.02 + 4 * 0.5 / np.sqrt(found.samples) + 0.03
    assert found.off < max(bound, 1.5 * found.told_if_unequal)
    # What is told of it is an error's mean.
    assert found.off < 4 * found.told_if_unequal + 0.01


@pytest.mark.breadth
@pytest.mark.parametrize("is_queued", [True, False])
def test_launches_have_their_samples_also_where_windows_are_longer(
    program: Path, tmp_path: Path, is_queued: bool
) -> None:
    # GIVEN what an agent does that is above its budget
    scenario = replace(
        _BY_NAME["4 sites, 5 ms, queued by 16" if is_queued else "10 sites, 20 ms, one by one"],
        length_ms=10_000,
        options=("-F", "199"),
        recorder=record_long_windows.RECORD,
    )
    profile = launch_truth.record(scenario, program, tmp_path).profile
    found = measure(profile)
    # THEN samples are in all seconds, those of calls are few, and both belong together.
    seconds = np.unique(profile.gpu.samples["interval"])
    assert len(seconds) >= 9
    assert len(np.unique(profile.gpu.calls["interval"])) <= 4
    assert found.samples > 300
    assert found.exact_wrong < 0.005
    error = 4 * 0.5 / np.sqrt(found.samples)
    assert found.off < max(0.05 + error if is_queued else 0.02, 1.5 * found.told_if_unequal)


@pytest.mark.breadth
def test_summary_says_by_how_much_an_estimate_is_off(program: Path, tmp_path: Path) -> None:
    scenario = replace(_BY_NAME["4 sites, 5 ms, queued by 16"], length_ms=_LENGTH_MS)
    ended = launch_truth.record(scenario, program, tmp_path)
    told = error_words(attribution_of(ended.profile.gpu).error)
    assert told.startswith("Shared is an estimate, off by ")
    (said,) = (line for line in ended.stderr.splitlines() if "Attribution: " in line)
    assert said.endswith(told)
