# SPDX-License-Identifier: Apache-2.0
"""Stacks as they are shown: what each format writes, before any format's syntax.

A shown stack is, root first: the process `name (pid)`; the thread `name (tid)`, where asked for;
`[truncated: reason]` where the walk did not reach the thread's start, so that nobody takes the
first walked frame for a root; the stack's functions; and for time off the CPU what the thread was
waiting for, `[blocked: cause]`, `[waiting to run]` or `[preempted]`.

The executing line is part of a Python label, `Net.forward (train.py:12)`, and of no other: native
code is merged by function. Everything here is numpy over the whole profile; only labels, which are
few, are made one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import (
    COMPLETE_REASONS,
    KERNEL_FRAMES_MARKER,
    FrameKind,
    Function,
    Profile,
    SampleClass,
    Stacks,
    StopReason,
)
from aiflame.agent.reports.base import Frames, ReportOptions, View
from aiflame.agent.reports.causes import CAUSES, classify
from aiflame.agent.reports.distinct import distinct
from aiflame.agent.reports.merge import merged
from aiflame.agent.reports.palette import CLASS_CATEGORY, Category, category_of
from aiflame.agent.reports.selection import shown_stacks
from aiflame.agent.reports.words import process_label, showable

U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

# Those of complete stacks without a user half: there is none, or none was asked for.
_WITHOUT_USER_STACK = (StopReason.KERNEL_ONLY, StopReason.EXCLUDED, StopReason.NOT_RUN_YET)

# Stop reasons after which the first frame shown is not the outermost one.
TRUNCATED_REASONS = tuple(
    reason for reason in StopReason if reason not in (*COMPLETE_REASONS, *_WITHOUT_USER_STACK)
)

# What marks say that stand for missing frames, by mark.
TRUNCATED_MEANINGS = {
    **{reason.marker: reason.meaning for reason in TRUNCATED_REASONS},
    KERNEL_FRAMES_MARKER: "more kernel frames than are kept; those nearest to the leaf are there",
}

# Their positions stay in the processor's cache.
_PATHS_AT_ONCE = 2_048


def label_of(function: Function, line: int) -> str:
    """Return the text of a frame; `line` (0: unknown) is shown of Python frames only."""
    name = showable(function.name)
    if function.kind is not FrameKind.PYTHON:
        return name
    file = function.file.rpartition("/")[2]
    if not file:
        return f"{name} (line {line})" if line else name
    return f"{name} ({showable(file)}:{line})" if line else f"{name} ({showable(file)})"


@dataclass(frozen=True, slots=True)
class Labels:
    """The texts of frames, sorted, so that the order of ids is the order in a flame graph."""

    names: tuple[str, ...]
    kinds: npt.NDArray[np.uint8]  # FrameKind
    categories: npt.NDArray[np.uint8]  # palette.Category
    functions: npt.NDArray[np.int64]  # index into Profile.functions, -1 for those made by aiflame
    of_frame: npt.NDArray[np.int64]  # label of each frame of the profile, shape (frames,)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class Rows:
    """Time by shown stack: one row per (thread, stack, class), in the order of the samples.

    Device samples are rows as well (see device_rows.py): their weight, called `ns` here and in
    every tree, is a number of samples.

    The path of row `i` is `path_of[i]`, plus `tail[i]` where that is not -1. Path `p` is
    `path_labels[path_offsets[p]:path_offsets[p + 1]]`, root first.
    """

    labels: Labels
    path_offsets: I64  # shape (paths + 1,)
    path_labels: U32
    path_of: I32  # shape (rows,)
    tail: I32  # label of the off-CPU marker, -1 for time on the CPU; shape (rows,)
    thread: U32  # index into Profile.threads; shape (rows,)
    stack: U32  # index into Profile.stacks; shape (rows,)
    klass: npt.NDArray[np.uint8]  # SampleClass; shape (rows,)
    count: npt.NDArray[np.uint64]  # shape (rows,)
    ns: npt.NDArray[np.uint64]  # shape (rows,)

    def __len__(self) -> int:
        return len(self.ns)

    def paths(self, rows: npt.NDArray[np.integer[Any]]) -> Iterator[list[int]]:
        """Yield the labels of some rows, root first, the off-CPU marker last."""
        # As lists: numpy's numbers one by one take longer than the labels.
        which = self.path_of[rows]
        starts, stops = (self.path_offsets[which + more].tolist() for more in (0, 1))
        for start, stop, tail in zip(starts, stops, self.tail[rows].tolist(), strict=True):
            labels: list[int] = self.path_labels[start:stop].tolist()
            if tail >= 0:
                labels.append(tail)
            yield labels


class LabelTable:
    """Every label a flame graph may need, first in the order of making, then sorted."""

    def __init__(self, profile: Profile) -> None:
        is_python = np.array([f.kind is FrameKind.PYTHON for f in profile.functions], np.bool_)
        function = profile.frames["function"].astype(np.int64)
        line = np.where(is_python[function], profile.frames["line"].astype(np.int64), 0)
        keys, self.of_frame = np.unique(function << 32 | line, return_inverse=True)
        self._entries: list[tuple[str, int, int, str, int]] = []
        for i, at in zip((keys >> 32).tolist(), (keys & 0xFFFFFFFF).tolist(), strict=True):
            f = profile.functions[i]
            category = int(category_of(f))
            self._entries.append((label_of(f, at), int(f.kind), category, f.file, i))

    def add(self, names: list[str], category: Category = Category.MARKER) -> range:
        """Append labels made by aiflame; returns their ids in the order of making."""
        start = len(self._entries)
        self._entries += [(n, int(FrameKind.MARKER), int(category), "", -1) for n in names]
        return range(start, len(self._entries))

    def add_processes(self, profile: Profile) -> I64:
        """Append the labels of processes, equal ones once; returns the id of each process's."""
        names = [process_label(p.name, p.pid) for p in profile.processes]
        distinct = [*dict.fromkeys(names)]
        ids = dict(zip(distinct, self.add(distinct), strict=True))
        return np.array([ids[name] for name in names], np.int64)

    def sorted(self) -> tuple[Labels, I64]:
        """Return the labels by name, and for each id in the order of making its sorted id."""
        entries = self._entries
        order = sorted(range(len(entries)), key=entries.__getitem__)
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        chosen = [entries[i] for i in order]
        columns = np.array([entry[1:3] + entry[4:] for entry in chosen], dtype=np.int64)
        columns = columns.reshape(-1, 3)
        labels = Labels(
            names=tuple(entry[0] for entry in chosen),
            kinds=columns[:, 0].astype(np.uint8),
            categories=columns[:, 1].astype(np.uint8),
            functions=columns[:, 2],
            of_frame=rank[self.of_frame],
        )
        return labels, rank


