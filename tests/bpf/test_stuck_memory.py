# SPDX-License-Identifier: Apache-2.0
"""Programs of whose memory a page never comes (workloads/pystuck.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from breadth import cases
from recordings import Recording, Workload, python_frames_of, rows_of_process
from support import AIFLAME, WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.slow]

_STUCK = WORKLOADS / "pystuck.py"
# Ten times what it takes with patience for one process.
_PATIENCE_S = 30


@cases("what", ["code", "stack"])
def test_a_page_that_never_comes_stops_no_recording(tmp_path: Path, what: str) -> None:
    # GIVEN a program that takes pages of its own away, and one that does not
    with (
        Workload([sys.executable, _STUCK, what]) as stuck,
        Workload([sys.executable, _STUCK, "sound"]) as sound,
        Recording(tmp_path, "-p", f"{stuck.pid},{sound.pid}", patience_s=_PATIENCE_S) as recording,
    ):
        # WHEN both are recorded
        for load in (stuck, sound):
            load.go()
            load.truth()
        ended = recording.stop()
    # THEN the recording ends, tells of the one, and has all of the other
    profile = ended.profile
    assert [loss.count for loss in profile.losses if loss.name == "stacks_stuck"] == [1]
    assert f"process {stuck.pid}" in ended.stderr
    seen = {
        (line.name, line.line > 0)
        for row in rows_of_process(profile, sound.pid)
        for line in python_frames_of(profile, int(row["stack"]))
    }
    assert {("spin", True), ("nap", True)} <= seen


@cases("what", ["code", "stack"])
def test_a_page_that_never_comes_stops_no_dump(what: str) -> None:
    with Workload([sys.executable, _STUCK, what]) as stuck:
        dump = subprocess.run(
            [*AIFLAME, "dump", "-p", str(stuck.pid)],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=True,
        )
        stuck.go()
        stuck.truth()
    assert f"{stuck.pid}" in dump.stdout
    assert "memory could not be read in time" in dump.stdout + dump.stderr
