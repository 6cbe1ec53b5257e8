# SPDX-License-Identifier: Apache-2.0
"""The SVG flame graph in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aiflame.agent.model.profile import Profile, SampleClass, StopReason
from aiflame.agent.reports import FORMATS, ReportOptions
from browser.chromium import Page
from browser.looks import CONTRAST, LEAST_CONTRAST, SCREENSHOTS
from profiles import HOSTILE_NAMES, MS, Sample, deep_profile, hostile_profile, profile_of
from support import wait_until

_DRAWN = (
    "document.getElementById('search')?.style.display === '' && document.readyState === 'complete'"
)


def _opened(
    page: Page, folder: Path, profile: Profile, address: str = "", **options: object
) -> None:
    path = folder / "run.svg"
    path.write_bytes(FORMATS["svg"].render(profile, ReportOptions(**options)))  # type: ignore[arg-type]
    page.open(path, address, _DRAWN)


def _profile() -> Profile:
    return profile_of(
        Sample("main;parse;copy", 300 * MS, count=100),
        Sample("main;render;copy", 200 * MS, count=60),
        Sample("main;render;paint;copy;grow", 400 * MS, count=80),
        Sample("main;sleep;[k]nanosleep", 100 * MS, SampleClass.BLOCKED, count=5),
    )


@pytest.fixture(autouse=True)
def _usual_window(page: Page) -> Iterator[None]:
    page.resize(1200)
    yield
    page.prefer("light")
    page.resize(1200)


# JavaScript for a shown frame by its name.
_FRAME = (
    "[...document.querySelectorAll('#frames g')].find((g) => g.style.display !== 'none'"
    " && g.querySelector('title').textContent.startsWith({name!r} + ' ('))"
)


def _box(page: Page, name: str) -> tuple[float, float, float, float]:
    """Left, top, width and height of a frame in the window."""
    left, top, width, height = page.value(
        "((r) => [r.left, r.top, r.width, r.height])"
        f"({_FRAME.format(name=name)}.querySelector('rect').getBoundingClientRect())"
    )
    return left, top, width, height


def _click_frame(page: Page, name: str) -> None:
    left, top, width, height = _box(page, name)
    page.click(left + width / 2, top + height / 2)


def _shown(page: Page) -> set[str]:
    found: list[str] = page.value(
        "[...document.querySelectorAll('#frames g')].filter((g) => g.style.display !== 'none')"
        ".map((g) => g.querySelector('title').textContent.split(' (')[0])"
    )
    return set(found)


def _search(page: Page, text: str) -> None:
    page.value(f"window.prompt = () => {text!r}")
    page.press("f", control=True)


@pytest.mark.parametrize("width", [1000, 1200, 1600])
def test_it_has_the_windows_width(page: Page, tmp_path: Path, width: int) -> None:
    page.resize(width)
    _opened(page, tmp_path, _profile())
    assert page.complaints == []
    left, _, graph, _ = _box(page, "all")
    assert left == pytest.approx(10, abs=2)
    assert left + graph == pytest.approx(width - 10, abs=2)
    assert _box(page, "render")[2] == pytest.approx(graph * 0.6, abs=1)
    outside = page.value(
        "[...document.querySelectorAll('text')].filter((t) => t.getBoundingClientRect().right >"
        " innerWidth + 1 || t.getBoundingClientRect().left < 0).map((t) => t.textContent)"
    )
    assert outside == []
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(SCREENSHOTS / f"svg-{width}.png")
    # AND it follows when the window changes
    page.resize(1500)
    wait_until(lambda: abs(sum(_box(page, "all")[0:3:2]) - 1490) < 2)


def test_a_tall_one_opens_at_its_roots(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, deep_profile(200))
    _, top, _, height = _box(page, "all")
    assert 0 <= top <= top + height <= 900
    assert _box(page, "f199")[1] < 0
    # The title and its buttons are there wherever it is scrolled to.
    for y in ("0", "500", "1e6"):
        page.value(f"window.scrollTo(0, {y})")
        head = "document.getElementById('search').getBoundingClientRect().top"
        wait_until(lambda head=head: 0 <= page.value(head) < 40)
    # Merged from the leaf, the widest are at the top.
    _opened(page, tmp_path, deep_profile(200), inverted=True)
    assert page.value("window.scrollY") == 0


def test_a_tall_one_opens_at_the_zoom_of_its_address(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, deep_profile(200))
    page.value("window.scrollTo(0, 0)")
    _click_frame(page, "f180")
    _opened(page, tmp_path, deep_profile(200), page.value("location.hash"))
    assert 0 <= _box(page, "f180")[1] <= 900


def test_a_click_zooms_and_reset_goes_back(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, _profile())
    whole = _shown(page)
    _click_frame(page, "render")
    assert _shown(page) == {"all", "server", "main", "render", "copy", "paint", "grow"}
    assert _box(page, "render")[2] == _box(page, "all")[2]
    # The address keeps it.
    address = page.value("location.hash")
    _opened(page, tmp_path, _profile(), address)
    assert "parse" not in _shown(page)
    left, top, *_ = page.value(
        "((r) => [r.left, r.top])(document.getElementById('reset').getBoundingClientRect())"
    )
    page.click(left + 5, top + 5)
    assert _shown(page) == whole
    _click_frame(page, "paint")
    page.press("Escape")
    assert _shown(page) == whole
    assert page.complaints == []


def test_search_says_what_share_matched(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, _profile())
    _search(page, "copy|grow")
    assert page.text("matched") == "Matched: 90.0%"
    fill = f"getComputedStyle({_FRAME.format(name='grow')}.querySelector('rect')).fill"
    assert page.value(fill) == "rgb(238, 108, 238)"
    _click_frame(page, "parse")
    assert page.text("matched") == "Matched: 100.0%"
    page.press("Escape")
    assert page.text("matched").strip() == ""
    _search(page, "COPY")
    assert page.text("matched") == "Matched: 90.0%"
    page.press("i", control=True)
    assert page.text("matched") == "Matched: 0.0%"
    page.press("f", control=True)  # clears it
    _search(page, "(")
    assert page.text("matched") == "Not a regular expression: ("
    assert page.complaints == []


# Of each text its contrast with what it lies on: its frame, or the paper.
_CONTRASTS = (
    CONTRAST
    + """
