# SPDX-License-Identifier: Apache-2.0
"""Processes that run the symbol worker: a new interpreter, or a helper of the fork server.

A new interpreter takes 0.15 s of CPU time and 24 MB of its own until all modules are there.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Protocol

from aiflame.agent.inspector.child import ends
from aiflame.agent.inspector.fork_server import Ending
from aiflame.agent.process_group import OWN_PROCESS_GROUP


class WorkerProcess(Protocol):
    """A process that was started.

    Attributes:
        pid: Its pid.
        stdin: What it reads.
        stdout: What it writes.
    """

    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]

    def end(self) -> Ending | None:
        """Kills it and waits; None where it is still there a second later."""
        ...


class Executed:
    """A new interpreter, or whatever a command is: a `WorkerProcess`.

    Args:
        command: With its arguments.
        errors: Takes what it says of them.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, command: Sequence[str], errors: IO[bytes]) -> None:
        # From "/", as `python -m` puts the working directory first on the module path: a root
        # shell in someone else's directory must not import that directory's modules.
        self._process = process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd="/",
            # One thread, so that the worker may fork; numpy would start one per CPU.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            **OWN_PROCESS_GROUP,
        )
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        self.pid, self.stdin, self.stdout = process.pid, process.stdin, process.stdout

    def end(self) -> Ending | None:
        """As `WorkerProcess.end`."""
        ending = _ending(self.pid)
        self._process.returncode = None if ending is None else ending.code
        return ending


def _ending(pid: int) -> Ending | None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if not ends(pid):
        return None
    _, status, usage = os.wait4(pid, 0)
    cpu_ns = round((usage.ru_utime + usage.ru_stime) * 1e9)
    return Ending(os.waitstatus_to_exitcode(status), cpu_ns)
