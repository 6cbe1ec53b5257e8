# SPDX-License-Identifier: Apache-2.0
"""Writes a copy of a recording that goes on.

Started by `record_copy` as `python -m aiflame.agent.commands.record_copy_worker FOLDER CAPTURE
KEEP_NS`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from aiflame.agent.capture.reader import read_capture
from aiflame.agent.capture.schema import FACT_PREFIX
from aiflame.agent.capture.segment import BadSegment
from aiflame.agent.capture.workspace import temporary_captures
from aiflame.agent.capture.writer import CaptureWriter
from aiflame.agent.commands.messages import tell
from aiflame.agent.errors import AiflameError
from aiflame.agent.outfile import sudo_ids, write_output
from aiflame.agent.reports import FORMATS
from aiflame.agent.reports.merge import opening
from aiflame.agent.reports.words import showable
from aiflame.agent.sinks.rebuilt import capture_of_windows
from aiflame.agent.sinks.segments import RecordedWindows, newest

# The target comes first, and the recorder next.
_NICENESS = 10


def main(folder: Path, capture: Path, keep_ns: int) -> None:
    """Writes a capture, and a page beside it.

    Raises:
        AiflameError: It cannot be written.
    """
    os.nice(_NICENESS)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may write to the terminal all the same
    windows = RecordedWindows(folder)
    wanted = iter(windows)
    if keep_ns:
        # Ends of windows are looked at first: that is one pass through the newest segments.
        end_ns = max((window.end_ns for window in RecordedWindows(folder)), default=0)
        wanted = newest(wanted, keep_ns, end_ns)
    with tempfile.TemporaryDirectory(dir=temporary_captures()) as name:  # for this user only
        database = Path(name) / "capture.aiflame"
        capture_of_windows(database, wanted, windows.facts)
        writer = CaptureWriter(database, is_new=False)
        writer.put_meta({f"{FACT_PREFIX}copy": "of a recording that went on", "complete": 1})
        writer.commit()
        writer.close()
        with database.open("rb") as file:
            write_output(capture, file, force=False, is_private=True, owner=sudo_ids())
        profile = read_capture(database)
        page = FORMATS["html"].render(profile, opening(profile))
    path = capture.with_suffix(FORMATS["html"].extension)
    write_output(path, page, force=False, is_private=True, owner=sudo_ids())
    tell(sys.stderr, f"Wrote {showable(str(capture))}, {showable(path.name)}\n")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    except (AiflameError, BadSegment) as error:
        tell(sys.stderr, f"aiflame: no copy was written: {error}\n")
        sys.exit(1)
