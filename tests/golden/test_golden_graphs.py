# SPDX-License-Identifier: Apache-2.0
"""Whole flame graphs, compared with files that a reviewer can open.

After a wanted change: pytest tests/golden --update-golden, then look at the files.

Kept is what depends on the profile: the drawing of an SVG without its script, and of a page its
data and settings, unpacked, since a zlib of another make may pack the same data otherwise.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.model.profile import NS_PER_S, Profile, TimeRange
from aiflame.agent.reports import FORMATS, Frames, ReportOptions, View
from aiflame.agent.reports.base import ColorBy, Leaf
from aiflame.agent.reports.time_range import in_range
from device_profiles import small_device_profile, small_timed_profile
from profiles import (
    empty_profile,
    hostile_profile,
    python_profile,
    small_profile,
    timed_profile,
)

FOLDER = Path(__file__).parent / "graphs"


@dataclass(frozen=True)
class Case:
    file: str  # its suffix names the format
    profile: Callable[[], Profile]
    options: ReportOptions


_BY_FRAME = ReportOptions(View.GPU, color_by=ColorBy.FRAME, leaf=Leaf.INSTRUCTION)


def _part() -> Profile:
    """The last three seconds."""
    return in_range(timed_profile(), TimeRange(3 * NS_PER_S, 5_500_000_000))


CASES = [
    Case("small-wall.svg", small_profile, ReportOptions()),
    Case("small-cpu.svg", small_profile, ReportOptions(view=View.CPU)),
    Case("small-offcpu-inverted.svg", small_profile, ReportOptions(View.OFFCPU, inverted=True)),
    Case("small-threads.svg", small_profile, ReportOptions(per_thread=True, title="by thread")),
    Case("small-cut.svg", small_profile, ReportOptions(min_width_pct=20)),
    Case("hostile.svg", hostile_profile, ReportOptions(min_width_pct=0)),
    Case("python.svg", python_profile, ReportOptions()),
    Case("python-only.svg", python_profile, ReportOptions(View.CPU, frames=Frames.PYTHON)),
    Case("empty.svg", empty_profile, ReportOptions()),
    Case("small-wall.html", small_profile, ReportOptions()),
    Case("small-threads.html", small_profile, ReportOptions(View.CPU, True, True)),
    Case("empty.html", empty_profile, ReportOptions()),
    Case("timed.html", timed_profile, ReportOptions()),
    Case("range.html", _part, ReportOptions()),
    Case("range.svg", _part, ReportOptions()),
    Case("device.svg", small_device_profile, ReportOptions(View.GPU)),
    Case("device-frames.svg", small_device_profile, _BY_FRAME),
    Case("device-inverted.svg", small_device_profile, ReportOptions(View.GPU, inverted=True)),
    Case("device.html", small_device_profile, ReportOptions(View.GPU)),
    Case("gputime.svg", small_timed_profile, ReportOptions(View.GPU_TIME)),
    Case("gputime.html", small_timed_profile, ReportOptions(View.GPU_TIME)),
]


def drawing(case: Case) -> str:
    """The part of a report that is kept."""
    form = case.file.rpartition(".")[2]
    text = FORMATS[form].render(case.profile(), case.options).decode()
    if form == "svg":
        return re.sub(r"<script>.*</script>\n", "", text, flags=re.DOTALL)
    settings = json.loads(block(text, "facts"))
    found = {"settings": settings}
    for name, index in settings["sets"].items():
        found[name] = sections(block(text, f"data-{name}"), index)
    return json.dumps(found, indent=1) + "\n"


def sections(blob: str, index: dict[str, Any]) -> dict[str, Any]:
    stream = zlib.decompress(base64.b64decode(blob))
    return {
        section["name"]: stream[section["start"] : section["start"] + section["length"]].hex(" ")
        if "bytes" in section
        else json.loads(stream[section["start"] : section["start"] + section["length"]])
        for section in index["sections"]
    }


def block(page: str, identity: str) -> str:
    found = re.search(rf'<script type="[^"]+" id="{identity}">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_flame_graph_is_as_reviewed(case: Case, update_golden: bool) -> None:
    file = FOLDER / case.file.replace(".html", ".html.json")
    drawn = drawing(case)
    if update_golden:
        FOLDER.mkdir(exist_ok=True)
        file.write_text(drawn, "utf-8")
    assert drawn == file.read_text("utf-8")


def test_no_flame_graph_is_left_over() -> None:
    wanted = {case.file.replace(".html", ".html.json") for case in CASES}
    assert {file.name for file in FOLDER.iterdir()} == wanted
