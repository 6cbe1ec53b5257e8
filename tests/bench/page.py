# SPDX-License-Identifier: Apache-2.0
"""How long a large page takes in a browser, until it is drawn and until it is zoomed."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path

from aiflame.agent.model.profile import FrameKind, Profile
from aiflame.agent.reports import FORMATS, ReportOptions
from bench.table import Aim, Table, spread
from browser.chromium import CHROMIUM, Page, browser
from profiles import large_profile

_STACKS, _DEPTH, _SAMPLES = 100_000, 40, 1_000_000
_ROUNDS = 5
_AIM_PAINT_MS, _AIM_ZOOM_MS = 1_000.0, 100.0

_INTRO = f"""\
The page of {_SAMPLES:,} samples in {_STACKS:,} distinct stacks of {_DEPTH} frames, over an hour,
opened in headless Chromium without a GPU from a file: milliseconds, median (least-most) of
{_ROUNDS}. First paint: from the start of the navigation until the flame graph has been painted. The
others: from the event until what it changed has been painted; zoom is the slowest of eleven, ten
along the widest frames and one back."""

# Notes when the first text of a flame graph has been painted.
_WATCH = """
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (...args) {
  if (!window.paintedAt && this.canvas.closest("#graph")) {
    window.paintedAt = -1;
    setTimeout(() => { window.paintedAt = performance.now(); });
  }
  return fillText.apply(this, args);
};
"""

# How long it takes until what `change` does has been painted.
_TIMED = """
const timed = (change) => new Promise((resolve) => {
  const start = performance.now();
  change();
  requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - start)));
});
"""

_ZOOMS = """
(async () => {
  const { graph } = aiflame;
  const { tree } = graph;
  const times = [];
  for (let depth = 0, node = 0; depth < 10; depth++) {
    let widest = -1;
    for (let c = node + 1; c < tree.end[node]; c = tree.end[c]) {
      if (widest < 0 || tree.total[c] > tree.total[widest]) widest = c;
    }
    if (widest < 0) break;
    node = widest;
    times.push(await timed(() => graph.zoom(node)));
  }
  times.push(await timed(() => graph.zoom(0)));
  return Math.max(...times);
})()
"""

_SEARCH = """timed(() => {
  document.getElementById("search").value = "compute_block_1.*";
  document.getElementById("search").dispatchEvent(new Event("input"));
})"""


def _view(name: str) -> str:
    return f"""timed(() => document.querySelector('[data-view="{name}"]').click())"""


def _with_interpreter(profile: Profile) -> Profile:
    """Makes a quarter of the functions an interpreter's own, which the page leaves out."""
    functions = tuple(
        replace(function, kind=FrameKind.INTERPRETER) if i % 4 == 2 else function
        for i, function in enumerate(profile.functions)
    )
    return replace(profile, functions=functions)


_STEPS = {
    "zoom": _ZOOMS,
    "search": _SEARCH,
    "CPU view": _view("cpu"),
    "wall view": _view("wall"),
}


def _round(page: Page, file: Path) -> dict[str, float]:
    page.open(file, drawn="window.paintedAt > 0")
    times = {"first paint": float(page.value("window.paintedAt"))}
    page.value(_TIMED)
    return times | {name: float(page.value(step)) for name, step in _STEPS.items()}


def measure(busy: Path, folder: Path) -> list[Table]:
    """Opens and uses a page, after one round that is not counted."""
    del busy
    if CHROMIUM is None:
        print("page: no Chromium here", file=sys.stderr)
        return []
    profile = large_profile(_STACKS, _DEPTH, _SAMPLES)
    pages = {"native": profile, "Python, interpreter hidden": _with_interpreter(profile)}
    rows, aims = [], []
    for name, shown in pages.items():
        file = folder / "page.html"
        file.write_bytes(FORMATS["html"].render(shown, ReportOptions()))
        with browser(folder / "chromium") as page:
            page.call("Page.enable")
            page.call("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)
            rounds = [_round(page, file) for _ in range(1 + _ROUNDS)][1:]
        found = {step: [one[step] for one in rounds] for step in rounds[0]}
        rows.append((name, *(spread(times, 0) for times in found.values())))
        limits = {"first paint": _AIM_PAINT_MS, "zoom": _AIM_ZOOM_MS}
        aims += [
            Aim(f"large page, {name}: {step}", statistics.median(found[step]), limit, "ms")
            for step, limit in limits.items()
        ]
    return [Table("A large page", _INTRO, ("page", "first paint", *_STEPS), rows, aims)]
