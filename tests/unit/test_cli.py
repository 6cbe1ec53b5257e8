# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, exit codes, and one message for every error."""

from __future__ import annotations

import argparse
import errno
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiflame.agent import __version__, cli
from aiflame.agent.capture import workspace
from aiflame.agent.errors import (
    Aborted,
    AiflameError,
    CaptureError,
    EnvironmentUnfit,
    UsageError,
)
from support import AIFLAME


def test_without_a_verb_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: aiflame ")
    for verb in cli.VERBS:
        assert f"\n    {verb} " in err
    assert "EXAMPLES\n  sudo aiflame record -p 1234" in err


def _asked_for_help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(words)
    out, err = capsys.readouterr()
    assert (exit_info.value.code, err) == (0, "")
    return out


def test_help_is_the_same_however_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    whole = _asked_for_help(capsys, "--help")
    assert whole.startswith("usage: aiflame ")
    assert _asked_for_help(capsys, "help") == _asked_for_help(capsys, "-h") == whole
    for verb in cli.VERBS:
        text = _asked_for_help(capsys, "help", verb)
        assert (
            text == _asked_for_help(capsys, verb, "--help") == _asked_for_help(capsys, verb, "-h")
        )
        assert text.startswith(f"usage: aiflame {verb} ")
        assert "\nEXAMPLES\n" in text
        # what the list of verbs says is what the verb says of itself
        assert f"    {verb} " in whole


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _asked_for_help(capsys, "--version") == f"aiflame {__version__}\n"


@pytest.mark.parametrize(
    "words",
    [["recrod"], ["help", "recrod"], ["record", "--no-such-option"], ["--frobnicate"], [""]],
)
def test_a_wrong_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(words)
    out, err = capsys.readouterr()
    assert (exit_info.value.code, out) == (2, "")
    assert err.startswith("usage: aiflame ")
    assert "\naiflame" in err
    assert "error: " in err


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """`verb(body)`: `aiflame stats [anything]` now does this."""

    def does(body: Callable[[], int]) -> None:
        module = ModuleType("stats", "Do something.")
        module.EPILOG = ""  # type: ignore[attr-defined]
        module.add_arguments = lambda parser: parser.add_argument("rest", nargs="*")  # type: ignore[attr-defined]
        module.run = lambda args: body()  # type: ignore[attr-defined]
        monkeypatch.setattr(cli, "_module", lambda name: module)

    return does


def _raiser(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AiflameError("it failed", "do this"), 1),
        (UsageError("it failed", "do this"), 2),
        (EnvironmentUnfit("it failed", "do this"), 3),
        (CaptureError("it failed", "do this"), 1),
        (Aborted("it failed", "do this"), 130),
    ],
)
def test_an_error_is_one_line_and_its_cure(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str], error: AiflameError, code: int
) -> None:
    verb(_raiser(error))
    assert cli.main(["stats"]) == code
    assert capsys.readouterr() == ("", "aiflame: it failed\n\n  do this\n")
    error.hint = None
    assert cli.main(["stats", "-v"]) == code
    assert capsys.readouterr() == ("", "aiflame: it failed\n")


def test_names_in_errors_tell_terminals_nothing(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(_raiser(UsageError("no such: \x1b]0;x\a", "one of: \n    /a\x1b[2J\u202e\n    /b\udcff")))
    assert cli.main(["stats"]) == 2
    bad = "\ufffd"
    said = f"aiflame: no such: {bad}]0;x{bad}\n\n  one of: \n    /a{bad}[2J{bad}\n    /b{bad}\n"
    assert capsys.readouterr().err == said


def test_an_error_that_nobody_foresaw(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(_raiser(ZeroDivisionError("division by zero")))
    assert cli.main(["stats"]) == 1
    assert capsys.readouterr() == (
        "",
        "aiflame: internal error: ZeroDivisionError: division by zero\n"
        "\n  run again with -vv and report what it prints\n",
    )


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (MemoryError(), "out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory"),
        (BlockingIOError(errno.EAGAIN, "can't start new thread"), "no more threads or processes"),
    ],
)
def test_a_machine_that_is_full(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str], error: Exception, what: str
) -> None:
    verb(_raiser(error))
    assert cli.main(["stats"]) == 1
    assert capsys.readouterr().err.startswith(f"aiflame: {what}")


