# SPDX-License-Identifier: Apache-2.0
"""Figures by kernel: how often it was launched, from how many stacks, and its samples.

A kernel is one name in one process here: a launch knows a handle and a sample knows machine code,
which captures number apart. Kernels without a name are not taken for one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NONE, GpuProfile, Operation
from aiflame.agent.reports.device_rows import DeviceSamples
from aiflame.agent.reports.kernel_names import KernelName
from aiflame.gpu.attribution import Certainty

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KernelStats:
    """One kernel.

    Attributes:
        name: How it is called.
        linkage: Its linkage name, "" where unknown.
        process: Index into Profile.processes.
        calls: How often it was launched.
        stacks: From how many distinct stacks.
        work_items: Launched in all; 0 where the API does not say.
        samples: By Certainty.
        sampled_ns: What the samples stand for, 0 where that is no time.
        time_ns: How long it ran, 0 where no device told.
        runs: In how many executions that was.
        top_stack: Which stack has most of its samples, else launched it most often; None for none.
    """

    name: KernelName
    linkage: str
    process: int
    calls: int
    stacks: int
    work_items: int
    samples: tuple[int, ...]
    sampled_ns: int
    time_ns: int
    runs: int
    top_stack: int | None

    @property
    def total(self) -> int:
        """All of its samples."""
        return sum(self.samples)

    @property
    def certainty(self) -> str:
        """How sure the stacks of its samples are: "exact", "mixed", ...; "" without samples."""
        found = [c.label for c in Certainty if self.samples[c]]
        return found[0] if len(found) == 1 else "mixed" if found else ""


def launch_calls(gpu: GpuProfile) -> npt.NDArray[np.void]:
    """Return the rows of `gpu.calls` that are launches of a kernel."""
    found = gpu.calls_of(Operation.LAUNCH)
    launches: npt.NDArray[np.void] = found[found["kernel"] != NONE]
    return launches


def identities(gpu: GpuProfile) -> I64:
    """Return the number of the first kernel that is the same one, by kernel."""
    known: dict[tuple[int, str, int], int] = {}
    return np.array(
        [
            known.setdefault((kernel.process, kernel.name, 0 if kernel.name else i + 1), i)
            for i, kernel in enumerate(gpu.kernels)
        ],
        np.int64,
    )


def kernel_stats(samples: DeviceSamples) -> dict[int, KernelStats]:
    """Return the figures of each kernel by its number in `identities`, most samples first."""
    gpu = samples.gpu
    same = identities(gpu)
    calls = launch_calls(gpu)
    call_kernel = same[calls["kernel"]]
    sample_kernel = same[samples.kernel]
    periods = np.array([d.period_ns for d in gpu.devices], np.uint64)
    sampled_ns = samples.count * periods[samples.device]
    time_kernel = same[gpu.times["kernel"]]
    found = {}
    kernels = np.unique(np.concatenate((call_kernel, sample_kernel, time_kernel)))
    of_calls, of_samples = _rows_by(call_kernel, kernels), _rows_by(sample_kernel, kernels)
    of_times = _rows_by(time_kernel, kernels)
    columns = (kernels.tolist(), of_calls, of_samples, of_times)
    for kernel, called, ran, timed in zip(*columns, strict=True):
        own_calls = calls[called]
        walked = own_calls[own_calls["stack"] != NONE]
        count, certainty = samples.count[ran], samples.certainty[ran]
        counts = [int(count[certainty == c].sum()) for c in Certainty]
        known = ran[samples.stack[ran] >= 0]
        found[kernel] = KernelStats(
            name=samples.names[kernel],
            linkage=gpu.kernels[kernel].name,
            process=gpu.kernels[kernel].process,
            calls=int(own_calls["count"].sum()),
            stacks=len(np.unique(walked["stack"])),
            work_items=int(own_calls["work"].sum()),
            samples=tuple(counts),
            sampled_ns=int(sampled_ns[ran].sum()),
            time_ns=int(gpu.times["duration_ns"][timed].sum()),
            runs=int(gpu.times["count"][timed].sum()),
            top_stack=_heaviest(samples.stack[known], samples.count[known])
            if len(known)
            else _heaviest(walked["stack"].astype(np.int64), walked["count"]),
        )
    order = sorted(
        found,
        key=lambda k: (-found[k].total, -found[k].time_ns, -found[k].calls, found[k].name.whole, k),
    )
    return {kernel: found[kernel] for kernel in order}


def _rows_by(values: I64, groups: I64) -> list[I64]:
    """Returns the indexes of the rows that have each of some sorted values, in their order."""
    order = np.argsort(values, kind="stable")
    begins, ends = (np.searchsorted(values[order], groups, side) for side in ("left", "right"))
    return [order[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _heaviest(stack: I64, weight: npt.NDArray[np.uint64]) -> int | None:
    # The stack of the largest sum of weights, the first of equal ones.
    keys, at = np.unique(stack, return_inverse=True)
    sums = np.zeros(len(keys), np.uint64)
    np.add.at(sums, at, weight)
    return int(keys[np.argmax(sums)]) if len(keys) else None
