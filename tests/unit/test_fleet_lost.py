# SPDX-License-Identifier: Apache-2.0
"""What an agent loses after it was recorded is told with the next stretch that is sent."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.errors import AiflameError, DiskFull
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.naming_messages import DoLess, Lost
from aiflame.agent.fleet.naming_worker import _Worker, in_parts
from aiflame.agent.fleet.stretch_naming import Lateness, StretchNaming
from aiflame.agent.fleet.stretches import mark_done
from aiflame.agent.model.window import Window
from aiflame.agent.sinks.captures import CaptureFiles
from aiflame.agent.sinks.written import Naming
from aiflame.agent.symbolize.files import GivenFiles

_S = 1_000_000_000


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[_Worker]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    with ours, theirs:
        yield _Worker(
            tmp_path, theirs, cast(Naming, None), GivenFiles(), Lateness(), Log(descriptor)
        )
    os.close(descriptor)


def _told(worker: _Worker, path: Path) -> dict[str, int]:
    """Returns the losses of the next stretch."""
    CaptureWriter(path).close()
    worker._complete(path, 0, 0, worker._take_untold())
    with sqlite3.connect(path) as database:
        return dict(database.execute("SELECT name, count FROM losses"))


def test_what_was_not_sent_and_not_written_is_told_once(worker: _Worker, tmp_path: Path) -> None:
    class Full:
        def put(self, database: Path, started_unix_ns: int) -> None:
            raise AiflameError("no space left on device")

    # GIVEN a stretch that cannot be read, what the collector had no room for, a full disk
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    worker._give_up(tmp_path / "1", ValueError("no window"))
    worker.take(Lost({"stretches_lost": 2, "windows_lost": 5}))
    worker._keep("captures", cast(CaptureFiles, Full()), tmp_path, 0)
    # THEN the next stretch tells of them, and the one after that does not
    found = _told(worker, tmp_path / "next.aiflame")
    assert found == {"stretches_lost": 3, "windows_lost": 5, "captures_not_written": 1}
    assert _told(worker, tmp_path / "later.aiflame") == {}


def test_what_had_no_room_is_sent_once_there_is_some(
    worker: _Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    class Stretch:
        def __init__(self, name: str, room: bool) -> None:
            self.folder, self.database = tmp_path / name, tmp_path / name / "capture.aiflame"
            self.cpu_ns = self.rss_bytes = 0
            self._room = room
            self.folder.mkdir()

        def finish(self) -> None:
            if not self._room:
                raise DiskFull("no space left on device")

    def send(folder: Path, *_: object) -> None:
        sent.append(folder.name)
        mark_done(folder)

    monkeypatch.setattr(worker, "_send", send)
    monkeypatch.setattr(worker, "_finish_left", send)

    def finish(name: str, room: bool) -> None:
        worker._finish(cast(StretchNaming, Stretch(name, room)))

    # GIVEN three stretches for whose captures the disk has no room, one of which goes meanwhile
    for name in ("1", "2", "3"):
        finish(name, room=False)
    (tmp_path / "2").rmdir()
    assert not sent
    # WHEN there is room for others THEN these come with them, one by one, and none is lost
    for name in ("4", "5", "6", "7"):
        finish(name, room=True)
    assert sent == ["4", "1", "5", "3", "6", "7"]
    assert not worker._lost


def test_paths_that_are_left_out_fit_into_messages() -> None:
    # GIVEN paths as long as they may be, of characters that JSON escapes, and short ones
    paths = [*("\x01" * 4096 + str(number) for number in range(3)), "/a", "/b"]
    # WHEN they are told THEN each comes once, in messages that are read whole
    parts = [*in_parts(paths, 1 << 15)]
    assert [path for part in parts for path in part] == paths
    assert [len(part) for part in parts] == [1, 1, 3]
    assert all(len(json.dumps(part)) < 1 << 16 for part in parts)
    assert [*in_parts([], 10)] == []


def test_names_have_less_time_the_less_the_agent_does_of_all(tmp_path: Path) -> None:
    lateness, window = Lateness(), Window.of(0, 0, 5 * _S, {}, texts=("",))
    lateness.begin({"started_unix_ns": time.time_ns() - 5 * _S})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = Log(os.open(os.devnull, os.O_WRONLY))
    with ours, theirs:
        worker = _Worker(tmp_path, theirs, cast(Naming, None), GivenFiles(), lateness, log)
        # As long as they take,
        assert lateness.budget_s(window) is None
        # of a window of 5 s a fiftieth, and a hundredth,
        worker.take(DoLess(thrift=2, delay_factor=1))
        assert lateness.budget_s(window) == pytest.approx(0.1)
        worker.take(DoLess(thrift=4, delay_factor=1))
        assert lateness.budget_s(window) == pytest.approx(0.05)
        # and as long as they take once there is room.
        worker.take(DoLess(thrift=1, delay_factor=1))
        assert lateness.budget_s(window) is None
        # With all of it, they may wait for what is sent later: of two minutes, not of one.
        worker.take(DoLess(thrift=16, delay_factor=1))
        assert not lateness.may_wait(90 * _S)
        worker.take(DoLess(thrift=16, delay_factor=2))
        assert lateness.may_wait(90 * _S)
        assert not lateness.may_wait(120 * _S)
