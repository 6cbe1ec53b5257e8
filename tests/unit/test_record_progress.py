# SPDX-License-Identifier: Apache-2.0
"""What a recording says while it runs, and that it does not wait for whoever reads that."""

from __future__ import annotations

import os
import select
import termios
from collections.abc import Iterator
from contextlib import closing
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
