# SPDX-License-Identifier: Apache-2.0
"""A recorder tells of each file until who names has it: what is short for a moment is no end."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiflame.agent.processes.binaries import BinaryFile
from aiflame.agent.sinks import capture_process
from aiflame.agent.sinks.capture_process import CaptureFailed, CaptureProcess
from aiflame.agent.sinks.capture_report import Report
from aiflame.agent.sinks.capture_worker import _MESSAGES, messages
from aiflame.agent.sinks.naming_channel import NamingChannel
from aiflame.agent.sinks.naming_messages import FilesMissing, Windows
from aiflame.agent.symbolize.files import GivenFiles
from aiflame.agent.typed_messages import Messages
from recordings import children_of
from support import wait_until

# Says that it lacks a file at the first window, and at the end; and then what it has heard.
_LACKING = """
import json, socket
from aiflame.agent.sinks.capture_report import Report
from aiflame.agent.sinks.naming_messages import FilesMissing
from aiflame.agent.typed_messages import encode
channel = socket.socket(fileno=0)
again = encode(FilesMissing((7,)))
heard = []
while (name := json.loads(channel.recv(1 << 16))["message"]) != "End":
    heard.append(name)
    if heard.count("Windows") == 1 and name == "Windows":
        channel.send(again)
channel.send(again)
channel.send(encode(Report(problems=tuple(heard))))
"""

# Says what is no report once it has heard the message that it is called with.
_NONSENSE = """
import json, signal, socket, sys
channel = socket.socket(fileno=0)
while json.loads(channel.recv(1 << 16))["message"] != sys.argv[1]:
    pass
channel.send(b'{"message":"Report","problems":1}')
signal.pause()
"""


def _table(*files: BinaryFile) -> Any:
    """As much of a process table as knows files."""
    binaries = SimpleNamespace(
        files={file.index: file for file in files}, readable=lambda file: file.fd
    )
    return SimpleNamespace(binaries=binaries, code_makers={})


class _Full:
    """A socket that does not take so many messages."""

    def __init__(self, code: int, times: int) -> None:
        self.left = times
        self.took: list[bytes] = []
        self._code = code

    def sendmsg(self, data: list[bytes], *_: object) -> None:
        self.left -= 1
        if self.left >= 0:
            raise OSError(self._code, os.strerror(self._code))
        self.took += data


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS])
def test_a_file_that_there_was_no_room_for_is_told_the_next_time(code: int) -> None:
    full: Any = _Full(code, 2)
    channel = NamingChannel(_table(BinaryFile(7, "lib.so", 0, "")), full)
    assert [channel._tell_files() for _ in range(4)] == [False, False, True, True]
    assert full.took == [b'{"message":"FileGiven","binary":7,"root":""}']


@pytest.mark.parametrize("code", [errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN])
def test_one_that_has_ended_is_told_nothing_more(code: int) -> None:
    ended: Any = _Full(code, 1)
    channel = NamingChannel(_table(BinaryFile(7, "lib.so", 0, "")), ended)
    assert channel._tell_files() and channel._tell_files()
    assert ended.took == []


@contextmanager
def _descriptors_left(count: int) -> Iterator[None]:
    """This process may have so many more than now."""
    first = os.dup(0)
    os.close(first)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("flags", "left"), [(os.O_RDONLY, 0), (os.O_PATH, 0), (os.O_PATH, 1)])
def test_a_file_that_there_was_no_descriptor_for_is_there_later(
    tmp_path: Path, flags: int, left: int
) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"code")
    fd = os.open(path, flags)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, closing(GivenFiles()) as files:
        channel = NamingChannel(_table(BinaryFile(7, str(path), fd, "")), ours)
        heard = messages(theirs, files, _MESSAGES)

        def tell() -> None:
            assert channel._tell_files() and channel._send(Windows(1))
            assert next(heard) == Windows(1)

        # GIVEN who names windows has no descriptor left for a file
        with _descriptors_left(left):
            # THEN it asks for the file, once with each message about windows
            for _ in range(3):
                tell()
                assert files.open(7, "", "").fd is None
                channel._tell_again(_said(ours))
                with pytest.raises(BlockingIOError):
                    _said(ours)
        # AND once there is room it gets it, and asks no more.
        tell()
        found = files.open(7, "", "").fd
        assert found is not None and os.pread(found, 9, 0) == b"code"
        tell()
        with pytest.raises(BlockingIOError):
            _said(ours)
    os.close(fd)


def _said(channel: socket.socket) -> FilesMissing:
    return Messages(FilesMissing).decode(channel.recv(1 << 16, socket.MSG_DONTWAIT))


def test_a_file_that_is_gone_is_not_asked_for(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, closing(GivenFiles()) as files:
        table = _table(BinaryFile(7, "lib.so", 0, ""))
        channel = NamingChannel(table, ours)
        heard = messages(theirs, files, _MESSAGES)
        with _descriptors_left(0):
            assert channel._tell_files() and channel._send(Windows(1))
            next(heard)
        # WHEN what was asked for is not there any more
        table.binaries.files.clear()
        channel._tell_again(_said(ours))
        for _ in range(2):
            assert channel._tell_files() and channel._send(Windows(1))
            next(heard)
        # THEN it is not asked for again, nor told.
        with pytest.raises(BlockingIOError):
            _said(ours)
    assert channel._told == {}


def test_a_capture_is_reported_after_what_was_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_process, "COMMAND", (sys.executable, "-c", _LACKING))
    table = _table(BinaryFile(7, "lib.so", 0, ""))
    with closing(CaptureProcess(tmp_path, tmp_path / "capture", table)) as process:
        process.give(1)
        process._wait_for(select.POLLIN)
        process.give(1)
        report = process.finish()
    assert report.problems == ("FileGiven", "Windows", "FileGiven", "Windows")


@pytest.mark.parametrize("when", ["Windows", "End"])
def test_a_capture_whose_report_is_none_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    # GIVEN a process that says what is no report, while it records or in the end, and stays
    monkeypatch.setattr(capture_process, "COMMAND", (sys.executable, "-c", _NONSENSE, when))
    with closing(CaptureProcess(tmp_path, tmp_path / "capture", _table())) as process:
        process.give(1)
        if when == "Windows":
            process._wait_for(select.POLLIN)
            process.give(1)
        # THEN the recording goes on, and in the end it is known that there is no capture.
        with pytest.raises(CaptureFailed):
            process.finish()


def test_signals_to_all_processes_of_a_recorder_cost_no_capture(tmp_path: Path) -> None:
    with closing(CaptureProcess(tmp_path, tmp_path / "capture.aiflame", _table())) as capture:
        # GIVEN a process that writes the capture: it has started those who help it
        worker = children_of(os.getpid())[-1]
        wait_until(lambda: children_of(worker), 60)
        # WHEN it gets what a service manager sends to all of a cgroup, as the recorder does
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(worker, number)
        # THEN it goes on until the recorder tells it to end
        assert capture.finish() == Report()
