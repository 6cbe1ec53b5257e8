# SPDX-License-Identifier: Apache-2.0
"""Devices as tables for spreadsheets: kernels.csv, stalls.csv, and readings.csv if there are any.

RFC 4180 with a line of headings; columns carry their units in their names, times are microseconds,
and a cell is empty where nothing is known. Percentages are of all device samples.

A spreadsheet takes a cell that begins with = + - or @ for a formula, and names come from the
profiled processes: such a text gets an apostrophe in front, as does one that begins with an
apostrophe, so that the one in front can be taken off again. Numbers are never changed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

import numpy as np
from aiflame.agent.model.gpu import BUSY_UNKNOWN, MOST_PERMILLE, NO_SIZE, GpuProfile
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.base import ReportOptions
from aiflame.agent.reports.device_facts import short_name
from aiflame.agent.reports.device_rows import DeviceSamples, device_samples
from aiflame.agent.reports.kernel_stats import KernelStats, kernel_stats
from aiflame.agent.reports.rows import label_of
from aiflame.agent.reports.selection import shown_stacks
from aiflame.agent.reports.words import showable
from aiflame.gpu.stalls import category_of

Cell = str | int | float

_FORMULA = ("=", "+", "-", "@", "'")

_KERNELS = (
    *("kernel", "process", "pid", "calls", "work_items", "samples", "share_pct", "certainty"),
    *("launch_stacks", "total_time_us", "min_time_us", "avg_time_us", "max_time_us"),
    *("sampled_time_us", "top_stack"),
)
_STALLS = (
    *("kernel", "process", "pid", "offset", "instruction", "file", "line", "reason", "category"),
    *("samples", "share_pct"),
)
_READINGS = (
    *("device", "model", "begin_us", "end_us", "busy_pct", "memory_used_bytes"),
    "memory_total_bytes",
)


def csv_files(profile: Profile, options: ReportOptions) -> dict[str, bytes]:
    """Return the content of each file by its name.

    Args:
        profile: What was recorded.
        options: Of these, which frames the launching stacks have.
    """
    samples = device_samples(profile)
    found = {
        "kernels.csv": _written(_KERNELS, _kernels(profile, options, samples)),
        "stalls.csv": _written(_STALLS, _stalls(profile, samples)),
    }
    if len(profile.gpu.readings):
        found["readings.csv"] = _written(_READINGS, _readings(profile.gpu))
    return found


def _written(headings: Sequence[str], rows: Iterable[Sequence[Cell]]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(headings)
    writer.writerows(
        [safe(cell) if isinstance(cell, str) else cell for cell in row] for row in rows
    )
    return out.getvalue().encode()


def safe(text: str) -> str:
    """Return a text as it may stand in a cell: on one line, and no formula."""
    shown = showable(text) if text else ""
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def _readings(gpu: GpuProfile) -> Iterable[Sequence[Cell]]:
    for device, begin_ns, end_ns, busy, used, total in gpu.readings.tolist():
        yield (
            *(short_name(gpu, device), gpu.devices[device].name),
            *(begin_ns / 1_000, end_ns / 1_000),
            "" if busy == BUSY_UNKNOWN else 100 * busy / MOST_PERMILLE,
            *(("", "") if used == NO_SIZE else (used, total)),
        )


def _share(part: int, whole: int) -> float:
    return round(100 * part / whole, 4) if whole else 0.0


def _kernels(
    profile: Profile, options: ReportOptions, samples: DeviceSamples
) -> Iterable[Sequence[Cell]]:
    stacks = shown_stacks(profile, options.frames, options.hide_importlib)
    whole = int(samples.count.sum())

    def words(entry: KernelStats) -> str:
        if entry.top_stack is None:
            return ""
        start, stop = (int(at) for at in stacks.offsets[entry.top_stack : entry.top_stack + 2])
        frames = profile.frames[stacks.frames[start:stop]]
        names = [
            label_of(profile.functions[int(frame["function"])], int(frame["line"]))
            for frame in frames
        ]
        return ";".join(name.replace(";", ":") for name in names)

    for entry in kernel_stats(samples).values():
        process = profile.processes[entry.process]
        yield (
            *(entry.name.whole, process.name, process.pid, entry.calls),
            entry.work_items or "",
            *(entry.total, _share(entry.total, whole), entry.certainty, entry.stacks),
            *_time_cells(entry),
            entry.sampled_ns / 1_000 if entry.sampled_ns else "",
            words(entry),
        )


def _time_cells(entry: KernelStats) -> tuple[Cell, ...]:
    if not entry.runs:
        return ("", "", "", "")
    # Captures have sums, not the shortest and the longest.
    return (entry.time_ns / 1_000, "", round(entry.time_ns / entry.runs / 1_000, 3), "")


def _stalls(profile: Profile, samples: DeviceSamples) -> Iterable[Sequence[Cell]]:
    gpu = samples.gpu
    whole = int(samples.count.sum())
    known = {(i.code, i.offset): i for i in gpu.instructions}
    keys: dict[tuple[int, int, int], int] = {}
    columns = (samples.code, samples.offset, samples.reason, samples.count)
    for code, offset, reason, count in zip(*(c.tolist() for c in columns), strict=True):
        keys[code, offset, reason] = keys.get((code, offset, reason), 0) + count
    weight = np.zeros(len(gpu.codes), np.uint64)
    np.add.at(weight, samples.code, samples.count)
    # By kernel, the most sampled first, then down its code.
    for (code, offset, reason), count in sorted(
        keys.items(), key=lambda item: (-int(weight[item[0][0]]), item[0])
    ):
        kernel = gpu.codes[code].kernel
        process = profile.processes[gpu.kernels[kernel].process]
        found = known.get((code, offset))
        text, file, line = (found.text, found.file, found.line) if found is not None else ("",) * 3
        yield (
            *(samples.names[kernel].whole, process.name, process.pid, f"0x{offset:x}"),
            *(text, file, line or "", gpu.reasons[reason].name),
            *(category_of(gpu.reasons[reason]).label, count, _share(count, whole)),
        )
