# SPDX-License-Identifier: Apache-2.0
"""What the names of one container or service may take of what is pushed.

A process chooses what its functions are called, in its perf map or its Python code, and can have
other names each second. Each batch is of one container or service, and has a limit of its own: past
it the lightest stacks lose their frames, and nobody else's do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.model.batch import Batch
from aiflame.agent.model.profile import GilState, Loss, Profile, Stacks, StopReason
from aiflame.agent.model.ranges import ranges

I64 = npt.NDArray[np.int64]

# Ten thousand functions with names and files of 200 bytes: few programs are seen in more in a
# minute.
MAX_NAME_BYTES = 2 << 20
# Sinks cut what is longer (`_MAX_NAME_CHARACTERS` in store/rows.py; others cut more).
_MAX_TEXT_BYTES = 4096
_MOST_BYTES_OF_ONE = 4  # of a character in UTF-8


def limited(batches: Iterable[Batch], max_bytes: int = MAX_NAME_BYTES) -> tuple[list[Batch], int]:
    """Returns batches whose names take no more than a limit; all time and samples are there.

    Args:
        batches: Of one stretch, each of one container or service.
        max_bytes: What names, files and binaries of functions may take in each.

    Returns:
        The batches, and how many stacks have lost their frames.
    """
    found, count = [], 0
    for batch in batches:
        profile, lost = _limited(batch.profile, max_bytes)
        found.append(replace(batch, profile=profile) if lost else batch)
        count += lost
    if not count:
        return found, 0
    kind = LossKind.NAMES_NOT_SENT
    loss = Loss(kind.stored_name, count, kind.meaning)
    return [_with_loss(batch, loss) for batch in found], count


def _with_loss(batch: Batch, loss: Loss) -> Batch:
    profile = replace(batch.profile, losses=(*batch.profile.losses, loss))
    return replace(batch, profile=profile)


def _limited(profile: Profile, max_bytes: int) -> tuple[Profile, int]:
    sizes = _sizes_of_functions(profile)
    if int(sizes.sum()) <= max_bytes:
        return profile, 0
    keeps = _kept(profile, sizes, max_bytes)
    bare = replace(profile, stacks=_without_frames(profile.stacks, keeps))
    return bare, int(np.count_nonzero(~keeps))


def _sizes_of_functions(profile: Profile) -> I64:
    """Returns what each function adds: requests have equal texts once."""
    known = {""}
    sizes = np.zeros(len(profile.functions), np.int64)
    for number, function in enumerate(profile.functions):
        binary = None if function.binary is None else profile.binaries[function.binary]
        texts = (function.name, function.file, "" if binary is None else binary.path)
        for text in texts:
            if text not in known:
                known.add(text)
                size = len(text) if text.isascii() else _MOST_BYTES_OF_ONE * len(text)
                sizes[number] += min(size, _MAX_TEXT_BYTES)
    return sizes


def _kept(profile: Profile, sizes: I64, max_bytes: int) -> npt.NDArray[np.bool_]:
    """Returns which stacks have names that all have room: the heaviest first."""
    stacks = profile.stacks
    order = np.lexsort((-_weights(profile), ~_is_of_launch(profile)))
    starts = stacks.offsets[order].astype(np.int64)
    lengths = stacks.offsets[order + 1].astype(np.int64) - starts
    functions = profile.frames["function"][stacks.frames[ranges(starts, lengths)]]
    used, first = np.unique(functions, return_index=True)
    # Each name counts where it comes first.
    added = np.zeros(len(functions) + 1, np.int64)
    added[first + 1] = sizes[used]
    taken = np.cumsum(added)
    has_room = np.zeros(len(sizes), np.bool_)
    has_room[used[taken[first + 1] <= max_bytes]] = True
    is_bare = np.concatenate([np.zeros(1, np.int64), np.cumsum(~has_room[functions])])
    ends = np.cumsum(lengths)
    keeps = np.zeros(len(stacks), np.bool_)
    keeps[order] = is_bare[ends] == is_bare[ends - lengths]
    return keeps


def _weights(profile: Profile) -> npt.NDArray[np.float64]:
    found = np.zeros(len(profile.stacks))
    np.add.at(found, profile.samples["stack"], profile.samples["ns"].astype(np.float64))
    return found


def _is_of_launch(profile: Profile) -> npt.NDArray[np.bool_]:
    """Returns which stacks are of what a device did: they are few, and stand for all of it."""
    gpu = profile.gpu
    found = np.zeros(len(profile.stacks), np.bool_)
    for rows in (gpu.calls, gpu.launches):
        found[rows["stack"]] = True
    return found


def _without_frames(stacks: Stacks, keeps: npt.NDArray[np.bool_]) -> Stacks:
    starts = stacks.offsets[:-1].astype(np.int64)
    lengths = np.where(keeps, np.diff(stacks.offsets.astype(np.int64)), 0)
    offsets = np.zeros(len(stacks) + 1, np.uint64)
    np.cumsum(lengths, out=offsets[1:])
    ends = stacks.ends.copy()
    ends[~keeps] = StopReason.LOST
    gil = stacks.gil.copy()
    gil[~keeps] = GilState.NO_PYTHON
    return Stacks(offsets, stacks.frames[ranges(starts, lengths)], ends, gil)
