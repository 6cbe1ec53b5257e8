# SPDX-License-Identifier: Apache-2.0
"""By how much sharing is off where a device named launches for a while: measured, not estimated.

NVIDIA's devices name the launch of a sample only while they run kernels one after the other. Short
windows of that are sampled, and what is known of their samples is held against what sharing would
have made of them. It is the error of a recording's kernels as they ran in these windows: chance is
in it, the more the fewer samples there are, and so is what a window's launches differ in from those
of its second, by which samples are shared. Both grow less with windows, which are taken together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NONE, GpuProfile, MeasuredError
from aiflame.gpu.attribution.launches import (
    UNNAMED,
    launches_that_ran,
    name_ids,
    stacks_by_name,
)

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Named:
    """Samples whose launches a device named, of kernels that several stacks launch.

    Attributes:
        row: Of GpuProfile.samples, ascending.
        name: A number for the name of the kernel of each.
        stack: Who launched each.
        count: How many each stands for.
        windows: In how many windows they were taken.
    """

    row: I64
    name: I64
    stack: I64
    count: I64
    windows: int

    def compared(
        self,
        sample: npt.NDArray[np.unsignedinteger],
        stack: npt.NDArray[np.unsignedinteger],
        count: npt.NDArray[np.unsignedinteger],
    ) -> MeasuredError:
        """Compares with what others make of the same samples.

        Args:
            sample: Rows of GpuProfile.samples, of these and of others.
            stack: Whose each part is said to be.
            count: How many samples each part has; those of these samples add up to their own.
        """
        is_own = np.isin(sample, self.row)
        at = np.searchsorted(self.row, sample[is_own])
        key = np.concatenate((self.name, self.name[at])) << 32
        key |= np.concatenate((self.stack, stack[is_own].astype(np.int64)))
        differs = np.concatenate((self.count, -count[is_own].astype(np.int64)))
        keys, of_key = np.unique(key, return_inverse=True)
        off = np.bincount(of_key, differs.astype(np.float64), len(keys))
        samples = int(self.count.sum())
        return MeasuredError(self.windows, samples, float(abs(off).sum()) / 2 / samples)


def named_in_windows(gpu: GpuProfile) -> Named:
    """Finds the samples of windows in which a device named launches.

    They were read out, and no moment is known of them: those whose moment is known are not shared
    by the second, and devices that tell it name launches always, or never.
    """
    samples = gpu.samples
    is_named = (samples["stack"] != NONE) & (samples["begin_ns"] < samples["end_ns"])
    is_named &= samples["count"] > 0
    row = np.flatnonzero(is_named)
    kernel = np.array([code.kernel for code in gpu.codes], np.int64)[samples["code"][row]]
    process = np.array([one.process for one in gpu.kernels], np.int64)[kernel]
    names = name_ids(gpu)
    stacks, _ = stacks_by_name(launches_that_ran(gpu), int(names.max(initial=UNNAMED)) + 1)
    name = names[kernel]
    is_shared = name != UNNAMED
    is_shared[is_shared] = stacks[name[is_shared]] > 1
    window = _windows(process, samples["begin_ns"][row], samples["end_ns"][row])
    row = row[is_shared]
    return Named(
        row,
        name[is_shared],
        samples["stack"][row].astype(np.int64),
        samples["count"][row].astype(np.int64),
        len(np.unique(window[is_shared])),
    )


def _windows(process: I64, begin_ns: npt.NDArray[np.uint64], end_ns: npt.NDArray[np.uint64]) -> I64:
    """Numbers the windows that read-outs are of, in which each begins where one before it ended."""
    found = np.zeros(len(process), np.int64)
    windows = 0
    for one in np.unique(process).tolist():
        own = np.flatnonzero(process == one)
        own = own[np.argsort(begin_ns[own], kind="stable")]
        latest_ns = np.maximum.accumulate(end_ns[own])
        is_first = np.append(True, begin_ns[own][1:] > latest_ns[:-1])
        found[own] = windows + np.cumsum(is_first)
        windows = int(found[own[-1]])
    return found
