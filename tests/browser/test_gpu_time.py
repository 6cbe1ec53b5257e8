# SPDX-License-Identifier: Apache-2.0
"""The view of GPU time on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiflame.agent.reports import FORMATS, ReportOptions, View
from browser.chromium import Page
from device_profiles import (
    Launch,
    Timed,
    device_profile_of,
    small_device_profile,
    small_timed_profile,
    with_times,
)
from profiles import MS, Sample


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run.html"
    path.write_bytes(
        FORMATS["html"].render(small_timed_profile(), ReportOptions(view=View.GPU_TIME))
    )
    return path


def _totals(page: Page) -> dict[str, str]:
    """The table of frames: the total of each."""
    found: dict[str, str] = page.value(
        "Object.fromEntries([...document.querySelectorAll('#top tbody tr')]"
        ".map((row) => [row.cells[0].textContent, row.cells[3].textContent]))"
    )
    return found


def _shown(page: Page, view: str) -> bool:
    found: bool = page.value(f"!document.querySelector('[data-view={view}]').hidden")
    return found


def test_the_page_opens_at_gpu_time(page: Page, report: Path) -> None:
    page.open(report)
    assert page.text("whole") == "100 % = 25.000 ms of GPU time, recorded in 2.000 s"
    totals = _totals(page)
    assert totals["matmul"] == "20.000 ms"
    assert (totals["fill"], totals["ghost"]) == ("3.000 ms", "2.000 ms")
    assert totals["step (train.py:12)"] == "8.000 ms"
    assert totals["step (train.py:19)"] == "12.000 ms"
    assert totals["[unknown launch]"] == "2.000 ms"
    assert "Attribution of GPU time: 72.00 % exact, 20.00 % shared" in page.text("graph-note")
    assert page.value("document.getElementById('colors').hidden")
    assert page.value("document.getElementById('thread-choice').hidden")


def _facts(page: Page, name: str, ns: int) -> dict[str, str]:
    """What is told about the frame of that name and width."""
    node = (
        "aiflame.graph.tree.label.findIndex((l, i) => i &&"
        f" aiflame.graph.nameOf(i) === '{name}' && aiflame.graph.tree.total[i] === {ns})"
    )
    facts: dict[str, str] = page.value(f"Object.fromEntries(aiflame.facts(aiflame.graph, {node}))")
    return facts


def test_a_kernels_frame_tells_its_own_runs_beside_those_of_the_whole_kernel(
    page: Page, report: Path
) -> None:
    page.open(report)
    facts = _facts(page, "matmul", 12 * MS)
    assert facts["time"] == "12.000 ms, 48.00 % of all"
    assert facts["exact"] == "9.000 ms, 75.00 % of the frame"
    assert facts["shared"] == "3.000 ms, 25.00 % of the frame"
    # 9 ms of 10 runs are its own; of 7 runs it is not known which stack launched which.
    assert facts["ran"] == "10 runs, 900.000 us each, and a share of others"
    assert facts["whole kernel"] == "47 runs, 425.532 us each; 40 launches from 2 stacks"
    facts = _facts(page, "matmul", 8 * MS)
    assert facts["ran"] == "30 runs, 200.000 us each, and a share of others"
    facts = _facts(page, "fill", 3 * MS)
    assert facts["ran"] == "8 runs, 375.000 us each"
    # AND merged from the leaf, where one frame is the whole kernel
    page.open(report, "#mode=inverted")
    facts = _facts(page, "matmul", 20 * MS)
    assert facts["ran"] == "40 runs, 375.000 us each, and a share of others"


def test_the_frame_of_a_kernel_whose_runs_are_all_shared_says_so(
    page: Page, tmp_path: Path
) -> None:
    profile = with_times(
        device_profile_of([Launch("main;a", "k", 1), Launch("main;b", "k", 1)]),
        [Timed("k", 4 * MS, None, 2, 900 * MS)],
    )
    report = tmp_path / "run.html"
    report.write_bytes(FORMATS["html"].render(profile, ReportOptions(view=View.GPU_TIME)))
    page.open(report)
    facts = _facts(page, "k", 2 * MS)
    assert facts["ran"] == "a share of runs that several stacks launched"
    assert facts["whole kernel"] == "2 runs, 2.000 ms each; 2 launches from 2 stacks"


def test_views_change_by_button_and_key_and_are_in_the_address(page: Page, report: Path) -> None:
    page.open(report)
    assert _shown(page, "gpu")
    assert _shown(page, "gputime")
    for key, words in (
        ("4", "1,000 device samples of 4 kernels"),
        ("5", "25.000 ms of GPU time"),
        ("1", "of wall time summed over"),
    ):
        page.value(f"window.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
        assert words in page.text("whole")
    assert page.value("location.hash") == "#view=wall"
    page.value("document.querySelector('[data-view=gputime]').click()")
    assert page.value("location.hash") == ""
    page.open(report, "#view=gpu")
    assert "device samples" in page.text("whole")


def test_a_time_range_has_what_ended_in_it(page: Page, tmp_path: Path) -> None:
    profile = with_times(
        device_profile_of(
            [Launch("main;a", "k", 3), Launch("main;b", "k", 1)],
            cpu=[Sample("main;a", 10 * MS, first_s=0), Sample("main;b", 10 * MS, first_s=1)],
        ),
        [
            Timed("k", 20 * MS, 0, 1, 900 * MS),
            Timed("k", 3 * MS, 1, 1, 1_100 * MS),
            Timed("k", 5 * MS, None, 1, 1_200 * MS),
            Timed("ghost", 2 * MS, None, 1, 1_900 * MS),
        ],
    )
    report = tmp_path / "run.html"
    report.write_bytes(FORMATS["html"].render(profile, ReportOptions(view=View.GPU_TIME)))
    page.open(report, "#from=0&to=1")
    assert "20.000 ms of GPU time, 0 s to 1 s of 2 s recorded" in page.text("whole")
    assert "Attribution of GPU time in this time range: 100.00 % exact." in page.text("graph-note")
    assert "GPU time 20.000 ms, 0.02 kernels at once" in page.text("range")
    page.open(report, "#from=1&to=2&mode=inverted")
    assert _totals(page)["k"] == "8.000 ms"
    facts = _facts(page, "k", 8 * MS)
    assert "ran" not in facts
    assert facts["whole kernel"].endswith(" in the whole recording")
    assert "30.00 % exact, 50.00 % shared, 20.00 % unattributed" in page.text("graph-note")


def test_merged_from_the_leaf_kernels_come_first(page: Page, report: Path) -> None:
    page.open(report, "#mode=inverted")
    first = page.value(
        "Array.from(aiflame.graph.tree.label).map((l, i) => aiflame.graph.tree.depth[i] === 1"
        " ? [aiflame.data.names[l], aiflame.graph.tree.total[i]] : null).filter(Boolean)"
    )
    assert sorted(first) == [["fill", 3e6], ["ghost", 2e6], ["matmul", 20e6]]


def test_a_page_without_times_has_no_such_view(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    data = FORMATS["html"].render(small_device_profile(), ReportOptions(view=View.GPU_TIME))
    path.write_bytes(data)
    page.open(path, "#view=gputime")
    assert not _shown(page, "gputime")
    assert "of wall time" in page.text("whole")
    page.value("window.dispatchEvent(new KeyboardEvent('keydown', {key: '5'}))")
    assert "of wall time" in page.text("whole")
