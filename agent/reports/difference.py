# SPDX-License-Identifier: Apache-2.0
"""Differential flame graphs: two sides, `base` and `new`, of one profile in one tree.

Widths are of new. A frame's colour says how its share of all time has changed, with what it calls:
red grew, blue shrank, the stronger the more percentage points. The strongest colour is that of the
largest change; where no frame changed by LEAST_CHANGE, it stands for that, so that two sides that
are alike look alike. The same rule is in page/difference.js.

Frames that only base has are no part of the flame graph: swap the sides to see them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Difference, Profile
from aiflame.agent.reports import palette, stall_colors
from aiflame.agent.reports.base import ReportOptions
from aiflame.agent.reports.device_rows import from_the_leaf
from aiflame.agent.reports.facts import complete_words
from aiflame.agent.reports.palette import Category
from aiflame.agent.reports.rows import rows_for
from aiflame.agent.reports.tree import U64, Tree, build
from aiflame.agent.reports.words import duration, percent, showable

# A share of all time. Smaller changes are mostly chance where sides have some thousand samples.
LEAST_CHANGE = 0.01

GREW = palette.fill(Category.NATIVE, 0, False)
SHRANK = palette.fill(Category.NATIVE, 0, True)


@dataclass(frozen=True, slots=True)
class DifferenceTree:
    """A flame tree of new, with the frames that only base has at width 0.

    Attributes:
        tree: The tree; its times are of new.
        base_ns: The time of base by node, with what is above it.
    """

    tree: Tree
    base_ns: U64

    def changes(self) -> npt.NDArray[np.float64]:
        """Return by node how its share has changed, -1 to 1."""
        new, base = (times / max(1, int(times[0])) for times in (self.tree.total_ns, self.base_ns))
        result: npt.NDArray[np.float64] = new - base
        return result


def difference_tree(
    profile: Profile, difference: Difference, options: ReportOptions
) -> DifferenceTree:
    """Merge both sides of a profile."""
    rows = rows_for(profile, options)
    if options.inverted:
        rows = from_the_leaf(rows)
    is_new = difference.is_new[rows.thread]
    tree, node = build(replace(rows, ns=np.where(is_new, rows.ns, 0).astype(np.uint64)))
    base_rows = np.where(is_new, 0, rows.ns).astype(np.uint64)
    base_ns = stall_colors.by_node(tree, node, np.zeros(len(rows), np.uint8), base_rows)
    return DifferenceTree(tree, base_ns[:, 0])


def side_ns(profile: Profile, difference: Difference) -> tuple[int, int]:
    """Return all time of base and of new."""
    is_new = difference.is_new[profile.samples["thread"]]
    ns = profile.samples["ns"]
    return int(ns[~is_new].sum()), int(ns[is_new].sum())


def strongest(changes: npt.NDArray[np.float64]) -> float:
    """Return the change that has the strongest colour."""
    return max(LEAST_CHANGE, float(np.abs(changes).max(initial=0)))


def fill(change: float, most: float) -> str:
    """Return the colour of a frame.

    Args:
        change: Of its share.
        most: The change that has the strongest colour.
    """
    return stall_colors.faded(GREW if change > 0 else SHRANK, min(1.0, abs(change) / most))[0]


def points(change: float) -> str:
    """Return a change of a share in words."""
    return f"{100 * change:+.2f} points"


def whole_words(profile: Profile, difference: Difference) -> str:
    """Return what the whole of each side is."""
    base_ns, new_ns = side_ns(profile, difference)
    return (
        f"100 % = {duration(new_ns)} of {difference.time} of new ({showable(difference.new)}),"
        f" of base ({showable(difference.base)}) {duration(base_ns)}"
    )


def notes(profile: Profile, difference: Difference) -> list[str]:
    """Return how to read the flame graph, and what is not in it, one sentence each."""
    found = difference_tree(profile, difference, ReportOptions())
    tree, base = found.tree, found.base_ns.astype(np.int64)
    inner = np.flatnonzero(tree.parent >= 0)
    # The outermost frames of base that new has not: their time is all of what is not shown.
    parent = tree.parent[inner]
    is_outermost = (tree.total_ns[parent] > 0) | (parent == 0)
    gone = inner[(tree.total_ns[inner] == 0) & is_outermost]
    share = percent(int(base[gone].sum()), int(base[0]))
    return [
        "Widths are shares of new. Red frames have a larger share than in base, blue frames a"
        " smaller one.",
        f"Frames that only base has, {share} of it, are not shown: swap base and new to see them.",
    ]


def recording_facts(profile: Profile) -> list[tuple[str, str]]:
    """Return the lines shown under a page."""
    return [
        *profile.recording.facts,
        ("complete stacks", f"{complete_words(profile)}, of both"),
        ("aiflame", profile.recording.aiflame_version),
    ]


def settings() -> dict[str, object]:
    """Return what the page needs for the same colours."""
    return {
        "grew": GREW,
        "shrank": SHRANK,
        "neutral": stall_colors.NEUTRAL,
        "least": LEAST_CHANGE,
    }
