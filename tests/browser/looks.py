# SPDX-License-Identifier: Apache-2.0
"""What a reader would see of a page at a glance, measured in the browser."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from browser.chromium import Page

# WCAG 2.1, 1.4.3.
LEAST_CONTRAST = 4.5

# Where CI finds what pages looked like.
SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"

# Relative luminance and contrast, of WCAG 2.1, of colours as [red, green, blue].
CONTRAST = """
const luminance = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
const channels = (color) => color.match(/[\\d.]+/g).map(Number);
const isOpaque = (rgb) => rgb.length === 3 || rgb[3] === 1;
"""

_TEXT = (
    CONTRAST
    + """
const paperOf = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const paper = channels(getComputedStyle(at).backgroundColor);
    if (isOpaque(paper)) return paper;
  }
  return [255, 255, 255];
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const text = walker.currentNode.data.trim();
  if (!text || !element.checkVisibility() || element.closest("script, :disabled")) continue;
  found.push([contrast(channels(getComputedStyle(element).color), paperOf(element)), text]);
}
return found.sort(([a], [b]) => a - b);
"""
)

# Of text on a canvas only its pixels are known: the darkest and the lightest of a part of it.
_CANVAS = (
    CONTRAST
    + """
const paper = channels(getComputedStyle(document.body).backgroundColor);
const { data } = canvas.getContext("2d").getImageData(...part);
const seen = [];
for (let i = 0; i < data.length; i += 4) {
  const share = data[i + 3] / 255;
  seen.push([0, 1, 2].map((k) => data[i + k] * share + paper[k] * (1 - share)));
}
seen.sort((a, b) => luminance(a) - luminance(b));
return contrast(seen[0], seen.at(-1));
"""
)

_BOXES = """
const isSeen = (element) => element.checkVisibility() && element.getBoundingClientRect().width > 0;
const all = [...document.querySelectorAll(
  "h1, h2, header p, .bar button, .bar input, .bar select, .bar legend, summary, .graph,"
  + "#strip canvas, #idle, #strip p, .status > *, #details, #top th, #top td, #legend td,"
  + "#truncated td, dd, dt"
)].filter(isSeen);
const words = (element) => `${element.tagName} ${element.id} ${element.textContent.slice(0, 40)}`;
const rects = all.map((element) => [element, element.getBoundingClientRect()]);
const wrong = [];
const room = document.documentElement.clientWidth;
for (const [element, rect] of rects) {
  if (rect.left < 0 || rect.right > room + 0.5) wrong.push(words(element) + " leaves the window");
}
rects.forEach(([a, one], i) => rects.slice(i + 1).forEach(([b, other]) => {
  if (a.contains(b) || b.contains(a)) return;
  const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
  const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
  if (across > 0.5 && down > 0.5) wrong.push(`${words(a)} lies on ${words(b)}`);
}));
if (document.documentElement.scrollWidth > room) wrong.push("the page scrolls sideways");
return wrong;
"""


@contextlib.contextmanager
def window(page: Page, width: int, scheme: str = "light") -> Iterator[None]:
    """Gives a page's window another width, and the preference for a colour scheme, for a while."""
    page.resize(width)
    page.prefer(scheme)
    try:
        yield
    finally:
        page.resize(1200)
        page.prefer("light")


def hard_to_read(page: Page) -> list[tuple[float, str]]:
    """Returns the texts of the document with too little contrast, and that, least first."""
    found = page.value(f"(() => {{ {_TEXT} }})()")
    assert found
    return [(contrast, text) for contrast, text in found if contrast < LEAST_CONTRAST]


def contrast_within(page: Page, canvas: str, x: float, y: float, width: int, height: int) -> float:
    """Returns the contrast between the darkest and the lightest pixel of a part of a canvas.

    Args:
        page: The page.
        canvas: JavaScript for the canvas.
        x: Of the part, in pixels of the canvas; `y` the same.
        y: See `x`.
        width: See `x`.
        height: See `x`.
    """
    part = f"[{x}, {y}, {width}, {height}]"
    found: float = page.value(f"((canvas, part) => {{ {_CANVAS} }})({canvas}, {part})")
    return found


def misplaced(page: Page) -> list[str]:
    """Returns what lies on something else, or leaves the window, in words."""
    found: list[str] = page.value(f"(() => {{ {_BOXES} }})()")
    return found
