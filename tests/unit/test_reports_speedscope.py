# SPDX-License-Identifier: Apache-2.0
"""speedscope files against the essentials of the published schema, and what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.reports import FORMATS, ReportOptions, View
from goldens import assert_golden
from profiles import (
    HOSTILE_NAMES,
    MS,
    Sample,
    deep_profile,
    empty_profile,
    hostile_profile,
    profile_of,
    small_profile,
)


def _assert_keys(
    item: dict[str, Any], required: dict[str, type], optional: dict[str, type]
) -> None:
    assert required.keys() <= item.keys() <= required.keys() | optional.keys()
    for key, value in item.items():
        assert type(value) is (required | optional)[key], key


def assert_valid(document: dict[str, Any]) -> None:
    """https://www.speedscope.app/file-format-schema.json, FileFormat.File, sampled profiles.

    Stricter than the schema: no keys beyond it, and numbers that index something do.
    """
    _assert_keys(
        document,
        {"$schema": str, "profiles": list, "shared": dict},
        {"activeProfileIndex": int, "exporter": str, "name": str},
    )
    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert 0 <= document["activeProfileIndex"] < len(document["profiles"])
    _assert_keys(document["shared"], {"frames": list}, {})
    frames = document["shared"]["frames"]
    for frame in frames:
        _assert_keys(frame, {"name": str}, {"file": str, "line": int, "col": int})
    for profile in document["profiles"]:
        _assert_keys(
            profile,
            {
                "type": str,
                "name": str,
                "unit": str,
                "startValue": int,
                "endValue": int,
                "samples": list,
                "weights": list,
            },
            {},
        )
        assert profile["type"] == "sampled"
        assert profile["unit"] == "nanoseconds"
        assert profile["endValue"] - profile["startValue"] == sum(profile["weights"])
        assert len(profile["samples"]) == len(profile["weights"])
        for sample in profile["samples"]:
            assert all(type(i) is int and 0 <= i < len(frames) for i in sample)


def _document(profile: Profile, **options: Any) -> dict[str, Any]:
    document = json.loads(FORMATS["speedscope"].render(profile, ReportOptions(**options)))
    assert_valid(document)
    return document


def _stacks(document: dict[str, Any], number: int = 0) -> dict[str, int]:
    names = [frame["name"] for frame in document["shared"]["frames"]]
    profile = document["profiles"][number]
    return {
        ";".join(names[i] for i in sample): weight
        for sample, weight in zip(profile["samples"], profile["weights"], strict=True)
    }


def test_golden() -> None:
    data = FORMATS["speedscope"].render(small_profile(), ReportOptions())
    assert_valid(json.loads(data))
    assert_golden("small.speedscope.json", data)


def test_one_profile_a_process_the_busiest_first() -> None:
    document = _document(small_profile())
    assert [p["name"] for p in document["profiles"]] == ["server (100)", "client (200)"]
    assert document["exporter"] == "aiflame@0.1.0"
    assert document["name"] == "server (pid 100): wall time"


def test_one_profile_a_thread_when_asked_for() -> None:
    document = _document(small_profile(), per_thread=True)
    assert [p["name"] for p in document["profiles"]] == [
        "server (100) / server (100)",
        "server (100) / worker (101)",
        "client (200) / client (200)",
    ]
    whole = sum(p["endValue"] for p in document["profiles"])
    assert whole == int(small_profile().samples["ns"].sum())


@pytest.mark.parametrize("view", View)
def test_views(view: View) -> None:
    profile = small_profile()
    document = _document(profile, view=view)
    counted = profile.samples["ns"][view.selects(profile.samples["klass"])]
    assert sum(p["endValue"] for p in document["profiles"]) == int(counted.sum())


def test_title() -> None:
    assert _document(small_profile(), title="Nightly <run>")["name"] == "Nightly <run>"


def test_frames_merge_by_function_and_keep_a_line_only_where_there_is_one() -> None:
    profile = profile_of(Sample("main:7;work:2", 3), Sample("main:7;work:9", 4))
    document = _document(profile)
    assert document["shared"]["frames"] == [
        {"name": "main", "file": "src/main.c", "line": 7},
        {"name": "work", "file": "src/work.c"},
    ]
    assert _stacks(document) == {"main;work": 7}


def test_waits_name_their_cause() -> None:
    profile = profile_of(Sample("main;[k]ep_poll", MS, SampleClass.BLOCKED))
    assert _stacks(_document(profile)) == {"main;ep_poll;[blocked: poll]": MS}


def test_nothing_recorded_still_opens() -> None:
    document = _document(empty_profile())
    assert [p["name"] for p in document["profiles"]] == ["no samples"]
    assert document["profiles"][0]["samples"] == []


def test_hostile_names() -> None:
    document = _document(hostile_profile())
    names = {frame["name"] for frame in document["shared"]["frames"]}
    assert len(document["profiles"]) == len(HOSTILE_NAMES)
    assert {"<script>alert(1)</script>", "semi;colon", "__proto__", "[unnamed]"} <= names
    assert not any(char in name for name in names for char in "\n\r\t\x00\u202e")
    assert max(map(len, names)) < 5_000


def test_deep_stack() -> None:
    document = _document(deep_profile())
    assert len(document["profiles"][0]["samples"][0]) == 10_000
