# SPDX-License-Identifier: Apache-2.0
"""Colours by what device samples waited for.

A device's frame has the colour of the category that most of its samples are of, the stronger the
larger that share is; all other frames are a pale neutral, so that the eye lands on the device. The
same rule is in page/device.js.

Colour is never the only carrier: a frame's tooltip and the legend name the category.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.reports import palette
from aiflame.agent.reports.palette import Category
from aiflame.agent.reports.tree import I32, Tree
from aiflame.gpu.stalls import StallCategory

U64 = npt.NDArray[np.uint64]

# Frames of the CPU, and what colours fade into.
NEUTRAL = "#e6e6e1"

# A category of the smallest possible share, one in nine, is still told from the neutral.
LEAST_STRENGTH = 0.25

# Of these two, one has a contrast of at least 4.58:1 on any colour.
INKS = ("#000000", "#ffffff")


# By Category: 0 a frame of the CPU, 1 the boundary, 2 of a device.
KINDS = tuple(
    2 if c in palette.DEVICE_CATEGORIES else 1 if c is Category.BOUNDARY else 0 for c in Category
)


def settings() -> dict[str, object]:
    """Return what the page needs for the same colours."""
    return {
        "names": [category.label for category in StallCategory],
        "fills": [category.color for category in StallCategory],
        "neutral": NEUTRAL,
        "least": LEAST_STRENGTH,
    }


@dataclass(frozen=True, slots=True)
class Stall:
    """The largest category of a frame: which, and its samples."""

    category: StallCategory
    count: int


def by_node(tree: Tree, node: I32, column: npt.NDArray[np.uint8], count: U64) -> U64:
    """Return samples by node of a tree and by what a column says, shape (nodes, values).

    Args:
        tree: Made of the rows, and not cut.
        node: The node of each row.
        column: A small number of each row.
        count: The samples of each row.
    """
    sums = np.zeros((len(tree) + 1, int(column.max(initial=0)) + 1), np.uint64)
    np.add.at(sums, (node + 1, column), count)
    running = np.cumsum(sums, axis=0, dtype=np.uint64)
    result: U64 = running[tree.end] - running[:-1]
    return result


def largest(counts: U64) -> Stall:
    """Return the largest category of one frame; of equal ones the first."""
    category = int(np.argmax(counts))
    return Stall(StallCategory(category), int(counts[category]))


def fill(category: Category, stall: Stall, total: int) -> tuple[str, str]:
    """Return fill and text colour of a frame of a frame category."""
    if KINDS[category] == 1:
        return palette.fill(category, 0, False), INKS[0]
    if not KINDS[category] or not total:
        return NEUTRAL, INKS[0]
    return mixed(stall.category.color, stall.count / total)


def mixed(color: str, share: float) -> tuple[str, str]:
    """Return a colour faded to a share, 0 to 1, and the colour of text on it."""
    return faded(color, LEAST_STRENGTH + (1 - LEAST_STRENGTH) * share)


def faded(color: str, strength: float) -> tuple[str, str]:
    """Return a colour of a strength, 0 (the neutral) to 1, and the colour of text on it."""
    pairs = zip(_channels(NEUTRAL), _channels(color), strict=True)
    rgb = [int(weak + (strong - weak) * strength + 0.5) for weak, strong in pairs]
    return "#" + "".join(f"{channel:02x}" for channel in rgb), ink_on(rgb)


def _channels(color: str) -> list[int]:
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]


def ink_on(rgb: list[int]) -> str:
    """Return black or white, whichever reads better (WCAG 2.1, relative luminance)."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # Where 1.05 / (L + 0.05) and (L + 0.05) / 0.05 are equal.
    return INKS[0] if (luminance + 0.05) ** 2 >= 1.05 * 0.05 else INKS[1]
