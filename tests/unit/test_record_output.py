# SPDX-License-Identifier: Apache-2.0
"""Which files a recording writes: every combination of -o and -f."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path

import pytest
from aiflame.agent.commands.record_output import OutputPlan, plan_output
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.reports import FORMATS
from aiflame.agent.reports.endings import ending_of

_DEFAULT = "aiflame-server-100-20260102T030405Z"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, at a fixed time."""
    monkeypatch.chdir(tmp_path)
    moment = time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0))
    monkeypatch.setattr(time, "gmtime", lambda: moment)
    return tmp_path


def _plan(output: str | None, form: str | None, force: bool = False) -> OutputPlan:
    return plan_output(output, form, "server-100", force)


@pytest.mark.parametrize(
    ("output", "form", "capture", "report", "report_path"),
    [
        # Neither: the capture, and a page beside it.
        (None, None, f"{_DEFAULT}.aiflame", "html", f"{_DEFAULT}.html"),
        # -f alone: only that, under the default name.
        (None, "aiflame", f"{_DEFAULT}.aiflame", None, None),
        (None, "html", None, "html", f"{_DEFAULT}.html"),
        (None, "svg", None, "svg", f"{_DEFAULT}.svg"),
        (None, "folded", None, "folded", f"{_DEFAULT}.folded"),
        (None, "speedscope", None, "speedscope", f"{_DEFAULT}.speedscope.json"),
        (None, "pprof", None, "pprof", f"{_DEFAULT}.pb.gz"),
        # -o alone: the ending decides.
        ("run.aiflame", None, "run.aiflame", "html", "run.html"),
        ("a.b.aiflame", None, "a.b.aiflame", "html", "a.b.html"),
        ("run.html", None, None, "html", "run.html"),
        ("run.svg", None, None, "svg", "run.svg"),
        ("run.SVG", None, None, "svg", "run.SVG"),
        ("run.txt", None, None, "folded", "run.txt"),
        ("run.json", None, None, "speedscope", "run.json"),
        ("run.pb.gz", None, None, "pprof", "run.pb.gz"),
        # Both: -f decides, and -o is the name where it agrees.
        ("run.aiflame", "aiflame", "run.aiflame", None, None),
        ("run", "aiflame", "run", None, None),
        ("run.aiflame", "svg", None, "svg", "run.svg"),
        ("run.aiflame", "speedscope", None, "speedscope", "run.speedscope.json"),
        ("run.svg", "svg", None, "svg", "run.svg"),
        ("run.htm", "html", None, "html", "run.htm"),
        ("run", "folded", None, "folded", "run"),
        ("run.data", "pprof", None, "pprof", "run.data"),
        ("/dev/null", "folded", None, "folded", "/dev/null"),
    ],
)
def test_what_is_written(
    output: str | None,
    form: str | None,
    capture: str | None,
    report: str | None,
    report_path: str | None,
) -> None:
    def path(name: str | None) -> Path | None:
        return None if name is None else Path(name)

    plan = _plan(output, form)
    named = path(output)
    assert plan == OutputPlan(path(capture), report, path(report_path), force=False, named=named)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("output", [None, "run.aiflame", "run.svg"])
