# SPDX-License-Identifier: Apache-2.0
"""Which processes come together, and what they are called then.

Of a whole machine each process by itself says little: of a compiler there are hundreds. Frames of
processes with the same label are one in every report, so that merging is giving them that label.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import ALL_PROCESSES, Profile
from aiflame.agent.reports.base import Merge, ReportOptions, View

# Digits of a container's id that engines show.
_ID_DIGITS = 12

_NO_CGROUP = "[no cgroup]"
_NO_CONTAINER = "[no container]"


def is_of_all(profile: Profile) -> bool:
    """Whether the whole machine was recorded."""
    return profile.recording.target == ALL_PROCESSES


def default_merge(profile: Profile) -> Merge:
    """Return which processes are one if nobody said so."""
    return Merge.COMM if is_of_all(profile) else Merge.NONE


def opening(profile: Profile) -> ReportOptions:
    """Return how a page of a profile is first shown: threads of a whole machine mostly sleep."""
    return ReportOptions(view=View.CPU if is_of_all(profile) else View.WALL)


def options_for(profile: Profile, format_name: str) -> ReportOptions:
    """Return how a profile becomes a report that nothing more was said of.

    Only a page can be switched to another view: all others have all time.
    """
    return opening(profile) if format_name == "html" else ReportOptions()


def merged(profile: Profile, merge: Merge | None) -> Profile:
    """Return the profile with processes that are one under one name; None for the default."""
    chosen = merge or default_merge(profile)
    if chosen is Merge.NONE:
        return profile
    names = group_names(profile, chosen)
    # What stands for many has no pid.
    processes = tuple(
        replace(process, name=name, pid=process.pid if chosen is Merge.PROCESS else 0)
        for process, name in zip(profile.processes, names, strict=True)
    )
    return replace(profile, processes=processes)


def first_alike(profile: Profile) -> npt.NDArray[np.int64]:
    """Return for each process the first with the same label, shape (processes,)."""
    first: dict[tuple[str, int], int] = {}
    return np.array(
        [first.setdefault((p.name, p.pid), i) for i, p in enumerate(profile.processes)], np.int64
    )


def group_names(profile: Profile, merge: Merge) -> list[str]:
    """Return what each process is called where some are one, without its pid."""
    processes = profile.processes
    if merge is Merge.CGROUP:
        return [process.cgroup or _NO_CGROUP for process in processes]
    if merge is Merge.CONTAINER:
        return [process.container_id[:_ID_DIGITS] or _NO_CONTAINER for process in processes]
    if merge is Merge.PROCESS:
        # Images are in the order in which they were seen; 0 is the pid of what stands for many.
        last = {process.pid: process.name for process in processes if process.pid}
        return [last.get(process.pid, process.name) for process in processes]
    return [process.name for process in processes]
