# SPDX-License-Identifier: Apache-2.0
"""Kernels that a graph ran, under the code that launched the graph and that built the node."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import Profile, StopReason
from aiflame.agent.model.window import NO_STACK, Window, rows_of
from aiflame.agent.reports import FORMATS, Frames, ReportOptions, View
from aiflame.agent.reports.device_rows import device_samples
from aiflame.agent.reports.graph_nodes import CUT_MARKER, MARKER, GraphStacks, with_graph_nodes
from aiflame.agent.reports.stats import tables
from aiflame.agent.reports.time_range import in_range, whole_seconds
from aiflame.agent.sinks import launch_ids
from aiflame.agent.sinks.launch_ids import LaunchIds
from aiflame.gpu.attribution import Certainty
from aiflame.gpu.helpers import Helper
from device_profiles import Launch, Ran, Timed, device_profile_of, with_times
from helper_memory import Host, Memory
from hypothesis import given
from hypothesis import strategies as st
from pprof_decoder import decode
from profiles import MS

_S = 1_000 * MS
_REPLAY = "main;serve;replay;cudaGraphLaunch"
_EAGER = "main;warm_up;cudaLaunchKernel"
# Launches of the profile, by number.
_LAUNCHES = [
    Launch(_REPLAY, "graph", 100),
    Launch("main;load;norm;cudaLaunchKernel", "scale", 1),
    Launch("main;load;attention;cudaLaunchKernel", "scale", 1),
    Launch("main;load;mlp;cudaLaunchKernel", "gemm", 1),
    Launch(_EAGER, "scale", 10),
]
_NORM, _ATTENTION, _MLP, _WARM_UP = 1, 2, 3, 4


def _profile(*, end: StopReason = StopReason.ROOTED) -> Profile:
    """A graph of three nodes, two of which run the same kernel, and that kernel by itself."""
    launches = [replace(one, end=end) if one.kernel == "gemm" else one for one in _LAUNCHES]
    profile = device_profile_of(
        launches,
        [Ran("scale", 16 * i, 1 + i % 3, interval=i % 2) for i in range(600)]
        + [Ran("gemm", 0, 70), Ran("gemm", 16, 50, interval=1)],
    )
    return with_times(
        profile,
        [
            Timed("scale", 30 * MS, 0, 100, 900 * MS, built=_NORM),
            Timed("scale", 10 * MS, 0, 100, 900 * MS, built=_ATTENTION),
            Timed("gemm", 60 * MS, 0, 100, 1_900 * MS, built=_MLP),
            Timed("scale", 20 * MS, _WARM_UP, 10, 500 * MS),
            # By a graph that was built before the recording.
            Timed("scale", 20 * MS, 0, 50, 1_900 * MS),
        ],
    )


def _folded(profile: Profile, view: View, frames: Frames = Frames.BOTH) -> Counter[str]:
    options = ReportOptions(view=view, plain=True, frames=frames)
    found: Counter[str] = Counter()
    for line in FORMATS["folded"].render(profile, options).decode().splitlines():
        stack, _, weight = line.rpartition(" ")
        launched, _, kernel = stack.partition(";-;")
        found[f"{launched};-;{kernel.partition(';')[0]}"] += int(weight)
    return found


_CALL = ";clEnqueueNDRangeKernel"


def test_time_is_under_the_launch_and_then_under_the_code_that_built_the_node() -> None:
    profile = with_graph_nodes(_profile())
    head = f"server (100);{_REPLAY}"
    assert _folded(profile, View.GPU_TIME) == {
        f"{head};{MARKER};load;norm;cudaLaunchKernel;-;scale": 30 * MS,
        f"{head};{MARKER};load;attention;cudaLaunchKernel;-;scale": 10 * MS,
        f"{head};{MARKER};load;mlp;cudaLaunchKernel;-;gemm": 60 * MS,
        f"{head};-;scale": 20 * MS,
        f"server (100);{_EAGER};-;scale": 20 * MS,
    }


def test_time_under_one_of_the_two() -> None:
    launched = _folded(with_graph_nodes(_profile(), GraphStacks.LAUNCHED), View.GPU_TIME)
    assert launched == {
        f"server (100);{_REPLAY};-;scale": 60 * MS,
        f"server (100);{_REPLAY};-;gemm": 60 * MS,
        f"server (100);{_EAGER};-;scale": 20 * MS,
    }
    built = _folded(with_graph_nodes(_profile(), GraphStacks.BUILT), View.GPU_TIME)
    assert built == {
        "server (100);main;load;norm;cudaLaunchKernel;-;scale": 30 * MS,
        "server (100);main;load;attention;cudaLaunchKernel;-;scale": 10 * MS,
        "server (100);main;load;mlp;cudaLaunchKernel;-;gemm": 60 * MS,
        f"server (100);{_REPLAY};-;scale": 20 * MS,
        f"server (100);{_EAGER};-;scale": 20 * MS,
    }


def test_samples_are_shared_by_what_the_nodes_took() -> None:
    before, profile = _profile(), with_graph_nodes(_profile())
    was, now = device_samples(before), device_samples(profile)
    # GIVEN samples of one kernel, which tell no node
    whole = int(before.gpu.samples["count"].sum())
    assert int(now.count.sum()) == int(was.count.sum()) == whole == 1200 + 120
    found = _folded(profile, View.GPU)
    head = f"server (100);{_REPLAY}"
    of_graph = {stack: count for stack, count in found.items() if "replay" in stack}
    scale = sum(count for stack, count in of_graph.items() if stack.endswith("scale"))
    assert scale == _folded(before, View.GPU)[f"{head};-;scale"]
    # THEN its nodes share them 3 : 1 : 2
    for stack, share in (
        (f"{head};{MARKER};load;norm;cudaLaunchKernel;-;scale", 3 / 6),
        (f"{head};{MARKER};load;attention;cudaLaunchKernel;-;scale", 1 / 6),
        (f"{head};-;scale", 2 / 6),
    ):
        assert of_graph.pop(stack) == pytest.approx(scale * share, abs=10)
    # AND of a kernel of one node all are that node's, as sure as before
    assert of_graph == {f"{head};{MARKER};load;mlp;cudaLaunchKernel;-;gemm": 120}
    gemm = profile.gpu.kernels.index(next(k for k in profile.gpu.kernels if k.name == "gemm"))
    names = [profile.gpu.kernels[kernel].name for kernel in now.kernel.tolist()]
    sure = {Certainty(c) for c, name in zip(now.certainty, names, strict=True) if name == "gemm"}
    assert (gemm >= 0, sure) == (True, {Certainty.EXACT})
    # AND what was taken where, and when, is as it was
    for key in ("offset", "reason", "device"):
        sums = [np.bincount(getattr(s, key).astype(np.int64), s.count) for s in (was, now)]
        assert sums[0].tolist() == sums[1].tolist()


def _data_of(page: bytes) -> list[bytes]:
    """The packed data of a page."""
    found = re.findall(rb'<script[^>]* id="data-[^>]*>([^<]*)<', page)
    return [zlib.decompress(base64.b64decode(data)) for data in found]


def _weights_of_pprof(profile: Profile, view: View) -> Counter[str]:
    decoded = decode(FORMATS["pprof"].render(profile, ReportOptions(view=view)))
    found: Counter[str] = Counter()
    for sample in decoded.samples:
        found[";".join(reversed(sample.lines))] += sum(sample.values.values())
    return found


@pytest.mark.parametrize("view", [View.GPU, View.GPU_TIME])
def test_every_format_shows_both(view: View) -> None:
    before, profile = _profile(), with_graph_nodes(_profile())
    options = ReportOptions(view=view)
    for one, is_there in ((profile, True), (before, False)):
        page = FORMATS["html"].render(one, options)
        assert any(MARKER.encode() in data for data in _data_of(page)) == is_there
    for name in ("svg", "folded", "speedscope"):
        assert MARKER.encode() in FORMATS[name].render(profile, options), name
        assert MARKER.encode() not in FORMATS[name].render(before, options), name
    # AND with the same sums
    for frames in Frames:
        own = [sum(_folded(one, view, frames).values()) for one in (before, profile)]
        assert own[0] == own[1]
    speedscope = json.loads(FORMATS["speedscope"].render(profile, options))
    assert sum(sum(one["weights"]) for one in speedscope["profiles"]) == own[0]
    pprof = _weights_of_pprof(profile, view)
    assert sum(pprof.values()) == own[0]
    assert sum(count for stack, count in pprof.items() if MARKER in stack and "mlp" in stack)


def test_a_part_of_the_time_has_what_the_whole_has() -> None:
    profile = with_graph_nodes(_profile())
    whole = _folded(profile, View.GPU)
    parts = [
        _folded(in_range(profile, whole_seconds(first, first + _S, 2 * _S)), View.GPU)
        for first in (0, _S)
    ]
    assert parts[0] + parts[1] == whole
    assert any(MARKER in stack for stack in parts[0])


def test_a_building_stack_that_is_cut_says_so() -> None:
    profile = with_graph_nodes(_profile(end=StopReason.NO_FRAME_POINTER))
    found = _folded(profile, View.GPU_TIME)
    head = f"server (100);{_REPLAY};{CUT_MARKER};main;load;mlp;cudaLaunchKernel;-;gemm"
    assert found[head] == 60 * MS


def test_without_graphs_a_profile_stays_as_it_is() -> None:
    profile = with_times(_profile(), [Timed("scale", MS, 4), Timed("gemm", MS)])
    for shown in GraphStacks:
        assert with_graph_nodes(profile, shown) is profile


def test_stats_name_the_code_that_built_a_node() -> None:
    profile = with_graph_nodes(_profile())
    (table,) = (
        table for table in tables(profile, View.GPU_TIME, 10) if table.title == "Top launch stacks"
    )
    assert any("mlp" in row[-1] and row[0] == "60.00" for row in table.rows)


@given(
    st.lists(st.integers(1, 1 << 50), min_size=1, max_size=20),
    st.lists(st.integers(0, 1 << 40), min_size=1, max_size=6),
)
def test_shares_add_up(counts: list[int], ns: list[int]) -> None:
    from aiflame.agent.reports.graph_nodes import _shared
    from aiflame.gpu.attribution import ATTRIBUTED_DTYPE

    rows = np.zeros(len(counts), ATTRIBUTED_DTYPE)
    rows["sample"], rows["count"] = np.arange(len(counts)), counts
    found = _shared(rows, np.arange(len(ns)) + 10, np.array(ns, np.float64))
    sums = np.zeros(len(counts), np.uint64)
    np.add.at(sums, found["sample"], found["count"])
    assert sums.tolist() == counts
    assert (found["count"] > 0).all()


# ---- who has built a node ----------------------------------------------------------------------


def _helper(memory: Memory, host: Host) -> Helper:
    helper = Helper(memory, host, lambda device: 0, lambda reason: False, 0)  # type: ignore[arg-type]
    helper.allow(1 << 20)
    return helper


def _memory() -> Memory:
    memory = Memory()
    memory.hello()
    memory.device()
    memory.context()
    memory.name(1, "scale")
    return memory


def test_a_node_is_its_builders_however_often_it_was_copied() -> None:
    # GIVEN a captured node, a copy, a copy of that; one of unknown origin, and a copy of it
    memory = _memory()
    for node in ((1, 0, 77), (2, 1, 0), (3, 2, 0), (4, 0, 0), (5, 4, 0), (6, 6, 0)):
        memory.node(*node)
    memory.times(*[(9, 10, 20, 0, node, 1, 0, 1, 1) for node in (3, 5, 6, 99, 0, 1)])
    host = Host(memory)
    _helper(memory, host).read(0)
    assert [time.built_id for time in host.times] == [77, 0, 0, 0, 0, 77]
    assert {time.launch_id for time in host.times} == {9}
    assert not host.lost


def test_a_process_that_invents_nodes_has_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiflame.gpu.helpers._MAX_NODES", 10)
    memory = _memory()
    for node in range(1, 51):
        memory.node(node, 0, node)
    memory.node(60, 0, (1 << 64) - 1)  # no launch has such a number
    memory.times(*[(9, 10, 20, 0, node, 1, 0, 1, 1) for node in (40, 41, 50, 60)])
    host = Host(memory)
    _helper(memory, host).read(0)
    # Those that came last: who captures graphs all day has no use for the first.
    assert [time.built_id for time in host.times] == [0, 41, 50, 0]
    assert host.lost == {LossKind.DEVICE_FACTS_FULL: 40}


def _put(ids: LaunchIds, *launches: tuple[int, int, int]) -> None:
    """Launches: process, number, stack."""
    names = rows_of("launches").dtype.names or ()
    rows = rows_of("launches", *[(0,) * len(names)] * len(launches))
    for row, (process, number, stack) in zip(rows, launches, strict=True):
        row["process"], row["launch_id"], row["stack"], row["count"] = process, number, stack, 1
    ids.put(Window.of(0, 0, 1000, {"launches": rows}))


def _builders(ids: LaunchIds, *asked: tuple[int, int]) -> list[int]:
    process, number = zip(*asked, strict=True)
    found: list[int] = ids.builders(np.array(process), np.array(number, np.uint64)).tolist()
    return found


def test_what_built_a_graph_is_known_for_as_long_as_it_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_ids, "_MOST_KEPT", 4)
    ids = LaunchIds()
    _put(ids, (1, 7, 70), (1, 8, 80), (2, 7, 90))
    assert _builders(ids, (1, 7), (2, 7), (1, 7), (3, 7), (1, 0)) == [
        70,
        90,
        70,
        NO_STACK,
        NO_STACK,
    ]
    # WHEN many launches follow
    _put(ids, *[(1, number, 5) for number in range(100, 110)])
    # THEN what has been replayed is known, and the rest is not
    assert _builders(ids, (1, 7), (1, 8), (2, 7)) == [70, NO_STACK, 90]
    assert ids.builders_lost == 0


def test_builders_that_find_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_ids, "_MOST_BUILDERS", 2)
    ids = LaunchIds()
    _put(ids, *[(1, number, 10 * number) for number in range(1, 6)])
    assert _builders(ids, *[(1, number) for number in range(1, 6)]) == [10, 20, 30, 40, 50]
    assert ids.builders_lost == 3
