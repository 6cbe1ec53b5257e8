# SPDX-License-Identifier: Apache-2.0
"""The process that names stretches and sends them, as the collector sees it.

So naming, encoding and sending take neither the collector's time nor its memory, and what goes
wrong there ends no recording.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from aiflame.agent import priority
from aiflame.agent.errors import AiflameError
from aiflame.agent.fleet.config import AgentConfig
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.naming_messages import (
    FROM_NAMING,
    Configure,
    EndBy,
    NamingReport,
    ToNaming,
)
from aiflame.agent.fleet.naming_progress import HUNG_S, NamingProgress
from aiflame.agent.inspector.fork_server import ForkServer, Program
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.sinks.naming_channel import NamingChannel
from aiflame.agent.sinks.naming_messages import End, FilesMissing, Windows
from aiflame.agent.typed_messages import BadMessage

_MODULE = "aiflame.agent.fleet.naming_worker"
# What is run; tests run one that has a sink of their own.
PROGRAM = Program("naming", f"{_MODULE}:run", (_MODULE,))
# Its descriptors: messages, nothing, what it says of errors, and where it asks for forks.
_ERRORS_FD, _REQUESTS_FD = 2, 3

# Of a message from it, which tells of one stretch.
_MAX_REPORT_BYTES = 1 << 16
_LOOK_S = 0.05


class NamingProcess(NamingChannel):
    """Names stretches as their windows come.

    Args:
        table: Knows the files that processes have mapped.
        directory: The agent's.
        config: What it is told first.
        server: Forks it, and those that read files for it.
        log: Takes a line where it says what is no message.

    Raises:
        AiflameError: It cannot be started.
    """

    def __init__(
        self,
        table: ProcessTable,
        directory: Path,
        config: AgentConfig,
        server: ForkServer,
        log: Log,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(table, ours)
        self._waiting: deque[ToNaming] = deque()
        self._server = server
        self._log = log
        self._progress = NamingProgress(ours)
        self._is_killed = False
        helper_bytes = config.agent.helper_memory
        try:
            with Path(os.devnull).open("wb") as nowhere:
                self._process = server.run(
                    PROGRAM,
                    [str(directory), str(helper_bytes), str(_REQUESTS_FD)],
                    (theirs.fileno(), nowhere.fileno(), _ERRORS_FD, server.request_fd),
                    first_fd=0,
                )
        except OSError as error:
            ours.close()
            raise AiflameError(f"no process can be started: {error.strerror}") from error
        finally:
            theirs.close()
        self.tell(Configure(config))

    @property
    def pid(self) -> int | None:
        """Its pid, None as long as it is not there."""
        return self._process.pid or None

    def tell(self, message: ToNaming) -> None:
        """Tells it something, after all before; never waits."""
        if self._is_killed:  # whoever comes next is told all anew
            return
        self._waiting.append(message)
        self.pump()

    def give(self, windows: int) -> None:
        """Tells that there are more windows in the stretch that it was told last."""
        if self._waiting and isinstance(last := self._waiting[-1], Windows):
            self._waiting.pop()
            windows += last.count
        self.tell(Windows(windows))

    def pump(self) -> bool:
        """Sends what waits, as far as there is room; returns whether that was all."""
        with suppress(OSError):  # no interpreter can be started: `ended` says so
            self._server.look()
        self._progress.note_taken()
        try:
            return self._send_all()
        finally:
            self._progress.note_sent()

    def _send_all(self) -> bool:
        if not self._tell_files():
            return False
        while self._waiting:
            if not self._send(self._waiting[0]):
                return False
            self._waiting.popleft()
        return True

    def look(self) -> float:
        """Returns for how long, in seconds, it takes none of the messages that wait for it."""
        self._progress.look(self.pid)
        return self._progress.unheard_s

    def kill_if_hung(self) -> bool:
        """Kills it where it hangs; returns whether it did. `ended` tells of its end.

        Where it waits for a file system that never answers, that comes when this does: no other
        one is started until then, for it would wait as well, and the next one, too.
        """
        if self._is_killed or self.pid is None or self._progress.still_s < HUNG_S:
            return False
        self._process.kill()
        self._is_killed = True
        self._waiting.clear()
        return True

    def reports(self) -> Iterator[NamingReport]:
        """Yields what it has said since."""
        while True:
            try:
                data = self._channel.recv(_MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
            except ConnectionResetError:
                # It has ended with messages unread: the kernel says so once, and before what it has
                # said itself (unix_release_sock of af_unix.c, v6.1).
                continue
            except OSError:  # there is none
                return
            if not data:
                return
            try:
                message = FROM_NAMING.decode(data)
            except BadMessage as error:  # also of one that was too long: the recording goes on
                self._log.say_seldom("report", f"a report of the naming process is lost: {error}")
                continue
            if isinstance(message, FilesMissing):
                self._tell_again(message)
            else:
                yield message

    def ended(self) -> str:
        """Returns that it has ended, in words, and how; "" while it has not."""
        try:
            ending = self._process.poll()
        except ConnectionError:
            return "has ended with the fork server"
        except OSError as error:  # no process is left, or a module cannot be imported
            return f"cannot be started: {error.strerror}"
        return "" if ending is None else f"has ended: {_ending(ending.code)}"

    def finish(self, until_s: float) -> Iterator[NamingReport]:
        """Lets it send what it can, and waits for its end.

        Args:
            until_s: By `time.monotonic`: when it is to have ended.

        Yields:
            What it says meanwhile.
        """
        self._waiting.extend((EndBy(until_s), End()))
        while not self.ended() and time.monotonic() < until_s:
            self.pump()
            yield from self.reports()
            self._process.wait(_LOOK_S)
        yield from self.reports()

    def close(self) -> None:
        """Ends it, whether it is finished or not."""
        self._channel.close()
        if self._process.pid and not self.ended():  # else somebody else may have its pid
            priority.hurry_child(self._process.pid)  # to end takes a processor
        self._process.end()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
