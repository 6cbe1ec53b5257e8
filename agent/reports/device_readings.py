# SPDX-License-Identifier: Apache-2.0
"""How busy devices were, and how much of their memory was in use, by the second.

Readings are of all that ran on a device, whose ever it was, and are made about where seconds of the
recording begin: what begins or ends within half a second of one does so there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import BUSY_UNKNOWN, MOST_PERMILLE, NO_SIZE, Device, GpuProfile
from aiflame.agent.model.profile import NS_PER_S

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

# A reading may be of ten seconds, and so ten times as large while it is spread over them.
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """The readings of a device by bucket. All columns have the same shape: (buckets,).

    Attributes:
        number: Of the device, in its profile.
        device: Which.
        busy: Its share of the time, 0 to 1; NaN where it is not known.
        used_bytes: Of memory, the most; NaN where it is not known.
        total_bytes: Of memory; 0 where it is not known.
    """

    number: int
    device: Device
    busy: F64
    used_bytes: F64
    total_bytes: int


def seconds_of(readings: npt.NDArray[np.void]) -> tuple[I64, I64]:
    """Return the first second of each reading, and the one after its last."""
    begin_ns, end_ns = (readings[name].astype(np.int64) for name in ("begin_ns", "end_ns"))
    first_s, end_s = ((ns + NS_PER_S // 2) // NS_PER_S for ns in (begin_ns, end_ns))
    middle_s = (begin_ns + (end_ns - begin_ns) // 2) // NS_PER_S
    is_short = first_s >= end_s
    return np.where(is_short, middle_s, first_s), np.where(is_short, middle_s + 1, end_s)


def loads(gpu: GpuProfile, start_s: int, width_s: int, buckets: int) -> list[DeviceLoad]:
    """Return the readings of each device that has some, in the order of devices.

    Args:
        gpu: What was recorded.
        start_s: Where the first bucket begins.
        width_s: Of a bucket, in seconds.
        buckets: How many.
    """
    first_s, end_s = seconds_of(gpu.readings)
    first = np.clip((first_s - start_s) // width_s, 0, buckets)
    end = np.clip(-(-(end_s - start_s) // width_s), 0, buckets)
    found = []
    for number in np.unique(gpu.readings["device"]).tolist():
        own = np.flatnonzero((gpu.readings["device"] == number) & (first < end))
        sums = _Sums(buckets)
        for at in range(0, len(own), _ROWS_AT_ONCE):
            some = own[at : at + _ROWS_AT_ONCE]
            length = end[some] - first[some]
            # One entry for each bucket of each reading.
            row = np.repeat(some, length)
            step = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
            bucket = first[row] + step
            begins = np.maximum(first_s[row], start_s + bucket * width_s)
            ends = np.minimum(end_s[row], start_s + (bucket + 1) * width_s)
            sums.add(gpu.readings[row], bucket, (ends - begins) / (end_s[row] - first_s[row]))
        total_bytes = int(gpu.readings["total_bytes"][own].max(initial=0))
        found.append(
            DeviceLoad(number, gpu.devices[number], sums.busy(), sums.used_bytes, total_bytes)
        )
    return found


class _Sums:
    """What is known of each bucket."""

    def __init__(self, buckets: int) -> None:
        self._known_ns = np.zeros(buckets)
        self._busy_ns = np.zeros(buckets)
        self.used_bytes = np.full(buckets, np.nan)

    def add(self, rows: npt.NDArray[np.void], bucket: I64, part: F64) -> None:
        """Adds readings, each to a bucket; `part` of each is in that."""
        permille, used_bytes = rows["busy_permille"], rows["used_bytes"]
        # Several of one second count for as long as they lasted.
        lasted_ns = part * ((rows["end_ns"] - rows["begin_ns"]).astype(np.float64) + 1)
        known = permille != BUSY_UNKNOWN
        np.add.at(self._known_ns, bucket[known], lasted_ns[known])
        busy_ns = lasted_ns[known] * permille[known] / MOST_PERMILLE
        np.add.at(self._busy_ns, bucket[known], busy_ns)
        known = used_bytes != NO_SIZE
        np.fmax.at(self.used_bytes, bucket[known], used_bytes[known].astype(np.float64))

    def busy(self) -> F64:
        """Returns shares of the time that is known."""
        is_known = self._known_ns > 0
        shares: F64 = np.where(
            is_known, self._busy_ns / np.where(is_known, self._known_ns, 1), np.nan
        )
        return shares
