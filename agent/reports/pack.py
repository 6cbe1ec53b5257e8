# SPDX-License-Identifier: Apache-2.0
"""The page's data: one flame tree and its weights, packed small.

All views come from one data set: the tree of everything that was recorded, and rows (node, thread,
kind of time, ns) that say where its time is. The page adds up the rows that the reader asks for,
and leaves out frames by the kind of their label. Where it is known when the time was, a row has
pieces in place of its ns: (first bucket, number of buckets, ns in each); see buckets.py.

Layout: one zlib stream, base64, of sections without gaps. A section is an array of unsigned
integers of `bytes` bytes, stored as byte planes: the lowest byte of every element, then the next
byte of every element, and so on. Planes compress better than elements, since the high bytes are
mostly equal; leading planes that would be all zero are left out. Ascending columns are stored as
differences (`is_delta`). Text is UTF-8 JSON. `Packed.index` says where each section begins.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.reports import palette
from aiflame.agent.reports.base import Frames, Merge, ReportOptions, View
from aiflame.agent.reports.buckets import Pieces
from aiflame.agent.reports.distinct import distinct, occurring
from aiflame.agent.reports.merge import merged
from aiflame.agent.reports.own_code import ranks
from aiflame.agent.reports.rows import I32, I64, Labels, Rows, rows_for
from aiflame.agent.reports.selection import hidden_kinds, is_import_machinery
from aiflame.agent.reports.tree import Cut, outline
from aiflame.agent.reports.words import process_label, showable

# Level 4 is within a tenth of level 9 on byte planes, at a fifth of its time.
_ZLIB_LEVEL = 4

# What a browser holds without strain: about 80 bytes a node in the page's own arrays.
MAX_NODES = 2_000_000

# What is repeated for each of their frames stays in the processor's cache.
_STACKS_AT_ONCE = 2_048

# What is counted through in place of classes where two captures, or parts of a store, are compared.
_SIDES = ("new", "base")

# Lines listed in a tooltip: the point is the hottest line, not a listing.
HOT_LINES = 3


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed data set.

    Attributes:
        index: What the page needs to unpack `blob`, ready for JSON.
        blob: Base64 of the zlib stream.
        cut: What was left out.
        whole_ns: All time in it.
    """

    index: dict[str, Any]
    blob: str
    cut: Cut
    whole_ns: int


