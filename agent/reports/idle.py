# SPDX-License-Identifier: Apache-2.0
"""Threads that did nothing: they slept at one location for nearly all of their time.

Of a job most threads are of that kind (pools, feeders, listeners), and each has as much wall time
as the one that does the work. A flame graph of wall time leaves them out, and says so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import SPAN_DTYPE, Profile, SampleClass
from aiflame.agent.reports.facts import counted
from aiflame.agent.reports.own_code import charged_frames
from aiflame.agent.reports.words import duration

# Shared with page/idle.js. Of a training loop's workers that wait for room in a queue 98.6 % and
# more of the time was such sleep, of consumers that are at work in 3 % of the time 97 %.
LEAST_ASLEEP = 0.98

# Of the time of the longest thread: shorter ones did not sleep for the whole recording.
LEAST_LIFE = 0.5


def idle_threads(profile: Profile) -> npt.NDArray[np.bool_]:
    """Return which threads are idle, shape (threads,); none if all of them are."""
    samples, size = profile.samples, len(profile.threads)
    total_ns = np.zeros(size, np.int64)
    np.add.at(total_ns, samples["thread"], samples["ns"].astype(np.int64))
    blocked = samples[samples["klass"] == SampleClass.BLOCKED]
    frames = charged_frames(profile)[blocked["stack"]]
    radix = len(profile.frames) + 1
    location, index = np.unique(
        blocked["thread"].astype(np.int64) * radix + frames + 1, return_inverse=True
    )
    slept_ns = np.zeros(len(location), np.int64)
    np.add.at(slept_ns, index, blocked["ns"].astype(np.int64))
    most_ns = np.zeros(size, np.int64)
    np.maximum.at(most_ns, location // radix, slept_ns)
    is_long = total_ns >= LEAST_LIFE * total_ns.max(initial=0)
    is_idle: npt.NDArray[np.bool_] = is_long & (total_ns > 0) & (most_ns >= LEAST_ASLEEP * total_ns)
    if is_idle[total_ns > 0].all():
        return np.zeros(size, np.bool_)
    return is_idle


def without_idle(profile: Profile) -> tuple[Profile, str]:
    """Return the profile without samples of idle threads, and a sentence about them or ""."""
    is_idle = idle_threads(profile)
    if not is_idle.any():
        return profile, ""
    kept = ~is_idle[profile.samples["thread"]]
    ns = int(profile.samples["ns"][~kept].sum())
    threads = counted(int(is_idle.sum()), "thread")
    # Spans count the samples through that are there no more.
    shown = replace(profile, samples=profile.samples[kept], spans=np.zeros(0, SPAN_DTYPE))
    left_out = f"[idle: {threads}], {duration(ns)}, asleep at one location"
    return shown, f"Left out: {left_out} (--idle: with)."
