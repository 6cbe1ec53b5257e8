# SPDX-License-Identifier: Apache-2.0
"""By which weights the stacks that launched one kernel share its samples of one second.

This is for samples of which only the second is known, or launches whose order is not. A second's
samples belong to what was launched in it. The weights are, in this order: measured time on the
device, work items, number of launches; the first that is known for all of a kernel's launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.gpu.attribution.launches import Launches, Mask, starts_of_runs
from aiflame.gpu.attribution.rounding import Pools

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

# More than any interval: 32 bits in the profile.
INTERVAL_BITS = 32


@dataclass(frozen=True, slots=True)
class Windows:
    """The seconds in which kernels of several stacks were launched, and by which.

    Attributes:
        launches: Of these kernels alone.
        window: Which (name, interval), ascending, shape (launches,).
        kernel: Which name, numbered from 0, shape (launches,).
        party: Which of the stacks of that name, in their order, shape (launches,).
        keys: Name and interval of each window, ascending, shape (windows,).
        stacks: By (name, party).
        first_stack: Where those of each name begin, by name.
    """

    launches: Launches
    window: I64
    kernel: I64
    party: I64
    keys: I64
    stacks: I64
    first_stack: I64

    def of(self, name: I64, interval: I64) -> I64:
        """Returns the window of samples: of their second, else the nearest earlier, else later."""
        at = np.searchsorted(self.keys, _key(name, interval), side="right") - 1
        is_earlier = (at >= 0) & (self.keys[np.maximum(at, 0)] >> INTERVAL_BITS == name)
        return np.where(is_earlier, at, at + 1)

    def stack_of(self, name: I64, party: I64) -> I64:
        """Returns the stack that a party stands for."""
        found: I64 = self.stacks[self.first_stack[name] + party]
        return found


def _key(name: I64, number: I64) -> I64:
    return (name << INTERVAL_BITS) | number


def windows_of(launches: Launches) -> Windows:
    """Numbers windows and parties of launches; all of them are of kernels with several stacks."""
    first = starts_of_runs(launches.name, launches.interval)
    order = np.argsort(_key(launches.name, launches.stack))
    name, stack = launches.name[order], launches.stack[order]
    new_name, new_stack = starts_of_runs(name), starts_of_runs(name, stack)
    at = np.cumsum(new_stack) - 1
    first_stack = np.zeros(int(name[-1]) + 1, np.int64)
    first_stack[name[new_name]] = at[new_name]
    party = np.empty_like(at)
    party[order] = at - first_stack[name]
    return Windows(
        launches,
        window=np.cumsum(first) - 1,
        kernel=np.cumsum(starts_of_runs(launches.name)) - 1,
        party=party,
        keys=_key(launches.name, launches.interval)[first],
        stacks=stack[new_stack],
        first_stack=first_stack,
    )


def _known_for_kernel(windows: Windows, values: F64) -> Mask:
    """Whether a value is known for every launch of the kernel; shape (launches,)."""
    unknown = np.bincount(windows.kernel, ~(values > 0), windows.kernel[-1] + 1)
    is_known: Mask = unknown[windows.kernel] == 0
    return is_known


def pools_of(windows: Windows, times_ns: F64) -> Pools:
    """Decides the weights.

    Args:
        windows: Not empty.
        times_ns: Time on the device of one launch as measured, NaN where it was not, shape
            (launches,).
    """
    launches = windows.launches
    has_time = _known_for_kernel(windows, times_ns)
    has_work = _known_for_kernel(windows, launches.work)
    weight = np.where(has_work, launches.work, launches.count)
    weight = np.where(has_time, times_ns * launches.count, weight)
    return Pools(windows.window, windows.party, weight, len(windows.keys))
