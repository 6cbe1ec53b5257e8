# SPDX-License-Identifier: Apache-2.0
"""Buckets of time: what they hold, how fine they are, and the page's ranges made of them."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from aiflame.agent.model.gpu import Device, Tier
from aiflame.agent.model.profile import NS_PER_S, SPAN_DTYPE, Profile, SampleClass, TimeRange
from aiflame.agent.reports import FORMATS, ReportOptions, View
from aiflame.agent.reports.buckets import Grid, Pieces, choose_grid, width_of
from aiflame.agent.reports.device_rows import device_rows, device_samples
from aiflame.agent.reports.rows import Rows, rows_for
from aiflame.agent.reports.time_range import in_range
from aiflame.agent.reports.tree import build
from device_profiles import Launch, Ran, device_profile_of
from hypothesis import given
from hypothesis import strategies as st
from profiles import MS, Sample, large_profile

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")


def _spans(*rows: tuple[int, int, int, int]) -> np.ndarray:
    """(sample, first second, seconds, ns in each)."""
    return np.array([(s, first, n, 1, ns) for s, first, n, ns in rows], SPAN_DTYPE)


def _chosen(seconds: int, spans: np.ndarray, owner: list[int]) -> tuple[Grid, Pieces]:
    found = choose_grid(0, seconds, [(spans, np.array(owner, np.int64))])
    assert found is not None
    return found[0], found[1][0]


@pytest.mark.parametrize(
    ("seconds", "width_s", "buckets"),
    [
        (2, 1, 2),
        (3_600, 1, 3_600),
        (3_601, 2, 1_801),
        (86_400, 30, 2_880),
        (30 * 86_400, 900, 2_880),
    ],
)
def test_a_bucket_is_a_second_up_to_an_hour(seconds: int, width_s: int, buckets: int) -> None:
    grid, _ = _chosen(seconds, _spans((0, 1, 1, 5)), [0])
    assert (grid.width_s, grid.buckets) == (width_s, buckets)


def test_buckets_of_windows_are_no_shorter_than_these() -> None:
    spans = _spans((0, 0, 1, 5), (0, 90, 1, 7))
    found = choose_grid(0, 100, [(spans, np.zeros(1, np.int64))], 30)
    assert found is not None
    assert found[0] == Grid(0, 30, 4)
    assert list(zip(found[1][0].first, found[1][0].weight, strict=True)) == [(0, 5), (3, 7)]


@pytest.mark.parametrize(
    ("seconds", "least_s", "width_s"),
    [
        (3_600, 10, 30),  # each has as many windows: not 15
        (3_000, 10, 10),
        (3_600, 7, 14),
        (60, 1, 1),
        (86_400, 60, 300),
        (400 * 86_400, 60, 115_200),
        (0, 10, 10),
    ],
)
def test_a_width_is_a_multiple_of_what_comes_often(
    seconds: int, least_s: int, width_s: int
) -> None:
    assert width_of(seconds, least_s, 300) == width_s
    assert seconds <= 300 * width_s


def test_decades_have_buckets_too() -> None:
    grid, pieces = _chosen(2**32 - 1, _spans((0, 0, 2**32 - 1, 1)), [0])
    assert grid.buckets <= 3_600
    assert int((pieces.weight * pieces.length.astype(np.uint64)).sum()) == 2**32 - 1


def test_nothing_to_choose_from() -> None:
    owner = np.zeros(1, np.int64)
    assert choose_grid(0, 1, [(_spans((0, 0, 1, 5)), owner)]) is None
    assert choose_grid(0, 9, [(_spans(), owner)]) is None
    assert choose_grid(0, 0, []) is None


def test_what_shares_an_owner_and_a_second_is_one_piece() -> None:
    _, pieces = _chosen(9, _spans((0, 3, 1, 5), (1, 3, 1, 7), (2, 3, 1, 1)), [4, 4, 2])
    assert pieces.owner.tolist() == [2, 4]
    assert pieces.weight.tolist() == [1, 12]


def test_a_long_wait_is_few_pieces() -> None:
    # From 40 s to two hours, in buckets of two seconds; and in odd seconds of a coarser grid.
    _, pieces = _chosen(7_200, _spans((0, 40, 7_160, 9)), [0])
    assert [*zip(pieces.first, pieces.length, pieces.weight, strict=True)] == [
        (20, 1, 18),
        (21, 3_578, 18),
        (3_599, 1, 18),
    ]
    _, pieces = _chosen(7_200, _spans((0, 41, 4, 9)), [0])
    assert [*zip(pieces.first, pieces.weight, strict=True)] == [(20, 9), (21, 18), (22, 9)]


@given(
    spans=st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 9_998), st.integers(1, 9_999), st.integers(0, 99)
        )
    )
)
def test_pieces_add_up_in_every_bucket(spans: list[tuple[int, int, int, int]]) -> None:
    rows = [(s, first, min(n, 9_999 - first), ns) for s, first, n, ns in spans]
    if not rows:
        return
    grid, pieces = _chosen(9_999, _spans(*rows), [0, 1, 1, 2])
    by_second = np.zeros((3, grid.buckets * grid.width_s), np.int64)
    for sample, first, seconds, ns in rows:
        by_second[(0, 1, 1, 2)[sample], first : first + seconds] += ns
    wanted = by_second.reshape(3, grid.buckets, grid.width_s).sum(axis=2)
    found = np.zeros_like(wanted)
    for owner, first, length, weight in zip(
        *(c.tolist() for c in (pieces.owner, pieces.first, pieces.length, pieces.weight)),
        strict=True,
    ):
        found[owner, first : first + length] += weight
    assert np.array_equal(found, wanted)


def test_much_is_told_apart_less_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN ten rows, each with time in every second of an hour
    monkeypatch.setattr("aiflame.agent.reports.buckets.MAX_SPLITS", 4_000)
    spans = _spans(*((i, second, 1, second + 1) for i in range(10) for second in range(3_600)))
    for probed in (9_000, 10**9):
        monkeypatch.setattr("aiflame.agent.reports.buckets._PROBED_SPANS", probed)
        grid, pieces = _chosen(3_600, spans, [*range(10)])
        # THEN they are kept by ten seconds or so, and nothing is lost
        assert 5 <= grid.width_s <= 15
        assert len(pieces.owner) <= 2 * 4_000 + 10
        assert int(pieces.weight.sum()) == int(spans["ns"].sum())


def _block(page: str, identity: str) -> str:
    found = re.search(rf'<script type="[^"]+" id="{identity}">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return found[1]


def _page(profile: Profile) -> str:
    return FORMATS["html"].render(profile, ReportOptions()).decode()


def _run(page: str, name: str, expression: str) -> Any:
    """Evaluate `expression` in the page's scripts, with one of its data sets as `data`."""
    assert NODE is not None
    folder = files("aiflame.agent.reports") / "page"
    script = "\n".join((folder / f"{one}.js").read_text("utf-8") for one in ("model", "device"))
    time = json.loads(_block(page, "facts"))["time"] or {"buckets": 0}
    script += f"""
        const zlib = require("node:zlib");
        const input = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
        const bytes = zlib.inflateSync(Buffer.from(input.blob, "base64"));
        const data = unpack(input.index, new Uint8Array(bytes));
        const list = (view, data) => {{
          const tree = lay(weigh(plainTree(data), data, null), view);
          return Array.from(tree.label, (label, i) =>
            [tree.depth[i], label < 0 ? "all" : data.names[label], tree.total[i]])
            .filter((node) => node[2]);
        }};
        const sums = (data, wanted) =>
          activity(data, {time["buckets"]}, wanted).map((series) => Array.from(series));
        console.log(JSON.stringify({expression}));
    """
    index = json.loads(_block(page, "facts"))["sets"][name]
    given = {"blob": _block(page, f"data-{name}"), "index": index}
    done = subprocess.run(
        [NODE, "-e", script], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def _listed(rows: Rows) -> list[list[Any]]:
    tree, _ = build(rows)
    return [
        [int(tree.depth[i]), tree.labels.names[tree.label[i]] if i else "all", int(total)]
        for i, total in enumerate(tree.total_ns)
        if total
    ]


def _profile() -> Profile:
    launches = [
        Launch("main;a", "k", 3, interval=0),
        Launch("main;b", "k", 1, interval=2),
        Launch("main;b", "only", 5, interval=4),
    ]
    runs = [
        Ran("k", 0, 30, "selected", interval=0),
        Ran("k", 0, 10, "selected", interval=2),
        Ran("k", 8, 20, "barrier", interval=3),
        Ran("only", 0, 7, "barrier", interval=5),
    ]
    cpu = [
        Sample("main;a", 30 * MS, count=3, first_s=0),
        Sample("main;a;f", 40 * MS, count=4, first_s=3, thread=1),
        Sample("main;[k]futex_wait", 4 * NS_PER_S, SampleClass.BLOCKED, first_s=1, seconds=4),
        Sample("main;b", 20 * MS, SampleClass.PREEMPTED, thread=2, first_s=5),
    ]
    made = device_profile_of(launches, runs, cpu=cpu)
    return replace(made, recording=replace(made.recording, duration_ns=6 * NS_PER_S))


@needs_node
@pytest.mark.parametrize(("start_s", "end_s"), [(0, 1), (1, 4), (3, 6), (5, 6), (0, 6)])
def test_a_range_of_the_page_is_that_of_the_reports(start_s: int, end_s: int) -> None:
    profile = _profile()
    page = _page(profile)
    part = in_range(profile, TimeRange(start_s * NS_PER_S, end_s * NS_PER_S))
    expression = f"list('{{}}', within(data, [{start_s}, {end_s}]))"
    for view in (View.WALL, View.CPU, View.OFFCPU):
        rows = rows_for(part, ReportOptions(view=view))
        assert _run(page, "time", expression.format(view.value)) == _listed(rows)
    rows = device_rows(part, ReportOptions(view=View.GPU), device_samples(part)).rows
    assert _run(page, "device", expression.format("gpu")) == _listed(rows)
    # AND the page of that part alone holds the same
    alone = _page(part)
    assert _run(alone, "device", "list('gpu', data)") == _listed(rows)


@needs_node
def test_the_figures_of_a_kernel_are_those_of_the_range() -> None:
    facts = (
        "((data) => kernelFacts(data, plainTree(data), plainTree(data).label.findIndex("
        "(l) => l >= 0 && data.names[l] === 'k')))"
    )
    page = _page(_profile())
    assert _run(page, "device", f"{facts}(data)")[0] == ["launches", "4 launches from 2 stacks"]
    assert _run(page, "device", f"{facts}(within(data, [2, 4]))") == [
        ["launches", "4 launches from 2 stacks in the whole recording"],
        ["launch stacks", "100.00 % shared"],
        ["reasons", "barrier 66.67 %, selected 33.33 %"],
    ]
    listed = "listings(within(data, [3, 4]), [0, 1]).map((one) => one.total)"
    assert _run(page, "device", listed) == [20]


@needs_node
def test_the_strip_is_of_what_the_page_holds() -> None:
    page = _page(_profile())
    on_cpu, blocked, waiting, preempted = _run(page, "time", "sums(data, null)")
    assert on_cpu == [30 * MS, 0, 0, 40 * MS, 0, 0]
    assert blocked == [0, *[NS_PER_S] * 4, 0]
    assert waiting == [0] * 6
    assert preempted == [0, 0, 0, 0, 0, 20 * MS]
    assert _run(page, "time", "sums(data, [false, true, false])")[0] == [0, 0, 0, 40 * MS, 0, 0]
    samples = np.array(_run(page, "device", "sums(data, null)")).sum(axis=0)
    assert samples.tolist() == [30, 0, 10, 20, 0, 7]
    assert json.loads(_block(page, "facts"))["time"]["launches"] == [3, 0, 1, 0, 5, 0]


@needs_node
@pytest.mark.parametrize(
    ("seconds", "whole", "words"),
    [(2.5, 30, "2.5 s"), (29.98, 29.98, "29.98 s"), (75, 600, "1:15"), (3_725, 9_999, "1:02:05")],
)
def test_moments(seconds: float, whole: float, words: str) -> None:
    assert _run(_page(_profile()), "time", f"moment({seconds}, {whole})") == words


def test_a_page_without_times_has_no_strip() -> None:
    profile = replace(_profile(), spans=np.zeros(0, SPAN_DTYPE))
    assert json.loads(_block(_page(profile), "facts"))["time"] is None


def test_time_costs_a_page_little() -> None:
    profile = large_profile(stacks=5_000, depth=20, samples=50_000)
    without = replace(profile, spans=profile.spans[:0])
    assert len(_page(profile)) < 1.25 * len(_page(without))
    # AND nothing of it is lost
    page = _page(profile)
    index = json.loads(_block(page, "facts"))["sets"]["time"]
    stream = zlib.decompress(base64.b64decode(_block(page, "data-time")))
    (weights,) = (one for one in index["sections"] if one["name"] == "piece_weight")
    chunk = stream[weights["start"] : weights["start"] + weights["length"]]
    planes = np.frombuffer(chunk, np.uint8).reshape(weights["bytes"], weights["count"])
    total = sum(int(plane.sum()) << (8 * i) for i, plane in enumerate(planes))
    assert total == int(profile.samples["ns"].sum())


def test_launches_have_a_lane_without_samples() -> None:
    device = Device("nvidia", "Test", Tier.LAUNCHES, "no counters", 0)
    made = device_profile_of(
        [Launch("main", "k", 3, interval=1)],
        cpu=[Sample("main", MS, first_s=0)],
        devices=(device,),
    )
    settings = json.loads(_block(_page(made), "facts"))
    assert list(settings["sets"]) == ["time"]
    assert settings["time"]["launches"] == [0, 3]
