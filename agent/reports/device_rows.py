# SPDX-License-Identifier: Apache-2.0
"""Device samples as they are shown: combined stacks of what launched a kernel and what it did.

A combined stack is, root first: the process; the Python and native frames that launched the kernel,
`[unknown launch]` where that is not known; `-`, the boundary; the kernel; its source line, where
that is known; and the instruction, what it waited for in the vendor's words, and its offset, as far
as `ReportOptions.leaf` says. Merged from the leaf, the reason comes first, then the instruction.

The weight of a row is a number of samples. There are no threads: a sample is of a kernel, and one
kernel may have been launched by several.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.gpu import NONE, GpuProfile, SharingError
from aiflame.agent.model.profile import COMPLETE_REASONS, SPAN_DTYPE, Profile, Stacks, StopReason
from aiflame.agent.model.spans import spread_evenly
from aiflame.agent.reports.base import Leaf, ReportOptions
from aiflame.agent.reports.kernel_names import KernelName, kernel_names
from aiflame.agent.reports.merge import merged
from aiflame.agent.reports.palette import Category
from aiflame.agent.reports.rows import (
    I64,
    TRUNCATED_REASONS,
    LabelTable,
    Rows,
    join,
)
from aiflame.agent.reports.selection import shown_stacks
from aiflame.agent.reports.words import showable
from aiflame.gpu.attribution import attribution_of
from aiflame.gpu.attribution.kernel_times import measured_times
from aiflame.gpu.stalls import category_of

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

# A window of a second ends some ms late; longer are those of an agent that has to do less.
_LONGEST_SECOND_NS = 1_500_000_000

BOUNDARY = "-"
UNKNOWN_LAUNCH = "[unknown launch]"


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """Attributed samples summed over seconds and launches. All columns have shape (rows,)."""

    gpu: GpuProfile
    names: Sequence[KernelName]  # by kernel
    stack: I64  # index into Profile.stacks, -1: unknown
    code: I64
    kernel: I64
    process: I64
    device: I64
    offset: U64
    reason: I64
    certainty: U8
    count: U64
    category: U8  # StallCategory
    spans: npt.NDArray[np.void]  # SPAN_DTYPE, `sample` being a row here, and `ns` the count
    error: SharingError

    def __len__(self) -> int:
        return len(self.count)


def device_samples(profile: Profile) -> DeviceSamples:
    """Return the device samples of a profile with the stacks that launched what was sampled."""
    gpu = profile.gpu
    attribution = attribution_of(gpu, measured_times(gpu))
    found = attribution.rows
    of = gpu.samples[found["sample"]]
    stack = np.where(found["stack"] == NONE, -1, found["stack"].astype(np.int64))
    columns = (stack, of["code"], of["device"], of["reason"], found["certainty"])
    keys = [of["offset"], *(column.astype(np.int64) for column in columns)]
    order = np.lexsort(keys)
    is_first = np.zeros(len(order), np.bool_)
    is_first[:1] = True
    for key in keys:
        is_first[1:] |= key[order][1:] != key[order][:-1]
    firsts = np.flatnonzero(is_first)
    counts = np.zeros(len(firsts), np.uint64)
    row = np.cumsum(is_first) - 1
    np.add.at(counts, row, found["count"][order])
    spans = np.zeros(len(found), SPAN_DTYPE)
    spans["sample"], spans["first_s"], spans["seconds"] = row, of["interval"][order], 1
    spans["count"] = spans["ns"] = found["count"][order]
    begin_ns, end_ns = (of[name][order].astype(np.int64) for name in ("begin_ns", "end_ns"))
    is_long = end_ns - begin_ns > _LONGEST_SECOND_NS
    if is_long.any():
        spread = spread_evenly(spans[is_long], begin_ns[is_long], end_ns[is_long])
        spans = np.concatenate([spans[~is_long], *spread])
    offset, stack, code, device, reason, certainty = (key[order][firsts] for key in keys)
    kernel_of = np.array([c.kernel for c in gpu.codes], np.int64)
    process_of = np.array([k.process for k in gpu.kernels], np.int64)
    categories = np.array([int(category_of(r)) for r in gpu.reasons], np.uint8)
    kernel = kernel_of[code]
    return DeviceSamples(
        gpu=gpu,
        names=kernel_names(gpu.kernels),
        stack=stack,
        code=code,
        kernel=kernel,
        process=process_of[kernel],
        device=device,
        offset=offset,
        reason=reason,
        certainty=certainty.astype(np.uint8),
        count=counts,
        category=categories[reason],
        spans=spans,
        error=attribution.error,
    )


class Role(enum.IntEnum):
    """What a label stands for. Values are shared with page/device.js."""

    OTHER = 0
    KERNEL = 1
    SOURCE = 2
    INSTRUCTION = 3
    REASON = 4
    OFFSET = 5


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows of combined stacks, in the order of what they are of, and what their labels stand for.

    In `rows`, `thread` is the number of the process, and `stack` NONE where the launch is unknown.
    """

    rows: Rows
    roles: U8  # Role of each label
    kernel_label: I64  # of each row


def device_rows(profile: Profile, options: ReportOptions, samples: DeviceSamples) -> DeviceRows:
    """Return device samples as they are shown."""
    table = LabelTable(profile)
    launched = Launched(samples.process, samples.stack, samples.count)
    below = _below_the_boundary(table, samples)
    return combined(profile, options, table, launched, below, _levels(options))


@dataclass(frozen=True, slots=True)
class Launched:
    """What kernels did, by who launched them; all of shape (rows,)."""

    process: I64
    stack: I64  # index into Profile.stacks, -1: unknown
    weight: U64


