# SPDX-License-Identifier: Apache-2.0
"""speedscope files in speedscope: its own release, in a browser, shows our numbers."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports import FORMATS, ReportOptions, View
from browser.chromium import Page
from profiles import MS, Sample, large_profile, profile_of, small_profile
from support import wait_until

# fetch_speedscope.sh puts it there.
_RELEASE = Path(__file__).parents[2] / "build/speedscope/dist/release/index.html"
pytestmark = pytest.mark.skipif(not _RELEASE.is_file(), reason="no release of speedscope")

_TIMEOUT_S = 60
_UNITS_NS = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}
_TIME = re.compile(r"([\d.]+)(ns|µs|ms|s)\b.*", re.DOTALL)

# What its command-line program does: a file with one call, named in the address.
_LOAD = 'speedscope.loadFileFromBase64("run.speedscope.json", "{}")'
_TEXT = "document.body?.innerText ?? ''"
_CLICK = """[...document.querySelectorAll("div")].findLast(
    (div) => div.children.length < 2 && div.textContent.endsWith("{}")).click()"""
_ROWS = """[...document.querySelectorAll("tr")].map(
    (row) => [...row.querySelectorAll("td")].map((cell) => cell.innerText))"""


def _open(page: Page, profile: Profile, folder: Path, view: View = View.WALL) -> None:
    data = FORMATS["speedscope"].render(profile, ReportOptions(view=view))
    call = folder / "load.js"
    call.write_text(_LOAD.format(base64.b64encode(data).decode()), encoding="ascii")
    page.call("Page.navigate", url="about:blank")
    page.call("Page.navigate", url=f"{_RELEASE.as_uri()}#localProfilePath={call}")
    wait_until(lambda: "Sandwich" in page.value(_TEXT), _TIMEOUT_S)
    page.value(_CLICK.format("Sandwich"))
    wait_until(lambda: _table(page), _TIMEOUT_S)


def _ns(cell: str) -> float:
    found = _TIME.match(cell)
    assert found is not None, cell
    return float(found[1]) * _UNITS_NS[found[2]]


def _table(page: Page) -> dict[str, tuple[float, float]]:
    """Total and own time by name, of one thread or process."""
    # The list of keys is a table, too.
    rows = [row for row in page.value(_ROWS) if len(row) == 3 and _TIME.match(row[1])]
    return {name.strip(): (_ns(total), _ns(own)) for total, own, name in rows}


def test_each_function_has_its_time(page: Page, tmp_path: Path) -> None:
    _open(page, small_profile(), tmp_path)
    assert "server (100)" in page.value(_TEXT)
    table = _table(page)
    assert table["matmul"] == (530 * MS, 500 * MS)
    assert table["[blocked: lock]"] == (250 * MS, 250 * MS)
    assert table["train (train.py:7)"] == (800 * MS, 0)
    assert table["main"] == (820 * MS, 0)
    assert sum(own for _, own in table.values()) == 1_620 * MS


def test_a_view_has_only_its_own_time(page: Page, tmp_path: Path) -> None:
    _open(page, small_profile(), tmp_path, View.CPU)
    table = _table(page)
    assert table["matmul"] == (500 * MS, 500 * MS)
    assert not any(name.startswith("[blocked") for name in table)


def test_names_with_markup_are_text(page: Page, tmp_path: Path) -> None:
    names = ["<b>bold</b>", "</script><script>window.taken = 1</script>", "a&amp;b", 'say "x"']
    profile = profile_of(*(Sample("", MS, frames=("main", name)) for name in names))
    _open(page, profile, tmp_path)
    assert {*_table(page)} == {"main", *names}
    assert page.value("window.taken") is None


def test_many_stacks_are_loaded(page: Page, tmp_path: Path) -> None:
    _open(page, large_profile(stacks=2_000, samples=20_000), tmp_path)
    assert len(_table(page)) > 20
