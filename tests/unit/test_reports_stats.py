# SPDX-License-Identifier: Apache-2.0
"""The tables of `aiflame stats`, and how they are printed."""

from __future__ import annotations

import argparse
import io
import sys
from dataclasses import replace

import numpy as np
import pytest
from aiflame.agent.commands import stats as verb
from aiflame.agent.model.profile import WAIT_DTYPE, Loss, Profile, SampleClass, StopReason, Thread
from aiflame.agent.reports.base import TIME_VIEWS, View
from aiflame.agent.reports.facts import missing_line, warnings
from aiflame.agent.reports.stats import tables
from aiflame.agent.reports.table import Table
from goldens import assert_golden
from profiles import (
    MS,
    Sample,
    deep_profile,
    empty_profile,
    hostile_profile,
    profile_of,
    small_profile,
)
from rich.cells import cell_len


def _table(profile: Profile, title: str, view: View = View.WALL, limit: int = 10) -> Table:
    (found,) = (t for t in tables(profile, view, limit) if t.title.startswith(title))
    return found


def _with_waits(profile: Profile, *waits: tuple[int, int, int, int, int]) -> Profile:
    return replace(profile, waits=np.array(list(waits), dtype=WAIT_DTYPE))


def _printed(
    profile: Profile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
) -> str:
    monkeypatch.setattr(verb, "read_recording", lambda path: profile)
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    assert verb.run(parser.parse_args(["run.aiflame", *arguments])) == 0
    return capsys.readouterr().out


def test_self_is_the_leafs_and_recursion_counts_once() -> None:
    profile = profile_of(Sample("main;walk;walk;walk", 30 * MS), Sample("main;walk", 10 * MS))
    assert _table(profile, "Top functions").rows == (
        ("40.00", "100.0 %", "40.00", "100.0 %", "walk", "server"),
        ("0.00", "0.0 %", "40.00", "100.0 %", "main", "server"),
    )


def test_views_count_their_own_time() -> None:
    profile = profile_of(Sample("run", 30 * MS), Sample("wait", 10 * MS, SampleClass.BLOCKED))
    names = {
        view: [row[4] for row in _table(profile, "Top functions", view).rows] for view in TIME_VIEWS
    }
    assert names == {View.WALL: ["run", "wait"], View.CPU: ["run"], View.OFFCPU: ["wait"]}


def test_the_cpu_view_has_no_tables_of_waits() -> None:
    titles = [table.title for table in tables(small_profile(), View.CPU, 10)]
    assert not any(word in title for title in titles for word in ("Off-CPU", "Blocked", "waits"))


def test_limit_says_what_it_leaves_out() -> None:
    table = _table(small_profile(), "Top functions", limit=2)
    assert (len(table.rows), table.left_out) == (2, 11)


def test_threads_show_exact_and_sampled_time_apart() -> None:
    rows = _table(small_profile(), "Time by thread").rows
    assert rows[0] == (
        "2,000.00",
        "40.00",
        "420.00",
        "400.00",
        "0.00",
        "0.00",
        "server (100)",
        "server (100)",
    )
    assert rows[1][:6] == ("2,000.00", "30.00", "500.00", "250.00", "20.00", "30.00")


def test_causes_are_of_blocked_time_only() -> None:
    rows = _table(small_profile(), "Blocked time by cause").rows
    assert rows == (("400.00", "61.5 %", "40", "poll"), ("250.00", "38.5 %", "5", "lock"))


def test_longest_waits_come_first_and_name_their_caller() -> None:
    # GIVEN two waits of known stacks: 2 (poll) and 4 (lock)
    profile = _with_waits(small_profile(), (2, 0, 5 * MS, 100 * MS, 1 * MS), (4, 1, 0, 250 * MS, 0))
    # WHEN one row is asked for, THEN it is the longer one
    table = _table(profile, "Longest waits", limit=1)
    assert table.rows == (("250.00", "0.00", "0.00", "lock", "worker (101)", "pthread_mutex_lock"),)
    assert table.left_out == 1


