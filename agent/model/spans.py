# SPDX-License-Identifier: Apache-2.0
"""Spans (SPAN_DTYPE) of what was counted over a longer time than a second."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import NS_PER_S

I64 = npt.NDArray[np.int64]


def spread_evenly(
    spans: npt.NDArray[np.void], begin_ns: I64, end_ns: I64
) -> list[npt.NDArray[np.void]]:
    """Returns spans divided over the seconds that they were in, by how much of each.

    Args:
        spans: Each with all that there was in its time.
        begin_ns: Where it begins, shape (spans,).
        end_ns: Where it ends, past its begin.
    """
    first_s, last_s = begin_ns // NS_PER_S, (end_ns - 1) // NS_PER_S
    middle_s = np.maximum(last_s - first_s - 1, 0)
    tail_ns = np.where(last_s > first_s, end_ns - last_s * NS_PER_S, 0)
    head, middle, tail = spans.copy(), spans.copy(), spans.copy()
    head["first_s"], middle["first_s"], tail["first_s"] = first_s, first_s + 1, last_s
    middle["seconds"] = middle_s
    for name in ("count", "ns"):
        rate = spans[name] / (end_ns - begin_ns)
        tail[name] = np.minimum(rate * tail_ns, spans[name])
        left = spans[name] - tail[name]
        each = np.minimum(rate * NS_PER_S, left // np.maximum(middle_s, 1)).astype(np.uint64)
        middle[name] = np.where(middle_s > 0, each, 0)
        head[name] = left - middle[name] * middle_s.astype(np.uint64)
    return [*map(not_empty, (head, middle, tail))]


def not_empty(spans: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Returns those that have anything."""
    is_any = (spans["ns"] > 0) | (spans["count"] > 0)
    return spans if is_any.all() else spans[is_any]
