# SPDX-License-Identifier: Apache-2.0
"""Builds unwind tables into the cache (`python -m aiflame.agent.unwind.worker CACHE`).

It reads a line for each file, the name that its table is to have in the cache and a path, and
answers each with a line once the table is there, or cannot be. This process opens files and writes
the cache, and parses nothing: parsers without rights do (`inspector.parser`). One that dies takes
this process with it, and is started again; a file costs only itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import resource
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import capstone  # noqa: F401 - parsers use it, and cannot open its files
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.inspector.parser import BadMessage, Channel, Parsers, contents, end_as
from aiflame.agent.symbols.store import Store
from aiflame.agent.target_files import BadTargetFile, TargetFile
from aiflame.agent.unwind.build import load_or_build
from aiflame.agent.unwind.records import BadUnwindInfo

# libtorch_cpu takes 1 s and 370 MB; a hostile file may end the worker, which is started again.
_MAX_MEMORY_BYTES = 4 << 30
# The table of libtorch_cpu has 15 MB.
_MAX_TABLE_BYTES = 1 << 30
_MAX_WORDS = 200
# Low: the target comes first.
_NICENESS = 10

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Answer:
    """Stands for the cache where a table is built: an empty one, of one file that is open."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def open(self, name: str) -> mmap.mmap | None:
        """Finds nothing."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview | mmap.mmap]) -> bool:
        """Writes the file."""
        with os.fdopen(self._fd, "wb", closefd=False) as file:
            for chunk in chunks:
                file.write(chunk)
        return True

    def remove(self, name: str) -> None:
        """Does nothing."""


def _parse(channel: Channel) -> None:
    """What a parser does: builds the table of each file that it is sent."""
    while True:
        _, (fd, answer) = channel.receive()
        why = ""
        try:
            file = TargetFile(fd)
            load_or_build(file, ElfImage.read(file), _Answer(answer))
        except (BadTargetFile, BadUnwindInfo, OSError) as error:
            why = str(error) or "damaged"
        finally:
            os.close(fd)
            os.close(answer)
        channel.send({"failed": why[:_MAX_WORDS]})


def _build(parsers: Parsers, store: Store, name: str, path: str) -> str:
    """Returns why a table could not be built, "" if it is in the cache."""
    with contextlib.ExitStack() as stack:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        answer = os.memfd_create("table", os.MFD_CLOEXEC)
        stack.callback(os.close, answer)
        parser = stack.enter_context(parsers.of(fd))
        try:
            parser.channel.send({}, (fd, answer))
            message, _ = parser.channel.receive()
        except (EOFError, BadMessage, ConnectionError):
            end_as(parser.end() or 1)
        why = str(message.get("failed", "no answer"))
        # What it holds is checked by whoever uses it (`UnwindTable.from_mapping`).
        if not why and not store.write(name, contents(answer, _MAX_TABLE_BYTES)):
            return "the cache cannot be written"
        return why


def main() -> None:
    """Serves until its standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    store, parsers = Store(Path(sys.argv[1])), Parsers(_parse)
    gc.freeze()  # forks share what is there, as long as it is not written to
    for line in sys.stdin:
        name, _, path = line.rstrip("\n").partition(" ")
        try:
            why = _build(parsers, store, name, path)
        except (OSError, BadMessage) as error:
            why = str(error)
        answer = f"failed: {why}".partition("\n")[0] if why else "built"
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
