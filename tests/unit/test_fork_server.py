# SPDX-License-Identifier: Apache-2.0
"""Helpers are forked from one interpreter, for several processes, and end with whoever asked."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from unittest.mock import ANY

import pytest
from aiflame.agent.fleet.agent import begin_fork_server
from aiflame.agent.inspector import fork_server
from aiflame.agent.inspector.fork_server import (
    Ending,
    ForkRequests,
    ForkServer,
    NotForked,
    PipedHelper,
    Program,
)
from recordings import children_of
from support import wait_until

_TESTS = Path(__file__).resolve().parents[1]
_MODULE = "hostile.forks"


def _program(function: str) -> Program:
    return Program(function, f"{_MODULE}:{function}", (_MODULE,))


class _Server(ForkServer):
    """One whose helpers end with the test."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[PipedHelper] = []

    def run_piped(
        self, program: Program, arguments: Sequence[str] = (), errors: int = -1
    ) -> PipedHelper:
        helper = super().run_piped(program, arguments, errors)
        self.asked.append(helper)
        return helper

    def close(self) -> None:
        for helper in self.asked:
            helper.close()
        super().close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    monkeypatch.setenv("PYTHONPATH", str(_TESTS))
    made = _Server()
    yield made
    made.close()


def test_a_helper_has_what_it_was_given_and_nothing_else(server: _Server) -> None:
    helper = server.run_piped(_program("tell"), ["one", "two"])
    assert helper.begins()
    assert helper.stdout.read().decode().splitlines() == ["one two", "tell", "[]"]
    # AND it is known how it ended
    wait_until(lambda: not Path(f"/proc/{helper.pid}").exists())
    ending = helper.end()
    assert ending is not None
    assert ending.code == 0


def test_how_a_helper_ended_is_told(server: _Server) -> None:
    helper = server.run_piped(_program("burn"), ["0.2"])
    assert helper.begins()
    assert helper.stdout.readline() == b"burnt\n"
    ending = helper.end()
    assert ending is not None
    assert ending.code == -signal.SIGKILL
    assert ending.cpu_ns > 200_000_000


def test_an_exception_is_told_where_it_was_asked_for(server: _Server, tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as errors:
        helper = server.run_piped(_program("fail"), [], errors.fileno())
        assert helper.begins()
        assert helper.stdout.read() == b""
    wait_until(lambda: not Path(f"/proc/{helper.pid}").exists())
    ending = helper.end()
    assert ending is not None
    assert ending.code == 1
    assert (tmp_path / "errors").read_text().splitlines()[-1] == "ValueError: on purpose"


def test_a_helper_ends_with_whoever_asked_for_it(server: _Server) -> None:
    # GIVEN a process that asks the server of another one
    words = (
        "import socket, sys\n"
        "from aiflame.agent.inspector.fork_server import ForkRequests, Program\n"
        f"program = Program('wait', '{_MODULE}:wait', ('{_MODULE}',))\n"
        "requests = ForkRequests(socket.socket(fileno=int(sys.argv[1])))\n"
        "helper = requests.run_piped(program, [])\n"
        "assert helper.begins()\n"
        "print(helper.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", words, str(server.request_fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(server.request_fd,),
    ) as asking:
        assert asking.stdout is not None
        # WHEN this one looks after it THEN there is one, and it is the server's
        wait_until(lambda: server.look() or server.pids)
        helper = int(asking.stdout.readline())
        assert helper in children_of(server.pids[0])
        # AND it ends when that process is killed
        asking.kill()
        wait_until(lambda: not Path(f"/proc/{helper}").exists())
    assert server.starts == 1


def test_a_helper_that_is_no_longer_wanted_before_it_is_there_does_not_stay(
    server: _Server,
) -> None:
    server.run_piped(_program("wait")).close()
    helper = server.run_piped(_program("wait"))
    assert helper.begins()
    wait_until(lambda: children_of(server.pids[0]) == [helper.pid])
    assert helper.end() is not None


def test_what_cannot_be_imported_is_said_and_others_go_on(server: _Server) -> None:
    helper = server.run_piped(Program("none", "no.such:thing", ("no.such",)))
    with pytest.raises(NotForked, match="No module named 'no'"):
        helper.begins()
    assert helper.stdout.read() == b""
    helper = server.run_piped(_program("wait"))
    assert helper.begins()
    assert server.starts == 1


def test_a_server_that_was_killed_takes_its_helpers_along_and_is_started_again(
    server: _Server,
) -> None:
    first = server.run_piped(_program("wait"))
    assert first.begins()
    os.kill(server.pids[0], signal.SIGKILL)
    wait_until(lambda: not server.pids)
    wait_until(lambda: not Path(f"/proc/{first.pid}").exists())
    first.end()
    second = server.run_piped(_program("wait"))
    assert second.begins()
    assert server.starts == 2


def test_a_server_that_dies_before_it_has_forked_is_told_of(server: _Server) -> None:
    # GIVEN one that has taken a request, and dies of it
    helper = server.run_piped(Program("bad", "hostile.dying:main", ("hostile.dying",)))
    with pytest.raises(ConnectionError):
        helper.begins()


def test_one_that_cannot_start_is_not_started_again_and_again(server: _Server) -> None:
    # GIVEN a request that ends whoever takes it, and more that wait
    program = Program("bad", "hostile.dying:main", ("hostile.dying",))
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s:
        with suppress(OSError):
            server.run_piped(program)
    # THEN it is tried a few times, and then seldom
    assert 3 <= server.starts <= 8
    # AND whoever asks is told, and does not wait
    with pytest.raises(NotForked, match="dies again and again"):
        for _ in range(100):
            server.run_piped(program)


def test_one_that_has_worked_for_long_may_die_again_and_again(server: _Server) -> None:
    for starts in range(1, 8):
        helper = server.run_piped(_program("wait"))
        assert helper.begins()
        assert server.starts == starts
        server._started_s -= 100
        os.kill(server.pids[0], signal.SIGKILL)
        wait_until(lambda: not server.pids)
        helper.end()


def test_where_no_process_can_be_forked_one_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "no process")

    monkeypatch.setattr(fork_server.forking, "begin_here", fail)
    monkeypatch.setenv("PYTHONPATH", str(_TESTS))
    # WHEN an agent cannot fork THEN nothing is started before it is ready for that
    with closing(begin_fork_server()) as server:
        assert server.pids == ()
        assert server.starts == 0
        helper = server.run_piped(_program("wait"), [])
        assert helper.begins()
        helper.close()


def test_one_that_nobody_asks_ends_and_next_time_waits_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(_TESTS))
    monkeypatch.setattr(fork_server, "_IDLE_S", 0.1)
    server = _Server()
    try:
        for starts in (1, 2, 3):
            helper = server.run_piped(_program("wait"))
            assert helper.begins()
            assert server.starts == starts
            helper.end()
            wait_until(lambda: not server.pids)
        assert server._idle_s == pytest.approx(0.4)
    finally:
        server.close()


