# SPDX-License-Identifier: Apache-2.0
"""How busy devices were, and their memory: in windows, time ranges, statistics and tables."""

from __future__ import annotations

import csv
import io
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from aiflame.agent.model.gpu import (
    BUSY_UNKNOWN,
    DEVICE_READING_DTYPE,
    NO_SIZE,
    Device,
    GpuProfile,
    Tier,
)
from aiflame.agent.model.profile import Profile, TimeRange
from aiflame.agent.model.window import BadWindow, Window, check, rows_of
from aiflame.agent.reports import View
from aiflame.agent.reports.base import ReportOptions
from aiflame.agent.reports.csv_tables import csv_files
from aiflame.agent.reports.device_readings import loads, seconds_of
from aiflame.agent.reports.stats import tables
from aiflame.agent.reports.table import Table
from aiflame.agent.reports.time_range import in_range
from device_profiles import small_device_profile
from profiles import MS, RECORDING, Sample, profile_of

_S = 1_000 * MS
_GIB = 1 << 30
_DEVICES = (
    Device("nvidia", "NVIDIA H100", Tier.TIMES, "", 0),
    Device("nvidia", "=cmd()", Tier.TIMES, "", 0),
)
# Of the first device four seconds, of which one took two; of the other, memory alone.
_ROWS = [
    (0, 300 * MS, _S + MS, 100, 1 * _GIB, 80 * _GIB),
    (0, _S + MS, 2 * _S, 300, 2 * _GIB, 80 * _GIB),
    (0, 2 * _S, 4 * _S + 2 * MS, 800, 9 * _GIB, 80 * _GIB),
    (1, 0, _S, BUSY_UNKNOWN, 3 * _GIB, 10 * _GIB),
    (1, 3 * _S, 4 * _S, 250, NO_SIZE, 0),
]


def _gpu(*rows: tuple[int, ...]) -> GpuProfile:
    return GpuProfile(devices=_DEVICES, readings=np.array([*rows], DEVICE_READING_DTYPE))


def _profile(*rows: tuple[int, ...]) -> Profile:
    recording = replace(RECORDING, duration_ns=4_500 * MS)
    profile = profile_of(Sample("main", 4 * _S, count=400, seconds=4), recording=recording)
    return replace(profile, gpu=_gpu(*rows))


@pytest.mark.parametrize(
    ("begin_ms", "end_ms", "expected"),
    [
        (0, 1000, (0, 1)),
        (3, 1002, (0, 1)),
        (998, 1999, (1, 2)),
        (700, 1000, (0, 1)),  # the first of a recording
        (9000, 9300, (9, 10)),  # the last
        (9001, 9001, (9, 10)),
        (2000, 4500, (2, 5)),
        (1400, 1600, (1, 2)),
    ],
)
def test_readings_are_of_whole_seconds(
    begin_ms: int, end_ms: int, expected: tuple[int, int]
) -> None:
    gpu = _gpu((0, begin_ms * MS, end_ms * MS, 0, 0, 0))
    first, end = seconds_of(gpu.readings)
    assert (first.tolist(), end.tolist()) == ([expected[0]], [expected[1]])


def test_buckets_have_the_mean_share_and_the_most_memory() -> None:
    first, second = loads(_gpu(*_ROWS), 0, 1, 5)
    assert first.busy[:4] == pytest.approx([0.1, 0.3, 0.8, 0.8])
    assert (first.used_bytes[:4] / _GIB).tolist() == [1, 2, 9, 9]
    assert np.isnan(first.busy[4]) and np.isnan(first.used_bytes[4])
    assert (first.total_bytes, second.total_bytes) == (80 * _GIB, 10 * _GIB)
    assert np.flatnonzero(~np.isnan(second.busy)).tolist() == [3]
    assert np.flatnonzero(~np.isnan(second.used_bytes)).tolist() == [0]
    # AND a wider bucket adds up by how long each lasted: 0.701 s, 0.999 s and 1.001 s of 2.002 s
    wide, _ = loads(_gpu(*_ROWS), 0, 3, 2)
    whole = 0.701 * 0.1 + 0.999 * 0.3 + 1.001 * 0.8
    assert wide.busy[0] == pytest.approx(whole / 2.701, abs=1e-6)
    assert wide.busy[1] == pytest.approx(0.8)
    assert (wide.used_bytes / _GIB).tolist() == [9, 9]


