# SPDX-License-Identifier: Apache-2.0
"""Kernels that are named by calls inside of calls: each has its own name, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.model.gpu import NONE
from recordings import Workload, record_workload

pytestmark = pytest.mark.bpf

_ROUNDS = 100
# What the kernel half keeps of calls inside of each other; NAMINGS_MAX in bpf/callers.h.
_MOST_NESTED = 4

Launches = tuple[Counter[str], dict[str, int]]


@pytest.fixture
def launches(workload: Callable[..., Path], tmp_path: Path) -> Callable[[str], Launches]:
    """`launches(way)` records workloads/namings.c: launches by kernel, and losses."""

    def run(way: str) -> Launches:
        started = Workload([workload("namings"), way, _ROUNDS])
        profile, truth = record_workload(tmp_path, started)
        found: Counter[str] = Counter()
        for row in profile.gpu.calls:
            if row["kernel"] != NONE:
                found[profile.gpu.kernels[row["kernel"]].name] += int(row["count"])
        assert found.total() == truth["launches"]
        return found, {loss.name: loss.count for loss in profile.losses}

    return run


@pytest.mark.parametrize("way", ["nested", "thrown"])
def test_calls_inside_of_each_other_name_their_own_kernel(
    launches: Callable[[str], Launches], way: str
) -> None:
    found, losses = launches(way)
    assert found == {"outer": _ROUNDS, "middle": _ROUNDS, "inner": _ROUNDS}
    assert "kernel_names_lost" not in losses


def test_calls_beyond_those_that_are_kept_lose_their_names_and_say_so(
    launches: Callable[[str], Launches],
) -> None:
    # GIVEN eleven calls inside of each other
    found, losses = launches("deep")
    # THEN the outermost are named, and no other kernel has a name that is not its own
    named = {name: count for name, count in found.items() if name.startswith("level_")}
    assert named == {f"level_{level}": _ROUNDS for level in range(1, 1 + _MOST_NESTED)}
    assert losses["kernel_names_lost"] == 11 - _MOST_NESTED
