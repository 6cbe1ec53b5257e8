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
from aiflame.agent.commands.record_summary import sample_lines
from aiflame.agent.commands.tables import print_tables
from aiflame.agent.model.profile import (
    ALL_PROCESSES,
    EXITED,
    WAIT_DTYPE,
    Binary,
    Loss,
    Profile,
    SampleClass,
    StopReason,
    Thread,
)
from aiflame.agent.reports import FORMATS
from aiflame.agent.reports.base import TIME_VIEWS, Merge, ReportOptions, View
from aiflame.agent.reports.facts import (
    generated_line,
    missing_line,
    recording_facts,
    warnings,
)
from aiflame.agent.reports.merge import options_for
from aiflame.agent.reports.stats import tables
from aiflame.agent.reports.table import Table
from goldens import assert_golden
from profiles import (
    MS,
    RECORDING,
    Sample,
    deep_profile,
    empty_profile,
    hostile_profile,
    process,
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
        ("40.00", "100.0 %", "40.00", "100.0 %", "walk", "", "server"),
        ("0.00", "0.0 %", "40.00", "100.0 %", "main", "", "server"),
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
    assert _table(profile, "Modules").whole.endswith("; [no stack]: not one frame is known")
    ends = {row[3]: row[1] for row in _table(profile, "How stacks ended").rows}
    assert ends == {"no frame pointer": "30.0 %", "lost": "10.0 %", "kernel only": "60.0 %"}


def test_where_stacks_are_truncated_is_told_with_the_reason_and_a_cure() -> None:
    # GIVEN waits that hide how much of the CPU time is truncated, and little for another reason
    profile = profile_of(
        Sample("work", 30 * MS, end=StopReason.NO_FRAME_POINTER),
        Sample("main;work", 60 * MS, end=StopReason.ROOTED_BY_HEURISTIC),
        Sample("", 10 * MS, end=StopReason.LOST),
        Sample("main;read", 8897 * MS, SampleClass.BLOCKED),
        Sample("", 3 * MS, SampleClass.BLOCKED, end=StopReason.NOT_WALKED),
    )
    _, complete, *truncated = sample_lines(profile)
    assert complete == (
        "Complete stacks: 60.00 % of CPU time (60.00 % by a checked heuristic) and 99.52 % of all"
        " time."
    )
    assert truncated == [
        "Truncated in server: 30.00 % of CPU time, 0.33 % of all time"
        f" (no frame pointer: {StopReason.NO_FRAME_POINTER.meaning}).",
        "Truncated without any frame: 10.00 % of CPU time, 0.11 % of all time"
        f" (lost: {StopReason.LOST.meaning}).",
    ]
    assert dict(recording_facts(profile))["truncated in"] == (
        "server 0.33 % (no frame pointer), [no stack] 0.11 % (lost)"
    )


def test_of_no_samples_it_is_not_said_how_complete_they_are() -> None:
    assert not any("Complete stacks" in line for line in sample_lines(empty_profile()))


def test_code_of_processes_that_were_gone_is_not_called_generated() -> None:
    profile = profile_of(
        Sample(EXITED, 20 * MS, end=StopReason.NO_TABLE),
        Sample("compiled", 30 * MS, end=StopReason.NO_TABLE),
    )
    functions = tuple(replace(function, binary=None) for function in profile.functions)
    rows = _table(replace(profile, functions=functions), "Modules").rows
    assert [row[2] for row in rows] == ["[generated code]", EXITED]


@pytest.mark.parametrize("make", [empty_profile, hostile_profile, deep_profile, small_profile])
@pytest.mark.parametrize("view", [view.value for view in View])
def test_every_line_fits_and_is_plain(make, view, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "100")
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
    monkeypatch.setenv("COLUMNS", "100")
    loss = replace(small_profile().losses[0], meaning="word " * 50 + "cure")
    out = _printed(replace(small_profile(), losses=(loss,)), monkeypatch, capsys)
    assert out.count("word") == 50
    assert "cure\n" in out


_LONG_NAME = "at::native::" + "Vectorized<float>::" * 20 + "run"


@pytest.mark.parametrize("columns", ["", "0", "60", "100", "400"])
def test_names_are_whole_and_paths_lose_their_head(columns: str, monkeypatch, capsys) -> None:
    # GIVEN a thread, a C++ function and a line of Python with long names
    monkeypatch.setenv("COLUMNS", columns)
    path = "/srv/app/py/v311/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py"
    profile = profile_of(
        Sample("", 9 * MS, frames=("main", _LONG_NAME)),
        Sample(f"[p]_worker_loop@{path}:334", 5 * MS),
        threads=(Thread(0, 4_194_303, "pt_data_worker5", MS, MS),),
    )
    # WHEN its tables are printed
    lines = _printed(profile, monkeypatch, capsys).splitlines()
    # THEN all that identifies a row is there, however wide the terminal is
    assert _LONG_NAME in "".join(line.strip() for line in lines)
    assert any("pt_data_worker5" in line for line in lines)
    assert any("(4194303)" in line for line in lines)
    (row,) = (line for line in lines if "worker.py:334" in line)
    assert path in row if columns in ("", "0", "400") else "\u2026/" in row
    if columns in ("100", "400"):  # numbers alone have more than 60
        assert max(map(cell_len, lines)) <= int(columns)


def test_a_path_that_fits_on_a_line_of_its_own_is_whole(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    path = "/srv/app/a_program_of_a_long_name_for_its_row"
    row = ("100.00", "main_function_of_it", path)
    print_tables([Table("Functions", "", (">self ms", "function", "/where"), (row,))])
    assert f"    {path}\n" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_names_are_in_one_piece_in_a_terminal_of_80_columns(
    columns: int, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    names = (
        "_compile_bytecode",
        "std::sort_heap_of_ints",
        "a_function_with_quite_some_name",
        "DistutilsMetaFinder.spec_for_distutils.<locals>.DistutilsLoader",
    )
    path = "/usr/lib/python3.11/importlib/_bootstrap_external_of_a_long_name.py"
    waits = (f"[p]{name}@{path}:334;[k]anon_pipe_read;[k]schedule" for name in names)
    profile = profile_of(
        *(Sample(wait, 4_000_000 * MS, SampleClass.BLOCKED) for wait in waits),
        Sample("", 3_000_000 * MS, frames=("main", names[1])),
        threads=(Thread(0, 4_194_303, "pt_data_worker5", MS, MS),),
    )
    lines = _printed(profile, monkeypatch, capsys).splitlines()
    assert max(map(cell_len, lines)) <= columns
    for word in (*names, "pt_data_worker5", "(4194303)", f"{path.rpartition('/')[2]}:334"):
        assert any(word in line for line in lines), word
    assert any("(anon_pipe_read)" in line for line in lines)


def _charged(profile: Profile, *, is_raw: bool = False) -> list[tuple[str, ...]]:
    found = tables(profile, View.WALL, 10, is_raw=is_raw)[0]
    return [(row[0], *row[4:-1]) for row in found.rows if row[0] != "0.00"]


def _in(profile: Profile, **path_of: str) -> Profile:
    """The profile, with functions in binaries of their own."""
    start = len(profile.binaries)
    number = {name: start + i for i, name in enumerate(path_of)}
    return replace(
        profile,
        binaries=(*profile.binaries, *(Binary(path, "") for path in path_of.values())),
        functions=tuple(
            replace(f, binary=number[f.name]) if f.name in number else f for f in profile.functions
        ),
    )


_QUEUE = "/usr/lib/python3.11/queue.py"


@pytest.mark.parametrize(
    ("stack", "charged"),
    [
        ("main;poll;[k]do_sys_poll;[k]schedule_timeout;[k]__schedule", "main"),
        (f"main;[p]consume@/app/a.py:3;[p]get@{_QUEUE}:9;sem_wait;[k]__schedule", "consume"),
        ("main;[p]consume@/usr/lib/python3.11/site-packages/a.py:3;poll", "consume"),
        # Nobody's own code: a pool's thread, libc's, one of the kernel.
        (f"clone3;[p]get@{_QUEUE}:9;sem_wait;[k]__schedule", "get"),
        ("clone3;sem_wait;[k]futex_wait;[k]__schedule", "sem_wait"),
        ("[k]kthread;[k]worker_thread;[k]schedule;[k]__schedule", "worker_thread"),
        ("[k]__schedule", "__schedule"),
    ],
)
def test_waits_are_charged_to_the_readers_own_code(stack: str, charged: str) -> None:
    libc = "/usr/lib/x86_64-linux-gnu/libc.so.6"
    profile = _in(
        profile_of(Sample(stack, 10 * MS, SampleClass.BLOCKED)),
        **{"poll": libc, "sem_wait": libc, "clone3": libc},
    )
    assert [row[:2] for row in _charged(profile)] == [("10.00", charged)]
    # WHEN all is asked for, THEN it is of the innermost function
    leaf = stack.rpartition(";")[2].removeprefix("[k]")
    assert _charged(profile, is_raw=True) == [("10.00", leaf)]


def test_time_on_the_cpu_is_of_the_innermost_function() -> None:
    profile = profile_of(Sample("main;[k]clear_page", 10 * MS))
    assert _charged(profile) == [("10.00", "clear_page", "")]


def test_what_a_row_waited_for_stands_beside_it() -> None:
    wait = "main;[k]do_nanosleep;[k]schedule;[k]__schedule"
    profile = profile_of(
        Sample(wait, 60 * MS, SampleClass.BLOCKED),
        Sample("main;[k]pipe_read;[k]schedule", 9 * MS, SampleClass.BLOCKED),
        Sample(wait, 21 * MS, SampleClass.WAITING_TO_RUN),
        Sample("main", 10 * MS),
    )
    assert _charged(profile) == [
        ("100.00", "main", "60 % sleep (do_nanosleep), 21 % waiting to run")
    ]


def _build(target: str) -> Profile:
    """A make with two compilers, of which one was a shell before, in a container and out of it."""
    names = (("make", 10), ("sh", 11), ("cc1", 11), ("cc1", 12))
    ids = ("a" * 64, "a" * 64, "a" * 64, "")
    processes = tuple(
        replace(process(pid, name), container_id=container)
        for (name, pid), container in zip(names, ids, strict=True)
    )
    threads = tuple(Thread(i, pid, name, 0, 0) for i, (name, pid) in enumerate(names))
    return profile_of(
        Sample("wait", 90 * MS, SampleClass.BLOCKED),
        Sample("exec", MS, thread=1),
        Sample("main;parse", 30 * MS, thread=2),
        Sample("main;parse", 20 * MS, thread=3),
        processes=processes,
        threads=threads,
        recording=replace(RECORDING, target=target),
    )


@pytest.mark.parametrize(
    ("merge", "target", "rows"),
    [
        (None, "make (pid 10)", {}),
        (Merge.NONE, ALL_PROCESSES, {}),
        (None, ALL_PROCESSES, {"cc1": ("50.00", "2"), "make": ("0.00", "1"), "sh": ("1.00", "1")}),
        (
            Merge.PROCESS,
            ALL_PROCESSES,
            {"cc1 (11)": ("31.00", "2"), "cc1 (12)": ("20.00", "1"), "make (10)": ("0.00", "1")},
        ),
        (Merge.CGROUP, "make (pid 10)", {"/": ("51.00", "4")}),
        (
            Merge.CONTAINER,
            "make (pid 10)",
            {"aaaaaaaaaaaa": ("31.00", "3"), "[no container]": ("20.00", "1")},
        ),
    ],
)
def test_processes_come_together(merge: Merge | None, target: str, rows: dict) -> None:
    profile = _build(target)
    titles = {f"Time by {one.value}, ms" for one in Merge}
    found = [t for t in tables(profile, View.WALL, 10, merge=merge) if t.title in titles]
    assert {row[-1]: (row[0], row[4]) for table in found for row in table.rows} == rows
    # The same in a flame graph: each is one root, and no time is lost.
    text = FORMATS["folded"].render(profile, ReportOptions(merge=merge)).decode()
    roots = {line.partition(";")[0] for line in text.splitlines()}
    assert roots == (set(rows) or {"make (10)", "sh (11)", "cc1 (11)", "cc1 (12)"})
    assert sum(int(line.rpartition(" ")[2]) for line in text.splitlines()) == 141 * MS


def test_the_longest_waits_name_the_line_of_python() -> None:
    stack = f"main;[p]consume@/app/a.py:3;[p]get@{_QUEUE}:9;[k]futex_wait;[k]__schedule"
    profile = profile_of(Sample(stack, 10 * MS, SampleClass.BLOCKED))
    profile = _with_waits(profile, (0, 0, 0, 10 * MS, 0))
    assert _table(profile, "Longest waits").rows[0][-1] == "consume (a.py:3)"


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


def _java(*ends: StopReason) -> Profile:
    """A second of compiled code for each stop reason, and a wait."""
    samples = [Sample("compiled", 1000 * MS, end=end) for end in ends]
    wait = Sample("waiting", 9000 * MS, SampleClass.BLOCKED, end=StopReason.NO_TABLE)
    profile = profile_of(*samples, wait)
    functions = tuple(replace(function, binary=None) for function in profile.functions)
    jvm = Binary("/usr/lib/jvm/java-17/lib/server/libjvm.so", "")
    return replace(profile, functions=functions, binaries=(*profile.binaries, jvm))


def test_java_without_frame_pointers_is_told_what_cures_it() -> None:
    profile = _java(
        StopReason.NO_TABLE, StopReason.NO_TABLE, StopReason.ROOTED, StopReason.TOO_DEEP
    )
    line = generated_line(profile)
    assert line.startswith("50.00 % of CPU time is truncated in generated code")
    assert line.endswith("-XX:+PreserveFramePointer")
    assert f"{line}." in warnings(profile) and f"{line}." in [*sample_lines(profile)]
    # Not where nothing on the CPU is truncated so, nor of other programs.
    whole = _java(StopReason.ROOTED)
    other = replace(profile, binaries=profile.binaries[:-1])
    for silent in (whole, other):
        assert generated_line(silent) == ""
        assert not any("PreserveFramePointer" in text for text in warnings(silent))


@pytest.mark.parametrize("view", [View.WALL, View.OFFCPU])
def test_a_wait_whose_time_is_in_later_seconds_is_no_error(view: View) -> None:
    """A time range has the number of such waits, and none of their time."""
    profile = profile_of(
        Sample("main;poll;[k]ep_poll", 0, SampleClass.BLOCKED), Sample("main;work", 5 * MS)
    )
    assert tables(profile, view, 10)


@pytest.mark.parametrize(
    ("name", "view"), [("html", View.CPU), ("folded", View.WALL), ("svg", View.WALL)]
)
def test_only_a_page_of_all_processes_opens_with_cpu_time(name: str, view: View) -> None:
    recording = replace(small_profile().recording, target=ALL_PROCESSES)
    assert options_for(replace(small_profile(), recording=recording), name).view is view
    assert options_for(small_profile(), name).view is View.WALL
