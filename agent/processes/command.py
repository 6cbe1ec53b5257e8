# SPDX-License-Identifier: Apache-2.0
"""Starts the command of `record -- CMD`, held back until the probes are live."""

from __future__ import annotations

import os
import pwd
import select
import shutil
import signal
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiflame.agent import priority
from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.outfile import sudo_ids

# What a shell returns for a command that it cannot execute (POSIX 2.8.2).
_CANNOT_EXECUTE = 126
# What a shell adds to the number of the signal that ended a command (bash(1), EXIT STATUS).
_SIGNALLED = 128

_ANY_EXECUTES = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH

_GO = b"!"

# A command begins with their defaults: Python ignores SIGPIPE and SIGXFSZ, and `record` SIGUSR1.
_DEFAULT = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1)

# For a command that is asked to end; one that takes longer goes on by itself.
_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class SudoUser:
    """Who typed sudo: files and commands belong to that user."""

    uid: int
    gid: int
    name: str
    home: str


def sudo_user() -> SudoUser | None:
    """Returns the user who calls sudo, None when there is none."""
    ids = sudo_ids()
    if ids is None or ids[0] == 0:
        return None
    try:
        entry = pwd.getpwuid(ids[0])
    except KeyError:
        return SudoUser(*ids, os.environ.get("SUDO_USER", str(ids[0])), "/")
    return SudoUser(*ids, entry.pw_name, entry.pw_dir)


class HeldCommand:
    """A child process that waits before its exec.

    Args:
        command: Program and arguments; the program is looked for in PATH.

    Raises:
        UsageError: There is no such program.
    """

    def __init__(self, command: list[str]) -> None:
        if shutil.which(command[0]) is None and not _is_hidden(command[0]):
            raise UsageError(
                f"cannot run {command[0]}: no such program", "name one in PATH, or give its path"
            )
        self.words = tuple(command)
        self._gate_fd = self._failure_fd = -1
        gate_read, self._gate_fd = os.pipe2(os.O_CLOEXEC)
        self._failure_fd, failure_write = os.pipe2(os.O_CLOEXEC)
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._gate_fd)
            _become(command, gate_read, failure_write)
        os.close(gate_read)
        os.close(failure_write)

    def release(self, variables: Mapping[str, str] | None = None) -> None:
        """Lets the command run.

        Args:
            variables: Of its environment, besides the caller's, which come first.

        Raises:
            AiflameError: The exec failed, or something has ended it while it was held.
        """
        pairs = (f"{name}={value}".encode() for name, value in (variables or {}).items())
        try:
            os.write(self._gate_fd, b"\0".join([_GO, *pairs]))
        except BrokenPipeError:
            self.end()
            raise AiflameError(f"the command never began: {self.end_words()}") from None
        os.close(self._gate_fd)
        self._gate_fd = -1
        # The other end closes at exec; before that it carries the reason why there was none.
        reason = os.read(self._failure_fd, 4096).decode(errors="replace")
        os.close(self._failure_fd)
        self._failure_fd = -1
        if reason:
            self.end()
            raise AiflameError(f"cannot run the command: {reason}")

    def exit_code(self) -> int | None:
        """Returns what a shell would tell of how the command ended, None while it runs."""
        status = self._returncode()
        return status if status is None or status >= 0 else _SIGNALLED - status

    def end_words(self) -> str:
        """Says how the command ended; "" while it runs, and if all went well."""
        name, status = Path(self.words[0]).name, self._returncode()
        if not status:
            return ""
        if status > 0:
            return f"{name} ended with exit code {status}"
        names = {number.value: f" ({number.name})" for number in signal.Signals}
        words = f"signal {-status}{names.get(-status, '')}"
        return f"{name} was killed by {words}: exit code {self.exit_code()}"

    def _returncode(self) -> int | None:
        """Returns its exit code, or the negative number of the signal that killed it."""
        if self._status is None:
            # It is left for `end`, so that nothing else gets its process id meanwhile.
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            is_exit = found.si_code == os.CLD_EXITED
            return found.si_status if is_exit else -found.si_status
        return os.waitstatus_to_exitcode(self._status)

    def end(self) -> None:
        """Collects the command if it has ended; otherwise asks it to end, and waits a moment."""
        for fd in (self._gate_fd, self._failure_fd):
            if fd >= 0:
                os.close(fd)
        self._gate_fd = self._failure_fd = -1
        if self._status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if not done:
                os.kill(self.pid, signal.SIGTERM)
                process_fd = os.pidfd_open(self.pid)
                poll = select.poll()
                poll.register(process_fd, select.POLLIN)
                poll.poll(1000 * _PATIENCE_S)
                os.close(process_fd)
                _, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status


def _is_hidden(program: str) -> bool:
    """Whether a program that root cannot run may be one for the user who calls sudo.

    On network mounts root often is nobody. That user's exec tells.
    """
    if sudo_user() is None:
        return False
    for folder in [""] if os.sep in program else os.get_exec_path():
        try:
            mode = Path(folder, program).stat().st_mode
        except PermissionError:
            return True
        except OSError:
            continue
        if stat.S_ISREG(mode) and mode & _ANY_EXECUTES:
            return True
    return False


def _read_all(fd: int) -> bytes:
    """Returns what comes through a pipe until its other end is closed."""
    found = b""
    while data := os.read(fd, select.PIPE_BUF):
        found += data
    return found


def _become(command: list[str], gate_fd: int, failure_fd: int) -> None:
    try:
        priority.as_started()
        for number in _DEFAULT:
            signal.signal(number, signal.SIG_DFL)
        go, *pairs = _read_all(gate_fd).split(b"\0")
        if go != _GO:
            os._exit(_CANNOT_EXECUTE)  # the recorder gave up
        variables = (pair.decode().partition("=") for pair in pairs)
        environment = {**{name: value for name, _, value in variables}, **os.environ}
        user = sudo_user()
        if user is not None:
            os.initgroups(user.name, user.gid)
            os.setgid(user.gid)
            os.setuid(user.uid)
            environment.update(HOME=user.home, USER=user.name, LOGNAME=user.name)
        os.execvpe(command[0], command, environment)  # noqa: S606 - what the user asked for
    except OSError as error:
        os.write(failure_fd, f"{command[0]}: {error.strerror}".encode())
    finally:
        os._exit(_CANNOT_EXECUTE)
