# SPDX-License-Identifier: Apache-2.0
"""Captures that a running agent is asked for: what they are of, and what asking cannot do to it."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import support
from aiflame.agent import kernelfs
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import Profile
from aiflame.agent.processes.targets import cgroup2_mounts
from aiflame.agent.sinks.segments import RecordedWindows
from cgroups import in_cgroup, made_groups
from recordings import Workload, frames_of
from support import wait_until

pytestmark = pytest.mark.bpf

_PATIENCE_S = 180.0
_POD_UID = "0f9cdd5e-8d1c-4d5a-9d5f-6a4b1ad0c9ab"
_CONTAINER_ID = f"{os.getpid():08x}" + "fedcba9876543210" * 3 + "fedcba98"


class _Agent:
    """An agent, and a user who asks it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.directory, self.log = folder, folder / "agent", folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(*support.AIFLAME, "agent", "--directory", str(self.directory)),
                    # Without devices: other tests expect to be the only recorder of their helpers.
                    *("--stretch", "5s", "--health", "", "--gpu", "none"),
                    *options,
                ],
                stderr=log,
            )
        wait_until(lambda: "recording all processes" in self.log.read_text(), _PATIENCE_S)
        wait_until(lambda: self.windows(), _PATIENCE_S)

    def command(self, *arguments: object) -> list[str]:
        words = ["agent", "capture", "--directory", str(self.directory), *map(str, arguments)]
        return [*support.AIFLAME, *words]

    def capture(self, *arguments: object, code: int = 0) -> str:
        """Asks for a capture; returns what is said."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
        assert done.returncode == code, done.stderr + self.log.read_text()
        return done.stderr

    def known(self) -> str:
        """Returns what the agent keeps of containers that may be gone."""
        path = self.directory / "containers.json"
        return path.read_text() if path.exists() else ""

    def windows(self) -> list[tuple[int, int]]:
        """Returns where the windows on disk begin and end."""
        folders = sorted(self.directory.glob("stretches/*"))
        recorded = [folder for folder in folders if [*folder.glob("segment-*")]]
        return [(w.start_ns, w.end_ns) for each in recorded for w in RecordedWindows(each)]


@contextmanager
def _recording(folder: Path, *options: str) -> Iterator[_Agent]:
    made = _Agent(folder, *options)
    try:
        yield made
        made.process.terminate()
        assert made.process.wait(60) == 0, made.log.read_text()
    finally:
        made.process.kill()
        made.process.wait()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[_Agent]:
    with _recording(tmp_path) as made:
        yield made


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup as docker makes it for a container."""
    with made_groups(cgroup2_mounts()[0], f"docker-{_CONTAINER_ID}.scope") as (made,):
        yield made


def _burn(group: Path, program: Path) -> int:
    with in_cgroup(group, program) as burning:
        burning.go()
        burning.truth()
        return burning.pid


def _recorders(directory: Path) -> list[int]:
    """Returns the pids of recordings that are made for requests to an agent."""
    commands = {
        int(path.parent.name): kernelfs.read_text(path).split("\0")
        for path in Path("/proc").glob("[0-9]*/cmdline")
    }
    return [
        pid
        for pid, words in commands.items()
        if "record" in words and any(word.startswith(str(directory)) for word in words)
    ]


def _of(pid: int, profile: Profile) -> tuple[dict[int, int], set[str]]:
    """Returns the ns of each class, and the names of functions, of workloads/burns.c."""
    # The shell that becomes it enters its cgroup later than it begins.
    programs = [one.pid == pid and one.executable.endswith("/burns") for one in profile.processes]
    threads = [at for at, thread in enumerate(profile.threads) if programs[thread.process]]
    rows = profile.samples[np.isin(profile.samples["thread"], threads)]
    classes = {int(k): int(rows["ns"][rows["klass"] == k].sum()) for k in np.unique(rows["klass"])}
    names = {name for at in np.unique(rows["stack"]).tolist() for name in frames_of(profile, at)}
    return classes, names


def _assert_labelled(profile: Profile, pid: int) -> None:
    """Checks that a process is of the container, and of this host."""
    labels = dict(zip((one.pid for one in profile.processes), profile.labels, strict=True))[pid]
    assert labels is not None
    assert (labels.container_id, labels.engine) == (_CONTAINER_ID, "docker")
    assert labels.service == "unknown-container"
    assert labels.node