const style = (element) => getComputedStyle(element);
const paper = channels(style(document.querySelector(".paper")).fill);
const paintOf = (frame) => {
  const { fill, filter, opacity } = style(frame);
  const light = filter === "none" ? 1 : channels(filter)[0];
  return channels(fill).map((v, i) => v * light * opacity + paper[i] * (1 - opacity));
};
return [...document.querySelectorAll("text")]
  .filter((text) => text.textContent.trim() && text.getBoundingClientRect().width)
  .map((text) => {
    const frame = text.closest("#frames") && text.parentElement.querySelector("rect");
    const on = frame ? paintOf(frame) : paper;
    return [contrast(on, channels(style(text).fill)), text.textContent];
  });
"""
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(page: Page, tmp_path: Path, scheme: str) -> None:
    page.prefer(scheme)
    _opened(page, tmp_path, _profile(), "#s=copy")
    dark = page.value("getComputedStyle(document.querySelector('.paper')).fill")
    assert (dark == "rgb(22, 25, 29)") is (scheme == "dark")
    # The whole, and zoomed in, where the frames around are faint.
    for _ in range(2):
        found = page.value(f"(() => {{ {_CONTRASTS} }})()")
        assert len(found) > 10
        assert [one for one in found if one[0] < LEAST_CONTRAST] == []
        page.screenshot(SCREENSHOTS / f"svg-{scheme}.png")
        _click_frame(page, "paint")


def test_names_with_markup_are_text(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, hostile_profile(), min_width_pct=0)
    for name in ("<script>alert(1)</script>", "]]>", "a\"b'c`d&amp;e&f"):
        assert name in HOSTILE_NAMES
        _click_frame(page, name)
        texts = page.value(
            "[...document.querySelectorAll('#frames text')].map((t) => t.textContent)"
        )
        assert name in texts
        page.press("Escape")
    assert page.value("document.querySelectorAll('script').length") == 1
    assert page.value("document.querySelectorAll('img, b, i, u').length") == 0
    assert page.complaints == []


def test_a_tip_explains_a_truncated_stack(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, profile_of(Sample("recv", MS, end=StopReason.LOST)))
    mark = "[truncated: lost]"
    title = page.value(f"{_FRAME.format(name=mark)}.querySelector('title').textContent")
    assert title == f"{mark} (1.000 ms, 100.00 %; {StopReason.LOST.meaning})"
    # Its name is still what is searched for.
    _search(page, "room")
    assert page.text("matched") == "Matched: 0.0%"
