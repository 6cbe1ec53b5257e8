# SPDX-License-Identifier: Apache-2.0
"""Messages on standard error, which may be closed, full, or a terminal that is gone.

What a command does never depends on whether somebody reads what it says.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO


def open_standard_streams() -> None:
    """Opens /dev/null for each standard stream that is closed (`2>&-`).

    Otherwise the next file that is opened, a capture for instance, is the standard error of
    everything that writes to descriptor 2.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # noqa: PERF203 - three of them
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as we run
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
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return False
    return True