def test_modules_that_cut_stacks_are_weighed_by_time() -> None:
    profile = profile_of(
        Sample("work", 30 * MS, end=StopReason.NO_FRAME_POINTER),
        Sample("", 10 * MS, end=StopReason.LOST),
        Sample("[k]kthread", 60 * MS, end=StopReason.KERNEL_ONLY),
    )
    assert _table(profile, "Modules").rows == (
        ("30.00", "75.0 %", "server"),
        ("10.00", "25.0 %", "[no stack]"),
    )
    ends = {row[3]: row[1] for row in _table(profile, "How stacks ended").rows}
    assert ends == {"no frame pointer": "30.0 %", "lost": "10.0 %", "kernel only": "60.0 %"}


@pytest.mark.parametrize("make", [empty_profile, hostile_profile, deep_profile, small_profile])
@pytest.mark.parametrize("view", [view.value for view in View])
def test_every_line_fits_and_is_plain(make, view, monkeypatch, capsys) -> None:
    out = _printed(make(), monkeypatch, capsys, "--view", view)
    assert max(map(cell_len, out.splitlines())) <= 100
    assert "\x1b" not in out


def test_golden(monkeypatch, capsys) -> None:
    profile = _with_waits(small_profile(), (4, 1, 0, 250 * MS, 0))
    assert_golden("small.stats.txt", _printed(profile, monkeypatch, capsys).encode())


def test_names_are_not_markup(monkeypatch, capsys) -> None:
    profile = profile_of(Sample("", MS, frames=("[bold]x[/bold]", ":smile:")))
    out = _printed(profile, monkeypatch, capsys)
    assert "[bold]x[/bold]" in out
    assert ":smile:" in out


def test_sentences_wrap_instead_of_being_cut(monkeypatch, capsys) -> None:
    loss = replace(small_profile().losses[0], meaning="word " * 50 + "cure")
    out = _printed(replace(small_profile(), losses=(loss,)), monkeypatch, capsys)
    assert out.count("word") == 50
    assert "cure\n" in out


def test_an_encoding_that_lacks_a_name_prints_the_rest(monkeypatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(verb, "read_recording", lambda path: hostile_profile())
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    verb.run(parser.parse_args(["x", "-n", "20"]))
    sys.stdout.flush()
    assert b"__proto__" in raw.getvalue()


@pytest.mark.parametrize("limit", ["0", "-1", "x"])
def test_limits_that_are_none_are_usage_errors(limit: str, capsys) -> None:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    with pytest.raises(SystemExit) as exit_info:
        parser.parse_args(["run.aiflame", "-n", limit])
    assert exit_info.value.code == 2
    assert "-n/--limit" in capsys.readouterr().err


def _kept(on_ms: int, off_ms: int, *names: str) -> Profile:
    """Two threads, 4 s of observed time: samples of the first, the second wholly kept."""
    threads = (Thread(0, 100, "a", 500 * MS, 2_000 * MS), Thread(0, 101, "b", 0, 2_000 * MS))
    return profile_of(
        Sample("main;on", on_ms * MS, count=on_ms // 10),
        Sample("main;off", off_ms * MS, SampleClass.BLOCKED),
        Sample("main;off", 2_000 * MS, SampleClass.BLOCKED, thread=1),
        threads=threads,
        losses=tuple(Loss(name, 7, "meaning") for name in names),
    )


@pytest.mark.parametrize(
    ("profile", "line"),
    [
        (_kept(500, 1_500), ""),
        (_kept(500, 1_500, "sums_full"), ""),
        # Chance: 50 samples have a standard deviation of 70 ms.
        (_kept(400, 1_500, "sums_full"), ""),
        (_kept(500, 1_498, "user_frames_cut"), ""),
        (_kept(500, 500, "sums_full"), "1.000 s of 4.000 s of thread time is missing (sums_full)"),
        (
            _kept(100, 1_500, "sampling_skipped", "sums_full"),
            "400.000 ms of 4.000 s of thread time is missing (sampling_skipped, sums_full)",
        ),
    ],
)
def test_losses_are_said_as_time(profile: Profile, line: str) -> None:
    assert missing_line(profile) == line
    assert bool(line) == any("is missing" in warning for warning in warnings(profile))
