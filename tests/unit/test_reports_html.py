# SPDX-License-Identifier: Apache-2.0
"""The HTML page: its data unpacked as the browser does it, and nothing hostile in its markup.

The page's own tree code runs under node, where there is one, against trees made here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from aiflame.agent.model.profile import Profile, SampleClass, StopReason
from aiflame.agent.reports import FORMATS, Frames, ReportOptions, View
from aiflame.agent.reports.base import TIME_VIEWS
from aiflame.agent.reports.rows import rows_for, rows_of
from aiflame.agent.reports.tree import Tree, build, invert
from profiles import (
    MS,
    Sample,
    deep_profile,
    empty_profile,
    hostile_profile,
    large_profile,
    profile_of,
    python_profile,
    small_profile,
)

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")


class Elements(HTMLParser):
    """Collects start tags, and the text of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, dict[str, str | None], str]] = []
        self.text = ""
        self._within: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._within = [] if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        if self._within is not None:
            self.raw.append((*self.tags[-1], "".join(self._within)))
            self._within = None

    def handle_data(self, data: str) -> None:
        if self._within is None:
            self.text += data
        else:
            self._within.append(data)


def page_of(profile: Profile, options: ReportOptions | None = None) -> Elements:
    page = Elements()
    page.feed(FORMATS["html"].render(profile, options or ReportOptions()).decode())
    page.close()
    return page


def raw(page: Elements, identity: str) -> str:
    return "".join(text for _, attributes, text in page.raw if attributes.get("id") == identity)


def unpacked(page: Elements) -> dict[str, Any]:
    """Undo pack.py the way page/model.js does."""
    index = json.loads(raw(page, "facts"))["sets"]["time"]
    data = dict(index)
    stream = zlib.decompress(base64.b64decode(raw(page, "data-time")))
    for section in index["sections"]:
        chunk = stream[section["start"] : section["start"] + section["length"]]
        if "bytes" not in section:
            data[section["name"]] = json.loads(chunk)
            continue
        planes = np.frombuffer(chunk, dtype=np.uint8).reshape(section["bytes"], section["count"])
        column = sum(planes[i].astype(np.int64) << (8 * i) for i in range(section["bytes"]))
        data[section["name"]] = np.cumsum(column) if section["is_delta"] else column
    if "piece_count" in data:
        owner = np.repeat(np.arange(len(data["piece_count"])), data["piece_count"])
        data["row_ns"] = np.zeros(len(data["row_node"]), np.int64)
        np.add.at(data["row_ns"], owner, data["piece_weight"] * data["piece_length"])
    return data


def folded(data: dict[str, Any]) -> dict[tuple[str, str], int]:
    """ns by (path, kind of time), as one would fold what the page shows."""
    names: list[str] = []
    paths: list[str] = []
    for depth, label in zip(data["depth"].tolist(), data["label"].tolist(), strict=True):
        del names[max(0, depth - 1) :]
        if depth:
            names.append(data["names"][label])
        paths.append(";".join(names))
    result: dict[tuple[str, str], int] = {}
    for node, kind, ns in zip(data["row_node"], data["row_kind"], data["row_ns"], strict=True):
        key = (paths[node], data["kinds"][kind]["name"])
        result[key] = result.get(key, 0) + int(ns)
    return result


def test_page_holds_all_classes_whatever_view_it_opens_with() -> None:
    profile = profile_of(
        Sample("main;work", 30 * MS),
        Sample("main;work", 10 * MS, thread=1),
        Sample("main;[k]futex_wait", 20 * MS, SampleClass.BLOCKED),
        Sample("main", 3 * MS, SampleClass.PREEMPTED),
    )
    page = page_of(profile, ReportOptions(view=View.CPU))
    assert json.loads(raw(page, "facts"))["view"] == "cpu"
    data = unpacked(page)
    assert folded(data) == {
        ("server (100);main;work", "on-CPU"): 40 * MS,
        ("server (100);main;futex_wait;[blocked: lock]", "[blocked: lock]"): 20 * MS,
        ("server (100);main;[preempted]", "[preempted]"): 3 * MS,
    }
    by_thread = np.bincount(data["row_thread"], data["row_ns"])
    assert by_thread.tolist() == [53 * MS, 10 * MS]


