# SPDX-License-Identifier: Apache-2.0
"""What helpers of the fork server run in tests."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Whoever has this module may change it.
MARK = "none"


def tell(arguments: Sequence[str]) -> None:
    """Says what it was given, how it is called, and what it has opened besides."""
    print(*arguments)
    print(Path("/proc/self/comm").read_text().strip())
    print([fd for fd in range(3, 1024) if _is_open(fd)])


def tell_more(_: Sequence[str]) -> None:
    """Says what it has of the process that the server was forked from, in one line."""
    fds = [fd for fd in range(3, 1024) if _is_open(fd)]
    umask = os.umask(0)
    print(MARK, fds, Path.cwd(), oct(umask), end="")


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def burn(arguments: Sequence[str]) -> None:
    """Takes so many seconds of CPU time, and waits."""
    while time.process_time() < float(arguments[0]):
        pass
    print("burnt", flush=True)
    wait(())


def fail(_: Sequence[str]) -> None:
    """Does not get far."""
    raise ValueError("on purpose")


def wait(_: Sequence[str]) -> None:
    """Waits for the end of its input."""
    sys.stdin.read()


def take_messages(_: Sequence[str]) -> None:
    """Takes messages, and says of losses that a stretch has told of them."""
    from aiflame.agent.fleet.naming_messages import TO_NAMING, Lost, StretchDone
    from aiflame.agent.typed_messages import encode

    channel = socket.socket(fileno=0)
    while data := channel.recv(65536):
        if isinstance(message := TO_NAMING.decode(data), Lost):
            channel.send(encode(StretchDone({}, "1", 0, 0, {}, message.counts, 0, 0)))


def take_nothing(_: Sequence[str]) -> None:
    """Is at something else for ever."""
    while True:
        time.sleep(0.001)


def talk_nonsense(_: Sequence[str]) -> None:
    """Says more than a report may have, what is none, and then one, until it is told to end."""
    channel = socket.socket(fileno=0)
    channel.send(b"[" * 70_000)
    channel.send(b'{"message":"StretchLost","sinks":[],"stretch":"1"}')
    channel.send(b'{"message":"StretchLost","sinks":{},"stretch":"1"}')
    while b'"End"' not in channel.recv(65536):
        pass
