# SPDX-License-Identifier: Apache-2.0
"""The agent on this host: what goes to a back-end is what its captures say, whatever ends in
between."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import toy_sink
from aiflame.agent import rights
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.fleet.ending import END_S
from aiflame.agent.processes import procfs
from recordings import Workload, children_of
from support import wait_until

pytestmark = pytest.mark.bpf

_PROGRAM = str(Path(toy_sink.__file__))
# A busy machine names a stretch of 5 s in as many.
_PATIENCE_S = 90.0
# From SIGTERM to its end, and what a crowded machine takes to notice.
_END_S = END_S + 1.5


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class _Agent:
    """An agent with captures and a toy back-end, and the server of that."""

    def __init__(self, folder: Path) -> None:
        self.captures, self.received = folder / "captures", folder / "received"
        self.directory, self.log = folder / "agent", folder / "log"
        self.captures.mkdir()
        self.received.mkdir()
        self.port = _free_port()
        self.server: subprocess.Popen[bytes] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        command = [sys.executable, _PROGRAM, "receive", str(self.port), str(self.received)]
        self.server = subprocess.Popen(command)
        wait_until(self._answers, 30)

    def _answers(self) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()
        self.server = None

    def start(self, stretch: str = "5s", config: Path | None = None) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, _PROGRAM, "agent", "--directory", str(self.directory)),
                    *("--sinks-captures-directory", str(self.captures)),
                    *(("--stretch", stretch) if config is None else ("--config", str(config))),
                    # Without devices: other tests expect to be the only recorder of their helpers.
                    *("--gpu", "none"),
                    *("--sinks-toy-url", f"http://127.0.0.1:{self.port}"),
                ],
                stderr=log,
            )
        begun = self.said("recording all processes")
        wait_until(lambda: self.said("recording all processes") > begun, _PATIENCE_S)

    def said(self, words: str) -> int:
        return self.log.read_text().count(words)

    def terminate(self) -> float:
        """Ends it as a service manager does; returns the seconds that it took."""
        assert self.process is not None
        begun_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()
        self.process = None
        return time.monotonic() - begun_s

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def naming_pid(self) -> int:
        assert self.process is not None
        return self._child_of(self.fork_server_pid(), "naming")

    def fork_server_pid(self) -> int:
        assert self.process is not None
        return self._child_of(self.process.pid, "fork_server")

    @staticmethod
    def _child_of(parent: int, name: str) -> int:
        (found,) = (pid for pid in children_of(parent) if procfs.comm(pid) == name)
        return found

    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_bytes()) for path in sorted(self.received.glob("*.json"))]

    def sums_of_captures(self) -> dict[int, dict[str, int]]:
        found = {}
        for path in self.captures.glob("*.aiflame"):
            profile = read_capture(path)
            found[profile.recording.started_unix_ns] = toy_sink.sums_of(profile)
        return found

    def burnt_ns(self, begin_unix_ns: int) -> int:
        """Returns the time on the CPU of workloads/burns.c in a stretch."""
        for path in self.captures.glob("*.aiflame"):
            profile = read_capture(path)
            if profile.recording.started_unix_ns == begin_unix_ns:
                programs = [Path(one.executable).name for one in profile.processes]
                names = [programs[thread.process] for thread in profile.threads]
                rows = profile.samples[profile.samples["klass"] == 0]
                threads, ns = rows["thread"].tolist(), rows["ns"].tolist()
                return sum(ns for at, ns in zip(threads, ns, strict=True) if names[at] == "burns")
        raise AssertionError(f"no capture of {begin_unix_ns}")

    def undone(self) -> list[Path]:
        folders = (self.directory / "stretches").iterdir()
        return [folder for folder in folders if not (folder / "done").exists()]

    def waiting(self) -> list[Path]:
        return [*(self.directory / "spool").glob("toy-*/*.request")]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[_Agent]:
    made = _Agent(tmp_path)
    try:
        yield made
    finally:
        for process in (made.process, made.server):
            if process is not None:
                process.kill()
                process.wait()


@contextmanager
def _burning(program: Path) -> Iterator[Workload]:
    with Workload([program]) as started:
        yield started


@contextmanager
def _computing() -> Iterator[None]:
    """A process that computes: an idle host may have no sample in some seconds."""
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as shell:
        try:
            yield
        finally:
            shell.kill()


def _check_sums(agent: _Agent) -> None:
    """Checks that each stretch came once, in order, with exactly what its capture has.

    What a crowded machine had no time for is on disk.
    """
    requests = agent.requests()
    begins = [request["begin"] for request in requests]
    assert begins == sorted(set(begins)), agent.log.read_text()
    captures = agent.sums_of_captures()
    for request in requests:
        assert request["sums"] == captures[request["begin"]]
    waiting = {int(path.name.split("-")[1]) for path in agent.waiting()}
    # What was being named as the time to end was over is on disk, to be named again.
    undone = {int(folder.name) for folder in agent.undone()}
    assert {*captures} - undone <= waiting | {*begins} <= {*captures}
    every = {int(folder.name) for folder in (agent.directory / "stretches").iterdir()}
    assert every == {*captures} | undone
    assert sum(sums["count of 0"] for sums in captures.values()) > 0
    assert sum(sums["ns of 1"] for sums in captures.values()) > 0
    assert not any("not_delivered" in request["losses"] for request in requests)


def test_nothing_is_lost_while_a_back_end_is_away(
    agent: _Agent, workload: Callable[..., Path]
) -> None:
    # GIVEN an agent, and a program that knows what it computes
    agent.serve()
    agent.start()
    with _burning(workload("burns")) as burning:
        burning.go()
        burning.truth()
        wait_until(lambda: len(agent.requests()) >= 2, _PATIENCE_S)
        # WHEN the back-end is killed, stays away for some stretches, and comes again
        agent.kill_server()
        wait_until(lambda: len(agent.waiting()) >= 2, _PATIENCE_S)
        assert agent.said("sink toy is away") >= 1
        agent.serve()
        wait_until(lambda: not agent.waiting(), _PATIENCE_S)
    # AND the agent is told to end
    took_s = agent.terminate()
    # THEN it ends in time, and nothing is lost or sent twice,
    assert took_s < _END_S, agent.log.read_text()
    assert agent.said("takes requests again") == 1
    _check_sums(agent)
    # AND the program has the same time there as in the captures.
    sent = [request["services"].get("burns", 0) for request in agent.requests()]
    assert sent == [agent.burnt_ns(request["begin"]) for request in agent.requests()]
    assert sum(sent) > 0
    # Captures are private.
    assert {path.stat().st_mode & 0o777 for path in agent.captures.iterdir()} == {0o600}
    assert [path for path in agent.directory.rglob("*") if path.stat().st_mode & 0o077] == []


def test_a_killed_agent_sends_the_rest_when_it_is_started_again(agent: _Agent) -> None:
    # GIVEN an agent whose back-end is away, with requests that wait and an open stretch
    agent.start()
    with _computing():
        wait_until(lambda: len(agent.waiting()) >= 2, _PATIENCE_S)
        wait_until(agent.undone, _PATIENCE_S)
    # WHEN it is killed, and started again with a back-end
    agent.kill()
    left = {int(folder.name) for folder in agent.undone()}
    agent.serve()
    agent.start()
    # THEN what waited comes, and so does the stretch that was open.
    wait_until(lambda: left <= {request["begin"] for request in agent.requests()}, _PATIENCE_S)
    agent.terminate()
    _check_sums(agent)


@pytest.mark.breadth
def test_an_agent_ends_in_time_while_naming_hangs(
    agent: _Agent, workload: Callable[..., Path]
) -> None:
    # GIVEN an agent that records a program, and whose naming gets nowhere
    agent.serve()
    agent.start()
    wait_until(agent.requests, _PATIENCE_S)
    naming = agent.naming_pid()
    for pid in (naming, *procfs.descendants([naming])):
        os.kill(pid, signal.SIGSTOP)
    with _burning(workload("burns")) as burning:
        burning.go()
        burning.truth()
    wait_until(lambda: len(agent.undone()) >= 2, _PATIENCE_S)
    # WHEN it is told to end
    took_s = agent.terminate()
    # THEN it has in time,
    assert took_s < _END_S, agent.log.read_text()
    left = {int(folder.name) for folder in agent.undone()}
    assert len(left) >= 2
    # AND what was not named comes after the next start: nothing is lost.
    agent.start()
    wait_until(lambda: left <= {request["begin"] for request in agent.requests()}, _PATIENCE_S)
    agent.terminate()
    _check_sums(agent)
    sent = [request["services"].get("burns", 0) for request in agent.requests()]
    assert sum(sent) > 0
    assert sent == [agent.burnt_ns(request["begin"]) for request in agent.requests()]


@pytest.mark.breadth
def test_an_end_as_a_stretch_is_cut_leaves_no_empty_one(
    agent: _Agent, workload: Callable[..., Path]
) -> None:
    agent.serve()
    agent.start()
    with _burning(workload("burns")) as burning:
        burning.go()
        burning.truth()
    wait_until(agent.requests, _PATIENCE_S)
    # WHEN it is told to end as a window has come that is as long as a stretch
    folders = agent.directory / "stretches"
    before = {*folders.iterdir()}
    wait_until(lambda: {*folders.iterdir()} > before, _PATIENCE_S)
    agent.terminate()
    # THEN each stretch has time, and comes.
    _check_sums(agent)
    assert all(sums["ns of 1"] > 0 for sums in agent.sums_of_captures().values())


@pytest.mark.breadth
def test_an_agent_ends_in_time_where_the_disk_is_full(agent: _Agent) -> None:
    # GIVEN an agent whose directory has no room left
    agent.directory.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "none", str(agent.directory)]
    subprocess.run(mount, check=True)
    try:
        agent.start(stretch="10m")
        wait_until(agent.undone, _PATIENCE_S)  # its first window is there
        filler = agent.directory / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while file.write(bytes(1 << 16)):
                file.flush()
        wait_until(lambda: agent.said("windows are lost"), _PATIENCE_S)
        # WHEN it is told to end
        took_s = agent.terminate()
        # THEN it has, in time,
        assert took_s < _END_S, agent.log.read_text()
        # AND what was written is sent once there is room again.
        filler.unlink()
        left = {int(folder.name) for folder in agent.undone()}
        assert left, agent.log.read_text()
        agent.serve()
        agent.start()
        wait_until(lambda: left <= {request["begin"] for request in agent.requests()}, _PATIENCE_S)
        agent.terminate()
    finally:
        subprocess.run(["umount", "-l", str(agent.directory)], check=True)


@pytest.mark.breadth
def test_a_naming_process_that_dies_costs_nothing(agent: _Agent) -> None:
    # GIVEN an agent that has named a stretch
    agent.serve()
    agent.start()
    with _computing():
        wait_until(agent.requests, _PATIENCE_S)
        # WHEN the process that names is killed
        os.kill(agent.naming_pid(), signal.SIGKILL)
        count = len(agent.requests())
        # THEN another takes over,
        wait_until(lambda: len(agent.requests()) >= count + 2, _PATIENCE_S)
    assert agent.said("has ended: SIGKILL") == 1
    # AND a new configuration is read on SIGHUP, without an end of anything.
    assert agent.process is not None
    agent.process.send_signal(signal.SIGHUP)
    wait_until(lambda: agent.said("the configuration was read again"), _PATIENCE_S)
    agent.terminate()
    _check_sums(agent)


@pytest.mark.breadth
def test_a_fork_server_that_dies_costs_nothing(agent: _Agent) -> None:
    # GIVEN an agent that has named a stretch
    agent.serve()
    agent.start()
    with _computing():
        wait_until(agent.requests, _PATIENCE_S)
        # AND no process of it has more rights than it uses
        for pid in (agent.fork_server_pid(), agent.naming_pid()):
            status = dict(
                line.split(":\t", 1)
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
            kept = {number for number in range(64) if int(status["CapEff"], 16) >> number & 1}
            assert kept <= {int(right) for right in rights.USED}
            assert status["NoNewPrivs"] == "1"
        # WHEN the process is killed from which all that read files and names are forked
        os.kill(agent.fork_server_pid(), signal.SIGKILL)
        count = len(agent.requests())
        # THEN another takes over.
        wait_until(lambda: len(agent.requests()) >= count + 2, _PATIENCE_S)
    assert agent.said("has ended with the fork server") == 1
    agent.terminate()
    _check_sums(agent)


@pytest.mark.breadth
def test_a_configuration_is_read_again_on_sighup_and_a_bad_one_changes_nothing(
    agent: _Agent, tmp_path: Path
) -> None:
    def reload(words: str) -> None:
        config.write_text(words)
        assert agent.process is not None
        agent.process.send_signal(signal.SIGHUP)

    # GIVEN an agent that sends so much at once that nobody waits for it
    config = tmp_path / "agent.toml"
    config.write_text('stretch = "10m"\n')
    agent.serve()
    agent.start(config=config)
    # WHEN its file has what is no configuration, each time that it is told to read it again
    for number, words in enumerate(("stretch =", "stretch = [1]", "off_cpu = 1", "no_key = 1"), 1):
        reload(words)
        # THEN it says so, and goes on,
        wait_until(lambda number=number: agent.said("stays as it was") == number, _PATIENCE_S)
    assert agent.undone()
    # and takes one that is.
    reload('stretch = "5s"\n')
    wait_until(lambda: agent.said("was read again") == 1, _PATIENCE_S)
    with _computing():
        wait_until(agent.requests, _PATIENCE_S)
    agent.terminate()
    _check_sums(agent)


def test_two_agents_do_not_share_a_directory(agent: _Agent) -> None:
    agent.start()
    again = subprocess.run(
        [sys.executable, _PROGRAM, "agent", "--directory", str(agent.directory)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert again.returncode == 3
    assert "another agent uses" in again.stderr
    agent.terminate()
