# SPDX-License-Identifier: Apache-2.0
"""Which CPUs are sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiflame.agent.recording import probes


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0,2-3,8\n", [0, 2, 3, 8]), ("7-7\n", [7])],
)
def test_online_cpus(
    text: str, cpus: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = tmp_path / "online"
    listing.write_text(text)
    monkeypatch.setattr(probes, "_ONLINE_CPUS", listing)
    assert probes.online_cpus() == cpus


def test_possible_cpus_counts_those_that_are_not_online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = tmp_path / "possible"
    listing.write_text("0-127\n")
    monkeypatch.setattr(probes, "_POSSIBLE_CPUS", listing)
    assert probes.possible_cpus() == 128
