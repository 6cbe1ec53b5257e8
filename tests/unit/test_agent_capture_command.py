# SPDX-License-Identifier: Apache-2.0
"""The words of `aiflame agent capture`: whom it asks, and what it refuses before it does."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
from aiflame.agent import cli, outfile
from aiflame.agent.fleet.capture_request import InDirectory
from bench.large import write_capture
from profiles import small_profile

_WHAT = ("capture", "--all", "--last", "5s")


def _asked(directory: Path, output: str, answer: Callable[[socket.socket], object]) -> int:
    """Asks an agent there, which answers so; returns the exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        with InDirectory(directory) as path:
            server.bind(str(path))
        server.listen(1)

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1 << 16)
                answer(peer)

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            words = ("--directory", str(directory), "-o", str(directory / output))
            code = cli.main(["agent", *_WHAT, *words])
            served.result()
    return code


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
    assert _asked(tmp_path, "x.aiflame", lambda peer: peer.send(answer)) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "fails", "is_kept"),
    [
        ("x.aiflame", range(1), True),
        ("x.aiflame", range(99), False),
        ("x.html", range(99), False),
        ("x.html", range(1, 2), True),
    ],
)
def test_a_capture_that_finds_no_room_is_kept_elsewhere(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    fails: range,
    is_kept: bool,
) -> None:
    # GIVEN an agent that has made a capture, and a disk that is full by then
    made = tmp_path / "made.aiflame"
    write_capture(small_profile(), made)
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    fill, tries = outfile._fill, []

    def limited(file: BinaryIO, content: bytes | BinaryIO) -> None:
        tries.append(content)
        if len(tries) - 1 in fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fill(file, content)

    monkeypatch.setattr(outfile, "_fill", limited)
    with made.open("rb") as file:
        fds = [file.fileno()]
        found = _asked(
            tmp_path, output, lambda peer: socket.send_fds(peer, [b'{"done": "web"}'], fds)
        )
    assert found == 1
    said = capsys.readouterr().err
    # THEN it is there, whole, where the message says; or else nothing is left of it
    assert "no space left" in said and not (tmp_path / output).exists()
    kept = [*elsewhere.rglob("*.aiflame")]
    assert len(kept) == is_kept
    assert ("kept as" in said) == is_kept
    for one in kept:
        assert f"kept as {one}" in said
        assert one.read_bytes() == made.read_bytes()
        assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert is_kept or not [*elsewhere.iterdir()]
