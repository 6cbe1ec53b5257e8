# SPDX-License-Identifier: Apache-2.0
"""Where a user's files are kept, also of one that the system does not know."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from aiflame.agent import cli
from aiflame.agent.capture import workspace
from aiflame.agent.errors import EnvironmentUnfit
from aiflame.agent.symbols.store import cache_dir
from aiflame.agent.user_folders import user_folder

_VARIABLES = ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "AIFLAME_STORE")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a line in /etc/passwd, as `docker run --user 1234` has."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    for name in ("HOME", *_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def test_the_variable_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_folder("XDG_CACHE_HOME", ".cache") == Path("/home/ann/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_folder("XDG_CACHE_HOME", ".cache") == Path("/home/ann/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert user_folder("XDG_CACHE_HOME", ".cache") == Path("/fast")


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentUnfit, match="no home of user 1234 is known") as error:
        cache_dir()
    assert "set HOME, or XDG_CACHE_HOME," in str(error.value.hint)
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert cache_dir() == Path("/fast/aiflame")


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_may_record() -> None:
    assert [str(path) for path in workspace._candidates()] == [
        "/tmp/aiflame-1234",  # noqa: S108 - nobody else may replace what is there
    ]


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_may_name_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["store", "init", "--help"])
    assert end.value.code == 0
    assert "$XDG_DATA_HOME/aiflame/store" in capsys.readouterr().out
    # and is told so where none is named.
    assert cli.main(["query", "top"]) == 3
    assert "set HOME, or XDG_DATA_HOME," in capsys.readouterr().err
