# SPDX-License-Identifier: Apache-2.0
"""Fair shares of what there is too little of: a container may make up what it likes, for itself.

Shares are max-min fair: whoever wants less than an equal share gets all of it, and what these leave
is divided among the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.window import NONE, Rows
from aiflame.agent.processes.identity import (
    USER_SLICE,
    identity_of,
    is_made_by_engine,
    whole_path,
)

I64 = npt.NDArray[np.int64]

# Windows of a host with 500 pods mention some 1,500 cgroups each: as many take 5 MB at most.
_CACHED_PATHS, _MAX_CACHED_CHARACTERS = 4096, 512


def owners_of(processes: npt.NDArray[Any], facts: Mapping[str, Rows], texts: Sequence[str]) -> I64:
    """Returns a number for the container, user or service of each process.

    Args:
        processes: Their numbers; one that is not known is of nobody.
        facts: Processes and cgroups, as windows have them.
        texts: That these mention.
    """
    paths = dict(facts["cgroups"][["cgroup", "path"]].tolist())
    groups = dict(facts["processes"][["process", "cgroup"]].tolist())
    distinct, which = np.unique(processes, return_inverse=True)
    numbers: dict[str, int] = {}
    found = []
    for process in distinct.tolist():
        owner = owner_of(texts[paths.get(groups.get(process, NONE), 0)])
        found.append(numbers.setdefault(owner, len(numbers)))
    return np.array(found, np.int64)[which]


def owner_of(cgroup: str) -> str:
    """Returns the cgroup of the container, user or service that one is in.

    Those below may be made by whoever is in it, under any name and in any number.

    Args:
        cgroup: The path of one.
    """
    return _cached_owner_of(cgroup) if len(cgroup) <= _MAX_CACHED_CHARACTERS else _owner_of(cgroup)


def _owner_of(cgroup: str) -> str:
    path = whole_path(cgroup)
    user = USER_SLICE.match(path)
    if user is not None:
        return user[0]
    identity = identity_of(path)
    # Below a service that may make groups, names of containers are its own to give.
    paths = [one.path for one in identity.containers[:1] if is_made_by_engine(one, identity)]
    paths += [unit.path for unit in identity.units]
    return paths[0] if paths else path


_cached_owner_of = functools.lru_cache(_CACHED_PATHS)(_owner_of)


def past_fair_share(owners: I64, most: int) -> npt.NDArray[np.bool_]:
    """Returns what is past the fair share of its owner, of all that so many may be kept of.

    Args:
        owners: Of each, the most important first.
        most: How many may be kept.
    """
    _, group, counts = np.unique(owners, return_inverse=True, return_counts=True)
    order = np.argsort(group, kind="stable")
    begins = np.cumsum(counts) - counts
    rank = np.zeros(len(owners), np.int64)
    rank[order] = np.arange(len(owners)) - begins[group[order]]
    return rank + 1 > max_min_share(counts.tolist(), most)


def max_min_share(demands: Iterable[float], whole: float) -> float:
    """Returns how much each gets at most, so that all together get no more than the whole.

    Args:
        demands: What each wants.
        whole: What there is.
    """
    left = whole
    ordered = sorted(demands)
    for at, demand in enumerate(ordered):
        share = left / (len(ordered) - at)
        if demand > share:
            return share
        left -= demand
    return math.inf
