# SPDX-License-Identifier: Apache-2.0
"""The capture of a recording that goes on: a process of its own writes it from segments.

So naming takes neither the recorder's time nor its memory, and what goes wrong there ends no
recording: the segments are there, and the capture is written once more.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from aiflame.agent.errors import AiflameError
from aiflame.agent.inspector.child import ends
from aiflame.agent.memory_file import memory_file
from aiflame.agent.process_group import OWN_PROCESS_GROUP
from aiflame.agent.processes import procfs
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.sinks.capture_report import MAX_REPORT_BYTES, Report
from aiflame.agent.sinks.naming_channel import NamingChannel
from aiflame.agent.sinks.naming_messages import End, FilesMissing, NewestWindows, Windows
from aiflame.agent.symbols.frames import clean_name
from aiflame.agent.typed_messages import BadMessage, Messages

# What is run; tests run something that fails.
COMMAND: tuple[str, ...] = (sys.executable, "-m", "aiflame.agent.sinks.capture_worker")

_LAST_BYTES = 4096
# How often it is looked whether it gets on, and how long it may not: its symbol reader may take
# 65 s for one file.
_LOOK_S, _PATIENCE_S = 1.0, 100.0
# Before what found no room is sent again: where it is the kernel that has none, poll(2) does not
# wait for it. The process has some hundred messages to read meanwhile.
_NO_ROOM_S = 0.005

_MESSAGES: Messages[FilesMissing | Report] = Messages(FilesMissing, Report)


class CaptureFailed(AiflameError):
    """The process that writes a capture has ended early. The message says why."""


class CaptureProcess(NamingChannel):
    """Writes a capture as windows come. `finish` waits until it is written.

    Args:
        folder: Of the segments; of the recorder alone.
        database: Where the capture goes.
        table: Knows the files that processes have mapped.

    Raises:
        CaptureFailed: It cannot be started.
    """

    def __init__(self, folder: Path, database: Path, table: ProcessTable) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(table, ours)
        self._windows = 0  # of which it has not been told
        try:
            self._errors = memory_file("errors")  # closed by `close`
            self._process = subprocess.Popen(  # noqa: S603 - a module of our own
                [*COMMAND, str(folder), str(database)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                cwd="/",  # python -m would import from the working directory first
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                **OWN_PROCESS_GROUP,
            )
        except OSError as error:
            ours.close()
            raise CaptureFailed(f"no process can be started: {error.strerror}") from error
        finally:
            theirs.close()

    def give(self, windows: int) -> None:
        """Tells that there are more windows in the segments; never waits."""
        self._windows += windows
        self._tell()

    def _tell(self) -> bool:
        """Tells of files and processes that are new, and then of windows.

        Returns:
            Whether there was room for all; what is left is told the next time.
        """
        self._hear()
        if not self._tell_files():
            return False
        if self._windows and not self._send(Windows(self._windows)):
            return False
        self._windows = 0
        return True

    def _hear(self) -> None:
        """Takes note of files that it has not got: before the end it says nothing else."""
        # That was all; or it says what is no message, and was killed: `finish` tells of it.
        with contextlib.suppress(OSError, CaptureFailed):
            while data := self._channel.recv(MAX_REPORT_BYTES, socket.MSG_DONTWAIT):
                self._take(data)

    def finish(self, keep: tuple[int, int] | None = None) -> Report:
        """Waits until the capture is written.

        Args:
            keep: Only windows that end within so many ns before a time are in it; where it is None,
                all that were given.

        Raises:
            CaptureFailed: It is not written, or not to its end.
        """
        while not self._tell():
            self._wait_for_room()
        newest = () if keep is None else (NewestWindows(*keep),)
        for message in (*newest, End()):
            while not self._send(message):
                self._wait_for_room()
        report = self._report()
        code = self._process.wait()
        if report is None or code:
            raise CaptureFailed(_last_words(self._errors) or f"exit status {code}")
        return report

    def _report(self) -> Report | None:
        """Returns what it says in the end, None where it has ended without."""
        with contextlib.suppress(OSError):
            while True:
                self._wait_for(select.POLLIN)
                data = self._channel.recv(MAX_REPORT_BYTES)
                report = self._take(data) if data else None
                if report is not None or not data:
                    return report
        return None

    def _take(self, data: bytes) -> Report | None:
        """Takes a message; returns it where it is the report.

        Raises:
            CaptureFailed: It is none: the capture is not to be believed either.
        """
        try:
            message = _MESSAGES.decode(data)
        except BadMessage as error:
            self._process.kill()
            raise CaptureFailed(f"its report cannot be read: {error}") from error
        if isinstance(message, Report):
            return message
        self._tell_again(message)
        return None

    def _wait_for_room(self) -> None:
        self._wait_for(select.POLLOUT)
        time.sleep(_NO_ROOM_S)

    def _wait_for(self, events: int) -> None:
        """Waits until it takes a message, or says something, as long as it gets on.

        Args:
            events: Of poll(2).

        Raises:
            CaptureFailed: It waits for something that does not come, a file on a dead server.
        """
        used_s, since_s = -1.0, time.monotonic()
        poll = select.poll()
        poll.register(self._channel, events)
        while not poll.poll(1000 * _LOOK_S):
            now_s = procfs.cpu_s(self._process.pid)
            if now_s != used_s:
                used_s, since_s = now_s, time.monotonic()
            elif time.monotonic() - since_s > _PATIENCE_S:
                self._process.kill()
                raise CaptureFailed("it waits for a file that cannot be read")

    def close(self) -> None:
        """Ends it, whether it is finished or not."""
        self._channel.close()
        if self._process.poll() is None:
            self._process.kill()
            if ends(self._process.pid):
                self._process.wait()
        self._errors.close()


def _last_words(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(size - _LAST_BYTES, 0))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return clean_name(lines[-1]) if lines else ""