def test_large_page_loses_nothing() -> None:
    profile = large_profile(stacks=3_000, depth=25, samples=20_000)
    data = unpacked(page_of(profile))
    assert int(data["row_ns"].sum()) == int(profile.samples["ns"].sum())
    rows = rows_of(profile)
    tree, _ = build(rows)
    assert np.array_equal(data["depth"], tree.depth)
    assert [data["names"][i] for i in data["label"][1:]] == [
        rows.labels.names[i] for i in tree.label[1:]
    ]


def test_cut_frames_leave_their_time_and_its_kind_to_the_frame_above() -> None:
    profile = profile_of(
        Sample("main", 97 * MS),
        Sample("main;a;b", 2 * MS),
        Sample("main;a;c", MS, SampleClass.BLOCKED),
    )
    page = page_of(profile, ReportOptions(min_width_pct=5))
    assert folded(unpacked(page)) == {
        ("server (100);main", "on-CPU"): 99 * MS,
        ("server (100);main", "[blocked: other]"): MS,
    }
    assert "Left out: 4 frames, each under 5 % of all time;" in page.text


def test_a_page_too_large_for_a_browser_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiflame.agent.reports.pack.MAX_NODES", 4)
    profile = profile_of(*(Sample(f"f{i}", (i + 1) * MS) for i in range(4)))
    page = page_of(profile)
    assert folded(unpacked(page)) == {
        ("server (100)", "on-CPU"): 3 * MS,
        ("server (100);f2", "on-CPU"): 3 * MS,
        ("server (100);f3", "on-CPU"): 4 * MS,
    }
    assert "Left out: 2 frames, the narrowest" in page.text


def test_hottest_lines_come_first() -> None:
    samples = [Sample(f"main:{line}", line * MS) for line in (1, 4, 2, 3)]
    data = unpacked(page_of(profile_of(*samples)))
    label = data["names"].index("main")
    assert data["line_label"].tolist() == [label] * 3
    assert data["line"].tolist() == [4, 3, 2]
    assert data["line_ns"].tolist() == [4 * MS, 3 * MS, 2 * MS]
    assert data["files"][data["file"][label]] == "src/main.c"


def test_hostile_names_do_not_reach_the_markup() -> None:
    # GIVEN a page full of names that try to break out
    options = ReportOptions(title="</title><script>alert(1)</script>")
    page, plain = page_of(hostile_profile(), options), page_of(small_profile(), options)
    # WHEN its elements are listed THEN they are those of a harmless page
    harmless = {tag for tag, _ in plain.tags}
    assert {tag for tag, _ in page.tags} == harmless
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    # AND the names are there, as data
    names = unpacked(page)["names"]
    assert "<script>alert(1)</script>" in names
    assert "</script><img src=x onerror=alert(1)>" in names
    assert "<" not in raw(page, "facts")
    assert "<" not in raw(page, "data-time")


def test_no_script_may_run_but_the_pages_own() -> None:
    page = page_of(hostile_profile())
    (policy,) = (a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = (text for t, attributes, text in page.raw if t == tag and "id" not in attributes)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")


def test_page_needs_no_network() -> None:
    page = page_of(small_profile())
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.tags)
    text = FORMATS["html"].render(small_profile(), ReportOptions()).decode()
    assert re.findall(r"https?://", text) == []


def test_controls_have_names() -> None:
    page = page_of(small_profile())
    labels = {a["for"] for tag, a in page.tags if tag == "label" and "for" in a}
    fields = {a["id"] for tag, a in page.tags if tag == "input" and "aria-label" not in a}
    assert fields <= labels
    for tag, attributes in page.tags:
        if tag in ("nav", "dialog", "section"):
            assert {"aria-label", "aria-labelledby"} & set(attributes)


def test_page_says_what_was_lost_and_what_it_cost() -> None:
    text = page_of(small_profile()).text
    assert "3: samples whose stack did not fit; raise --stack-storage-size" in text
    assert "15.000 ms of CPU time (0.75 % of one CPU), 48.0 MiB of memory at its peak" in text
    assert "92.31 % of CPU time and 95.40 % of all time" in text
    assert "104, each weighing 10.000 ms" in text
    assert "testhost" in text


def test_empty_page_says_so() -> None:
    page = page_of(empty_profile())
    assert "Nothing was recorded" in page.text
    assert "Nothing was lost." in page.text
    assert folded(unpacked(page)) == {}


def test_few_samples_are_pointed_out() -> None:
    assert "Few samples on the CPU (1)" in page_of(profile_of(Sample("a", MS))).text
    assert "Few samples" not in page_of(small_profile()).text


def test_same_profile_same_page() -> None:
    render = FORMATS["html"].render
    assert render(small_profile(), ReportOptions()) == render(small_profile(), ReportOptions())


