# SPDX-License-Identifier: Apache-2.0
"""Kernels that a graph ran: under the call that launched the graph, and the code that built it.

Code that is captured into a graph launches kernels that do not run. What runs, later and often, is
launched by one call for all of them, as every tool shows it. Where the capture was recorded too,
the stack of such a kernel is that of the graph's launch, then `[graph node built at]`, and then the
frames of the call that built the node, from where they differ from those of the launch. Weights
stay what they were.

A kernel time tells its node. A sample does not: samples of a kernel that one launch stack ran from
several nodes are shared among these by the time that each took.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NONE, GpuProfile
from aiflame.agent.model.profile import COMPLETE_REASONS, FrameKind, Function, Profile, Stacks
from aiflame.gpu.attribution import ATTRIBUTED_DTYPE, Certainty, attribution_of
from aiflame.gpu.attribution.kernel_times import attributed_times, measured_times
from aiflame.gpu.attribution.launches import UNNAMED, name_ids

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

MARKER = "[graph node built at]"
# Where the frames after it are not all that there were.
CUT_MARKER = "[graph node built at, truncated]"

# The golden ratio's fraction: multiples of it fill the unit interval evenly, however many they are.
_GOLDEN = 0.6180339887498949


class GraphStacks(enum.Enum):
    """Which stack kernels of graphs are shown under."""

    BOTH = "both"  # the launch of the graph, and then what built the node
    LAUNCHED = "launched"
    BUILT = "built"  # where that is known


def with_graph_nodes(profile: Profile, shown: GraphStacks = GraphStacks.BOTH) -> Profile:
    """Returns a profile of a whole recording with the stacks that are to be shown."""
    gpu = profile.gpu
    is_built = (gpu.times["stack"] != NONE) & (gpu.times["built"] != NONE)
    if shown is GraphStacks.LAUNCHED or not is_built.any():
        return profile
    stack, built = (gpu.times[name].astype(np.int64) for name in ("stack", "built"))
    pairs, at = np.unique(stack[is_built] << 32 | built[is_built], return_inverse=True)
    launched, builders = pairs >> 32, pairs & 0xFFFFFFFF
    if shown is GraphStacks.BUILT:
        targets = builders
    else:
        targets = np.arange(len(pairs)) + len(profile.stacks)
        profile = _with_stacks(profile, launched.tolist(), builders.tolist())
    target = stack.copy()  # of each kernel time
    target[is_built] = targets[at.reshape(-1)]
    times = attributed_times(gpu)
    time = times["time"]
    own = times["stack"] == stack[time]
    times = times.copy()
    times["stack"][own] = target[time[own]]
    attribution = attribution_of(gpu, measured_times(gpu))
    return replace(
        profile,
        gpu=replace(
            gpu,
            attributed=_samples(gpu, attribution.rows, target, is_built),
            error=attribution.error,
            attributed_times=times,
        ),
    )


def _with_stacks(profile: Profile, launched: Sequence[int], builders: Sequence[int]) -> Profile:
    """Returns a profile with more stacks, each of what launched a graph and what built a node."""
    stacks = profile.stacks
    words = (MARKER, CUT_MARKER)
    functions = (*profile.functions, *(Function(FrameKind.MARKER, w, None, "") for w in words))
    frames = np.zeros(len(profile.frames) + len(words), profile.frames.dtype)
    frames[: len(profile.frames)] = profile.frames
    frames["function"][len(profile.frames) :] = np.arange(len(words)) + len(profile.functions)
    parts: list[U32] = []
    for launch, builder in zip(launched, builders, strict=True):
        outer, inner = _frames_of(stacks, launch), _frames_of(stacks, builder)
        is_whole = stacks.ends[builder] in COMPLETE_REASONS
        if is_whole:
            inner = inner[_common(outer, inner) :]
        marker = np.array([len(profile.frames) + (not is_whole)], np.uint32)
        parts.append(np.concatenate((outer, marker, inner)))
    lengths = np.array([len(part) for part in parts], np.uint64)
    return replace(
        profile,
        functions=functions,
        frames=frames,
        stacks=Stacks(
            np.concatenate((stacks.offsets, stacks.offsets[-1] + np.cumsum(lengths))),
            np.concatenate((stacks.frames, *parts)),
            np.concatenate((stacks.ends, stacks.ends[launched])),
            np.concatenate((stacks.gil, stacks.gil[launched])),
        ),
    )


def _frames_of(stacks: Stacks, stack: int) -> U32:
    begin, end = stacks.offsets[stack : stack + 2].tolist()
    return stacks.frames[begin:end]


def _common(one: U32, other: U32) -> int:
    """Returns how many frames two stacks have in common from the root; the leaf is never one."""
    size = max(min(len(one), len(other)) - 1, 0)
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def _samples(
    gpu: GpuProfile, rows: npt.NDArray[np.void], target: I64, is_built: npt.NDArray[np.bool_]
) -> npt.NDArray[np.void]:
    """Returns attributed samples by the stacks that kernel times have now (ATTRIBUTED_DTYPE).

    Args:
        gpu: Whose.
        rows: As attribution made them.
        target: The stack of each kernel time.
        is_built: Of which kernel times that is another one now.
    """
    names = name_ids(gpu)
    launched, name = gpu.times["stack"].astype(np.int64), names[gpu.times["kernel"]]
    key = (name << 32) | launched
    is_of_graph = np.isin(key, key[is_built & (name != UNNAMED)])
    keys, group = np.unique(key[is_of_graph], return_inverse=True)
    # By group of launch stack and name: what it ran for whom, in the order of these stacks.
    parties, at = np.unique(
        np.stack((group.reshape(-1), target[is_of_graph])), axis=1, return_inverse=True
    )
    ns = np.zeros(parties.shape[1], np.float64)
    np.add.at(ns, at.reshape(-1), gpu.times["duration_ns"][is_of_graph])
    first = np.searchsorted(parties[0], np.arange(len(keys) + 1))

    kernels = np.array([code.kernel for code in gpu.codes], np.int64)
    sample = rows["sample"]
    code = gpu.samples["code"][sample]
    sampled = kernels[code] if len(rows) else np.zeros(0, np.int64)
    own = (names[sampled] << 32) | rows["stack"].astype(np.int64)
    place = np.minimum(np.searchsorted(keys, own), max(len(keys) - 1, 0))
    is_found = (keys[place] == own) if len(keys) else np.zeros(len(rows), np.bool_)
    found = [rows[~is_found]]
    order = np.argsort(place[is_found], kind="stable")
    those, place = np.flatnonzero(is_found)[order], place[is_found][order]
    ends = np.searchsorted(place, np.arange(len(keys) + 1))
    for number in np.unique(place).tolist():
        some = rows[those[ends[number] : ends[number + 1]]]
        party = parties[1, first[number] : first[number + 1]]
        found.append(_shared(some, party, ns[first[number] : first[number + 1]]))
    whole = np.concatenate(found)
    ordered: npt.NDArray[np.void] = whole[np.lexsort((whole["stack"], whole["sample"]))]
    return ordered


def _shared(
    rows: npt.NDArray[np.void], party: I64, weight: npt.NDArray[np.float64]
) -> npt.NDArray[np.void]:
    """Shares counts among stacks by weights, in whole numbers that add up to what each row had."""
    if len(party) == 1 or not weight.sum():
        moved = rows.copy()
        moved["stack"] = party[0]
        return moved
    # A count is cut where the shares end, each time a little further on: so of many ones, too, each
    # stack has as many as its weight says.
    upto = np.cumsum(weight / weight.sum())
    shift = (np.arange(len(rows)) + 0.5) * _GOLDEN % 1.0
    counts = rows["count"].astype(np.int64)
    cuts = np.floor(counts[:, None] * upto + shift[:, None]).astype(np.int64)
    cuts = np.minimum(cuts, counts[:, None])
    cuts[:, -1] = counts
    parts = np.diff(cuts, axis=1, prepend=0)
    row, to = np.nonzero(parts)
    found = np.zeros(len(row), ATTRIBUTED_DTYPE)
    found["sample"], found["stack"] = rows["sample"][row], party[to]
    found["certainty"], found["count"] = Certainty.SHARED, parts[row, to]
    return found
