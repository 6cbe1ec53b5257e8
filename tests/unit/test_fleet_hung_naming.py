# SPDX-License-Identifier: Apache-2.0
"""A naming process that lives and gets nowhere: what is said of it, and when another takes over."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiflame.agent.fleet import agent as fleet_agent
from aiflame.agent.fleet import naming, naming_progress
from aiflame.agent.fleet import vitals as vitals_module
from aiflame.agent.fleet.config import load
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.naming import NamingProcess
from aiflame.agent.fleet.stretches import Stretches
from aiflame.agent.fleet.vitals import Vitals
from aiflame.agent.inspector.fork_server import Program
from aiflame.agent.losses import LossKind
from aiflame.agent.processes import procfs
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.recording.recorder import Progress
from support import blind_inspector, wait_until
from windows import RandomRecording

_MODULE = "hostile.forks"
# Of a crowded machine, for a process to begin, to be stopped, to read a message or to end.
_PATIENCE_S = 60.0
_WINDOW = RandomRecording(1).windows(1)[0]


class _Clock:
    """What the agent's process takes for the time; that of the naming process is the real one."""

    def __init__(self) -> None:
        self.now_s = 1e6

    def monotonic(self) -> float:
        return self.now_s


class _Host:
    """An agent that records nothing, and starts a naming process."""

    def __init__(self, tmp_path: Path, clock: _Clock) -> None:
        self._clock = clock
        self._log = tmp_path / "log"
        self.vitals = Vitals()
        self._inspector = blind_inspector()
        log = Log(os.open(self._log, os.O_WRONLY | os.O_CREAT))
        parts: dict[str, Any] = dict.fromkeys(inspect.signature(fleet_agent._Agent).parameters)
        parts |= {"config": load(None, {"directory": str(tmp_path / "agent")}, {}), "log": log}
        parts |= {"vitals": self.vitals, "stretches": Stretches(tmp_path / "agent", log)}
        table = ProcessTable(1, lambda _: None, self._inspector)
        parts["recorder"] = SimpleNamespace(table=table, leave_out=lambda _: None)
        parts["signals"] = SimpleNamespace(take_copy_request=bool, take_reload_request=bool)
        parts["health"] = SimpleNamespace(unready="")
        parts["server"] = self._inspector.server
        self.agent = fleet_agent._Agent(**parts)
        self.agent._tidied_s = self.agent._give_back_at_s = 1e9

    def interval(self, passed_s: float = 0.0) -> None:
        self._clock.now_s += passed_s
        self.vitals.note_window(_WINDOW, is_kept=True)
        self.agent._every_interval(Progress(0, 0, 0, 0))

    def passes(self, seconds: int) -> None:
        for _ in range(0, seconds, 5):
            self.interval(5)

    def waits_until(self, what: Any) -> None:
        """Waits, in no time of the agent's."""

        def looked() -> bool:
            self.interval()
            return bool(what())

        wait_until(looked, _PATIENCE_S)

    @property
    def naming(self) -> NamingProcess:
        assert self.agent._naming is not None
        return self.agent._naming

    def start(self) -> int:
        """Starts a naming process; returns its pid."""
        self.agent._start_naming()
        self.waits_until(lambda: self.naming.pid)
        assert self.naming.pid is not None
        return self.naming.pid

    def stop(self) -> int:
        """Stops the naming process once it has taken all; returns its pid."""
        self.waits_until(lambda: not self.naming._progress._unread_bytes)
        pid = self.naming.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: (stat := procfs.thread_stat(pid, pid)) and stat.state == "T")
        return pid

    def said(self, words: str) -> int:
        return self._log.read_text().count(words)

    def metric(self, name: str) -> float:
        found = {x.name: x.value for family in self.vitals.collect() for x in family.samples}
        return found[name]

    def close(self) -> None:
        if self.agent._naming is not None:
            self.agent._naming.close()
        self._inspector.server.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Host]:
    clock = _Clock()
    for module in (fleet_agent, naming_progress, vitals_module):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    _program(monkeypatch, "take_messages")
    with closing(_Host(tmp_path, clock)) as made:
        yield made


