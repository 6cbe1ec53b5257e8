# SPDX-License-Identifier: Apache-2.0
"""Whatever a segment or a capture says, reading it ends in an answer or in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hostile import run
from hostile.recordings import read_captures, read_segments


def test_no_segment_gets_out_of_hand(tmp_path: Path) -> None:
    (outcome,) = read_segments(400, tmp_path, 20_261_122)
    assert outcome.reads > 400
    assert outcome.unforeseen == {}


def test_no_capture_gets_out_of_hand(tmp_path: Path) -> None:
    (outcome,) = read_captures(300, tmp_path, 20_261_122)
    assert outcome.reads == 300
    assert outcome.unforeseen == {}


def test_small_segments_of_large_windows_fit_into_memory() -> None:
    # In a process whose memory is its own; all columns of a window take 40 s.
    command = [sys.executable, run.__file__, "bombs", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    facts = json.loads(done.stdout)
    assert facts["unforeseen"] == {}
    assert facts["peak_bytes"] < 500 << 20
