# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: the first ends a recording in order, the second aborts it."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from aiflame.agent.errors import Aborted


class StopSignals:
    """While entered, catches SIGINT and SIGTERM; `fd` becomes readable when one arrives.

    Raises:
        Aborted: From wherever the program is, at the second signal.
    """

    def __init__(self) -> None:
        self.requested = False
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous: dict[signal.Signals, Any] = {}

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise Aborted("aborted: nothing was written")
        self.requested = True
        os.write(self._write_fd, b"!")

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write_fd)