def run_model(data_page: Elements, expression: str) -> Any:
    """Evaluate `expression` in page/model.js, with the page's data as `data`."""
    assert NODE is not None
    model = files("aiflame.agent.reports") / "page" / "model.js"
    script = f"""
        const m = require({json.dumps(str(model))});
        const zlib = require("node:zlib");
        const input = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
        const bytes = zlib.inflateSync(Buffer.from(input.blob, "base64"));
        const data = m.unpack(input.index, new Uint8Array(bytes));
        const at = (view, wanted = null) => m.lay(m.weigh(m.plainTree(data), data, wanted), view);
        const list = (tree) => Array.from(tree.label, (label, i) =>
            [tree.depth[i], label < 0 ? "all" : data.names[label], tree.total[i], tree.off[i]])
            .filter((row) => row[2] > 0);
        console.log(JSON.stringify({expression}));
    """
    given = {
        "blob": raw(data_page, "data-time"),
        "index": json.loads(raw(data_page, "facts"))["sets"]["time"],
    }
    done = subprocess.run(
        [NODE, "-e", script], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def listed(tree: Tree) -> list[list[Any]]:
    return [
        [
            int(tree.depth[i]),
            tree.labels.names[tree.label[i]] if i else "all",
            int(tree.total_ns[i]),
            int(tree.off_ns[i]),
        ]
        for i in range(len(tree))
    ]


@needs_node
@pytest.mark.parametrize("view", TIME_VIEWS)
def test_page_draws_the_same_trees(view: View) -> None:
    page = page_of(small_profile())
    tree = build(rows_of(small_profile(), view))[0]
    assert run_model(page, f"list(at('{view.value}'))") == listed(tree)
    expression = f"list(m.lay(m.inverted(at('{view.value}'), 0), '{view.value}'))"
    assert run_model(page, expression) == listed(invert(tree))


def test_the_page_holds_all_frames_whatever_it_opens_with() -> None:
    for frames in Frames:
        page = page_of(python_profile(), ReportOptions(frames=frames, hide_importlib=True))
        settings = json.loads(raw(page, "facts"))
        assert (settings["frames"], settings["hide_imports"]) == (frames.value, True)
        assert settings["has_python"]
        names = unpacked(page)["names"]
        assert {"_PyEval_EvalFrameDefault", "Net.forward (train.py:12)", "at::matmul"} <= {*names}
        assert "_find_and_load (<frozen importlib._bootstrap>:1360)" in names
    assert not json.loads(raw(page_of(profile_of(Sample("a", MS))), "facts"))["has_python"]


@needs_node
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("frames", list(Frames))
def test_page_draws_the_chosen_frames(frames: Frames, hides: bool) -> None:
    profile = profile_of(
        Sample("_start;[i]eval;[p]f@/a.py:2;[p]g@/a.py:1;z", 3 * MS),
        Sample("_start;[i]glue;[p]f@/a.py:2;[p]g@/a.py:1;b;[k]read", 4 * MS, SampleClass.BLOCKED),
        Sample("_start;[i]glue;[i]eval;[p]_run@<frozen runpy>:1;[p]f@/a.py:2;a", 5 * MS, thread=1),
        Sample("_start;[i]eval;[p]_run@<frozen runpy>:1;[p]f@/a.py:2;[i]glue;b", 6 * MS),
        Sample("[i]eval", 7 * MS, SampleClass.PREEMPTED),
        Sample("recv", 8 * MS, thread=2, end=StopReason.NO_TABLE),
    )
    chosen = ReportOptions(frames=frames, hide_importlib=hides)
    tree = build(rows_for(profile, chosen))[0]
    choose = (
        "((c) => m.lay(m.weigh(c.tree, c.data, null), 'wall'))(m.selected(m.plainTree(data), data,"
        f" m.hiddenLabels(data, '{frames.value}', {json.dumps(hides)})))"
    )
    page = page_of(profile)
    assert run_model(page, f"list({choose})") == listed(tree)
    assert run_model(page, f"list(m.lay(m.inverted({choose}, 0), 'wall'))") == listed(invert(tree))


@needs_node
def test_page_shows_one_thread() -> None:
    profile = profile_of(Sample("a;b", 3 * MS), Sample("a;c", 5 * MS, thread=1))
    shown = run_model(page_of(profile), "list(at('wall', [false, true, false]))")
    assert shown == [
        [0, "all", 5 * MS, 0],
        [1, "server (100)", 5 * MS, 0],
        [2, "a", 5 * MS, 0],
        [3, "c", 5 * MS, 0],
    ]


@needs_node
def test_sandwich_counts_recursion_once() -> None:
    profile = profile_of(
        Sample("main;f;g;f;h", 3 * MS), Sample("other;f", 2 * MS), Sample("main;x", 7 * MS)
    )
    both = run_model(
        page_of(profile),
        "((s) => [list(m.lay(s.callers, 'wall')), list(m.lay(s.callees, 'wall'))])"
        "(m.sandwich(at('wall'), data.names.indexOf('f'), 0))",
    )
    callers, callees = ([(depth, name, ns // MS) for depth, name, ns, _ in t] for t in both)
    assert callers == [
        (0, "f", 5),
        (1, "main", 3),
        (2, "server (100)", 3),
        (1, "other", 2),
        (2, "server (100)", 2),
    ]
    assert callees == [(0, "f", 5), (1, "g", 3), (2, "f", 3), (3, "h", 3)]


@needs_node
def test_totals_and_matches_count_nested_frames_once() -> None:
    profile = profile_of(Sample("f;g;f", 3 * MS), Sample("g", 2 * MS), Sample("h", 5 * MS))
    totals = run_model(
        page_of(profile),
        "((t) => data.names.map((n, i) => [n, t.own[i], t.total[i]]))(m.totalsByLabel(at('wall')))",
    )
    assert [[name, own // MS, total // MS] for name, own, total in totals] == [
        ["f", 3, 3],
        ["g", 2, 5],
        ["h", 5, 5],
        ["server (100)", 0, 10],
    ]
    matches = "Uint8Array.from(data.names, (n) => /^[fg]$/.test(n) ? 1 : 0)"
    assert run_model(page_of(profile), f"m.matchedTime(at('wall'), {matches}, 0)") == 5 * MS


_CHARGED = """((t) => {
    const charged = m.chargedNodes(t, data.rank);
    const own = m.totalsByLabel(t, charged).own;
    const waits = m.waitsByLabel(t, data, null, charged);
    return data.names.map((n, i) => [n, own[i], [...(waits.get(i) || [])]]).filter((row) => row[1]);
})(at('wall'))"""


@needs_node
def test_waits_are_charged_as_in_the_tables_of_stats() -> None:
    wait = "main;[p]consume@/app/a.py:3;[p]get@/usr/lib/python3.11/queue.py:9;[i]eval;[k]futex_wait"
    profile = profile_of(
        Sample(f"{wait};[k]schedule;[k]__schedule", 30 * MS, SampleClass.BLOCKED),
        Sample("main;[p]consume@/app/a.py:3", 5 * MS),
        Sample("main;[p]consume@/app/a.py:3;gemm", 2 * MS, SampleClass.PREEMPTED),
        Sample("main;[k]clear_page", 7 * MS),
        Sample("[k]kthread;[k]worker_thread;[k]schedule", 3 * MS, SampleClass.BLOCKED),
    )
    assert run_model(page_of(profile), _CHARGED) == [
        ["clear_page", 7 * MS, []],
        ["consume (a.py:3)", 35 * MS, [["lock (futex_wait)", 30 * MS]]],
        ["gemm", 2 * MS, [["preempted", 2 * MS]]],
        ["worker_thread", 3 * MS, [["other", 3 * MS]]],
    ]


@needs_node
def test_narrow_merged_frames_are_counted_where_they_stop() -> None:
    profile = profile_of(Sample("a;wide", 99 * MS), Sample("b;narrow", MS))
    result = run_model(
        page_of(profile),
        "((t) => [t.unfollowed, list(m.lay(t, 'wall'))])(m.inverted(at('wall'), 0.05))",
    )
    unfollowed, shown = result
    assert unfollowed == 1
    assert [0, "all", 100 * MS, 0] in shown
    assert [1, "narrow", MS, 0] in shown
    assert [2, "b", MS, 0] not in shown


@needs_node
def test_zoom_path_leads_back_to_its_frame() -> None:
    page = page_of(deep_profile(50))
    assert run_model(page, "((t) => m.follow(t, m.pathTo(t, 40)))(at('wall'))") == 40


@needs_node
def test_page_writes_times_as_reports_do() -> None:
    page = page_of(empty_profile())
    figures = "[999, 1500, 12345678, 1234567890123].map(m.duration)"
    assert run_model(page, figures) == ["999 ns", "1.500 us", "12.346 ms", "1,234.568 s"]
