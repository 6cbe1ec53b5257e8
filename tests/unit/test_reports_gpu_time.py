# SPDX-License-Identifier: Apache-2.0
"""GPU time in every format: nanoseconds of kernels under the stacks that launched them."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from aiflame.agent.commands.record_devices import device_lines
from aiflame.agent.model.gpu import Device, Tier
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports import FORMATS, Frames, ReportOptions, View
from aiflame.agent.reports.csv_tables import csv_files
from aiflame.agent.reports.device_facts import absence, times_absence
from aiflame.agent.reports.device_times import device_times
from aiflame.agent.reports.stats import tables
from aiflame.agent.reports.time_range import in_range, whole_seconds
from device_profiles import (
    Launch,
    Timed,
    device_profile_of,
    hostile_device_profile,
    small_device_profile,
    small_timed_profile,
    with_times,
)
from pprof_decoder import decode
from profiles import HOSTILE_NAMES, MS, empty_profile, small_profile

_TIME = ReportOptions(view=View.GPU_TIME)
_S = 1_000 * MS

# Of small_timed_profile: what is shared is divided 2:3.
_TRAIN = "server (100);_start;<module> (train.py:40);step (train.py:{});launch"
_STEPS = {
    (_TRAIN.format(12), "matmul"): 8 * MS,
    (_TRAIN.format(19), "matmul"): 12 * MS,
    ("client (200);main;fill_all", "fill"): 3 * MS,
    ("server (100);[unknown launch]", "ghost"): 2 * MS,
}
_CALL = ";clEnqueueNDRangeKernel"


def _expected() -> dict[str, int]:
    return {
        f"{stack}{'' if 'unknown' in stack else _CALL};-;{kernel}": ns
        for (stack, kernel), ns in _STEPS.items()
    }


def _folded(profile: Profile, **options: object) -> dict[str, int]:
    chosen = replace(_TIME, plain=True, **options)  # type: ignore[arg-type]
    lines = FORMATS["folded"].render(profile, chosen).decode().splitlines()
    return {stack: int(ns) for stack, _, ns in (line.rpartition(" ") for line in lines)}


def test_folded_has_nanoseconds_under_launch_stacks() -> None:
    assert _folded(small_timed_profile()) == _expected()
    lines = FORMATS["folded"].render(small_timed_profile(), _TIME).decode().splitlines()
    assert all(line.partition(" ")[0] or "_[G] " in line for line in lines)
    assert sum("matmul_[G] " in line for line in lines) == 2


def test_frames_of_launch_stacks_are_chosen_as_everywhere() -> None:
    found = _folded(small_timed_profile(), frames=Frames.PYTHON)
    assert found["server (100);<module> (train.py:40);step (train.py:12);-;matmul"] == 8 * MS


@pytest.mark.parametrize("inverted", [False, True])
def test_svg_has_the_same_numbers_and_says_how_sure_they_are(inverted: bool) -> None:
    data = FORMATS["svg"].render(small_timed_profile(), replace(_TIME, inverted=inverted))
    svg = ET.fromstring(data)  # noqa: S314 - our own
    texts = [text.text or "" for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "100 % = 25.000 ms of GPU time of 3 kernels on 1 device, recorded in 2.000 s" in texts
    note = "Attribution of GPU time: 72.00 % exact, 20.00 % shared, 8.00 % unattributed."
    assert note in texts
    titles = [title.text or "" for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    matmul = [title for title in titles if title.startswith("matmul (")]
    if inverted:
        assert matmul == ["matmul (20.000 ms, 80.00 %; launch stack 75.00 % exact, 25.00 % shared)"]
    else:
        assert sorted(matmul) == [
            "matmul (12.000 ms, 48.00 %; launch stack 75.00 % exact, 25.00 % shared)",
            "matmul (8.000 ms, 32.00 %; launch stack 75.00 % exact, 25.00 % shared)",
        ]


def test_pprof_has_nanoseconds_and_labels() -> None:
    pprof = decode(FORMATS["pprof"].render(small_timed_profile(), _TIME))
    assert pprof.sample_types == ["gpu_time/nanoseconds"]
    assert (pprof.default_type, pprof.period) == ("gpu_time", ("gpu_time/nanoseconds", 1))
    sums: Counter[str] = Counter()
    of_kernel: Counter[str] = Counter()
    for sample in pprof.samples:
        ns = sample.values["gpu_time/nanoseconds"]
        sums[str(sample.labels["attribution"])] += ns
        of_kernel[str(sample.labels["kernel"])] += ns
        assert sample.lines[0] == str(sample.labels["kernel"])
        assert sample.labels["device"] == "Test 100"
        assert ("[unknown launch]" in sample.lines) == (sample.labels["kernel"] == "ghost")
        assert "stall_reason" not in sample.labels
    assert sums == {"exact": 18 * MS, "shared": 5 * MS, "unattributed": 2 * MS}
    assert of_kernel == {"matmul": 20 * MS, "fill": 3 * MS, "ghost": 2 * MS}


def test_speedscope_has_profiles_of_their_own() -> None:
    both = json.loads(FORMATS["speedscope"].render(small_timed_profile(), ReportOptions()))
    assert [(p["name"], p["unit"]) for p in both["profiles"]][4:] == [
        ("server (100), GPU time", "nanoseconds"),
        ("client (200), GPU time", "nanoseconds"),
    ]
    alone = json.loads(FORMATS["speedscope"].render(small_timed_profile(), _TIME))
    names = [frame["name"] for frame in alone["shared"]["frames"]]
    found = {
        ";".join([p["name"].partition(",")[0], *(names[i] for i in stack)]): ns
        for p in alone["profiles"]
        for stack, ns in zip(p["samples"], p["weights"], strict=True)
    }
    assert found == _expected()
    samples = json.loads(
        FORMATS["speedscope"].render(small_timed_profile(), ReportOptions(view=View.GPU))
    )
    assert {p["unit"] for p in samples["profiles"]} == {"none"}


def test_csv_has_times_of_kernels() -> None:
    text = csv_files(small_timed_profile(), _TIME)["kernels.csv"].decode()
    rows = {row["kernel"]: row for row in csv.DictReader(io.StringIO(text))}
    matmul = rows["matmul"]
    assert (matmul["total_time_us"], matmul["avg_time_us"]) == ("20000.0", "425.532")
    assert (matmul["min_time_us"], matmul["max_time_us"]) == ("", "")
    scale = next(row for name, row in rows.items() if name.startswith("void scale_b"))
    assert scale["total_time_us"] == scale["avg_time_us"] == ""


def test_stats_have_tables_of_gpu_time() -> None:
    found = {table.title: table for table in tables(small_timed_profile(), View.GPU_TIME, 2)}
    kernels = found["Top kernels"]
    assert kernels.rows[0] == (
        *("20.00", "80.0 %", "47", "425.5", "40", "2", "matmul", "server (100)"),
    )
    assert kernels.left_out == 1
    assert kernels.whole.startswith("100 % = 25.000 ms on devices")
    assert "72.00 % exact, 20.00 % shared, 8.00 % unattributed" in kernels.whole
    stacks = found["Top launch stacks"]
    assert [row[:3] for row in stacks.rows] == [
        ("12.00", "48.0 %", "75.00 % exact, 25.00 % shared"),
        ("8.00", "32.0 %", "75.00 % exact, 25.00 % shared"),
    ]
    assert "step (train.py:19)" in stacks.rows[0][-1]
    assert "Calls of device APIs" in found
    assert "Top functions, GPU time" not in found


def test_a_time_range_has_what_ended_in_it() -> None:
    whole = small_timed_profile()
    first, second = (in_range(whole, whole_seconds(s * _S, (s + 1) * _S, 2 * _S)) for s in range(2))
    assert sum(_folded(first).values()) == 15 * MS
    assert sum(_folded(second).values()) == 10 * MS
    sums = Counter(_folded(first)) + Counter(_folded(second))
    assert sums == _expected()


def test_kernels_that_ran_on_several_devices_are_told_apart_in_pprof_only() -> None:
    device = Device("nvidia", "Test 200", Tier.TIMES, "", 0)
    profile = with_times(
        device_profile_of([Launch("main", "k", 2)], devices=(device, replace(device, name="b"))),
        [Timed("k", 300, 0), Timed("k", 500, 0)],
    )
    profile.gpu.times["device"] = [0, 1]
    assert list(_folded(profile).values()) == [800]
    samples = decode(FORMATS["pprof"].render(profile, _TIME)).samples
    found = {s.labels["device"]: s.values["gpu_time/nanoseconds"] for s in samples}
    assert found == {"Test 200": 300, "b": 500}
    svg = FORMATS["svg"].render(profile, _TIME).decode()
    assert "of 1 kernel on 2 devices" in svg


def test_a_recording_without_times_says_why() -> None:
    assert times_absence(small_timed_profile()) == ""
    assert times_absence(empty_profile()).startswith("No device API calls were seen")
    assert times_absence(small_device_profile()) == (
        "No device told how long it ran kernels, but there are samples of them (--view gpu)."
    )
    absent = Device("nvidia", "", Tier.LAUNCHES, "no driver", 0)
    launches = device_profile_of([Launch("main", "k", 2)], devices=(absent,))
    assert times_absence(launches) == "No device told how long it ran kernels: nvidia: no driver"
    timed = with_times(launches, [Timed("k", 300, 0)])
    assert absence(timed) == (
        "Device API calls were seen, but no device samples were taken, only how long kernels ran"
        " (--view gputime): nvidia: no driver"
    )


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_nothing_makes_a_whole_file(form: str) -> None:
    if form == "pstats":
        return
    for profile in (empty_profile(), small_profile(), small_device_profile()):
        assert FORMATS[form].render(profile, _TIME) or form == "folded"
    assert not len(device_times(small_device_profile()))


@pytest.mark.parametrize("form", ["svg", "folded", "html", "pprof", "speedscope"])
def test_hostile_names_stay_data(form: str) -> None:
    names = [name for name in HOSTILE_NAMES if name]
    profile = with_times(hostile_device_profile(), [Timed(name, 5, None) for name in names])
    data = FORMATS[form].render(profile, _TIME)
    if form == "svg":
        ET.fromstring(data)  # noqa: S314 - our own
    if form in ("html", "svg"):
        assert b"<script>alert" not in data


def test_record_says_how_long_devices_ran() -> None:
    lines = [*device_lines(small_timed_profile())]
    assert "25.000 ms of GPU time in 3 kernels." in lines
    assert any(line.startswith("Attribution of GPU time: 72.00 % exact") for line in lines)
