# SPDX-License-Identifier: Apache-2.0
"""Which CPU stacks the measured times of kernels belong to: a pure function of a profile.

The rules are those of samples. A time whose launch the device named belongs to that one's stack.
Else it belongs to the only stack that launched a kernel of that name in that process; if there are
several, they share it in whole nanoseconds, each second by the weights of sharing.py. What no
launch explains stays unattributed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NONE, GpuProfile
from aiflame.gpu.attribution import TIME_DTYPE, Certainty, mean_times
from aiflame.gpu.attribution.launches import UNNAMED, launches_of, name_ids, stacks_by_name
from aiflame.gpu.attribution.rounding import Parts, divide
from aiflame.gpu.attribution.sharing import pools_of, windows_of

I64 = npt.NDArray[np.int64]

_NS_PER_S = 1_000_000_000

# `time` is a row of GpuProfile.times, `stack` an index of Profile.stacks or NONE. Rows come in the
# order of (time, stack); those of one time add up to its duration.
ATTRIBUTED_TIME_DTYPE = np.dtype(
    [("time", "<u4"), ("stack", "<u4"), ("certainty", "u1"), ("ns", "<u8")]
)


def measured_times(gpu: GpuProfile) -> npt.NDArray[np.void]:
    """Returns what launches of each stack took, TIME_DTYPE, as far as the device named them."""
    known = gpu.times[gpu.times["stack"] != NONE]
    key = (known["stack"].astype(np.int64) << 32) | known["kernel"]
    keys, at = np.unique(key, return_inverse=True)
    found = np.zeros(len(keys), TIME_DTYPE)
    found["stack"], found["kernel"] = keys >> 32, keys & 0xFFFFFFFF
    np.add.at(found["launches"], at, known["count"])
    np.add.at(found["time_ns"], at, known["duration_ns"])
    return found


def attributed_times(gpu: GpuProfile) -> npt.NDArray[np.void]:
    """Finds the stacks of a profile's kernel times.

    Returns:
        ATTRIBUTED_TIME_DTYPE. Of a time range, what it was in the whole recording.
    """
    if gpu.attributed_times is not None:
        return gpu.attributed_times
    times = gpu.times
    names = name_ids(gpu)
    launches = launches_of(gpu)
    stacks, one = stacks_by_name(launches, int(names.max(initial=UNNAMED)) + 1)

    stack = times["stack"].astype(np.int64)
    name = names[times["kernel"]]
    open_ = np.flatnonzero((stack == NONE) & (name != UNNAMED))
    alone = open_[stacks[name[open_]] == 1]
    stack[alone] = one[name[alone]]
    shared = open_[stacks[name[open_]] > 1]
    parts = Parts(*np.zeros((3, 0), np.int64))
    if len(shared):
        windows = windows_of(launches.where(stacks[launches.name] > 1))
        second = times["begin_ns"][shared].astype(np.int64) // _NS_PER_S
        order = np.lexsort((shared, second, name[shared]))
        row, second = shared[order], second[order]
        window = windows.of(name[row], second)
        own = windows.launches
        pools = pools_of(windows, mean_times(own.name, own.stack, names, measured_times(gpu)))
        ns = times["duration_ns"][row].astype(np.int64)
        divided = divide(ns, window, name[row], pools)
        party = windows.stack_of(name[row[divided.row]], divided.party)
        parts = Parts(row[divided.row], party, divided.count)

    whole: I64 = np.delete(np.arange(len(times)), shared)
    found = np.zeros(len(whole) + len(parts.row), ATTRIBUTED_TIME_DTYPE)
    found["time"] = np.concatenate((whole, parts.row))
    found["stack"] = np.concatenate((stack[whole], parts.party))
    found["ns"] = np.concatenate((times["duration_ns"][whole], parts.count.astype(np.uint64)))
    found["certainty"][: len(whole)] = Certainty.EXACT
    found["certainty"][len(whole) :] = Certainty.SHARED
    found["certainty"][found["stack"] == NONE] = Certainty.UNATTRIBUTED
    key = (found["time"].astype(np.int64) << 32) | found["stack"]
    order = np.argsort(key, kind="stable")
    ordered: npt.NDArray[np.void] = found[order[found["ns"][order] > 0]]
    return ordered
