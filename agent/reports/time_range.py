# SPDX-License-Identifier: Apache-2.0
"""A time range of a recording: what every report is made of when a part of it was asked for.

Samples, calls and device samples are kept by the second, so a range is of whole seconds: all that
the chosen one touches. Times are those of the range, with these exceptions, which reports say:

- Waits shorter than the recording's --min-wait, those that were lost as events, and time preempted
  are in the second in which they ended.
- Of what an agent recorded in a window of several seconds, each of them has an equal part; calls
  are in the first.
- An interval off the CPU is counted in the second in which it ended.
- The exact times of threads, and what the kernel accounts itself, are known of the whole recording
  only, and are left out.
- Losses, and what the recorder itself cost, are those of the whole recording.
- Device samples and kernel times belong to the stacks that they belong to in the whole recording:
  a launch may come before the range. A kernel's time is in the second in which it ended.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.accounts import Accounts
from aiflame.agent.model.gpu import GpuProfile
from aiflame.agent.model.profile import NS_PER_S, Profile, TimeRange
from aiflame.agent.reports.device_readings import seconds_of
from aiflame.gpu.attribution import attribution_of
from aiflame.gpu.attribution.kernel_times import attributed_times, measured_times

I64 = npt.NDArray[np.int64]


def recorded_ns(profile: Profile) -> int:
    """Return how long a recording lasted, in ns; of a killed one, as far as is known."""
    if profile.recording.duration_ns or not len(profile.spans):
        return profile.recording.duration_ns
    spans = profile.spans
    return int((spans["first_s"].astype(np.int64) + spans["seconds"]).max()) * NS_PER_S


def whole_seconds(start_ns: int, end_ns: int, recorded_ns: int) -> TimeRange:
    """Return the seconds that a range touches, the last one as far as the recording goes.

    Args:
        start_ns: Since the start of the recording, before its end.
        end_ns: After `start_ns`.
        recorded_ns: When the recording ended.
    """
    last_s = -(-end_ns // NS_PER_S)
    return TimeRange(start_ns // NS_PER_S * NS_PER_S, min(last_s * NS_PER_S, recorded_ns))


def in_range(profile: Profile, chosen: TimeRange) -> Profile:
    """Return a profile of what was in a time range; see the module for what is left out.

    Args:
        profile: Of a whole recording.
        chosen: As `whole_seconds` makes it.
    """
    first_s, end_s = chosen.start_ns // NS_PER_S, -(-chosen.end_ns // NS_PER_S)
    spans = _clipped_spans(profile.spans, first_s, end_s)
    weights = {}
    for name in ("count", "ns"):
        weights[name] = np.zeros(len(profile.samples), np.uint64)
        np.add.at(weights[name], spans["sample"], spans[name] * spans["seconds"])
    kept = np.flatnonzero((weights["count"] > 0) | (weights["ns"] > 0))
    samples = profile.samples[kept]
    for name, column in weights.items():
        samples[name] = column[kept]
    spans["sample"] = np.searchsorted(kept, spans["sample"])
    return replace(
        profile,
        recording=replace(profile.recording, time_range=chosen),
        threads=tuple(replace(t, on_cpu_ns=0, observed_ns=0) for t in profile.threads),
        samples=samples,
        spans=spans,
        waits=_clipped_waits(profile.waits, chosen),
        gpu=_gpu_in_range(profile.gpu, first_s, end_s, chosen),
        accounts=Accounts(),
    )


def _clipped_spans(spans: npt.NDArray[np.void], first_s: int, end_s: int) -> npt.NDArray[np.void]:
    starts = spans["first_s"].astype(np.int64)
    ends = np.minimum(starts + spans["seconds"], end_s)
    starts = np.maximum(starts, first_s)
    kept = (ends > starts) & ((spans["ns"] > 0) | (spans["count"] > 0))
    found: npt.NDArray[np.void] = spans[kept]
    found["first_s"], found["seconds"] = starts[kept], (ends - starts)[kept]
    return found


def _clipped_waits(waits: npt.NDArray[np.void], chosen: TimeRange) -> npt.NDArray[np.void]:
    start_ns = waits["start_ns"].astype(np.int64)
    woken_ns = start_ns + waits["blocked_ns"].astype(np.int64)
    end_ns = woken_ns + waits["runnable_ns"].astype(np.int64)
    start_ns, woken_ns, end_ns = (
        np.clip(times, chosen.start_ns, chosen.end_ns) for times in (start_ns, woken_ns, end_ns)
    )
    found = waits.copy()
    found["start_ns"] = start_ns
    found["blocked_ns"] = woken_ns - start_ns
    found["runnable_ns"] = end_ns - woken_ns
    inside: npt.NDArray[np.void] = found[end_ns > start_ns]
    return inside


def _gpu_in_range(gpu: GpuProfile, first_s: int, end_s: int, chosen: TimeRange) -> GpuProfile:
    attribution = attribution_of(gpu, measured_times(gpu))
    attributed = attribution.rows
    is_in = _is_within(gpu.samples["interval"], first_s, end_s)
    attributed = _of_kept(attributed, "sample", is_in)
    ended_in = _is_within(gpu.times["end_ns"] // NS_PER_S, first_s, end_s)
    times = _of_kept(attributed_times(gpu), "time", ended_in)
    return replace(
        gpu,
        calls=gpu.calls[_is_within(gpu.calls["interval"], first_s, end_s)],
        events=gpu.events[_is_within(gpu.events["start_ns"], chosen.start_ns, chosen.end_ns)],
        samples=gpu.samples[is_in],
        times=gpu.times[ended_in],
        readings=_clipped_readings(gpu.readings, chosen),
        attributed=attributed,
        error=attribution.error,
        attributed_times=times,
    )


def _of_kept(
    rows: npt.NDArray[np.void], field: str, are_kept: npt.NDArray[np.bool_]
) -> npt.NDArray[np.void]:
    """Return the rows that mention one of those that are kept, by their numbers among these."""
    number = rows[field]
    found: npt.NDArray[np.void] = rows[are_kept[number]]
    numbers = np.cumsum(are_kept) - 1
    number = found[field]
    found[field] = numbers[number]
    return found


def _clipped_readings(readings: npt.NDArray[np.void], chosen: TimeRange) -> npt.NDArray[np.void]:
    first_s, end_s = seconds_of(readings)
    inside = (first_s * NS_PER_S < chosen.end_ns) & (end_s * NS_PER_S > chosen.start_ns)
    found: npt.NDArray[np.void] = readings[inside]
    for name in ("begin_ns", "end_ns"):
        found[name] = np.clip(found[name], chosen.start_ns, chosen.end_ns)
    return found


def _is_within(
    times: npt.NDArray[np.unsignedinteger], start: int, end: int
) -> npt.NDArray[np.bool_]:
    return (times >= start) & (times < end)
