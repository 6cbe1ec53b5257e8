# SPDX-License-Identifier: Apache-2.0
"""What the bench prints is right: its parsers, its arithmetic, its capture. Nothing is timed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import SPAN_DTYPE, SampleClass
from bench import hot_stacks, large, loads, machine, pairs, run, tools
from bench.kernel import Runs, Window
from bench.table import Aim, Table, aims_table, spread
from profiles import small_profile


def test_bench_is_a_program_with_help() -> None:
    command = [sys.executable, run.__file__, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert all(part in done.stdout for part in run.PARTS)


def test_bench_refuses_a_part_that_it_does_not_know() -> None:
    command = [sys.executable, run.__file__, "everything"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "no such part: everything" in done.stderr


def test_written_capture_is_read_back_whole(tmp_path: Path) -> None:
    profile = small_profile()
    spans = np.zeros(len(profile.samples), SPAN_DTYPE)
    spans["sample"], spans["first_s"], spans["seconds"] = np.arange(len(spans)), 1, 1
    spans["count"], spans["ns"] = profile.samples["count"], profile.samples["ns"]
    profile = replace(profile, spans=spans)
    large.write_capture(profile, tmp_path / "small.aiflame")
    read = read_capture(tmp_path / "small.aiflame")
    assert (read.processes, read.threads, read.binaries) == (
        profile.processes,
        profile.threads,
        profile.binaries,
    )
    assert read.functions == profile.functions
    assert read.frames.tolist() == profile.frames.tolist()
    assert read.stacks.frames.tolist() == profile.stacks.frames.tolist()
    assert read.stacks.offsets.tolist() == profile.stacks.offsets.tolist()
    assert sorted(read.samples.tolist()) == sorted(profile.samples.tolist())
    assert read.spans["first_s"].tolist() == [1] * len(spans)
    assert sorted(read.spans["ns"].tolist()) == sorted(spans["ns"].tolist())


def test_perf_bench_output_is_understood() -> None:
    text = (
        "# Executed 100000 pipe operations\n\n     Total time: 0.448 [sec]\n\n  4.485440 usecs/op\n"
    )
    assert loads.total_seconds(text) == 0.448
    with pytest.raises(ValueError, match="no total time"):
        loads.total_seconds("perf: 'sched' is not a perf-command")


def test_each_run_with_a_tool_is_compared_with_its_neighbours() -> None:
    # GIVEN two tools, two rounds, on a machine that becomes twice as slow
    runs = [1.0, 2.0, 1.0, 3.0, 1.0, 3.0, 2.0, 6.0, 2.0]
    # THEN the drift is in none of the ratios
    assert pairs.ratios(runs, [0, 1, 0, 1]) == [[2.0, 2.0], [3.0, 3.0]]


def test_each_round_begins_with_another_tool() -> None:
    assert pairs.order(3, 2) == [0, 1, 2, 1, 2, 0]


def test_interval_of_a_median_leaves_out_as_much_as_it_may() -> None:
    # Of nine, the least and the most: 1 - 2 * (1 + 9) / 2**9 is 0.961, with one more 0.820.
    assert pairs.median_interval([9, 1, 8, 2, 7, 3, 6, 4, 5]) == (2, 8)
    assert pairs.median_interval([6, 1, 5, 2, 4, 3]) == (1, 6)
    with pytest.raises(ValueError, match="no interval from 5"):
        pairs.median_interval([1, 2, 3, 4, 5])


def test_runs_are_sorted_by_tool_whatever_their_order() -> None:
    # GIVEN a load that takes 1 s alone and 2 or 3 s under two tools
    first, second = tools.aiflame("-p", 1), tools.py_spy(1)
    runs = {None: pairs.Run(1.0), first: pairs.Run(2.0), second: pairs.Run(3.0)}
    measured = pairs.measure_pairs(
        lambda tool: runs[tool and tool(1)], [lambda _: first, lambda _: second], 3
    )
    # THEN each has its own
    assert [one.wall for one in measured] == [[2.0] * 3, [3.0] * 3]
    # and a time that is not measured is not shown
    assert pairs.spread_or_blank(measured[0].cpu) == ""


def test_cost_of_an_event_is_that_of_all_its_programs() -> None:
    window = Window(0.5, (Runs("on_switch", 1_000, 10), Runs("on_waking", 100, 5)))
    assert window.ns_per_run("on_switch") == 100
    assert window.ns_per_run("on_switch", "on_waking") == 110
    assert window.ns_per_run("profile") is None
    assert window.per_second("on_switch") == 20


def test_program_that_never_ran_has_no_cost() -> None:
    assert Window(1.0, (Runs("on_switch", 0, 0),)).ns_per_run("on_switch") is None


def test_busy_share_leaves_out_idle_and_waiting_for_disks() -> None:
    before = [100, 0, 100, 1_000, 50, 0, 0, 0, 0, 0]
    after = [125, 0, 125, 1_040, 60, 0, 0, 0, 0, 0]
    assert machine.busy_share(before, after) == 0.5


def test_tables_are_markdown_and_say_which_aim_is_missed() -> None:
    table = Table("Cost", "By count.", ("event", "ns"), [("switch", spread([3, 1, 2], 0))])
    assert table.markdown() == (
        "### Cost\n\nBy count.\n\n| event | ns |\n| --- | --- |\n| switch | 2 (1-3) |\n"
    )
    aims = aims_table([Aim("a", 1.0, 2.0, "s"), Aim("b", 2.0, 2.0, "s")]).markdown()
    assert "| a | 1 s | 2 s | met |" in aims
    assert "| b | 2 s | 2 s | **missed** |" in aims


def test_commands_are_shown_as_one_types_them() -> None:
    assert tools.aiflame("-p", 4321).words == "aiflame record -p PID"
    assert tools.bpftrace("offcpu.bt", 4321).words == "bpftrace offcpu.bt PID"
    assert tools.bpftrace("offcpu.bt", 0).words == "bpftrace offcpu.bt 0"


def test_how_late_py_spy_is_at_the_end_is_read_from_what_it_says() -> None:
    said = (
        "py-spy> 1.05s behind in sampling, try less\npy-spy> 3.81s behind in sampling, try less\n"
    )
    assert pairs.seconds_behind(said) == 3.81
    assert pairs.seconds_behind("py-spy> Sampling process 99 times a second.") is None


def test_raw_text_of_py_spy_is_understood() -> None:
    # GIVEN one stack with native frames and without a name for the innermost, one of Python only,
    # and native frames from which Python was called back
    seen = hot_stacks.of_py_spy(
        "0x7f00 (/lib/libc.so.6);<module> (/a/run.py:9);A.press (/a/run.py:3)"
        ";deflate (/lib/libz.so.1);0x7f11 (/lib/libz.so.1) 3\n"
        "<module> (/a/run.py:9);f.<locals>.<lambda> (/a/run.py:4) 2\n"
        "<module> (<string>:1);walk (tree.c:12);A.visit (/a/run.py:5) 1\n"
    )
    # THEN frames are named without folders, and only what is above the last Python frame is a leaf
    assert seen.chains == {
        ("<module> (run.py:9)", "A.press (run.py:3)"): 3,
        ("<module> (run.py:9)", "f.<locals>.<lambda> (run.py:4)"): 2,
        ("<module> (<string>:1)", "A.visit (run.py:5)"): 1,
    }
    assert seen.leaves == {
        ("A.press", "libz.so.1", ""): 3,
        ("f.<locals>.<lambda>", "", ""): 2,
        ("A.visit", "", ""): 1,
    }
    with pytest.raises(ValueError, match="not a frame"):
        hot_stacks.of_py_spy("py-spy> Sampling process 100 times 1")


def test_samples_on_cpu_of_a_capture_are_counted_by_python_frames() -> None:
    profile = small_profile()
    on_cpu = profile.samples[profile.samples["klass"] == SampleClass.ON_CPU]
    seen = hot_stacks.of_capture(profile)
    assert seen.chains.total() == seen.leaves.total() == on_cpu["count"].sum() > 0


def test_stacks_that_differ_only_in_lines_are_one_by_function() -> None:
    chains = Counter({("f (a.py:1)", "g (a.py:5)"): 1, ("f (a.py:2)", "g (a.py:5)"): 2})
    assert hot_stacks.by_function(chains) == {("f (a.py)", "g (a.py)"): 3}


def test_hot_in_one_only_is_told_from_a_share_that_is_close_to_the_limit() -> None:
    # GIVEN 1,000 samples each: "near" is above one percent in one of them, "far" is missing there
    first = Counter({"same": 930, "near": 11, "far": 50, "cold": 9})
    second = Counter({"same": 985, "near": 9, "far": 0, "cold": 6})
    compared = hot_stacks.compare(first, second)
    # THEN only "far" is more than chance
    assert (compared.both, compared.only_first) == ({"same"}, {"near", "far"})
    assert (compared.only_second, compared.beyond_chance) == (set(), {"far"})
    assert compared.overlap == pytest.approx(0.930 + 0.009 + 0.006)


def test_update_replaces_only_what_was_measured() -> None:
    text = f"before\n{run.BEGIN}\nold\n{run.END}\nafter\n"
    assert run.updated(text, "new") == f"before\n{run.BEGIN}\nnew\n{run.END}\nafter\n"
    with pytest.raises(ValueError, match="measured: begin"):
        run.updated("no markers", "new")


def test_overhead_page_has_the_place_for_the_tables() -> None:
    page = Path(run.__file__).parents[2] / "OVERHEAD.md"
    assert "new" in run.updated(page.read_text(), "new")
