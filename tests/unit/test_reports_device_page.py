# SPDX-License-Identifier: Apache-2.0
"""The page's device samples: its data, and its own code for them under node."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from importlib.resources import files
from typing import Any

import pytest
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports import FORMATS, Frames, ReportOptions, View
from aiflame.agent.reports.base import ColorBy
from aiflame.agent.reports.device_rows import device_rows, device_samples, from_the_leaf
from aiflame.agent.reports.rows import Rows
from aiflame.agent.reports.stall_colors import mixed
from aiflame.agent.reports.tree import build
from aiflame.gpu.stalls import StallCategory
from device_profiles import (
    Launch,
    Place,
    Ran,
    device_profile_of,
    hostile_device_profile,
    small_device_profile,
)
from profiles import small_profile

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")

_GPU = ReportOptions(view=View.GPU)


def _page(profile: Profile, options: ReportOptions = _GPU) -> str:
    return FORMATS["html"].render(profile, options).decode()


def _block(page: str, identity: str) -> str:
    found = re.search(rf'<script type="[^"]+" id="{identity}">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return found[1]


def _settings(page: str) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(_block(page, "facts"))
    return settings


def _run(page: str, expression: str) -> Any:
    """Evaluate `expression` in the page's scripts, with its device samples as `data`."""
    assert NODE is not None
    folder = files("aiflame.agent.reports") / "page"
    names = ("model.js", "device.js", "listing.js")
    script = "\n".join((folder / name).read_text("utf-8") for name in names)
    script += f"""
        const zlib = require("node:zlib");
        const input = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
        const bytes = zlib.inflateSync(Buffer.from(input.blob, "base64"));
        const data = unpack(input.settings.sets.device, new Uint8Array(bytes));
        const shown = (frames) => {{
          const chosen = selected(plainTree(data), data, hiddenLabels(data, frames, false));
          return lay(weigh(chosen.tree, chosen.data, null), "gpu");
        }};
        const list = (tree) => Array.from(tree.label, (label, i) =>
          [tree.depth[i], label < 0 ? "all" : data.names[label], tree.total[i]]);
        const at = (tree, name) => tree.label.findIndex((l) => l >= 0 && data.names[l] === name);
        console.log(JSON.stringify({expression}));
    """
    given = {"blob": _block(page, "data-device"), "settings": _settings(page)}
    done = subprocess.run(
        [NODE, "-e", script], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def _listed(rows: Rows) -> list[list[Any]]:
    tree, _ = build(rows)
    return [
        [
            int(tree.depth[i]),
            tree.labels.names[tree.label[i]] if i else "all",
            int(tree.total_ns[i]),
        ]
        for i in range(len(tree))
    ]


@needs_node
@pytest.mark.parametrize("frames", list(Frames))
def test_the_page_draws_the_trees_of_the_other_formats(frames: Frames) -> None:
    profile = small_device_profile()
    samples = device_samples(profile)
    options = ReportOptions(view=View.GPU, frames=frames)
    page = _page(profile)
    rows = device_rows(profile, options, samples).rows
    assert _run(page, f"list(shown('{frames.value}'))") == _listed(rows)
    # AND merged from the leaf, the reason comes first
    options = ReportOptions(view=View.GPU, frames=frames, inverted=True)
    rows = from_the_leaf(device_rows(profile, options, samples).rows)
    turned = f"reasonFirst(shown('{frames.value}'), data)"
    assert _run(page, f"list(lay(inverted(lay({turned}, 'gpu'), 0), 'gpu'))") == _listed(rows)


@needs_node
def test_the_page_has_the_colours_of_the_svg() -> None:
    profile = device_profile_of(
        [Launch("main", "k", 1)], [Ran("k", 0, 75, "barrier"), Ran("k", 8, 25, "selected")]
    )
    page = _page(profile)
    settings = _settings(page)
    kinds = json.dumps(settings["stall_kinds"])
    faces = (
        f"{{stalls: {json.dumps(settings['stalls'])}, on: data.names.map(() => 'grey'),"
        f" kindOf: Array.from(data.category, (c) => {kinds}[c])}}"
    )
    names = ["main", "-", "k", "barrier"]
    fills = _run(
        page, f"((t) => {names}.map((n) => stallFace({faces}, t, at(t, n)).fill))(shown('both'))"
    )
    sync = StallCategory.SYNC.color
    neutral = settings["stalls"]["neutral"]
    assert fills == [neutral, "grey", mixed(sync, 0.75)[0], mixed(sync, 1)[0]]
    shares = [tenths / 10 for tenths in range(11)]
    colors = [category.color for category in StallCategory]
    made = _run(
        page,
        f"{json.dumps(colors)}.map((c) => {shares}.map((s) =>"
        f" mixed('{neutral}', c, 0.25 + 0.75 * s)))",
    )
    assert [[(one["fill"], one["ink"]) for one in row] for row in made] == [
        [mixed(color, share) for share in shares] for color in colors
    ]


@needs_node
def test_a_kernels_frame_tells_its_figures() -> None:
    page = _page(small_device_profile())
    facts = _run(page, "((t) => kernelFacts(data, t, at(t, 'matmul')))(shown('both'))")
    assert facts == [
        ["launches", "40 launches from 2 stacks"],
        ["launch stacks", "100.00 % shared"],
        [
            "reasons",
            "long_scoreboard 50.00 %, barrier 25.00 %, selected 15.00 %,"
            " math_pipe_throttle 10.00 %",
        ],
    ]
    facts = _run(page, "((t) => kernelFacts(data, t, at(t, 'scale_b<float, 4>')))(shown('both'))")
    assert facts[0] == ["launches", "40 launches from 1 stack"]
    assert facts[1] == ["launch stacks", "100.00 % exact"]
    assert facts[3] == ["whole name", "void scale_b<float, 4>(float*, int)"]
    assert _run(page, "((t) => kernelFacts(data, t, at(t, 'launch')))(shown('both'))") == []


@needs_node
def test_a_kernel_of_two_processes_is_told_apart_by_its_frame() -> None:
    profile = device_profile_of(
        [Launch("main", "k", 3), Launch("main", "k", 5, thread=2)],
        [Ran("k", 0, 10), Ran("k", 0, 20, process=1)],
    )
    calls = "kernelsAt(data, t, i).map((k) => data.kernel_calls[k])"
    found = _run(
        _page(profile),
        "((t) => Array.from(t.label.keys()).filter((i) => data.names[t.label[i]] === 'k')"
        f".map((i) => {calls}))(shown('both'))",
    )
    assert found == [[5], [3]]


@needs_node
def test_the_listing_has_every_instruction_with_its_samples() -> None:
    page = _page(small_device_profile())
    found = _run(
        page,
        "((t) => listings(data, kernelsAt(data, t, at(t, 'matmul'))).map((l) => [l.total,"
        " l.rows.map((r) => [r.offset, r.text, r.source, r.count,"
        " reasonWords(data, r.reasons, r.count)])]))(shown('both'))",
    )
    assert found == [
        [
            800,
            [
                [0x00, "MOV R1, c[0x0][0x28]", "kernels.cl:10", 0, ""],
                [0x10, "LDG.E R2, [R4.64]", "kernels.cl:12", 400, "long_scoreboard 100.00 %"],
                [
                    *(0x20, "FFMA R6, R2, R3, R6", "kernels.cl:13", 200),
                    "selected 60.00 %, math_pipe_throttle 40.00 %",
                ],
                [0x30, "BAR.SYNC 0x0", "kernels.cl:15", 200, "barrier 100.00 %"],
                [0x40, "EXIT", "", 0, ""],
            ],
        ]
    ]


@needs_node
def test_a_long_listing_keeps_what_is_near_samples() -> None:
    code = [Place(i * 16, f"op{i}") for i in range(5_000)]
    profile = device_profile_of([Launch("main", "k", 1)], [Ran("k", 16_000, 9)], {"k": code})
    found = _run(
        _page(profile),
        "((t) => shownRows(listings(data, kernelsAt(data, t, at(t, 'k')))[0].rows)"
        ".map((r) => r.text))(shown('both'))",
    )
    assert found == [f"op{i}" for i in range(997, 1004)]


def test_the_page_opens_as_asked_and_only_with_what_there_is() -> None:
    settings = _settings(_page(small_device_profile(), ReportOptions(color_by=ColorBy.FRAME)))
    assert (settings["view"], settings["color"]) == ("wall", "frame")
    settings = _settings(_page(small_device_profile()))
    assert (settings["view"], settings["color"]) == ("gpu", "stall")
    page = _page(small_profile())
    assert (_settings(page)["view"], list(_settings(page)["sets"])) == ("wall", ["time"])
    assert "No device API calls" not in page
    assert 'id="data-device"' not in page


def test_the_page_says_how_sure_the_stacks_are() -> None:
    page = _page(small_device_profile())
    assert "Attribution: 15.00 % exact, 80.00 % shared, 5.00 % unattributed, 7 lost." in page


def test_hostile_names_stay_data() -> None:
    page = _page(hostile_device_profile())
    assert page.count("<script") == 4
    assert "<" not in _block(page, "data-device")
    stream = zlib.decompress(base64.b64decode(_block(page, "data-device")))
    assert b"<script>alert(1)</script>" in stream
    assert len(stream) < 400_000
