# SPDX-License-Identifier: Apache-2.0
"""The process that names stretches and sends them, as the collector sees it.

So naming, encoding and sending take neither the collector's time nor its memory, and what goes
wrong there ends no recording.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiflame.agent import priority
from aiflame.agent.errors import AiflameError
from aiflame.agent.inspector.child import ends
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.process_group import OWN_PROCESS_GROUP
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.sinks.naming_channel import NamingChannel

# What is run; tests run one that has a sink of their own.
COMMAND: tuple[str, ...] = (sys.executable, "-m", "aiflame.agent.fleet.worker")

# Of a message from it, which tells of one stretch.
_MAX_REPORT_BYTES = 1 << 16
_LOOK_S = 0.05


class NamingProcess(NamingChannel):
    """Names stretches as their windows come.

    Args:
        table: Knows the files that processes have mapped.
        directory: The agent's.
        config: As `AgentConfig.plain` gives it.
        helper_bytes: What those may have that read files for it.
        server: Forks these.

    Raises:
        AiflameError: It cannot be started.
    """

    def __init__(
        self,
        table: ProcessTable,
        directory: Path,
        config: dict[str, Any],
        helper_bytes: int,
        server: ForkServer,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(table, ours)
        self._waiting: deque[dict[str, Any]] = deque()
        self._server = server
        try:
            self._process = subprocess.Popen(  # noqa: S603 - a module of our own
                [*COMMAND, str(directory), str(helper_bytes), str(server.request_fd)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=(server.request_fd,),
                cwd="/",  # python -m would import from the working directory first
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                **OWN_PROCESS_GROUP,
            )
        except OSError as error:
            ours.close()
            raise AiflameError(f"no process can be started: {error.strerror}") from error
        finally:
            theirs.close()
        self.tell(config=config)

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def tell(self, **message: Any) -> None:
        """Tells it something, after all before; never waits."""
        self._waiting.append(message)
        self.pump()

    def give(self, windows: int) -> None:
        """Tells that there are more windows in the stretch that it was told last."""
        last = self._waiting[-1] if self._waiting else {}
        if "windows" in last:
            last["windows"] += windows
            self.pump()
        else:
            self.tell(windows=windows)

    def pump(self) -> bool:
        """Sends what waits, as far as there is room; returns whether that was all."""
        with suppress(OSError):  # no interpreter can be started: it names without what is in files
            self._server.look()
        if not self._tell_files():
            return False
        while self._waiting:
            if not self._send(self._waiting[0]):
                return False
            self._waiting.popleft()
        return True

    def reports(self) -> Iterator[dict[str, Any]]:
        """Yields what it has said since."""
        while True:
            try:
                data = self._channel.recv(_MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
            except OSError:  # there is none, or it has ended
                return
            if not data:
                return
            # It is cut where it is too long: a report less, and the recording goes on.
            with suppress(ValueError, RecursionError):
                yield json.loads(data)

    def exit_code(self) -> int | None:
        """Returns how it ended, None while it has not."""
        return self._process.poll()

    def finish(self, until_s: float) -> Iterator[dict[str, Any]]:
        """Lets it send what it can, and waits for its end.

        Args:
            until_s: By `time.monotonic`: when it is to have ended.

        Yields:
            What it says meanwhile.
        """
        self._waiting.extend(({"until_s": until_s}, {"end": True}))
        while self.exit_code() is None and time.monotonic() < until_s:
            self.pump()
            yield from self.reports()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_S)
        yield from self.reports()

    def close(self) -> None:
        """Ends it, whether it is finished or not."""
        self._channel.close()
        if self._process.poll() is None:
            priority.hurry_child(self._process.pid)  # to end takes a processor
            self._process.kill()
            if ends(self._process.pid):
                self._process.wait()
