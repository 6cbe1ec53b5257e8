# SPDX-License-Identifier: Apache-2.0
"""Folded text: `root;caller;leaf nanoseconds`, one line per distinct stack.

What every flame graph tool reads, and what grep and sort can work on. Lines are sorted, so two
files can be compared. Kernel frames end in `_[k]` and Python frames in `_[p]`, as other tools
write them; `plain` leaves that off. There are no comment lines: facts stay in the capture.

Device samples (`--view gpu`) are in the order of published AI flame graphs: kernel and source line
end in `_[G]`, instruction, stall reason and offset in `_[g]`, and the number is of samples.

Of two captures, or parts of a store, that are compared, lines have two numbers, of base and of new,
as those of difffolded.pl -n (https://github.com/brendangregg/FlameGraph): base is scaled to the
whole of new, so that a difference is one of shares.

Frames are merged by name: of lines and files, only those of Python frames are in the text, as part
of the name.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from aiflame.agent.model.profile import Difference, FrameKind, Profile
from aiflame.agent.reports.base import ReportOptions
from aiflame.agent.reports.device_times import shown_rows
from aiflame.agent.reports.palette import Category
from aiflame.agent.reports.rows import Labels, rows_for
from aiflame.agent.reports.summed import summed_paths

_SUFFIXES = {FrameKind.KERNEL: "_[k]", FrameKind.PYTHON: "_[p]"}
_DEVICE_SUFFIXES = {Category.DEVICE_CODE: "_[G]", Category.DEVICE_LOCATION: "_[g]"}


class FoldedReport:
    """Writes folded text; see the module."""

    name = "folded"
    extension = ".folded"
    is_binary = False

    def render(self, profile: Profile, options: ReportOptions) -> bytes:
        """Return the lines, in the order of their bytes; nothing at all where nothing was seen."""
        if profile.difference is not None:
            return _of_both(profile, profile.difference, options)
        rows = shown_rows(profile, options)
        names = [name.encode() for name in _names(rows.labels, options.plain)]
        totals: defaultdict[bytes, int] = defaultdict(int)
        for entry in summed_paths(rows):
            totals[b";".join([names[label] for label in entry.labels])] += entry.ns
        lines = []
        while totals:  # never all of both: a line is as long as its stack is deep
            lines.append(b"%b %d\n" % totals.popitem())
        lines.sort()
        return b"".join(lines)


def _of_both(profile: Profile, difference: Difference, options: ReportOptions) -> bytes:
    rows = rows_for(profile, options)
    names = [name.encode() for name in _names(rows.labels, options.plain)]
    totals: defaultdict[bytes, list[int]] = defaultdict(lambda: [0, 0])
    for entry in summed_paths(rows, difference.is_new[rows.thread].astype(np.int64)):
        totals[b";".join([names[label] for label in entry.labels])][entry.group] += entry.ns
    whole, whole_new = (sum(ns[side] for ns in totals.values()) for side in (0, 1))
    lines = [
        b"%b %d %d\n" % (stack, base * whole_new // max(1, whole), new)
        for stack, (base, new) in totals.items()
    ]
    return b"".join(sorted(lines))


def _names(labels: Labels, plain: bool) -> list[str]:
    # The separator of the format cannot be escaped in it; a colon is what other tools write.
    names = [name.replace(";", ":") for name in labels.names]
    if plain:
        return names
    return [
        name + (_SUFFIXES.get(FrameKind(kind)) or _DEVICE_SUFFIXES.get(Category(category), ""))
        for name, kind, category in zip(
            names, labels.kinds.tolist(), labels.categories.tolist(), strict=True
        )
    ]
