# SPDX-License-Identifier: Apache-2.0
"""A differential flame graph in a browser: what colours and tooltips say, also merged otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.model.profile import Difference
from aiflame.agent.reports import FORMATS, ReportOptions
from aiflame.agent.reports.difference import GREW
from aiflame.agent.reports.stall_colors import NEUTRAL
from browser.chromium import Page
from browser.looks import hard_to_read, misplaced, window
from profiles import MS, Sample, profile_of


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base is the first thread, new the second; `copy` is called from elsewhere in each."""
    profile = profile_of(
        Sample("main;old;copy", 40 * MS, thread=0),
        Sample("main;[p]step@net.py:3", 60 * MS, thread=0),
        Sample("main;[p]step@net.py:3", 90 * MS, thread=1),
        Sample("main;new;copy", 110 * MS, thread=1),
    )
    is_new = np.array([i == 1 for i in range(len(profile.threads))])
    profile = replace(profile, difference=Difference("v1", "v2", is_new))
    path = tmp_path_factory.mktemp("page") / "difference.html"
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    return path


def _facts(page: Page, name: str) -> dict[str, str]:
    """Returns what the tooltip of the first drawn frame of this name says."""
    found: list[list[str]] = page.value(
        "((g) => aiflame.facts(g, g.boxes.map((b) => b.node)"
        f".find((n) => g.nameOf(n) === {name!r})))(aiflame.graph)"
    )
    return {heading: text for heading, text in found if heading != "file"}


def _fill(page: Page, name: str) -> str:
    found: str = page.value(
        "((g) => g.faceOf(g.boxes.map((b) => b.node)"
        f".find((n) => g.nameOf(n) === {name!r})).fill)(aiflame.graph)"
    )
    return found


def test_tooltips_and_colours_tell_both_shares(page: Page, report: Path) -> None:
    page.open(report)
    assert page.text("whole").startswith("100 % = 200.000 ms of CPU time of new (v2), of base (v1)")
    assert _facts(page, "new") == {
        "new": "110.000 ms, 55.00 % of all",
        "base": "0 ns, 0.00 % of all",
        "change": "+55.00 points",
    }
    assert _facts(page, "step (net.py:3)")["change"] == "-15.00 points"
    assert (_fill(page, "new"), _fill(page, "main")) == (GREW, NEUTRAL)
    # AND what only base has is not drawn, but said
    assert page.value("aiflame.graph.boxes.every((b) => aiflame.graph.nameOf(b.node) !== 'old')")
    assert "Frames that only base has, 40.00 % of it" in page.text("graph-note")
    # AND there are no views of what is not compared
    assert page.value("document.getElementById('views').hidden")
    page.press("2")
    assert page.value("aiflame.state.view") == "difference"


@pytest.mark.parametrize("mode", ["inverted", "sandwich"])
def test_merged_otherwise_a_function_keeps_the_time_that_only_base_had_there(
    page: Page, report: Path, mode: str
) -> None:
    page.open(report)
    if mode == "inverted":
        page.press("i")
    else:
        page.value("aiflame.openSandwich(aiflame.data.names.indexOf('copy'))")
    assert _facts(page, "copy") == {
        "new": "110.000 ms, 55.00 % of all",
        "base": "40.000 ms, 40.00 % of all",
        "change": "+15.00 points",
    }


def test_choosing_frames_and_legend(page: Page, report: Path) -> None:
    page.open(report)
    words: list[str] = page.value(
        "[...document.querySelectorAll('#legend tr')].map((row) => row.cells[0].textContent)"
    )
    assert words[0] == "+55.00 points: grew"
    assert words[-1] == "-55.00 points: shrank"
    page.value("document.querySelector('[data-frames=native]').click()")
    assert page.value(
        "aiflame.graph.boxes.every((b) => !/step/.test(aiflame.graph.nameOf(b.node)))"
    )
    assert _facts(page, "main")["base"] == "100.000 ms, 100.00 % of all"


@pytest.mark.parametrize("width", [1000, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(page: Page, report: Path, width: int, scheme: str) -> None:
    with window(page, width, scheme):
        page.open(report)
        assert misplaced(page) == []
        assert hard_to_read(page) == []
        assert page.complaints == []
