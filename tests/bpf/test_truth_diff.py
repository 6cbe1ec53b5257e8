# SPDX-License-Identifier: Apache-2.0
"""`aiflame diff` of two runs of a program whose shares are known (workloads/tilted.c)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.model.profile import SampleClass
from recordings import Workload, count_of, record_workload
from support import AIFLAME

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

_ROW = re.compile(r" *([\d.]+) % +([\d.]+) % +([+-][\d.]+) +([+-][\d.]+) +([+-][\d.]+)  (\S+)")


@dataclass(frozen=True, slots=True)
class Side:
    """One run: where its capture is, its samples, and the true share of spend_first."""

    capture: Path
    samples: int
    share: float


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory, workload: Callable[..., Path]) -> list[Side]:
    """The program before and after spend_first grew from 20 % to 40 %."""
    found = []
    for percent in (20, 40):
        folder = tmp_path_factory.mktemp(f"tilted-{percent}")
        program = Workload([workload("tilted"), percent])
        profile, truth = record_workload(folder, program, "-F", 499)
        samples = count_of(profile, None, None, SampleClass.ON_CPU)
        share = truth["spend_first"] / sum(truth.values())
        found.append(Side(folder / "run.aiflame", samples, share))
    return found


def _diff(sides: list[Side], *arguments: str) -> subprocess.CompletedProcess[str]:
    captures = [str(side.capture) for side in sides]
    command = [*AIFLAME, "diff", *captures, "--view", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_shares_before_and_after_are_the_true_ones(sides: list[Side]) -> None:
    run = _diff(sides, "-n", "1000")
    assert run.returncode == 0, run.stderr
    rows = {match[6]: [float(match[i]) for i in range(1, 6)] for match in _ROW.finditer(run.stdout)}
    before, after, points, low, high = rows["spend_first"]
    # The number of samples in one of two functions is binomial at worst: five standard deviations,
    # missed once in two million runs.
    variances = []
    for side, found in zip(sides, (before, after), strict=True):
        assert side.samples > 1_000
        variances.append(side.share * (1 - side.share) / side.samples)
        assert abs(found / 100 - side.share) < 5 * np.sqrt(variances[-1])
    change = sides[1].share - sides[0].share
    assert abs(points / 100 - change) < 5 * np.sqrt(sum(variances))
    # AND the interval is around it, and says that it is no chance
    assert 0 < low < points < high
    assert rows["spend_second"][2] < 0
    # AND what calls both has not changed
    assert rows["main"][3] < 0 < rows["main"][4]


def test_a_growth_of_more_than_that_fails(sides: list[Side]) -> None:
    # GIVEN a growth of 20 points THEN it is an alarm where less is allowed, and none otherwise
    alarm = _diff(sides, "--fail-on", "+10%")
    assert alarm.returncode == 1
    assert "aiflame: spend_first grew by +" in alarm.stderr
    assert _diff(sides, "--fail-on", "+30%").returncode == 0
    # nor where it shrank, by which the other grew
    assert "spend_first grew" not in _diff(sides[::-1], "--fail-on", "+10%").stderr
