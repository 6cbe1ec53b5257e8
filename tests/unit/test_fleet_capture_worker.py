# SPDX-License-Identifier: Apache-2.0
"""What an agent has recorded for a capture."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.commands import record
from aiflame.agent.fleet import capture_worker
from aiflame.agent.fleet.capture_request import CaptureRequest
from aiflame.agent.fleet.config import AgentSettings


class _Began(Exception):
    pass


def _command(monkeypatch: pytest.MonkeyPatch, settings: AgentSettings) -> list[str]:
    """Returns the command by which a second of everything is recorded."""

    def begin(command: list[str], **_: Any) -> None:
        raise _Began(command)

    monkeypatch.setattr(capture_worker.subprocess, "Popen", begin)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = CaptureRequest(is_all=True, duration_ns=10**9)
    with ours, theirs, pytest.raises(_Began) as begun:
        capture_worker._Job(request, settings, settings.directory, ours).make()
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
