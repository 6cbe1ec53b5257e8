# SPDX-License-Identifier: Apache-2.0
"""Processes that run the symbol worker: a new interpreter, or a copy of this one.

A new interpreter takes 0.15 s of CPU time and 24 MB of its own until all modules are there. A copy
of a process that has them takes neither, but it has to be made before that process has threads.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, NamedTuple, NoReturn, Protocol

from aiflame.agent.inspector.child import ends
from aiflame.agent.process_group import OWN_PROCESS_GROUP

_STANDARD = 3  # descriptors: input, output, errors


class Ending(NamedTuple):
    """How a process ended: its exit status, negative for a signal's number; its CPU time."""

    code: int
    cpu_ns: int


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


class Forked:
    """A copy of this process, which has no threads yet: a `WorkerProcess`.

    What this one has opened is closed in it, and it heeds no signal that ends an agent: it ends
    when its input does.

    Args:
        main: What it runs. Standard input, output and errors are its own.
        arguments: Of that.
        errors: Takes what it says of them.

    Raises:
        OSError: There is no memory, or there are too many processes.
    """

    def __init__(
        self, main: Callable[[list[str]], None], arguments: Sequence[str], errors: IO[bytes]
    ) -> None:
        gc.collect()
        gc.freeze()  # what is there is shared, as long as it is not written to
        their_input, our_output = os.pipe()
        our_input, their_output = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(our_output, "wb")
        self.stdout: IO[bytes] = os.fdopen(our_input, "rb")
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _run(main, list(arguments), (their_input, their_output, errors.fileno()))
        except OSError:
            self.stdin.close()
            self.stdout.close()
            raise
        finally:
            os.close(their_input)
            os.close(their_output)

    def end(self) -> Ending | None:
        """As `WorkerProcess.end`."""
        return _ending(self.pid)


def _ending(pid: int) -> Ending | None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if not ends(pid):
        return None
    _, status, usage = os.wait4(pid, 0)
    cpu_ns = round((usage.ru_utime + usage.ru_stime) * 1e9)
    return Ending(os.waitstatus_to_exitcode(status), cpu_ns)


def _run(main: Callable[[list[str]], None], arguments: list[str], fds: Sequence[int]) -> NoReturn:
    """What the copy does."""
    code = 1
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for standard, given in enumerate(fds):
            os.dup2(given, standard)
        os.closerange(_STANDARD, os.sysconf("SC_OPEN_MAX"))
        main(arguments)
        code = 0
    except SystemExit as end:  # as the interpreter does: of a number, or of words
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            _say(end.code)
    except BaseException:  # whatever it is, this process ends
        _say(traceback.format_exc())
    finally:
        os._exit(code)


def _say(words: str) -> None:
    with suppress(OSError):
        os.write(2, f"{words}\n".encode(errors="replace"))
