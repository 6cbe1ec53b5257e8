# SPDX-License-Identifier: Apache-2.0
"""The page of a recording in a browser: what a reader does with it by mouse and by keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from aiflame.agent.model.profile import Loss, SampleClass, StopReason
from aiflame.agent.reports import FORMATS, ReportOptions
from browser.chromium import Page
from device_profiles import small_timed_profile
from profiles import MS, Sample, hostile_profile, profile_of
from support import wait_until


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second of work in parse and render, both of which call copy; half a second asleep."""
    profile = profile_of(
        Sample("main;parse;copy", 300 * MS, count=100),
        Sample("main;parse;split", 100 * MS, count=40),
        Sample("main;render;copy", 200 * MS, count=60),
        Sample("main;render;paint;copy;grow", 400 * MS, count=80),
        Sample("main;sleep;[k]hrtimer_nanosleep", 500 * MS, SampleClass.BLOCKED, count=5),
    )
    path = tmp_path_factory.mktemp("page") / "run.html"
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    return path


def _centre(page: Page, name: str, graph: str = "graph") -> tuple[float, float]:
    """Where the first frame of a function is in the window."""
    x, y = page.value(
        f"((graph, name) => {{ graph.pane.scrollIntoView();"
        " const box = graph.boxes.find((box) => !box.more && graph.nameOf(box.node) === name);"
        " const canvas = graph.canvas.getBoundingClientRect();"
        " return [canvas.left + box.x + box.width / 2, canvas.top + graph.top(box) + 9]; })"
        f"(aiflame.{graph}, {name!r})"
    )
    return x, y


def _click_frame(page: Page, name: str) -> None:
    page.click(*_centre(page, name))


def _point_at(page: Page, name: str) -> None:
    x, y = _centre(page, name)
    page.settle()
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


def _zoom(page: Page) -> list[str]:
    """The frames from the root to the zoomed one, as the path above the flame graph names them."""
    found: list[str] = page.value(
        "[...document.querySelectorAll('#path button')].map((button) => button.textContent)"
    )
    return found


def _widths(page: Page) -> dict[str, float]:
    """The share of the flame graph's width that the first frame of each function has."""
    found: dict[str, float] = page.value(
        "((g) => Object.fromEntries(g.boxes.map((b) => [g.nameOf(b.node), b.width / g.width])"
        ".reverse()))(aiflame.graph)"
    )
    return {name: round(share, 3) for name, share in found.items()}


def _tree(page: Page, graph: str = "graph") -> list[tuple[int, str, float]]:
    """Depth, name and ms of each frame of a flame graph."""
    found = page.value(
        f"((g) => [...g.tree.total.keys()].filter((i) => g.tree.total[i])"
        f".map((i) => [g.tree.depth[i], g.nameOf(i), g.tree.total[i] / 1e6]))(aiflame.{graph})"
    )
    return [(depth, name, ms) for depth, name, ms in found]


def _search(page: Page, text: str) -> None:
    page.press("/")
    page.type(text)


def _selected(page: Page) -> str:
    found: str = page.value("aiflame.graph.nameOf(aiflame.graph.selected)")
    return found


_WHOLE_PATH = ["all", "server (100)", "main", "render"]


def test_a_page_opens_drawn_and_without_complaints(page: Page, report: Path) -> None:
    page.open(report)
    assert page.text("whole").startswith("100 % = 1.500 s of wall time summed over 1 thread")
    # All colours of its frames, and of the text on them: it was painted.
    count = (
        "new Set(new Uint32Array(aiflame.graph.canvas.getContext('2d').getImageData("
        "0, 0, aiflame.graph.canvas.width, aiflame.graph.canvas.height).data.buffer)).size"
    )
    wait_until(lambda: page.value(count) > 10)
    assert page.complaints == []


def test_a_click_zooms_and_reset_goes_back(page: Page, report: Path) -> None:
    page.open(report)
    whole = _widths(page)
    assert (whole["main"], whole["render"], whole["paint"]) == (1, 0.4, 0.267)
    _click_frame(page, "render")
    assert _zoom(page) == _WHOLE_PATH
    zoomed = _widths(page)
    assert (zoomed["main"], zoomed["render"], zoomed["paint"]) == (1, 1, 0.667)
    assert "parse" not in zoomed
    page.value("document.getElementById('reset').click()")
    assert _zoom(page) == []
    assert _widths(page) == whole
    assert page.value("document.getElementById('reset').disabled")
    assert page.complaints == []


def test_the_path_zooms_out_by_some_frames(page: Page, report: Path) -> None:
    page.open(report)
    _click_frame(page, "paint")
    page.value("document.querySelectorAll('#path button')[2].click()")
    assert _zoom(page) == _WHOLE_PATH[:3]


