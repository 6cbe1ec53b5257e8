# SPDX-License-Identifier: Apache-2.0
"""The page's strip in a browser: choosing a time range by mouse, by keys, and by address."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.reports import FORMATS, ReportOptions
from browser.chromium import Page
from device_profiles import Launch, Ran, device_profile_of
from profiles import MS, RECORDING, Sample, profile_of
from support import wait_until

_S = 1_000 * MS


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten seconds: load in the first two, sleep in the next six, save and compute in the last."""
    profile = device_profile_of(
        [Launch("main;launch", "k", 7, interval=9)],
        [Ran("k", 0, 50, "barrier", interval=9)],
        cpu=[
            Sample("main;load", _S, count=100, first_s=0),
            Sample("main;load", 500 * MS, count=50, first_s=1, thread=1),
            Sample("main;idle", 6 * _S, SampleClass.BLOCKED, first_s=2, seconds=6),
            Sample("main;save", 250 * MS, count=25, first_s=8),
        ],
    )
    profile = replace(profile, recording=replace(profile.recording, duration_ns=9_900 * MS))
    path = tmp_path_factory.mktemp("page") / "run.html"
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    return path


def _x_of(page: Page, second: float) -> tuple[float, float]:
    """Where a second of the strip is on the screen."""
    left, top, width = page.value(
        "((r) => [r.left, r.top, r.width])(document.getElementById('strip-canvas')"
        ".getBoundingClientRect())"
    )
    gutter = page.value("GUTTER_PX")
    return left + gutter + (width - gutter) * second / 9.9, top + 20


def _drag(page: Page, start_s: float, end_s: float) -> None:
    page.mouse("mousePressed", *_x_of(page, start_s))
    page.mouse("mouseMoved", *_x_of(page, (start_s + end_s) / 2))
    page.mouse("mouseMoved", *_x_of(page, end_s))
    page.mouse("mouseReleased", *_x_of(page, end_s))


def _functions(page: Page) -> list[str]:
    found: list[str] = page.value(
        "[...document.querySelectorAll('#top tbody td button')].map((c) => c.textContent)"
    )
    return sorted(found)


def _address(page: Page) -> str:
    found: str = page.value("location.hash")
    return found


def test_dragging_chooses_a_range_and_everything_is_of_it(page: Page, report: Path) -> None:
    page.open(report)
    assert "7.750 s of wall time summed over 2 threads, recorded in 9.900 s" in page.text("whole")
    assert page.text("range") == "Drag over the strip to choose a time range."
    # WHEN the seconds from 7 to 8 are chosen, from the right to the left
    _drag(page, 8.5, 7.5)
    # THEN the whole, the table, the legend and the address are of these
    assert "1.250 s of wall time summed over 1 thread, 7 s to 9 s of 9.9 s" in page.text("whole")
    assert _functions(page) == ["[blocked: other]", "idle", "main", "save", "server (100)"]
    assert "1.000 s80.00 %" in page.text("legend")
    assert _address(page) == "#from=7&to=9"
    assert page.text("range") == (
        "7 s to 9 s: On CPU 250.000 ms, 0.13 CPUs; Waiting 1.000 s, 0.5 threads;"
        " GPU samples 0, 0 a second"
    )
    tip = page.value("document.getElementById('range').title")
    assert tip == "aiflame report CAPTURE --from 7s --to 9s"
    # AND a double click goes back to all
    for clicks in (1, 2):
        page.mouse("mousePressed", *_x_of(page, 5), clicks)
        page.mouse("mouseReleased", *_x_of(page, 5), clicks)
    assert "7.750 s of wall time" in page.text("whole")
    assert _address(page) == ""


def test_an_address_restores_its_range(page: Page, report: Path) -> None:
    page.open(report, "#from=0&to=2&view=cpu")
    assert "1.500 s of CPU time summed over 2 threads, 0 s to 2 s of 9.9 s" in page.text("whole")
    assert _functions(page) == ["load", "main", "server (100)"]
    assert page.text("graph-note") == "Attribution in this time range: no device samples."
    page.open(report, "#from=9&to=10&view=gpu")
    assert page.text("graph-note") == "Attribution in this time range: 100.00 % exact."
    assert "50 device samples of 1 kernel, 9 s to 9.9 s of 9.9 s" in page.text("whole")


@pytest.mark.parametrize(
    "address", ["#from=5&to=5", "#from=9&to=3", "#from=-3&to=x", "#from=40&to=50", "#from=0&to=10"]
)
def test_an_address_that_makes_no_sense_is_of_all(page: Page, report: Path, address: str) -> None:
    page.open(report, address)
    assert "7.750 s of wall time" in page.text("whole")


def test_the_keys_choose_a_range(page: Page, report: Path) -> None:
    page.open(report)
    page.value("document.getElementById('strip-canvas').focus()")
    page.press("ArrowRight")
    assert "0 s to 1 s" in page.text("whole")
    page.press("ArrowRight", shift=True)
    assert "0 s to 2 s" in page.text("whole")
    page.press("End")
    assert "8 s to 9.9 s" in page.text("whole")
    page.press("ArrowLeft")
    page.press("ArrowLeft", shift=True)
    assert "7 s to 8 s" in page.text("whole")
    page.press("Home")
    assert "0 s to 1 s" in page.text("whole")
    page.press("Escape")
    assert "7.750 s of wall time" in page.text("whole")


def test_a_range_without_anything_says_so(page: Page, report: Path) -> None:
    page.open(report, "#from=9&to=10")
    assert page.text("empty") == "This selection has no wall time."
    assert page.value("document.getElementById('empty').hidden") is False


def test_back_goes_to_the_range_before(page: Page, report: Path) -> None:
    page.open(report)
    _drag(page, 0.5, 1.5)
    assert _address(page) == "#from=0&to=2"
    page.value("history.back()")
    page_is_whole = "document.getElementById('whole').textContent.includes('7.750 s')"
    wait_until(lambda: page.value(page_is_whole))


def test_the_numbers_of_a_second_are_told(page: Page, report: Path) -> None:
    page.open(report)
    x, y = _x_of(page, 9.5)
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert page.text("tip") == (
        "9 s to 9.9 sOn CPU0 ns, 0.00 CPUsWaiting0 ns, 0.0 threadsGPU samples50, 56 a secondsync 50"
    )


def test_a_moment_at_the_end_is_no_peak(page: Page, tmp_path: Path) -> None:
    profile = profile_of(
        Sample("main", 500 * MS, first_s=0),
        Sample("main", 10 * MS, first_s=2),
        recording=replace(RECORDING, duration_ns=2_004 * MS),
    )
    (tmp_path / "run.html").write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    page.open(tmp_path / "run.html")
    assert page.value("aiflame.strip.lanes[0].most") == 0
    page.open(tmp_path / "run.html", "#from=2&to=3")
    assert page.text("range") == "2 s to 2.004 s: On CPU 10.000 ms, 0.02 CPUs"


def test_the_strip_follows_the_chosen_threads(page: Page, report: Path) -> None:
    page.open(report, "#threads=t1")
    assert page.value("aiflame.strip.lanes.map((lane) => lane.name)") == ["On CPU", "GPU samples"]
    assert page.value("Array.from(aiflame.strip.lanes[0].total)")[:2] == [0, 500 * MS]
