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
from aiflame.agent.model.batch import Batch, Labels, distinct_labels
from aiflame.agent.model.gpu import NONE, GpuProfile
from aiflame.agent.model.profile import Profile, Stacks
from aiflame.agent.model.ranges import ranges
from aiflame.gpu.attribution import attribution_of
from aiflame.gpu.attribution.kernel_times import attributed_times, measured_times

I64 = npt.NDArray[np.int64]
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
    parts = {one: number for number, one in enumerate(distinct_labels(labels))}
    objects = {id(one): one for one in labels}
    part_of_id = {key: -1 if one is None else parts[one] for key, one in objects.items()}
    part_of = np.array([part_of_id[id(one)] for one in labels], np.int64)
    division = _Division(profile, part_of, len(parts))
    recording = profile.recording
    for one, number in parts.items():
        if division.is_anything(number):
            part = division.part(number)
            yield Batch(one, part, recording.started_unix_ns, recording.duration_ns)


def batch_of_nobody(profile: Profile, node: str) -> Batch:
    """Returns what a stretch tells of its host alone: what was lost, and what the agent took.

    Args:
        profile: Of the stretch.
        node: The host's name.
    """
    part = _Division(profile, np.full(len(profile.processes), -1, np.int64), 1).part(0)
    recording = profile.recording
    return Batch(Labels("", node=node), part, recording.started_unix_ns, recording.duration_ns)


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


class _Grouped:
    """Which rows of a table are in each part: looked for once, since there may be 2,000 parts.

    Args:
        part_of: The part of each row, -1 for none.
        parts: How many there are.
    """

    def __init__(self, part_of: I64, parts: int) -> None:
        self._order: I64 = np.argsort(part_of, kind="stable")
        self._bounds = np.searchsorted(part_of[self._order], np.arange(parts + 1)).tolist()

    def rows(self, part: int) -> I64:
        """Returns the rows of a part, in their order."""
        return self._order[self._bounds[part] : self._bounds[part + 1]]

    def count(self, part: int) -> int:
        """Returns how many there are."""
        return int(self._bounds[part + 1] - self._bounds[part])


class _Kept:
    """Which rows of a table are kept, and their new numbers."""

    def __init__(self, rows: I64) -> None:
        self.rows = rows  # in their order

    def pick(self, items: Sequence[Any]) -> tuple[Any, ...]:
        """Returns those of a tuple that are kept."""
        return tuple(items[row] for row in self.rows.tolist())

    def numbers(self, old: npt.NDArray[Any]) -> I64:
        """Returns the new numbers of rows that are kept."""
        return np.searchsorted(self.rows, old)

    def numbers_of_any(self, old: Sequence[int | None]) -> Iterator[int | None]:
        """Yields the new numbers of rows, where there are some."""
        numbers = self.numbers(_column(old)).tolist()
        return (None if row is None else new for row, new in zip(old, numbers, strict=True))

    def renumber(self, rows: Rows, field: str) -> None:
        """Puts new numbers into a column, which may say NONE."""
        column = rows[field]
        is_there = column != NONE
        column[is_there] = self.numbers(column[is_there])


def _mentioned(*indexes: npt.NDArray[Any]) -> _Kept:
    """Keeps those rows that are mentioned."""
    found = np.unique(np.concatenate([index.astype(np.int64) for index in indexes]))
    return _Kept(found[found != NONE])


def _column(values: Sequence[int | None]) -> I64:
    return np.array([NONE if value is None else value for value in values], np.int64)


