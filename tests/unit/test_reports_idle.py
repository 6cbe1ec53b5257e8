# SPDX-License-Identifier: Apache-2.0
"""Threads that slept throughout: who is one, and what becomes of their time."""

from __future__ import annotations

import pytest
from aiflame.agent.model.profile import Profile, SampleClass
from aiflame.agent.reports import FORMATS, ReportOptions, View
from aiflame.agent.reports.idle import idle_threads
from aiflame.agent.reports.stats import tables
from aiflame.agent.reports.table import Table
from profiles import MS, Sample, empty_profile, profile_of

_WAIT = "main;[p]feed@/app/a.py:3;[k]futex_wait;[k]__schedule"
_SERVES = "[p]_serve@/usr/lib/python3.11/multiprocessing/resource_sharer.py:138;[p]accept"
_ASKS = "[p]_recv@/usr/lib/python3.11/multiprocessing/connection.py:395;[k]unix_read"


def _profile(asleep_ms: int, awake_ms: int, queued_ms: int = 0) -> Profile:
    """One thread that works, and one that waits: for something, and then for a CPU."""
    return profile_of(
        Sample("main;work", 2_000 * MS),
        Sample(_WAIT, asleep_ms * MS, SampleClass.BLOCKED, thread=1),
        Sample(_WAIT, queued_ms // 2 * MS, SampleClass.WAITING_TO_RUN, thread=1),
        Sample(_WAIT, queued_ms // 2 * MS, SampleClass.PREEMPTED, thread=1),
        Sample("main;[p]feed@/app/a.py:4", awake_ms * MS, thread=1),
    )


def _beside_work(*waits: str) -> Profile:
    """One thread that works, and one that waits 50 ms in each of some stacks."""
    return profile_of(
        Sample("main;work", 100 * MS),
        *(Sample(wait, 50 * MS, SampleClass.BLOCKED, thread=1) for wait in waits),
    )


@pytest.mark.parametrize(
    ("profile", "is_idle"),
    [
        (_profile(1_910, 90), True),
        (_profile(1_890, 110), False),
        # On a busy machine it waits for a CPU whenever it wakes up.
        (_profile(1_700, 80, queued_ms=220), True),
        (_profile(1_700, 100, queued_ms=200), False),
        # It would have worked, had there been a CPU for it.
        (_profile(500, 0, queued_ms=1_500), False),
        # It came late, and slept from then on.
        (_profile(900, 0), False),
        # Several waits in one line, and waits in two lines: it did something in between.
        (_beside_work(_WAIT, f"{_WAIT};[k]finish"), True),
        (_beside_work(_WAIT, "main;other;[k]poll"), False),
        # Of Python's own library all is one location: such threads serve others.
        (_beside_work(_SERVES + "@/usr/lib/python3.11/socket.py:294", _ASKS), True),
        (_beside_work(_SERVES + "@/usr/lib/python3.11/socket.py:294", f"main;{_ASKS}"), False),
    ],
)
def test_who_slept_at_one_location_throughout_is_idle(profile: Profile, is_idle: bool) -> None:
    assert idle_threads(profile).tolist() == [False, is_idle, False]


@pytest.mark.parametrize(
    "profile", [profile_of(Sample("", 100 * MS, SampleClass.BLOCKED)), empty_profile()]
)
def test_where_nobody_works_nobody_is_left_out(profile: Profile) -> None:
    assert not idle_threads(profile).any()


def test_an_svg_of_wall_time_is_of_those_who_work_and_says_so() -> None:
    profile = _profile(1_990, 10)

    def drawn(options: ReportOptions) -> str:
        return FORMATS["svg"].render(profile, options).decode()

    folded = drawn(ReportOptions())
    assert "100 % = 2.000 s of wall time summed over 1 thread" in folded
    assert "Left out: [idle: 1 thread], 2.000 s, asleep at one location (--idle: with)." in folded
    assert "feed" not in folded
    opened = drawn(ReportOptions(is_idle_shown=True))
    assert "100 % = 4.000 s of wall time summed over 2 threads" in opened
    assert "idle:" not in opened
    # Of CPU and off-CPU time nothing is left out.
    assert "feed" in drawn(ReportOptions(view=View.CPU))
    assert "feed" in drawn(ReportOptions(view=View.OFFCPU))


def test_tables_of_functions_and_lines_are_of_those_who_work_and_say_so() -> None:
    def shown(profile: Profile, view: View, **options: bool) -> dict[str, Table]:
        return {table.title: table for table in tables(profile, view, 10, **options)}

    whole = "100 % = 4.000 s of wall time, summed over threads"
    awake = "100 % = 2.000 s of wall time, summed over threads, without 2.000 s of 1 idle thread"
    found = shown(_profile(1_990, 10), View.WALL)
    functions = found["Top functions, wall time"]
    assert functions.whole.startswith(f"{awake} (--idle: with); self")
    assert [row[4] for row in functions.rows] == ["work", "main"]
    assert found["Top Python lines, wall time"].rows == ()
    # Other tables are of all threads.
    assert found["How stacks ended"].whole.startswith(f"{whole}, with 2.000 s of 1 idle thread")
    assert "worker (101)" in {row[6] for row in found["Time by thread, ms"].rows}
    opened = shown(_profile(1_990, 10), View.WALL, is_idle_shown=True)
    assert opened["Top functions, wall time"].whole.startswith(f"{whole}; self")
    assert "feed" in [row[4] for row in opened["Top Python lines, wall time"].rows]
    # Where none is idle, and of what no flame graph leaves anything out.
    busy = shown(_profile(1_000, 1_000), View.WALL)
    assert busy["Top functions, wall time"].whole.startswith(f"{whole}; self")
    of_cpu = shown(_profile(1_990, 10), View.CPU)
    assert "idle" not in of_cpu["Top functions, CPU time"].whole
