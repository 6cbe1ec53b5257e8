# SPDX-License-Identifier: Apache-2.0
"""What a recording says while it runs, and that it does not wait for whoever reads that."""

from __future__ import annotations

import os
import select
import socket
import termios
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TextIO

import pytest
from aiflame.agent.commands.record_progress import ProgressPrinter
from aiflame.agent.recording.recorder import Progress

# A terminal takes what is written to it a moment later.
_PATIENCE_MS = 10_000


def _progress(seconds: int) -> Progress:
    return Progress(seconds * 10**9, samples=1, off_cpu_ns=0, lost=0, said=())


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """What a terminal shows, and the standard error of a program on it."""
    shown, end = os.openpty()
    os.set_blocking(end, False)  # who would wait fails
    with closing(os.fdopen(shown, "rb")), os.fdopen(end, "w") as stream:
        yield shown, stream


def _shown(shown: int, last: str) -> str:
    """Returns what a terminal shows up to some words."""
    poll = select.poll()
    poll.register(shown, select.POLLIN)
    text = ""
    while last not in text:
        assert poll.poll(_PATIENCE_MS), f"only: {text}"
        text += os.read(shown, 4096).decode()
    return text


def test_a_stopped_terminal_stops_no_recording(terminal: tuple[int, TextIO]) -> None:
    shown, stream = terminal
    printer = ProgressPrinter(stream, quiet=False, verbose=0)
    # WHEN Ctrl-S is pressed
    termios.tcflow(stream.fileno(), termios.TCOOFF)
    printer.say_soon("a device is gone")
    printer.progress(_progress(1))
    # and then Ctrl-Q
    termios.tcflow(stream.fileno(), termios.TCOON)
    printer.progress(_progress(2))
    # THEN the progress of meanwhile is left out, and nothing else
    text = _shown(shown, "00:02")
    assert "a device is gone" in text
    assert "00:01" not in text


def test_what_waits_is_said_before_what_comes_later(terminal: tuple[int, TextIO]) -> None:
    shown, stream = terminal
    printer = ProgressPrinter(stream, quiet=False, verbose=0)
    printer.say_soon("first")
    printer.say("second")
    assert _shown(shown, "second").split() == ["first", "second"]


def test_a_full_pipe_stops_no_recording() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with closing(os.fdopen(reader, "rb")) as source, os.fdopen(writer, "w") as stream:
        printer = ProgressPrinter(stream, quiet=False, verbose=0)
        filled = 0
        while select.select([], [writer], [], 0)[1]:
            filled += os.write(writer, bytes(4096))
        printer.progress(_progress(10))
        assert len(source.read(filled)) == filled
        printer.progress(_progress(20))
        assert source.readline().startswith(b"00:20 ")


def _pipe() -> tuple[int, int]:
    return os.pipe()


def _sockets() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


@pytest.mark.parametrize("make", [_pipe, _sockets])
@pytest.mark.parametrize("is_told", [False, True])
def test_a_reader_that_goes_is_noticed(make: Callable[[], tuple[int, int]], is_told: bool) -> None:
    reader, writer = make()
    with os.fdopen(writer, "w") as stream:
        printer = ProgressPrinter(stream, quiet=False, verbose=0)
        printer.say("hello")
        assert not printer.is_hung_up
        assert os.read(reader, 100) == b"hello\n"
        # WHEN an ssh is cut off, before or after something is said
        os.close(reader)
        if is_told:
            printer.say("nobody hears this")
        assert printer.is_hung_up


@pytest.mark.parametrize("path", ["/dev/null", "/dev/full", None])
def test_what_has_no_reader_hangs_up_never(tmp_path: Path, path: str | None) -> None:
    with Path(path or tmp_path / "log").open("w") as stream:
        printer = ProgressPrinter(stream, quiet=False, verbose=0)
        printer.say("hello")
        assert not printer.is_hung_up