@pytest.mark.breadth
def test_what_is_on_disk_goes_up_to_the_moment_it_is_asked_for(
    agent: _Agent, group: Path, workload: Callable[..., Path]
) -> None:
    # GIVEN a program that has just ended
    pid = _burn(group, workload("burns"))
    # WHEN what is on disk is asked for at once, and again later
    agent.capture("--pid", pid, "--last", "10m", "-o", "now.aiflame", "-q")
    known = len(agent.windows())
    wait_until(lambda: len(agent.windows()) >= known + 2, _PATIENCE_S)
    agent.capture("--pid", pid, "--last", "10m", "-o", "later.aiflame", "-q")
    # THEN all of its time was there.
    now, later = (read_capture(agent.folder / f"{name}.aiflame") for name in ("now", "later"))
    assert _of(pid, now)[0] == _of(pid, later)[0] != {}


def test_a_container_is_cut_out_of_what_is_on_disk(
    agent: _Agent, group: Path, workload: Callable[..., Path]
) -> None:
    # GIVEN a container that has come and gone while the agent recorded
    pid = _burn(group, workload("burns"))
    # and what was recorded of its end is on disk
    known = len(agent.windows())
    wait_until(lambda: len(agent.windows()) >= known + 2, _PATIENCE_S)
    # WHEN its capture is asked for, and one of all
    said = agent.capture("--container", _CONTAINER_ID[:12], "--last", "10m", "-o", "web.aiflame")
    agent.capture("--all", "--last", "10m", "-o", "all.aiflame", "-q")
    agent.capture("--pid", pid, "--last", "10m", "-o", "pid.aiflame", "-q")
    path = f"/docker-{_CONTAINER_ID}.scope"
    agent.capture("--cgroup", path, "--last", "10m", "-o", "group.aiflame", "-q")
    # THEN it has nothing of others, and all of its own, with the same names.
    assert "whole windows of" in said
    assert "Next: aiflame stats web.aiflame" in said
    web, whole = (read_capture(agent.folder / f"{name}.aiflame") for name in ("web", "all"))
    groups = {process.cgroup for process in web.processes}
    assert groups == {f"/docker-{_CONTAINER_ID}.scope"}
    ns, names = _of(pid, web)
    assert (ns, names) == _of(pid, whole)
    assert ns[0] > 0
    for other in ("pid", "group"):
        assert _of(pid, read_capture(agent.folder / f"{other}.aiflame")) == (ns, names)
    assert "spend_three" in names
    assert len(whole.processes) > len(web.processes)
    assert dict(web.recording.facts)["container id"] == _CONTAINER_ID
    # AND each process is known by its container, as in what the agent writes by itself.
    _assert_labelled(web, pid)
    _assert_labelled(whole, pid)
    assert {one.container_id for one in whole.labels if one is not None} > {_CONTAINER_ID}
    assert (agent.folder / "web.aiflame").stat().st_mode & 0o777 == 0o600
    assert (agent.folder / "web.html").exists()


