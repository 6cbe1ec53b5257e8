# SPDX-License-Identifier: Apache-2.0
"""Copies of a recording that goes on: what it has written by now, as a capture and a page.

A process of its own, so that nothing is missed meanwhile
(`python -m aiflame.agent.commands.record_copy FOLDER CAPTURE KEEP_NS`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.segment import BadSegment
from aiflame.agent.commands.messages import tell
from aiflame.agent.errors import AiflameError
from aiflame.agent.outfile import sudo_ids, write_output
from aiflame.agent.reports import FORMATS, ReportOptions
from aiflame.agent.reports.rows import showable
from aiflame.agent.sinks.rebuilt import capture_of_windows
from aiflame.agent.sinks.segments import RecordedWindows, newest

# The target comes first, and the recorder next.
_NICENESS = 10


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
        command = [sys.executable, "-m", "aiflame.agent.commands.record_copy"]
        try:
            self._child = subprocess.Popen(  # noqa: S603 - a module of our own
                [*command, str(self._folder), str(path), str(self._keep_ns or 0)],
                stdin=subprocess.DEVNULL,
                cwd="/",  # python -m would import from the working directory first
                start_new_session=True,  # Ctrl-C ends the recording, not a copy of it
            )
        except OSError as error:
            return f"no copy was written: {error.strerror}"
        return f"writing what there is to {path}"

    def wait(self) -> None:
        """Waits until the last one is written."""
        if self._child is not None:
            self._child.wait()


def main(folder: Path, capture: Path, keep_ns: int) -> None:
    """Writes a capture, and a page beside it.

    Raises:
        AiflameError: It cannot be written.
    """
    os.nice(_NICENESS)
    windows = RecordedWindows(folder)
    wanted = iter(windows)
    if keep_ns:
        # Ends of windows are looked at first: that is one pass through the newest segments.
        end_ns = max((window.end_ns for window in RecordedWindows(folder)), default=0)
        wanted = newest(wanted, keep_ns, end_ns)
    with tempfile.TemporaryDirectory() as name:  # for this user only
        database = Path(name) / "capture.aiflame"
        capture_of_windows(database, wanted, windows.facts)
        with database.open("rb") as file:
            write_output(capture, file, force=False, is_private=True, owner=sudo_ids())
        page = FORMATS["html"].render(read_capture(database), ReportOptions())
    path = capture.with_suffix(FORMATS["html"].extension)
    write_output(path, page, force=False, is_private=True, owner=sudo_ids())
    tell(sys.stderr, f"Wrote {showable(str(capture))}, {showable(path.name)}\n")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    except (AiflameError, BadSegment) as error:
        tell(sys.stderr, f"aiflame: no copy was written: {error}\n")
        sys.exit(1)