def test_requests_wait_where_nobody_takes_them_and_never_the_one_who_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server.sys, "executable", "/no/such/interpreter")
    server = _Server()
    requests = ForkRequests(socket.socket(fileno=os.dup(server.request_fd)))
    try:
        with pytest.raises(FileNotFoundError):
            server.run_piped(_program("wait"))
        # WHEN more is asked than there is room for
        begun_s = time.monotonic()
        with ExitStack() as stack, pytest.raises(BlockingIOError):
            for _ in range(100_000):
                stack.callback(requests.run_piped(_program("wait"), []).close)
        # THEN it is refused at once
        assert time.monotonic() - begun_s < 60
    finally:
        requests.close()
        server.close()


_HERE = f"""
import os, sys, time
from aiflame.agent.inspector.fork_server import ForkServer, Program
from hostile import forks
forks.MARK = "of the parent"
opened = open("/dev/zero")
server = ForkServer()
server.begin_here(lambda: os.umask(0o027))
helper = server.run_piped(Program("tell_more", "{_MODULE}:tell_more", ("{_MODULE}",)), [])
assert helper.begins()
print(helper.stdout.read().decode(), server.pids[0], flush=True)
print(server.starts, os.getpgid(server.pids[0]) == server.pids[0], flush=True)
"""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], subprocess.Popen[str]]:
    """Starts a process that forks a server from itself, and has more to do."""
    monkeypatch.setenv("PYTHONPATH", str(_TESTS))

    def started(more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _HERE + more]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    return started


def test_one_forked_from_a_process_has_its_modules_and_nothing_else(
    here: Callable[[str], subprocess.Popen[str]],
) -> None:
    with here("server.close(); print(server.pids)") as process:
        told, _ = process.communicate(timeout=60)
    first, second, third = told.splitlines()
    # THEN its forks have what the parent's modules had, and no file that the parent has opened
    assert first.startswith("of the parent [] / 0o27 ")
    # AND Ctrl-C is not for it
    assert second == "1 True"
    # AND it ends when it is closed
    assert third == "()"
    assert process.returncode == 0


def test_one_forked_from_a_process_ends_with_it(
    here: Callable[[str], subprocess.Popen[str]],
) -> None:
    with here("time.sleep(60)") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[-1])
        assert process.stdout.readline() == "1 True\n"
        assert children_of(process.pid) == [pid]
        process.kill()
        wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_one_forked_from_a_process_is_started_again_as_an_interpreter(
    here: Callable[[str], subprocess.Popen[str]],
) -> None:
    more = """
os.kill(server.pids[0], 9)
while server.pids:
    time.sleep(0.01)
helper = server.run_piped(Program("tell_more", "hostile.forks:tell_more", ("hostile.forks",)), [])
assert helper.begins()
print(helper.stdout.read().decode(), flush=True)
print(server.starts)
"""
    with here(more) as process:
        told, _ = process.communicate(timeout=60)
    _, _, third, fourth = told.splitlines()
    assert third.startswith("none [] / ")
    assert fourth == "2"


def test_how_a_helper_ends_is_heard_without_waiting(server: _Server) -> None:
    helper = server.run_piped(_program("wait"))
    assert helper.begins()
    assert helper.poll() is None
    helper.stdin.close()
    wait_until(helper.poll)
    # THEN it stays known
    assert [helper.poll(), helper.poll()] == [Ending(0, ANY)] * 2
    # AND so is that a server has ended, and its helpers with it
    helper = server.run_piped(_program("wait"))
    assert helper.begins()
    os.kill(server.pids[0], signal.SIGKILL)
    helper.wait(60)
    with pytest.raises(ConnectionError, match="has ended"):
        helper.poll()


def test_closing_ends_all(server: _Server) -> None:
    helpers = [server.run_piped(_program("wait")) for _ in range(3)]
    assert all(helper.begins() for helper in helpers)
    (process,) = server.pids
    server.close()
    for pid in (process, *(helper.pid for helper in helpers)):
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())


def test_a_helper_is_as_urgent_as_any_other_process(server: _Server) -> None:
    server.expect(_program("wait"))
    server.hurry()
    helper = server.run_piped(_program("wait"))
    assert helper.begins()
    assert os.sched_getscheduler(helper.pid) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, helper.pid) == 0
