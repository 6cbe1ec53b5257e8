# SPDX-License-Identifier: Apache-2.0
"""The page's table of functions in a browser: whose waits are, and for what."""

from __future__ import annotations

from pathlib import Path

from aiflame.agent.model.profile import SampleClass
from aiflame.agent.reports import FORMATS, ReportOptions
from browser.chromium import Page
from profiles import MS, Sample, profile_of


def _first_row(page: Page) -> str:
    found: str = page.value("document.querySelector('#top tbody td').textContent")
    return found


def test_the_table_leads_with_the_readers_code_and_raw_with_the_scheduler(
    page: Page, tmp_path: Path
) -> None:
    stack = "main;[p]consume@/app/a.py:3;[k]futex_wait;[k]__schedule"
    profile = profile_of(Sample(stack, 90 * MS, SampleClass.BLOCKED), Sample("main;work", 10 * MS))
    path = tmp_path / "run.html"
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    page.open(path)
    assert _first_row(page) == "consume (a.py:3)100 % lock (futex_wait)"
    # WHEN all is asked for, THEN the marker that the wait ends in leads, and a link says so
    page.value("document.getElementById('raw').click()")
    assert _first_row(page) == "[blocked: lock]"
    assert page.value("location.hash") == "#raw=1"
    # Of CPU time there is nothing to charge.
    page.value("document.querySelector('[data-view=cpu]').click()")
    assert page.value("document.getElementById('raw').hidden")


def test_long_names_are_whole(page: Page, tmp_path: Path) -> None:
    name = "at::native::" + "Vectorized<float>::" * 20 + "run"
    profile = profile_of(Sample("", 90 * MS, frames=("main", name)))
    path = tmp_path / "run.html"
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    page.open(path)
    # THEN the name has as many lines as it needs, and the table is no wider than its half
    name_end, cell_end, overflow = page.value(
        "((button, table) => [button, button.closest('td')].map((one) =>"
        " one.getBoundingClientRect().right).concat(table.scrollWidth - table.clientWidth))"
        "(document.querySelector('#top tbody button'), document.querySelector('#top'))"
    )
    assert page.value("document.querySelector('#top tbody button').textContent") == name
    assert name_end <= cell_end
    assert overflow <= 0


# What the lines of the first name of the table end with, but for the last one.
_LINE_ENDS = """(() => {
  const button = document.querySelector("#top tbody button");
  const ends = [], range = document.createRange();
  let before = null;
  for (const text of [...button.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)) {
    for (let at = 0; at < text.length; at++) {
      range.setStart(text, at); range.setEnd(text, at + 1);
      const { top } = range.getClientRects()[0];
      if (before && top > before.top) ends.push(before.char);
      before = { top, char: text.data[at] };
    }
  }
  return ends;
})()"""


def test_lines_of_long_names_end_where_words_do(page: Page, tmp_path: Path) -> None:
    name = "com.example.pipeline.stages.BiFunctionOfManyArguments.andThenApply$lambda_of_it" * 3
    profile = profile_of(Sample("", 90 * MS, frames=("main", name)))
    path = tmp_path / "run.html"
    path.write_bytes(FORMATS["html"].render(profile, ReportOptions()))
    page.resize(1000)
    page.open(path)
    ends = page.value(_LINE_ENDS)
    assert len(ends) >= 2 and set(ends) <= set("._$")
