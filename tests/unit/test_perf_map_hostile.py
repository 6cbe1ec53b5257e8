# SPDX-License-Identifier: Apache-2.0
"""Whatever a perf map says, reading it ends soon, in little memory, and without an exception."""

from __future__ import annotations

from hostile.outcome import Outcome
from hostile.perfmaps import read_maps


def test_no_perf_map_gets_out_of_hand() -> None:
    outcome = Outcome("perf maps")
    read_maps(500, 20_261_122, outcome)
    assert outcome.reads == 500
    assert outcome.unforeseen == {}
