# SPDX-License-Identifier: Apache-2.0
"""Numbers that stand for rows of values: the same for the same, and in no order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def mixed(*columns: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Returns a number for each row of columns of integers, or of what becomes one.

    By the finaliser of splitmix64 (Steele, Lea and Flood, 2014), which mixes all bits.
    """
    found: npt.NDArray[np.uint64] = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        found ^= column.astype(np.uint64)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found ^= found >> np.uint64(31)
        found += np.uint64(0x9E3779B97F4A7C15)
    return found
