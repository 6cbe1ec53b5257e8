# SPDX-License-Identifier: Apache-2.0
"""Copies of a recording that goes on: what it has written by now, as a capture and a page.

A process of its own writes them (`record_copy_worker`), so that nothing is missed meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from aiflame.agent.process_group import OWN_PROCESS_GROUP


class Copies:
    """Starts copies of one recording, one after the other.

    Args:
        folder: Where its segments are.
        capture: What the recording is to become: copies go beside it, with the time in their names.
        keep_ns: How much of the newest is copied, None for all.
    """

    def __init__(self, folder: Path, capture: Path, keep_ns: int | None) -> None:
        self._folder = folder
        self._capture = capture
        self._keep_ns = keep_ns
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Starts one; returns what to say of it."""
        if self._child is not None and self._child.poll() is None:
            return "a copy is still being written"
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._capture.with_name(f"{self._capture.stem}-{now}{self._capture.suffix}")
        command = [sys.executable, "-m", "aiflame.agent.commands.record_copy_worker"]
        try:
            self._child = subprocess.Popen(  # noqa: S603 - a module of our own
                [*command, str(self._folder), str(path), str(self._keep_ns or 0)],
                stdin=subprocess.DEVNULL,
                cwd="/",  # python -m would import from the working directory first
                **OWN_PROCESS_GROUP,
            )
        except OSError as error:
            return f"no copy was written: {error.strerror}"
        return f"writing what there is to {path}"

    def wait(self) -> None:
        """Waits until the last one is written."""
        if self._child is not None:
            self._child.wait()
