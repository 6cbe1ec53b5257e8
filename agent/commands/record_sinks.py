# SPDX-License-Identifier: Apache-2.0
"""What becomes of the windows of `record`: segments as they come, and the capture.

Segments come first, and are all that a recording which is killed leaves. The capture is written of
them by a process of its own, so that it is there, with names, when the recording ends; where that
fails it is written once more, and then without names. Where only the newest part is kept, it is
written at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from aiflame.agent.capture.workspace import Workspace
from aiflame.agent.errors import AiflameError, DiskFull
from aiflame.agent.limits import room_hint
from aiflame.agent.model.window import Window
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.sinks.capture_process import CaptureFailed, CaptureProcess
from aiflame.agent.sinks.capture_report import Report
from aiflame.agent.sinks.segments import RecordedWindows, SegmentSink, newest

Facts = Mapping[str, str | int]


class NamesLost(AiflameError):
    """A capture is there, but without names. The message says why."""


class RecordSinks:
    """The sinks of one recording, in a `with` block that closes their files.

    Args:
        workspace: Where they write.
        facts: Of the recording, as `meta` of the capture has them.
        table: Knows the files that processes have mapped.
        say: Prints a line.
        keep_ns: How much of the newest becomes the capture, None for all.
    """

    def __init__(
        self,
        workspace: Workspace,
        facts: Facts,
        table: ProcessTable,
        say: Callable[[str], None],
        keep_ns: int | None = None,
    ) -> None:
        self._workspace = workspace
        self._table = table
        self._say = say
        self._keep_ns = keep_ns
        self._segments = SegmentSink(workspace.directory, facts, keep_ns)
        self._capture: CaptureProcess | None = None
        if keep_ns is None:
            with contextlib.suppress(CaptureFailed):  # it is tried again at the end
                self._capture = self._start()
        self._count = 0
        self._end_ns = 0
        self._report: Report | None = None

    def _start(self) -> CaptureProcess:
        return CaptureProcess(self._workspace.directory, self._workspace.database, self._table)

    def give(self, window: Window) -> None:
        """Gives a window to each.

        Raises:
            DiskFull: It is lost; all before are there.
        """
        self._segments.put(window)
        # What is nowhere else is not thrown away.
        self._workspace.is_kept |= bool(len(window.samples))
        self._count += 1
        self._end_ns = window.end_ns
        if self._capture is not None:
            self._capture.give(1)

    def complete(self) -> Report:
        """Waits until the capture has all windows that were given; once it has, it stays so.

        Raises:
            DiskFull: It has not; what it has is whole.
            NamesLost: It has, but without names.
        """
        if self._report is None:
            self._report = self._complete()
        if self._report.disk_full:
            raise DiskFull(self._report.disk_full, room_hint())
        return self._report

    def _complete(self) -> Report:
        if not self._count:
            return Report()
        for is_last in (False, True):
            try:
                return self._finish()
            except CaptureFailed as error:  # noqa: PERF203 - twice
                failure = error
                if not is_last:
                    self._say(f"warning: {error}: the capture is written once more")
        self._write_without_names()
        raise NamesLost(f"no symbol was resolved: {failure}")

    def _finish(self) -> Report:
        capture, self._capture = self._capture, None
        if capture is None:
            self._workspace.database.unlink(missing_ok=True)
            capture = self._start()
            if self._keep_ns is None:
                capture.give(self._count)
        try:
            return capture.finish(None if self._keep_ns is None else (self._keep_ns, self._end_ns))
        finally:
            capture.close()

    def _write_without_names(self) -> None:
        from aiflame.agent.sinks.rebuilt import capture_of_windows  # mostly there is no need

        self._workspace.database.unlink(missing_ok=True)
        recorded = RecordedWindows(self._workspace.directory)
        windows = iter(recorded)
        if self._keep_ns is not None:
            windows = newest(windows, self._keep_ns, self._end_ns)
        capture_of_windows(self._workspace.database, windows, recorded.facts, with_names=False)
        self._report = Report()

    def __enter__(self) -> RecordSinks:
        return self

    def __exit__(self, *_: object) -> None:
        self._segments.close()
        if self._capture is not None:
            self._capture.close()