def rows_for(profile: Profile, options: ReportOptions) -> Rows:
    """Return what the options choose of a profile, as it is shown."""
    profile = merged(profile, options.merge)
    stacks = shown_stacks(profile, options.frames, options.hide_importlib)
    return rows_of(profile, options.view, options.per_thread, stacks)


def rows_of(
    profile: Profile, view: View = View.WALL, per_thread: bool = False, shown: Stacks | None = None
) -> Rows:
    """Return what `view` counts of a profile, as it is shown.

    With `per_thread`, a thread's frame follows the process's. `shown` has the frames of each stack;
    None leaves out what is hidden by default.
    """
    if shown is None:
        shown = shown_stacks(profile, Frames.BOTH)
    samples, selected = profile.samples, view.selects(profile.samples["klass"])
    if not selected.all():
        samples = samples[selected]
    table = LabelTable(profile)
    process_ids = table.add_processes(profile)
    # A host that starts many has hundreds of thousands.
    threads = profile.threads if per_thread else ()
    thread_ids = table.add([f"{showable(t.name)} ({t.tid})" for t in threads])
    end_ids = table.add([end.marker for end in StopReason])
    tail_of = _tails(profile, table, bool(np.any(samples["klass"] == SampleClass.BLOCKED)))
    labels, rank = table.sorted()
    process_of = np.array([t.process for t in profile.threads], dtype=np.int64)
    heads, stacks, path_of = _paths(profile, samples, None if per_thread else process_of)
    columns = [process_ids[process_of[heads] if per_thread else heads]]
    if per_thread:
        columns.append(thread_ids.start + heads)
    ends = profile.stacks.ends[stacks].astype(np.int64)
    columns.append(np.where(np.isin(ends, TRUNCATED_REASONS), end_ids.start + ends, -1))
    offsets, path_labels = join(columns, shown, table.of_frame, rank, stacks)
    tail_of = np.where(tail_of < 0, -1, rank[tail_of]).astype(np.int32)
    return Rows(
        labels,
        offsets,
        path_labels,
        path_of.astype(np.int32),
        tail_of[samples["klass"], samples["stack"]],
        *(samples[name] for name in ("thread", "stack", "klass", "count", "ns")),
    )


