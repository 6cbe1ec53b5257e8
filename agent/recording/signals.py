# SPDX-License-Identifier: Apache-2.0
"""Signals to a recording: to end, the first in order, a second one at once; to write a copy."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

from aiflame.agent.errors import Aborted, EndedAtOnce

# What a user or a service manager sends, who may want it to end at once.
_ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
# The terminal is gone. It says nothing about the recording, and comes along with others: shells
# pass it on to their jobs, systemd sends it together with SIGTERM (SendSIGHUP=).
_HUNG_UP = signal.SIGHUP
# timeout(1) of coreutils sends its signal to the command and then to the group that this is in, as
# do others that end a group: that is one request, however busy the CPUs are.
_SAME_REQUEST_S = 0.5


class StopSignals:
    """While entered, catches what ends a recording; `fd` becomes readable when it arrives.

    SIGUSR1 asks for a copy of what there is, which is seen when the open window is closed. SIGHUP
    and SIGQUIT stay ignored where they are (nohup, jobs in the background of a script).

    Attributes:
        requested: Whether the recording is to end.
        requested_s: Since when, by `time.monotonic`; None where it is not.

    Raises:
        Aborted: From wherever the program is, at a second SIGINT that comes half a second and more
            after the first: a user does not want what was recorded.
        EndedAtOnce: So, at any other second one of SIGINT, SIGTERM and SIGQUIT: supervisors send
            another one where the first takes too long.
    """

    def __init__(self) -> None:
        self.requested = False
        self.requested_s: float | None = None
        self._is_copy_asked = False
        self._asked: tuple[int, float] | None = None  # by which signal, and when
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number != _HUNG_UP:
            now_s = time.monotonic()
            if self._asked is None:
                self._asked = number, now_s
            elif number != self._asked[0] or now_s >= self._asked[1] + _SAME_REQUEST_S:
                if number == self._asked[0] == signal.SIGINT:
                    raise Aborted("aborted")
                raise EndedAtOnce(f"ended at once by {signal.Signals(number).name}")
        self._request()

    def _request(self) -> None:
        if not self.requested:
            self.requested_s = time.monotonic()
            self.requested = True
            os.write(self._write_fd, b"!")

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        self._handle(number, frame)

    def hang_up(self) -> None:
        """Ends the recording as a terminal that goes does, unless that is ignored (nohup)."""
        if _HUNG_UP in self._previous:
            self._request()

    def _ask_copy(self, _number: int, _frame: FrameType | None) -> None:
        self._is_copy_asked = True

    def take_copy_request(self) -> bool:
        """Returns whether a copy was asked for since the last call."""
        asked, self._is_copy_asked = self._is_copy_asked, False
        return asked

    def __enter__(self) -> StopSignals:
        self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask_copy)
        for number in (*_ASKED, _HUNG_UP):
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            if not (is_ignored and number in (_HUNG_UP, signal.SIGQUIT)):
                handle = self._hang_up if number == _HUNG_UP else self._handle
                self._previous[number] = signal.signal(number, handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write_fd)
