# SPDX-License-Identifier: Apache-2.0
"""When a device named the launches of its samples, for what else it tells of these times.

A helper tells samples before the times of the kernels that they are of, or with them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.read_outs import ReadOutSpans
from aiflame.agent.model.window import NO_TIME, Rows

I64 = npt.NDArray[np.int64]

# The newest: a window of a quarter of a second has 25, and kernel times come half a second later.
# Those of 160 processes.
_MOST_KEPT = 4096


class NamedReadOuts:
    """Read-outs of samples whose launches are known."""

    def __init__(self) -> None:
        self._kept = np.zeros((3, 0), np.int64)  # process, begin, end
        self._spans = ReadOutSpans.of(*self._kept)

    def put(self, process: I64, samples: Rows) -> None:
        """Takes samples whose launches are known.

        Args:
            process: Of each.
            samples: Of a window.
        """
        is_known = (samples["begin_ns"] != NO_TIME) & (samples["begin_ns"] < samples["end_ns"])
        if is_known.any():
            times = (samples["begin_ns"][is_known], samples["end_ns"][is_known])
            told = np.unique(np.stack((process[is_known], *times)), axis=1)
            kept = np.concatenate((self._kept, told), axis=1)
            self._kept = kept[:, np.argsort(kept[2], kind="stable")][:, -_MOST_KEPT:]
            self._spans = ReadOutSpans.of(*self._kept)

    def at(self, process: I64, times: Rows) -> I64:
        """Returns a number for the read-outs in a row that each kernel ran in, or NOWHERE."""
        return self._spans.at(process, times["begin_ns"], times["end_ns"])