def combined(
    profile: Profile,
    options: ReportOptions,
    table: LabelTable,
    launched: Launched,
    below: dict[Role, I64],
    levels: Sequence[Role],
) -> DeviceRows:
    """Return what kernels did as combined stacks.

    Args:
        profile: Whose.
        options: Which frames of launching stacks are shown.
        table: Of labels.
        launched: Whose kernels they were.
        below: By role, the label of each row after the boundary, -1 for none.
        levels: Which of these, from the root.
    """
    processes = table.add_processes(merged(profile, options.merge))
    end_ids = table.add([end.marker for end in StopReason])
    unknown = table.add([UNKNOWN_LAUNCH])
    is_known = launched.stack >= 0
    shown = _with_an_empty_one(shown_stacks(profile, options.frames, options.hide_importlib))
    stack = np.where(is_known, launched.stack, len(shown) - 1)
    ends = shown.ends[stack].astype(np.int64)
    heads = [
        processes[launched.process],
        np.where(is_known & np.isin(ends, TRUNCATED_REASONS), end_ids.start + ends, -1),
        np.where(is_known, -1, unknown.start),
    ]
    size = len(launched.weight)
    boundary = np.full(size, table.add([BOUNDARY], Category.BOUNDARY).start, np.int64)
    after = [boundary, *(below[role] for role in levels)]
    labels, rank = table.sorted()
    offsets, path_labels = join(heads, shown, table.of_frame, rank, stack, after)
    roles = np.zeros(len(labels), np.uint8)
    for role, column in below.items():
        roles[rank[column[column >= 0]]] = role
    rows = Rows(
        labels=labels,
        path_offsets=offsets,
        path_labels=path_labels,
        path_of=np.arange(size, dtype=np.int32),
        tail=np.full(size, -1, np.int32),
        thread=launched.process.astype(np.uint32),
        stack=np.where(is_known, launched.stack, NONE).astype(np.uint32),
        klass=np.zeros(size, np.uint8),
        count=launched.weight,
        ns=launched.weight,
    )
    return DeviceRows(rows, roles, rank[below[Role.KERNEL]])


def _with_an_empty_one(stacks: Stacks) -> Stacks:
    # The last stack stands for an unknown launch.
    return Stacks(
        np.append(stacks.offsets, stacks.offsets[-1:]),
        stacks.frames,
        np.append(stacks.ends, np.uint8(COMPLETE_REASONS[0])),
        np.append(stacks.gil, np.uint8(0)),
    )


def _levels(options: ReportOptions) -> list[Role]:
    # From the leaf, the reason is to be found first.
    roles = [Role.INSTRUCTION, Role.REASON, Role.OFFSET]
    leaves = {
        Leaf.OFFSET: [roles[2], *roles[:2]] if options.inverted else roles,
        Leaf.INSTRUCTION: roles[:2],
        Leaf.STALL: roles[1:2],
    }
    return [Role.KERNEL, Role.SOURCE, *leaves[options.leaf]]


def _below_the_boundary(table: LabelTable, samples: DeviceSamples) -> dict[Role, I64]:
    # The label of each row in each role, -1 for none.
    source, text = _instruction_labels(table, samples)
    reasons = [showable(reason.name) for reason in samples.gpu.reasons]
    values, at = np.unique(samples.offset, return_inverse=True)
    offsets = [f"0x{value:x}" for value in values.tolist()]
    return {
        Role.KERNEL: kernel_labels(table, samples.names)[samples.kernel],
        Role.SOURCE: source,
        Role.INSTRUCTION: text,
        Role.REASON: _labels(table, reasons, Category.DEVICE_LOCATION)[samples.reason],
        Role.OFFSET: _labels(table, offsets, Category.DEVICE_LOCATION)[at],
    }


def kernel_labels(table: LabelTable, names: Sequence[KernelName]) -> I64:
    """Return the label of each kernel, one for a name: one that was built twice is still one."""
    return _labels(table, [showable(name.short) for name in names], Category.DEVICE_CODE)


def _instruction_labels(table: LabelTable, samples: DeviceSamples) -> tuple[I64, I64]:
    # Labels of source line and instruction text by row, -1 where unknown.
    known = {(i.code, i.offset): i for i in samples.gpu.instructions if i.text or i.file or i.line}
    values, at = np.unique(samples.offset, return_inverse=True)
    keys, row = np.unique(samples.code * max(1, len(values)) + at, return_inverse=True)
    codes, offsets = keys // max(1, len(values)), values[keys % max(1, len(values))]
    located = zip(codes.tolist(), offsets.tolist(), strict=True)
    found = [known.get(key) for key in located]
    lines = [source_label(i.file, i.line) if i is not None else "" for i in found]
    texts = [showable(i.text) if i is not None and i.text else "" for i in found]
    return (
        _labels(table, lines, Category.DEVICE_CODE)[row],
        _labels(table, texts, Category.DEVICE_LOCATION)[row],
    )


def source_label(file: str, line: int) -> str:
    """Return `file.cl:12`, "" where the line or the file is unknown."""
    name = file.rpartition("/")[2]
    return f"{showable(name)}:{line}" if name and line else ""


def _labels(table: LabelTable, texts: list[str], category: Category) -> I64:
    # The ids of texts, each distinct one added once; -1 for "".
    distinct = [text for text in dict.fromkeys(texts) if text]
    ids = dict(zip(distinct, table.add(distinct, category), strict=True))
    return np.array([ids.get(text, -1) for text in texts], np.int64)


def from_the_leaf(rows: Rows) -> Rows:
    """Return the same rows with their paths turned round."""
    starts, ends = rows.path_offsets[:-1], rows.path_offsets[1:]
    lengths = ends - starts
    at = np.arange(len(rows.path_labels), dtype=np.int64)
    return replace(rows, path_labels=rows.path_labels[np.repeat(starts + ends - 1, lengths) - at])
