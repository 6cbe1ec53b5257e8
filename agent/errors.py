# SPDX-License-Identifier: Apache-2.0
"""The errors a user sees: what failed, why, and the one line that fixes it.

Raise them near the cause; `cli.main` prints them once and turns them into an exit code. The
codes let a script tell "wrong host" (3) from "idle target" (4) and from "wrong flags" (2).
"""

from __future__ import annotations

# `record` and those like it: all went well, and no process ran.
NO_SAMPLES_EXIT = 4


class AiflameError(Exception):
    """Something failed while running.

    Args:
        message: "what failed: cause", lower case, one line.
        hint: One command or sentence that fixes it, or None where nothing can.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(AiflameError):
    """The command line asks for something impossible, or for a file that may not be written."""

    exit_code = 2


class EnvironmentUnfit(AiflameError):
    """This machine, kernel or permission does not allow it."""

    exit_code = 3


class CaptureError(AiflameError):
    """A capture is cut, foreign, or of a schema that this version does not read."""


class DiskFull(AiflameError):
    """A disk is full; what was written before is kept."""


class Aborted(AiflameError):
    """A second Ctrl-C: stop at once, leave no file."""

    exit_code = 130


class EndedAtOnce(AiflameError):
    """A second signal that is no second Ctrl-C: stop at once, keep what was recorded."""
