# SPDX-License-Identifier: Apache-2.0
"""The process that makes a capture for an agent: what it has recorded, and what it leaves."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.capture import workspace
from aiflame.agent.capture.workspace import Destination, Workspace, unfinished
from aiflame.agent.commands import record
from aiflame.agent.errors import AiflameError, DiskFull
from aiflame.agent.fleet import capture_choice, capture_job
from aiflame.agent.fleet.capture_request import CaptureRequest
from aiflame.agent.fleet.config import AgentSettings
from aiflame.agent.fleet.known_containers import keep
from aiflame.agent.fleet.labels import KnownContainer
from aiflame.agent.processes.container_names import EngineFacts
from profiles import process

_REQUEST = CaptureRequest(is_all=True, duration_ns=10**9)


class _Began(Exception):
    pass


def _command(monkeypatch: pytest.MonkeyPatch, settings: AgentSettings) -> list[str]:
    """Returns the command by which a second of everything is recorded."""

    def begin(command: list[str], **_: Any) -> None:
        raise _Began(command)

    monkeypatch.setattr(capture_job.subprocess, "Popen", begin)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(_Began) as begun:
        capture_job._Job(_REQUEST, settings, settings.directory, ours).make()
    (command,) = begun.value.args
    return list(command)


@pytest.mark.parametrize(("percent", "permille"), [(100.0, 1000), (12.5, 125), (0.1, 1)])
def test_a_capture_samples_stalls_for_as_much_of_the_time_as_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, percent: float, permille: int
) -> None:
    settings = AgentSettings(gpu_duty_percent=percent, directory=tmp_path)
    arguments = _command(monkeypatch, settings)
    parser = argparse.ArgumentParser()
    record.add_arguments(parser)
    options = arguments[arguments.index("record") + 1 :]
    assert parser.parse_args(options).gpu_duty == permille


def test_a_capture_without_devices_has_no_share_of_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = AgentSettings(gpu="none", directory=tmp_path)
    arguments = _command(monkeypatch, settings)
    assert "--gpu-duty" not in arguments and "none" in arguments


def test_a_container_below_a_service_is_chosen_and_labelled_as_sinks_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a container of a service, as Quadlet makes it, of which the agent knows
    container_id, service = "a" * 64, "/system.slice/quadlet.service"
    group = f"{service}/libpod-payload-{container_id}"
    (tmp_path / group.lstrip("/")).mkdir(parents=True)
    keep(tmp_path, {container_id: KnownContainer(EngineFacts("web"))})
    monkeypatch.setattr(capture_job, "cgroup2_mounts", lambda: [tmp_path])
    monkeypatch.setattr(capture_choice, "cgroup2_mounts", lambda: [tmp_path])
    monkeypatch.setattr(
        capture_job, "is_roots", lambda mounts, cgroup: (mounts, cgroup) == ([tmp_path], service)
    )
    one = replace(process(7, "nginx"), cgroup=f"{group}/container")
    others = replace(process(8, "podman"), cgroup=f"{service}/runtime")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        request = CaptureRequest(container="web", duration_ns=10**9)
        job = capture_job._Job(request, AgentSettings(directory=tmp_path), tmp_path, ours)
        # WHEN it is asked for by its name
        choice = job._choose([others, one])
    # THEN it is found, all of it and nothing else, and has the label that sinks have.
    assert (choice.numbers, choice.group) == ((1,), group)
    assert choice.labels is not None
    assert (choice.labels.service, choice.labels.container) == ("web", "web")


def _be_killed(path: Path) -> None:
    """Leaves what a recording does that is killed."""
    destination = Destination(path, "aiflame record", force=False, owner=None)
    with Workspace.create(destination) as left:
        left.is_kept = True


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Makes a capture of which the recording is killed; returns where it was to go."""
    monkeypatch.setattr(workspace, "_candidates", lambda: [tmp_path / "lib"])
    # Both are for a process of its own.
    monkeypatch.setattr(capture_job.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(capture_job.signal, "signal", lambda *_: None)
    database: list[Path] = []

    def make(job: capture_job._Job) -> str:
        database.append(job.database)
        _be_killed(job.database)
        raise AiflameError("exit status -9")

    monkeypatch.setattr(capture_job._Job, "make", make)

    def made() -> Path:
        client, server = socket.socketpair()
        with client, server, pytest.raises(AiflameError, match="exit status -9"):
            capture_job._serve(server, AgentSettings(directory=tmp_path / "agent"), _REQUEST)
        return database[-1]

    return made


def test_a_recording_that_was_killed_is_not_kept(serve: Callable[[], Path]) -> None:
    assert not serve().parent.exists()
    assert unfinished() == []


def test_what_a_capture_that_was_killed_has_left_is_removed_by_the_next(
    serve: Callable[[], Path], tmp_path: Path
) -> None:
    # GIVEN what one has left that was killed with its recording, and a recording of a user
    serve()
    left, users = tmp_path / "agent" / "capture" / "tmpabcd", tmp_path / "run.aiflame"
    left.mkdir()
    for number, path in enumerate((left / "capture.aiflame", users)):
        _be_killed(path)
        (new,) = (one for one in unfinished() if one.destination.path == path)
        new.directory.rename(new.directory.with_name(str(number)))  # they are of one second
    # WHEN another is made
    serve()
    # THEN nothing of it is there any more, and all of the user's.
    assert not left.exists()
    assert [one.destination.path for one in unfinished()] == [users]


def test_a_recording_without_room_is_not_said_to_be_kept() -> None:
    said = (
        "[12:00] recording\naiflame: cannot write /a/capture.aiflame: no space left on device"
        f"{workspace.RECORDING_KEPT}\n\n  free some space; then: aiflame recover /a\n"
    )
    error = capture_job._failure(said, 1)
    assert isinstance(error, DiskFull)
    assert str(error) == "cannot write /a/capture.aiflame: no space left on device"
