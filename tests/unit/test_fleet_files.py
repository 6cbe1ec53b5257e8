# SPDX-License-Identifier: Apache-2.0
"""What an agent keeps on disk and says: stretches, captures, its log, and what systemd hears."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
import tomllib
from aiflame.agent import outfile
from aiflame.agent.errors import AiflameError, EnvironmentUnfit, UsageError
from aiflame.agent.fleet import naming
from aiflame.agent.fleet.config import AgentSettings, load
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.naming_messages import StretchLost
from aiflame.agent.fleet.notify import ServiceManager
from aiflame.agent.fleet.stretches import Stretches, count_try, is_done, mark_done
from aiflame.agent.inspector.fork_server import Program
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.sinks import captures
from aiflame.agent.sinks.segments import RecordedWindows
from support import blind_inspector
from windows import RandomRecording

_ROOT = Path(__file__).parents[2]
_S = 1_000_000_000
_NOW_NS = 2_000_000_000 * _S
_FACTS: dict[str, str | int] = {"started_unix_ns": _NOW_NS}


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))


@pytest.fixture
def stretches(tmp_path: Path, log: Log) -> Stretches:
    return Stretches(tmp_path / "agent", log)


def _made(stretches: Stretches, *, seconds: int, size_bytes: int = 1000, done: bool = True) -> Path:
    """Makes a stretch that began so long ago."""
    window = RandomRecording(1).windows(1)[0]
    stretch = stretches.begin({"started_unix_ns": _NOW_NS - seconds * _S}, window)
    (stretch.folder / "segment-000000.windows").write_bytes(bytes(size_bytes))
    if done:
        mark_done(stretch.folder)
    return stretch.folder


def test_windows_of_a_stretch_are_read_back(stretches: Stretches) -> None:
    windows = RandomRecording(7).windows(3)
    stretch = stretches.begin(_FACTS, windows[0])
    for window in windows:
        stretch.put(window)
    stretch.close()
    assert [window.number for window in RecordedWindows(stretch.folder)] == [0, 1, 2]
    assert stretches.undone() == [stretch.folder]
    mark_done(stretch.folder)
    assert stretches.undone() == [] and is_done(stretch.folder)


def test_what_is_done_stays_for_a_while(stretches: Stretches) -> None:
    # GIVEN stretches of a minute each, the oldest of which began seven minutes ago
    found = [_made(stretches, seconds=60 * minute) for minute in range(7, 0, -1)]
    # WHEN nearly five minutes are kept
    assert stretches.trim(None, _NOW_NS, 299, 10**6) == 0
    # THEN those of which all is older are gone.
    assert stretches.all() == found[2:]


def test_what_is_not_done_stays_longer(stretches: Stretches, tmp_path: Path) -> None:
    old = _made(stretches, seconds=3600, done=False)
    newer = [_made(stretches, seconds=seconds) for seconds in (120, 60)]
    # Old, but nobody has it yet.
    assert stretches.trim(None, _NOW_NS, 59, 10**6) == 0
    assert stretches.all() == [old, newer[1]]
    # Without room, what is done goes first, then the oldest: that is said.
    current = _made(stretches, seconds=0, done=False)
    assert stretches.trim(current, _NOW_NS, 600, 1500) == 1
    assert stretches.all() == [current]
    assert "dropped unsent" in (tmp_path / "log").read_text()


def test_the_one_that_is_written_stays(stretches: Stretches) -> None:
    current = _made(stretches, seconds=10, size_bytes=5000, done=False)
    assert stretches.trim(current, _NOW_NS, 0, 100) == 0
    assert stretches.all() == [current]


def test_what_is_none_of_the_agents_is_left_alone(stretches: Stretches, tmp_path: Path) -> None:
    # GIVEN a file system of its own for stretches, and a folder of an administrator's
    folders = [tmp_path / "agent" / "stretches" / name for name in ("lost+found", "2026")]
    for folder in folders:
        folder.mkdir()
        (folder / "file").write_bytes(bytes(5000))
    old = _made(stretches, seconds=3600)
    # WHEN there is no room THEN what is the agent's goes, and nothing else is told of as undone
    assert stretches.trim(None, _NOW_NS, 0, 100) == 0
    assert not old.exists()
    assert all((folder / "file").exists() for folder in folders)
    assert stretches.undone() == []


def test_tries_are_counted_across_processes(stretches: Stretches) -> None:
    folder = _made(stretches, seconds=10, done=False)
    assert [count_try(folder) for _ in range(3)] == [1, 2, 3]


def test_a_directory_that_others_write_to_is_refused(tmp_path: Path, log: Log) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(EnvironmentUnfit, match="others may write"):
        Stretches(tmp_path, log)


def _sink(folder: Path, **settings: float) -> captures.CaptureFiles:
    folder.mkdir(exist_ok=True)
    words = {"max_size": 3000, "max_age": 3600.0, **settings}
    return captures.make(captures.Settings(folder, int(words["max_size"]), words["max_age"]), "n/1")


def _capture(tmp_path: Path, size_bytes: int = 1000) -> Path:
    path = tmp_path / "capture.aiflame"
    path.write_bytes(bytes(size_bytes))
    return path


def test_on_a_full_disk_the_newest_captures_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a disk with room for three, less than is allowed
    folder = tmp_path / "captures"
    sink = _sink(folder, max_size=10**6)
    fill = outfile._fill

    def limited(file: BinaryIO, content: bytes | BinaryIO) -> None:
        if sum(path.stat().st_size for path in folder.iterdir()) + 1000 > 3500:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fill(file, content)

    monkeypatch.setattr(outfile, "_fill", limited)
    # WHEN five come THEN the last three are there.
    paths = [sink.put(_capture(tmp_path), _NOW_NS + number * _S) for number in range(5)]
    assert sorted(folder.iterdir()) == paths[2:]
    # AND where others have all the room, that is said, in the end.
    (folder / "of-others").write_bytes(bytes(5000))
    with pytest.raises(AiflameError, match="no space left"):
        sink.put(_capture(tmp_path), _NOW_NS + 9 * _S)


def test_captures_stay_where_all_of_them_have_less_room_than_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "captures"
    sink = _sink(folder, max_size=10**6)
    kept = [sink.put(_capture(tmp_path), _NOW_NS + number * _S) for number in range(3)]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(outfile, "_fill", full)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=512))
    with pytest.raises(AiflameError, match="no space left"):
        sink.put(_capture(tmp_path, 4000), _NOW_NS + 9 * _S)
    assert sorted(folder.iterdir()) == kept


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES])
def test_captures_stay_where_their_end_would_make_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sink = _sink(tmp_path / "captures")
    kept = sink.put(_capture(tmp_path), _NOW_NS)

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(outfile, "_fill", fails)
    with pytest.raises(AiflameError):
        sink.put(_capture(tmp_path), _NOW_NS + _S)
    assert kept.exists()


def test_what_a_killed_agent_was_writing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN what is left of captures that were being written as their agents were killed
    folder = tmp_path / "captures"
    sink, others = _sink(folder), captures.make(captures.Settings(folder), "other")
    with monkeypatch.context() as killed:
        killed.setattr(os, "rename", _be_killed)
        killed.setattr(os, "unlink", lambda *_, **__: None)
        for each in (sink, others):
            with pytest.raises(KeyboardInterrupt):
                each.put(_capture(tmp_path), _NOW_NS)
    left = {path.name.split("-")[1]: path for path in folder.iterdir()}
    assert len(left) == 2
    # WHEN one comes a moment later THEN they may be another process's, which is writing them
    sink.put(_capture(tmp_path), _NOW_NS + _S)
    assert all(path.exists() for path in left.values())
    # AND later that of this host is gone.
    for path in left.values():
        os.utime(path, (0, 0))
    sink.put(_capture(tmp_path), _NOW_NS + 2 * _S)
    assert not left["n_1"].exists() and left["other"].exists()


def _be_killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_captures_are_whole_private_and_the_newest(tmp_path: Path) -> None:
    # GIVEN room for three
    folder = tmp_path / "captures"
    sink = _sink(folder)
    # AND files of others: of a host that shares the directory, too
    others = [
        folder / "aiflame-of-somebody.aiflame",
        folder / "aiflame-n_2-20330518T033320.000Z.aiflame",
    ]
    for other in others:
        other.write_bytes(bytes(9999))
        os.utime(other, (0, 0))
    # WHEN five come
    paths = [sink.put(_capture(tmp_path), _NOW_NS + number * _S) for number in range(5)]
    # THEN the last three are there, and what is not the agent's stays.
    kept = sorted({*folder.iterdir()} - {*others})
    assert kept == paths[2:]
    assert all(other.exists() for other in others)
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    assert paths[0].name == "aiflame-n_1-20330518T033320.000Z.aiflame"


def test_the_same_stretch_is_one_capture(tmp_path: Path) -> None:
    sink = _sink(tmp_path / "captures")
    assert sink.put(_capture(tmp_path, 10), _NOW_NS) == sink.put(_capture(tmp_path, 20), _NOW_NS)
    (only,) = (tmp_path / "captures").iterdir()
    assert only.stat().st_size == 20


def test_old_captures_are_removed(tmp_path: Path) -> None:
    sink = _sink(tmp_path / "captures", max_age=60)
    first = sink.put(_capture(tmp_path), _NOW_NS)
    os.utime(first, (0, 0))
    second = sink.put(_capture(tmp_path), _NOW_NS + _S)
    assert [*(tmp_path / "captures").iterdir()] == [second]


def test_captures_need_a_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"sinks\.captures\.directory: no such directory"):
        captures.check(captures.Settings(tmp_path / "nowhere" / "captures"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"sinks\.captures\.directory: no such directory"):
        captures.check(captures.Settings(tmp_path / "file"))


def test_captures_as_deployed_need_the_agents_directory_alone(tmp_path: Path) -> None:
    # GIVEN the directory that Kubernetes and systemd make, and that of the configuration in it
    shipped = tomllib.loads((_ROOT / "deploy/kubernetes/agent.toml").read_text())
    folder = Path(shipped["sinks"]["captures"]["directory"])
    assert folder.parent == AgentSettings().directory.parent
    # WHEN the first capture comes THEN it is there, and nobody else's
    sink = captures.make(captures.Settings(tmp_path / folder.name), "n")
    assert sink.put(_capture(tmp_path), _NOW_NS).parent == tmp_path / folder.name
    assert (tmp_path / folder.name).stat().st_mode & 0o777 == 0o700


def test_nonsense_of_the_naming_process_ends_no_recording(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a process that tells more than a report may have, what is none, and then one
    module = "hostile.forks"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    monkeypatch.setattr(naming, "PROGRAM", Program("x", f"{module}:talk_nonsense", (module,)))
    inspector = blind_inspector()
    table = ProcessTable(1, lambda _: None, inspector)
    config = load(None, {}, {})
    process = naming.NamingProcess(table, tmp_path, config, inspector.server, log)
    try:
        until_s = time.monotonic() + 30
        # WHEN it is heard THEN there is what it said right, and the log tells of the rest
        assert [*process.finish(until_s)] == [StretchLost({}, "1")]
        assert "a report of the naming process is lost: no JSON" in (tmp_path / "log").read_text()
    finally:
        process.close()
        inspector.server.close()


def test_the_log_is_no_flood_and_each_line_one_line(tmp_path: Path, log: Log) -> None:
    for number in range(1000):
        log.say_seldom("event", f"it is {number}\nforged line \x1b[2J")
    log.say("x" * 100_000)
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2
    assert "it is 0" in lines[0] and "\x1b" not in lines[0]
    assert len(lines[1]) < 1100


@pytest.mark.parametrize("is_abstract", [False, True])
def test_systemd_hears_what_it_is_told(tmp_path: Path, is_abstract: bool) -> None:
    name = f"{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(f"\0{name}" if is_abstract else name)
        ServiceManager(f"@{name}" if is_abstract else name).tell("READY=1", "STATUS=x")
        channel.settimeout(5)
        assert channel.recv(100) == b"READY=1\nSTATUS=x"


def test_nobody_has_to_listen(tmp_path: Path) -> None:
    ServiceManager("").tell("READY=1")
    ServiceManager(str(tmp_path / "nobody")).tell("READY=1")
