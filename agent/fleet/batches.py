# SPDX-License-Identifier: Apache-2.0
"""A profile of a whole host, divided among those whose labels differ.

Each process is in one part, and so are its threads, its time, its launches, its kernels, and what
devices said of these. So the parts add up to the whole, and none mentions another's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.batch import Batch, Labels
from aiflame.agent.model.gpu import NONE, GpuProfile
from aiflame.agent.model.profile import Profile, Stacks
from aiflame.gpu.attribution import attribution_of
from aiflame.gpu.attribution.kernel_times import attributed_times, measured_times

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.void]


def batches_of(profile: Profile, labels: Sequence[Labels | None]) -> Iterator[Batch]:
    """Divides a profile.

    Args:
        profile: Of a stretch of time.
        labels: Of each of its processes; None leaves one out.

    Yields:
        One for each of the labels that have any time, launch or sample, in the order of these.
    """
    profile = replace(profile, gpu=_attributed(profile.gpu))
    distinct = dict.fromkeys(one for one in labels if one is not None)
    parts = {one: number for number, one in enumerate(distinct)}
    part_of = np.array([-1 if one is None else parts[one] for one in labels], np.int64)
    for one, number in parts.items():
        part = _part(profile, part_of == number)
        if _is_anything(part):
            recording = profile.recording
            yield Batch(one, part, recording.started_unix_ns, recording.duration_ns)


def _attributed(gpu: GpuProfile) -> GpuProfile:
    """Settles which launches samples belong to: estimates may depend on all that there is."""
    if not len(gpu.samples) and not len(gpu.times):
        return gpu
    attribution = attribution_of(gpu, measured_times(gpu))
    return replace(
        gpu,
        attributed=attribution.rows,
        error=attribution.error,
        attributed_times=attributed_times(gpu),
    )


def _is_anything(profile: Profile) -> bool:
    gpu = profile.gpu
    return any(map(len, (profile.samples, profile.waits, gpu.calls, gpu.samples, gpu.times)))


class _Kept:
    """Which rows of a table are kept, and their new numbers."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.rows: I64 = np.flatnonzero(mask)
        self._new = np.cumsum(mask) - 1

    def pick(self, items: Sequence[Any]) -> tuple[Any, ...]:
        """Returns those of a tuple that are kept."""
        return tuple(items[row] for row in self.rows.tolist())

    def number(self, old: int) -> int:
        """Returns the new number of a row."""
        return int(self._new[old])

    def number_of_any(self, old: int | None) -> int | None:
        """Returns the new number of a row, where there is one."""
        return None if old is None else self.number(old)

    def renumber(self, rows: Rows, field: str) -> None:
        """Puts new numbers into a column, which may say NONE."""
        column = rows[field]
        is_there = column != NONE
        column[is_there] = self._new[column[is_there]]


def _marked(count: int, *indexes: npt.NDArray[Any]) -> _Kept:
    """Keeps those of so many rows that are mentioned."""
    mask = np.zeros(count, np.bool_)
    for index in indexes:
        mask[index[index != NONE]] = True
    return _Kept(mask)


def _column(values: Sequence[int | None]) -> I64:
    return np.array([NONE if value is None else value for value in values], np.int64)


