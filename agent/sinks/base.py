# SPDX-License-Identifier: Apache-2.0
"""What a sink is to the recorder, which knows sinks through this alone."""

from __future__ import annotations

from typing import Protocol

from aiflame.agent.model.window import Window


class Sink(Protocol):
    """Takes windows, each once and in their order."""

    def put(self, window: Window) -> None:
        """Takes a window.

        Raises:
            Exception: Whatever went wrong; the window is not taken, and none is given any more.
        """

    def close(self) -> None:
        """Lets go of everything. Never raises."""
