# SPDX-License-Identifier: Apache-2.0
"""What becomes of the windows of `record`: segments as they come, and the capture.

Segments come first, and are all that a recording which is killed leaves. The capture is written
beside them, so that it is there when the recording ends; where that fails, and where only the
newest part is kept, it is written anew from segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from aiflame.agent.capture.workspace import Workspace
from aiflame.agent.capture.writer import CaptureWriter, DiskFull
from aiflame.agent.model.window import Window
from aiflame.agent.sinks.capture import CaptureSink
from aiflame.agent.sinks.segments import RecordedWindows, SegmentSink, newest

Facts = Mapping[str, str | int]


class RecordSinks:
    """The sinks of one recording, in a `with` block that closes their files.

    Args:
        workspace: Where they write.
        facts: Of the recording, as `meta` of the capture has them.
        keep_ns: How much of the newest becomes the capture, None for all.

    Attributes:
        failure: Why the capture could not be written as windows came, None if it could.
    """

    def __init__(self, workspace: Workspace, facts: Facts, keep_ns: int | None = None) -> None:
        self._workspace = workspace
        self._facts = dict(facts)
        self._keep_ns = keep_ns
        self._segments = SegmentSink(workspace.directory, facts, keep_ns)
        self._end_ns = 0
        self._is_live = keep_ns is None
        self.failure: Exception | None = None
        self._writer, self._capture = self._new_capture(0)

    def _new_capture(self, start_ns: int) -> tuple[CaptureWriter, CaptureSink]:
        writer = CaptureWriter(self._workspace.database)
        began_ns = int(self._facts["started_unix_ns"]) + start_ns
        writer.put_meta({**self._facts, "started_unix_ns": began_ns})
        writer.commit()
        return writer, CaptureSink(writer, start_ns)

    def give(self, window: Window) -> None:
        """Gives a window to each.

        Raises:
            DiskFull: It is lost; all before are there.
        """
        self._segments.put(window)
        # What is nowhere else is not thrown away.
        self._workspace.is_kept |= bool(len(window.samples))
        self._end_ns = window.end_ns
        if not self._is_live:
            return
        try:
            self._capture.put(window)
            self._writer.commit()
        except DiskFull:
            self._writer.rollback()
            raise
        except Exception as error:
            self.failure = error
            self._is_live = False

    @property
    def capture(self) -> CaptureSink:
        """The capture's; after `complete` it has all windows."""
        return self._capture

    @property
    def writer(self) -> CaptureWriter:
        """The open capture."""
        return self._writer

    def complete(self) -> None:
        """Writes the capture from segments where it was not written as windows came."""
        if self._is_live:
            return
        self._writer.close()
        self._workspace.database.unlink(missing_ok=True)
        windows = iter(RecordedWindows(self._workspace.directory))
        if self._keep_ns is not None:
            windows = newest(windows, self._keep_ns, self._end_ns)
        first = next(windows)
        self._writer, self._capture = self._new_capture(first.start_ns)
        for window in itertools.chain([first], windows):
            self._capture.put(window)
        self._writer.commit()
        self.failure, self._is_live = None, True

    def __enter__(self) -> RecordSinks:
        return self

    def __exit__(self, *_: object) -> None:
        self._segments.close()
        self._writer.close()
