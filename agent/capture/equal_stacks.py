# SPDX-License-Identifier: Apache-2.0
"""Makes one stack of those that are equal, in all that calls of device APIs refer to.

A stack that met code without its unwind table has a row of its own in a capture, however often it
was taken (`recording/late_walks`). To attribution each is another one that may have launched a
kernel: one call site would seem to be many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NONE, GpuProfile
from aiflame.agent.model.profile import Stacks, Thread


def with_equal_stacks_merged(
    gpu: GpuProfile, stacks: Stacks, threads: Sequence[Thread]
) -> GpuProfile:
    """Returns the device half of a profile with the first of all equal stacks of a process."""
    processes: dict[int, int] = {}
    for rows in (gpu.calls, gpu.events, gpu.launches):
        found, at = np.unique(rows["stack"], return_index=True)
        of_threads = rows["thread"][at].tolist()
        for stack, thread in zip(found.tolist(), of_threads, strict=True):
            if NONE not in (stack, thread):
                processes[stack] = threads[thread].process
    firsts: dict[tuple[int, int, bytes], int] = {}
    same = np.arange(len(stacks), dtype=np.int64)
    for stack, process in sorted(processes.items()):
        begin, end = stacks.offsets[stack : stack + 2].tolist()
        content = (process, int(stacks.ends[stack]), stacks.frames[begin:end].tobytes())
        same[stack] = firsts.setdefault(content, stack)
    if len(firsts) == len(processes):
        return gpu
    return replace(
        gpu,
        calls=_with_stacks(gpu.calls, same),
        events=_with_stacks(gpu.events, same),
        launches=_with_stacks(gpu.launches, same),
    )


def _with_stacks(rows: npt.NDArray[np.void], same: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    copy = rows.copy()
    is_known = copy["stack"] != NONE
    copy["stack"][is_known] = same[copy["stack"][is_known]]
    return copy
