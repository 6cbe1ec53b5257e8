# SPDX-License-Identifier: Apache-2.0
"""Folded text."""

from __future__ import annotations

import re

import pytest
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.reports import FORMATS, ReportOptions
from aiflame.agent.reports.base import TIME_VIEWS
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


def _lines(profile, **options) -> list[str]:
    return FORMATS["folded"].render(profile, ReportOptions(**options)).decode().splitlines()


def _sum_ns(lines: list[str]) -> int:
    return sum(int(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("small.folded", ReportOptions()),
        ("small.plain.folded", ReportOptions(plain=True)),
        ("small.thread.folded", ReportOptions(per_thread=True)),
    ],
)
def test_golden(file: str, options: ReportOptions) -> None:
    assert_golden(file, FORMATS["folded"].render(small_profile(), options))


def test_views_split_the_wall_time() -> None:
    profile = small_profile()
    wall, cpu, off_cpu = (_sum_ns(_lines(profile, view=view)) for view in TIME_VIEWS)
    assert wall == cpu + off_cpu == int(profile.samples["ns"].sum())
    assert cpu == 1_040 * MS


def test_stacks_that_differ_in_lines_only_become_one_line() -> None:
    lines = _lines(profile_of(Sample("main:1;work:2", 3), Sample("main:1;work:9", 4)))
    assert lines == ["server (100);main;work 7"]


def test_on_and_off_cpu_time_of_one_stack_stay_apart() -> None:
    stack = "main;[k]do_nanosleep"
    lines = _lines(profile_of(Sample(stack, 3), Sample(stack, 4, SampleClass.BLOCKED)))
    assert lines == [
        "server (100);main;do_nanosleep_[k] 3",
        "server (100);main;do_nanosleep_[k];[blocked: sleep] 4",
    ]


def test_no_time_is_no_line() -> None:
    assert _lines(profile_of(Sample("main", 0))) == []
    assert FORMATS["folded"].render(empty_profile(), ReportOptions()) == b""


def test_hostile_names_make_neither_frames_nor_lines() -> None:
    lines = _lines(hostile_profile())
    assert len(lines) == len(HOSTILE_NAMES)
    for line in lines:
        assert re.fullmatch(r"[^;]+;main;[^;]+;leaf \d+", line)
    assert "semi:colon (305);main;semi:colon;leaf 6000000" in lines


def test_order_does_not_depend_on_the_order_of_samples() -> None:
    samples = [Sample(f"main;f{i}", i + 1) for i in range(20)]
    assert _lines(profile_of(*samples)) == _lines(profile_of(*reversed(samples)))


def test_deep_stack() -> None:
    (line,) = _lines(deep_profile())
    assert line.count(";") == 10_000
