# SPDX-License-Identifier: Apache-2.0
"""The process that forks parsers, and what these do: they answer questions about files.

Started as `python -m aiflame.agent.inspector.file_reader SOCKET MODULE...` by `FileParsers`. It
imports the modules, which have the functions that questions name, so that parsers are there within
ten milliseconds. It never sees a byte of a target: whoever asks talks to the parsers themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

from aiflame.agent.file_questions import Json
from aiflame.agent.inspector.child import ends
from aiflame.agent.inspector.parser import BadMessage, Channel, Parser
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
# Whoever is not asked for so long ends: most recordings meet new files at their start only.
_IDLE_S = 20.0

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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


class _Forks:
    """The parsers that there are, by process id."""

    def __init__(self) -> None:
        self._parsers: dict[int, Parser] = {}
        self._killed: list[Parser] = []

    def serve(self, channel: Channel) -> None:
        """Starts and ends parsers, until nobody asks any more, or has not for a while."""
        while True:
            if not channel.is_readable(_IDLE_S):
                self._parsers = {p.pid: p for p in self._parsers.values() if not p.has_ended()}
                if not self._parsers:
                    return
                continue
            message, _ = channel.receive()
            self._killed = [parser for parser in self._killed if not parser.has_ended()]
            if "end" in message:
                parser = self._parsers.pop(int(message["end"]), None)
                if parser is not None:
                    # Not waited for: where it reads a broken disk no signal gets through.
                    os.kill(parser.pid, signal.SIGKILL)
                    self._killed.append(parser)
                continue
            try:
                parser = Parser(answer_questions)
            except OSError as error:
                channel.send({"error": error.strerror or "no room"})
                continue
            self._parsers[parser.pid] = parser
            channel.send({"pid": parser.pid}, [parser.channel.fileno()])
            parser.channel.close()  # it is whoever asked's alone, and the parser ends with it

    def close(self) -> None:
        """Ends all parsers; their CPU time is this process's own then."""
        for parser in self._parsers.values():
            os.kill(parser.pid, signal.SIGKILL)
        for parser in (*self._parsers.values(), *self._killed):
            if ends(parser.pid):
                parser.has_ended()


def main() -> None:
    """Serves until nobody asks any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection, *modules = sys.argv[1:]
    # The functions import capstone when they need it, which parsers cannot: they open no files.
    for module in ("capstone", *modules):
        importlib.import_module(module)
    limit_self(
        (resource.RLIMIT_AS, _MAX_MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_RTTIME, _REAL_TIME_US),
    )
    gc.freeze()  # forks share what is there, as long as it is not written to
    forks = _Forks()
    with contextlib.suppress(EOFError, BadMessage, OSError):
        forks.serve(Channel(socket.socket(fileno=int(connection))))
    forks.close()


if __name__ == "__main__":
    main()
