# SPDX-License-Identifier: Apache-2.0
"""Differential flame graphs: widths of new, colours and words by how shares have changed."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from aiflame.agent.model.profile import Difference, Profile
from aiflame.agent.reports import FORMATS, ReportOptions
from aiflame.agent.reports.difference import GREW, LEAST_CHANGE, SHRANK
from aiflame.agent.reports.stall_colors import NEUTRAL
from profiles import HOSTILE_NAMES, MS, Sample, profile_of

_BASE, _NEW = 0, 1


def _difference(*samples: Sample, base: str = "v1", new: str = "v2") -> Profile:
    """Returns a profile whose first thread is base, and its second new."""
    profile = profile_of(*samples)
    is_new = np.array([i == _NEW for i in range(len(profile.threads))])
    return replace(profile, difference=Difference(base, new, is_new))


def _small() -> Profile:
    """Base has 100 ms, new 400 ms; `load` grew from 30 % to 50 %, and `old` is gone."""
    return _difference(
        Sample("main;step", 60 * MS, thread=_BASE, count=6),
        Sample("main;load", 30 * MS, thread=_BASE, count=3),
        Sample("main;old;leaf", 10 * MS, thread=_BASE, count=1),
        Sample("main;step", 200 * MS, thread=_NEW, count=20),
        Sample("main;load", 160 * MS, thread=_NEW, count=16),
        Sample("main;load;parse", 40 * MS, thread=_NEW, count=4),
    )


def _rendered(form: str, profile: Profile) -> str:
    return FORMATS[form].render(profile, ReportOptions()).decode()


def _frames(svg: str) -> dict[str, tuple[str, str, float]]:
    """Returns tooltip, colour and width by name of frame."""
    found = {}
    for title, width, fill in re.findall(
        r'<g><title>(.*?)</title><rect x="[\d.]+" y="\d+" width="([\d.]+)" height="15"'
        r' fill="(#\w+)"/>',
        svg,
    ):
        found[title.partition(" (")[0]] = (title, fill, float(width))
    return found


def test_folded_text_has_both_sides_as_difffolded_normalizes_them() -> None:
    assert _rendered("folded", _small()).splitlines() == [
        "server (100);main;load 120000000 160000000",
        "server (100);main;load;parse 0 40000000",
        "server (100);main;old;leaf 40000000 0",
        "server (100);main;step 240000000 200000000",
    ]


def test_a_drawing_has_widths_of_new_and_colours_of_the_change() -> None:
    frames = _frames(_rendered("svg", _small()))
    titles = {name: title.partition(" (")[2] for name, (title, _, _) in frames.items()}
    assert titles["load"] == "200.000 ms, 50.00 %; base 30.00 %, +20.00 points)"
    assert titles["step"] == "200.000 ms, 50.00 %; base 60.00 %, -10.00 points)"
    assert titles["parse"] == "40.000 ms, 10.00 %; base 0.00 %, +10.00 points)"
    assert titles["main"] == "400.000 ms, 100.00 %; base 100.00 %, +0.00 points)"
    # THEN the largest change has the strongest colour, none has none, and what is gone is not there
    fills = {name: fill for name, (_, fill, _) in frames.items()}
    assert (fills["load"], fills["main"]) == (GREW, NEUTRAL)
    assert fills["parse"] not in (GREW, NEUTRAL)
    assert fills["step"] not in (SHRANK, NEUTRAL)
    assert "old" not in frames
    widths = {name: width for name, (_, _, width) in frames.items()}
    assert widths["load"] == widths["step"] == pytest.approx(widths["main"] / 2)
    assert widths["parse"] == pytest.approx(widths["main"] / 10)


def test_a_drawing_says_how_to_read_it() -> None:
    svg = _rendered("svg", _small())
    root = ElementTree.fromstring(svg)  # noqa: S314 - our own output
    texts = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    words = " ".join(texts)
    assert "100 % = 400.000 ms of CPU time of new (v2), of base (v1) 100.000 ms" in words
    assert "Red frames have a larger share than in base, blue frames a smaller one." in words
    assert "Frames that only base has, 10.00 % of it, are not shown" in words
    assert "Left out" not in words
    assert {"-20.00 points", "+0.00 points", "+20.00 points"} <= set(texts)


def test_sides_that_are_alike_look_alike() -> None:
    # GIVEN a change of a tenth of a point
    share = int(1_000 * LEAST_CHANGE / 10)
    profile = _difference(
        Sample("main;a", 500 * MS, thread=_BASE),
        Sample("main;b", 500 * MS, thread=_BASE),
        Sample("main;a", (500 + share) * MS, thread=_NEW),
        Sample("main;b", (500 - share) * MS, thread=_NEW),
    )
    svg = _rendered("svg", profile)
    # THEN its colour is a tenth of the strongest
    levels = [int(_frames(svg)["a"][1][at : at + 2], 16) for at in (1, 3, 5)]
    neutral = [int(NEUTRAL[at : at + 2], 16) for at in (1, 3, 5)]
    assert max(abs(one - other) for one, other in zip(levels, neutral, strict=True)) < 20
    assert f"+{100 * LEAST_CHANGE:.2f} points" in svg


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_and_words_break_nothing(name: str) -> None:
    profile = _difference(
        Sample("", 10 * MS, thread=_BASE, frames=("main", name)),
        Sample("", 30 * MS, thread=_NEW, frames=("main", name)),
        base=name,
        new=f"{name}</script>",
    )
    ElementTree.fromstring(_rendered("svg", profile))  # noqa: S314 - our own output
    assert _rendered("html", profile).count("<script") == 3
    (line,) = _rendered("folded", profile).splitlines()
    assert line.endswith(" 30000000 30000000")


def test_a_side_without_anything_is_drawn() -> None:
    only_new = _difference(Sample("main;a", 10 * MS, thread=_NEW))
    assert "base 0.00 %, +100.00 points" in _rendered("svg", only_new)
    only_base = _difference(Sample("main;a", 10 * MS, thread=_BASE))
    assert "Frames that only base has, 100.00 % of it" in _rendered("svg", only_base)
    assert _rendered("folded", only_base) == "server (100);main;a 0 0\n"
    for profile in (only_new, only_base):
        assert _rendered("html", profile)
