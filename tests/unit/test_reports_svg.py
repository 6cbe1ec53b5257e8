# SPDX-License-Identifier: Apache-2.0
"""The SVG flame graph: valid XML, honest geometry, hostile names, colours that can be read."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from aiflame.agent.model.profile import Loss, Profile, SampleClass
from aiflame.agent.reports import FORMATS, ReportOptions, View, palette
from aiflame.agent.reports.palette import Category
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

NS = "{http://www.w3.org/2000/svg}"


def parsed(profile: Profile, options: ReportOptions | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(FORMATS["svg"].render(profile, options or ReportOptions()))  # noqa: S314 - our own output


def frames(root: ElementTree.Element) -> dict[str, list[dict[str, float]]]:
    """The rectangles of each frame, by the text of its tooltip."""
    group = root.find(f"{NS}g[@id='frames']")
    assert group is not None
    return {
        frame.findtext(f"{NS}title", ""): [
            {key: float(rect.attrib[key]) for key in ("x", "y", "width")}
            for rect in frame.findall(f"{NS}rect")
        ]
        for frame in group
    }


def words(root: ElementTree.Element) -> str:
    return "\n".join("".join(e.itertext()) for e in root.iter(f"{NS}text"))


def test_tooltips_tell_time_share_and_off_cpu_part() -> None:
    profile = profile_of(
        Sample("main;work", 3_000 * MS), Sample("main;nap", 1_000 * MS, SampleClass.BLOCKED)
    )
    assert list(frames(parsed(profile))) == [
        "all (4.000 s, 100.00 %, 25.00 % off-CPU)",
        "server (100) (4.000 s, 100.00 %, 25.00 % off-CPU)",
        "main (4.000 s, 100.00 %, 25.00 % off-CPU)",
        "nap (1.000 s, 25.00 %, 100.00 % off-CPU)",
        "[blocked: other] (1.000 s, 25.00 %, 100.00 % off-CPU)",
        "work (3.000 s, 75.00 %)",
    ]


def test_widths_are_shares_and_the_off_cpu_part_is_a_box_of_its_own() -> None:
    profile = profile_of(
        Sample("main;work", 3_000 * MS), Sample("main;nap", 1_000 * MS, SampleClass.BLOCKED)
    )
    boxes = frames(parsed(profile))
    whole, off = boxes["main (4.000 s, 100.00 %, 25.00 % off-CPU)"]
    assert (whole["x"], whole["width"]) == (10, 1180)
    assert (off["x"], off["width"]) == (10 + 885, 295)
    (work,) = boxes["work (3.000 s, 75.00 %)"]
    assert (work["x"], work["width"]) == (10 + 295, 885)


@pytest.mark.parametrize(("inverted", "grows"), [(False, -16), (True, 16)])
def test_flames_rise_and_inverted_ones_hang(inverted: bool, grows: int) -> None:
    boxes = frames(parsed(profile_of(Sample("a;b;c", MS)), ReportOptions(inverted=inverted)))
    rows = [rects[0]["y"] for rects in boxes.values()]
    assert [below - above for above, below in pairwise(rows)] == [grows] * (len(rows) - 1)


def test_frames_of_a_row_do_not_overlap() -> None:
    rows: dict[float, list[tuple[float, float]]] = {}
    for rects in frames(parsed(small_profile())).values():
        rows.setdefault(rects[0]["y"], []).append((rects[0]["x"], rects[0]["width"]))
    for row in rows.values():
        for (x, width), (following, _) in pairwise(sorted(row)):
            assert x + width <= following + 0.001


def test_narrow_frames_are_left_out_and_counted() -> None:
    profile = profile_of(Sample("wide", 9_999 * MS, count=500), Sample("narrow", MS))
    drawn = parsed(profile)
    assert not any("narrow" in tip for tip in frames(drawn))
    assert "Left out: 1 frame, each under 0.1 % of the whole; the frames they belong to" in words(
        drawn
    )
    everything = parsed(profile, ReportOptions(min_width_pct=0))
    assert any("narrow" in tip for tip in frames(everything))
    assert "Left out" not in words(everything)


def test_hostile_names_are_text() -> None:
    root = parsed(hostile_profile(), ReportOptions(min_width_pct=0))
    tips = "\n".join(frames(root))
    for name in ("<script>alert(1)</script>", "]]>", "a\"b'c`d&amp;e&f", "semi;colon", "__proto__"):
        assert name in HOSTILE_NAMES
        assert f"{name} (" in tips
    assert "x... (10000 characters) (" in tips
    assert "new\ufffdline\ufffd\ufffdtab\ufffdnul" in tips
    assert len(list(root.iter(f"{NS}script"))) == 1
    allowed = {"svg", "style", "rect", "text", "title", "g", "script"}
    assert {element.tag.removeprefix(NS) for element in root.iter()} == allowed


def test_title_is_escaped_and_can_be_chosen() -> None:
    root = parsed(small_profile(), ReportOptions(title='<b>"mine"&'))
    assert root.find(f".//{NS}text[@class='title']").text == '<b>"mine"&'  # type: ignore[union-attr]


def test_a_long_title_is_cut_between_characters() -> None:
    root = parsed(small_profile(), ReportOptions(title="<" * 200))
    assert root.find(f".//{NS}text[@class='title']").text == "<" * 94 + ".."  # type: ignore[union-attr]


def test_empty_profile_gives_a_flame_graph_that_says_so() -> None:
    root = parsed(empty_profile())
    assert list(frames(root)) == ["all (0 ns, 0.00 %)"]
    assert "Nothing was recorded" in words(root)


def test_losses_and_own_cost_are_under_the_flame_graph() -> None:
    said = words(parsed(small_profile()))
    assert "Lost stacks_full: 3" in said
    assert "Complete stacks: 92.31 % of CPU time and 95.40 % of all time." in said
    assert "The recorder itself took 0.75 % of one CPU." in said


def test_view_is_named_in_the_subtitle() -> None:
    said = words(parsed(small_profile(), ReportOptions(view=View.CPU)))
    assert "100 % = 1.040 s of CPU time summed over 3 threads, recorded in 2.000 s" in said
    assert "blocked" not in said


def test_ten_thousand_frames_deep_is_still_one_flame_graph() -> None:
    assert len(frames(parsed(deep_profile(10_000)))) == 10_002


def test_same_profile_same_bytes() -> None:
    render = FORMATS["svg"].render
    assert render(small_profile(), ReportOptions()) == render(small_profile(), ReportOptions())


def test_large_profile_stays_small_by_default() -> None:
    profile = large_profile(stacks=20_000, samples=40_000)
    assert len(FORMATS["svg"].render(profile, ReportOptions())) < 2_000_000


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.1)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_can_be_read_on_every_colour() -> None:
    on_cpu, off_cpu = palette.tables()
    for fill in [palette.HIT, *(fill for row in (*on_cpu, *off_cpu) for fill in row)]:
        light, dark = luminance(fill), luminance(palette.INK)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, fill


def test_long_sentences_below_the_frames_are_whole() -> None:
    meaning = " ".join(f"word{i}" for i in range(60))
    root = parsed(profile_of(Sample("main", 5 * MS), losses=(Loss("ring_full", 7, meaning),)))
    notes = [text for text in root.iter(f"{NS}text") if text.get("class") == "note"]
    lines = [text.text or "" for text in notes]
    assert f"Lost ring_full: 7 ({meaning})" in " ".join(lines)
    assert max(map(len, lines)) <= 160 and ".." not in "".join(lines)
    # Each has a line of its own within the drawing.
    heights = [float(text.attrib["y"]) for text in notes if "word" in (text.text or "")]
    assert len({*heights}) == len(heights) > 2 and max(heights) < float(root.attrib["height"])


def test_the_legend_has_generated_code_where_there_is_some() -> None:
    profile = profile_of(Sample("main;compiled", 5 * MS))
    compiled = [replace(f, binary=None) if f.name == "compiled" else f for f in profile.functions]
    for functions, is_listed in ((compiled, True), (profile.functions, False)):
        svg = FORMATS["svg"].render(replace(profile, functions=tuple(functions)), ReportOptions())
        assert (b">generated code<" in svg) == is_listed


def test_hues_are_the_known_ones() -> None:
    for shade in range(palette.SHADES):
        colours = {
            category: [int(palette.fill(category, shade, False)[i : i + 2], 16) for i in (1, 3, 5)]
            for category in Category
        }
        red, green, blue = colours[Category.PYTHON]
        assert 245 <= red <= 255
        assert 138 <= green == blue <= 178
        red, green, blue = colours[Category.KERNEL]
        assert red > 200 > green > 110 > blue
        red, green, blue = colours[Category.CPP]
        assert red > 200 and green > 180 > blue
        red, green, blue = colours[Category.NATIVE]
        assert red > 220 > 160 > green > 60
        red, green, blue = colours[Category.GENERATED]
        assert green > red > blue and green > 190
        red, green, blue = colours[Category.BLOCKED]
        assert blue > 220 > green > red


def test_colour_depends_on_the_name_alone() -> None:
    first = FORMATS["svg"].render(profile_of(Sample("main;f", MS)), ReportOptions()).decode()
    second = FORMATS["svg"].render(profile_of(Sample("a;f", MS)), ReportOptions()).decode()
    pattern = re.compile(r'<title>f \(.*?fill="(#[0-9a-f]{6})"')
    assert pattern.findall(first) == pattern.findall(second) != []
