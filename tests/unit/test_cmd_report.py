# SPDX-License-Identifier: Apache-2.0
"""`aiflame report`: which format, which file, which options, and what it refuses."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import pytest
from aiflame.agent.commands import report as verb
from aiflame.agent.errors import AiflameError, CaptureError, UsageError
from aiflame.agent.model.profile import Profile
from aiflame.agent.reports import FORMATS
from pprof_decoder import decode
from profiles import empty_profile, hostile_profile, small_profile


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(arguments))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with run.aiflame in it, which reads as the small profile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.aiflame").write_bytes(b"a capture")
    _reads_as(monkeypatch, small_profile())
    return tmp_path


def _reads_as(monkeypatch: pytest.MonkeyPatch, profile: Profile) -> None:
    monkeypatch.setattr(verb, "read_recording", lambda path: profile)


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "run.aiflame")


@pytest.mark.parametrize(
    ("arguments", "name", "starts"),
    [
        ([], "run.html", b"<!"),
        (["-f", "svg"], "run.svg", b"<"),
        (["-f", "folded"], "run.folded", b"client (200);"),
        (["-f", "speedscope"], "run.speedscope.json", b'{"$schema"'),
        (["-f", "pprof"], "run.pb.gz", b"\x1f\x8b"),
        (["-o", "a.htm"], "a.htm", b"<!"),
        (["-o", "a.svg"], "a.svg", b"<"),
        (["-o", "a.txt"], "a.txt", b"client (200);"),
        (["-o", "a.JSON"], "a.JSON", b'{"$schema"'),
        (["-o", "a.pprof"], "a.pprof", b"\x1f\x8b"),
        (["-o", "stacks", "-f", "folded"], "stacks", b"client (200);"),
    ],
)
def test_format_and_file(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], name: str, starts: bytes
) -> None:
    assert _run("run.aiflame", *arguments) == 0
    assert _files(folder) == [name]
    assert (folder / name).read_bytes().startswith(starts)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"Wrote {name} (") or err.startswith(f"Wrote {folder / name} (")


def test_the_default_file_lies_beside_the_capture(folder: Path, monkeypatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    _run(str(folder / "run.aiflame"), "-f", "folded")
    assert _files(folder) == ["elsewhere", "run.folded"]


def test_an_existing_file_is_kept_unless_forced(folder: Path) -> None:
    (folder / "run.svg").write_text("precious")
    with pytest.raises(UsageError, match=r"^file exists: run\.svg$") as error:
        _run("run.aiflame", "-f", "svg")
    assert error.value.hint == "use --force"
    assert (folder / "run.svg").read_text() == "precious"
    assert _run("run.aiflame", "-f", "svg", "--force") == 0
    assert (folder / "run.svg").read_text() != "precious"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "run.xyz"], "no format ends like this"),
        (["-o", "-"], "no format for standard output"),
        (["-f", "svg", "-o", "a.html"], "-f svg contradicts -o a.html"),
        (["-f", "svg", "-o", "run.aiflame", "--force"], "replace its own capture"),
        (["-f", "svg", "-o", "missing/a.svg"], "no such folder: missing"),
        (["-f", "svg", "-o", "."], "is a folder"),
        (["-f", "folded", "--inverted"], "--inverted has no effect with -f folded"),
        (["-f", "pprof", "--inverted"], "--inverted has no effect with -f pprof"),
        (["-f", "speedscope", "--inverted"], "--inverted has no effect with -f speedscope"),
        (["-f", "folded", "--min-width", "0"], "--min-width has no effect with -f folded"),
        (["-f", "speedscope", "--min-width", "1"], "--min-width has no effect with -f speedscope"),
        (["-o", "a.pb.gz", "--min-width", "1"], "--min-width has no effect with -f pprof"),
        (["-f", "pprof", "--per-thread"], "--per-thread has no effect with -f pprof"),
        (["-f", "folded", "--title", "x"], "--title has no effect with -f folded"),
        (["--plain"], "--plain has no effect with -f html"),
        (["-f", "svg", "--plain"], "--plain has no effect with -f svg"),
        (["-f", "speedscope", "--plain"], "--plain has no effect with -f speedscope"),
        (["-f", "pprof", "--plain"], "--plain has no effect with -f pprof"),
    ],
)
def test_contradictions_are_refused_by_name(
    folder: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        _run("run.aiflame", *arguments)
    assert message in str(error.value)
    assert error.value.hint
    assert error.value.exit_code == 2
    assert _files(folder) == []
    assert (folder / "run.aiflame").read_bytes() == b"a capture"


@pytest.mark.parametrize(
    "arguments", [["--min-width", "101"], ["--min-width", "nan"], ["-f", "png"], ["--view", "x"]]
)
def test_values_out_of_range(folder: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        _run("run.aiflame", *arguments)
    assert exit_info.value.code == 2


def test_a_capture_that_cannot_be_read_leaves_no_file(folder: Path, monkeypatch) -> None:
    def fail(path: Path) -> Profile:
        raise CaptureError(f"not an aiflame capture: {path}")

    monkeypatch.setattr(verb, "read_recording", fail)
    with pytest.raises(CaptureError):
        _run("run.aiflame", "-f", "folded")
    assert _files(folder) == []


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_standard_output(folder: Path, monkeypatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
    assert _run("run.aiflame", "-f", "pprof", "-o", "-") == 0
    assert len(decode(raw.getvalue()).samples) == len(small_profile().samples)
    assert _files(folder) == []


def test_binary_is_not_written_to_a_terminal_and_text_is(folder: Path, monkeypatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", _Terminal(raw))
    with pytest.raises(UsageError, match="pprof is binary"):
        _run("run.aiflame", "-f", "pprof", "-o", "-")
    assert raw.getvalue() == b""
    _run("run.aiflame", "-f", "folded", "-o", "-")
    assert raw.getvalue().startswith(b"client (200);")


def test_an_empty_view_is_said_and_still_written(folder: Path, monkeypatch, capsys) -> None:
    _reads_as(monkeypatch, empty_profile())
    assert _run("run.aiflame", "-f", "svg", "--view", "offcpu") == 0
    assert "note: the capture holds no off-CPU time" in capsys.readouterr().err
    assert _files(folder) == ["run.svg"]


_OPTIONS = {
    "html": ["--per-thread", "--inverted", "--min-width", "0.5", "--title", "<b>&\n\x1b"],
    "svg": ["--per-thread", "--inverted", "--min-width", "0.5", "--title", "<b>&\n\x1b"],
    "folded": ["--per-thread", "--plain"],
    "speedscope": ["--per-thread", "--title", "<b>&\n\x1b"],
    "pprof": ["--title", "<b>&\n\x1b"],
    "pstats": ["--hide-importlib"],
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("view", ["wall", "cpu", "offcpu"])
@pytest.mark.parametrize("make", [hostile_profile, empty_profile, small_profile])
def test_every_option_of_every_format_is_deterministic(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, view: str, make
) -> None:
    _reads_as(monkeypatch, make())
    for output in ("one", "two"):
        assert _run("run.aiflame", "-f", name, "--view", view, "-o", output, *_OPTIONS[name]) == 0
    first = (folder / "one").read_bytes()
    assert first == (folder / "two").read_bytes()
    assert b"\x1b" not in first or FORMATS[name].is_binary


def test_each_option_changes_the_output(folder: Path) -> None:
    def output(*arguments: str) -> bytes:
        _run("run.aiflame", "-o", "out", "--force", *arguments)
        return (folder / "out").read_bytes()

    for name, options in (
        ("svg", (["--inverted"], ["--per-thread"], ["--title", "x"], ["--min-width", "30"])),
        ("folded", (["--plain"], ["--per-thread"])),
        ("speedscope", (["--per-thread"], ["--title", "x"])),
        ("pprof", (["--title", "x"],)),
        ("pstats", ()),
    ):
        plain = output("-f", name)
        for option in options:
            assert output("-f", name, *option) != plain, (name, option)
        assert output("-f", name, "--view", "cpu") != output("-f", name, "--view", "offcpu")


def test_a_full_disk_is_named_and_leaves_nothing(folder: Path) -> None:
    # /dev/full answers every write with ENOSPC.
    with pytest.raises(AiflameError, match="cannot write /dev/full: no space left") as error:
        _run("run.aiflame", "-f", "folded", "-o", "/dev/full")
    assert error.value.exit_code == 1
    assert "free some space" in str(error.value.hint)


def test_help_ends_with_examples() -> None:
    assert verb.EPILOG.startswith("EXAMPLES\n")
    for line in verb.EPILOG.splitlines()[1:]:
        assert line.startswith("  aiflame report run.aiflame")
        assert len(line) <= 80
