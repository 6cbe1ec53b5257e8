# SPDX-License-Identifier: Apache-2.0
"""Has helpers forked from one interpreter, for all processes of a recording or an agent.

The interpreter (`forking`) is started when the first helper is asked for, and ends when there was
none for a while; or it is forked from a process that has most of its modules, and stays with that.
Requests wait in a socket whose both ends stay here, so that none gets lost between one interpreter
and the next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

from aiflame.agent import priority
from aiflame.agent.inspector import forking
from aiflame.agent.inspector.child import ends
from aiflame.agent.inspector.parser import BadMessage, Channel
from aiflame.agent.process_group import OWN_PROCESS_GROUP

# To import what parses files takes 0.25 s of CPU time. Who was needed again gets twice as long the
# next time: a host that shows something new all the time starts none all the time.
_IDLE_S, _LONGEST_IDLE_S = 20.0, 300.0
# It imports 0.25 s long.
_STARTING_S = 30.0
# The out-of-memory killer may come twice. One that dies again and again cannot start: what is
# installed is damaged, or being replaced.
_DEATHS_AT_ONCE = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 60.0
# From one look at whether there is an interpreter to the next.
_LOOK_S = 0.1
# One that was killed tells so within milliseconds.
_ENDING_S = 1.0

_STANDARD = 3  # descriptors: input, output, errors


class Program(NamedTuple):
    """What a helper runs.

    Attributes:
        name: How it is called in lists of processes, 15 characters.
        main: "module:function", which gets a list of texts.
        modules: What is imported before; its forks share it.
    """

    name: str
    main: str
    modules: tuple[str, ...]


class Ending(NamedTuple):
    """How a process ended: its exit status, negative for a signal's number; its CPU time."""

    code: int
    cpu_ns: int


class NotForked(OSError):
    """The fork server could not fork, or could not import what is to run."""


class Helper:
    """A helper, which is there, or will be soon. It ends when this is closed.

    Args:
        control: Tells of it.
        look: Called now and then while it is waited for.
    """

    def __init__(self, control: Channel, look: Callable[[], None]) -> None:
        self._control = control
        self._look = look
        self._process_fd = -1
        self._ending: Ending | None = None
        self.pid = 0

    def begins(self, timeout_s: float = _STARTING_S) -> bool:
        """Waits until it is there, and has a pid; returns False if it is not in time.

        Raises:
            NotForked: It cannot be had.
            ConnectionError: The fork server has ended.
            OSError: It cannot be started.
        """
        until_s = time.monotonic() + timeout_s
        while not self.pid:
            left_s = until_s - time.monotonic()
            self._look()
            if self._control.is_readable(max(min(left_s, _LOOK_S), 0)):
                self._take_pid()
            elif left_s <= 0:
                return False
        return True

    def _take_pid(self) -> None:
        message, fds = self._receive()
        if not fds:
            raise NotForked(errno.EAGAIN, str(message.get("error", "no process")))
        self._process_fd, self.pid = fds[0], int(message["pid"])

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        try:
            return self._control.receive()
        except (BadMessage, EOFError) as error:
            raise ConnectionResetError(errno.ECONNRESET, "the fork server has ended") from error

    def poll(self) -> Ending | None:
        """Returns how it ended by itself, None while it has not; waits for nothing.

        Raises:
            NotForked: It cannot be had.
            ConnectionError: The fork server has ended, and it has, too.
        """
        self._look()
        if not self.pid and self._control.is_readable(0):
            self._take_pid()
        if self.pid and self._ending is None and self._control.is_readable(0):
            message, _ = self._receive()
            self._ending = Ending(int(message["code"]), int(message["cpu_ns"]))
        return self._ending

    def wait(self, timeout_s: float) -> None:
        """Waits until there is something to `poll` for."""
        self._control.is_readable(timeout_s)

    def end(self) -> Ending | None:
        """Kills it, and waits; None where it is still there a second later, or was never."""
        ending = None
        with contextlib.suppress(OSError, EOFError, BadMessage, KeyError):
            if not self.pid and self._control.is_readable(0):
                self._take_pid()
            if self.pid:
                self._kill()
                if self._control.is_readable(_ENDING_S):
                    message, _ = self._control.receive()
                    ending = Ending(int(message["code"]), int(message["cpu_ns"]))
        self.close()
        return ending

    def kill(self) -> None:
        """Kills it, if it is there; waits for nothing, as `poll` tells of its end."""
        if self.pid and self._process_fd >= 0:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process_fd, signal.SIGKILL)

    def close(self) -> None:
        """Kills it, also where it is not there yet; waits for nothing."""
        if self._process_fd >= 0:
            self._kill()
            os.close(self._process_fd)
            self._process_fd = -1
        self._control.close()


