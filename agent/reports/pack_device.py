# SPDX-License-Identifier: Apache-2.0
"""The page's data sets of devices, their samples and GPU time, packed as pack.py packs time.

Where time has classes (on the CPU, blocked, ...), samples have stall categories, and where it has
kinds of waits, they have the vendor's stall reasons: so the page sums and draws both in one way.
Threads stand for processes. Beside the tree are the figures of each kernel, and the instructions of
each kernel's code, for its listing. What has weights are not the rows but the hits: samples of one
instruction, reason and launching stack, each part of a row.

GPU time has classes too: how sure its launching stacks are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from aiflame.agent.model.gpu import GpuProfile
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports.base import Frames, Merge, ReportOptions, View
from aiflame.agent.reports.device_rows import (
    DeviceRows,
    DeviceSamples,
    device_rows,
    device_samples,
    source_label,
)
from aiflame.agent.reports.device_times import DeviceTimes, time_rows
from aiflame.agent.reports.kernel_stats import KernelStats, identities, kernel_stats
from aiflame.agent.reports.pack import MAX_NODES, Draft, Writer, pack_labels, pack_rows
from aiflame.agent.reports.rows import I64, U32
from aiflame.agent.reports.selection import hidden_kinds
from aiflame.agent.reports.tree import Outline, outline
from aiflame.agent.reports.words import process_label, showable
from aiflame.gpu.apis import cuda
from aiflame.gpu.attribution import Certainty
from aiflame.gpu.stalls import StallCategory, category_of

# Of code with more than this, a listing has the sampled instructions only: the largest kernels of
# libraries have some ten thousand.
_MAX_LISTED = 50_000


def draft_device(profile: Profile, options: ReportOptions, samples: DeviceSamples) -> Draft:
    """Prepare the device samples of a profile.

    Args:
        profile: What was recorded.
        options: How it is to be shown; which frames, and merged from where, is the page's business.
        samples: Those of the profile.
    """
    everything = replace(_apart(options), view=View.GPU)
    made = device_rows(profile, everything, samples)
    tree, node = outline(made.rows, options.min_width_pct or 0, MAX_NODES)
    writer = Writer()
    used = _pack_tree(writer, profile, made, tree)
    row = pack_rows(writer, node, _threads(profile, made, samples.kernel), samples.reason)
    same = identities(samples.gpu)
    stats = {kernel: entry for kernel, entry in kernel_stats(samples).items() if entry.total}
    _pack_kernels(writer, stats, same[samples.kernel], made, used)
    position = {kernel: i for i, kernel in enumerate(stats)}
    # Code that was never sampled belongs to none.
    owners = [position.get(int(same[code.kernel]), len(position)) for code in samples.gpu.codes]
    writer.integers("code_kernel", np.array(owners, np.int64))
    writer.text("code_found_in", [*_found_in(profile, samples.gpu)])
    _pack_instructions(writer, samples)
    writer.integers("hit_row", row)
    index: dict[str, Any] = {
        "classes": len(StallCategory),
        "kinds": [
            {"name": showable(r.name), "klass": int(category_of(r))} for r in samples.gpu.reasons
        ],
        **_owners(profile),
    }
    hit = np.arange(len(samples), dtype=np.int64)
    return Draft(writer, index, tree.cut, "hit_count", hit, samples.count, samples.spans)


def draft_times(profile: Profile, options: ReportOptions, times: DeviceTimes) -> Draft:
    """Prepare the GPU time of a profile; arguments as `draft_device`."""
    made = time_rows(profile, _apart(options), times)
    tree, node = outline(made.rows, options.min_width_pct or 0, MAX_NODES)
    writer = Writer()
    used = _pack_tree(writer, profile, made, tree)
    threads = _threads(profile, made, times.kernel)
    row = pack_rows(writer, node, threads, times.certainty.astype(np.int64))
    known = times.certainty != Certainty.SHARED
    for name, column in {"runs": times.runs, "run_ns": np.where(known, times.ns, 0)}.items():
        sums = np.zeros(int(row.max(initial=-1)) + 1, np.uint64)
        np.add.at(sums, row, column)
        writer.integers(f"row_{name}", sums)
    stats = kernel_stats(device_samples(profile))
    ran = {kernel: entry for kernel, entry in stats.items() if entry.time_ns}
    _pack_kernels(writer, ran, identities(times.gpu)[times.kernel], made, used)
    for name, figures in {
        "runs": [entry.runs for entry in ran.values()],
        "ns": [entry.time_ns for entry in ran.values()],
    }.items():
        writer.integers(f"kernel_{name}", np.array(figures, np.uint64))
    index: dict[str, Any] = {
        "classes": len(Certainty),
        "kinds": [{"name": c.label, "klass": int(c)} for c in Certainty],
        **_owners(profile),
    }
    return Draft(writer, index, tree.cut, "row_ns", row, times.ns, times.spans)


def _apart(options: ReportOptions) -> ReportOptions:
    # Which frames, merged from where and of which processes is the page's business.
    return replace(
        options, frames=Frames.ALL, hide_importlib=False, inverted=False, merge=Merge.NONE
    )


def _pack_tree(writer: Writer, profile: Profile, made: DeviceRows, tree: Outline) -> I64:
    # Returns the labels in use.
    used = np.unique(tree.label[1:].astype(np.int64))
    writer.integers("depth", tree.depth)
    writer.integers("label", np.searchsorted(used, tree.label))
    pack_labels(writer, profile, made.rows.labels, used)
    writer.integers("role", made.roles[used])
    for name in ("line_label", "line", "line_ns"):
        writer.integers(name, np.zeros(0, np.int64))
    return used


def _threads(profile: Profile, made: DeviceRows, kernel: I64) -> U32:
    # What the page takes for the threads of rows: processes, or who it was in a fleet.
    if profile.fleet is None:
        return made.rows.thread
    return profile.fleet.thread_of_kernel[kernel].astype(np.uint32)


def _owners(profile: Profile) -> dict[str, Any]:
    processes = list(range(len(profile.processes)))
    if profile.fleet is not None:
        processes = [thread.process for thread in profile.threads]
    return {
        "threads": [{"process": i, "name": showable(profile.processes[i].name)} for i in processes],
        "hidden_kinds": {f.value: [int(kind) for kind in hidden_kinds(f)] for f in Frames},
        "processes": [process_label(p.name, p.pid) for p in profile.processes],
        "certainties": [certainty.label for certainty in Certainty],
    }


def _pack_kernels(
    writer: Writer,
    stats: dict[int, KernelStats],
    kernel_of: I64,
    made: DeviceRows,
    used: I64,
) -> None:
    # One entry for each kernel: name and process as labels of the tree, and its figures.
    first = np.zeros(int(kernel_of.max(initial=-1)) + 1, np.int64)  # a row of each kernel
    first[kernel_of] = np.arange(len(kernel_of))
    rows = first[list(stats)] if stats else np.zeros(0, np.int64)
    processes = made.rows.path_labels[made.rows.path_offsets[:-1]].astype(np.int64)
    entries = list(stats.values())
    columns = {
        "label": np.searchsorted(used, made.kernel_label[rows]),
        "process": np.searchsorted(used, processes[rows]),
        "calls": [entry.calls for entry in entries],
        "stacks": [entry.stacks for entry in entries],
    }
    for name, column in columns.items():
        writer.integers(f"kernel_{name}", np.array(column, np.uint64))
    writer.text("kernel_names", [showable(entry.name.whole) for entry in entries])


def _found_in(profile: Profile, gpu: GpuProfile) -> Iterator[str]:
    """Yields for each code the file in which it was found by the kernel's name, "" for none."""
    for code in gpu.codes:
        # PoCL's has the file that it runs from; CUDA's runs from none, and has one if so found.
        is_of_cuda = gpu.kernels[code.kernel].api == cuda.API.name
        found_in = code.binary if is_of_cuda else None
        yield "" if found_in is None else showable(profile.binaries[found_in].path)


