# SPDX-License-Identifier: Apache-2.0
"""How long devices ran kernels, as it is shown: under the stacks that launched them.

A combined stack is, root first: the process; the frames that launched the kernel, or
`[unknown launch]`; `-`, the boundary; and the kernel. Its weight is nanoseconds on a device: those
of kernels that ran at once count for each, as those of threads do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NONE, GpuProfile
from aiflame.agent.model.profile import NS_PER_S, SPAN_DTYPE, Profile
from aiflame.agent.reports.base import ReportOptions, View
from aiflame.agent.reports.device_rows import (
    U8,
    U64,
    DeviceRows,
    Launched,
    Role,
    combined,
    device_rows,
    device_samples,
    kernel_labels,
)
from aiflame.agent.reports.kernel_names import KernelName, kernel_names
from aiflame.agent.reports.rows import I64, LabelTable, Rows, rows_for
from aiflame.gpu.attribution import Certainty
from aiflame.gpu.attribution.kernel_times import attributed_times


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Attributed kernel times summed over time and queues. All columns have shape (rows,)."""

    gpu: GpuProfile
    names: Sequence[KernelName]  # by kernel
    stack: I64  # index into Profile.stacks, -1: unknown
    kernel: I64
    process: I64
    device: I64
    certainty: U8
    ns: U64
    runs: U64  # executions that this was; 0 where they are shared by time, not one by one
    # SPAN_DTYPE, `sample` being a row here: what ran is in the second in which it ended.
    spans: npt.NDArray[np.void]

    def __len__(self) -> int:
        return len(self.ns)


def device_times(profile: Profile) -> DeviceTimes:
    """Return the kernel times of a profile with the stacks that launched what ran."""
    gpu = profile.gpu
    found = attributed_times(gpu)
    of = gpu.times[found["time"]]
    # What the rows are summed by, in two numbers.
    launched = (found["stack"].astype(np.int64) << 32) | of["kernel"]
    ran = of["device"].astype(np.int64) * len(Certainty) + found["certainty"]
    pairs, pair = np.unique(launched, return_inverse=True)
    keys, row = np.unique(pair << 32 | ran, return_inverse=True)
    ns = np.zeros(len(keys), np.uint64)
    np.add.at(ns, row, found["ns"])
    runs = np.zeros(len(keys), np.uint64)
    np.add.at(runs, row, np.where(found["certainty"] == Certainty.SHARED, 0, of["count"]))
    spans = np.zeros(len(found), SPAN_DTYPE)
    spans["sample"], spans["first_s"], spans["seconds"] = row, of["end_ns"] // NS_PER_S, 1
    spans["count"] = spans["ns"] = found["ns"]
    process_of = np.array([k.process for k in gpu.kernels], np.int64)
    stack, kernel = np.divmod(pairs[keys >> 32], 1 << 32)
    device, certainty = np.divmod(keys & 0xFFFFFFFF, len(Certainty))
    return DeviceTimes(
        gpu=gpu,
        names=kernel_names(gpu.kernels),
        stack=np.where(stack == NONE, -1, stack),
        kernel=kernel,
        process=process_of[kernel],
        device=device,
        certainty=certainty.astype(np.uint8),
        ns=ns,
        runs=runs,
        spans=spans,
    )


def time_rows(profile: Profile, options: ReportOptions, times: DeviceTimes) -> DeviceRows:
    """Return kernel times as they are shown."""
    table = LabelTable(profile)
    launched = Launched(times.process, times.stack, times.ns)
    below = {Role.KERNEL: kernel_labels(table, times.names)[times.kernel]}
    return combined(profile, options, table, launched, below, [Role.KERNEL])


def shown_rows(profile: Profile, options: ReportOptions) -> Rows:
    """Return what the options choose of a profile, of threads or of devices, as it is shown."""
    if options.view is View.GPU:
        return device_rows(profile, options, device_samples(profile)).rows
    if options.view is View.GPU_TIME:
        return time_rows(profile, options, device_times(profile)).rows
    return rows_for(profile, options)
