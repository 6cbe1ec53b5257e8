# SPDX-License-Identifier: Apache-2.0
"""Rows of different lengths that lie one after the other in a flat array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def ranges(starts: I64, lengths: I64) -> I64:
    """Returns start, start + 1, ... for each start, as many as its length says."""
    before = np.cumsum(lengths) - lengths
    found: I64 = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return found
