# SPDX-License-Identifier: Apache-2.0
"""The socket at which an agent takes requests for captures, and those who mean it no good."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.capture import workspace
from aiflame.agent.errors import UsageError
from aiflame.agent.fleet import capture_server
from aiflame.agent.fleet.capture_processes import CaptureProcesses
from aiflame.agent.fleet.capture_request import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    SOCKET,
    CaptureRequest,
    InDirectory,
    refusal,
)
from aiflame.agent.fleet.capture_server import CaptureEndpoint, CaptureServer
from aiflame.agent.fleet.config import AgentConfig, AgentSettings
from aiflame.agent.fleet.log import Log
from aiflame.agent.processes import procfs
from support import wait_until

# Makes no capture: it says who it is, and ends when the client does, or says that it may.
_WORKER = """
import os, socket, sys
client = socket.socket(fileno=int(sys.argv[1]))
client.setblocking(True)
client.send(b'{"say": "%d"}' % os.getpid())
client.recv(100)
"""
# As that, after a process of its own and itself have computed for 0.3 s each; it ends at a byte.
_BUSY_WORKER = """
import os, socket, subprocess, sys, time
burn = "import time\\nwhile time.process_time() < 0.3: pass"
client = socket.socket(fileno=int(sys.argv[1]))
client.setblocking(True)
alive = subprocess.Popen([sys.executable, "-S", "-c", burn + "\\nprint(flush=True)\\ninput()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
alive.stdout.readline()
exec(burn)
client.send(b'{"say": "%d"}' % os.getpid())
client.recv(100)
alive.communicate(b"\\n")
"""
_PATIENCE_S = 20.0
_REQUEST = CaptureRequest(is_all=True, last_ns=10**9)


@pytest.fixture(autouse=True)
def _recordings_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that killed recordings have left on this machine are somebody's."""
    monkeypatch.setattr(workspace, "_candidates", lambda: [tmp_path / "lib"])


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    # Longer than the path of a socket may be (108 bytes).
    directory = tmp_path / ("d" * 120)
    directory.mkdir(mode=0o700)
    return AgentConfig(AgentSettings(directory=directory), {})


@pytest.fixture
def server(config: AgentConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[CaptureServer]:
    monkeypatch.setattr(capture_server, "COMMAND", (sys.executable, "-c", _WORKER))
    monkeypatch.setattr(capture_server, "_REQUEST_S", 0.3)
    with (
        Path(os.devnull).open("w") as log,
        closing(CaptureServer(config, Log(log.fileno()), CaptureProcesses())) as made,
    ):
        yield made


@contextmanager
def _client(config: AgentConfig) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(_PATIENCE_S)
        with InDirectory(config.agent.directory) as path:
            client.connect(str(path))
        yield client


def _asked(config: AgentConfig, request: bytes) -> dict[str, Any]:
    """Returns the first answer to a request."""
    with _client(config) as client:
        client.send(request)
        found: dict[str, Any] = json.loads(client.recv(1 << 16))
        return found


def _serves(config: AgentConfig) -> bool:
    return "say" in _asked(config, _REQUEST.message())


@pytest.mark.parametrize(
    "request_",
    [
        b"\0",
        b"{",
        b"[" * 10_000,
        b"7",
        b'"text"',
        b"\xff\xfe{}",
        b"{}",
        b'{"pid": true, "last_ns": 5}',
        b'{"pid": "1", "last_ns": 5}',
        b'{"pid": -1, "last_ns": 5}',
        b'{"pid": 99999999999999999999, "last_ns": 5}',
        b'{"pid": 1, "last_ns": NaN}',
        b'{"pid": 1, "last_ns": 5, "duration_ns": 5}',
        b'{"pid": 1, "pod": "web", "last_ns": 5}',
        b'{"pid": 1, "last_ns": 5, "output": "/etc/passwd"}',
        b'{"pid": 1, "duration_ns": 1, "frequency_hz": 0}',
        b'{"pid": 1, "duration_ns": 1e400}',
        b'{"container": "a\\u001b[2J", "last_ns": 5}',
        json.dumps({"pod": "x" * 5_000, "last_ns": 5}).encode(),
    ],
)
def test_what_is_no_request_is_refused_and_the_next_is_served(
    server: CaptureServer, config: AgentConfig, request_: bytes
) -> None:
    answer = _asked(config, request_)
    assert answer["code"] == 2
    assert _serves(config)


def test_a_request_that_is_too_large_is_refused(server: CaptureServer, config: AgentConfig) -> None:
    answer = _asked(config, b" " * (2 * MAX_REQUEST_BYTES))
    assert "more than" in answer["error"]
    assert _serves(config)


def test_clients_that_say_nothing_or_go_keep_nobody_out(
    server: CaptureServer, config: AgentConfig
) -> None:
    with _client(config), _client(config):
        with _client(config) as gone:
            gone.send(b"")
        assert _serves(config)


def test_descriptors_that_are_sent_are_closed(server: CaptureServer, config: AgentConfig) -> None:
    read, write = os.pipe()
    with _client(config) as client, os.fdopen(read, "rb") as left:
        socket.send_fds(client, [b"{}"], [write])
        os.close(write)
        assert b"code" in client.recv(1 << 16)
        assert left.read() == b""  # nobody has the other end


def test_only_root_and_the_agents_user_may_enter(
    server: CaptureServer, config: AgentConfig
) -> None:
    directory = config.agent.directory
    assert (directory / SOCKET).stat().st_mode & 0o777 == 0o600


def test_others_are_refused_whatever_the_modes_of_files_are(
    server: CaptureServer, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        monkeypatch.setattr(capture_server.os, "geteuid", lambda: 1)
        assert "may not ask" in _asked(config, _REQUEST.message())["error"]
        return
    # GIVEN a socket that anybody reaches
    for path in (config.agent.directory, *config.agent.directory.parents):
        if path.stat().st_mode & 0o001 == 0:
            path.chmod(0o755)
    (config.agent.directory / SOCKET).chmod(0o666)
    # WHEN another user asks
    script = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "os.chdir(sys.argv[1]); s.connect(sys.argv[2]); print(s.recv(65536).decode())"
    )
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, config.agent.directory, SOCKET],
        user=65534,
        stdout=subprocess.PIPE,
        check=True,
        timeout=_PATIENCE_S,
    ).stdout
    # THEN there is no need to hear him.
    assert "user 65534 may not ask" in json.loads(said)["error"]


def test_one_at_a_time(server: CaptureServer, config: AgentConfig) -> None:
    with _client(config) as first:
        first.send(CaptureRequest(pod="shop/web", duration_ns=10**9).message())
        assert b"say" in first.recv(1 << 16)
        refused = _asked(config, _REQUEST.message())
        assert refused["code"] == 1
        assert "1 s of pod shop/web" in refused["error"]
    wait_until(lambda: _serves(config), _PATIENCE_S)


def test_limits_are_those_of_the_configuration(server: CaptureServer, config: AgentConfig) -> None:
    request = CaptureRequest(is_all=True, last_ns=601 * 10**9)
    assert "600 s at most" in _asked(config, request.message())["error"]
    server.use(replace(config, agent=replace(config.agent, capture_length=0.0)))
    assert "makes no captures" in _asked(config, _REQUEST.message())["error"]


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_longest_answer_is_read_whole() -> None:
    words = "\x1b" * 100_000  # a character that JSON makes six of
    answer = refusal(words, words)
    assert len(answer) <= MAX_ANSWER_BYTES
    assert json.loads(answer)["hint"]


def test_one_that_gets_nowhere_is_ended(server: CaptureServer, config: AgentConfig) -> None:
    with _client(config) as client:
        client.send(_REQUEST.message())
        pid = int(json.loads(client.recv(1 << 16))["say"])
        # WHEN its time is over
        wait_until(lambda: server._running is not None, _PATIENCE_S)
        assert server._running is not None
        server._running.until_s = time.monotonic()
        assert client.recv(1 << 16) == b""
        wait_until(lambda: _is_gone(pid), _PATIENCE_S)


def test_who_has_no_descriptors_left_waits_for_some(
    server: CaptureServer, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried_s: list[float] = []

    class Full:
        def accept(self) -> tuple[socket.socket, Any]:
            tried_s.append(time.monotonic())
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(server, "_socket", Full())
        wait_until(lambda: len(tried_s) > 1, _PATIENCE_S)
    assert tried_s[1] - tried_s[0] > 0.2
    assert _serves(config)


@pytest.mark.parametrize(
    ("request_", "brought"),
    [(_REQUEST, 1), (CaptureRequest(is_all=True, duration_ns=10**9), 0)],
)
def test_the_newest_is_brought_for_whom_it_is_on_disk(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch, request_: CaptureRequest, brought: int
) -> None:
    monkeypatch.setattr(capture_server, "COMMAND", (sys.executable, "-c", _WORKER))
    asked: list[None] = []
    with closing(CaptureServer(config, Log(), CaptureProcesses(), lambda: asked.append(None))):
        with _client(config) as client:
            client.send(request_.message())
            assert json.loads(client.recv(1 << 16))["say"]
        assert len(asked) == brought


def test_one_that_is_killed_is_told_of(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(capture_server, "COMMAND", (sys.executable, "-c", _WORKER))
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        closing(CaptureServer(config, Log(file.fileno()), CaptureProcesses())),
    ):
        with _client(config) as client:
            client.send(_REQUEST.message())
            os.kill(int(json.loads(client.recv(1 << 16))["say"]), signal.SIGKILL)
            assert client.recv(1 << 16) == b""
        wait_until(lambda: "killed, as where memory runs out" in log.read_text(), _PATIENCE_S)
        # One that ends by itself is not.
        said = log.read_text().count("\n")
        assert _serves(config)
        wait_until(lambda: log.read_text().count("\n") > said, _PATIENCE_S)
        assert log.read_text().count("killed") == 1


def test_what_one_leaves_that_is_killed_is_removed(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_server, "COMMAND", (sys.executable, "-c", _WORKER))
    # GIVEN what one has left that was killed with its agent
    left = config.agent.directory / "capture" / "tmpabcd"
    left.mkdir(parents=True)
    (left / "capture.aiflame").write_bytes(bytes(1000))
    # WHEN the agent is started THEN it is gone,
    with closing(CaptureServer(config, Log(), CaptureProcesses())), _client(config) as client:
        wait_until(lambda: not left.exists(), _PATIENCE_S)
        # AND so is what one leaves that is killed beside it, with no other being asked for.
        client.send(_REQUEST.message())
        pid = int(json.loads(client.recv(1 << 16))["say"])
        left.mkdir()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not left.exists(), _PATIENCE_S)


def test_it_ends_with_the_agent(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch, server: CaptureServer
) -> None:
    with _client(config) as client:
        client.send(_REQUEST.message())
        pid = int(json.loads(client.recv(1 << 16))["say"])
        begun_s = time.monotonic()
        server.close()
        assert time.monotonic() - begun_s < 5
        assert _is_gone(pid)
        assert client.recv(1 << 16) == b""
    assert not (config.agent.directory / SOCKET).exists()


def test_a_socket_that_a_killed_agent_has_left_is_replaced(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(left), InDirectory(config.agent.directory) as path:
        left.bind(str(path))
    monkeypatch.setattr(capture_server, "COMMAND", (sys.executable, "-c", _WORKER))
    with closing(CaptureServer(config, Log(), CaptureProcesses())):
        assert _serves(config)


def _fails(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("where", "what", "fails", "why"),
    [
        (socket, "socket", _fails, "Too many open files"),
        (socket.socket, "bind", _fails, "Too many open files"),
        (threading.Thread, "start", _no_thread, "can't start new thread"),
    ],
)
def test_where_there_can_be_none_there_is_one_later(
    config: AgentConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    where: object,
    what: str,
    fails: Callable[..., None],
    why: str,
) -> None:
    monkeypatch.setattr(capture_server, "COMMAND", (sys.executable, "-c", _WORKER))
    log = tmp_path / "log"
    with log.open("w") as file:
        # GIVEN a host that is short of something as an agent is started THEN that is said once
        with monkeypatch.context() as short:
            short.setattr(where, what, fails)
            endpoint = CaptureEndpoint(config, Log(file.fileno()), CaptureProcesses(), lambda: None)
            endpoint.keep()
        (line,) = log.read_text().splitlines()
        assert line.endswith(f"{why}; it is tried again each minute")
        endpoint.use(replace(config, agent=replace(config.agent, capture_length=0.5)))
        # WHEN it is not any more
        for _ in range(2):
            endpoint.keep()
        # THEN captures are made, as is configured by then.
        with closing(endpoint):
            assert "captures of 0.5 s at most" in _asked(config, _REQUEST.message())["error"]
            endpoint.use(config)
            assert _serves(config)
    assert log.read_text().count("there is a socket now") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda request: replace(request, is_all=False),
        lambda request: replace(request, pid=1),
        lambda request: replace(request, last_ns=0),
    ],
)
def test_requests_are_checked_where_they_are_made(
    change: Callable[[CaptureRequest], CaptureRequest],
) -> None:
    assert CaptureRequest.parse(_REQUEST.message()) == _REQUEST
    with pytest.raises(UsageError):
        CaptureRequest.parse(change(_REQUEST).message())


