# SPDX-License-Identifier: Apache-2.0
"""The lanes of devices on the page's strip: how busy they were, and their memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.model.gpu import BUSY_UNKNOWN, DEVICE_READING_DTYPE, NO_SIZE, Device, Tier
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports import FORMATS, ReportOptions
from browser.chromium import Page
from device_profiles import Launch, device_profile_of
from profiles import MS, Sample

_S = 1_000 * MS
_GIB = 1 << 30
_SECONDS = 20


def _profile() -> Profile:
    """Twenty seconds of three devices: one that works, one that begins late, one of MIG."""
    profile = device_profile_of(
        [Launch("main;launch", "k", 7, interval=9)],
        [],
        cpu=[Sample("main;load", _SECONDS * _S // 2, count=1000, first_s=0, seconds=_SECONDS)],
        devices=(
            Device("nvidia", "NVIDIA H100 80GB HBM3", Tier.TIMES, "", 0),
            Device("nvidia", "NVIDIA H100 80GB HBM3", Tier.TIMES, "", 0),
            Device("nvidia", "NVIDIA H100 MIG 1g.10gb", Tier.LAUNCHES, "", 0),
        ),
    )
    rows = []
    for second in range(_SECONDS):
        times = (second * _S + MS, (second + 1) * _S + MS)
        busy = 0 if second < 3 else 930 + 30 * (second % 3) if second % 7 else 350
        rows.append((0, *times, busy, (4 + min(second, 8) * 7) * _GIB, 80 * _GIB))
        if second >= 10:
            rows.append((1, *times, 10 * second, 12 * _GIB, 80 * _GIB))
        rows.append((2, *times, BUSY_UNKNOWN, 5 * _GIB, 10 * _GIB))
    readings = np.array(rows, DEVICE_READING_DTYPE)
    return replace(
        profile,
        gpu=replace(profile.gpu, readings=readings),
        recording=replace(profile.recording, duration_ns=_SECONDS * _S),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run.html"
    path.write_bytes(FORMATS["html"].render(_profile(), ReportOptions()))
    return path


def _hover(page: Page, second: float) -> str:
    left, top, width = page.value(
        "((r) => [r.left, r.top, r.width])(document.getElementById('strip-canvas')"
        ".getBoundingClientRect())"
    )
    gutter = page.value("GUTTER_PX")
    x = left + gutter + (width - gutter) * second / _SECONDS
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=top + 20)
    return page.text("tip")


def _pixel(page: Page, lane: int, second: float, share: float) -> list[int]:
    """Returns the color of a lane at a second, at a height from its floor."""
    found: list[int] = page.value(
        f"""(() => {{
        const strip = aiflame.strip, ratio = window.devicePixelRatio || 1;
        const x = strip.x({second}), y = {lane} * (LANE_PX + LANE_GAP_PX) + LANE_PX * (1 - {share});
        return [...strip.canvas.getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data];
        }})()"""
    )
    return found


def test_each_device_has_a_lane(page: Page, report: Path) -> None:
    page.open(report)
    names = page.value("aiflame.strip.lanes.map((lane) => lane.name)")
    assert names == ["On CPU", "GPU launches", "GPU 0", "GPU 1", "GPU 2"]
    assert page.value("aiflame.strip.lanes.slice(2).map((lane) => lane.labels)") == [
        ["GPU 0 busy, most 99 %", "60 of 80 GiB"],
        ["GPU 1 busy, most 19 %", "12 of 80 GiB"],
        ["GPU 2 busy: not known", "5.0 of 10 GiB"],
    ]


def test_bars_are_shares_of_all_the_time(page: Page, report: Path) -> None:
    page.open(report)
    empty = _pixel(page, 2, 1.5, 0.5)
    # GIVEN a second in which the device was busy for 35 %, and one for 96 %
    assert _pixel(page, 2, 7.4, 0.2) != empty
    assert _pixel(page, 2, 7.4, 0.5) == empty
    assert _pixel(page, 2, 4.4, 0.5) == _pixel(page, 2, 7.4, 0.2)
    # AND one before which nothing was told
    assert _pixel(page, 3, 5.4, 0.02) == empty


def test_what_is_told_of_a_second(page: Page, report: Path) -> None:
    page.open(report)
    words = _hover(page, 12.5)
    assert "GPU 0busy 93 %, memory 60 of 80 GiBNVIDIA H100 80GB HBM3" in words
    assert "GPU 1busy 12 %, memory 12 of 80 GiB" in words
    assert "GPU 2busy: not known, memory 5.0 of 10 GiBNVIDIA H100 MIG 1g.10gb" in words
    assert "GPU 1busy: not known, memory: not known" in _hover(page, 2.5)


def test_a_range_has_the_mean_and_the_most(page: Page, report: Path) -> None:
    # GIVEN seconds of 99, 93, 96 and 35 %
    page.open(report, "#from=11&to=15")
    words = page.text("range")
    assert "GPU 0 busy 81 % (most 99 %), memory up to 60 of 80 GiB" in words
    assert "GPU 1 busy 13 % (most 14 %), memory up to 12 of 80 GiB" in words


def test_there_are_no_lanes_without_readings(page: Page, tmp_path: Path) -> None:
    profile = _profile()
    bare = replace(profile, gpu=replace(profile.gpu, readings=profile.gpu.readings[:0]))
    (tmp_path / "run.html").write_bytes(FORMATS["html"].render(bare, ReportOptions()))
    page.open(tmp_path / "run.html")
    names = page.value("aiflame.strip.lanes.map((lane) => lane.name)")
    assert names == ["On CPU", "GPU launches"]


def test_memory_that_is_not_told_has_no_line(page: Page, tmp_path: Path) -> None:
    profile = _profile()
    readings = profile.gpu.readings.copy()
    readings["used_bytes"], readings["total_bytes"] = NO_SIZE, 0
    changed = replace(profile, gpu=replace(profile.gpu, readings=readings))
    (tmp_path / "run.html").write_bytes(FORMATS["html"].render(changed, ReportOptions()))
    page.open(tmp_path / "run.html")
    assert page.value("aiflame.strip.lanes[2].labels") == [
        "GPU 0 busy, most 99 %",
        "memory: not known",
    ]
    assert _pixel(page, 2, 1.5, 0.5) == _pixel(page, 2, 1.5, 0.9)


def test_of_many_devices_the_first_have_lanes(page: Page, tmp_path: Path) -> None:
    profile = _profile()
    rows = profile.gpu.readings[profile.gpu.readings["device"] == 0]
    readings = np.concatenate([rows] * 18)
    readings["device"] = np.repeat(np.arange(18), len(rows))
    gpu = replace(profile.gpu, readings=readings, devices=profile.gpu.devices[:1] * 18)
    changed = replace(profile, gpu=gpu)
    (tmp_path / "run.html").write_bytes(FORMATS["html"].render(changed, ReportOptions()))
    page.open(tmp_path / "run.html")
    names = page.value("aiflame.strip.lanes.map((lane) => lane.name)")
    assert names[2:] == [f"GPU {number}" for number in range(16)]
    assert page.text("range").endswith(" 2 more devices are in aiflame stats.")
    assert "NVIDIA" not in _hover(page, 12.5)
