# SPDX-License-Identifier: Apache-2.0
"""What a process of a window had mapped."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.window import COLUMNS, Rows
from intervaltree import IntervalTree

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_FIELDS = ["start", "end", "file_offset", "bias", "binary"]


class MappedProcess:
    """The mappings of one process.

    Args:
        rows: MAPPING_DTYPE, the newest last: newer ones lie over older ones.

    Attributes:
        rows: MAPPING_DTYPE, disjoint and in address order.
    """

    def __init__(self, rows: Rows) -> None:
        laid = laid_over(rows)
        self.rows: Rows = np.zeros(len(laid), COLUMNS["mappings"].dtype)
        self.rows[_FIELDS] = np.array(laid, self.rows[_FIELDS].dtype)

    def find(self, addresses: U64) -> I64:
        """Returns for each address the index of its mapping in `rows`, -1 for none."""
        if not len(self.rows):
            return np.full(len(addresses), -1, np.int64)
        at = np.searchsorted(self.rows["start"], addresses, side="right").astype(np.int64) - 1
        inside = (at >= 0) & (addresses < self.rows["end"][np.maximum(at, 0)])
        return np.where(inside, at, -1)


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
