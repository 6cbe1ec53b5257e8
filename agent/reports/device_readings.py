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
        rows = gpu.readings[own]
        length = end[own] - first[own]
        # One entry for each bucket of each reading.
        row = np.repeat(np.arange(len(own)), length)
        step = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
        bucket = first[own][row] + step
        begins = np.maximum(first_s[own][row], start_s + bucket * width_s)
        ends = np.minimum(end_s[own][row], start_s + (bucket + 1) * width_s)
        # Several of one second count for as long as they lasted.
        lasted = (rows["end_ns"] - rows["begin_ns"]).astype(np.float64)[row] + 1
        part = lasted * (ends - begins) / (end_s[own] - first_s[own])[row]
        found.append(
            DeviceLoad(
                number,
                gpu.devices[number],
                _busy(rows["busy_permille"][row], bucket, part, buckets),
                _used(rows["used_bytes"][row], bucket, buckets),
                int(rows["total_bytes"].max(initial=0)),
            )
        )
    return found


def _busy(permille: npt.NDArray[np.uint16], bucket: I64, part: F64, buckets: int) -> F64:
    known = permille != BUSY_UNKNOWN
    whole = np.bincount(bucket[known], part[known], buckets)
    busy = np.bincount(bucket[known], part[known] * permille[known] / MOST_PERMILLE, buckets)
    shares: F64 = np.where(whole > 0, busy / np.where(whole > 0, whole, 1), np.nan)
    return shares


def _used(used_bytes: npt.NDArray[np.uint64], bucket: I64, buckets: int) -> F64:
    known = used_bytes != NO_SIZE
    most = np.full(buckets, np.nan)
    np.fmax.at(most, bucket[known], used_bytes[known].astype(np.float64))
    return most
