# SPDX-License-Identifier: Apache-2.0
"""What the names of one container or service may take of what is pushed.

A process chooses what its functions are called, in its perf map or its Python code, and so its GPU
kernels, and can have other names each second. Each batch is of one container or service, and has a
limit of its own: past it the lightest stacks lose their frames and the least used kernels their
names, and nobody else's do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.losses import LossKind
from aiflame.agent.model.batch import Batch
from aiflame.agent.model.gpu import NONE, GpuProfile
from aiflame.agent.model.profile import GilState, Loss, Profile, Stacks, StopReason
from aiflame.agent.model.ranges import ranges
from aiflame.agent.reports.kernel_names import kernel_names

I64 = npt.NDArray[np.int64]

# Ten thousand functions with names and files of 200 bytes: few programs are seen in more in a
# minute.
MAX_NAME_BYTES = 2 << 20
# Of these, what names of GPU kernels may take at most: a thousand of 1 KB, as templates have.
_SHARE_OF_KERNELS = 0.5
_TOO_MANY = "more names than are sent"
# Sinks cut what is longer (`_MAX_NAME_CHARACTERS` in store/rows.py; others cut more).
_MAX_TEXT_BYTES = 4096
_MOST_BYTES_OF_ONE = 4  # of a character in UTF-8


def limited(batches: Iterable[Batch], max_bytes: int = MAX_NAME_BYTES) -> tuple[list[Batch], int]:
    """Returns batches whose names take no more than a limit; all time and samples are there.

    Args:
        batches: Of one stretch, each of one container or service.
        max_bytes: What names of kernels, and names, files and binaries of functions may take in
            each.

    Returns:
        The batches, and how many stacks have lost their frames, and kernels their names.
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
    gpu, taken_bytes, unnamed = _with_few_names(profile.gpu, int(max_bytes * _SHARE_OF_KERNELS))
    sizes = _sizes_of_functions(profile, range(len(profile.functions)))
    if unnamed:
        profile = replace(profile, gpu=gpu)
    if int(sizes.sum()) <= max_bytes - taken_bytes:
        return profile, unnamed
    keeps = _kept(profile, max_bytes - taken_bytes)
    bare = replace(profile, stacks=_without_frames(profile.stacks, keeps))
    return bare, unnamed + int(np.count_nonzero(~keeps))


def _size(text: str) -> int:
    return min(len(text) if text.isascii() else _MOST_BYTES_OF_ONE * len(text), _MAX_TEXT_BYTES)


def _with_few_names(gpu: GpuProfile, max_bytes: int) -> tuple[GpuProfile, int, int]:
    """Returns it with the names of the kernels that did most, what these take, and who has none."""
    names = {name: number for number, name in enumerate(dict.fromkeys(k.name for k in gpu.kernels))}
    # Sinks send them as programmers write them, or as they are; a few letters may stand for much.
    shown = {
        k.name: name.whole for k, name in zip(gpu.kernels, kernel_names(gpu.kernels), strict=True)
    }
    sizes = np.array(
        [max(_size(name), _size(shown[name])) if name else 0 for name in names], np.int64
    )
    if int(sizes.sum()) <= max_bytes:
        return gpu, int(sizes.sum()), 0
    which = np.array([names[kernel.name] for kernel in gpu.kernels], np.int64)
    uses = np.bincount(which, _uses(gpu), len(names))
    order = np.argsort(-uses, kind="stable")
    taken = np.cumsum(sizes[order])
    has_room = sizes == 0  # one without a name says why it has none
    has_room[order[taken <= max_bytes]] = True
    kernels = tuple(
        kernel if has_room[number] else replace(kernel, name="", unnamed=_TOO_MANY)
        for kernel, number in zip(gpu.kernels, which.tolist(), strict=True)
    )
    size_bytes = int(sizes[has_room].sum())
    return replace(gpu, kernels=kernels), size_bytes, int(np.count_nonzero(~has_room[which]))


def _uses(gpu: GpuProfile) -> npt.NDArray[np.float64]:
    """Returns how much of the time, samples and calls of all kernels each has."""
    found = np.zeros(len(gpu.kernels))
    of_code = np.array([code.kernel for code in gpu.codes], np.int64)
    calls = gpu.calls[gpu.calls["kernel"] != NONE]
    for kernels, values in (
        (gpu.times["kernel"], gpu.times["duration_ns"]),
        (of_code[gpu.samples["code"]], gpu.samples["count"]),
        (calls["kernel"], calls["count"]),
    ):
        if len(kernels):
            np.add.at(found, kernels, values / max(float(values.sum()), 1.0))
    return found


def _sizes_of_functions(profile: Profile, order: Iterable[int]) -> I64:
    """Returns what each function adds to those before it: requests have equal texts once."""
    known = {""}
    sizes = np.zeros(len(profile.functions), np.int64)
    for number in order:
        function = profile.functions[number]
        binary = None if function.binary is None else profile.binaries[function.binary]
        texts = (function.name, function.file, "" if binary is None else binary.path)
        for text in texts:
            if text not in known:
                known.add(text)
                sizes[number] += _size(text)
    return sizes


def _kept(profile: Profile, max_bytes: int) -> npt.NDArray[np.bool_]:
    """Returns which stacks have names that all have room: the heaviest first."""
    stacks = profile.stacks
    order = np.lexsort((-_weights(profile), ~_is_of_launch(profile)))
    starts = stacks.offsets[order].astype(np.int64)
    lengths = stacks.offsets[order + 1].astype(np.int64) - starts
    functions = profile.frames["function"][stacks.frames[ranges(starts, lengths)]]
    used, first = np.unique(functions, return_index=True)
    # Each name counts where it comes first.
    sizes = _sizes_of_functions(profile, used[np.argsort(first)].tolist())
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
