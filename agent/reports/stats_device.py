# SPDX-License-Identifier: Apache-2.0
"""The tables about devices: kernels, stalls, launches, copies, memory, and waits for a device.

Samples are counts, and so are launches, exactly; neither is time. GPU time is of kernels on a
device, and waits are time of CPU threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import (
    BUSY_UNKNOWN,
    MOST_PERMILLE,
    NO_SIZE,
    NONE,
    Direction,
    Operation,
)
from aiflame.agent.model.profile import NS_PER_S, FrameKind, Profile, SampleClass
from aiflame.agent.reports.base import Frames
from aiflame.agent.reports.causes import Cause, classify, is_device_wait
from aiflame.agent.reports.device_facts import (
    absence,
    attribution,
    certainty_words,
    short_name,
    times_absence,
    times_note,
)
from aiflame.agent.reports.device_rows import UNKNOWN_LAUNCH, DeviceSamples, device_samples
from aiflame.agent.reports.device_times import DeviceTimes, device_times
from aiflame.agent.reports.facts import counted
from aiflame.agent.reports.kernel_stats import kernel_stats, launch_calls
from aiflame.agent.reports.own_code import launching_frames
from aiflame.agent.reports.rows import label_of
from aiflame.agent.reports.selection import shown_stacks
from aiflame.agent.reports.table import Table, ms, percent
from aiflame.agent.reports.words import duration, process_label, showable
from aiflame.gpu.attribution import Certainty
from aiflame.gpu.stalls import StallCategory

# Frames of a launching stack in one line, innermost first.
_FRAMES_NAMED = 5


U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """Where a stack calls a device's runtime.

    Attributes:
        own: The frame that is the reader's own code.
        names: The frames as texts, root first.
    """

    own: str
    names: tuple[str, ...]


_UNKNOWN = Site(UNKNOWN_LAUNCH, (UNKNOWN_LAUNCH,))

Callers = Callable[[int], Site]


def device_tables(profile: Profile, limit: int, frames: Frames = Frames.BOTH) -> list[Table]:
    """Return the tables about devices.

    Args:
        profile: What was recorded.
        limit: At most this many rows of each.
        frames: Which frames of launching stacks are named.
    """
    samples = device_samples(profile)
    callers = _callers(profile, frames)
    tables = [_kernels(profile, samples, limit)]
    if len(samples):
        tables.append(_reasons(samples, limit))
    tables += [
        load_table(profile),
        _launch_stacks(samples, device_times(profile), callers, limit),
        _calls(profile, limit),
        _bytes(profile, Operation.COPY),
        _bytes(profile, Operation.ALLOCATE),
        _waits(profile, callers, limit),
    ]
    return [table for table in tables if table.rows or table is tables[0]]


def time_tables(profile: Profile, limit: int, frames: Frames = Frames.BOTH) -> list[Table]:
    """Return the tables about devices, those of GPU time first; arguments as `device_tables`."""
    times = device_times(profile)
    callers = _callers(profile, frames)
    tables = [
        _kernel_times(profile, times, limit),
        load_table(profile),
        _time_stacks(times, callers, limit),
        _calls(profile, limit),
        _bytes(profile, Operation.COPY),
        _bytes(profile, Operation.ALLOCATE),
        _waits(profile, callers, limit),
    ]
    return [table for table in tables if table.rows or table is tables[0]]


def load_table(profile: Profile) -> Table:
    """Return how busy devices were, and how much of their memory was in use."""
    gpu = profile.gpu
    found = []
    for number in np.unique(gpu.readings["device"]).tolist():
        rows = gpu.readings[gpu.readings["device"] == number]
        total_bytes = int(rows["total_bytes"].max())
        found.append(
            (
                *_busy_figures(rows[rows["busy_permille"] != BUSY_UNKNOWN]),
                *_memory_figures(rows["used_bytes"][rows["used_bytes"] != NO_SIZE]),
                _gib(total_bytes) if total_bytes else "",
                short_name(gpu, number),
                showable(gpu.devices[number].name or gpu.devices[number].family),
            )
        )
    return Table(
        "Load of devices",
        "as their drivers tell about once a second, of all that ran on them, whose ever it was;"
        " 100 % = the time that they were read",
        (
            *(">busy", ">at most", ">memory GiB", ">at most GiB", ">of GiB"),
            *("device", "model"),
        ),
        tuple(found),
    )


def _busy_figures(rows: npt.NDArray[np.void]) -> tuple[str, str]:
    if not len(rows):
        return "", ""
    lasted_ns = (rows["end_ns"] - rows["begin_ns"]).astype(np.float64) + 1
    mean = float(np.average(rows["busy_permille"], weights=lasted_ns)) / MOST_PERMILLE
    return f"{100 * mean:.1f} %", f"{100 * int(rows['busy_permille'].max()) / MOST_PERMILLE:.1f} %"


def _memory_figures(used_bytes: npt.NDArray[np.uint64]) -> tuple[str, str]:
    if not len(used_bytes):
        return "", ""
    return _gib(float(used_bytes.astype(np.float64).mean())), _gib(int(used_bytes.max()))


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:,.2f}"


def _kernel_times(profile: Profile, times: DeviceTimes, limit: int) -> Table:
    stats = kernel_stats(device_samples(profile))
    order = sorted(stats.values(), key=lambda entry: -entry.time_ns)
    ran = [entry for entry in order if entry.runs]
    whole = sum(entry.time_ns for entry in ran)
    rows = [
        (
            ms(entry.time_ns),
            percent(entry.time_ns, whole),
            *(f"{entry.runs:,}", f"{entry.time_ns / entry.runs / 1_000:,.1f}"),
            *(f"{entry.calls:,}", f"{entry.stacks:,}"),
            showable(entry.name.short),
            process_label(process.name, process.pid),
        )
        for entry in ran[:limit]
        for process in (profile.processes[entry.process],)
    ]
    note = times_absence(profile) or (
        f"100 % = {duration(whole)} on devices: kernels that ran at once count for each."
        f" {times_note(profile, times)} Exact: the device named the launch, or one stack launched"
        " it; shared: estimated among several stacks"
    )
    return Table(
        "Top kernels",
        note,
        (
            *(">ms on device", ">share", ">runs", ">us a run"),
            *(">launches", ">stacks", "kernel", "process"),
        ),
        tuple(rows),
        max(0, len(ran) - limit),
    )


def _time_stacks(times: DeviceTimes, callers: Callers, limit: int) -> Table:
    known: dict[int, Site] = {-1: _UNKNOWN}
    sums: dict[Site, list[int]] = {}
    for stack, certainty, ns in zip(
        times.stack.tolist(), times.certainty.tolist(), times.ns.tolist(), strict=True
    ):
        if stack not in known:
            known[stack] = callers(stack)
        entry = sums.setdefault(known[stack], [0] * len(Certainty))
        entry[certainty] += ns
    whole = int(times.ns.sum())
    order = sorted(sums, key=lambda site: (-sum(sums[site]), site))
    return Table(
        "Top launch stacks",
        f"100 % = {duration(whole)} on devices; innermost frame first",
        (">ms on device", ">share", "attribution", "launched by", "launched from"),
        tuple(
            (
                ms(sum(sums[site])),
                percent(sum(sums[site]), whole),
                certainty_words(sums[site]),
                site.own,
                _words(site.names),
            )
            for site in order[:limit]
        ),
        max(0, len(order) - limit),
    )


def _callers(profile: Profile, frames: Frames) -> Callers:
    stacks = shown_stacks(profile, frames)
    launching = launching_frames(replace(profile, stacks=stacks))

    def of(stack: int) -> Site:
        start, stop = (int(offset) for offset in stacks.offsets[stack : stack + 2])
        found = []
        for frame in profile.frames[stacks.frames[start:stop]]:
            function = profile.functions[int(frame["function"])]
            if function.kind is FrameKind.KERNEL:
                break
            found.append(label_of(function, int(frame["line"])))
            if is_device_wait(function):
                break  # what a runtime does to wait says nothing
        row = profile.frames[launching[stack]]
        own = label_of(profile.functions[int(row["function"])], int(row["line"]))
        return Site(own if found else "", tuple(found))

    return of


def _words(names: Sequence[str]) -> str:
    # Innermost first: that is what the end of a narrow column leaves.
    shown = [*reversed(names[-_FRAMES_NAMED:])]
    return " < ".join(shown) + (" < ..." if len(names) > _FRAMES_NAMED else "") or "[no stack]"


def _kernels(profile: Profile, samples: DeviceSamples, limit: int) -> Table:
    stats = [*kernel_stats(samples).values()]
    whole = int(samples.count.sum())
    has_times = bool(len(profile.gpu.times))
    rows = []
    for entry in stats[:limit]:
        process = profile.processes[entry.process]
        rows.append(
            (
                f"{entry.total:,}",
                percent(entry.total, whole),
                *([ms(entry.time_ns)] if has_times else []),
                f"{entry.calls:,}",
                f"{entry.stacks:,}",
                entry.certainty or "not sampled",
                showable(entry.name.short),
                process_label(process.name, process.pid),
            )
        )
    note = absence(profile) or (
        f"100 % = {counted(whole, 'device sample')}. {attribution(profile, samples)}"
        " Exact: one stack launched it; shared: estimated among several stacks"
    )
    return Table(
        "Top kernels",
        note,
        (
            *(">samples", ">share", *([">ms on device"] if has_times else [])),
            *(">launches", ">stacks", "attribution", "kernel", "process"),
        ),
        tuple(rows),
        max(0, len(stats) - limit),
    )


def _reasons(samples: DeviceSamples, limit: int) -> Table:
    sums = np.zeros(len(samples.gpu.reasons), np.uint64)
    np.add.at(sums, samples.reason, samples.count)
    categories = dict(zip(samples.reason.tolist(), samples.category.tolist(), strict=True))
    whole = int(sums.sum())
    order = [i for i in np.argsort(-sums.astype(np.int64), kind="stable").tolist() if sums[i]]
    return Table(
        "Top stall reasons",
        f"100 % = {counted(whole, 'device sample')}; in the vendor's words, with their category",
        (">samples", ">share", "reason", "category"),
        tuple(
            (
                f"{int(sums[i]):,}",
                percent(int(sums[i]), whole),
                showable(samples.gpu.reasons[i].name),
                StallCategory(categories[i]).label,
            )
            for i in order[:limit]
        ),
        max(0, len(order) - limit),
    )


def _launch_stacks(
    samples: DeviceSamples, times: DeviceTimes, callers: Callers, limit: int
) -> Table:
    calls = launch_calls(samples.gpu)
    launches: dict[Site, int] = {}
    sums: dict[Site, int] = {}
    time_ns: dict[Site, int] = {}
    known: dict[int, Site] = {-1: _UNKNOWN, NONE: _UNKNOWN}

    def add(to: dict[Site, int], stack: int, count: int) -> None:
        site = known.get(stack)
        if site is None:
            site = known[stack] = callers(stack)
        to[site] = to.get(site, 0) + count

    for stack, count in zip(calls["stack"].tolist(), calls["count"].tolist(), strict=True):
        add(launches, stack, count)
    for stack, count in zip(samples.stack.tolist(), samples.count.tolist(), strict=True):
        add(sums, stack, count)
    for stack, ns in zip(times.stack.tolist(), times.ns.tolist(), strict=True):
        add(time_ns, stack, ns)
    whole = sum(sums.values())
    order = sorted(
        {**launches, **sums, **time_ns},
        key=lambda site: (
            *(-sums.get(site, 0), -time_ns.get(site, 0), -launches.get(site, 0)),
            site,
        ),
    )
    return Table(
        "Top launch stacks",
        f"100 % = {counted(whole, 'device sample')}; innermost frame first",
        (
            *(">samples", ">share", *([">ms on device"] if len(times) else [])),
            *(">launches", "launched by", "launched from"),
        ),
        tuple(
            (
                f"{sums.get(site, 0):,}",
                percent(sums.get(site, 0), whole),
                *([ms(time_ns.get(site, 0))] if len(times) else []),
                f"{launches.get(site, 0):,}",
                site.own,
                _words(site.names),
            )
            for site in order[:limit]
        ),
        max(0, len(order) - limit),
    )


def _calls(profile: Profile, limit: int) -> Table:
    gpu = profile.gpu
    counts = np.zeros(len(gpu.functions), np.uint64)
    np.add.at(counts, gpu.calls["function"], gpu.calls["count"])
    launches = int(gpu.calls_of(Operation.LAUNCH)["count"].sum())
    order = [i for i in np.argsort(-counts.astype(np.int64), kind="stable").tolist() if counts[i]]
    return Table(
        "Calls of device APIs",
        f"{launches:,} kernel launch{'' if launches == 1 else 'es'},"
        f" {_rate(launches, profile)} a second",
        (">calls", ">a second", "function", "api", "does"),
        tuple(
            (
                f"{int(counts[i]):,}",
                _rate(int(counts[i]), profile),
                showable(gpu.functions[i].name),
                showable(gpu.functions[i].api),
                gpu.functions[i].operation.name.lower(),
            )
            for i in order[:limit]
        ),
        max(0, len(order) - limit),
    )


def _rate(count: int, profile: Profile) -> str:
    lasted = profile.recording.shown_range.duration_ns
    return f"{count * NS_PER_S / lasted if lasted else 0:,.1f}"


def _bytes(profile: Profile, operation: Operation) -> Table:
    is_copy = operation is Operation.COPY
    wanted = (operation,) if is_copy else (Operation.ALLOCATE, Operation.FREE)
    rows = []
    for what in wanted:
        calls = profile.gpu.calls_of(what)
        for direction in Direction if is_copy else (None,):
            own = calls if direction is None else calls[calls["direction"] == direction]
            if len(own):
                name = what.name if direction is None else direction.name
                figures = int(own["count"].sum()), int(own["bytes"].sum())
                rows.append((*_byte_figures(*figures), name.lower().replace("_", " ")))
    return Table(
        "Memory copies" if is_copy else "Device memory",
        "by direction, as far as the calls tell it" if is_copy else "freeing calls tell no size",
        (">calls", ">MiB", ">MiB a call", "direction" if is_copy else "call"),
        tuple(rows),
    )


def _byte_figures(count: int, size: int) -> tuple[str, str, str]:
    mib = size / 2**20
    return f"{count:,}", f"{mib:,.2f}", f"{mib / count if count else 0:,.3f}"


def _waits(profile: Profile, callers: Callers, limit: int) -> Table:
    samples = profile.samples[profile.samples["klass"] == SampleClass.BLOCKED]
    samples = samples[classify(profile)[samples["stack"]] == Cause.GPU_WAIT]
    sums: dict[Site, list[int]] = {}
    for row in samples:
        entry = sums.setdefault(callers(int(row["stack"])), [0, 0])
        entry[0] += int(row["ns"])
        entry[1] += int(row["count"])
    whole = sum(ns for ns, _ in sums.values())
    order = sorted(sums, key=lambda site: (-sums[site][0], site))
    return Table(
        "GPU waits by CPU stack",
        f"100 % = {duration(whole)} blocked in calls that wait for a device, summed over threads",
        (">ms", ">share", ">waits", "waited by", "waited in"),
        tuple(
            (
                *(ms(sums[site][0]), percent(sums[site][0], whole), f"{sums[site][1]:,}"),
                *(site.own, _words(site.names)),
            )
            for site in order[:limit]
        ),
        max(0, len(order) - limit),
    )
