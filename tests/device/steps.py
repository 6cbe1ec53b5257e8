# SPDX-License-Identifier: Apache-2.0
"""Steps of a long run: each is a process that has a deadline, and is ended with all it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# For what was killed to be gone. What is in the kernel then (a driver that hangs) stays.
_ENDING_S = 5.0
_LOOK_S = 0.02


def adopt_orphans() -> None:
    """Makes this process the parent of all that its children leave, in other sessions, too."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_step(command: Sequence[str], limit_s: float) -> tuple[int | None, list[str]]:
    """Runs a step; nothing that it started is left, however it ended.

    Args:
        command: What runs. After `adopt_orphans`, in a process that has no other children.
        limit_s: For how long it may.

    Returns:
        Its exit status, None if it was ended; the names of processes that no signal ends.
    """
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        left = _end_all()
        if status is None and process.poll() is None:
            process.returncode = -signal.SIGKILL  # in the kernel: with it, __exit__ waits for none
    return status, left


def _end_all() -> list[str]:
    """Kills all below this process; returns the names of those that stay."""
    until_s = time.monotonic() + _ENDING_S
    while True:
        living = [pid for pid in _below(os.getpid()) if _state(pid) not in ("Z", "")]
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        if not living or time.monotonic() > until_s:
            return [_name(pid) for pid in living]
        time.sleep(_LOOK_S)


def _reap() -> None:
    """Takes what became of orphans; that of the step itself is told to who waits for it."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _below(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _below(int(child))


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
