# SPDX-License-Identifier: Apache-2.0
"""Time ranges: what of a recording is in one, in every report, and which there cannot be."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.spans import spread_waits
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.commands import report, stats
from aiflame.agent.commands.durations import duration_ns, moment_ns
from aiflame.agent.errors import CaptureError, UsageError
from aiflame.agent.model.gpu import CALL_EVENT_DTYPE
from aiflame.agent.model.profile import (
    SAMPLE_DTYPE,
    SPAN_DTYPE,
    WAIT_DTYPE,
    Profile,
    SampleClass,
    TimeRange,
)
from aiflame.agent.reports import FORMATS, ReportOptions, View
from aiflame.agent.reports.device_rows import device_samples
from aiflame.agent.reports.facts import recording_facts
from aiflame.agent.reports.time_range import in_range, recorded_ns, whole_seconds
from aiflame.gpu.attribution import Certainty
from device_profiles import Launch, Ran, device_profile_of
from hypothesis import given
from hypothesis import strategies as st
from pprof_decoder import decode
from profiles import MS, RECORDING, Sample, profile_of

S = 1_000 * MS
_ON, _BLOCKED = SampleClass.ON_CPU, SampleClass.BLOCKED


def _profile() -> Profile:
    """Ten seconds, less 20 ms: busy in the first, asleep for six, busy again."""
    profile = profile_of(
        Sample("main;load", 900 * MS, count=90, first_s=0),
        Sample("main;idle;[k]futex_wait", 6 * S, _BLOCKED, first_s=2, seconds=6),
        Sample("main;save", 300 * MS, count=30, first_s=8),
        Sample("main;save", 200 * MS, count=20, first_s=9, thread=1),
        recording=replace(RECORDING, duration_ns=9_980 * MS),
    )
    waits = np.array([(1, 0, 2 * S, 6 * S, 0)], WAIT_DTYPE)
    return replace(profile, waits=waits)


def _part(profile: Profile, start_ns: int, end_ns: int) -> Profile:
    return in_range(profile, whole_seconds(start_ns, end_ns, recorded_ns(profile)))


def _folded(profile: Profile, view: View = View.WALL) -> list[str]:
    return FORMATS["folded"].render(profile, ReportOptions(view=view)).decode().splitlines()


def test_a_range_holds_every_second_that_it_touches() -> None:
    profile = _profile()
    assert _folded(_part(profile, 4_900 * MS, 8_001 * MS)) == [
        f"server (100);main;idle;futex_wait_[k];[blocked: lock] {4 * S}",
        f"server (100);main;save {300 * MS}",
    ]
    assert whole_seconds(4_900 * MS, 8_001 * MS, 9_980 * MS) == TimeRange(4 * S, 9 * S)
    # AND the last one as far as the recording goes
    assert whole_seconds(9 * S, 10 * S, 9_980 * MS) == TimeRange(9 * S, 9_980 * MS)
    assert _folded(_part(profile, 9 * S, 10 * S)) == [f"server (100);main;save {200 * MS}"]


def test_a_range_of_all_is_all() -> None:
    profile = _profile()
    assert _folded(_part(profile, 0, 9_980 * MS)) == _folded(profile)


@given(
    cuts=st.lists(st.integers(1, 11), max_size=4, unique=True).map(sorted),
    spans=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 11), st.integers(1, 12), st.integers(0, 9**9)),
        max_size=20,
    ),
)
def test_ranges_that_follow_one_another_add_up(
    cuts: list[int], spans: list[tuple[int, int, int, int]]
) -> None:
    # GIVEN samples whose spans lie anywhere in twelve seconds
    rows = np.array(
        [(s, first, min(n, 12 - first), 1, ns) for s, first, n, ns in spans], SPAN_DTYPE
    )
    samples = np.array([(0, i % 3, i, 0, 0) for i in range(4)], SAMPLE_DTYPE)
    np.add.at(samples["ns"], rows["sample"], rows["ns"] * rows["seconds"])
    np.add.at(samples["count"], rows["sample"], rows["seconds"].astype(np.uint64))
    recording = replace(RECORDING, duration_ns=12 * S)
    profile = replace(
        profile_of(Sample("main", 0, count=0), recording=recording), samples=samples, spans=rows
    )
    # WHEN the recording is cut into ranges
    parts = [
        in_range(profile, TimeRange(start * S, end * S))
        for start, end in zip([0, *cuts], [*cuts, 12], strict=True)
        if end > start
    ]
    # THEN they hold its time, and what their spans say is what their samples say
    for klass in range(4):
        whole = samples[samples["klass"] == klass]
        found = [part.samples[part.samples["klass"] == klass] for part in parts]
        assert sum(int(one["ns"].sum()) for one in found) == int(whole["ns"].sum())
        assert sum(int(one["count"].sum()) for one in found) == int(whole["count"].sum())
    for part in parts:
        sums = np.zeros(len(part.samples), np.uint64)
        np.add.at(sums, part.spans["sample"], part.spans["ns"] * part.spans["seconds"])
        assert sums.tolist() == part.samples["ns"].tolist()


def test_waits_are_cut_to_the_range() -> None:
    waits = _part(_profile(), 4 * S, 7 * S).waits
    assert waits.tolist() == [(1, 0, 4 * S, 3 * S, 0)]
    assert len(_part(_profile(), 0, 2 * S).waits) == 0
    # AND of one that was then runnable, each part
    profile = _profile()
    waits = np.array([(1, 0, 2 * S, 2 * S, 3 * S)], WAIT_DTYPE)
    cut = _part(replace(profile, waits=waits), 3 * S, 6 * S).waits
    assert cut.tolist() == [(1, 0, 3 * S, S, 2 * S)]


def _device_profile() -> Profile:
    launches = [
        Launch("main;first", "k", 1, interval=0),
        Launch("main;second", "k", 1, interval=3),
        Launch("main;third", "only", 4, interval=1),
    ]
    runs = [
        Ran("k", 0, 10, "selected", interval=0),
        Ran("k", 16, 20, "barrier", interval=3),
        Ran("only", 0, 5, "selected", interval=2),
    ]
    made = device_profile_of(launches, runs, cpu=[Sample("main", 40 * MS, first_s=0)])
    return replace(made, recording=replace(made.recording, duration_ns=4 * S))


def test_device_samples_keep_the_stacks_that_they_have_in_the_whole() -> None:
    # GIVEN a kernel that ran in the second after the one in which it was launched
    part = _part(_device_profile(), 2 * S, 3 * S)
    # THEN its launch is not in that second, and its stack is known even so
    assert len(part.gpu.calls) == 0
    samples = device_samples(part)
    assert samples.count.tolist() == [5]
    assert samples.certainty.tolist() == [Certainty.EXACT]
    assert any("main;third;" in line for line in _folded(part, View.GPU))
    # AND all ranges together hold what the whole does
    whole = _device_profile()
    counts: dict[str, int] = {}
    for second in range(4):
        for line in _folded(_part(whole, second * S, (second + 1) * S), View.GPU):
            stack, _, count = line.rpartition(" ")
            counts[stack] = counts.get(stack, 0) + int(count)
    assert sorted(f"{stack} {count}" for stack, count in counts.items()) == _folded(whole, View.GPU)


def test_the_error_of_a_range_is_that_of_the_whole() -> None:
    whole = device_samples(_device_profile()).error
    assert whole.if_unequal > 0
    assert device_samples(_part(_device_profile(), 2 * S, 3 * S)).error == whole


def test_a_range_of_a_range() -> None:
    part = _part(_device_profile(), S, 4 * S)
    again = in_range(part, TimeRange(2 * S, 3 * S))
    assert _folded(again, View.GPU) == _folded(_part(_device_profile(), 2 * S, 3 * S), View.GPU)


def test_calls_one_by_one_are_those_of_the_range() -> None:
    profile = _device_profile()
    events = np.zeros(3, CALL_EVENT_DTYPE)
    events["start_ns"] = [500 * MS, 1_500 * MS, 2_500 * MS]
    gpu = replace(profile.gpu, events=events)
    part = _part(replace(profile, gpu=gpu), S, 4 * S).gpu
    assert part.events["start_ns"].tolist() == [1_500 * MS, 2_500 * MS]


# ---- from a capture ----------------------------------------------------------------------------


def _capture(
    path: Path,
    samples: list[tuple[int, ...]],
    waits: list[tuple[int, ...]],
    duration_ns: int,
    intervals: Sequence[tuple[int, int, int]] = (),
) -> Profile:
    writer = CaptureWriter(path)
    facts: dict[str, str | int] = {
        "aiflame_version": "0.1.0",
        "started_unix_ns": 0,
        "period_ns": 10 * MS,
        "command": "",
        "target": "server",
        "complete": 1,
    }
    writer.put_meta(facts | ({"duration_ns": duration_ns} if duration_ns else {}))
    writer.put("processes", [(1, 100, 1, "server", "", "", "", "", 0, None)])
    writer.put_threads([(1, 1, 100, "server"), (2, 1, 101, "worker")])
    writer.put("stacks", [(i, 1, 0, 0, b"", b"", 0) for i in (1, 2)])
    writer.put("samples", samples)
    writer.put("intervals", intervals)
    writer.put("waits", waits)
    writer.commit()
    writer.close()
    return read_capture(path)


def _by_second(profile: Profile, klass: SampleClass) -> list[int]:
    """ms of a class in each second."""
    found = [0] * (recorded_ns(profile) // S)
    for sample, first, seconds, _, ns in profile.spans.tolist():
        for second in range(first, first + seconds):
            found[second] += ns // MS if profile.samples[sample]["klass"] == klass else 0
    return found


def test_a_long_wait_lies_in_the_seconds_that_it_took(tmp_path: Path) -> None:
    # GIVEN a wait from 1.5 s to 4.25 s, and then 0.5 s runnable, counted where it ended as
    # recordings do; and in that second a short one from the same stack
    rows = [(4, 1, 1, 1, 2, 2_760 * MS), (4, 1, 1, 2, 1, 500 * MS), (0, 1, 1, 0, 3, 30 * MS)]
    profile = _capture(tmp_path / "a", rows, [(1, 1, 1_500 * MS, 2_750 * MS, 500 * MS)], 6_000 * MS)
    # THEN each second has its own part of it
    assert _by_second(profile, SampleClass.BLOCKED) == [0, 500, 1_000, 1_000, 260, 0]
    assert _by_second(profile, SampleClass.WAITING_TO_RUN) == [0, 0, 0, 0, 500, 0]
    assert _by_second(profile, SampleClass.ON_CPU) == [30, 0, 0, 0, 0, 0]
    # AND it counts where it ended
    part = _part(profile, 4 * S, 5 * S)
    assert part.samples["count"].tolist() == [2, 1]


def test_a_wait_of_a_late_drain_is_found_in_the_second_before(tmp_path: Path) -> None:
    rows = [(3, 1, 1, 1, 1, 2_003 * MS), (4, 1, 1, 1, 1, 5 * MS)]
    profile = _capture(tmp_path / "a", rows, [(1, 1, 2_000 * MS, 2_003 * MS, 0)], 6_000 * MS)
    assert _by_second(profile, SampleClass.BLOCKED) == [0, 0, 1_000, 1_000, 8, 0]


def test_a_wait_that_was_never_counted_moves_nothing(tmp_path: Path) -> None:
    rows = [(3, 1, 1, 1, 1, 5 * MS), (3, 2, 2, 1, 1, 7 * MS)]
    waits = [(1, 1, 0, 3_500 * MS, 0), (2, 1, 0, 3_500 * MS, 0)]
    profile = _capture(tmp_path / "a", rows, waits, 6_000 * MS)
    assert _by_second(profile, SampleClass.BLOCKED) == [0, 0, 0, 12, 0, 0]


def test_waits_one_right_after_the_other_are_where_they_were(tmp_path: Path) -> None:
    # GIVEN three waits, each of which began in the second in which the one before ended: what that
    # second has of it was drained with the one that ended
    rows = [(2, 1, 1, 1, 1, 3_000 * MS), (6, 1, 1, 1, 1, 4_000 * MS), (9, 1, 1, 1, 1, 3_000 * MS)]
    waits = [(1, 1, 0, 2_700 * MS, 0), (1, 1, 2_700 * MS, 4_000 * MS, 0)]
    waits += [(1, 1, 6_700 * MS, 3_300 * MS, 0)]
    profile = _capture(tmp_path / "a", rows, waits, 10 * S)
    # THEN each second has its time, but for what nobody told apart
    found = _by_second(profile, SampleClass.BLOCKED)
    assert sum(found) == 10_000
    assert found == [1_000, 1_000, 1_300, 1_000, 1_000, 1_000, 700, 1_000, 1_000, 1_000]


def test_a_second_that_was_drained_twice_is_one(tmp_path: Path) -> None:
    rows = [(1, 1, 1, 1, 1, 900 * MS), (1, 1, 1, 1, 1, 900 * MS)]
    waits = [(1, 1, 100 * MS, 900 * MS, 0), (1, 1, 1_000 * MS, 900 * MS, 0)]
    profile = _capture(tmp_path / "a", rows, waits, 2_000 * MS)
    assert _by_second(profile, SampleClass.BLOCKED) == [900, 900]
    assert profile.samples["ns"].tolist() == [1_800 * MS]


def test_rows_in_any_order_of_time(tmp_path: Path) -> None:
    rows = [(3, 1, 1, 0, 1, 10 * MS), (0, 1, 1, 0, 1, 20 * MS), (3, 1, 1, 0, 1, 30 * MS)]
    profile = _capture(tmp_path / "a", rows, [], 4_000 * MS)
    assert _by_second(profile, SampleClass.ON_CPU) == [20, 0, 0, 40]


def test_what_is_of_several_seconds_is_in_all_of_them(tmp_path: Path) -> None:
    # GIVEN windows of a second, of five, and of a second, and a wait of which it is known when,
    rows = [(1, 1, 1, 0, 9, 90 * MS), (2, 1, 1, 0, 12, 123 * MS), (7, 1, 1, 0, 1, 10 * MS)]
    rows += [(2, 1, 1, 1, 2, 2_050 * MS)]
    waits = [(1, 1, 3_500 * MS, 2_000 * MS, 0)]
    profile = _capture(tmp_path / "a", rows, waits, 8 * S, [(2, 2 * S, 7 * S)])
    # THEN the wait is where it was, and what else was in the five seconds is in each of them
    assert _by_second(profile, SampleClass.ON_CPU) == [0, 90, 24, 24, 24, 24, 24, 10]
    assert _by_second(profile, SampleClass.BLOCKED) == [0, 0, 10, 510, 1_010, 510, 10, 0]
    # AND nothing is lost or twice there
    assert recorded_ns(profile) == 8 * S
    spans, counted = profile.spans, np.zeros(len(profile.samples), np.uint64)
    np.add.at(counted, spans["sample"], spans["count"] * spans["seconds"])
    assert counted.tolist() == profile.samples["count"].tolist()
    part = _part(profile, 2 * S, 4 * S)
    assert part.samples["ns"].tolist() == [int(2 * 24.6 * MS), 520 * MS]
    # AND the range says so, of a recording of which that is so
    assert "Of up to 5 s at once" in dict(recording_facts(part))["time range"]
    (tmp_path / "by_second").mkdir()
    other = _part(_capture(tmp_path / "by_second" / "a", rows, waits, 8 * S), 2 * S, 4 * S)
    assert "at once" not in dict(recording_facts(other))["time range"]


def test_a_window_that_was_cut_late_is_in_the_seconds_that_it_was_in(tmp_path: Path) -> None:
    # GIVEN four threads' worth of time in windows of 1.25 s and 0.75 s, and a second,
    rows = [(2, 1, 1, 0, 500, 5_000 * MS), (3, 1, 1, 0, 300, 3_000 * MS)]
    rows += [(4, 1, 1, 0, 400, 4_000 * MS)]
    profile = _capture(tmp_path / "a", rows, [], 5 * S, [(2, 2 * S, 3_250 * MS)])
    # THEN no second has more than there is.
    assert _by_second(profile, SampleClass.ON_CPU) == [0, 0, 4_000, 4_000, 4_000]


@pytest.mark.parametrize(
    "interval",
    [(-1, 0, 5), (2, -5, 5), (2, 5, 2**62), (2**40, 5, 2**62), (2, 5, 5), (2, 5, 4)],
)
def test_intervals_that_no_recording_has(tmp_path: Path, interval: tuple[int, int, int]) -> None:
    with pytest.raises(CaptureError, match="damaged"):
        _capture(tmp_path / "a", [(2, 1, 1, 0, 12, 123 * MS)], [], 8 * S, [interval])


@pytest.mark.parametrize("end_ns", [1, 3, 2**31 * S])
def test_intervals_that_lie_about_when_they_were_add_up(tmp_path: Path, end_ns: int) -> None:
    ns = 2**62 + 1
    rows = [(2, 1, 1, 1, 2**50, ns)]
    spans = _capture(tmp_path / "a", rows, [], 8 * S, [(2, 0, end_ns)]).spans
    assert int((spans["ns"] * spans["seconds"]).sum()) == ns
    assert int((spans["count"] * spans["seconds"]).sum()) == 2**50


def test_a_killed_recording_lasted_as_long_as_is_known(tmp_path: Path) -> None:
    profile = _capture(tmp_path / "a", [(6, 1, 1, 0, 1, 10 * MS)], [], 0)
    assert recorded_ns(profile) == 7 * S


def test_many_waits_are_spread_in_bounded_memory() -> None:
    # A day of sleep is three spans, not 86,400.
    samples = np.array([(0, 0, _BLOCKED, 1, 86_400 * S)], SAMPLE_DTYPE)
    spans = np.array([(0, 86_399, 1, 1, 86_400 * S)], SPAN_DTYPE)
    waits = np.array([(0, 0, 0, 86_400 * S, 0)], WAIT_DTYPE)
    found = spread_waits(spans, samples, waits, {})
    assert len(found) <= 4
    assert int((found["ns"] * found["seconds"]).sum()) == 86_400 * S


# ---- the command line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ns"), [("0", 0), ("10", 10 * S), ("2.5s", 2_500 * MS), ("250ms", 250 * MS)]
)
def test_moments(text: str, ns: int) -> None:
    assert moment_ns(text) == ns


@pytest.mark.parametrize("text", ["-1", "-5s", "", "x", "1d", "1e3", "nan", "inf", "9" * 40])
def test_what_is_no_moment(text: str) -> None:
    for parse in (moment_ns, duration_ns):
        with pytest.raises(argparse.ArgumentTypeError, match="not a "):
            parse(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with run.aiflame in it, which reads as the profile above."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.aiflame").write_bytes(b"a capture")
    for verb in (report, stats):
        monkeypatch.setattr(verb, "read_recording", lambda path: _profile())
    return tmp_path


def _run(verb: object, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)  # type: ignore[attr-defined]
    code: int = verb.run(parser.parse_args(["run.aiflame", *arguments]))  # type: ignore[attr-defined]
    return code


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--from", "5", "--to", "5"], "--to 5 s is not after --from 5 s", "later than --from"),
        (["--from", "5s", "--to", "2s"], "--to 2 s is not after --from 5 s", "later than --from"),
        (["--from", "10"], "--from 10 s is past the end of the recording, 9.98 s", "--last 5s"),
        (["--to", "11s"], "--to 11 s is past the end of the recording, 9.98 s", "leave out --to"),
        (["--last", "1m"], "--last 60 s is longer than the recording of 9.98 s", "leave out"),
        (["--last", "1", "--to", "5"], "--last excludes --from and --to", "leave out --last"),
    ],
)
@pytest.mark.parametrize("verb", [report, stats])
def test_ranges_that_cannot_be(
    folder: Path, verb: object, arguments: list[str], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as error:
        _run(verb, *arguments)
    assert str(error.value) == message
    assert hint in str(error.value.hint)
    assert [path.name for path in folder.iterdir()] == ["run.aiflame"]


@pytest.mark.parametrize("arguments", [["--from", "-5s"], ["--from=-5s"], ["--last", "0"]])
def test_no_time_before_the_start(folder: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        _run(report, *arguments)
    assert exit_info.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        (["--from", "8s"], [8, 9]),
        (["--to", "1"], [0]),
        (["--to", "10s"], [0, 8, 9]),
        (["--last", "500ms"], [9]),
        (["--from", "0.9s", "--to", "8100ms"], [0, 8]),
    ],
)
def test_the_options_choose_seconds(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], seconds: list[int]
) -> None:
    assert _run(report, "-f", "folded", "--view", "cpu", "-o", "run.folded", *arguments) == 0
    text = (folder / "run.folded").read_text()
    weight = {0: 900, 8: 300, 9: 200}
    assert sum(int(line.rpartition(" ")[2]) for line in text.splitlines()) == MS * sum(
        weight[second] for second in seconds
    )
    assert " s of 9.98 s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--from", "8s"], "run-8s-end.svg"),
        (["--from", "500ms", "--to", "1"], "run-0.5s-1s.svg"),
        (["--to", "2"], "run-0s-2s.svg"),
        (["--last", "5"], "run-last-5s.svg"),
        ([], "run.svg"),
    ],
)
def test_a_range_has_a_name_of_its_own(folder: Path, arguments: list[str], name: str) -> None:
    assert _run(report, "-f", "svg", *arguments) == 0
    assert (folder / name).exists()


def test_every_format_is_of_the_range_and_says_so(folder: Path) -> None:
    for name in FORMATS:
        assert _run(report, "-f", name, "-o", name, "--from", "8", "--to", "9") == 0
    words = "8 s to 9 s of 9.98 s"
    for name in ("html", "svg", "speedscope"):
        text = (folder / name).read_text()
        assert words in text, name
        # The page's names are compressed; its own script speaks of idle threads.
        assert name == "html" or "idle" not in text, name
    assert json.loads((folder / "speedscope").read_text())["name"].endswith(words)
    assert (folder / "folded").read_text() == f"server (100);main;save {300 * MS}\n"
    found = decode((folder / "pprof").read_bytes())
    (sample,) = found.samples
    assert [*sample.values.values()] == [30, 300 * MS, 0, 0, 300 * MS]
    assert f"time range: {words}".encode() in gzip.decompress((folder / "pprof").read_bytes())


def test_tables_of_devices_are_of_the_range(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "read_recording", lambda path: _device_profile())
    assert _run(report, "-f", "csv", "-o", "tables", "--from", "3", "--to", "4") == 0
    kernels = [line.split(",") for line in (folder / "tables/kernels.csv").read_text().splitlines()]
    found = [dict(zip(kernels[0], row, strict=True)) for row in kernels[1:]]
    assert [(row["kernel"], row["calls"], row["samples"]) for row in found] == [("k", "1", "20")]
    assert len((folder / "tables/stalls.csv").read_text().splitlines()) == 2


def test_a_range_without_devices_says_which(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "read_recording", lambda path: _profile())
    assert _run(report, "-o", "run.svg", "--view", "gpu", "--from", "3", "--to", "4") == 0
    words = "No device API calls were seen in the recorded processes in 3 s to 4 s of 9.98 s."
    assert words in (folder / "run.svg").read_text()


def test_a_pprof_of_a_range_has_its_own_times() -> None:
    part = _part(_profile(), 8 * S, 9 * S)
    found = decode(FORMATS["pprof"].render(part, ReportOptions()))
    assert found.time_ns == RECORDING.started_unix_ns + 8 * S
    assert found.duration_ns == S


def test_stats_leave_out_what_is_known_of_the_whole_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(stats, "--from", "3", "--to", "6") == 0
    text = capsys.readouterr().out
    assert "3 s to 6 s of 9.98 s" in text
    assert "exact times are known of the whole recording only" in text
    assert "exact CPU" not in text
    # The thread that did nothing then is not listed, and the wait is as long as the range.
    assert "worker" not in text
    waits = text[text.index("Longest waits") : text.index("How stacks ended")]
    assert ["3,000.00", "0.00", "3,000.00"] in [line.split()[:3] for line in waits.splitlines()]


def test_an_empty_range_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(report, "-o", "run.svg", "--from", "1", "--to", "2") == 0
    words = "No thread of the target ran or waited in 1 s to 2 s of 9.98 s."
    assert words in (folder / "run.svg").read_text()
    assert "note: the capture holds no wall time in 1 s to 2 s of 9.98 s" in capsys.readouterr().err
    assert _run(stats, "--from", "1", "--to", "2") == 0
    assert words in capsys.readouterr().err
