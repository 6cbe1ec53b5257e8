# SPDX-License-Identifier: Apache-2.0
"""The newest part of what an agent has on disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from aiflame.agent.errors import AiflameError
from aiflame.agent.fleet.flight_recorder import (
    MONOTONIC_START_FACT,
    FlightRecorder,
    SeenProcesses,
)
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.stretches import Stretches, folders_of, keep_kernel_file, mark_done
from windows import RandomRecording

_S = 10**9


def _record(directory: Path, started_s: int, seed: int = 1) -> list[tuple[int, int]]:
    """Writes ten windows of a second as three stretches; returns where they begin and end."""
    facts: Mapping[str, str | int] = {"started_unix_ns": started_s * _S, "period_ns": 10**7}
    stretches = Stretches(directory, Log())
    windows = RandomRecording(seed).cut([second * _S for second in range(1, 10)])
    assert len(windows) == 10
    for part in (windows[:4], windows[4:8], windows[8:]):
        stretch = stretches.begin(facts, part[0])
        for window in part:
            stretch.put(window)
        stretch.close()
    return [(window.start_ns, window.end_ns) for window in windows]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "agent"


def test_what_a_clock_that_was_ahead_has_left_is_the_oldest(directory: Path) -> None:
    now_s = time.time_ns() // _S
    # GIVEN a recording of a clock that was a year ahead, and one of now
    _record(directory, now_s + 365 * 86_400)
    every = _record(directory, now_s - 600, seed=2)
    # THEN the newest is that of now,
    recorded = FlightRecorder(directory, 3 * _S)
    assert [(w.start_ns, w.end_ns) for w in recorded] == every[-3:]
    # AND what is done of the other goes, but for the last, which goes as those of now do.
    stretches = Stretches(directory, Log())
    for folder in stretches.all():
        mark_done(folder)
    stretches.trim(None, time.time_ns(), 3_600, 1 << 30)
    assert len([folder for folder in stretches.all() if int(folder.name) // _S > now_s]) == 1


@pytest.mark.parametrize(("last_s", "windows", "stretches"), [(1, 1, 1), (3, 3, 2), (99, 10, 3)])
def test_the_newest_windows_of_all_stretches(
    directory: Path, last_s: int, windows: int, stretches: int
) -> None:
    every = _record(directory, 1000)
    recorded = FlightRecorder(directory, last_s * _S)
    assert [(w.start_ns, w.end_ns) for w in recorded] == every[-windows:]
    assert recorded.stretches == stretches
    # They are the same when they are read again, though there are more by then.
    _record(directory, 1010, seed=2)
    assert [(w.start_ns, w.end_ns) for w in recorded] == every[-windows:]


def test_files_of_kernels_that_any_stretch_keeps_are_found(directory: Path) -> None:
    _record(directory, 1000)
    recorded = FlightRecorder(directory, 3 * _S)
    oldest, middle, newest = folders_of(directory)
    keep_kernel_file(middle, 7, b"seven")
    keep_kernel_file(newest, 8, b"eight")
    keep_kernel_file(oldest, 9, b"not of what is wanted")
    found = {binary: recorded.kept(binary) for binary in (7, 8, 9, 10)}
    assert (found[9], found[10]) == (None, None)
    for binary, data in ((7, b"seven"), (8, b"eight")):
        fd = found[binary]
        assert fd is not None
        assert os.read(fd, 99) == data
        os.close(fd)
    # They are of the stretch, and are no windows of it.
    assert len([*FlightRecorder(directory, 99 * _S)]) == 10


def test_what_another_agent_recorded_is_not_mixed_in(directory: Path) -> None:
    _record(directory, 1000)
    every = _record(directory, 2000, seed=2)
    recorded = FlightRecorder(directory, 5000 * _S)
    assert recorded.facts["started_unix_ns"] == 2000 * _S
    assert [(w.start_ns, w.end_ns) for w in recorded] == every


@pytest.mark.parametrize("step_s", [-20, -3, 7_200])
def test_a_clock_that_was_set_cuts_nothing_off(directory: Path, step_s: int) -> None:
    # GIVEN a recording during which the clock was set, and another before it
    _record(directory, 1000)
    facts = {"started_unix_ns": 5000 * _S, MONOTONIC_START_FACT: 7 * _S}
    stretches = Stretches(directory, Log())
    windows = RandomRecording(2).cut([second * _S for second in range(1, 10)])
    for part in (windows[:5], windows[5:]):
        stretch = stretches.begin(facts, part[0])
        for window in part:
            stretch.put(window)
        stretch.close()
        facts = {**facts, "started_unix_ns": (5000 + step_s) * _S}
    every = [(window.start_ns, window.end_ns) for window in windows]
    # THEN all of it is there, by the clock as it is now
    for last_s, count in ((8, 8), (99, 10)):
        recorded = FlightRecorder(directory, last_s * _S)
        assert [(w.start_ns, w.end_ns) for w in recorded] == every[-count:]
        assert recorded.facts["started_unix_ns"] == (5000 + step_s) * _S


def test_stretches_that_are_removed_meanwhile_are_missing(directory: Path) -> None:
    every = _record(directory, 1000)
    recorded = FlightRecorder(directory, 99 * _S)
    shutil.rmtree(directory / "stretches" / f"{1000 * _S:020d}")
    assert [(w.start_ns, w.end_ns) for w in recorded] == every[4:]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("left", [b"", b"AFLM", b"AFLMSEG1", 20, 40, bytes(4096)])
def test_a_stretch_that_lost_its_header_costs_only_itself(
    directory: Path, at: int, left: bytes | int
) -> None:
    # GIVEN a stretch whose segment is cut, or is zeros, as after a loss of power
    every = _record(directory, 1000)
    (segment,) = folders_of(directory)[at].glob("segment-*")
    segment.write_bytes(segment.read_bytes()[:left] if isinstance(left, int) else left)
    # THEN what others have is there
    recorded = FlightRecorder(directory, 99 * _S)
    parts = [every[:4], every[4:8], every[8:]]
    del parts[at]
    assert [(w.start_ns, w.end_ns) for w in recorded] == [w for part in parts for w in part]
    assert recorded.facts["started_unix_ns"] == 1000 * _S


def test_a_later_segment_that_cannot_be_read_costs_only_itself(directory: Path) -> None:
    every = _record(directory, 1000)
    (folder_of_newest,) = folders_of(directory)[2:]
    (folder_of_newest / "segment-000001.windows").write_bytes(bytes(4096))
    recorded = FlightRecorder(directory, 99 * _S)
    assert [(w.start_ns, w.end_ns) for w in recorded] == every


def test_an_agent_that_has_just_begun_has_nothing(directory: Path) -> None:
    Stretches(directory, Log())
    with pytest.raises(AiflameError, match="nothing is recorded yet"):
        FlightRecorder(directory, _S)
    (directory / "stretches" / f"{_S:020d}").mkdir()
    with pytest.raises(AiflameError, match="nothing is recorded yet"):
        FlightRecorder(directory, _S)


def test_processes_have_their_pids_and_files_are_only_looked_for_at_the_living(
    directory: Path,
) -> None:
    _record(directory, 1000)
    seen = SeenProcesses()
    for window in FlightRecorder(directory, 99 * _S):
        seen.add(window)
        mapped = {*window.mappings["binary"].tolist()}
        pids = {*window.processes["pid"].tolist()}
    assert pids <= {process.pid for process in seen.processes.values()}
    assert os.getpid() not in pids
    for binary in mapped:
        assert [*seen.roots(binary)] == []