class PipedHelper(Helper):
    """A helper with pipes.

    Attributes:
        stdin: What it reads.
        stdout: What it writes.
    """

    def __init__(
        self, control: Channel, look: Callable[[], None], stdin: IO[bytes], stdout: IO[bytes]
    ) -> None:
        super().__init__(control, look)
        self.stdin = stdin
        self.stdout = stdout

    def close(self) -> None:
        """As `Helper.close`; the pipes end as well."""
        super().close()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):  # what it did not read is flushed
                pipe.close()


class ForkRequests:
    """The way to a fork server, for a process that has not started it.

    Args:
        connection: Where requests go.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @property
    def _requests(self) -> socket.socket:
        """Where requests go."""
        return self._connection

    def look(self) -> None:
        """Does what is to be done now and then: nothing, for who has not started it."""

    def _start(self) -> None:
        """Has it there: nothing, either."""

    def hurry(self) -> None:
        """Makes it urgent, for a helper that is waited for: nobody is but who has started it."""

    def let_wait(self) -> None:
        """Makes it an ordinary process again."""

    def run(
        self,
        program: Program,
        arguments: Sequence[str],
        fds: Sequence[int],
        first_fd: int = _STANDARD,
    ) -> Helper:
        """Asks for a helper; waits for nothing.

        Args:
            program: What it runs.
            arguments: Of that.
            fds: What it gets as descriptors, one after the other; they stay the caller's.
            first_fd: The number of the first of these.

        Raises:
            OSError: Nobody can be asked.
        """
        return Helper(self._ask(program, arguments, fds, first_fd), self.look)

    def run_piped(
        self, program: Program, arguments: Sequence[str], errors: int = -1
    ) -> PipedHelper:
        """As `run`, with pipes for standard input and output.

        Args:
            program: What it runs.
            arguments: Of that.
            errors: A descriptor for standard errors; -1 for nowhere.

        Raises:
            OSError: Nobody can be asked.
        """
        with contextlib.ExitStack() as theirs:
            ends_of_pipes: list[IO[bytes]] = []
            try:
                their_input, ours = _pipe(theirs, "wb")
                ends_of_pipes.append(ours)
                their_output, ours = _pipe(theirs, "rb")
                ends_of_pipes.append(ours)
                fds = (their_input, their_output, *((errors,) if errors >= 0 else ()))
                control = self._ask(program, arguments, fds, 0)
            except OSError:
                for end in ends_of_pipes:
                    end.close()
                raise
        return PipedHelper(control, self.look, *ends_of_pipes)

    def close(self) -> None:
        """Asks no more; what there is stays."""
        self._connection.close()

    def _ask(
        self, program: Program, arguments: Sequence[str], fds: Sequence[int], first_fd: int
    ) -> Channel:
        self._start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = {
            **program._asdict(),
            "arguments": list(arguments),
            "first_fd": first_fd,
        }
        try:
            Channel(self._requests).send(message, (theirs.fileno(), *fds))
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return Channel(ours)


def _pipe(stack: contextlib.ExitStack, mode: str) -> tuple[int, IO[bytes]]:
    """Returns the other side's end of a pipe, which the stack closes, and ours."""
    source, sink = os.pipe()
    theirs, ours = (source, sink) if mode == "wb" else (sink, source)
    stack.callback(os.close, theirs)
    return theirs, os.fdopen(ours, mode)


