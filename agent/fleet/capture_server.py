# SPDX-License-Identifier: Apache-2.0
"""Takes requests for captures, one at a time, beside an agent that records.

Whoever asks is looked at before anything that he sends: root, or the agent's own user. What a
capture takes is done by a process of its own (`capture_job`), which has the connection then:
neither a client nor a capture can keep the recording from anything.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from aiflame.agent.errors import AiflameError, UsageError
from aiflame.agent.fleet.capture_left import discard_left
from aiflame.agent.fleet.capture_processes import CaptureProcesses
from aiflame.agent.fleet.capture_request import (
    MAX_REQUEST_BYTES,
    CaptureRequest,
    InDirectory,
    refusal,
)
from aiflame.agent.fleet.config import AgentConfig
from aiflame.agent.fleet.log import Log
from aiflame.agent.process_group import OWN_PROCESS_GROUP

COMMAND: tuple[str, ...] = (sys.executable, "-m", "aiflame.agent.fleet.capture_job")

# A client that has connected has its request ready, and takes a refusal at once.
_REQUEST_S = 2.0
# How soon the end of a capture is noticed, and that of the agent.
_LOOK_S = 0.5
# What a capture may take past the time that it is of: ten minutes of a host of 64 CPUs are named in
# one. One that takes longer waits for a file that nobody reads for it.
_GRACE_S = 600.0
# From SIGTERM to SIGKILL, of the 10 s that an agent has to end.
_ENDING_S = 1.0
_GROUP_LOOK_S = 0.02
# struct ucred, unix(7): pid, uid, gid.
_UCRED = struct.Struct("iII")


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    words: str
    begun_s: float
    until_s: float


class CaptureServer:
    """Answers at the socket of an agent's directory, which only this process may use.

    Args:
        config: Of the agent.
        log: Takes a line for each request, and one for its end.
        processes: Told apart from the agent's own are those that make captures.
        bring_newest: Has what was recorded until now be on disk, if it can.

    Raises:
        AiflameError: There can be no socket there.
    """

    def __init__(
        self,
        config: AgentConfig,
        log: Log,
        processes: CaptureProcesses,
        bring_newest: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._log = log
        self._processes = processes
        self._bring_newest = bring_newest
        self._running: _Running | None = None
        self._may_be_left = True  # of an agent that was killed
        self._is_closed = False
        with ExitStack() as parts:
            try:
                listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._socket = parts.enter_context(listening)
                with InDirectory(config.agent.directory) as path:
                    path.unlink(missing_ok=True)  # of an agent that was killed
                    listening.bind(str(path))
                    path.chmod(0o600)
                listening.listen(8)
                listening.settimeout(_LOOK_S)
                self._thread = threading.Thread(target=self._run, name="captures", daemon=True)
                self._thread.start()
            except (OSError, RuntimeError) as error:  # no descriptor, room or thread is left
                why = getattr(error, "strerror", error)
                raise AiflameError(
                    f"no captures on request: no socket in {config.agent.directory}: {why}"
                ) from error
            parts.pop_all()

    def use(self, config: AgentConfig) -> None:
        """Takes a new configuration, for requests to come."""
        self._config = config

    def close(self) -> None:
        """Ends it, and the capture that is being made."""
        self._is_closed = True
        self._thread.join()
        self._socket.close()
        with suppress(OSError), InDirectory(self._config.agent.directory) as path:
            path.unlink()
        running, self._running = self._running, None
        if running is not None:
            self._end(running)
            self._discard_left()

    def _run(self) -> None:
        while not self._is_closed:
            self._reap()
            self._discard_left()
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:  # nobody came
                continue
            except OSError:  # there is no descriptor left, which some time may mend
                time.sleep(_LOOK_S)
                continue
            with connection:
                connection.settimeout(_REQUEST_S)
                self._serve(connection)

    def _discard_left(self) -> None:
        """Removes what a killed capture, or one of a killed agent, has left, once it can."""
        if self._may_be_left and self._running is None:
            self._may_be_left = not discard_left(self._config.agent.directory)

    def _reap(self) -> None:
        running = self._running
        if running is None:
            return
        self._wait(running)
        if running.process.returncode is None:
            if time.monotonic() < running.until_s:
                return
            self._log.say(f"capture of {running.words}: ended, as it got nowhere")
            self._end(running)
        self._running = None

    def _wait(
        self, running: _Running, timeout_s: float = 0, *, is_told_to_end: bool = False
    ) -> None:
        took_s = self._processes.wait(running.process, timeout_s)
        if took_s is None:
            return
        # By itself it ends otherwise.
        if running.process.returncode < 0:  # it has removed nothing
            _await_end_of_group(running.process.pid)
            self._may_be_left = True
        is_killed = running.process.returncode == -signal.SIGKILL and not is_told_to_end
        how = "killed, as where memory runs out" if is_killed else "over"
        self._log.say(f"capture of {running.words}: {how}; it took {took_s:.1f} s of CPU time")

    def _end(self, running: _Running) -> None:
        process = running.process
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(OSError):
                # What it has started is in its group, until both have ended.
                os.killpg(process.pid, number)
            self._wait(running, _ENDING_S, is_told_to_end=True)
            if process.returncode is not None:
                return

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._take(connection)
        except AiflameError as error:
            self._log.say_seldom("capture refused", f"capture refused: {error}")
            with suppress(OSError):
                connection.send(refusal(str(error), error.hint, error.exit_code))
        except OSError:  # it has gone, or is silent
            return

    def _take(self, connection: socket.socket) -> None:
        """Starts what is asked for.

        Raises:
            AiflameError: It is refused.
            OSError: There is nobody to be answered.
        """
        size = _UCRED.size
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _, uid, _ = _UCRED.unpack(peer)
        if uid not in (0, os.geteuid()):
            raise AiflameError(
                f"user {uid} may not ask this agent for captures", "ask as root, with sudo"
            )
        # Descriptors that come along are closed by the kernel: there is no room for them.
        data, _, flags, _ = connection.recvmsg(MAX_REQUEST_BYTES)
        if not data:
            return
        if flags & socket.MSG_TRUNC:
            raise UsageError(f"a request of more than {MAX_REQUEST_BYTES:,} bytes")
        request = CaptureRequest.parse(data)
        settings = self._config.agent
        if not settings.capture_length:
            raise UsageError("this agent makes no captures", "set its `capture_length`")
        if request.length_ns > settings.capture_length * 1e9:
            raise UsageError(
                f"this agent makes captures of {settings.capture_length:g} s at most",
                "ask for less, or set its `capture_length`",
            )
        if self._running is not None:
            self._wait(self._running, _ENDING_S)  # one that has answered is about to end
        self._reap()
        if self._running is not None:
            since_s = time.monotonic() - self._running.begun_s
            raise AiflameError(
                f"another capture is being made, since {since_s:.0f} s: {self._running.words}",
                "ask again when it is done",
            )
        words = f"{request.words}, for uid {uid}"
        if request.last_ns:
            self._bring_newest()
        job = {"request": json.loads(request.message()), "config": self._config.plain()}
        process = self._processes.begin(lambda: _started(connection, job))
        now_s = time.monotonic()
        until_s = now_s + request.duration_ns / 1e9 + _GRACE_S
        self._running = _Running(process, words, now_s, until_s)
        self._log.say(f"capture of {words}")


class CaptureEndpoint:
    """A server of captures, or none until there can be one: the disk may be full so far.

    Args:
        config: Of the agent.
        log: Takes a line for each reason why it is not there, and those of the server.
        processes: As of `CaptureServer`, like the next.
        bring_newest: As there.
    """

    def __init__(
        self,
        config: AgentConfig,
        log: Log,
        processes: CaptureProcesses,
        bring_newest: Callable[[], None],
    ) -> None:
        self._config = config
        self._log = log
        self._processes = processes
        self._bring_newest = bring_newest
        self._server: CaptureServer | None = None
        self._said = ""
        self.keep()

    def keep(self) -> None:
        """Begins it, if it is not there; to be called now and then."""
        if self._server is not None:
            return
        try:
            self._server = CaptureServer(
                self._config, self._log, self._processes, self._bring_newest
            )
        except AiflameError as error:  # the agent records without it
            if str(error) != self._said:
                self._said = str(error)
                self._log.say(f"{error}; it is tried again each minute")
        else:
            if self._said:
                self._log.say("captures on request: there is a socket now")

    def use(self, config: AgentConfig) -> None:
        """Takes a new configuration, for requests to come."""
        self._config = config
        if self._server is not None:
            self._server.use(config)

    def close(self) -> None:
        """Ends it, and the capture that is being made."""
        if self._server is not None:
            self._server.close()


def _await_end_of_group(group: int) -> None:
    """Waits until a process group that was killed has ended: it has locks until then."""
    until_s = time.monotonic() + _ENDING_S
    with suppress(OSError):
        while time.monotonic() < until_s:
            os.killpg(group, 0)
            time.sleep(_GROUP_LOOK_S)


def _started(connection: socket.socket, job: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """Starts who makes a capture, and gives it the connection.

    Raises:
        AiflameError: No process can be started.
    """
    # In memory, and for nobody else to read: a configuration has secrets.
    with os.fdopen(os.memfd_create("capture", os.MFD_CLOEXEC), "wb") as told:
        told.write(json.dumps(job).encode())
        told.flush()
        told.seek(0)
        try:
            return subprocess.Popen(  # noqa: S603 - a module of our own
                [*COMMAND, str(connection.fileno())],
                stdin=told.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=(connection.fileno(),),
                cwd="/",  # python -m would import from the working directory first
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                **OWN_PROCESS_GROUP,
            )
        except OSError as error:
            raise AiflameError(f"no process can be started: {error.strerror}") from error
