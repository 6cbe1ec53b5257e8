# SPDX-License-Identifier: Apache-2.0
"""What a parser does that `FileParsers` has had forked: it answers questions about files.

The functions that questions name are in modules that the fork server has imported (`forking`).
Whoever asks talks to the parser itself.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from aiflame.agent.file_questions import Json
from aiflame.agent.inspector.parser import Channel, parse
from aiflame.agent.limits import limit_self
from aiflame.agent.target_files import BadTargetFile, TargetFile

# The largest files take 300 MB; a hostile one may end its parser.
_MAX_MEMORY_BYTES = 2 << 30
# A parser is as urgent as the recorder that waits for it, unless it computes for so long: real
# files take a tenth of that.
_REAL_TIME_US = 1_000_000
# Past what `TargetFile.limit_cpu` allows: for pieces of work that do not look at the clock.
TIMER_MARGIN_S = 0.5
_MAX_REASON_CHARACTERS = 200
_CHANNEL = 3
# One that is not asked for so long ends, with the 14 MB that it has: another is there in 10 ms.
_IDLE_S = 1.0


class _AskedFile:
    """A file that whoever asks reads for the parser: opening it may have been all that is safe."""

    identity = (0, 0)
    is_stuck = False

    def __init__(self, channel: Channel, size_bytes: int, owner: int) -> None:
        self._channel = channel
        self.size_bytes = size_bytes
        self.owner = owner

    def read(self, size: int, offset: int) -> bytes:
        """As `RemoteFile.read`."""
        self._channel.send({"read": [size, offset]})
        message, fds = self._channel.receive()
        if not fds:
            error = int(message["error"])
            raise OSError(error, os.strerror(error))
        with os.fdopen(fds[0], "rb") as file:
            return file.read()


def answer_questions(channel: Channel) -> None:
    """What a parser does: answers what it is asked about each file that it is sent."""
    while channel.is_readable(_IDLE_S):
        message, fds = channel.receive()
        cpu_s = float(message["cpu_s"])
        signal.setitimer(signal.ITIMER_PROF, cpu_s + TIMER_MARGIN_S)
        remote = None if fds else _AskedFile(channel, *message["file"])
        file = TargetFile(fds[0] if fds else -1, remote)
        file.limit_cpu(cpu_s)
        answers = [_answer(file, name, arguments) for name, arguments in message["questions"]]
        signal.setitimer(signal.ITIMER_PROF, 0)
        for fd in fds:
            os.close(fd)
        with os.fdopen(os.memfd_create("answers", os.MFD_CLOEXEC), "wb") as written:
            written.write(json.dumps(answers, separators=(",", ":")).encode())
            written.flush()
            channel.send({}, [written.fileno()])


def _answer(file: TargetFile, name: str, arguments: list[Json]) -> dict[str, Any]:
    module, _, function = name.partition(":")
    read = getattr(sys.modules[module], function)
    try:
        return {"answer": read(file, *arguments)}
    except BadTargetFile as error:
        why = str(error) or "damaged"
    # Any exception: parsers and numpy have raised a dozen kinds on made-up files.
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    return {"bad": why[:_MAX_REASON_CHARACTERS]}


def main(_: Sequence[str]) -> None:
    """Makes a fork of the fork server a parser, whose first descriptor is its channel."""
    limit_self(
        (resource.RLIMIT_AS, _MAX_MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_RTTIME, _REAL_TIME_US),
    )
    parse(answer_questions, socket.socket(fileno=_CHANNEL), os.getppid())
