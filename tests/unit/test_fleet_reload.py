# SPDX-License-Identifier: Apache-2.0
"""What becomes of a running agent when its configuration is read again."""

from __future__ import annotations

import inspect
import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent import cli
from aiflame.agent.fleet import agent as fleet_agent
from aiflame.agent.fleet.agent import AgentSignals, _Agent
from aiflame.agent.fleet.config import AgentConfig, load
from aiflame.agent.fleet.log import Log


def _reloaded(tmp_path: Path, reload: Callable[[], AgentConfig]) -> str:
    """Has an agent read its configuration again; returns what it said. It has what it had."""
    before = load(None, {}, {})
    with (tmp_path / "log").open("wb") as file:
        parts: dict[str, Any] = dict.fromkeys(inspect.signature(_Agent).parameters)
        parts |= {"config": before, "reload": reload, "log": Log(file.fileno())}
        agent = _Agent(**parts)
        agent._take_new_config()
        assert agent._config is before
    return (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("off_cpu = 1", "1: off_cpu: not true or false: 1"),
        ("keep_size = ['a']", "1: keep_size: not a size"),
        ("stretch = 2026-01-01", "1: stretch: not a time"),
        ("stretch = " + "9" * 5000, " not TOML"),
    ],
)
def test_a_wrong_file_changes_nothing(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    said = _reloaded(tmp_path, lambda: load(path, {}, {}))
    assert f"the configuration stays as it was: {path}:{words}" in said


@pytest.mark.parametrize("error", [RuntimeError("odd"), MemoryError(), OSError(5, "odd")])
def test_no_error_of_reading_ends_the_agent(tmp_path: Path, error: Exception) -> None:
    def fail() -> AgentConfig:
        raise error

    assert "the configuration stays as it was: " in _reloaded(tmp_path, fail)


def test_a_reload_says_what_waits_for_a_restart_and_what_is_odd(tmp_path: Path) -> None:
    class Captures:
        def use(self, config: AgentConfig) -> None:
            pass

    def read(token: str, environment: dict[str, str]) -> AgentConfig:
        path.write_text(f'health_token = "{token}"')
        path.chmod(0o600)
        return load(path, {}, environment)

    path = tmp_path / "agent.toml"
    before = read("first", {})
    with (tmp_path / "log").open("wb") as file:
        parts: dict[str, Any] = dict.fromkeys(inspect.signature(_Agent).parameters)
        parts |= {"config": before, "log": Log(file.fileno()), "captures": Captures()}
        # WHEN a secret has changed, and a variable is none of the settings
        parts["reload"] = lambda: read("second", {"AIFLAME_STRECH": "5s"})
        agent = _Agent(**parts)
        agent._take_new_config()
    # THEN both are said, without the secret
    said = (tmp_path / "log").read_text()
    assert "health_token takes a restart; it stays as it was" in said
    assert "AIFLAME_STRECH is no setting" in said
    assert "second" not in said


@pytest.fixture
def hang_up() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
def test_a_reload_that_is_asked_for_at_the_start_comes_once_it_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[bool] = []

    def start(*arguments: Any) -> int:
        reloads = arguments[-1]
        # WHEN it is told to read its configuration again before it records, and as it does
        for is_late in (False, True):
            if not is_late:
                os.kill(os.getpid(), signal.SIGHUP)
            with AgentSignals(reloads) as signals:
                if is_late:
                    os.kill(os.getpid(), signal.SIGHUP)
                taken.extend(signals.take_reload_request() for _ in range(2))
                assert not signals.requested
        os.kill(os.getpid(), signal.SIGHUP)  # nor is it ended as it ends
        return 0

    monkeypatch.setattr(fleet_agent, "begin_fork_server", lambda: io.BytesIO())
    monkeypatch.setattr(fleet_agent, "run_agent", start)
    # THEN it does, once for each, and is not ended.
    assert cli.main(["agent", "--gpu", "none"]) == 0
    assert taken == [True, False, True, False]