def _program(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    program = Program("x", f"{_MODULE}:{function}", (_MODULE,))
    monkeypatch.setattr(naming, "PROGRAM", program)


def test_one_that_is_stopped_is_told_of_and_replaced_and_no_loss_is_forgotten(
    host: _Host,
) -> None:
    # GIVEN a naming process that was stopped, and is told of a loss
    host.start()
    first = host.stop()
    host.agent._lose(LossKind.WINDOWS_LOST, 3)
    # WHEN that is for a while THEN nothing is said
    host.passes(295)
    assert host.vitals.unready == "" and not host.said("has taken nothing")
    # AND WHEN it is for long THEN the log, /readyz and metrics tell of it, and it is left alone
    host.passes(10)
    assert host.vitals.unready.startswith("the process that names and sends has taken nothing for")
    assert host.vitals.trouble == ""  # to begin the agent anew would only lose what it has
    assert host.said("has taken nothing for 300 s") == 1
    assert host.metric("aiflame_naming_unheard_seconds") == 305
    host.passes(690)
    assert host.naming.pid == first and not host.metric("aiflame_naming_killed_total")
    # AND WHEN it has not run for so long that it hangs THEN it is killed,
    host.passes(10)
    assert host.said("has not run for 1000 s: it is killed") == 1
    host.waits_until(lambda: host.agent._naming is None)
    assert host.said("has ended: SIGKILL") == 1
    assert host.metric("aiflame_naming_killed_total") == 1
    # AND another one takes over, is told of the loss, and all is as it was.
    host.interval(10)
    host.waits_until(lambda: not host.agent._untold)
    host.passes(30)
    assert host.naming.pid not in (None, first)
    assert host.vitals.unready == "" and host.metric("aiflame_naming_unheard_seconds") == 0


def test_one_that_goes_on_again_is_left_alone(host: _Host) -> None:
    # GIVEN one that was stopped for long
    host.start()
    pid = host.stop()
    host.agent._lose(LossKind.WINDOWS_LOST, 3)
    host.passes(900)
    assert host.vitals.unready
    # WHEN it goes on THEN it is as if nothing had been
    os.kill(pid, signal.SIGCONT)
    host.waits_until(lambda: not host.agent._untold)
    assert host.vitals.unready == ""
    # AND so it is where nothing waits for it, however long it is stopped.
    host.stop()
    host.passes(2000)
    assert host.naming.pid == pid and host.vitals.unready == ""


def test_one_that_is_at_something_long_is_told_of_and_not_killed(
    host: _Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN one that takes nothing, and runs
    _program(monkeypatch, "take_nothing")
    pid = host.start()
    seen: set[int] = set()

    def runs_again() -> bool:
        stat = procfs.thread_stat(pid, pid)
        assert stat is not None
        is_new = stat.switches not in seen
        seen.add(stat.switches)
        return is_new

    # WHEN twice the time passes in which one that hangs is killed, and it runs all the time
    for _ in range(200):
        wait_until(runs_again, _PATIENCE_S)
        host.interval(10)
    # THEN it is told of, and goes on.
    assert host.vitals.unready and host.said("has taken nothing for 300 s") == 1
    assert host.naming.pid == pid and not host.metric("aiflame_naming_killed_total")


def test_time_in_which_nobody_looked_kills_nobody(host: _Host) -> None:
    # GIVEN a naming process that is stopped, and so is all of its agent
    host.start()
    pid = host.stop()
    host.agent._lose(LossKind.WINDOWS_LOST, 3)
    # WHEN the agent goes on a day later THEN it waits for the naming process to do so, too.
    for _ in range(2):
        host.interval(86_400)
        assert host.vitals.unready == "" and host.naming.pid == pid
    os.kill(pid, signal.SIGCONT)
    host.waits_until(lambda: not host.agent._untold)