class _Division:
    """A profile that is being divided.

    Args:
        profile: Of all.
        part_of: The part of each process, -1 for none.
        parts: How many there are.
    """

    def __init__(self, profile: Profile, part_of: I64, parts: int) -> None:
        gpu = profile.gpu
        self._profile = profile
        self._process_of_kernel = _column([kernel.process for kernel in gpu.kernels])
        of_thread = part_of[_column([thread.process for thread in profile.threads])]
        of_kernel = part_of[self._process_of_kernel]
        of_code = of_kernel[_column([code.kernel for code in gpu.codes])]
        of_sample = of_thread[profile.samples["thread"]]
        code, kernel = gpu.samples["code"], gpu.times["kernel"]
        of_device_sample, of_time = of_code[code], of_kernel[kernel]
        part_of_rows = {
            "processes": part_of,
            "threads": of_thread,
            "samples": of_sample,
            "spans": of_sample[profile.spans["sample"]],
            "waits": of_thread[profile.waits["thread"]],
            "kernels": of_kernel,
            "codes": of_code,
            "instructions": of_code[_column([one.code for one in gpu.instructions])],
            "calls": of_thread[gpu.calls["thread"]],
            "events": of_thread[gpu.events["thread"]],
            "launches": of_thread[gpu.launches["thread"]],
            "device samples": of_device_sample,
            "times": of_time,
        }
        if gpu.attributed is not None:
            part_of_rows["attributed"] = of_device_sample[gpu.attributed["sample"]]
        if gpu.attributed_times is not None:
            part_of_rows["attributed times"] = of_time[gpu.attributed_times["time"]]
        self._grouped = {name: _Grouped(of, parts) for name, of in part_of_rows.items()}

    def is_anything(self, part: int) -> bool:
        """Whether a part has any time, launch or sample."""
        tables = ("samples", "waits", "calls", "device samples", "times")
        return any(self._grouped[table].count(part) for table in tables)

    def _kept(self, table: str, part: int) -> _Kept:
        return _Kept(self._grouped[table].rows(part))

    def part(self, part: int) -> Profile:
        """Returns what is of the processes of a part."""
        profile, gpu = self._profile, self._profile.gpu
        threads, codes = self._kept("threads", part), self._kept("codes", part)
        samples = self._kept("samples", part)
        rows = {
            "samples": profile.samples[samples.rows],
            "waits": profile.waits[self._kept("waits", part).rows],
            "calls": gpu.calls[self._kept("calls", part).rows],
            "events": gpu.events[self._kept("events", part).rows],
            "launches": gpu.launches[self._kept("launches", part).rows],
        }
        device_samples, times = self._kept("device samples", part), self._kept("times", part)
        on_device = {"samples": gpu.samples[device_samples.rows], "times": gpu.times[times.rows]}
        attributed = self._of_device(gpu.attributed, "attributed", part)
        attributed_time = self._of_device(gpu.attributed_times, "attributed times", part)
        if attributed is not None:
            device_samples.renumber(attributed, "sample")
        if attributed_time is not None:
            times.renumber(attributed_time, "time")
        found = [each for each in (attributed, attributed_time) if each is not None]

        # A capture may say that a thread launched a kernel of another process.
        of_calls = [rows[name]["kernel"] for name in ("calls", "events", "launches")]
        kernels = _mentioned(self._kept("kernels", part).rows, *of_calls)
        owners = self._process_of_kernel[kernels.rows]
        processes = _mentioned(self._kept("processes", part).rows, owners)

        mentioning = [*rows.values(), *on_device.values(), *found]
        kept_stacks = _mentioned(*(each["stack"] for each in mentioning))
        for each in mentioning:
            kept_stacks.renumber(each, "stack")
        for each in rows.values():
            threads.renumber(each, "thread")
        for name in ("calls", "events", "launches"):
            kernels.renumber(rows[name], "kernel")
        codes.renumber(on_device["samples"], "code")
        kernels.renumber(on_device["times"], "kernel")
        spans = profile.spans[self._kept("spans", part).rows]
        samples.renumber(spans, "sample")

        stacks, frames = _stacks(profile, kept_stacks)
        functions = _mentioned(frames["function"])
        functions.renumber(frames, "function")
        binaries_of_functions = [one.binary for one in functions.pick(profile.functions)]
        picked_codes = codes.pick(gpu.codes)
        binaries_of_codes = [code.binary for code in picked_codes]
        binaries = _mentioned(_column(binaries_of_functions), _column(binaries_of_codes))
        instructions = self._kept("instructions", part)
        return replace(
            profile,
            processes=processes.pick(profile.processes),
            labels=(),  # those of the batch
            threads=_with(threads.pick(profile.threads), process=processes),
            binaries=binaries.pick(profile.binaries),
            functions=_with(functions.pick(profile.functions), binary=binaries),
            frames=frames,
            stacks=stacks,
            samples=rows["samples"],
            waits=rows["waits"],
            spans=spans,
            gpu=replace(
                gpu,
                kernels=_with(kernels.pick(gpu.kernels), process=processes),
                codes=_with(picked_codes, kernel=kernels, binary=binaries),
                instructions=_with(instructions.pick(gpu.instructions), code=codes),
                calls=rows["calls"],
                events=rows["events"],
                launches=rows["launches"],
                samples=on_device["samples"],
                times=on_device["times"],
                attributed=attributed,
                attributed_times=attributed_time,
            ),
        )

    def _of_device(self, rows: Rows | None, table: str, part: int) -> Rows | None:
        """Returns what is known of the stacks of the samples or times of a part."""
        return None if rows is None else rows[self._kept(table, part).rows]


def _with(items: Sequence[Any], **tables: _Kept) -> tuple[Any, ...]:
    """Gives items the new numbers of the rows that their fields mention."""
    columns = (
        kept.numbers_of_any([getattr(item, field) for item in items])
        for field, kept in tables.items()
    )
    return tuple(
        replace(item, **dict(zip(tables, numbers, strict=True)))
        for item, *numbers in zip(items, *columns, strict=True)
    )


def _stacks(profile: Profile, kept: _Kept) -> tuple[Stacks, Rows]:
    """Returns some stacks, and the frames that they have."""
    stacks = profile.stacks
    starts = stacks.offsets[kept.rows].astype(np.int64)
    lengths = stacks.offsets[kept.rows + 1].astype(np.int64) - starts
    used, frames = np.unique(stacks.frames[ranges(starts, lengths)], return_inverse=True)
    offsets = np.zeros(len(kept.rows) + 1, np.uint64)
    np.cumsum(lengths, out=offsets[1:])
    picked = Stacks(
        offsets,
        frames.astype(np.uint32),
        stacks.ends[kept.rows],
        stacks.gil[kept.rows],
    )
    return picked, profile.frames[used]
