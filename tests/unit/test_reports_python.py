# SPDX-License-Identifier: Apache-2.0
"""What is summed over Python frames: the tables of `aiflame stats`, and pstats files."""

from __future__ import annotations

import io
import pstats
from pathlib import Path

import pytest
from aiflame.agent.model.profile import GilState, Profile, SampleClass
from aiflame.agent.reports import FORMATS, Frames, ReportOptions, View
from aiflame.agent.reports.stats import tables
from aiflame.agent.reports.table import Table
from goldens import assert_golden
from profiles import (
    MS,
    Sample,
    empty_profile,
    hostile_profile,
    profile_of,
    python_profile,
    small_profile,
)


def _tables(profile: Profile, view: View = View.WALL, limit: int = 10) -> dict[str, Table]:
    return {table.title: table for table in tables(profile, view, limit)}


def _times(table: Table) -> list[tuple[str, str, str]]:
    named = -1 if "lines" in table.title else 4
    return [(row[0], row[2], row[named].rpartition("/")[2]) for row in table.rows]


def test_golden_tables() -> None:
    titles = ("Top Python lines, wall time", "Top Python functions, wall time", "GIL by thread, ms")
    found = _tables(python_profile())
    lines = [
        line
        for title in titles
        for line in (
            title,
            found[title].whole,
            *(" | ".join(cells) for cells in (found[title].columns, *found[title].rows)),
        )
    ]
    assert_golden("python.stats.txt", ("\n".join(lines) + "\n").encode())


def test_what_imports_modules_can_be_left_out() -> None:
    # GIVEN an import, of which all but the imported code is left out
    profile = profile_of(
        Sample("[p]main@/a.py:1;[p]find@<frozen importlib._bootstrap>:7;[p]<module>@/b.py:1", MS),
        Sample("[p]main@/a.py:1;[p]find@<frozen importlib._bootstrap>:7", MS),
    )
    found = {table.title: table for table in tables(profile, View.WALL, 10, hide_importlib=True)}
    # THEN its time is its caller's, in all tables of functions
    top = found["Top functions, wall time"]
    assert [row[:5:2] for row in top.rows] == [
        ("1.00", "2.00", "main"),
        ("1.00", "1.00", "<module>"),
    ]
    lines = found["Top Python lines, wall time"]
    assert _times(lines) == [("1.00", "2.00", "a.py:1"), ("1.00", "1.00", "b.py:1")]


def test_self_time_includes_native_code_that_python_called() -> None:
    profile = profile_of(
        Sample("main;[p]f@/a.py:1;[p]g@/a.py:2;gemm;[k]read", 5 * MS),
        Sample("main;[p]f@/a.py:1", 2 * MS),
        Sample("main", 3 * MS),
    )
    table = _tables(profile)["Top Python lines, wall time"]
    assert _times(table) == [("5.00", "5.00", "a.py:2"), ("2.00", "7.00", "a.py:1")]
    assert [row[1] for row in table.rows] == ["50.0 %", "20.0 %"]


def test_lines_of_a_function_add_up_in_its_own_row() -> None:
    profile = profile_of(Sample("[p]f@/a.py:1", 5 * MS), Sample("[p]f@/a.py:2", 2 * MS))
    found = _tables(profile)
    assert _times(found["Top Python functions, wall time"]) == [("7.00", "7.00", "f")]
    assert _times(found["Top Python lines, wall time"]) == [
        ("5.00", "5.00", "a.py:1"),
        ("2.00", "2.00", "a.py:2"),
    ]


def test_recursion_counts_once_a_stack() -> None:
    profile = profile_of(Sample("[p]f@/a.py:1;eval;[p]f@/a.py:1;[p]f@/a.py:2", 5 * MS))
    found = _tables(profile)
    assert _times(found["Top Python functions, wall time"]) == [("5.00", "5.00", "f")]
    assert _times(found["Top Python lines, wall time"]) == [
        ("5.00", "5.00", "a.py:2"),
        ("0.00", "5.00", "a.py:1"),
    ]


def test_a_view_counts_its_own_time_but_the_gil_all() -> None:
    found = _tables(python_profile(), View.CPU)
    places = [row[-1] for row in found["Top Python lines, CPU time"].rows]
    assert "/app/train.py:12" in places
    assert "/app/pool.py:7" not in places
    assert found["GIL by thread, ms"] == _tables(python_profile())["GIL by thread, ms"]


def test_the_gil_by_thread() -> None:
    table = _tables(python_profile())["GIL by thread, ms"]
    assert table.columns == (">held", ">waiting", ">released", ">no Python", "thread", "process")
    assert table.rows == (
        ("300.00", "0.00", "500.00", "0.00", "server (100)", "server (100)"),
        ("0.00", "300.00", "700.00", "0.00", "worker (101)", "server (100)"),
    )


def test_a_lock_that_could_not_be_read_is_not_left_out() -> None:
    profile = profile_of(
        Sample("[p]f@/a.py:1", 5 * MS, gil=GilState.UNKNOWN),
        Sample("start_thread", 3 * MS, SampleClass.BLOCKED),
    )
    table = _tables(profile)["GIL by thread, ms"]
    assert ">unknown" in table.columns
    assert table.rows[0][:5] == ("0.00", "0.00", "0.00", "5.00", "3.00")


