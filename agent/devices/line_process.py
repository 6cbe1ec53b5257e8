# SPDX-License-Identifier: Apache-2.0
"""Processes of device families, which ask libraries and drivers that may never answer.

A vendor's library is in no process that holds the kernel half, and whoever waits for a device that
fell off its bus is not the recorder: it takes what there is, and never waits.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

from aiflame.agent.inspector.child import kill
from aiflame.agent.process_group import OWN_PROCESS_GROUP

# Of one line, and of what is read at once, as much as a pipe holds: a line tells of one device in
# one second, in 200 bytes. Whoever had to wait for room has more by then.
_MAX_LINE_BYTES, _READ_BYTES, _MOST_READS = 1 << 12, 1 << 16, 16


class LineProcess:
    """See `aiflame.gpu.base.Lines`.

    Args:
        module: Name of a module of ours, which is run.
        arguments: Of its command line.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._rest = b""
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # no memory, or too many processes
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",  # python -m would import from the working directory first
                bufsize=0,
                **OWN_PROCESS_GROUP,
            )
        if self._process is not None and self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)

    @property
    def pid(self) -> int | None:
        """Of the process, None where it is over."""
        return None if self._process is None else self._process.pid

    def take(self) -> list[bytes]:
        """Returns the lines since last; never waits."""
        if self._process is None or self._process.stdout is None:
            return []
        data = b""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_READS):
                read = os.read(self._process.stdout.fileno(), _READ_BYTES)
                data += read
                if not read:
                    self.close()
                    break
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) > _MAX_LINE_BYTES for line in (*lines, self._rest)):
            self.close()
            return []
        return lines

    def finish(self) -> None:
        """Ends its standard input."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def is_over(self) -> bool:
        """Whether it has ended, or said more than it may."""
        return self._process is None

    def close(self) -> None:
        """Ends it; where it waits for a device, no signal gets through, and it is left alone."""
        process, self._process = self._process, None
        if process is not None:
            kill(process)
