# SPDX-License-Identifier: Apache-2.0
"""What a recorder tells the process that names its windows: which files these mention."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.sinks.naming_messages import (
    CodeMaker,
    CodeMakerGone,
    FileClosed,
    FileGiven,
    FilesMissing,
)
from aiflame.agent.typed_messages import encode

_INT = struct.Struct("=i")

# There is no room for a message, or for one more descriptor that is on its way (unix(7)). With
# other errors it has ended, or would not come any better.
_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS)
# What no file was told with: it is to be told again.
_TO_BE_TOLD = (-1, "")


class NamingChannel:
    """Messages to a process that names windows; none of them is waited for.

    Args:
        table: Knows the files that processes have mapped.
        channel: Of type SOCK_SEQPACKET, whose other end the process reads.
    """

    def __init__(self, table: ProcessTable, channel: socket.socket) -> None:
        self._table = table
        self._channel = channel
        # By number of the file: its descriptor, and where its debug files are.
        self._told: dict[int, tuple[int | None, str]] = {}
        self._told_processes: set[int] = set()

    def _tell_files(self) -> bool:
        """Tells of files and processes that are new.

        Returns:
            Whether there was room for all; what is left is told the next time.
        """
        for message, fd in self._files():
            if not self._send(message, fd):
                return False
        return all(self._send(message) for message in self._processes())

    def _files(self) -> Iterator[tuple[FileGiven | FileClosed, int | None]]:
        """Yields what there is to say of files; what is asked for next has been said."""
        files = self._table.binaries.files
        for index in [*(self._told.keys() - files.keys())]:
            yield FileClosed(index), None
            del self._told[index]
        for index, file in files.items():
            known = self._table.binaries.readable(file), file.root
            if known != self._told.get(index):
                yield FileGiven(index, file.root), known[0]
                self._told[index] = known

    def _tell_again(self, missing: FilesMissing) -> None:
        """Has files told again that the process has not got."""
        for index in self._told.keys() & missing.binaries:
            self._told[index] = _TO_BE_TOLD

    def _processes(self) -> Iterator[CodeMaker | CodeMakerGone]:
        makers = self._table.code_makers
        for index in makers.keys() - self._told_processes:
            image = makers[index]
            yield CodeMaker(index, image.root, image.owner_uid)
            self._told_processes.add(index)
        for index in self._told_processes - makers.keys():
            yield CodeMakerGone(index)
            self._told_processes.remove(index)

    def _send(self, message: object, fd: int | None = None) -> bool:
        """Sends a message, without waiting; returns whether there was room for it.

        Where the process has ended there is: whoever waits for it says so.
        """
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(fd))]
        try:
            # socket.send_fds leaves the flags out.
            self._channel.sendmsg([encode(message)], rights, socket.MSG_DONTWAIT)
        except OSError as error:
            return error.errno not in _NO_ROOM
        return True