def _part(profile: Profile, is_chosen: Mask) -> Profile:
    """Returns what is of some processes."""
    gpu = profile.gpu
    of_threads = is_chosen[_column([thread.process for thread in profile.threads])]
    threads = _Kept(of_threads)
    process_of_kernel = _column([kernel.process for kernel in gpu.kernels])
    own_kernels = is_chosen[process_of_kernel]
    codes = _Kept(own_kernels[_column([code.kernel for code in gpu.codes])])
    samples = _Kept(threads.mask[profile.samples["thread"]])

    rows = {
        "samples": profile.samples[samples.mask],
        "waits": profile.waits[threads.mask[profile.waits["thread"]]],
        "calls": gpu.calls[threads.mask[gpu.calls["thread"]]],
        "events": gpu.events[threads.mask[gpu.events["thread"]]],
        "launches": gpu.launches[threads.mask[gpu.launches["thread"]]],
    }
    device_samples, times = (
        _Kept(codes.mask[gpu.samples["code"]]),
        _Kept(own_kernels[gpu.times["kernel"]]),
    )
    on_device = {"samples": gpu.samples[device_samples.mask], "times": gpu.times[times.mask]}
    attributed = _attributed_part(gpu.attributed, "sample", device_samples)
    attributed_time = _attributed_part(gpu.attributed_times, "time", times)
    found = [each for each in (attributed, attributed_time) if each is not None]

    # A capture may say that a thread launched a kernel of another process.
    of_calls = [rows[name]["kernel"] for name in ("calls", "events", "launches")]
    kernels = _Kept(own_kernels | _marked(len(gpu.kernels), *of_calls).mask)
    owners = _marked(len(profile.processes), process_of_kernel[kernels.rows])
    processes = _Kept(is_chosen | owners.mask)

    mentioning = [*rows.values(), *on_device.values(), *found]
    kept_stacks = _marked(len(profile.stacks), *(each["stack"] for each in mentioning))
    for each in mentioning:
        kept_stacks.renumber(each, "stack")
    for each in rows.values():
        threads.renumber(each, "thread")
    for name in ("calls", "events", "launches"):
        kernels.renumber(rows[name], "kernel")
    codes.renumber(on_device["samples"], "code")
    kernels.renumber(on_device["times"], "kernel")
    spans = profile.spans[samples.mask[profile.spans["sample"]]]
    samples.renumber(spans, "sample")

    stacks, frames = _stacks(profile, kept_stacks)
    functions = _marked(len(profile.functions), frames["function"])
    functions.renumber(frames, "function")
    picked_functions, picked_codes = functions.pick(profile.functions), codes.pick(gpu.codes)
    binaries = _marked(
        len(profile.binaries),
        _column([function.binary for function in picked_functions]),
        _column([code.binary for code in picked_codes]),
    )
    return replace(
        profile,
        processes=processes.pick(profile.processes),
        labels=(),  # those of the batch
        threads=tuple(
            replace(thread, process=processes.number(thread.process))
            for thread in threads.pick(profile.threads)
        ),
        binaries=binaries.pick(profile.binaries),
        functions=tuple(
            replace(function, binary=binaries.number_of_any(function.binary))
            for function in picked_functions
        ),
        frames=frames,
        stacks=stacks,
        samples=rows["samples"],
        waits=rows["waits"],
        spans=spans,
        gpu=replace(
            gpu,
            kernels=tuple(
                replace(kernel, process=processes.number(kernel.process))
                for kernel in kernels.pick(gpu.kernels)
            ),
            codes=tuple(
                replace(
                    code,
                    kernel=kernels.number(code.kernel),
                    binary=binaries.number_of_any(code.binary),
                )
                for code in picked_codes
            ),
            instructions=tuple(
                replace(one, code=codes.number(one.code))
                for one in gpu.instructions
                if codes.mask[one.code]
            ),
            calls=rows["calls"],
            events=rows["events"],
            launches=rows["launches"],
            samples=on_device["samples"],
            times=on_device["times"],
            attributed=attributed,
            attributed_times=attributed_time,
        ),
    )


def _attributed_part(rows: Rows | None, field: str, kept: _Kept) -> Rows | None:
    """Returns what is known of the stacks of some samples or times."""
    if rows is None:
        return None
    part: Rows = rows[kept.mask[rows[field]]]
    kept.renumber(part, field)
    return part


def _stacks(profile: Profile, kept: _Kept) -> tuple[Stacks, Rows]:
    """Returns some stacks, and the frames that they have."""
    stacks = profile.stacks
    lengths = np.diff(stacks.offsets.astype(np.int64))
    of_stacks = stacks.frames[np.repeat(kept.mask, lengths)].astype(np.int64)
    used = _marked(len(profile.frames), of_stacks)
    offsets = np.zeros(len(kept.rows) + 1, np.uint64)
    np.cumsum(lengths[kept.mask], out=offsets[1:])
    new = np.cumsum(used.mask) - 1
    picked = Stacks(
        offsets,
        new[of_stacks].astype(np.uint32),
        stacks.ends[kept.mask],
        stacks.gil[kept.mask],
    )
    return picked, profile.frames[used.mask]