def test_what_captures_take_is_not_taken_for_the_agents_own(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(capture_server, "COMMAND", (sys.executable, "-c", _BUSY_WORKER))
    processes, log = CaptureProcesses(), tmp_path / "log"
    all_before_ns, before_ns = procfs.helpers_cpu_ns(), processes.others_cpu_ns()
    with (
        log.open("w") as file,
        closing(CaptureServer(config, Log(file.fileno()), processes)),
        _client(config) as client,
    ):
        # WHEN a capture and a child of it compute
        client.send(_REQUEST.message())
        pid = int(json.loads(client.recv(1 << 16))["say"])
        # THEN it is not counted while they live
        assert pid in processes.begun() and len(processes.begun()) == 2
        assert not {*processes.begun()} & {*processes.others()}
        assert procfs.helpers_cpu_ns() - all_before_ns > 500_000_000
        assert processes.others_cpu_ns() - before_ns < 100_000_000
        # AND when they have ended; the kernel counts in hundredths of a second.
        client.send(b"end")
        wait_until(lambda: "; it took " in log.read_text(), _PATIENCE_S)
    assert processes.begun() == []
    assert procfs.helpers_cpu_ns() - all_before_ns > 500_000_000
    assert -50_000_000 < processes.others_cpu_ns() - before_ns < 100_000_000
    # AND it is told.
    took = re.search(r": over; it took ([0-9.]+) s of CPU time", log.read_text())
    assert took is not None
    assert 0.5 < float(took[1]) < 5


def test_others_are_counted_while_a_capture_is_made(
    config: AgentConfig, server: CaptureServer
) -> None:
    processes = server._processes
    before_ns = processes.others_cpu_ns()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with _client(config) as client:
        client.send(_REQUEST.message())
        client.recv(1 << 16)
        subprocess.run([sys.executable, "-S", "-c", burn], check=True)
        assert processes.others_cpu_ns() - before_ns > 280_000_000
