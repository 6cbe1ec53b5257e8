# SPDX-License-Identifier: Apache-2.0
"""What becomes of a running agent when its configuration is read again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiflame.agent.fleet.agent import _Agent
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
        ("off_cpu = 1", "off_cpu: not true or false: 1"),
        ("keep_size = ['a']", "keep_size: not a size"),
        ("stretch = 2026-01-01", "stretch: not a time"),
        ("stretch = " + "9" * 5000, "not TOML"),
    ],
)
def test_a_wrong_file_changes_nothing(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    said = _reloaded(tmp_path, lambda: load(path, {}, {}))
    assert f"the configuration stays as it was: {path}: {words}" in said


@pytest.mark.parametrize("error", [RuntimeError("odd"), MemoryError(), OSError(5, "odd")])
def test_no_error_of_reading_ends_the_agent(tmp_path: Path, error: Exception) -> None:
    def fail() -> AgentConfig:
        raise error

    assert "the configuration stays as it was: " in _reloaded(tmp_path, fail)
