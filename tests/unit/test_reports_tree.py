# SPDX-License-Identifier: Apache-2.0
"""Rows and trees: what is shown, how it is merged, and that no nanosecond gets lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.reports.base import View
from aiflame.agent.reports.rows import rows_of
from aiflame.agent.reports.tree import Tree, build, invert, kept_above, prune
from aiflame.agent.reports.words import MAX_NAME_CHARS, showable
from profiles import (
    HOSTILE_NAMES,
    MS,
    Sample,
    deep_profile,
    empty_profile,
    hostile_profile,
    large_profile,
    profile_of,
    small_profile,
)

Outline = list[tuple[int, str, int, int]]


def outline(tree: Tree) -> Outline:
    """(depth, name, total in ms, of which off-CPU in ms), as one would read the flame graph."""
    return [
        (
            int(tree.depth[i]),
            tree.labels.names[tree.label[i]] if i else "all",
            int(tree.total_ns[i]) // MS,
            int(tree.off_ns[i]) // MS,
        )
        for i in range(len(tree))
    ]


def tree_of(*samples: Sample, view: View = View.WALL, per_thread: bool = False) -> Tree:
    return build(rows_of(profile_of(*samples), view, per_thread))[0]


def shown(*samples: Sample, view: View = View.WALL, per_thread: bool = False) -> list[str]:
    rows = rows_of(profile_of(*samples), view, per_thread)
    return [";".join(rows.labels.names[i] for i in p) for p in rows.paths(np.arange(len(rows)))]


def test_stacks_merge_by_function_and_keep_the_order_of_names() -> None:
    tree = tree_of(
        Sample("main:1;parse:3", 30 * MS),
        Sample("main:2;parse:9", 10 * MS),
        Sample("main:2;draw", 5 * MS),
        Sample("main:7", 2 * MS),
    )
    assert outline(tree) == [
        (0, "all", 47, 0),
        (1, "server (100)", 47, 0),
        (2, "main", 47, 0),
        (3, "draw", 5, 0),
        (3, "parse", 40, 0),
    ]
    assert tree.self_ns.tolist() == [0, 0, 2 * MS, 5 * MS, 40 * MS]


def test_same_name_in_kernel_and_program_are_two_frames() -> None:
    tree = tree_of(Sample("read", MS), Sample("[k]read", 2 * MS))
    assert [name for _, name, _, _ in outline(tree)] == ["all", "server (100)", "read", "read"]


def test_off_cpu_time_ends_in_a_mark_that_says_why() -> None:
    tree = tree_of(
        Sample("work", 10 * MS),
        Sample("work;[k]futex_wait", 20 * MS, SampleClass.BLOCKED),
        Sample("work", 3 * MS, SampleClass.PREEMPTED),
        Sample("work;[k]futex_wait", 4 * MS, SampleClass.WAITING_TO_RUN),
    )
    assert outline(tree) == [
        (0, "all", 37, 27),
        (1, "server (100)", 37, 27),
        (2, "work", 37, 27),
        (3, "[preempted]", 3, 3),
        (3, "futex_wait", 24, 24),
        (4, "[blocked: lock]", 20, 20),
        (4, "[waiting to run]", 4, 4),
    ]


@pytest.mark.parametrize(
    ("view", "total_ms", "off_ms"), [(View.WALL, 37, 27), (View.CPU, 10, 0), (View.OFFCPU, 27, 27)]
)
def test_view_chooses_what_is_counted(view: View, total_ms: int, off_ms: int) -> None:
    samples = [
        Sample("work", 10 * MS),
        Sample("work", 20 * MS, SampleClass.BLOCKED),
        Sample("work", 3 * MS, SampleClass.PREEMPTED),
        Sample("work", 4 * MS, SampleClass.WAITING_TO_RUN),
    ]
    assert outline(tree_of(*samples, view=view))[0] == (0, "all", total_ms, off_ms)


@pytest.mark.parametrize("end", list(StopReason))
def test_cut_stack_is_never_taken_for_a_whole_one(end: StopReason) -> None:
    without = (StopReason.KERNEL_ONLY, StopReason.EXCLUDED, StopReason.NOT_RUN_YET)
    is_whole = end in without or "rooted" in end.label
    mark = "" if is_whole else f";{end.marker}"
    assert shown(Sample("leaf", MS, end=end)) == [f"server (100){mark};leaf"]
    assert shown(Sample("leaf", MS, end=end), per_thread=True) == [
        f"server (100);server (100){mark};leaf"
    ]


def test_threads_of_a_process_share_frames_unless_asked_for() -> None:
    samples = [Sample("work", MS), Sample("work", 2 * MS, thread=1), Sample("work", MS, thread=2)]
    assert outline(tree_of(*samples)) == [
        (0, "all", 4, 0),
        (1, "client (200)", 1, 0),
        (2, "work", 1, 0),
        (1, "server (100)", 3, 0),
        (2, "work", 3, 0),
    ]
    assert shown(*samples, per_thread=True) == [
        "server (100);server (100);work",
        "server (100);worker (101);work",
        "client (200);client (200);work",
    ]


def test_a_lost_stack_keeps_its_time() -> None:
    assert shown(Sample("", MS, SampleClass.BLOCKED, end=StopReason.LOST)) == [
        "server (100);[truncated: lost];[blocked: other]"
    ]


def test_recursion_is_shown_as_it_was() -> None:
    tree = tree_of(Sample("f;f;f", MS), Sample("f;f", 2 * MS))
    assert [(d, ms) for d, _, ms, _ in outline(tree)] == [(0, 3), (1, 3), (2, 3), (3, 3), (4, 1)]


def test_inverted_tree_begins_with_the_leaves() -> None:
    tree = invert(
        tree_of(
            Sample("main;a;malloc", 3 * MS),
            Sample("main;b;malloc", 4 * MS),
            Sample("main;b", MS, SampleClass.BLOCKED),
        )
    )
    assert outline(tree) == [
        (0, "all", 8, 1),
        (1, "[blocked: other]", 1, 1),
        (2, "b", 1, 1),
        (3, "main", 1, 1),
        (4, "server (100)", 1, 1),
        (1, "malloc", 7, 0),
        (2, "a", 3, 0),
        (3, "main", 3, 0),
        (4, "server (100)", 3, 0),
        (2, "b", 4, 0),
        (3, "main", 4, 0),
        (4, "server (100)", 4, 0),
    ]


def test_children_are_drawn_from_the_left_and_self_time_last() -> None:
    tree = tree_of(
        Sample("m", 5 * MS), Sample("m;a", 3 * MS), Sample("m;b;c", 2 * MS), Sample("m;b", MS)
    )
    starts = dict(zip(tree.label.tolist(), (tree.offsets_ns() // MS).tolist(), strict=True))
    by_name = {tree.labels.names[label]: start for label, start in starts.items() if label >= 0}
    assert by_name == {"server (100)": 0, "m": 0, "a": 0, "b": 3, "c": 3}


def test_prune_moves_time_up_and_counts_what_it_cut() -> None:
    # GIVEN a tree in which two frames, one below the other, have 1 % of the time
    full = tree_of(Sample("m;a", 99 * MS), Sample("m;b;c", MS))
    # WHEN everything under 5 % is cut
    small, cut = prune(full, 5)
    # THEN the frame above holds their time itself
    assert outline(small) == [
        (0, "all", 100, 0),
        (1, "server (100)", 100, 0),
        (2, "m", 100, 0),
        (3, "a", 99, 0),
    ]
    assert (cut.nodes, cut.ns) == (2, MS)
    assert small.self_ns.tolist() == [0, 0, MS, 99 * MS]
    assert small.end.tolist() == [4, 4, 4, 4]
    assert kept_above(full, cut).tolist() == [0, 1, 2, 3, 2, 2]


def test_prune_to_a_number_of_nodes_keeps_the_widest() -> None:
    full = tree_of(*(Sample(f"f{i}", (i + 1) * MS) for i in range(10)))
    small, cut = prune(full, 0, max_nodes=5)
    assert [name for _, name, _, _ in outline(small)] == ["all", "server (100)", "f7", "f8", "f9"]
    assert cut.nodes == 7


def test_empty_profile_is_a_tree_of_nothing() -> None:
    tree, node = build(rows_of(empty_profile()))
    assert outline(tree) == [(0, "all", 0, 0)]
    assert len(node) == 0
    assert outline(invert(tree)) == [(0, "all", 0, 0)]
    assert prune(tree, 0.1)[1].nodes == 0


def test_ten_thousand_frames_deep() -> None:
    tree, _ = build(rows_of(deep_profile(10_000)))
    assert len(tree) == 10_002
    assert tree.labels.names[tree.label[10_001]] == "f9999"
    assert tree.labels.names[invert(tree).label[1]] == "f9999"


def test_times_beyond_float_precision_are_exact() -> None:
    # 2**53 + 1 ns (104 days of thread time) is the first whole number that a float64 can't hold.
    odd = 2**53 + 1
    tree = tree_of(Sample("a", odd), Sample("b", 2))
    assert tree.total_ns.tolist() == [odd + 2, odd + 2, odd, 2]


def test_names_are_shown_safely() -> None:
    labels = rows_of(hostile_profile()).labels
    for name in labels.names:
        assert name
        assert all(char.isprintable() for char in name), repr(name)
        name.encode()  # no lone surrogates
        assert len(name) < MAX_NAME_CHARS + 40
    assert len(labels.names) > 2 * len(HOSTILE_NAMES)


def test_a_cut_name_says_how_long_it_was() -> None:
    assert showable("x" * 10_000).endswith("x... (10000 characters)")
    assert showable("two\nlines") == "two\ufffdlines"
    assert showable("") == "[unnamed]"


def test_large_tree_is_consistent() -> None:
    # GIVEN a profile with thousands of stacks in many threads
    profile = large_profile(stacks=5_000, depth=20, samples=20_000)
    # WHEN it is merged
    rows = rows_of(profile)
    tree, node = build(rows)
    # THEN each row is at the node that its path leads to
    for row in range(0, len(rows), 997):
        path, at = [], int(node[row])
        while at:
            path.append(int(tree.label[at]))
            at = int(tree.parent[at])
        assert path[::-1] == next(rows.paths(np.array([row])))
    # AND no time is lost, in either direction
    whole = int(profile.samples["ns"].sum())
    off = int(profile.samples["ns"][profile.samples["klass"] > 0].sum())
    for each in (tree, invert(tree), prune(tree, 0.1)[0]):
        assert (int(each.total_ns[0]), int(each.off_ns[0])) == (whole, off)
        assert int(each.self_ns.sum()) == whole
        assert_preorder(each)


def assert_preorder(tree: Tree) -> None:
    """Each node's children follow it, in order of label, within its range and its time."""
    children: dict[int, list[int]] = {}
    for i in range(1, len(tree)):
        children.setdefault(int(tree.parent[i]), []).append(i)
    starts = tree.offsets_ns()
    for up, nodes in children.items():
        assert nodes[0] == up + 1
        assert [int(tree.end[n]) for n in nodes[:-1]] == nodes[1:]
        assert int(tree.end[nodes[-1]]) == int(tree.end[up])
        labels = [int(tree.label[n]) for n in nodes]
        assert all(a < b for a, b in pairwise(labels))
        assert starts[nodes[0]] == starts[up]
        total = int(tree.self_ns[up]) + sum(int(tree.total_ns[n]) for n in nodes)
        assert total == int(tree.total_ns[up])


def test_ids_do_not_depend_on_the_order_of_samples() -> None:
    one = build(rows_of(small_profile()))[0]
    profile = small_profile()
    profile.samples[:] = profile.samples[::-1].copy()
    other = build(rows_of(profile))[0]
    assert outline(one) == outline(other)
    assert np.array_equal(one.self_ns, other.self_ns)
