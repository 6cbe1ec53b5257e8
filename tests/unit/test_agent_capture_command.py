# SPDX-License-Identifier: Apache-2.0
"""The words of `aiflame agent capture`: whom it asks, and what it refuses before it does."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiflame.agent import cli

_WHAT = ("capture", "--all", "--last", "5s")


@pytest.mark.parametrize("place", ["before", "after", "config", "variable", "after wins"])
def test_the_agents_directory_is_said_in_every_place(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    wanted, own = tmp_path / "wanted", tmp_path / "agent.toml"
    own.write_text(f'directory = "{wanted}"\n')
    monkeypatch.chdir(tmp_path)
    if place == "variable":
        monkeypatch.setenv("AIFLAME_DIRECTORY", str(wanted))
    words = {
        "before": ("--directory", str(wanted), *_WHAT),
        "after": (*_WHAT, "--directory", str(wanted)),
        "config": ("--config", str(own), *_WHAT),
        "variable": _WHAT,
        "after wins": ("--directory", "/nowhere", *_WHAT, "--directory", str(wanted)),
    }[place]
    assert cli.main(["agent", *words]) == 3
    assert f"no agent takes requests at {wanted}/capture.socket" in capsys.readouterr().err


def test_a_configuration_that_is_wrong_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "agent.toml"
    own.write_text("directoryy = 1\n")
    assert cli.main(["agent", "--config", str(own), *_WHAT]) == 2
    assert "directoryy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--all", "--last", "5s", "-F", "99"), "-F is of recordings"),
        (("--all", "-d", "5s", "-F", "200000"), "not a frequency"),
        (("--all", "-d", "5s", "-F", "0"), "not a frequency"),
        (("--all",), "either -d TIME or --last TIME"),
        (("--all", "--pid", "1", "--last", "5s"), "give one of --pid"),
        (("--container", "a\x1b[2J", "--last", "5s"), "not a request"),
    ],
)
def test_what_means_nothing_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["agent", "capture", *words]) == 2
    assert said in capsys.readouterr().err
