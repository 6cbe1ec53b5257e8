# SPDX-License-Identifier: Apache-2.0
"""What a process of a window had mapped."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.window import COLUMNS, Rows
from aiflame.agent.symbols.intervals import Disjoint, find
from intervaltree import IntervalTree

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_FIELDS = ["start", "end", "file_offset", "bias", "binary"]


class MappedProcess:
    """The mappings of one process.

    Args:
        rows: MAPPING_DTYPE, the newest last: newer ones replace older ones where they overlap.

    Attributes:
        rows: MAPPING_DTYPE, disjoint and in address order.
    """

    def __init__(self, rows: Rows) -> None:
        laid = laid_over(rows)
        self.rows: Rows = np.zeros(len(laid), COLUMNS["mappings"].dtype)
        self.rows[_FIELDS] = np.array(laid, self.rows[_FIELDS].dtype)
        starts, ends = self.rows["start"].copy(), self.rows["end"].copy()
        self._ranges = Disjoint(starts, ends, np.arange(len(laid)))

    def find(self, addresses: U64) -> I64:
        """Returns for each address the index of its mapping in `rows`, -1 for none."""
        return find(self._ranges, addresses)


def by_process(rows: Rows) -> dict[int, Rows]:
    """Returns the mappings of each process, in their order.

    Args:
        rows: MAPPING_DTYPE of all processes.
    """
    ordered = rows[np.argsort(rows["process"], kind="stable")]
    processes, starts = np.unique(ordered["process"], return_index=True)
    bounds = itertools.pairwise([*starts.tolist(), len(rows)])
    return {
        process: ordered[start:end]
        for process, (start, end) in zip(processes.tolist(), bounds, strict=True)
    }


def laid_over(rows: Rows) -> list[tuple[int, int, int, int, int]]:
    """Lays newer mappings over older ones.

    Args:
        rows: MAPPING_DTYPE of one process, the newest last.

    Returns:
        (start, end, file_offset, bias, binary), none of which overlap.
    """
    mappings = rows[_FIELDS].tolist()
    ordered = sorted(mappings)
    if all(one[1] <= following[0] for one, following in itertools.pairwise(ordered)):
        return ordered
    tree = IntervalTree()
    for mapping in mappings:
        start, end = mapping[:2]
        if start < end:
            tree.chop(start, end)
            tree.addi(start, end, mapping)
    return [
        (part.begin, part.end, offset + part.begin - start, bias, binary)
        for part in sorted(tree)
        for start, _, offset, bias, binary in (part.data,)
    ]
