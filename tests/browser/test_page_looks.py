# SPDX-License-Identifier: Apache-2.0
"""What a page looks like in a browser: on light and dark paper, in narrow and wide windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiflame.agent.model.profile import Profile, SampleClass, StopReason
from aiflame.agent.reports import FORMATS, ReportOptions
from browser.chromium import Page
from browser.looks import LEAST_CONTRAST, SCREENSHOTS, contrast_within, hard_to_read, misplaced
from device_profiles import Launch, Ran, device_profile_of
from profiles import MS, Sample
from support import wait_until

_S = 1_000 * MS
_STEP = "_start;[p]<module>@/app/train.py:40;[p]Trainer.step@/app/train.py:{}"
_WAIT = "clone3;[p]Loader.next@/app/data.py:9;[i]take_gil;[k]futex_wait;[k]schedule"


def _profile() -> Profile:
    """A training loop with all controls: Python, two processes, idle threads, a device, losses."""
    launch = f"{_STEP.format(12)};launch;clEnqueueNDRangeKernel"
    profile = device_profile_of(
        [Launch(launch, "matmul", 30), Launch(launch.replace("12", "14"), "softmax", 10)],
        [Ran("matmul", 16, 700, "long_scoreboard"), Ran("softmax", 8, 300, "barrier")],
        cpu=[
            Sample(f"{_STEP.format(12)};at::native::gemm", 2 * _S, count=200, first_s=0, seconds=4),
            Sample(f"{_STEP.format(13)};at::native::add", _S, count=100, first_s=4, seconds=2),
            Sample(f"{_STEP.format(14)};[i]eval;[k]clear_page", 500 * MS, count=50, first_s=5),
            Sample(launch, 500 * MS, count=50, first_s=6, end=StopReason.NO_TABLE),
            Sample(_WAIT, 8 * _S, SampleClass.BLOCKED, 1, first_s=0, seconds=8),
            Sample(f"{_STEP.format(15)};read", _S, SampleClass.BLOCKED, 0, first_s=7),
            Sample("serve;poll", 2 * _S, SampleClass.WAITING_TO_RUN, 2, first_s=2, seconds=2),
            Sample("serve;handle", 2 * _S, thread=2, count=200, first_s=4, seconds=4),
        ],
    )
    return replace(profile, recording=replace(profile.recording, duration_ns=8 * _S))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "train.html"
    path.write_bytes(FORMATS["html"].render(_profile(), ReportOptions()))
    return path


@pytest.fixture(autouse=True)
def _usual_window(page: Page) -> Iterator[None]:
    yield
    page.prefer("light")
    page.resize(1200)


# What a reader meets: address, and the name of its screenshot, "" for none.
_SCENES = [
    ("#view=wall", "wall"),
    ("#view=cpu&search=gemm", "cpu"),
    ("#view=gpu", "gpu"),
    ("#view=offcpu&mode=inverted&from=2&to=6", ""),
]


def _zoom_to_the_deepest(page: Page) -> None:
    """Zooms to a frame with many around it, which are faint then."""
    page.value(
        "(({ tree }) => aiflame.graph.zoom([...tree.depth.keys()].filter((i) => tree.total[i])"
        ".reduce((best, i) => (tree.depth[i] > tree.depth[best] ? i : best), 0)))(aiflame.graph)"
    )


@pytest.mark.parametrize("width", [1000, 1400, 1600])
@pytest.mark.parametrize(("address", "name"), _SCENES)
def test_nothing_overlaps_or_leaves_the_window(
    page: Page, report: Path, address: str, name: str, width: int
) -> None:
    page.resize(width)
    page.open(report, address)
    assert misplaced(page) == []
    if name:
        page.screenshot(SCREENSHOTS / f"{name}-{width}.png")
    # The sandwich has two flame graphs, and a path that is long.
    page.value("document.querySelector('#top tbody button').click()")
    assert misplaced(page) == []


@pytest.mark.parametrize("width", [1400, 1600])
def test_each_group_of_controls_is_one_line(page: Page, report: Path, width: int) -> None:
    page.resize(width)
    for address, _ in _SCENES:
        page.open(report, address)
        heights = page.value(
            "[...document.querySelectorAll('.bar .group')].map((g) => g.offsetHeight)"
        )
        line = page.value("document.getElementById('reset').offsetHeight")
        assert all(height <= line + 1 for height in heights), (address, heights)
        # What is shown, and on the same line what finds something in it.
        views, tools, *_ = page.value(
            "[...document.querySelectorAll('.bar .group')].map((g) => g.offsetTop)"
        )
        assert views == tools


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("address", "name"), _SCENES)
def test_text_can_be_read(page: Page, report: Path, address: str, name: str, scheme: str) -> None:
    page.prefer(scheme)
    page.open(report, address)
    paper = page.value("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(22, 25, 29)") is (scheme == "dark")
    assert hard_to_read(page) == []
    page.value("document.getElementById('help').showModal()")
    assert hard_to_read(page) == []
    page.value("document.getElementById('help').close()")
    # The names of the strip's lanes, on the page's paper.
    strip = "document.getElementById('strip-canvas')"
    assert contrast_within(page, strip, 0, 0, 100, 30) >= LEAST_CONTRAST
    # A frame on the path to the zoomed one is faint, and is read all the same.
    _zoom_to_the_deepest(page)
    wait_until(lambda: page.value("aiflame.graph.frame === 0"))
    canvas = "aiflame.graph.canvas"
    rows = page.value(
        "aiflame.graph.boxes.filter((b) => b.isPath).map((b) => aiflame.graph.top(b))"
    )
    assert len(rows) > 1
    for top in rows:
        assert contrast_within(page, canvas, 4, top + 3, 60, 12) >= LEAST_CONTRAST
    if name == "wall":
        page.screenshot(SCREENSHOTS / f"wall-zoomed-{scheme}.png")


def test_a_page_follows_the_change_to_dark(page: Page, report: Path) -> None:
    page.open(report)
    strip = "document.getElementById('strip-canvas')"
    _zoom_to_the_deepest(page)
    page.prefer("dark")
    graph = "aiflame.graph.canvas"
    wait_until(lambda: contrast_within(page, strip, 0, 0, 100, 30) >= LEAST_CONTRAST)
    wait_until(lambda: contrast_within(page, graph, 4, 3, 60, 12) >= LEAST_CONTRAST)
    assert hard_to_read(page) == []
