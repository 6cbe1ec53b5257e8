# SPDX-License-Identifier: Apache-2.0
"""Windows cut to some of their processes: whole, and with nothing of others."""

from __future__ import annotations

import numpy as np
from aiflame.agent.model.window import COLUMNS, Window, check, check_wall
from aiflame.agent.model.window_selection import of_processes
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import RandomRecording


def _names(window: Window) -> set[str]:
    """Returns the texts that rows have."""
    found = set()
    for name, column in COLUMNS.items():
        for field in column.texts:
            found |= {window.texts[at] for at in window.rows(name)[field].tolist()}
    return found


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4))
def test_parts_are_windows_and_add_up_to_the_whole(seed: int, count: int) -> None:
    for window in RandomRecording(seed).windows(count):
        every = window.processes["process"].tolist()
        parts = [of_processes(window, [process]) for process in every]
        for process, part in zip(every, parts, strict=True):
            check(part)
            check_wall(part)
            assert part.processes["process"].tolist() == [process]
            assert set(part.stacks["process"].tolist()) <= {process}
        for column in ("samples", "thread_times", "waits", "stacks", "mappings"):
            rows = np.concatenate([part.rows(column) for part in parts] or [window.rows(column)])
            assert len(rows) == len(window.rows(column))
        whole_ns = int(window.samples["weight_ns"].sum())
        assert sum(int(part.samples["weight_ns"].sum()) for part in parts) == whole_ns


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nothing_of_no_process_but_what_is_of_none(seed: int) -> None:
    (window,) = RandomRecording(seed).cut([])
    nothing = of_processes(window, [])
    check(nothing)
    left = {name for name in COLUMNS if len(nothing.rows(name))}
    assert left <= {"functions", "devices", "reasons", "device_readings", "losses"}
    of_whole = {window.texts[name] for name in window.processes["name"].tolist()} - {""}
    assert not of_whole & _names(nothing)


def test_all_of_all_processes() -> None:
    (window,) = RandomRecording(7).cut([])
    every = of_processes(window, window.processes["process"].tolist())
    for name in COLUMNS:
        if name != "addresses" and name != "chain_frames":
            assert len(every.rows(name)) == len(window.rows(name)), name
