# SPDX-License-Identifier: Apache-2.0
"""Processes without rights that parse files: one for all files that one user can change anyway.

Whoever calls has imported all that parsing takes, and has one thread: a fork of it is ready within
ten milliseconds. The fork enters the `sandbox`, and has nothing but a channel. Files come over it
as descriptors, and so do answers that are large, in memory: the caller opens, checks and stores.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from aiflame.agent.closing import close_all_but
from aiflame.agent.inspector import sandbox
from aiflame.agent.limits import limit_self

_CALLS = frozenset({**sandbox.BASE_CALLS, **sandbox.FILE_CALLS}.values())
# A message is a question; what is large goes into a file.
_MAX_MESSAGE_BYTES = 65536
_MAX_DESCRIPTORS = 64
_CHUNK_BYTES = 1 << 20
# The system's files, the user's, and those of 14 containers: 5 MB each while there is work.
_MAX_PARSERS = 16
# Of each file in memory that a parser makes: a line table of 600 MB of DWARF has 500 MB.
_MAX_FILE_BYTES = 1 << 30


class BadMessage(ValueError):
    """The other side sent something that is no message: it has been taken over, or has ended."""


class Channel:
    """Messages with descriptors between a parser and whoever started it.

    Args:
        connection: One end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        """The descriptor."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Sends a message; descriptors stay the caller's.

        Raises:
            OSError: The other side has ended.
        """
        socket.send_fds(self._socket, [json.dumps(message).encode()], fds)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Waits for a message; its descriptors are the caller's from now on.

        Raises:
            EOFError: The other side has ended.
            BadMessage: It is none.
        """
        data, fds, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        if not data:
            raise EOFError
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict):
            return message, fds
        for fd in fds:
            os.close(fd)
        raise BadMessage("not an object")

    def is_readable(self, timeout_s: float) -> bool:
        """Waits for a message, or the end of the other side; returns whether there is one."""
        poll = select.poll()  # select() knows no descriptor above 1,023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()


class Parser:
    """A child that parses; a context manager, which ends it.

    Args:
        work: What it does, with its end of the channel. It ends when this returns.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, work: Callable[[Channel], None]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if self.pid == 0:
            parse(work, theirs, parent)
        theirs.close()
        self.channel = Channel(ours)
        self._is_reaped = False

    def __enter__(self) -> Parser:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends it at once."""
        self.channel.close()
        if not self._is_reaped:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()

    def end(self) -> int:
        """Waits until it has ended; returns its exit status, negative for a signal's number."""
        self.channel.close()
        return os.waitstatus_to_exitcode(self._wait())

    def _wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self._is_reaped = True
        return status


class Parsers:
    """The parsers that are there, by whose files they parse.

    Args:
        work: What each does.
    """

    def __init__(self, work: Callable[[Channel], None]) -> None:
        self._work = work
        self._by_group: OrderedDict[FileGroup, Parser] = OrderedDict()

    @contextlib.contextmanager
    def of(self, fd: int) -> Iterator[Parser]:
        """Gives the parser for a file; one that ends after this file where others can write to it.

        Raises:
            OSError: It cannot be started.
        """
        group = group_of(fd)
        if group is None:
            with Parser(self._work) as parser:
                yield parser
            return
        if group not in self._by_group:
            if len(self._by_group) == _MAX_PARSERS:
                self._by_group.popitem(last=False)[1].kill()
            self._by_group[group] = Parser(self._work)
        self._by_group.move_to_end(group)
        yield self._by_group[group]

    def close(self) -> None:
        """Ends all; they have nothing to do."""
        for parser in self._by_group.values():
            parser.kill()  # it might read on
        self._by_group.clear()


class FileGroup(NamedTuple):
    """Files that a user can change: of one mount, so of one container, and of one owner."""

    mount_id: int
    owner_uid: int


def group_of(fd: int) -> FileGroup | None:
    """Returns whose file it is; None where several users can write to it."""
    facts = os.fstat(fd)
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    # Of a process's descriptor that was opened again through /proc it is the file's own mount.
    # UTF-8, since each fork would import another codec.
    for line in Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="utf-8").splitlines():
        if line.startswith("mnt_id:"):
            return FileGroup(int(line.split()[1]), facts.st_uid)
    return None


def parse(work: Callable[[Channel], None], connection: socket.socket, parent: int) -> NoReturn:
    """What a parser's process does: gives up its rights, and works.

    Args:
        work: As for `Parser`.
        connection: Its end of the channel.
        parent: Pid of the process that has forked it, with which it ends.
    """
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):
            os.dup2(nothing, standard)
        close_all_but({0, 1, 2, connection.fileno()})
        limit_self(
            (resource.RLIMIT_FSIZE, _MAX_FILE_BYTES), (resource.RLIMIT_NOFILE, _MAX_DESCRIPTORS)
        )
        # What could not be given up is told of by the reader of memory, once for all.
        sandbox.enter(_CALLS, parent)
        with contextlib.suppress(EOFError):  # nobody asks any more
            work(Channel(connection))
        code = 0
    except SystemExit as end:
        code = _said(str(end))
    except BaseException as error:  # whatever it is, this process ends
        code = _said(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def _said(words: str) -> int:
    with contextlib.suppress(OSError):
        os.write(2, f"{words}\n".encode(errors="replace"))
    return 1


def end_as(code: int) -> NoReturn:
    """Ends this process as a child of it has ended, so that whoever waits for it knows how."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def contents(fd: int, max_bytes: int) -> Iterator[bytes]:
    """Yields what a parser wrote to a file in memory.

    Raises:
        BadMessage: It is more than that.
    """
    size = os.fstat(fd).st_size
    if size > max_bytes:
        raise BadMessage(f"{size} bytes")
    for offset in range(0, size, _CHUNK_BYTES):
        yield os.pread(fd, min(_CHUNK_BYTES, size - offset), offset)
