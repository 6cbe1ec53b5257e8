# SPDX-License-Identifier: Apache-2.0
"""What the bench prints is right: its parsers, its arithmetic, its capture. Nothing is timed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from aiflame.agent.capture.reader import read_capture
from bench import large, loads, machine, run, slowdown, tools
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
    assert slowdown.ratios(runs, 2) == [[2.0, 2.0], [3.0, 3.0]]


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


def test_update_replaces_only_what_was_measured() -> None:
    text = f"before\n{run.BEGIN}\nold\n{run.END}\nafter\n"
    assert run.updated(text, "new") == f"before\n{run.BEGIN}\nnew\n{run.END}\nafter\n"
    with pytest.raises(ValueError, match="measured: begin"):
        run.updated("no markers", "new")


def test_overhead_page_has_the_place_for_the_tables() -> None:
    page = Path(run.__file__).parents[2] / "OVERHEAD.md"
    assert "new" in run.updated(page.read_text(), "new")
