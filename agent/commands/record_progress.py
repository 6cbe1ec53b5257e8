# SPDX-License-Identifier: Apache-2.0
"""What a recording says while it runs: on standard error, so that standard output stays free.

It does not wait for whoever reads that, and knows when nobody can any more.
"""

from __future__ import annotations

import io
import os
import select
import stat
from typing import TYPE_CHECKING, TextIO

from aiflame.agent.commands.messages import tell
from aiflame.agent.reports.words import duration, showable

if TYPE_CHECKING:  # this is needed before the recorder is
    from aiflame.agent.recording.recorder import Progress

# Where there is no terminal, a line for each of these keeps a log readable.
_PLAIN_LINE_EVERY_S = 10


class ProgressPrinter:
    """Prints the attached line, the live line, and messages; whether anybody reads them or not.

    Args:
        stream: Standard error.
        quiet: Print nothing.
        verbose: Print what is only of interest when something is odd.
    """

    def __init__(self, stream: TextIO, quiet: bool, verbose: int) -> None:
        self._stream = stream
        self._quiet = quiet
        self._verbose = verbose > 0
        self._is_terminal = stream.isatty()
        self._live = False
        self._waiting: list[str] = []
        # Of its own: once a message was not taken, the stream leads to /dev/null.
        self._reader_fd = _reader_of(stream)

    @property
    def is_hung_up(self) -> bool:
        """Whether nobody can read any more what standard error was when this was made.

        Of pipes and sockets only: a terminal that goes sends SIGHUP.
        """
        if self._reader_fd is None:
            return False
        poll = select.poll()
        poll.register(self._reader_fd, 0)  # POLLERR and POLLHUP are always told
        return bool(poll.poll(0))

    def say(self, text: str) -> None:
        """Prints one line, after those that wait."""
        waiting, self._waiting = self._waiting, []
        for line in (*waiting, text):
            self._print(line)

    def say_soon(self, text: str) -> None:
        """Prints one line with the progress, or later: once nobody has to wait for it."""
        self._waiting.append(text)

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        clear = "\r\033[K" if self._live else ""
        self._live = False
        tell(self._stream, f"{clear}{showable(text)}\n")

    def detail(self, text: str) -> None:
        """Prints one line if -v was given."""
        if self._verbose:
            self.say(text)

    def progress(self, now: Progress) -> None:
        """Shows how far the recording is; called once a second.

        A recording does not wait for a terminal that Ctrl-S has stopped, or for a full pipe: this
        line is left out then.
        """
        while self._waiting and self._has_room():
            self._print(self._waiting.pop(0))
        seconds = round(now.elapsed_ns / 1e9)
        line = (
            f"{seconds // 60:02d}:{seconds % 60:02d}  cpu {now.samples:,} samples"
            f"  off-cpu {duration(now.off_cpu_ns)}  lost {now.lost:,}"
        )
        if self._quiet or not self._has_room():
            return
        if self._is_terminal:
            tell(self._stream, f"\r\033[K{line}")
            self._live = True
        elif seconds % _PLAIN_LINE_EVERY_S == 0:
            self.say(line)

    def _has_room(self) -> bool:
        descriptor = _descriptor_of(self._stream)
        if descriptor is None:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return any(events & select.POLLOUT for _, events in poll.poll(0))


def _descriptor_of(stream: TextIO) -> int | None:
    """Returns a stream's descriptor, None where it is in memory."""
    try:
        return stream.fileno()
    except io.UnsupportedOperation:
        return None


def _reader_of(stream: TextIO) -> int | None:
    """Returns a descriptor of the pipe or socket that a stream is, None where it is none."""
    descriptor = _descriptor_of(stream)
    if descriptor is None:
        return None
    mode = os.fstat(descriptor).st_mode
    return os.dup(descriptor) if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None
