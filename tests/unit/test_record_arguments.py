# SPDX-License-Identifier: Apache-2.0
"""`aiflame record`: what its arguments mean, and what it refuses before anything is started."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from aiflame.agent import cli
from aiflame.agent.commands import record as verb
from aiflame.agent.commands.record_options import RecordOptions
from aiflame.agent.commands.record_output import OutputPlan
from aiflame.agent.kernel import abi
from aiflame.agent.processes import procfs
from aiflame.agent.processes.targets import Target
from support import wait_until

_S = 10**9


def _parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return parser.parse_args(arguments)


class _Recordings:
    """Stands for the session: keeps what it is asked to do."""

    def __init__(self) -> None:
        self.asked: list[tuple[Target, RecordOptions, OutputPlan]] = []

    def record(self, target: Target, options: RecordOptions, plan: OutputPlan, *_: object) -> int:
        self.asked.append((target, options, plan))
        return 0


@pytest.fixture(autouse=True)
def recordings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Recordings:
    """No test here records; and each has an empty working directory."""
    monkeypatch.chdir(tmp_path)
    fake = _Recordings()
    monkeypatch.setattr(verb, "record", fake.record)
    return fake


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("30", 30 * _S),
        ("30s", 30 * _S),
        ("1.5", 1_500_000_000),
        ("250ms", 250_000_000),
        ("5m", 300 * _S),
        ("2h", 7200 * _S),
        ("0.001ms", 1_000),
    ],
)
def test_durations(text: str, ns: int) -> None:
    assert _parsed("-d", text).duration == ns
    assert _parsed("--min-wait", text).min_wait == ns


_NOT_DURATIONS = ("0", "0s", "-5", "5x", "5 s", "s", "", "1e3", "nan", "inf", "1_0", ".5", "5S")
_EXTREME_DURATIONS = ("0.0000000001", "9" * 30 + "h", "9" * 400)


@pytest.mark.parametrize("text", [*_NOT_DURATIONS, *_EXTREME_DURATIONS])
@pytest.mark.parametrize("option", ["-d", "--min-wait"])
def test_what_is_no_duration(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        _parsed(f"{option}{'=' if option[1] == '-' else ''}{text}")
    assert exit_info.value.code == 2
    assert re.search("not a duration: |expected one argument", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "pids"), [("1", [1]), ("7,3", [7, 3]), ("7,3,7", [7, 3]), ("4194304", [4194304])]
)
def test_pids(text: str, pids: list[int]) -> None:
    assert _parsed("-p", text).pid == pids


@pytest.mark.parametrize("text", ["0", "01", "x", "1,", ",1", "1 2", "1.5", "", "0x10", "1,0"])
def test_what_is_no_list_of_pids(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        _parsed("-p", text)
    assert exit_info.value.code == 2
    assert f"not a list of process ids: {text}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-F", "--frequency", "-r", "--rate"])
def test_frequencies(option: str) -> None:
    assert _parsed(option, "199").frequency == 199
    assert _parsed().frequency == 99
    assert _parsed(option, "1").frequency == 1
    assert _parsed(option, "100000").frequency == 100_000


@pytest.mark.parametrize("text", ["0", "100001", "-1", "9.5", "x", "", "9" * 5_000])
@pytest.mark.parametrize("option", ["--frequency", "--stack-storage-size"])
def test_numbers_out_of_range(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = "16777217" if (option, text) == ("--stack-storage-size", "100001") else text
    with pytest.raises(SystemExit) as exit_info:
        _parsed(f"{option}={text}")
    assert exit_info.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err.replace(
        "-F/--frequency/-r/--rate", option
    )


_ONE_OF = (
    "give one of -p PID, -a, --cgroup PATH, --container ID|NAME, --unit NAME, --comm NAME or -- CMD"
)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ([], "record what?", _ONE_OF),
        (["--"], "record what?", _ONE_OF),
        (["-p", "1", "-a"], "-p and -a exclude each other", "use only -p"),
        (["-a", "--cgroup", "/x"], "-a and --cgroup exclude each other", "use only -a"),
        (["-a", "--", "ls"], "-a and -- CMD exclude each other", "use only -a"),
        (["-p", "1", "ls"], "-p and -- CMD exclude each other", "use only -p"),
        (["-p", "1", "-a", "--cgroup", "/x", "--", "ls"],
         "-p and -a and --cgroup and -- CMD exclude each other", "use only -p"),
        (["-a", "-U", "-K"], "-U and -K exclude each other", "leave both off for whole stacks"),
        (["-a", "-s"], "-s has no effect with -a", "it is about the children of a process"),
        (["-a", "--no-subprocesses"], "-s has no effect with -a",
         "it is about the children of a process"),
        (["--cgroup", "/x", "-s"], "-s has no effect with --cgroup",
         "it is about the children of a process"),
        (["--container", "x", "--unit", "y"], "--container and --unit exclude each other",
         "use only --container"),
        (["--unit", "x", "--comm", "y"], "--unit and --comm exclude each other", "use only --unit"),
        (["--comm", "x", "--", "ls"], "--comm and -- CMD exclude each other", "use only --comm"),
        (["--container", "x", "-s"], "-s has no effect with --container",
         "it is about the children of a process"),
        (["--unit", "x", "--no-subprocesses"], "-s has no effect with --unit",
         "it is about the children of a process"),
        (["-a", "-o", "-"], "a recording cannot go to standard output", "aiflame report can: -o -"),
        (["-a", "-o", "no/run.svg"], "no such folder: no", "mkdir -p no"),
        (["--cgroup", "/nonexistent"], "not a cgroup v2 directory: /nonexistent",
         "systemd-cgls shows the groups of this machine"),
    ],
)  # fmt: skip
def test_contradictions_exit_2_with_words(
    recordings: _Recordings,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
    hint: str,
) -> None:
    assert cli.main(["record", *arguments]) == 2
    assert capsys.readouterr() == ("", f"aiflame: {message}\n\n  {hint}\n")
    assert recordings.asked == []


def test_a_command_that_does_not_exist(
    recordings: _Recordings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["record", "--", "no-such-program-here"]) == 2
    assert "cannot run no-such-program-here: no such program" in capsys.readouterr().err
    assert recordings.asked == []


def test_a_process_that_does_not_exist(
    recordings: _Recordings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["record", "-p", f"{os.getpid()},4194305"]) == 1
    assert "no such process: 4194305" in capsys.readouterr().err
    assert recordings.asked == []


def test_an_existing_file_is_refused_before_the_command_starts(
    recordings: _Recordings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.html").write_text("precious")
    command = ["record", "-o", "run.aiflame", "--", "touch", "started"]
    assert cli.main(command) == 2
    assert "file exists: run.html" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html"]


def test_defaults(recordings: _Recordings) -> None:
    pid = os.getpid()
    assert cli.main(["record", "-p", str(pid), "-o", "run.aiflame"]) == 0
    [(target, options, plan)] = recordings.asked
    assert (target.filter, target.pids) == (abi.Filter.PIDS, (pid,))
    assert target.existing_pids() == [pid]
    assert plan == OutputPlan(
        Path("run.aiflame"), "html", Path("run.html"), False, Path("run.aiflame")
    )
    assert options == RecordOptions(
        frequency_hz=99,
        duration_ns=None,
        follow_children=False,
        off_cpu=True,
        user_stacks=True,
        kernel_stacks=True,
        stacks_max=16384,
        sums_max=65536,
        threads_max=65536,
        wait_event_ns=100_000_000,
        unwind_bytes_max=256 << 20,
        command_words=f"aiflame record -p {pid} -o run.aiflame",
        gpu="auto",
    )
    assert options.period_ns == 10_101_010


@pytest.mark.parametrize(("words", "permille"), [("", 1000), (" --gpu-duty 2.5", 25)])
def test_the_duty_of_helpers_arrives(recordings: _Recordings, words: str, permille: int) -> None:
    assert cli.main(f"record -a -d 2s --gpu auto{words}".split()) == 0
    [(_, options, _)] = recordings.asked
    assert options.gpu_duty_permille == permille


@pytest.mark.parametrize(("words", "calibrates"), [("", False), (" --gpu-calibrate", True)])
def test_the_wish_to_calibrate_arrives(
    recordings: _Recordings, words: str, calibrates: bool
) -> None:
    assert cli.main(f"record -a -d 2s --gpu auto{words}".split()) == 0
    [(_, options, _)] = recordings.asked
    assert options.gpu_calibrate is calibrates


@pytest.mark.parametrize(
    "words",
    [
        *("--gpu-duty 0", "--gpu-duty 101", "--gpu none --gpu-duty 5"),
        *("--gpu none --gpu-calibrate", "--gpu-duty 10 --gpu-calibrate"),
    ],
)
def test_a_duty_that_makes_no_sense_is_refused(recordings: _Recordings, words: str) -> None:
    try:
        code = cli.main(f"record -a {words}".split())
    except SystemExit as ended:
        code = cast(int, ended.code)
    assert (code, recordings.asked) == (2, [])


def test_every_option_arrives(recordings: _Recordings) -> None:
    given = (
        "record -a -F 50 -d 2s --no-off-cpu -U --stack-storage-size 1 --hash-storage-size 2"
        " --thread-storage-size 3 --min-wait 4ms --unwind-memory 5 --gpu none -o run.svg --force -q"
    )
    assert cli.main(given.split()) == 0
    [(target, options, plan)] = recordings.asked
    assert target.filter == abi.Filter.ALL
    assert plan == OutputPlan(None, "svg", Path("run.svg"), True, Path("run.svg"))
    assert options == RecordOptions(
        frequency_hz=50,
        duration_ns=2 * _S,
        follow_children=False,
        off_cpu=False,
        user_stacks=True,
        kernel_stacks=False,
        stacks_max=1,
        sums_max=2,
        threads_max=3,
        wait_event_ns=4_000_000,
        unwind_bytes_max=5 << 20,
        command_words=f"aiflame {given}",
        gpu="none",
    )
    # Of all processes, children are processes, too.
    assert options.for_programs(target).follow_children


@pytest.mark.parametrize(
    ("options", "follows"),
    [([], True), (["-s"], True), (["--subprocesses"], True), (["--no-subprocesses"], False)],
)
def test_a_command_is_held_and_its_children_followed(
    recordings: _Recordings, tmp_path: Path, options: list[str], follows: bool
) -> None:
    # The command's own options are its own.
    assert cli.main(["record", *options, "--", "/bin/touch", "--", "-d"]) == 0
    [(target, asked, plan)] = recordings.asked
    assert target.command is not None
    assert target.pids == (target.command.pid,)
    assert target.existing_pids() == []
    assert target.words == f"touch (pid {target.command.pid})"
    assert asked.follow_children is follows
    assert plan.kept_path.name.startswith(f"aiflame-touch-{target.command.pid}-")
    # It never ran, since nothing released it, and it is gone.
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(target.command.pid, 0)


@pytest.mark.parametrize("option", ["--container", "--unit", "--comm"])
def test_an_empty_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        _parsed(option, "")
    assert exit_info.value.code == 2
    assert f"argument {option}: a name is missing" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["container", "unit", "comm"])
def test_what_is_found_is_recorded(
    recordings: _Recordings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
) -> None:
    asked = []

    def find(wanted: str) -> Target:
        asked.append(wanted)
        note = "note: found in some way"
        return Target(abi.Filter.PIDS, "it", "web-7", (7,), follows_children=True, note=note)

    monkeypatch.setattr(verb, f"target_of_{option}", find)
    assert cli.main(["record", f"--{option}", "web"]) == 0
    [(target, options, plan)] = recordings.asked
    assert asked == ["web"]
    assert target.pids == (7,)
    assert options.follow_children
    assert plan.kept_path.name.startswith("aiflame-web-7-")
    assert capsys.readouterr() == ("", "note: found in some way\n")


def test_children_of_processes_of_a_name_are_not_followed_on_request(
    recordings: _Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Target(abi.Filter.PIDS, "it", "web-7", (7,), follows_children=True)
    monkeypatch.setattr(verb, "target_of_comm", lambda _: found)
    assert cli.main(["record", "--comm", "web", "--no-subprocesses"]) == 0
    [(target, options, _)] = recordings.asked
    assert not options.follow_children
    assert target.existing_pids() == [7]


def test_children_of_a_process_are_followed_on_request(recordings: _Recordings) -> None:
    assert cli.main(["record", "-p", str(os.getpid()), "-s", "-K"]) == 0
    [(_, options, _)] = recordings.asked
    assert options.follow_children
    assert (options.user_stacks, options.kernel_stacks) == (False, True)


@pytest.fixture(params=["cat; true", "(cat; true); true"])
def parent(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A shell, and how many processes there are below it."""
    script = str(request.param)
    count = 1 + script.count("(")
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE) as shell:
        wait_until(lambda: len(procfs.descendants([shell.pid])) == count)
        yield shell.pid, count


def test_children_that_are_not_recorded_are_said(
    recordings: _Recordings, parent: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    pid, count = parent
    children, them = ("1 child", "it") if count == 1 else (f"{count} children", "them")
    assert cli.main(["record", "-p", str(pid)]) == 0
    words = f"{children} of sh (pid {pid})"
    assert capsys.readouterr().err == f"note: {words} not recorded: -s includes {them}\n"
    # WHEN the user has decided, or asked for quiet, THEN nothing is said
    for options in (["-s"], ["--no-subprocesses"], ["-q"]):
        assert cli.main(["record", "-p", str(pid), *options]) == 0
    assert capsys.readouterr().err == ""
    followed = [len(target.existing_pids()) for target, *_ in recordings.asked]
    assert followed == [1, 1 + count, 1, 1]