def test_rows_beyond_the_limit_are_counted() -> None:
    found = _tables(python_profile(), limit=1)
    assert found["Top Python functions, wall time"].left_out == 6
    assert found["GIL by thread, ms"].left_out == 1


def test_no_tables_about_python_where_there_is_none() -> None:
    for profile in (profile_of(Sample("main", MS)), empty_profile(), hostile_profile()):
        assert not [title for title in _tables(profile) if "Python" in title or "GIL" in title]


@pytest.mark.parametrize(
    ("frames", "first"),
    [
        (Frames.BOTH, ("700.00", "time_sleep")),
        (Frames.PYTHON, ("1,000.00", "Pool.work")),
        (Frames.NATIVE, ("700.00", "time_sleep")),
    ],
)
def test_top_functions_are_of_the_chosen_frames(frames: Frames, first: tuple[str, str]) -> None:
    table = tables(python_profile(), View.WALL, 10, frames)[0]
    assert (table.rows[0][0], table.rows[0][4]) == first
    names = [row[4] for row in table.rows]
    assert ("_PyEval_EvalFrameDefault" in names) == (frames is Frames.NATIVE)


def _pstats(tmp_path: Path, profile: Profile, **options) -> pstats.Stats:
    path = tmp_path / "run.pstats"
    path.write_bytes(FORMATS["pstats"].render(profile, ReportOptions(**options)))
    return pstats.Stats(str(path), stream=io.StringIO())


def _figures(stats: pstats.Stats) -> dict:
    return {place: figures[:4] for place, figures in stats.stats.items()}


def test_a_pstats_file_is_read_by_pythons_own_module(tmp_path: Path) -> None:
    stats = _pstats(tmp_path, python_profile(), view=View.CPU)
    figures = _figures(stats)
    # Net.forward was innermost in 50 + 20 samples, at lines 12 and 13
    assert figures["/app/train.py", 12, "Net.forward"] == (70, 70, 0.7, 0.7)
    assert figures["/app/train.py", 40, "<module>"] == (80, 80, 0.0, 0.8)
    # recursion: six samples, three frames in each, its time counted once
    assert figures["/app/lib.py", 4, "fib"] == (6, 18, 0.06, 0.06)
    assert figures["~", 0, "[no Python frames]"] == (9, 9, 0.09, 0.09)
    assert stats.total_tt == pytest.approx(0.89)
    assert stats.total_calls == 70 + 80 + 80 + 18 + 4 + 4 + 9


def test_callers_in_a_pstats_file(tmp_path: Path) -> None:
    stats = _pstats(tmp_path, python_profile(), view=View.CPU)
    callers = stats.stats["/app/lib.py", 4, "fib"][4]
    assert callers == {
        ("/app/train.py", 40, "<module>"): (6, 6, 0.0, 0.06),
        ("/app/lib.py", 4, "fib"): (12, 6, 0.06, 0.06),
    }


def test_what_the_module_prints(tmp_path: Path) -> None:
    stats = _pstats(tmp_path, python_profile(), view=View.CPU)
    stats.sort_stats("tottime").print_stats(2).print_callers().print_callees()
    lines = [line.split() for line in stats.stream.getvalue().splitlines()]
    assert ["70", "0.700", "0.010", "0.700", "0.010", "/app/train.py:12(Net.forward)"] in lines


def test_a_pstats_file_has_no_more_than_its_view(tmp_path: Path) -> None:
    stats = _pstats(tmp_path, python_profile(), view=View.OFFCPU)
    assert _figures(stats) == {("/app/pool.py", 7, "Pool.work"): (10, 10, 1.0, 1.0)}


def test_import_machinery_can_be_left_out_of_a_pstats_file(tmp_path: Path) -> None:
    def files(**options) -> set[str]:
        return {place[0] for place in _figures(_pstats(tmp_path, python_profile(), **options))}

    assert files() - files(hide_importlib=True) == {
        "<frozen runpy>",
        "<frozen importlib._bootstrap>",
    }


@pytest.mark.parametrize("make", [empty_profile, hostile_profile, small_profile, python_profile])
def test_any_profile_gives_a_file_that_loads(tmp_path: Path, make) -> None:
    profile = make()
    stats = _pstats(tmp_path, profile)
    assert stats.total_tt == pytest.approx(int(profile.samples["ns"].sum()) / 1e9)
    data = [FORMATS["pstats"].render(make(), ReportOptions()) for _ in range(2)]
    assert data[0] == data[1]


def test_names_that_are_shown_alike_stay_apart_in_a_pstats_file(tmp_path: Path) -> None:
    profile = profile_of(Sample("[p]a\x01@/a.py:1", 5 * MS), Sample("[p]a\x02@/a.py:1", 2 * MS))
    assert _figures(_pstats(tmp_path, profile)) == {
        ("/a.py", 1, "a\ufffd"): (1, 1, 0.005, 0.005),
        ("/a.py", 1, "a\ufffd'"): (1, 1, 0.002, 0.002),
    }
