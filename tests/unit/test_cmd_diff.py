# SPDX-License-Identifier: Apache-2.0
"""`aiflame diff`: what two captures differ in, as a table, as a page, and as an exit code."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.commands import diff as verb
from aiflame.agent.errors import CaptureError, UsageError
from aiflame.agent.model.profile import (
    ALL_PROCESSES,
    SPAN_DTYPE,
    Binary,
    Loss,
    Profile,
    SampleClass,
)
from aiflame.agent.reports.change import TooFewSamples
from device_profiles import small_device_profile
from profiles import MS, RECORDING, Sample, hostile_profile, process, profile_of, small_profile

_SECONDS = 20


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(arguments))


def _steady(load: int, *more: Sample, folder: str = "/app") -> Profile:
    """20 s of one thread that is in `load` for so many hundredths of each second, give or take."""
    samples = []
    for second in range(_SECONDS):
        own = load + second % 3 - 1
        step = f"main;[p]step@{folder}/train.py:12"
        samples.append(Sample(f"{step};load", own * 10 * MS, count=own, first_s=second))
        rest = 100 - own
        samples.append(Sample(f"{step};work", rest * 10 * MS, count=rest, first_s=second))
    recording = replace(RECORDING, duration_ns=_SECONDS * 1_000 * MS)
    return profile_of(*samples, *more, recording=recording)


def _in_one_second(profile: Profile) -> Profile:
    """The same, all of it in the first second."""
    spans = [(i, 0, 1, row["count"], row["ns"]) for i, row in enumerate(profile.samples)]
    return replace(profile, spans=np.array(spans, SPAN_DTYPE))


def _elsewhere(profile: Profile) -> Profile:
    """The same, as another process of another build at other addresses."""
    frames = profile.frames.copy()
    frames["address"] += 0x7F00_0000
    frames["line"] += 3
    return replace(
        profile,
        processes=tuple(replace(p, pid=p.pid + 1_000) for p in profile.processes),
        threads=tuple(replace(t, tid=t.tid + 1_000) for t in profile.threads),
        binaries=tuple(Binary(f"/srv{b.path}", "cd" * 20) for b in profile.binaries),
        frames=frames,
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with base.aiflame and new.aiflame in it, which `_read_as` gives contents."""
    monkeypatch.chdir(tmp_path)
    for name in ("base", "new"):
        (tmp_path / f"{name}.aiflame").write_bytes(b"a capture")
    return tmp_path


def _read_as(monkeypatch: pytest.MonkeyPatch, base: Profile, new: Profile) -> None:
    profiles = {"base.aiflame": base, "new.aiflame": new}
    monkeypatch.setattr(verb, "read_recording", lambda path: profiles[path.name])


