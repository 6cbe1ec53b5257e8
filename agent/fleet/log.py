# SPDX-License-Identifier: Apache-2.0
"""The agent's log: a line for each event on standard error, and no floods."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from aiflame.agent.errors import AiflameError

# What is said again and again is said so often.
_REPEAT_S = 300.0
# Events that are told apart: those that came last, as some have names of processes.
_MOST_EVENTS = 1_024
# Of a line; names of targets are among them.
_MAX_CHARACTERS = 1_000


class Log:
    """Writes lines, from any thread.

    Args:
        descriptor: Where to. What cannot be written is left out: nobody reads it.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = sys.stderr.fileno() if descriptor is None else descriptor
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, int]] = {}

    def say(self, text: str) -> None:
        """Writes a line."""
        shown = "".join(c if c.isprintable() else "\ufffd" for c in text[:_MAX_CHARACTERS])
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        # One write: lines of this host's agents and threads stay whole.
        data = f"{stamp} aiflame agent: {shown}\n".encode(errors="replace")
        with suppress(OSError):
            os.write(self._descriptor, data)

    def say_seldom(self, event: str, text: str) -> None:
        """Writes a line, or counts it where one of the same event was written a moment ago.

        Args:
            event: What is counted together.
            text: The line.
        """
        now_s = time.monotonic()
        with self._lock:
            said_s, more = self._said.get(event, (-_REPEAT_S, 0))
            if now_s - said_s < _REPEAT_S:
                self._said[event] = (said_s, more + 1)
                return
            self._said.pop(event, None)  # what came last is at the end
            self._said[event] = (now_s, 0)
            if len(self._said) > _MOST_EVENTS:
                del self._said[next(iter(self._said))]
        self.say(f"{text} (and {more:,} more like it before)" if more else text)


def words_of(error: Exception) -> str:
    """Returns what is said of an error; of one that nobody has foreseen, also where it was."""
    if isinstance(error, (AiflameError, OSError)):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)[-1:]
    at = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in where)
    return f"{type(error).__name__}: {error}{at}"