def _paths(
    profile: Profile, samples: npt.NDArray[np.void], process_of: I64 | None
) -> tuple[I64, I64, I64]:
    # The head and the stack of each path, and the path of each sample. A path is one stack under
    # one process or, without processes, under one thread.
    keys = samples["thread"].astype(np.int64)
    n_heads = len(profile.threads)
    if process_of is not None:
        keys, n_heads = process_of[keys], len(profile.processes)
    radix = max(1, len(profile.stacks))
    keys *= radix
    keys += samples["stack"]
    pairs, path_of = distinct(keys, n_heads * radix)
    return pairs // radix, pairs % radix, path_of


def _tails(profile: Profile, table: LabelTable, has_blocked: bool) -> I64:
    # The label of the off-CPU marker, by [class, stack]; -1 on the CPU.
    tails = np.full((len(SampleClass), len(profile.stacks)), -1, dtype=np.int64)
    for klass, category in CLASS_CATEGORY.items():
        if klass is SampleClass.BLOCKED:
            ids = table.add([f"[blocked: {cause}]" for cause in CAUSES], category)
            # Finding causes costs as much as all else here; a view of the CPU needs none.
            if has_blocked:
                tails[klass] = ids.start + classify(profile).astype(np.int64)
        else:
            tails[klass] = table.add([f"[{klass.label}]"], category).start
    return tails


def join(
    columns: Sequence[I64],
    shown: Stacks,
    of_frame: I64,
    rank: I64,
    stacks: I64,
    after: Sequence[I64] = (),
) -> tuple[I64, U32]:
    """Put labels around the frames of stacks.

    Args:
        columns: Labels before the frames, one of each path; -1 for none.
        shown: The frames.
        of_frame: The label of each frame.
        rank: What each label is called in the result.
        stacks: Whose frames, one of each path.
        after: Labels after the frames, as `columns`.

    Returns:
        Offsets of the paths, and their labels one after the other.
    """
    starts = shown.offsets[:-1].astype(np.int64)[stacks]
    lengths = np.diff(shown.offsets.astype(np.int64))[stacks]
    heads = sum(((c >= 0).astype(np.int64) for c in columns), np.zeros(len(stacks), np.int64))
    tails = sum(((c >= 0).astype(np.int64) for c in after), np.zeros(len(stacks), np.int64))
    offsets = np.zeros(len(stacks) + 1, dtype=np.int64)
    np.cumsum(heads + lengths + tails, out=offsets[1:])
    flat = np.empty(offsets[-1], dtype=np.uint32)
    label_of_frame = rank[of_frame].astype(np.uint32)
    begins = offsets[:-1] + heads
    # Some at a time: whole columns of positions would be the largest arrays of a report.
    for first in range(0, len(stacks), _PATHS_AT_ONCE):
        part = slice(first, first + _PATHS_AT_ONCE)
        length = lengths[part]
        # Frame k of these paths, counted through, is k - (those of the paths before) of its own.
        number = np.arange(length.sum())
        before = np.cumsum(length) - length
        source = number + np.repeat(starts[part] - before, length)
        target = number + np.repeat(begins[part] - before, length)
        flat[target] = label_of_frame[shown.frames[source]]
    at = _put(columns, rank, offsets[:-1], flat)
    _put(after, rank, at + lengths, flat)
    return offsets, flat


def _put(columns: Sequence[I64], rank: I64, at: I64, flat: U32) -> I64:
    for column in columns:
        there = column >= 0
        flat[at[there]] = rank[column[there]]
        at = at + there
    return at
