# SPDX-License-Identifier: Apache-2.0
"""SIGHUP to an agent: its configuration is to be read again."""

from __future__ import annotations

import signal
from types import FrameType


class ReloadRequests:
    """Takes note of SIGHUP, from when it is made: an agent that starts is not ended by one.

    systemd would not start it again: to it, an end by SIGHUP is one that was asked for.
    """

    def __init__(self) -> None:
        self._is_asked = False
        signal.signal(signal.SIGHUP, self.ask)

    def ask(self, _number: int, _frame: FrameType | None) -> None:
        """Takes note of one; for signal.signal()."""
        self._is_asked = True

    def take(self) -> bool:
        """Returns whether there was one since the last call."""
        asked, self._is_asked = self._is_asked, False
        return asked
