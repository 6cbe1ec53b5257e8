# SPDX-License-Identifier: Apache-2.0
"""What is read where there is no capture yet: of recordings that run, or were killed."""

from __future__ import annotations

import argparse
import errno
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.capture import workspace
from aiflame.agent.capture.workspace import Destination, Workspace, unfinished
from aiflame.agent.commands import captures, recover
from aiflame.agent.commands.captures import read_recording
from aiflame.agent.errors import AiflameError, CaptureError, EnvironmentUnfit, UsageError
from aiflame.agent.model.window import Window
from aiflame.agent.sinks import rebuilt
from aiflame.agent.sinks.segments import RecordedWindows, SegmentSink
from windows import FACTS, RandomRecording

_WINDOWS = RandomRecording(7).windows(3)
_capture_of_windows = rebuilt.capture_of_windows


@pytest.fixture(autouse=True)
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where recordings are written."""
    monkeypatch.setattr(workspace, "_candidates", lambda: [tmp_path / "lib"])
    monkeypatch.chdir(tmp_path)
    return tmp_path / "lib" / "recordings"


def _begun(path: Path) -> Workspace:
    """Returns a recording that runs, of which each window is in a segment of its own."""
    made = Workspace.create(Destination(path, "aiflame record", force=False, owner=None))
    for number, window in enumerate(_WINDOWS):
        sink = SegmentSink(made.directory, FACTS, first=number)
        sink.put(window)
        sink.close()
    return made


def _end(recording: Workspace) -> None:
    windows = RecordedWindows(recording.directory)
    _capture_of_windows(recording.database, windows, windows.facts, with_names=False)
    recording.publish()
    with recording:
        return


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a capture."""
    return tmp_path / "run.aiflame"


@pytest.fixture
def recording(path: Path) -> Iterator[Workspace]:
    """One that runs, which a test ends."""
    made = _begun(path)
    yield made
    assert not made.directory.exists()


_Meanwhile = Callable[[Callable[[], None]], None]


@pytest.fixture(params=["before any window", "after the first"])
def meanwhile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _Meanwhile:
    """Has something done while a recording that runs is read."""
    running = captures.running

    def do(act: Callable[[], None]) -> None:
        def found(path: Path) -> Path | None:
            folder = running(path)
            act()
            return folder

        def read(path: Path, windows: Iterable[Window], *rest: Any, **more: Any) -> None:
            def read_windows() -> Iterator[Window]:
                for number, window in enumerate(windows):
                    if not number:
                        act()
                    yield window

            _capture_of_windows(path, read_windows(), *rest, **more)

        if request.param == "after the first":
            monkeypatch.setattr(rebuilt, "capture_of_windows", read)
        else:
            monkeypatch.setattr(captures, "running", found)

    return do


def test_a_recording_that_runs_is_read_as_far_as_it_has_come(
    recording: Workspace, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = read_recording(path)
    assert profile.recording.duration_ns == _WINDOWS[-1].end_ns
    assert "still being recorded" in capsys.readouterr().err
    _end(recording)


@pytest.fixture
def no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a container has whose files are read-only."""

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)


@pytest.mark.usefixtures("no_temporary_directory")
def test_without_a_temporary_directory_recordings_have_one(
    recording: Workspace, path: Path, recordings: Path
) -> None:
    profile = read_recording(path)
    assert profile.recording.duration_ns == _WINDOWS[-1].end_ns
    _end(recording)
    assert list(recordings.iterdir()) == []
    assert list(recordings.parent.iterdir()) == [recordings]


@pytest.mark.usefixtures("no_temporary_directory")
def test_without_any_directory_it_says_what_to_set(
    recording: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with recording:
        monkeypatch.setattr(workspace, "_candidates", lambda: [tmp_path / "file" / "lib"])
        with pytest.raises(EnvironmentUnfit, match="no directory for temporary files") as error:
            read_recording(recording.directory)
    assert "export TMPDIR=" in str(error.value.hint)


def test_one_that_ends_meanwhile_is_read_whole(
    recording: Workspace,
    path: Path,
    meanwhile: _Meanwhile,
    capsys: pytest.CaptureFixture[str],
) -> None:
    meanwhile(lambda: _end(recording))
    profile = read_recording(path)
    assert profile.recording.duration_ns == _WINDOWS[-1].end_ns
    assert "has ended meanwhile" in capsys.readouterr().err


def test_one_that_is_thrown_away_meanwhile_is_not_read_in_part(
    recording: Workspace, path: Path, meanwhile: _Meanwhile
) -> None:
    meanwhile(lambda: recording.__exit__(None, None, None))
    with pytest.raises(CaptureError, match=r"nothing can be read of|not recorded any more"):
        read_recording(path)


def test_what_a_recording_has_given_up_is_no_end_of_it(recording: Workspace, path: Path) -> None:
    # GIVEN one that keeps the newest part alone
    min(recording.directory.glob("segment-*")).unlink()
    assert read_recording(path).recording.duration_ns > 0
    _end(recording)


def _killed(path: Path, name: str = "killed") -> Workspace:
    """Leaves what a recording does that is killed."""
    left = _begun(path)
    left.is_kept = True
    with left:
        left.directory.rename(left.directory.with_name(name))  # several are of one second
    return left


def _recover(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    recover.add_arguments(parser)
    return recover.run(parser.parse_args(arguments))


def test_a_killed_recording_is_finished_where_it_is_read(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _killed(path)
    assert read_recording(path).recording.duration_ns == _WINDOWS[-1].end_ns
    assert path.exists()
    assert "still being recorded" not in capsys.readouterr().err


def test_of_several_killed_recordings_the_user_chooses(path: Path) -> None:
    _killed(path, "first")
    _killed(path, "second")
    with pytest.raises(UsageError, match=r"2 unfinished recordings of .*aiflame") as error:
        read_recording(path)
    assert "aiflame recover second" in (error.value.hint or "")
    assert _recover("first", "--discard") == 0
    assert read_recording(path).recording.duration_ns == _WINDOWS[-1].end_ns


def test_a_killed_recording_takes_no_path_from_one_that_runs(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _killed(path)
    recording = _begun(path)
    read_recording(path)
    assert "still being recorded" in capsys.readouterr().err
    _end(recording)
    assert path.exists()
    assert len(unfinished()) == 1


@pytest.mark.parametrize("by", ["path", "name"])
def test_what_somebody_has_is_told_from_what_is_not_there(
    path: Path, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _killed(path)
    wanted = {"path": "run.aiflame", "name": "killed"}[by]
    # WHEN another command is finishing it
    with unfinished()[0].take():
        # THEN that is said, and what there is can be read.
        words = f"{wanted} is still being recorded, or another command is finishing it"
        with pytest.raises(AiflameError, match=words) as error:
            _recover(wanted)
        assert error.value.hint is not None
        assert error.value.hint.endswith(f"aiflame report {path}")
        assert read_recording(path).recording.duration_ns == _WINDOWS[-1].end_ns
        assert "another command is finishing it" in capsys.readouterr().err
        with pytest.raises(AiflameError, match="no unfinished recording of other"):
            _recover("other")
    # AND afterwards it is as before.
    assert _recover(wanted, "--discard") == 0
