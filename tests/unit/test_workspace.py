# SPDX-License-Identifier: Apache-2.0
"""The directory that a recording is written in: private, locked, found again."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiflame.agent.capture import workspace
from aiflame.agent.capture.workspace import (
    Destination,
    Workspace,
    discard_below,
    held,
    running,
    unfinished,
)
from aiflame.agent.errors import Aborted, AiflameError, EndedAtOnce, EnvironmentUnfit, UsageError
from aiflame.agent.outfile import Owner

_RECORDINGS = "recordings"


@pytest.fixture(autouse=True)
def candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stand-ins for /var/lib/aiflame and /run/aiflame."""
    found = [tmp_path / "lib", tmp_path / "run"]
    monkeypatch.setattr(workspace, "_candidates", lambda: found)
    return found


def _destination(path: Path, **facts: object) -> Destination:
    return Destination(path, "aiflame record", force=False, owner=None, **facts)  # type: ignore[arg-type]


@contextlib.contextmanager
def _killed(path: Path, content: bytes = b"raw") -> Iterator[Workspace]:
    """A workspace whose recorder is gone, and with it the lock."""
    left = Workspace.create(_destination(path))
    left.database.write_bytes(content)
    left.is_kept = True
    with left:
        yield left


def test_a_workspace_is_private_and_gone_in_the_end(tmp_path: Path, candidates: list[Path]) -> None:
    with Workspace.create(_destination(tmp_path / "a")) as made:
        for directory in (candidates[0], candidates[0] / _RECORDINGS, made.directory):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert made.database.parent == made.directory
        assert unfinished() == []  # it is locked
    assert list((candidates[0] / _RECORDINGS).iterdir()) == []


def test_what_a_killed_recording_leaves_is_found(tmp_path: Path) -> None:
    owner = Owner(1000, 100)
    to = Destination(tmp_path / "a\n\udcff", "aiflame record", True, owner)
    left = Workspace.create(to)
    left.is_kept = True
    left.__exit__(None, None, None)
    # Who only looks hides it from nobody.
    (found,), (again,) = unfinished(), unfinished()
    assert (found.name, found.destination, found.size_bytes) == (left.name, to, 0)
    with found.take() as taken:
        assert unfinished() == []  # somebody is at it
        with pytest.raises(AiflameError, match=f"another command is finishing {left.name}"):
            again.take()
    assert len(unfinished()) == 1  # it was not finished
    with again.take() as taken:
        taken.is_kept = False
    assert unfinished() == []
    with pytest.raises(AiflameError, match="another command"):
        found.take()


def test_who_takes_one_has_what_was_noted_last(tmp_path: Path) -> None:
    with _killed(tmp_path / "a") as left:
        pass
    (found,) = unfinished()
    # Somebody else published it meanwhile, and was killed then.
    with found.take() as other:
        other.publish()
        other.is_kept = True
    with found.take() as taken:
        assert taken.destination.published is not None
        taken.publish()
    assert not left.directory.exists()


def test_a_recorder_of_the_same_name_is_left_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in another pid namespace, with the same directories.
    monkeypatch.setattr(workspace.time, "strftime", lambda *_: "20261128T120000Z")
    with Workspace.create(_destination(tmp_path / "a")) as first:
        with pytest.raises(AiflameError, match="File exists"):
            Workspace.create(_destination(tmp_path / "b"))
        assert first.directory.exists()


def test_a_child_that_outlives_a_recording_does_not_hide_what_is_left(tmp_path: Path) -> None:
    with _killed(tmp_path / "a"):
        ended, end = os.pipe()
        child = os.fork()  # it has the lock's descriptor as well
        if child == 0:
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
        os.close(ended)
    assert len(unfinished()) == 1
    os.close(end)
    os.waitpid(child, 0)