def test_a_folder_that_takes_no_file_is_found_before_anything_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, output: str | None, code: int
) -> None:
    # GIVEN what root meets on a network mount: the folder opens, and a file cannot be made
    opened = os.open

    def refuses(path: str | Path, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(AiflameError, match=r"cannot write .*(denied|read-only)") as error:
        _plan(output, None)
    assert error.value.hint == "choose another folder with -o"
    _plan("/dev/null", "folded")


def test_planning_leaves_no_file(folder: Path) -> None:
    (folder / "run.svg").write_bytes(b"old")
    _plan(None, None)
    _plan("run.svg", None, force=True)
    assert [path.name for path in folder.iterdir()] == ["run.svg"]
    assert (folder / "run.svg").read_bytes() == b"old"


def test_a_current_folder_that_was_deleted(folder: Path) -> None:
    folder.rmdir()
    with pytest.raises(AiflameError, match="no such file or directory") as error:
        _plan(None, None)
    assert str(error.value.hint).startswith("its folder was removed")


@pytest.mark.parametrize(
    ("output", "form", "kept"),
    [
        ("run.aiflame", None, "run.aiflame"),
        ("run.svg", None, "run.partial.aiflame"),
        ("run.aiflame", "svg", "run.partial.aiflame"),
        ("folder/run.html", None, "folder/run.partial.aiflame"),
        (None, "html", f"{_DEFAULT}.partial.aiflame"),
        ("/dev/null", "folded", "null.partial.aiflame"),
        ("/dev/stdout", "svg", "stdout.partial.aiflame"),
    ],
)
def test_where_a_recording_that_fails_is_kept(
    folder: Path, output: str | None, form: str | None, kept: str
) -> None:
    (folder / "folder").mkdir()
    assert _plan(output, form).kept_path == Path(kept)


@pytest.mark.parametrize(
    ("existing", "output", "form"),
    [("run.html", "run.aiflame", None), (f"{_DEFAULT}.aiflame", None, None)],
)
def test_a_fifo_is_refused_where_it_was_not_named(
    folder: Path, existing: str, output: str | None, form: str | None
) -> None:
    os.mkfifo(folder / existing)
    for force in (False, True):
        with pytest.raises(UsageError, match="not a file, and in the way"):
            _plan(output, form, force)


def test_a_fifo_that_was_named_is_written_into(folder: Path) -> None:
    os.mkfifo(folder / "run.html")
    assert _plan("run.html", None).named == Path("run.html")


@pytest.mark.parametrize(
    ("output", "form", "message"),
    [
        ("-", None, "a recording cannot go to standard output"),
        ("-", "folded", "a recording cannot go to standard output"),
        ("run", None, "no format ends like this: run"),
        ("run.xyz", None, "no format ends like this: run.xyz"),
        ("", None, "no format ends like this: [unnamed]"),
        ("missing/run.aiflame", None, "no such folder: missing"),
        ("missing/run.svg", None, "no such folder: missing"),
        ("folder.svg", None, "is a folder: folder.svg"),
        ("run.svg", "html", "-f html contradicts -o run.svg, which ends like svg"),
        ("run.svg", "aiflame", "-f aiflame contradicts -o run.svg, which ends like svg"),
        ("run.pb.gz", "folded", "-f folded contradicts -o run.pb.gz, which ends like pprof"),
    ],
)
def test_what_is_refused(folder: Path, output: str, form: str | None, message: str) -> None:
    (folder / "folder.svg").mkdir()
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$") as error:
        _plan(output, form)
    assert error.value.hint


@pytest.mark.parametrize(
    ("existing", "output", "form"),
    [
        ("run.aiflame", "run.aiflame", None),
        ("run.html", "run.aiflame", None),  # the page beside it
        ("run.aiflame", "run.aiflame", "aiflame"),
        ("run.svg", "run.svg", None),
        ("run.svg", "run.aiflame", "svg"),
        (f"{_DEFAULT}.html", None, None),
    ],
)
def test_an_existing_file_is_refused_before_anything_runs(
    folder: Path, existing: str, output: str | None, form: str | None
) -> None:
    (folder / existing).write_text("precious")
    with pytest.raises(UsageError, match=f"^file exists: {re.escape(existing)}$") as error:
        _plan(output, form)
    assert error.value.hint == "use --force"
    assert _plan(output, form, force=True).force


@pytest.mark.parametrize(
    ("existing", "output", "form"),
    [
        ("run.html", "run.aiflame", "aiflame"),
        ("run.aiflame", "run.aiflame", "svg"),
        ("run.aiflame", "run.svg", None),
    ],
)
def test_an_existing_file_that_is_not_written_is_no_matter(
    folder: Path, existing: str, output: str, form: str | None
) -> None:
    (folder / existing).write_text("precious")
    assert not _plan(output, form).force


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("server-100", "server-100"),
        ("kworker/0:1-12", "kworker_0_1-12"),
        ("../../etc/x-1", ".._.._etc_x-1"),
        ("a b\n\x1b[31m-1", "a_b___31m-1"),
        ("-rf-1", "-rf-1"),
        ("tmux: server-1", "tmux__server-1"),
        ("x.aiflame-1", "x.aiflame-1"),
        ("\u05d0\u05d1-1", "\u05d0\u05d1-1"),
        ("\udcff\ufffd\u202e-1", "___-1"),
        ("", ""),
    ],
)
def test_a_name_that_a_process_chose_is_only_a_name(folder: Path, stem: str, name: str) -> None:
    plan = plan_output(None, None, stem, False)
    assert plan.capture == Path(f"aiflame-{name}-20260102T030405Z.aiflame")
    assert plan.report_path == Path(f"aiflame-{name}-20260102T030405Z.html")
    plan.capture.touch()
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("letter", ["x", "\u05d0", "\U00020000"])
def test_a_name_that_somebody_else_chose_is_never_too_long(folder: Path, letter: str) -> None:
    plan = plan_output(None, None, f"cgroup-{letter * 255}", False)
    assert plan.capture is not None
    plan.capture.touch()
    assert plan.capture.name.startswith(f"aiflame-cgroup-{letter}")


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(AiflameError, match="file name too long"):
        _plan("x" * 300 + ".svg", None)


def test_a_format_is_called_what_its_report_says() -> None:
    for name, report in FORMATS.items():
        assert ending_of(name) == report.extension