def _pack_instructions(writer: Writer, samples: DeviceSamples) -> None:
    sampled = set(zip(samples.code.tolist(), samples.offset.tolist(), strict=True))
    codes = np.array([i.code for i in samples.gpu.instructions], np.int64)
    sizes = np.bincount(codes, minlength=len(samples.gpu.codes)).tolist()
    listed = [
        i
        for i in samples.gpu.instructions
        if sizes[i.code] <= _MAX_LISTED or (i.code, i.offset) in sampled
    ]
    listed.sort(key=lambda i: (i.code, i.offset))
    texts = {text: n for n, text in enumerate(dict.fromkeys(i.text for i in listed))}
    lines = [source_label(i.file, i.line) for i in listed]
    sources = {text: n for n, text in enumerate(dict.fromkeys(lines))}
    writer.text("texts", [showable(text) if text else "" for text in texts])
    writer.text("sources", list(sources))
    columns = {
        "at_code": [i.code for i in listed],
        "at_offset": [i.offset for i in listed],
        "at_text": [texts[i.text] for i in listed],
        "at_source": [sources[line] for line in lines],
        "hit_code": samples.code,
        "hit_offset": samples.offset,
        "hit_reason": samples.reason,
        "hit_certainty": samples.certainty,
    }
    for name, column in columns.items():
        writer.integers(name, np.array(column, np.uint64))
