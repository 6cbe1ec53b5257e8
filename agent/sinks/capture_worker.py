# SPDX-License-Identifier: Apache-2.0
"""Writes the capture of a recording that goes on, named window by window.

Started by `capture_process` as `python -m aiflame.agent.sinks.capture_worker FOLDER DATABASE`,
with a socket as standard input. Windows come from the segments in the folder; the socket tells when
there are more of them, and brings the files that they mention. It ends when the recorder does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from aiflame.agent.allocator import give_back_freed_memory
from aiflame.agent.errors import DiskFull
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.inspector.rootfs import reopen_regular
from aiflame.agent.limits import OUT_OF_ROOM
from aiflame.agent.model.window import Window
from aiflame.agent.process_group import leave_signals_to_recorder
from aiflame.agent.sinks.capture_report import Report
from aiflame.agent.sinks.naming_messages import (
    OF_FILES,
    CodeMaker,
    CodeMakerGone,
    End,
    FileClosed,
    FileGiven,
    FilesMissing,
    NewestWindows,
    OfFiles,
    Windows,
)
from aiflame.agent.sinks.segments import FollowedWindows, JitSymbolSink, RecordedWindows, newest
from aiflame.agent.sinks.written import Naming, WrittenCapture
from aiflame.agent.symbolize.files import GivenFiles, JitProcess, OpenFile
from aiflame.agent.symbols.file_facts import facts_for_names
from aiflame.agent.symbols.service import SymbolService
from aiflame.agent.symbols.store import cache_dir
from aiflame.agent.typed_messages import Messages, encode

# Of a message: a path is at most 4,096 bytes, each of which takes six in JSON.
_MAX_MESSAGE_BYTES = 1 << 16
# Files at once: what is told for nothing again and again is to cost little.
_MOST_ASKED = 256

MessageT = TypeVar("MessageT")
_Message = OfFiles | Windows | NewestWindows | End
_MESSAGES: Messages[_Message] = Messages(*OF_FILES, Windows, NewestWindows, End)


def main(folder: Path, database: Path) -> None:
    """Serves one recording."""
    leave_signals_to_recorder()
    channel = socket.socket(fileno=os.dup(0))
    files = GivenFiles()
    with (
        SymbolService(cache_dir()) as service,
        closing(ForkServer()) as server,
        closing(facts_for_names(server)) as file_facts,
    ):
        service.start()  # it is ready by the time that the first window is there
        capture: WrittenCapture | None = None
        jit_symbols = JitSymbolSink(folder)
        following = FollowedWindows(folder)
        disk_full = ""
        for message in messages(channel, files, _MESSAGES):
            windows: Iterable[Window] = ()
            if isinstance(message, Windows):
                windows = following.take(message.count)
            elif isinstance(message, NewestWindows):
                every = RecordedWindows(folder)
                following.facts = every.facts
                windows = newest(iter(every), message.keep_ns, message.end_ns)
            for window in windows:
                if disk_full:
                    continue
                try:
                    if capture is None:
                        # The recorder lists kernels when it is over.
                        naming = Naming(files, service, file_facts, keeps_kernel_files=False)
                        facts = following.facts
                        capture = WrittenCapture(database, window.start_ns, facts, naming)
                    capture.put(window)
                except DiskFull as error:
                    disk_full = str(error)
                else:
                    jit_symbols.put(window, capture.jit_symbols)
                if not window.start_ns:  # the first names all that sleeps, and reads kernel names
                    give_back_freed_memory()
            service.poll()
        jit_symbols.close()
        report = Report(disk_full=disk_full) if capture is None else capture.finish(disk_full)
        channel.sendall(encode(report.bounded()))


def messages(
    channel: socket.socket, files: GivenFiles, kinds: Messages[MessageT]
) -> Iterator[MessageT]:
    """Yields what concerns windows, until there are no more; takes files in.

    Those that there was no descriptor for are asked for again with each of these. Where whoever
    sends them has ended, this process does.

    Args:
        channel: Where messages come from.
        files: Takes those that come.
        kinds: Which may come: of files, `End`, and others.

    Raises:
        BadMessage: Another one came.
    """
    missing: set[int] = set()
    while True:
        data, fds, flags, _ = socket.recv_fds(channel, _MAX_MESSAGE_BYTES, 1)
        if not data:
            sys.exit(1)  # the recorder has ended
        message = kinds.decode(data)
        if isinstance(message, FileGiven):
            fd = None
            missing.discard(message.binary)
            try:
                fd = _readable(fds, is_cut=bool(flags & socket.MSG_CTRUNC))
            except OSError:
                missing.add(message.binary)
            files.add(message.binary, OpenFile(fd, message.root))
        elif isinstance(message, CodeMaker):
            files.add_process(message.process, JitProcess(message.root, message.uid))
        elif isinstance(message, FileClosed):
            missing.discard(message.binary)
            files.forget(message.binary)
        elif isinstance(message, CodeMakerGone):
            files.forget_process(message.process)
        elif isinstance(message, End):
            return
        else:
            _ask_again(channel, missing)
            yield message


def _ask_again(channel: socket.socket, missing: set[int]) -> None:
    """Asks for some of the files that are missing, if there is room for it; never waits."""
    if asked := (*islice(missing, _MOST_ASKED),):
        with suppress(OSError):  # the next time, then
            channel.send(encode(FilesMissing(asked)), socket.MSG_DONTWAIT)


def _readable(fds: Sequence[int], *, is_cut: bool) -> int | None:
    """Returns a descriptor to read from; the recorder opens no file of which reads may hang.

    Args:
        fds: What came: one of O_PATH is opened anew.
        is_cut: More was sent.

    Returns:
        None where the recorder has none, or the file cannot be opened.

    Raises:
        OSError: This process has no descriptor left, or the host no memory.
    """
    if is_cut:  # unix(7): for want of descriptors, which were closed then
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not fds or not fcntl.fcntl(fds[0], fcntl.F_GETFL) & os.O_PATH:
        return fds[0] if fds else None
    try:
        return reopen_regular(fds[0], "")
    except OSError as error:
        if error.errno in OUT_OF_ROOM:
            raise
        return None
    finally:
        os.close(fds[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