def test_search_says_what_share_matched(page: Page, report: Path) -> None:
    page.open(report)
    # THEN grow, which is within copy, counts once
    _search(page, "copy|grow")
    assert page.text("matched") == "Matched: 60.00 % (900.000 ms)"
    _click_frame(page, "render")
    assert page.text("matched") == "Matched: 100.00 % (600.000 ms) of the zoom"
    page.value("document.getElementById('reset').click()")
    # Capitals matter where it is asked for.
    page.value("document.getElementById('clear').click()")
    _search(page, "COPY")
    assert page.text("matched").startswith("Matched: 60.00 %")
    page.press("i", control=True)
    assert page.text("matched") == "Matched: 0.00 % (0 ns)"
    assert page.value("document.querySelectorAll('#top tbody tr').length") == 0
    page.value("document.getElementById('clear').click()")
    _search(page, "(")
    assert page.text("matched") == "not a regular expression"
    assert page.complaints == []


def test_matches_have_a_colour_of_their_own(page: Page, report: Path) -> None:
    page.open(report, "#search=parse")
    of_pixel = (
        "((g, name) => { const box = g.boxes.find((b) => g.nameOf(b.node) === name);"
        " const ratio = devicePixelRatio; return [...g.canvas.getContext('2d').getImageData("
        "(box.x + box.width - 4) * ratio, (g.top(box) + 9) * ratio, 1, 1).data].slice(0, 3); })"
    )
    hit = [0xEE, 0x6C, 0xEE]
    wait_until(lambda: page.value(f"{of_pixel}(aiflame.graph, 'parse')") == hit)
    assert page.value(f"{of_pixel}(aiflame.graph, 'render')") != hit


@pytest.mark.parametrize("way", ["button", "key"])
def test_every_view_is_shown(page: Page, tmp_path: Path, way: str) -> None:
    path = tmp_path / "run.html"
    path.write_bytes(FORMATS["html"].render(small_timed_profile(), ReportOptions()))
    page.open(path)
    wholes = {
        "gputime": "of GPU time",
        "gpu": "1,000 device samples of 4 kernels",
        "offcpu": "300.000 ms of off-CPU time",
        "cpu": "40.000 ms of CPU time",
        "wall": "40.000 ms of wall time summed over 1 thread",
    }
    order = ["wall", "cpu", "offcpu", "gpu", "gputime"]
    for view, words in wholes.items():
        if way == "key":
            page.press(str(order.index(view) + 1))
        else:
            page.value(f"document.querySelector('[data-view={view}]').click()")
        assert words in page.text("whole")
        pressed = "[...document.querySelectorAll('#views [aria-pressed=true]')]"
        assert page.value(f"{pressed}.map((b) => b.dataset.view)") == [view]
        assert page.value("document.querySelectorAll('#top tbody tr').length") > 0
        assert page.value("aiflame.graph.boxes.length") > 3
    assert page.complaints == []


def test_a_sandwich_has_callers_and_callees(page: Page, report: Path) -> None:
    page.open(report)
    page.value(
        "[...document.querySelectorAll('#top button')]"
        ".find((b) => b.textContent === 'copy').click()"
    )
    assert page.text("callers-title") == "Callers of copy"
    assert page.text("callees-title") == "Called from copy"
    callers = _tree(page, "callers")
    assert [row for row in callers if row[0] <= 2] == [
        (0, "copy", 900),
        (1, "paint", 400),
        (2, "render", 400),
        (1, "parse", 300),
        (2, "main", 300),
        (1, "render", 200),
        (2, "main", 200),
    ]
    assert _tree(page) == [(0, "copy", 900), (1, "grow", 400)]
    page.press("Escape")
    assert page.value("document.getElementById('callers').hidden")
    # The key does it with the selected frame.
    _click_frame(page, "paint")
    page.press("s")
    assert page.text("callers-title") == "Callers of paint"
    assert page.complaints == []


def test_from_the_leaf(page: Page, report: Path) -> None:
    page.open(report)
    page.press("i")
    leaves = [(name, ms) for depth, name, ms in _tree(page) if depth == 1]
    assert leaves == [("[blocked: sleep]", 500), ("copy", 500), ("grow", 400), ("split", 100)]
    page.press("i")
    assert (1, "server (100)", 1500) in _tree(page)


