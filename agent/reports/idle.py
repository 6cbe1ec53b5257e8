# SPDX-License-Identifier: Apache-2.0
"""Threads that did nothing: they slept at one location for nearly all of their time.

Of a job most threads are of that kind (pools, feeders, listeners), and each has as much wall time
as the one that does the work. A flame graph of wall time leaves them out, and says so.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.reports.facts import counted
from aiflame.agent.reports.own_code import Rank, charged_frames, functions_of, ranks
from aiflame.agent.reports.words import duration

# Shared with page/idle.js; of the time in which a thread did not wait for a CPU, since that tells
# of the machine. So no more than a twentieth of one thread's time goes unseen. Of what helps a
# training loop (workers with room in their queues, feeders, servers of descriptors) 95.3 to 100 %
# was such sleep, on quiet and crowded machines, of what computes 15 % at most.
LEAST_ASLEEP = 0.95

# Of all its time: who mostly waits for a CPU would have worked.
LEAST_OF_ALL = 0.5

# Of the time of the longest thread: shorter ones did not sleep for the whole recording.
LEAST_LIFE = 0.5


def idle_threads(profile: Profile) -> npt.NDArray[np.bool_]:
    """Return which threads are idle, shape (threads,); none if all of them are."""
    samples, size = profile.samples, len(profile.threads)
    total_ns, queued_ns = np.zeros((2, size), np.int64)
    np.add.at(total_ns, samples["thread"], samples["ns"].astype(np.int64))
    queued = samples[np.isin(samples["klass"], (SampleClass.WAITING_TO_RUN, SampleClass.PREEMPTED))]
    np.add.at(queued_ns, queued["thread"], queued["ns"].astype(np.int64))
    blocked = samples[samples["klass"] == SampleClass.BLOCKED]
    frames = _locations(profile)[blocked["stack"]]
    radix = len(profile.frames) + 2
    location, index = np.unique(
        blocked["thread"].astype(np.int64) * radix + frames + 1, return_inverse=True
    )
    slept_ns = np.zeros(len(location), np.int64)
    np.add.at(slept_ns, index, blocked["ns"].astype(np.int64))
    most_ns = np.zeros(size, np.int64)
    np.maximum.at(most_ns, location // radix, slept_ns)
    is_long = total_ns >= LEAST_LIFE * total_ns.max(initial=0)
    is_asleep = most_ns >= np.maximum(
        LEAST_ASLEEP * (total_ns - queued_ns), LEAST_OF_ALL * total_ns
    )
    is_idle: npt.NDArray[np.bool_] = is_long & (total_ns > 0) & is_asleep
    if is_idle[total_ns > 0].all():
        return np.zeros(size, np.bool_)
    return is_idle


def _locations(profile: Profile) -> npt.NDArray[np.int64]:
    """Return where each stack waits, shape (stacks,).

    A frame, -1 for none. All of Python's own library is one location: threads that run nothing else
    serve others (multiprocessing's servers of descriptors are asleep for 99 % of their time, 86 to
    98 % in accept).
    """
    frames = charged_frames(profile)
    rank = np.append(ranks(profile), 0)[functions_of(profile, frames)]
    return np.where(rank == Rank.STANDARD, len(profile.frames), frames)


def idle_included(profile: Profile) -> str:
    """Return what of a whole idle threads are, where they count as all others do; "" for none."""
    is_idle = idle_threads(profile)
    if not is_idle.any():
        return ""
    return f", with {_time_of(profile, is_idle)} of {counted(int(is_idle.sum()), 'idle thread')}"


def idle_left_out(profile: Profile) -> str:
    """Return what is not in a table that idle threads are left out of; "" for nothing."""
    is_idle = idle_threads(profile)
    if not is_idle.any():
        return ""
    threads = counted(int(is_idle.sum()), "idle thread")
    return f", without {_time_of(profile, is_idle)} of {threads} (--idle: with)"


def without_idle(profile: Profile) -> tuple[Profile, str]:
    """Return the profile without samples of idle threads, and a sentence about them or ""."""
    is_idle = idle_threads(profile)
    if not is_idle.any():
        return profile, ""
    thread = profile.samples["thread"]
    threads = counted(int(is_idle.sum()), "thread")
    shown = profile.with_samples(~is_idle[thread])
    left_out = f"[idle: {threads}], {_time_of(profile, is_idle)}, asleep at one location"
    return shown, f"Left out: {left_out} (--idle: with)."


def _time_of(profile: Profile, is_idle: npt.NDArray[np.bool_]) -> str:
    thread = profile.samples["thread"]
    return duration(int(profile.samples["ns"][is_idle[thread]].sum()))
