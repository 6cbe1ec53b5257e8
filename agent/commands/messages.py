# SPDX-License-Identifier: Apache-2.0
"""Standard output and standard error, which may be closed, full, or a terminal that is gone.

What a command does never depends on whether somebody reads what it says on standard error. What is
asked for on standard output is there as a whole, or the command says why not.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

from aiflame.agent.errors import AiflameError
from aiflame.agent.limits import DISK_FULL, room_hint
from aiflame.agent.outfile import WaitingFile


class _StandardOutput(WaitingFile):
    def write(self, data: Any, /) -> int:
        """Writes some of it; other errors than a closed pipe say which output has them."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            lead_nowhere(self.fileno())
            hint = room_hint() if error.errno in (*DISK_FULL, errno.EFBIG) else None
            reason = (error.strerror or str(error)).lower()
            raise AiflameError(f"cannot write standard output: {reason}", hint) from error


def open_standard_streams() -> None:
    """Opens /dev/null for each standard stream that is closed (`2>&-`), and buffers the output.

    Otherwise the next file that is opened, a capture for instance, is the standard error of
    everything that writes to descriptor 2. With PYTHONUNBUFFERED, Python drops what a file did not
    take at once.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # noqa: PERF203 - three of them
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as we run
    elif sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        before = sys.stdout
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_StandardOutput(before.fileno(), "wb", closefd=False)),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=before.line_buffering or before.write_through,
        )
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def tell(stream: TextIO, text: str) -> bool:
    """Writes text at once; returns whether that was possible.

    Where it is not, the stream leads to /dev/null from then on: Python would try again at its
    exit, fail, and turn the exit code into 120.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        lead_nowhere(stream.fileno())
        return False
    return True


def lead_nowhere(descriptor: int) -> None:
    """Has a descriptor lead to /dev/null: what is written to it is not wanted any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