class _Forked:
    """A fork of this process, with what is used of `subprocess.Popen`.

    Args:
        pid: Its pid.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Returns its exit status, negative for a signal's number; None while it has not ended."""
        return self._reaped(os.WNOHANG)

    def wait(self) -> int | None:
        """The same, once it has ended."""
        return self._reaped(0)

    def kill(self) -> None:
        """Kills it, if it is there."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reaped(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


class ForkServer(ForkRequests):
    """A fork server, and what keeps it there as long as somebody asks.

    Attributes:
        starts: How often it was started.
    """

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._process: subprocess.Popen[bytes] | _Forked | None = None
        self._idle_s = _IDLE_S
        self._deaths = 0
        self._started_s = self._not_before_s = 0.0
        self.starts = 0

    @property
    def _sockets(self) -> tuple[socket.socket, socket.socket]:
        """Where requests go, and where they come out, made when they are needed."""
        if self._pair is None:
            self._pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # Where nobody takes requests, whoever asks goes on without.
            self._pair[0].setblocking(False)
        return self._pair

    @property
    def _requests(self) -> socket.socket:
        return self._sockets[0]

    @property
    def request_fd(self) -> int:
        """What another process makes its `ForkRequests` of."""
        return self._requests.fileno()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process that forks, where there is one."""
        is_there = self._process is not None and self._process.poll() is None
        return (self._process.pid,) if self._process is not None and is_there else ()

    def begin_here(self, first: Callable[[], None]) -> None:
        """Forks it from this process, whose modules it shares then, and has it stay.

        This process is to have no other thread, nothing of a target, and no secret but what is in
        its environment: what is forked to read hostile files has all that was there. Where the
        server is killed, it is started anew as an interpreter of its own.

        Args:
            first: What the server does before all else.
        """
        _, theirs = self._sockets
        with contextlib.suppress(OSError):  # it is tried again once it is needed
            self._process = _Forked(forking.begin_here(theirs.fileno(), first))
            self._note_start()

    def expect(self, program: Program) -> None:
        """Has it there, with what helpers need that run a program; waits for nothing.

        It is urgent until then: it has to be there before what it is to read is gone.
        """
        with contextlib.suppress(OSError):  # then it is tried again once it is needed
            self._start()
            self.hurry()
            Channel(self._requests).send({"modules": program.modules})

    def look(self) -> None:
        """Starts it where somebody asks; anyone may, so this is called now and then.

        Raises:
            OSError: It cannot be started.
        """
        # It takes requests at once where it is there.
        if self._pair is not None and Channel(self._pair[1]).is_readable(0):
            self._start()

    def hurry(self) -> None:
        """Makes it urgent, for a helper that is waited for."""
        for pid in self.pids:
            priority.hurry_child(pid)

    def let_wait(self) -> None:
        """Makes it an ordinary process again."""
        for pid in self.pids:
            priority.let_wait(pid)

    def _start(self) -> None:
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            if time.monotonic() - self._started_s > _LONGEST_PAUSE_S:  # it could start
                self._deaths = 0
            if code == 0:  # it was idle
                self._idle_s = min(2 * self._idle_s, _LONGEST_IDLE_S)
                self._deaths = 0
            else:
                self._deaths += 1
                pause_s = min(_FIRST_PAUSE_S * 2**self._deaths, _LONGEST_PAUSE_S)
                self._not_before_s = time.monotonic() + pause_s
        if self._deaths > _DEATHS_AT_ONCE and time.monotonic() < self._not_before_s:
            raise NotForked(errno.EAGAIN, "the fork server dies again and again")
        _, theirs = self._sockets
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [
                *(sys.executable, "-m", "aiflame.agent.inspector.forking"),
                *(str(theirs.fileno()), str(self._idle_s)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd="/",  # `python -m` puts the working directory first on the module path
            # One thread, so that it may fork; numpy would start one per CPU.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            **OWN_PROCESS_GROUP,  # Ctrl-C is for the recorder
        )
        self._note_start()

    def _note_start(self) -> None:
        self._started_s = time.monotonic()
        self.starts += 1

    def end(self) -> None:
        """Ends the process, and all that it has forked; it is started again when it is needed."""
        if self._process is None:
            return
        self.hurry()  # to end takes a processor
        if not ends(self._process.pid):
            self._process.kill()
        if ends(self._process.pid):
            self._process.wait()
        self._process = None

    def close(self) -> None:
        """Ends it, and all that it has forked, whose CPU time is its own then."""
        if self._pair is None:
            return
        with contextlib.suppress(OSError):
            self._pair[0].shutdown(socket.SHUT_RDWR)
        self.end()
        for each in self._pair:
            each.close()
        self._pair = None
