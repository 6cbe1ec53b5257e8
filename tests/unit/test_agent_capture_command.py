# SPDX-License-Identifier: Apache-2.0
"""The words of `aiflame agent capture`: whom it asks, and what it refuses before it does."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aiflame.agent import cli
from aiflame.agent.fleet.capture_request import InDirectory

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


def test_an_output_without_a_format_is_told_what_it_can_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["agent", "capture", "--all", "--last", "5s", "-o", "web"]) == 2
    said = capsys.readouterr().err
    # THEN it is no option that there is not.
    assert "end in .aiflame, .html" in said and "-f" not in said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"{", "no answer"),
        (b"7", "no answer"),
        (b'{"done": "x"}', "no answer"),
        (b'{"error": "it failed", "hint": null, "code": 77}', "aiflame: it failed"),
        (b'{"error": "a\\u001b[2J", "hint": "do this", "code": 1}', "aiflame: a\ufffd[2J"),
        (b"", "the agent has ended the capture"),
    ],
)
def test_what_is_no_answer_ends_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: bytes, said: str
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        with InDirectory(tmp_path) as path:
            server.bind(str(path))
        server.listen(1)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.send(answer)

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            words = ("--directory", str(tmp_path), "-o", str(tmp_path / "x.aiflame"))
            assert cli.main(["agent", *_WHAT, *words]) == 1
            served.result()
    assert said in capsys.readouterr().err
