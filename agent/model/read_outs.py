# SPDX-License-Identifier: Apache-2.0
"""Stretches of time in which a device named the launches of its samples, process by process.

Samples are read out again and again, and each read-out says from when to when its samples were
taken. Read-outs that follow each other make a stretch: what ran in one of these was sampled there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

# Of a time that is in no stretch.
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class ReadOutSpans:
    """Spans by process, and by time within each; they do not overlap. All of shape (n,).

    Attributes:
        process: Whose samples were read out.
        begin_ns: Since any moment, the same for all.
        end_ns: After the last read-out.
    """

    process: I64
    begin_ns: I64
    end_ns: I64

    @classmethod
    def of(cls, process: I64, begin_ns: I64, end_ns: I64) -> ReadOutSpans:
        """Puts read-outs together, which may come in any order, and more than once."""
        found: list[tuple[int, int, int]] = []
        order = np.lexsort((end_ns, begin_ns, process))
        rows = np.stack((process, begin_ns, end_ns))[:, order]
        is_new = np.append(True, (np.diff(rows) != 0).any(axis=0))[: len(order)]
        for who, begin, end in rows[:, is_new].T.tolist():
            if found and found[-1][0] == who and begin <= found[-1][2]:
                found[-1] = (who, found[-1][1], max(found[-1][2], end))
            else:
                found.append((who, begin, end))
        columns = np.array(found, np.int64).reshape(-1, 3).T
        return cls(*columns)

    def at(self, process: I64, begin_ns: I64, end_ns: I64) -> I64:
        """Returns the stretch that each time of a process lies within, or NOWHERE."""
        found = np.full(len(process), NOWHERE)
        for who in np.unique(self.process).tolist():
            asked = np.flatnonzero(process == who)
            own = np.flatnonzero(self.process == who)
            at = np.searchsorted(self.begin_ns[own], begin_ns[asked], side="right") - 1
            is_within = (at >= 0) & (end_ns[asked] <= self.end_ns[own][at])
            found[asked[is_within]] = own[at[is_within]]
        return found