def test_several_readings_of_a_second_count_for_as_long_as_they_lasted() -> None:
    rows = [(0, 0, 250 * MS, 1000, 5, 9), (0, 250 * MS, _S, 200, 2, 9)]
    (load,) = loads(_gpu(*rows), 0, 1, 1)
    assert load.busy[0] == pytest.approx(0.4, abs=1e-6)
    assert load.used_bytes[0] == 5


def test_readings_of_ten_seconds_each_take_no_more_room_than_others() -> None:
    # GIVEN as many as two days have, all in one hour, and all as long as can be
    gpu = _gpu(*[(0, at % 3590 * _S, (at % 3590 + 10) * _S, 500, 1, 2) for at in range(200_000)])
    tracemalloc.start()
    try:
        (load,) = loads(gpu, 0, 1, 3_600)
        assert tracemalloc.get_traced_memory()[1] < 150 << 20
    finally:
        tracemalloc.stop()
    assert load.busy[:-1] == pytest.approx(0.5)


def test_buckets_before_and_after_the_readings_are_unknown() -> None:
    (load,) = loads(_gpu(_ROWS[1]), 0, 1, 4)
    assert np.isnan(load.busy).tolist() == [True, False, True, True]
    (load,) = loads(_gpu(_ROWS[1]), 2, 1, 4)
    assert np.isnan(load.busy).all()


def test_a_time_range_has_the_readings_of_its_seconds() -> None:
    profile = in_range(_profile(*_ROWS), TimeRange(1 * _S, 3 * _S))
    assert profile.gpu.readings.tolist() == [
        (0, _S + MS, 2 * _S, 300, 2 * _GIB, 80 * _GIB),
        (0, 2 * _S, 3 * _S, 800, 9 * _GIB, 80 * _GIB),
    ]
    assert len(in_range(_profile(*_ROWS), TimeRange(4 * _S, 4_500 * MS)).gpu.readings) == 0


def _load(profile: Profile, view: View) -> list[Table]:
    return [table for table in tables(profile, view, 10) if table.title == "Load of devices"]


@pytest.mark.parametrize("view", [View.WALL, View.GPU, View.GPU_TIME])
def test_stats_have_the_mean_and_the_most_of_each_device(view: View) -> None:
    (table,) = _load(_profile(*_ROWS), view)
    assert table.columns == (
        *(">busy", ">at most", ">memory GiB", ">at most GiB", ">of GiB", "device", "model"),
    )
    assert table.rows == (
        ("53.3 %", "80.0 %", "4.00", "9.00", "80.00", "GPU 0", "NVIDIA H100"),
        ("25.0 %", "25.0 %", "3.00", "3.00", "10.00", "GPU 1", "=cmd()"),
    )


@pytest.mark.parametrize("view", [View.WALL, View.GPU])
def test_stats_without_readings_have_no_such_table(view: View) -> None:
    assert _load(_profile(), view) == []
    assert _load(small_device_profile(), view) == []


def test_a_table_has_each_reading() -> None:
    text = csv_files(_profile(*_ROWS), ReportOptions())["readings.csv"].decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows[0] == {
        **{"device": "GPU 0", "model": "NVIDIA H100", "begin_us": "300000.0"},
        **{"end_us": "1001000.0", "busy_pct": "10.0", "memory_used_bytes": str(_GIB)},
        "memory_total_bytes": str(80 * _GIB),
    }
    assert [row["busy_pct"] for row in rows[3:]] == ["", "25.0"]
    assert (rows[4]["memory_used_bytes"], rows[4]["memory_total_bytes"]) == ("", "")
    # A name that a spreadsheet would compute is none any more.
    assert rows[3]["model"] == "'=cmd()"


def _window(*row: int) -> Window:
    device = rows_of("devices", (0, 0, 0, 0, 0, 0, 0))
    readings = rows_of("device_readings", row)
    return Window.of(0, 0, 1_000, {"devices": device, "device_readings": readings})


def test_a_window_may_hold_what_a_device_does_not_tell() -> None:
    check(_window(0, 0, 1_000, 1_000, 8, 8))
    check(_window(0, 0, 1_000, BUSY_UNKNOWN, NO_SIZE, 0))


@pytest.mark.parametrize(
    "row",
    [
        (1, 0, 1_000, 0, 0, 0),
        (0, 0, 1_001, 0, 0, 0),
        (0, 7, 6, 0, 0, 0),
        (0, 0, 1_000, 1_001, 0, 0),
        (0, 0, 1_000, 0, 9, 8),
    ],
)
def test_a_reading_that_cannot_be_is_in_no_window(row: tuple[int, ...]) -> None:
    with pytest.raises(BadWindow, match="device_readings"):
        check(_window(*row))