def test_the_keys_go_from_frame_to_frame(page: Page, report: Path) -> None:
    page.open(report)
    page.value("aiflame.graph.canvas.focus()")
    for _ in range(2):
        page.press("ArrowDown")
    assert _selected(page) == "main"
    assert page.text("details").startswith("main: time 1.500 s, 100.00 % of all")
    page.press("ArrowDown")  # to the widest
    assert _selected(page) == "render"
    page.press("ArrowLeft")
    assert _selected(page) == "parse"
    page.press("ArrowRight")
    page.press("Enter")
    assert _zoom(page) == _WHOLE_PATH
    page.press("ArrowUp")
    assert _selected(page) == "main"
    page.press("Home")
    assert _selected(page) == "render"
    page.press("Backspace")
    assert _zoom(page) == _WHOLE_PATH[:3]
    page.press("Escape")
    assert _zoom(page) == []
    page.press("?", shift=True)
    assert page.value("document.getElementById('help').open")
    page.value("document.getElementById('help').close()")
    assert page.complaints == []


def test_back_and_forward_go_through_what_was_shown(page: Page, report: Path) -> None:
    page.open(report)
    _click_frame(page, "render")
    _click_frame(page, "paint")
    page.press("2")
    assert "of CPU time" in page.text("whole")
    for expected in ([*_WHOLE_PATH, "paint"], _WHOLE_PATH, []):
        page.value("history.back()")
        wait_until(lambda expected=expected: _zoom(page) == expected)
        assert "of wall time" in page.text("whole")
    page.value("history.forward()")
    wait_until(lambda: _zoom(page) == _WHOLE_PATH)
    # AND what the address says is shown where it is opened anew
    address = page.value("location.hash")
    page.open(report, address)
    assert _zoom(page) == _WHOLE_PATH


def test_names_with_markup_are_text(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    profile = hostile_profile()
    profile = replace(profile, recording=replace(profile.recording, target="<img src=x> & \"'"))
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    page.open(path)
    elements = page.value("document.querySelectorAll('b, i, u, img').length")
    assert elements == 0
    assert page.value("document.querySelector('h1').textContent").endswith("<img src=x> & \"'")
    names = page.value(
        "[...document.querySelectorAll('#top tbody button')].map((b) => b.textContent)"
    )
    for name in ("<script>alert(1)</script>", "]]>", "a\"b'c`d&amp;e&f", "__proto__"):
        assert name in names
    # Sandwich, tip and path of one of them.
    name = "</script><img src=x onerror=alert(1)>"
    page.value(
        f"[...document.querySelectorAll('#top button')]"
        f".find((b) => b.textContent === {name!r}).click()"
    )
    assert page.text("callers-title") == f"Callers of {name}"
    _point_at(page, name)
    assert page.text("tip").startswith(name)
    _click_frame(page, "leaf")
    assert _zoom(page) == [name, "leaf"]
    assert page.value("document.querySelectorAll('b, i, u, img').length") == 0
    assert page.complaints == []


@pytest.mark.parametrize("kinds", [3, 4])
def test_many_losses_are_named_and_explained_by_a_click(
    page: Page, tmp_path: Path, kinds: int
) -> None:
    path = tmp_path / "run.html"
    losses = tuple(Loss(f"loss_{i}", 1_000 + i, f"meaning {i}") for i in range(kinds))
    profile = profile_of(Sample("main", 200 * MS, count=200), losses=losses)
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    page.open(path)
    shown = page.value("document.querySelector('header').innerText")
    for i in range(kinds):
        assert f"loss_{i}" in shown and f"1,00{i}" in shown
    assert ("meaning 0" in shown) == (kinds == 3)
    if kinds == 4:
        page.value("document.querySelector('header summary').click()")
        shown = page.value("document.querySelector('header').innerText")
    assert all(f"Lost loss_{i}: 1,00{i} (meaning {i})" in shown for i in range(kinds))


def test_the_legend_explains_truncated_stacks(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    profile = profile_of(
        Sample("recv", 30 * MS, end=StopReason.NO_TABLE),
        Sample("main;work", 60 * MS),
        Sample("poll", 10 * MS, SampleClass.BLOCKED, end=StopReason.NOT_WALKED),
        # No mark, although it is called like one.
        Sample("[truncated: lost]", 5 * MS),
    )
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    page.open(path)
    rows = page.value(
        "[...document.querySelectorAll('#truncated tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert rows == [
        ["[truncated: no table]", "30.000 ms", "28.57 %"],
        [StopReason.NO_TABLE.meaning],
        ["[truncated: not walked]", "10.000 ms", "9.52 %"],
        [StopReason.NOT_WALKED.meaning],
    ]
    # The tip of such a frame says it, too.
    _point_at(page, "[truncated: no table]")
    assert StopReason.NO_TABLE.meaning in page.text("tip")
    # Of CPU time one is left, and of complete stacks there is nothing to explain.
    page.press("2")
    assert page.value("document.querySelectorAll('#truncated tr').length") == 2
    path.write_bytes(FORMATS["html"].render(profile_of(Sample("a", MS)), ReportOptions()))
    page.open(path)
    assert page.value("document.getElementById('truncated').hidden")
