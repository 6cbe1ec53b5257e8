# SPDX-License-Identifier: Apache-2.0
"""Sums of shown stacks, for the formats that list stacks instead of drawing a tree.

Rows are first summed by number with numpy, and only then turned into Python objects: a capture of
a million samples in 100,000 stacks makes 100,000 of them, not a million.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.reports.rows import Rows


@dataclass(frozen=True, slots=True)
class SummedPath:
    """The time of one shown stack.

    Attributes:
        group: What the caller sums by, besides the stack; 0 where it gave nothing.
        labels: Root first, the off-CPU marker last; indexes into `Rows.labels`.
        ns: Greater than zero.
    """

    group: int
    labels: list[int]
    ns: int


def summed_paths(rows: Rows, group: npt.NDArray[np.int64] | None = None) -> Iterator[SummedPath]:
    """Yield the time of each distinct (group, path, marker), in that order.

    Stacks that differ only in what is not shown, such as lines, are still apart.

    Args:
        rows: Shown stacks.
        group: A non-negative number per row, shape (rows,).
    """
    if group is None:
        group = np.zeros(len(rows), dtype=np.int64)
    tails = rows.tail + 1
    order = np.lexsort((tails, rows.path_of, group))
    keys = np.stack((group[order], rows.path_of[order], tails[order]))
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    firsts = np.flatnonzero(is_first)
    if not len(firsts):
        return
    sums = np.add.reduceat(rows.ns[order], firsts)
    chosen = order[firsts]
    columns = (group[chosen].tolist(), rows.paths(chosen), sums.tolist())
    for of_group, labels, ns in zip(*columns, strict=True):
        if ns:
            yield SummedPath(of_group, labels, ns)