@contextmanager
def _kubelet(folder: Path, pods: list[dict[str, object]]) -> Iterator[tuple[str, ...]]:
    """Serves a list of pods, as they are at the time; yields the options of an agent that asks."""
    certificate, token = folder / "kubelet.pem", folder / "token"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*request, *names, "-keyout", certificate, "-out", folder / "only.pem"],
        check=True,
        capture_output=True,
    )
    with certificate.open("ab") as file:
        file.write((folder / "only.pem").read_bytes())
    token.touch(0o600)
    token.write_text("secret")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Authorization"] == "Bearer secret"
            body = json.dumps({"kind": "PodList", "apiVersion": "v1", "items": pods}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port, ca_file = server.server_address[1], folder / "only.pem"
        yield (
            *("--kubelet", "127.0.0.1", "--kubelet-port", str(port)),
            *("--kubelet-token-file", str(token), "--kubelet-ca-file", str(ca_file)),
        )
        server.shutdown()


def _pod(name: str, container_id: str) -> dict[str, object]:
    metadata = {"name": name, "namespace": "prod", "uid": _POD_UID, "labels": {"app": "shop"}}
    status = {"name": "web", "image": "shop:1.7", "containerID": f"containerd://{container_id}"}
    return {"metadata": metadata, "status": {"containerStatuses": [status]}}


@pytest.mark.breadth
def test_a_pod_that_is_gone_is_cut_out_of_what_is_on_disk(
    tmp_path: Path, workload: Callable[..., Path]
) -> None:
    # As the kubelet's driver cgroupfs calls it.
    path = f"/kubepods/pod{_POD_UID}/{_CONTAINER_ID}"
    pods = [_pod("shop-1", _CONTAINER_ID)]
    with (
        _kubelet(tmp_path, pods) as options,
        _recording(tmp_path, *options) as agent,
    ):
        # GIVEN a pod that has come and gone while the agent recorded, with all that knew of it
        with made_groups(cgroup2_mounts()[0], path.lstrip("/")) as (group,):
            pid = _burn(group, workload("burns"))
            wait_until(lambda: "shop-1" in agent.known(), _PATIENCE_S)
        pods.clear()
        known = len(agent.windows())
        wait_until(lambda: len(agent.windows()) >= known + 2, _PATIENCE_S)
        # WHEN its capture is asked for
        asked = ("--last", "10m", "-q", "-o")
        agent.capture("--pod", "prod/shop-1", *asked, "pod.aiflame")
        refused = agent.capture("--pod", "shop-2", *asked, "other.aiflame", code=2)
    # THEN it has its own and nothing of others, and says whose it is; one that never was is
    # refused with those that are known.
    pod = read_capture(tmp_path / "pod.aiflame")
    assert {process.cgroup for process in pod.processes} == {path}
    ns, names = _of(pid, pod)
    assert ns[0] > 0
    assert "spend_three" in names
    labels = dict(zip((one.pid for one in pod.processes), pod.labels, strict=True))[pid]
    assert labels is not None
    assert (labels.namespace, labels.pod, labels.container) == ("prod", "shop-1", "web")
    assert (labels.service, labels.version) == ("shop", "1.7")
    assert dict(pod.recording.facts)["pod"] == "shop-1"
    assert "prod/shop-1" in refused


def test_a_recording_is_made_beside_the_agent(
    agent: _Agent, group: Path, workload: Callable[..., Path]
) -> None:
    with in_cgroup(group, workload("burns")) as burning:
        # WHEN a container is recorded deeply, and somebody else asks meanwhile
        first = subprocess.Popen(
            agent.command("--container", _CONTAINER_ID, "-d", "8s", "-F", "499", "-o", "x.aiflame"),
            cwd=agent.folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert first.stderr is not None
        assert "at 499 Hz" in first.stderr.readline()
        wait_until(lambda: _recorders(agent.directory), _PATIENCE_S)
        # A recorder that finds itself nice takes that for the user's wish, and waits for a CPU.
        nice = os.getpriority(os.PRIO_PROCESS, min(_recorders(agent.directory)))
        assert nice <= 0
        # Where memory runs out it goes before the agent does.
        scores = [
            int(kernelfs.read_text(f"/proc/{pid}/oom_score_adj"))
            for pid in (min(_recorders(agent.directory)), agent.process.pid)
        ]
        assert scores[0] > scores[1]
        refused = agent.capture("--all", "--last", "5s", code=1)
        _, said = first.communicate(timeout=_PATIENCE_S)
    # THEN it is like any recording, the other one is told why it has to wait,
    assert first.returncode == 0, said
    assert "another capture is being made" in refused
    assert "-d" not in refused
    profile = read_capture(agent.folder / "x.aiflame")
    assert profile.recording.period_ns == 10**9 // 499
    assert {Path(one.executable).name for one in profile.processes} <= {"burns", "sh"}
    _assert_labelled(profile, burning.pid)
    ns, _ = _of(burning.pid, profile)
    assert sum(ns.values()) > 7 * 10**9  # it waits to be told to begin
    # AND the agent has missed nothing.
    windows = agent.windows()
    assert [begin for begin, _ in windows[1:]] == [end for _, end in windows[:-1]]


@pytest.mark.breadth
def test_who_goes_leaves_nothing(agent: _Agent, workload: Callable[..., Path]) -> None:
    with Workload([workload("burns")]) as burning:
        asking = subprocess.Popen(
            agent.command("--pid", burning.pid, "-d", "5m", "-o", "x.aiflame"),
            cwd=agent.folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert asking.stderr is not None
        assert "recording burns" in asking.stderr.readline()
        asking.send_signal(signal.SIGINT)
        asking.communicate(timeout=_PATIENCE_S)
        assert asking.returncode == 130
        wait_until(lambda: not [*(agent.directory / "capture").iterdir()], _PATIENCE_S)
        agent.capture("--pid", burning.pid, "-d", "1s", "-o", "y.svg", "-q")
    assert not (agent.folder / "x.aiflame").exists()
    assert (agent.folder / "y.svg").exists()


def test_what_cannot_be_is_said(agent: _Agent, tmp_path: Path) -> None:
    assert "no container nothing is known here" in agent.capture(
        *("--container", "nothing", "--last", "1m"), code=2
    )
    assert "no such process" in agent.capture("--pid", 1 << 22, "-d", "1s", code=2)
    assert "600 s at most" in agent.capture("--all", "--last", "11m", code=2)
    assert "either -d TIME or --last TIME" in agent.capture("--all", code=2)
    (tmp_path / "there.aiflame").touch()
    assert "file exists" in agent.capture("-a", "--last", "1m", "-o", "there.aiflame", code=2)
    assert "no agent takes requests" in agent.capture(
        *("-a", "--last", "1m", "--directory", tmp_path), code=3
    )