@pytest.mark.parametrize(
    "words",
    [
        ["stats", "run.aiflame"],
        ["report", "run.aiflame", "-f", "svg", "-o", "-"],
        ["diff", "a.aiflame", "b.aiflame", "-o", "/dev/null", "-f", "folded"],
        ["recover", "run.aiflame"],
    ],
)
def test_a_current_folder_that_was_deleted(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(workspace, "_candidates", lambda: [tmp_path / "own"])
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    try:
        assert cli.main(words) == 1
    finally:
        os.chdir("/")
    said = "aiflame: the current folder was deleted\n\n  change to another folder: cd FOLDER\n"
    assert capsys.readouterr() == ("", said)


def test_a_file_that_is_missing_is_no_deleted_folder(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(_raiser(FileNotFoundError(errno.ENOENT, "No such file or directory")))
    assert cli.main(["stats"]) == 1
    assert "internal error: FileNotFoundError" in capsys.readouterr().err


@pytest.mark.parametrize("error", [UsageError("it failed"), ZeroDivisionError("it failed")])
def test_where_in_the_program_is_shown_on_request(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    verb(_raiser(error))
    for flags, is_shown in ((["-v"], False), (["-vv"], True), (["-v", "-v"], True)):
        assert cli.main(["stats", *flags]) == getattr(error, "exit_code", 1)
        err = capsys.readouterr().err
        assert err.startswith("Traceback (most recent call last):\n") is is_shown
        assert (", in body\n" in err) is is_shown
        assert "aiflame: " in err


def test_ctrl_c(verb: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    verb(_raiser(KeyboardInterrupt()))
    assert cli.main(["stats"]) == 130
    assert capsys.readouterr() == ("", "aiflame: interrupted\n")


def test_an_output_that_nobody_reads_ends_it_in_silence(
    verb: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)

        def prints() -> int:
            print("hello", flush=True)
            return 0

        verb(prints)
        assert cli.main(["stats"]) == 141
    assert capsys.readouterr().err == ""


def test_another_pipe_that_breaks_is_told_of(
    verb: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    verb(_raiser(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    assert cli.main(["stats"]) == 1
    assert "Broken pipe" in capfd.readouterr().err


def test_a_request_for_a_copy_does_not_end_a_recording_that_begins(
    verb: Callable[..., None],
) -> None:
    ended = []
    before = signal.signal(signal.SIGUSR1, lambda *_: ended.append(True))

    def asked() -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        return 0

    try:
        verb(asked)
        assert cli.main(["record"]) == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not ended


def test_the_verbs_exit_code_is_the_programs(verb: Callable[..., None]) -> None:
    for code in (0, 4):
        verb(lambda code=code: code)
        assert cli.main(["stats"]) == code


def test_a_verb_knows_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    module = cli._module("stats")
    monkeypatch.setattr(module, "run", lambda args: seen.append(args) or 0)
    words = ["stats", "a b.aiflame", "-n", "3"]
    assert cli.main(words) == 0
    assert shlex.split(seen[0].command_words) == ["aiflame", *words]


@pytest.mark.parametrize(
    "answer",
    ["print('x' * 1_000_000)", "print_tables([Table('t', '', ('x',), (('y' * 99,),) * 9_999)])"],
)
def test_a_reader_that_goes_away(answer: str) -> None:
    # GIVEN a pipe that nobody reads
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = (
        "import sys\n"
        "from aiflame.agent import cli\n"
        "from aiflame.agent.commands.tables import print_tables\n"
        "from aiflame.agent.reports.table import Table\n"
        "module = cli._module('stats')\n"
        f"module.run = lambda args: {answer}\n"
        "sys.exit(cli.main(['stats', 'x']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)
    # THEN it ends as if by SIGPIPE, and says nothing
    assert (done.returncode, done.stderr) == (141, b"")


_LIMIT_BYTES = 1 << 16


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LIMIT_BYTES, _LIMIT_BYTES))


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "answer", ["print('x' * 1_000_000)", "write_to_stdout(b'x' * 1_000_000)", "print('x')"]
)
def test_an_output_that_takes_no_more(answer: str, unbuffered: str, tmp_path: Path) -> None:
    # GIVEN a file that cannot become as large as it is to be; a full disk takes nothing at all
    code = (
        "import sys\n"
        "from aiflame.agent import cli\n"
        "from aiflame.agent.commands.report_output import write_to_stdout\n"
        "module = cli._module('stats')\n"
        f"module.run = lambda args: {answer} or 0\n"
        "sys.exit(cli.main(['stats', 'x']))\n"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    cases = [(Path("/dev/full"), "no space left on device")]
    if "000" in answer:
        cases.append((tmp_path / "out", "file too large"))
    for path, reason in cases:
        with path.open("wb") as file:
            done = subprocess.run(
                [sys.executable, "-c", code],
                stdout=file,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                env=environment,
                preexec_fn=_limit_files,
            )
        # THEN it says so, in one line and its cure
        said = f"aiflame: cannot write standard output: {reason}\n\n  raise the limit of files"
        assert done.stderr.startswith(said)
        assert done.stderr.count("\n") == 3
        assert done.returncode == 1


def test_help_for_an_output_that_takes_nothing() -> None:
    with Path("/dev/full").open("wb") as file:
        words = [*AIFLAME, "--help"]
        done = subprocess.run(words, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    said = "aiflame: cannot write standard output: no space left on device\n"
    assert (done.returncode, done.stderr.startswith(said)) == (1, True)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_does_not_block_gets_all(unbuffered: str) -> None:
    # GIVEN a pipe that holds less, and that another process has set to O_NONBLOCK
    code = (
        "import os, sys\n"
        "os.set_blocking(1, False)\n"
        "from aiflame.agent import cli\n"
        "module = cli._module('stats')\n"
        "module.run = lambda args: print('x' * 1_000_000) or 0\n"
        "sys.exit(cli.main(['stats', 'x']))\n"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "x" * 1_000_000 + "\n"


def test_only_the_chosen_verb_is_imported() -> None:
    code = (
        "import sys\n"
        "from aiflame.agent import cli\n"
        "cli.main(['stats', '/nonexistent'])\n"
        "known = sorted(n for n in sys.modules if n.startswith('aiflame.agent.'))\n"
        "print(*known)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    parts = {name.split(".")[2] for name in done.stdout.split()}
    assert {"commands", "capture", "reports"} <= parts
    assert parts & {"recording", "symbols", "doctor"} == set()
    assert done.stderr == "aiflame: no such capture: /nonexistent\n"


def test_a_recording_imports_nothing_of_what_comes_after_it() -> None:
    code = "import sys, aiflame.agent.commands.record; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    needless = (
        "sqlite3",
        "capstone",
        "rich",
        "aiflame.agent.symbolize",
        "aiflame.agent.reports.rows",
    )
    assert [name for name in done.stdout.split() if name in needless] == []


def test_as_a_module() -> None:
    done = subprocess.run([*AIFLAME, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"aiflame {__version__}\n"


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), True),
        (ImportError("libm.so.6: failed to map segment from shared object"), True),
        (ImportError("No module named 'numpy'"), False),
        (OSError(errno.ENOENT, "No such file or directory"), False),
    ],
)
def test_what_finds_no_room_within_a_limit_says_which(
    error: Exception,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: str) -> None:
        raise error

    monkeypatch.setattr(resource, "getrlimit", lambda _: (2_000_000_000, 2_000_000_000))
    monkeypatch.setattr(cli, "_parser", fail)
    assert cli.main(["stats", "x.aiflame"]) == 1
    said = capsys.readouterr().err
    assert ("out of memory: the limit of this process is 2,000 MB" in said) is is_told
    assert ("internal error" in said) is not is_told