def test_those_who_look_at_once_see_all(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with _killed(tmp_path / name) as left:
            pass
        left.directory.rename(left.directory.with_name(name))  # they are of one second
    with ThreadPoolExecutor(4) as pool:
        seen = [*pool.map(lambda _: len(unfinished()), range(400))]
    assert set(seen) == {2}


def test_only_what_somebody_has_is_running(tmp_path: Path, candidates: list[Path]) -> None:
    path = tmp_path / "a"
    assert running(path) is None
    with Workspace.create(_destination(path)) as made:
        assert running(path) == made.directory
        assert [(one.name, one.destination) for one in held()] == [(made.name, made.destination)]
        assert running(tmp_path / "b") is None
    assert running(path) is None
    # GIVEN one that was killed THEN it is running while a command finishes it, and not before.
    with _killed(path) as left:
        pass
    assert running(path) is None
    assert held() == []
    with unfinished()[0].take():
        assert running(path) == left.directory
    # AND whatever else lies there is no recording.
    (candidates[0] / _RECORDINGS / "file").touch()
    assert running(path) is None


def test_who_looks_at_once_takes_no_other_for_a_recording(tmp_path: Path) -> None:
    with _killed(tmp_path / "a"):
        pass
    with ThreadPoolExecutor(4) as pool:
        looks = (lambda: running(tmp_path / "a"), lambda: unfinished() and None) * 200
        assert {*pool.map(lambda look: look(), looks)} == {None}


def test_what_cannot_be_understood_is_removed(tmp_path: Path, candidates: list[Path]) -> None:
    parent = candidates[0] / _RECORDINGS
    with _killed(tmp_path / "a") as left:
        pass
    for text in ("", "{", "{}", "[]", '{"path": 1, "command": "", "force": 1, "owner": 1}'):
        (left.directory / "destination.json").write_text(text)
        left.database.touch()
        assert unfinished() == []
        assert list(parent.iterdir()) == []
        left.directory.mkdir()


def test_what_was_to_go_below_a_folder_is_discarded(tmp_path: Path) -> None:
    # GIVEN recordings that were killed, and one that runs
    folder = tmp_path / "capture"
    (tmp_path / "link").symlink_to(folder)
    wanted = tmp_path / "captures" / "a"
    for number, path in enumerate(
        (folder / "tmp1" / "a", tmp_path / "link" / "tmp2" / "a", wanted)
    ):
        with _killed(path) as left:
            pass
        left.directory.rename(left.directory.with_name(str(number)))  # they are of one second
    with Workspace.create(_destination(folder / "tmp3" / "a")) as made:
        discard_below(tmp_path / "link")
        assert [left.destination.path for left in unfinished()] == [wanted]
        assert made.directory.exists()


def test_what_is_discarded_is_not_told_by_links(tmp_path: Path, candidates: list[Path]) -> None:
    # GIVEN a killed recording of somebody else, whose folder became a link to the agent's
    folder = tmp_path / "capture"
    folder.mkdir()
    with _killed(tmp_path / "users" / "out") as left:
        pass
    (tmp_path / "users").symlink_to(folder)
    discard_below(folder)
    assert [one.directory for one in unfinished()] == [left.directory]


def test_who_discards_waits_for_nobody(tmp_path: Path, candidates: list[Path]) -> None:
    with _killed(tmp_path / "capture" / "a"):
        pass
    with workspace._locked(candidates[0] / _RECORDINGS):
        assert not discard_below(tmp_path / "capture")
    assert len(unfinished()) == 1
    assert discard_below(tmp_path / "capture")
    assert unfinished() == []


def test_notes_that_cannot_be_understood_are_not_discarded_with_others(
    tmp_path: Path, candidates: list[Path]
) -> None:
    # GIVEN a recording of another version, as it may be
    with _killed(tmp_path / "a") as left:
        (left.directory / "destination.json").write_text('{"to": "a"}')
    assert discard_below(tmp_path)
    assert left.directory.exists()


def test_what_cannot_be_read_for_a_moment_is_kept(
    tmp_path: Path, candidates: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _killed(tmp_path / "a"):
        pass

    def fails(_: Path) -> Destination:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(workspace, "_destination_of", fails)
        assert unfinished() == []
    assert [one.destination.path for one in unfinished()] == [tmp_path / "a"]


def test_abort_removes_it(tmp_path: Path, candidates: list[Path]) -> None:
    with pytest.raises(Aborted), _killed(tmp_path / "a"):
        raise Aborted("aborted")
    assert list((candidates[0] / _RECORDINGS).iterdir()) == []


def test_a_signal_of_an_impatient_supervisor_keeps_it(tmp_path: Path) -> None:
    with pytest.raises(EndedAtOnce), _killed(tmp_path / "a"):
        raise EndedAtOnce("ended at once by SIGTERM")
    assert [left.destination.path for left in unfinished()] == [tmp_path / "a"]


@pytest.mark.parametrize("error", [Aborted("aborted"), EndedAtOnce("ended at once by SIGTERM")])
def test_a_signal_while_it_is_published_is_no_failure_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: AiflameError
) -> None:
    def is_interrupted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(workspace, "write_output", is_interrupted)
    with pytest.raises(type(error)), _killed(tmp_path / "a") as left:
        left.publish()


def test_publishing_twice_replaces_only_what_was_published(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with _killed(path) as left:
        assert left.publish() == 3
        assert not left.is_kept
        assert path.read_bytes() == b"raw"
        left.database.write_bytes(b"named")
        left.publish()
        assert path.read_bytes() == b"named"
        path.unlink()
        path.write_bytes(b"theirs")
        left.is_kept = True
        with pytest.raises(AiflameError, match=r"file exists: .*; the recording is kept") as error:
            left.publish()
        assert f"aiflame recover {path}" in (error.value.hint or "")
        assert not isinstance(error.value, UsageError)
        assert left.is_kept
        assert path.read_bytes() == b"theirs"


def test_what_cannot_be_written_is_offered_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a folder that was mounted read-only while it was recorded
    path = tmp_path / "a"
    with _killed(path) as left:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(os, "link", refuse)
        with pytest.raises(AiflameError, match=r"read-only .*; the recording is kept") as error:
            left.publish()
    assert error.value.hint == f"aiflame recover {path} -o OTHER.aiflame"


def test_another_process_knows_what_was_published(tmp_path: Path) -> None:
    with _killed(tmp_path / "a") as left:
        left.publish()
        left.is_kept = True
    with unfinished()[0].take() as found:
        found.database.write_bytes(b"named")
        found.publish()
    assert (tmp_path / "a").read_bytes() == b"named"


@pytest.mark.parametrize(
    ("free", "expected"), [((10**6, 10**12), 1), ((10**12, 1), 0), ((5, 6), 1), ((6, 5), 0)]
)
def test_the_first_with_room_or_the_one_with_most(
    candidates: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    free: tuple[int, int],
    expected: int,
) -> None:
    room = dict(zip((each / _RECORDINGS for each in candidates), free, strict=True))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=room[path]))
    assert workspace.recordings_directory() == candidates[expected] / _RECORDINGS


def test_a_directory_that_others_write_to_is_not_used(
    tmp_path: Path, candidates: list[Path]
) -> None:
    candidates[0].mkdir()
    candidates[0].chmod(0o777)
    assert workspace.recordings_directory() == candidates[1] / _RECORDINGS
    # A link may be somebody else's, who turns it elsewhere at any moment.
    (candidates[1] / _RECORDINGS).rmdir()
    candidates[1].rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    candidates[1].symlink_to("elsewhere")
    with pytest.raises(EnvironmentUnfit, match="no directory to record into") as error:
        workspace.recordings_directory()
    assert str(candidates[0]) in (error.value.hint or "")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert unfinished() == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a directory away")
def test_a_directory_of_another_user_is_not_used(candidates: list[Path]) -> None:
    candidates[0].mkdir(mode=0o700)
    os.chown(candidates[0], 1234, 1234)
    assert workspace.recordings_directory() == candidates[1] / _RECORDINGS


def test_where_users_without_root_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert [str(path) for path in workspace._candidates()] == [
        "/home/user/.local/state/aiflame",
        "/tmp/aiflame-1000",  # noqa: S108 - nobody else may replace what is there
    ]
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert str(workspace._candidates()[0]) == "/state/aiflame"