def _rows(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Returns the numbers of the printed table by function, and the headings as "function"."""
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[-1:] == ["function"])
    found = {}
    for line in lines[start:]:
        *numbers, name = line.replace(" %", "%").replace(" (", "_(").split() or [""]
        found[name.replace("_(", " (")] = numbers
    return found


def test_functions_are_listed_by_how_their_shares_differ(folder, monkeypatch, capsys) -> None:
    _read_as(monkeypatch, _steady(20), _elsewhere(_steady(50, folder="/srv/v2")))
    assert _run("base.aiflame", "new.aiflame") == 0
    rows = _rows(capsys)
    assert rows["function"] == ["base", "new", "points", "low", "high"]
    shares = {
        name: (row[0], row[1], float(row[2]))
        for name, row in rows.items()
        if name != "function" and row
    }
    # THEN what calls both has all of both, though lines, folders, pids and addresses moved
    assert shares.pop("main") == shares.pop("step (train.py)") == ("100.00%", "100.00%", 0.0)
    base, new, points = shares["load"]
    assert (base, new) == ("19.95%", "49.95%")
    assert points == 30.0
    assert shares["work"][2] == -30.0
    # AND chance leaves open little of so even a difference
    low, high = (float(text) for text in rows["load"][3:])
    assert 25 < low < 30 < high < 35


def test_a_capture_differs_from_itself_by_nothing(folder, monkeypatch, capsys) -> None:
    _read_as(monkeypatch, _steady(20), _elsewhere(_steady(20)))
    assert _run("base.aiflame", "new.aiflame", "--fail-on", "+0%", "-o", "d.folded") == 0
    rows = _rows(capsys)
    del rows["function"]
    points = [(float(row[2]), float(row[3]), float(row[4])) for row in rows.values() if row]
    assert points
    assert all(point == 0 and low <= 0 <= high for point, low, high in points)
    lines = [line.split() for line in (folder / "d.folded").read_text().splitlines()]
    assert lines
    assert all(base == new for *_, base, new in lines)


def test_what_only_one_side_has(folder, monkeypatch, capsys) -> None:
    added = [Sample("main;added", 250 * MS, count=25, first_s=i) for i in range(_SECONDS)]
    gone = [Sample("main;gone", 250 * MS, count=25, first_s=i) for i in range(_SECONDS)]
    _read_as(monkeypatch, _steady(20, *gone), _steady(20, *added))
    _run("base.aiflame", "new.aiflame", "-o", "d.svg")
    rows = _rows(capsys)
    assert rows["added"][:3] == ["0.00%", "20.00%", "+20.00"]
    assert rows["gone"][:3] == ["20.00%", "0.00%", "-20.00"]
    svg = (folder / "d.svg").read_text()
    assert "<title>added (" in svg
    assert "<title>gone (" not in svg
    assert "Frames that only base has, 20.00 % of it, are not shown" in svg


def test_a_growth_is_an_alarm(folder, monkeypatch, capsys) -> None:
    _read_as(monkeypatch, _steady(20), _steady(26))
    assert _run("base.aiflame", "new.aiflame", "--fail-on", "+2%") == 1
    assert "aiflame: load grew by +6.00 points, at least by +" in capsys.readouterr().err
    assert _run("base.aiflame", "new.aiflame", "--fail-on", "+7%") == 0
    assert _run("new.aiflame", "base.aiflame", "--self", "--fail-on", "+3%") == 1
    assert "aiflame: work grew" in capsys.readouterr().err


def test_too_short_captures_tell_no_chance_and_give_no_alarm(folder, monkeypatch, capsys) -> None:
    _read_as(monkeypatch, _steady(20), _in_one_second(small_profile()))
    assert _run("base.aiflame", "new.aiflame") == 0
    out, err = capsys.readouterr()
    assert "note: what chance leaves open is not known: too few samples to compare:" in err
    assert " low " not in out
    with pytest.raises(TooFewSamples, match=r"new\.aiflame has \d+, 1,000 are needed") as caught:
        _run("base.aiflame", "new.aiflame", "--fail-on", "+2%")
    assert caught.value.exit_code == 5
    # AND many samples of few seconds tell no more
    few = [Sample("main;load", 500 * MS, count=500, first_s=i) for i in range(7)]
    _read_as(monkeypatch, _steady(20), profile_of(*few))
    with pytest.raises(TooFewSamples, match=r"too few seconds to compare: new\.aiflame has 7"):
        _run("base.aiflame", "new.aiflame", "--fail-on", "+2%")


def _with_waits(reader: int, *more: Sample) -> Profile:
    """A thread that computes, and reads for so many hundredths of each second."""
    waits = [
        Sample(
            "main;reader;[k]do_syscall_64;[k]schedule",
            reader * 10 * MS,
            SampleClass.BLOCKED,
            count=reader,
            first_s=second,
        )
        for second in range(_SECONDS)
    ]
    return _steady(20, *waits, *more)


def test_views_and_waits_by_themselves(folder, monkeypatch, capsys) -> None:
    _read_as(monkeypatch, _with_waits(25), _with_waits(100))
    # WHEN wall time is compared THEN waits are part of the whole
    _run("base.aiflame", "new.aiflame")
    rows = _rows(capsys)
    assert rows["reader"][:3] == ["20.00%", "50.00%", "+30.00"]
    assert rows["schedule"][2] == "+30.00"
    # of CPU time they are none
    _run("base.aiflame", "new.aiflame", "--view", "cpu", "-o", "cpu.html")
    rows = _rows(capsys)
    assert "reader" not in rows
    assert rows["load"][2] == "+0.00"
    assert "20.000 s of CPU time of new (new.aiflame)" in (folder / "cpu.html").read_text()
    # and of off-CPU time they are all, on the page with no doubt about samples on the CPU
    _run("base.aiflame", "new.aiflame", "--view", "offcpu", "-o", "off.html")
    assert _rows(capsys)["reader"][:3] == ["100.00%", "100.00%", "+0.00"]
    page = (folder / "off.html").read_text()
    assert "20.000 s of off-CPU time of new (new.aiflame)" in page
    assert "Few samples" not in page
    # which has no strip of time: the seconds of two recordings are not the same ones
    assert '"time":null' in page
    # AND by itself a wait is the reader's, not the scheduler's
    _run("base.aiflame", "new.aiflame", "--self")
    rows = _rows(capsys)
    assert rows["reader"][2] == "+30.00"
    assert "schedule" not in rows


def test_idle_threads_are_left_out_and_said(folder, monkeypatch, capsys) -> None:
    asleep = "start_thread;pool;[k]futex_wait"
    nothing = Sample(
        asleep, _SECONDS * 1_000 * MS, SampleClass.BLOCKED, 1, first_s=0, seconds=_SECONDS
    )
    _read_as(monkeypatch, _steady(20), _steady(20, nothing))
    _run("base.aiflame", "new.aiflame", "-o", "d.html")
    out = capsys.readouterr().out
    assert "pool" not in out
    assert "shares of a side's wall time without idle threads" in out
    assert "[idle: 1 thread], 20.000 s" in (folder / "d.html").read_text()
    _run("base.aiflame", "new.aiflame", "--idle")
    assert _rows(capsys)["pool"][:3] == ["0.00%", "50.00%", "+50.00"]


def test_a_time_range_is_of_both(folder, monkeypatch, capsys) -> None:
    late = [Sample("main;late", 1_000 * MS, count=100, first_s=i) for i in range(10, 20)]
    _read_as(monkeypatch, _steady(20, *late), _steady(20))
    _run("base.aiflame", "new.aiflame", "--to", "10s")
    assert "late" not in _rows(capsys)
    _run("base.aiflame", "new.aiflame", "--from", "10s", "-o", "d.html")
    assert _rows(capsys)["late"][2] == "-50.00"
    assert (
        "base.aiflame, server (pid 100), 10 s to 20 s of 20 s recorded"
        in (folder / "d.html").read_text()
    )


def test_processes_of_one_program_are_one(folder, monkeypatch) -> None:
    def named(name: str, target: str = "x") -> Profile:
        profile = _steady(20)
        recording = replace(profile.recording, target=target)
        return replace(
            profile, processes=(process(7, name), process(8, "client")), recording=recording
        )

    def roots(base: Profile, new: Profile) -> set[str]:
        _read_as(monkeypatch, base, new)
        _run("base.aiflame", "new.aiflame", "--force", "-o", "d.folded")
        lines = (folder / "d.folded").read_text().splitlines()
        return {line.partition(";")[0] for line in lines}

    assert roots(named("server"), named("server")) == {"server"}
    # AND a version that is called otherwise is the same program
    assert roots(named("serve-1.4"), named("serve-1.5")) == {"serve-1.5 (base: serve-1.4)"}
    # but not on a whole machine, where programs come and go
    everything = named("cron", ALL_PROCESSES), named("backup", ALL_PROCESSES)
    assert roots(*everything) == {"cron", "backup"}


def test_whole_machines_are_compared_by_cpu_time(folder, monkeypatch, capsys) -> None:
    profile = _with_waits(25)
    recording = replace(profile.recording, target=ALL_PROCESSES)
    _read_as(monkeypatch, *[replace(profile, recording=recording)] * 2)
    _run("base.aiflame", "new.aiflame")
    assert "shares of a side's CPU time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-f", "svg"], "-f is of a file"),
        (["-o", "-"], "no format for standard output"),
        (["-o", "d.pb.gz"], "no pprof of a difference"),
        (["-o", "new.aiflame", "-f", "svg", "--force"], "replace its own capture"),
        (["--from", "30s"], "past the end of the recording"),
    ],
)
def test_what_cannot_be_is_refused(folder, monkeypatch, arguments, message) -> None:
    _read_as(monkeypatch, _steady(20), _steady(20))
    with pytest.raises(UsageError, match=message):
        _run("base.aiflame", "new.aiflame", *arguments)
    assert (folder / "new.aiflame").read_bytes() == b"a capture"


def test_a_side_without_the_time_asked_for(folder, monkeypatch) -> None:
    _read_as(monkeypatch, _with_waits(25), _steady(20))
    with pytest.raises(verb.NothingToCompare, match=r"new\.aiflame holds no off-CPU") as caught:
        _run("base.aiflame", "new.aiflame", "--view", "offcpu")
    assert caught.value.exit_code == 4


def test_a_damaged_capture_is_refused_as_by_report(folder) -> None:
    with pytest.raises(CaptureError):
        _run("base.aiflame", "new.aiflame", "-o", "d.html")
    assert not (folder / "d.html").exists()


def test_captures_of_one_name_are_told_apart_by_folder(folder, monkeypatch, capsys) -> None:
    (folder / "old").mkdir()
    monkeypatch.setattr(verb, "read_recording", lambda _: _steady(20))
    _run("old/run.aiflame", "run.aiflame")
    assert "base: old/run.aiflame, 2,000 samples" in capsys.readouterr().out


def test_of_windows_of_several_seconds_chance_is_that_of_windows(
    folder, monkeypatch, capsys
) -> None:
    # GIVEN what an agent recorded in windows of 10 s, each of which has an equal part in a second
    profile = _steady(20)
    recording = replace(profile.recording, window_s=10)
    _read_as(monkeypatch, *[replace(profile, recording=recording)] * 2)
    with pytest.raises(TooFewSamples, match=r"too few windows of 10 s to compare: base\.aiflame"):
        _run("base.aiflame", "new.aiflame", "--fail-on", "+2%")


def test_a_part_of_one_long_wait_is_compared(folder, monkeypatch, capsys) -> None:
    wait = Sample("main;reader", 20_000 * MS, SampleClass.BLOCKED, first_s=0, seconds=20)
    _read_as(monkeypatch, _steady(20, wait), _with_waits(25))
    _run("base.aiflame", "new.aiflame", "--view", "offcpu", "--to", "10s")
    out, err = capsys.readouterr()
    assert "100.00 %" in out
    assert "base.aiflame has 0, 1,000 are needed" in err


def test_devices_are_said_to_be_left_out_and_losses_are_of_both(folder, monkeypatch) -> None:
    lost = Loss("stacks_full", 3, "samples whose stack did not fit")
    base = replace(_steady(20), gpu=small_device_profile().gpu, losses=(lost,))
    new = replace(_steady(20), losses=(replace(lost, count=4), replace(lost, name="other")))
    _read_as(monkeypatch, base, new)
    _run("base.aiflame", "new.aiflame", "-o", "d.html")
    page = (folder / "d.html").read_text()
    assert "<dt>devices</dt><dd>not compared: time of threads only</dd>" in page
    assert "<dt>stacks_full</dt><dd>7: " in page
    assert "<dt>other</dt><dd>3: " in page


@pytest.mark.parametrize("form", ["html", "svg", "folded"])
def test_hostile_names_are_compared(folder, monkeypatch, capsys, form) -> None:
    hostile = _in_one_second(hostile_profile())
    _read_as(monkeypatch, hostile, hostile)
    for output in ("one", "two"):
        assert _run("base.aiflame", "new.aiflame", "-f", form, "-o", output) == 0
    assert (folder / "one").read_bytes() == (folder / "two").read_bytes()
    assert "\x1b" not in capsys.readouterr().out + (folder / "one").read_text()
