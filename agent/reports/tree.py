# SPDX-License-Identifier: Apache-2.0
"""Flame trees: rows merged by their shared beginnings.

Built level by level: the nodes of a level are the distinct pairs (node above, label), found by
sorting all rows of the level at once. So a million samples in a hundred thousand stacks cost
some dozens of numpy sorts, and no Python statement runs once per stack.

Nodes are numbered in preorder, children by name. A subtree is then one range of ids, totals are
differences of one running sum, and a flame graph is drawn in one pass; and the numbers depend on
nothing but the profile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.reports.distinct import distinct
from aiflame.agent.reports.rows import U32, Labels, Rows

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# The parent of the root.
NO_NODE = -1


@dataclass(frozen=True, slots=True)
class Tree:
    """A flame tree in preorder. Node 0 is the whole; it has no label.

    The subtree of node `i` is the range `i:end[i]`. All arrays have shape (nodes,).
    """

    labels: Labels
    label: I32  # index into labels, -1 for node 0
    parent: I32
    depth: I32
    end: I32
    self_ns: U64
    total_ns: U64
    off_ns: U64  # how much of total_ns was spent off the CPU

    def __len__(self) -> int:
        return len(self.label)

    def offsets_ns(self) -> U64:
        """Return where each node begins on the x axis: children from the left, self time last."""
        before = np.cumsum(self.self_ns) - self.self_ns
        # In preorder a node's own time comes before its children's. To have it after them, take
        # away what the ancestors hold themselves: a running sum down each path.
        own = self._self_of_ancestors()
        result: U64 = before - own
        return result

    def _self_of_ancestors(self) -> U64:
        # Opening a node adds its self time to the path, leaving its subtree takes it away again.
        steps = np.zeros(len(self) + 1, dtype=np.int64)
        self_ns = self.self_ns.astype(np.int64)
        steps[1:] += self_ns
        np.subtract.at(steps, self.end, self_ns)
        result: U64 = np.cumsum(steps)[:-1].astype(np.uint64)
        return result


@dataclass(frozen=True, slots=True)
class Cut:
    """What `prune` left out."""

    nodes: int
    ns: int  # their time; it is still part of the nodes above them
    kept: npt.NDArray[np.bool_]  # by node of the tree before
    is_capped: bool  # whether the number of nodes was the reason, for some


@dataclass(frozen=True, slots=True)
class Outline:
    """A pruned tree without its times, in preorder. The arrays have shape (nodes,)."""

    label: I32  # as of a Tree
    depth: I32
    cut: Cut


class _Grower:
    """Collects the nodes of a tree, level by level from the root."""

    def __init__(self, n_labels: int) -> None:
        self._radix = max(1, n_labels)
        # (parent: index in the level above, label)
        self._levels: list[tuple[I32, I32]] = [(np.zeros(1, np.int32), np.full(1, -1, np.int32))]

    def grow(self, parents: I64, labels: I64) -> I64:
        """Add a level.

        Args:
            parents: For each row, the index within the level above of the node it is at.
            labels: For each row, the label it goes on with.

        Returns:
            For each row, the index within this level of the node it comes to.
        """
        limit = len(self._levels[-1][0]) * self._radix
        nodes, index = distinct(parents * self._radix + labels, limit)
        level = nodes // self._radix, nodes % self._radix
        self._levels.append((level[0].astype(np.int32), level[1].astype(np.int32)))
        return index

    def finish(self) -> _Shape:
        """Number the nodes in preorder."""
        levels = self._levels
        sizes = [np.ones(len(labels), dtype=np.int32) for _, labels in levels]
        for below in range(len(levels) - 1, 0, -1):
            above = sizes[below - 1]
            above += np.bincount(levels[below][0], sizes[below], len(above)).astype(np.int32)
        shape = _Shape(sum(len(size) for size in sizes))
        position = np.zeros(1, dtype=np.int32)
        for depth, ((parents, labels), size) in enumerate(zip(levels, sizes, strict=True)):
            up = position
            if depth:
                # Nodes of a level are sorted by parent: each comes after its earlier siblings.
                of_earlier_parents = _before(sizes[depth - 1] - 1)
                earlier = _before(size) - of_earlier_parents[parents]
                position = (up[parents] + 1 + earlier).astype(np.int32)
                shape.parent[position] = up[parents]
            shape.label[position] = labels
            shape.depth[position] = depth
            shape.end[position] = position + size
            shape.ids.append(position)
        return shape


def _before(sizes: I32) -> I32:
    """Return the sum of all that come before each."""
    result: I32 = np.cumsum(sizes, dtype=np.int32) - sizes
    return result


class _Shape:
    """A tree without its times; `ids[d]` maps an index within level `d` to a node."""

    def __init__(self, n_nodes: int) -> None:
        self.label = np.full(n_nodes, -1, dtype=np.int32)
        self.parent = np.full(n_nodes, NO_NODE, dtype=np.int32)
        self.depth = np.zeros(n_nodes, dtype=np.int32)
        self.end = np.ones(n_nodes, dtype=np.int32)
        self.ids: list[I32] = []

    def __len__(self) -> int:
        return len(self.label)

    def weigh(self, labels: Labels, self_ns: U64, self_off_ns: U64) -> Tree:
        """Sum the times of each subtree."""
        return Tree(
            labels=labels,
            label=self.label,
            parent=self.parent,
            depth=self.depth,
            end=self.end,
            self_ns=self_ns,
            total_ns=_subtree_sums(self_ns, self.end),
            off_ns=_subtree_sums(self_off_ns, self.end),
        )


def _subtree_sums(values: U64, end: I32) -> U64:
    running = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values, out=running[1:])
    return running[end] - running[:-1]


def _sum_by(index: I32, values: U64, size: int) -> U64:
    # bincount would sum in float64, which is not exact above 2**53 ns (104 days of thread time).
    sums = np.zeros(size, dtype=np.uint64)
    np.add.at(sums, index, values)
    return sums


def build(rows: Rows) -> tuple[Tree, I32]:
    """Merge rows from the root.

    Returns:
        The tree, and for each row the node that its time is the self time of.
    """
    shape, node = _grown(rows)
    labels, klass, ns = rows.labels, rows.klass, rows.ns
    del rows  # its paths are as large as all the rest
    return _weighed(shape, labels, node, klass, ns), node


def outline(rows: Rows, min_width_pct: float, max_nodes: int) -> tuple[Outline, I32]:
    """Merge rows from the root, and leave out what `prune` does.

    Returns:
        The tree, and for each row the node that has its time.
    """
    shape, node = _grown(rows)
    if not min_width_pct and len(shape) <= max_nodes:
        cut = Cut(0, 0, np.ones(len(shape), np.bool_), False)
        return Outline(shape.label, shape.depth, cut), node
    full = _weighed(shape, rows.labels, node, rows.klass, rows.ns)
    tree, cut = prune(full, min_width_pct, max_nodes)
    return Outline(tree.label, tree.depth, cut), kept_above(full, cut)[node]


def _grown(rows: Rows) -> tuple[_Shape, I32]:
    grower = _Grower(len(rows.labels))
    paths = np.arange(len(rows.path_offsets) - 1)
    starts, lengths = rows.path_offsets[:-1], np.diff(rows.path_offsets)
    n_labels = max(1, len(rows.labels))
    has_tail = rows.tail >= 0
    keys = rows.path_of[has_tail].astype(np.int64)
    keys *= n_labels
    keys += rows.tail[has_tail]
    keys, tail_of_row = distinct(keys, len(paths) * n_labels)
    # A tail is one more level for those of a path's rows that were off the CPU.
    tails, tail_labels = keys // n_labels, keys % n_labels
    by_length = np.argsort(lengths[tails], kind="stable")
    tail_levels = np.searchsorted(lengths[tails][by_length], np.arange(lengths.max(initial=0) + 2))
    at = np.zeros(len(paths), dtype=np.int64)
    tail_at = np.zeros(len(tails), dtype=np.int64)
    for depth in range(lengths.max(initial=-1) + 1):
        paths = paths[lengths[paths] > depth]
        ending = by_length[tail_levels[depth] : tail_levels[depth + 1]]
        step = grower.grow(
            np.concatenate([at[paths], at[tails[ending]]]),
            np.concatenate([rows.path_labels[starts[paths] + depth], tail_labels[ending]]),
        )
        at[paths], tail_at[ending] = step[: len(paths)], step[len(paths) :]
    shape = grower.finish()
    node = _nodes(shape, lengths, at)[rows.path_of]
    node[has_tail] = _nodes(shape, lengths[tails] + 1, tail_at)[tail_of_row]
    return shape, node


def _weighed(
    shape: _Shape, labels: Labels, node: I32, klass: npt.NDArray[np.uint8], ns: U64
) -> Tree:
    size = len(shape)
    self_ns = _sum_by(node, ns, size)
    is_on = klass == SampleClass.ON_CPU
    return shape.weigh(labels, self_ns, self_ns - _sum_by(node[is_on], ns[is_on], size))


def _nodes(shape: _Shape, depths: I64, index: I64) -> I32:
    # The nodes at `index` within the levels `depths`.
    if not len(depths):
        return np.zeros(0, dtype=np.int32)
    sizes = np.array([len(ids) for ids in shape.ids])
    first = np.cumsum(sizes) - sizes
    nodes: I32 = np.concatenate(shape.ids)[first[depths] + index]
    return nodes


def invert(tree: Tree) -> Tree:
    """Merge from the leaf: the children of the whole are the frames that time was spent in."""
    leaves = np.flatnonzero(tree.self_ns[1:]) + 1
    own_off = tree.off_ns.copy()
    inner = np.flatnonzero(tree.parent > NO_NODE)
    np.subtract.at(own_off, tree.parent[inner], tree.off_ns[inner])
    grower = _Grower(len(tree.labels))
    lengths = tree.depth[leaves].astype(np.int64)
    at = np.zeros(len(leaves), dtype=np.int64)
    cursor = leaves.astype(np.int64)
    going = np.arange(len(leaves))
    while len(going):
        at[going] = grower.grow(at[going], tree.label[cursor[going]].astype(np.int64))
        cursor[going] = tree.parent[cursor[going]]
        going = going[cursor[going] > 0]
    shape = grower.finish()
    node, size = _nodes(shape, lengths, at), len(shape.label)
    return shape.weigh(
        tree.labels,
        _sum_by(node, tree.self_ns[leaves], size),
        _sum_by(node, own_off[leaves], size),
    )


def prune(tree: Tree, min_width_pct: float, max_nodes: int | None = None) -> tuple[Tree, Cut]:
    """Leave out nodes narrower than a share of the whole.

    Args:
        tree: What to prune.
        min_width_pct: The share in percent.
        max_nodes: Raise the share until no more than this many nodes are left.

    Returns:
        The smaller tree, in which cut nodes' time is the self time of the node above; and what
        was cut.
    """
    limit = float(tree.total_ns[0]) * min_width_pct / 100
    keep = tree.total_ns >= limit
    is_capped = max_nodes is not None and int(np.count_nonzero(keep)) > max_nodes
    if max_nodes is not None and is_capped:
        # A child is never wider than its parent, so what is kept stays connected.
        keep &= (
            tree.total_ns
            > np.partition(tree.total_ns, len(tree) - max_nodes - 1)[len(tree) - max_nodes - 1]
        )
    keep[0] = True
    if keep.all():
        return tree, Cut(0, 0, keep, is_capped)
    kept_before: U32 = np.cumsum(np.concatenate([[0], keep])).astype(np.uint32)
    edge = ~keep
    edge[1:] &= keep[tree.parent[1:]]
    extra = _sum_by(tree.parent[edge], tree.total_ns[edge], len(tree))
    parents = tree.parent[keep]
    smaller = Tree(
        labels=tree.labels,
        label=tree.label[keep],
        parent=np.where(parents < 0, NO_NODE, kept_before[parents]).astype(np.int32),
        depth=tree.depth[keep],
        end=kept_before[tree.end[keep]].astype(np.int32),
        self_ns=(tree.self_ns + extra)[keep],
        total_ns=tree.total_ns[keep],
        off_ns=tree.off_ns[keep],
    )
    return smaller, Cut(len(tree) - len(smaller), int(tree.total_ns[edge].sum()), keep, is_capped)


def kept_above(tree: Tree, cut: Cut) -> I32:
    """Return for each node of the tree before `prune` the node that has its time after it."""
    above = np.arange(len(tree), dtype=np.int32)
    lost = np.flatnonzero(~cut.kept)
    while len(lost):
        above[lost] = tree.parent[above[lost]]
        lost = lost[~cut.kept[above[lost]]]
    result: I32 = (np.cumsum(cut.kept, dtype=np.int32) - 1)[above]
    return result