class Writer:
    """Collects the sections of a data set."""

    def __init__(self) -> None:
        self.sections: list[dict[str, Any]] = []
        self.chunks: list[bytes] = []

    def integers(self, name: str, values: npt.NDArray[Any], is_delta: bool = False) -> None:
        """Add an array of whole numbers, none of them negative; if delta, ascending."""
        column = np.diff(values, prepend=values.dtype.type(0)) if is_delta else values
        size = max(1, (int(column.max(initial=0)).bit_length() + 7) // 8)
        # Of each element, no more bytes than the next larger type of number has.
        width = 1 << (size - 1).bit_length()
        planes = column.astype(f"<u{width}").view(np.uint8).reshape(-1, width)[:, :size]
        self._add(name, planes.T.tobytes())
        self.sections[-1] |= {"count": len(column), "bytes": size, "is_delta": is_delta}

    def text(self, name: str, values: list[str]) -> None:
        """Add a list of strings."""
        self._add(name, json.dumps(values, ensure_ascii=False).encode())
        self.sections[-1] |= {"count": len(values)}

    def _add(self, name: str, chunk: bytes) -> None:
        start = sum(len(c) for c in self.chunks)
        self.sections.append({"name": name, "start": start, "length": len(chunk)})
        self.chunks.append(chunk)

    def blob(self) -> str:
        """Return all sections, compressed, as base64."""
        return base64.b64encode(zlib.compress(b"".join(self.chunks), _ZLIB_LEVEL)).decode()


@dataclass(frozen=True, slots=True)
class Draft:
    """A data set without its weights: how fine their buckets are depends on all data sets.

    Attributes:
        writer: What is packed already.
        index: What the page needs besides sections.
        cut: What was left out.
        name: Of the column of weights.
        owner: The row of that column which each weight is part of, shape (weights,).
        weight: The weights.
        spans: When they were, SPAN_DTYPE; empty where that is not known.
    """

    writer: Writer
    index: dict[str, Any]
    cut: Cut
    name: str
    owner: I64
    weight: npt.NDArray[np.uint64]
    spans: npt.NDArray[np.void]

    def packed(self, pieces: Pieces | None) -> Packed:
        """Return the data set; `pieces` are the weights by bucket, None where there are no buckets.

        The page adds the pieces of an owner up to its weight.
        """
        writer, owners = self.writer, int(self.owner.max(initial=-1)) + 1
        if pieces is None:
            weights = np.zeros(owners, np.uint64)
            np.add.at(weights, self.owner, self.weight)
            writer.integers(self.name, weights)
        else:
            writer.integers("piece_count", np.bincount(pieces.owner, minlength=owners))
            writer.integers("piece_first", pieces.first)
            writer.integers("piece_length", pieces.length)
            writer.integers("piece_weight", pieces.weight)
        index = {"sections": writer.sections, **self.index}
        return Packed(index, writer.blob(), self.cut, int(self.weight.sum()))


def draft(profile: Profile, options: ReportOptions) -> Draft:
    """Prepare a whole profile, all classes of time.

    Args:
        profile: What was recorded.
        options: How it is to be shown; the view, and which frames, is the page's own business.
    """
    everything = replace(
        options, view=View.WALL, frames=Frames.ALL, hide_importlib=False, merge=Merge.NONE
    )
    rows = rows_for(profile, everything)
    tree, node = outline(rows, options.min_width_pct or 0, MAX_NODES)
    labels, tails, thread, weight = rows.labels, rows.tail, rows.thread, rows.ns
    distinct_tails = occurring(tails[tails >= 0], len(labels))
    kinds, classes = _kinds_of_time(rows, distinct_tails), len(SampleClass)
    if profile.difference is not None:
        kinds, classes = [{"name": side, "klass": i} for i, side in enumerate(_SIDES)], len(_SIDES)
    del rows  # its paths are as large as all the rest
    writer = Writer()
    used = occurring(tree.label[1:], len(labels))
    writer.integers("depth", tree.depth)
    number = np.zeros(len(labels) + 1, dtype=np.int64)  # the last is that of the root
    number[used] = np.arange(len(used))
    writer.integers("label", number[tree.label])
    pack_labels(writer, profile, labels, used)
    _pack_lines(writer, profile, labels, used)
    kind_of = np.zeros(len(labels) + 1, dtype=np.int64)  # the last is that of time on the CPU
    kind_of[distinct_tails] = np.arange(1, len(distinct_tails) + 1)
    kind = kind_of[tails]
    if profile.difference is not None:
        kind = (~profile.difference.is_new[thread]).astype(np.int64)
    row = pack_rows(writer, node, thread, kind)
    for i, label in enumerate(profile.fleet.labels if profile.fleet is not None else ()):
        writer.integers(f"label_{i}", label.of_thread + 1)  # 0: it is not of this thread
    cut = tree.cut
    del tree, node, tails
    # A host that starts many processes and threads calls them by few names.
    names = {t.name for t in profile.threads} | {p.name for p in profile.processes}
    shown = {name: showable(name) for name in names}
    index = {
        "classes": classes,
        "kinds": kinds,
        "threads": [
            {"process": t.process, "name": f"{shown[t.name]} ({t.tid})"} for t in profile.threads
        ],
        "hidden_kinds": {f.value: [int(kind) for kind in hidden_kinds(f)] for f in Frames},
        "processes": [process_label(p.name, p.pid) for p in profile.processes],
    }
    _pack_groups(writer, profile)
    return Draft(writer, index, cut, "row_ns", row, weight, profile.spans)


def _pack_groups(writer: Writer, profile: Profile) -> None:
    # By choice of Merge, what each process is called where some are one.
    for merge in Merge:
        if merge is Merge.NONE:
            continue
        labels = [process_label(p.name, p.pid) for p in merged(profile, merge).processes]
        names, group = np.unique(np.array(labels, dtype=object), return_inverse=True)
        writer.text(f"{merge.value}_names", names.tolist())
        writer.integers(f"{merge.value}_group", group)


def _kinds_of_time(rows: Rows, tails: I64) -> list[dict[str, Any]]:
    # What a row's `kind` counts through: on-CPU first, then each off-CPU marker that occurs.
    kinds: list[dict[str, Any]] = [{"name": SampleClass.ON_CPU.label, "klass": 0}]
    for tail in tails.tolist():
        klass = int(rows.klass[np.argmax(rows.tail == tail)])
        category = int(rows.labels.categories[tail])
        kinds.append({"name": rows.labels.names[tail], "klass": klass, "category": category})
    return kinds


def pack_rows(writer: Writer, node: I32, thread: npt.NDArray[np.uint32], kind: I64) -> I64:
    """Add one row per (node, thread, kind), by node: its column is then all small differences.

    Args:
        writer: Where to.
        node: The node of each weight.
        thread: The thread of each weight.
        kind: What the page counts through, not negative, of each weight.

    Returns:
        The row that each weight belongs to.
    """
    n_kinds, n_threads = int(kind.max(initial=0)) + 1, int(thread.max(initial=0)) + 1
    limit = (int(node.max(initial=0)) + 1) * n_threads * n_kinds
    keys = node.astype(np.int64)
    keys *= n_threads
    keys += thread
    keys *= n_kinds
    keys += kind
    keys, row = distinct(keys, limit)
    writer.integers("row_node", keys // (n_threads * n_kinds), is_delta=True)
    writer.integers("row_thread", keys // n_kinds % n_threads)
    writer.integers("row_kind", keys % n_kinds)
    return row


def pack_labels(writer: Writer, profile: Profile, labels: Labels, used: I64) -> None:
    """Add what the page knows of each label in use; `used` ascends."""
    names = [labels.names[i] for i in used.tolist()]
    writer.text("names", names)
    writer.integers("category", labels.categories[used])
    writer.integers("kind", labels.kinds[used])
    writer.integers("shade", np.array([palette.shade_of(n) for n in names], dtype=np.int64))
    functions = labels.functions[used]
    is_import = [f >= 0 and is_import_machinery(profile.functions[f]) for f in functions.tolist()]
    writer.integers("is_import", np.array(is_import, dtype=np.int64))
    # 0: made by aiflame.
    own = np.append(ranks(profile).astype(np.int64) + 1, 0)
    writer.integers("rank", own[functions])
    all_files = [f.file for f in profile.functions]
    sources = [
        showable(all_files[f]) if f >= 0 and all_files[f] else "" for f in functions.tolist()
    ]
    files, where = np.unique(np.array(["", *sources], dtype=object), return_inverse=True)
    writer.text("files", files.tolist())
    writer.integers("file", where[1:])


def _pack_lines(writer: Writer, profile: Profile, labels: Labels, used: I64) -> None:
    found, line, ns = _hot_lines(profile, labels)
    position = np.full(len(labels), -1, dtype=np.int64)
    position[used] = np.arange(len(used))
    label = position[found]
    order = np.flatnonzero(label >= 0)
    order = order[np.argsort(label[order], kind="stable")]
    writer.integers("line_label", label[order], is_delta=True)
    writer.integers("line", line[order])
    writer.integers("line_ns", ns[order])


def _hot_lines(profile: Profile, labels: Labels) -> tuple[I64, I64, npt.NDArray[np.uint64]]:
    # (label, line, ns) of the hottest lines of each label, hottest first. A stack counts for a line
    # once for each frame at it, so the shares are of the label's frames.
    stack_ns = np.zeros(len(profile.stacks), dtype=np.uint64)
    np.add.at(stack_ns, profile.samples["stack"], profile.samples["ns"])
    offsets = profile.stacks.offsets.astype(np.int64)
    frame_ns = np.zeros(len(profile.frames), dtype=np.uint64)
    for first in range(0, len(stack_ns), _STACKS_AT_ONCE):
        ends = offsets[first : first + _STACKS_AT_ONCE + 1]
        own_ns = np.repeat(stack_ns[first : first + _STACKS_AT_ONCE], np.diff(ends))
        np.add.at(frame_ns, profile.stacks.frames[ends[0] : ends[-1]], own_ns)
    known = np.flatnonzero((profile.frames["line"] > 0) & (frame_ns > 0))
    pairs = labels.of_frame[known] << 32 | profile.frames["line"][known].astype(np.int64)
    keys, index = np.unique(pairs, return_inverse=True)
    ns = np.zeros(len(keys), dtype=np.uint64)
    np.add.at(ns, index, frame_ns[known])
    label, line = keys >> 32, keys & 0xFFFFFFFF
    order = np.lexsort((line, -ns.astype(np.int64), label))
    label, line, ns = label[order], line[order], ns[order]
    rank = np.arange(len(label)) - np.searchsorted(label, label, side="left")
    hot = rank < HOT_LINES
    return label[hot], line[hot], ns[hot]
