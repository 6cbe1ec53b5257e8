# SPDX-License-Identifier: Apache-2.0
"""Of two processes that name for one directory the later one waits, and for a bounded time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiflame.agent.fleet import naming_worker
from aiflame.agent.fleet.log import Log

_HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def _other(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which has the lock until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(directory / naming_worker._LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    both = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield both
    for each in both:
        each.close()


def test_a_process_that_names_waits_for_the_end_of_an_earlier_one(
    tmp_path: Path, log: Log, pair: tuple[socket.socket, socket.socket]
) -> None:
    channel, _ = pair
    with _other(tmp_path) as other:
        waiting = threading.Thread(
            target=naming_worker._wait_for_others, args=(tmp_path, channel, log)
        )
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        # WHEN the other is killed THEN this one goes on, and has nothing to say
        other.kill()
        waiting.join(30)
        assert not waiting.is_alive()
    assert (tmp_path / "log").read_text() == ""


def test_it_ends_where_nobody_asks_any_more(
    tmp_path: Path, log: Log, pair: tuple[socket.socket, socket.socket]
) -> None:
    channel, asking = pair
    with _other(tmp_path):
        asking.close()
        with pytest.raises(SystemExit):
            naming_worker._wait_for_others(tmp_path, channel, log)


def test_it_does_not_wait_for_ever(
    tmp_path: Path,
    log: Log,
    pair: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(naming_worker, "_OTHERS_S", 0.3)
    with _other(tmp_path):
        naming_worker._wait_for_others(tmp_path, pair[0], log)
    assert "does not end" in (tmp_path / "log").read_text()


def test_without_a_lock_what_waits_is_sent(
    tmp_path: Path, log: Log, pair: tuple[socket.socket, socket.socket]
) -> None:
    naming_worker._wait_for_others(tmp_path / "gone", pair[0], log)
    assert "cannot be opened: No such file" in (tmp_path / "log").read_text()
