# SPDX-License-Identifier: Apache-2.0
"""What rules leave out is left out within ten seconds, however far apart windows are."""

from __future__ import annotations

import inspect
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiflame.agent.fleet import labelling
from aiflame.agent.fleet.agent import _Agent
from aiflame.agent.fleet.config import AgentConfig, load
from aiflame.agent.fleet.host_checks import CgroupLayout
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.naming import NamingProcess
from aiflame.agent.fleet.naming_messages import (
    FROM_NAMING,
    CgroupsLeftOut,
    Configure,
    LookAtCgroups,
    NamingReport,
    ToNaming,
)
from aiflame.agent.fleet.naming_worker import _Worker
from aiflame.agent.fleet.stretch_naming import Lateness
from aiflame.agent.fleet.vitals import Vitals
from aiflame.agent.recording.recorder import Progress
from aiflame.agent.sinks.written import Naming
from aiflame.agent.symbolize.files import GivenFiles

_RULES = {"exclude": "unit=nginx.service"}


@pytest.fixture
def log() -> Iterator[Log]:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    yield Log(descriptor)
    os.close(descriptor)


class _Naming:
    """What the process that names is told, and when."""

    def __init__(self) -> None:
        self.looks_s: list[float] = []
        self.told: list[type] = []

    def tell(self, message: ToNaming) -> None:
        self.told.append(type(message))
        if isinstance(message, LookAtCgroups):
            self.looks_s.append(time.monotonic())

    def pump(self) -> None:
        pass

    def look(self) -> float:
        return 0.0

    def kill_if_hung(self) -> bool:
        return False

    def reports(self) -> Iterator[NamingReport]:
        return iter(())

    def ended(self) -> str:
        return ""


def _agent(config: AgentConfig, naming: _Naming, log: Log) -> _Agent:
    """Returns one whose configuration has no rules when it is read again."""
    parts: dict[str, Any] = dict.fromkeys(inspect.signature(_Agent).parameters)
    no_requests = SimpleNamespace(take_copy_request=lambda: None, take_reload_request=lambda: False)
    parts |= {
        "config": config,
        "signals": no_requests,
        "log": log,
        "vitals": Vitals(),
        "reload": lambda: load(None, {}, {}),
        "captures": SimpleNamespace(use=lambda _: None),
    }
    agent = _Agent(**parts)
    agent._naming = cast(NamingProcess, naming)
    return agent


@pytest.mark.parametrize("rules", [_RULES, {"include": "container=*"}, {}])
def test_cgroups_are_looked_at_where_no_window_comes(
    monkeypatch: pytest.MonkeyPatch, log: Log, rules: dict[str, str]
) -> None:
    # GIVEN an agent that closes no window, as over its budget
    naming = _Naming()
    agent = _agent(load(None, rules, {}), naming, log)
    began_s = time.monotonic()
    # WHEN half a minute passes, each second of which it looks for what is to be done
    for second in range(31):
        monkeypatch.setattr(time, "monotonic", lambda second=second: began_s + second)
        agent._every_interval(Progress(0, 0, 0, 0, ()))
    # THEN it has cgroups looked at so often that with a second before and after it is within ten,
    # and where there are no rules it asks for nothing.
    gaps_s = {round(b - a) for a, b in zip(naming.looks_s, naming.looks_s[1:], strict=False)}
    assert gaps_s == ({8} if rules else set())
    assert bool(naming.told) == bool(rules)
    # AND that there are no rules any more is heard of at once.
    agent._take_new_config()
    assert naming.told[-2:] == [Configure, LookAtCgroups]


def test_a_look_that_is_asked_for_finds_what_is_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Log
) -> None:
    monkeypatch.setattr(labelling, "cgroup2_mounts", lambda: [tmp_path / "cgroup"])
    monkeypatch.setattr(labelling, "cgroup_layout", lambda: CgroupLayout.UNIFIED)
    (tmp_path / "cgroup" / "system.slice").mkdir(parents=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(10)
        worker = _Worker(tmp_path, theirs, cast(Naming, None), GivenFiles(), Lateness(), log)
        flags = {"directory": str(tmp_path / "agent")}
        # GIVEN a host that was looked at just now
        worker.take(Configure(load(None, {**flags, **_RULES}, {})))
        worker.take(LookAtCgroups())
        assert FROM_NAMING.decode(ours.recv(1 << 16)) == CgroupsLeftOut({}, ())
        # WHEN a service begins that rules leave out THEN the next look finds it, without a window.
        group = tmp_path / "cgroup" / "system.slice" / "nginx.service"
        group.mkdir()
        worker.take(LookAtCgroups())
        found = FROM_NAMING.decode(ours.recv(1 << 16))
        assert found == CgroupsLeftOut({}, (group.stat().st_ino,))
        # WHEN rules are gone THEN nothing is left out, and no cgroup is looked at.
        monkeypatch.setattr(labelling, "known_groups", None)
        worker.take(Configure(load(None, flags, {})))
        worker.take(LookAtCgroups())
        assert FROM_NAMING.decode(ours.recv(1 << 16)) == CgroupsLeftOut({}, ())
