# SPDX-License-Identifier: Apache-2.0
"""Builds unwind tables into the cache, in a fork of the fork server (`inspector.forking`).

It reads a path a line, and answers with a line: the name of the file's table once it is in the
cache, or why there is none. This process opens files, copies what a table is made of, and writes
the cache. It makes nothing of a file's bytes but a digest: parsers without rights tell it which
parts of a large file a table is made of, and make the table of the copy (`inspector.parser`). A
small file is copied as a whole. A parser that dies takes this process with it, and that is started
again; a file costs only itself. It may be given a limit of the memory that it may have besides what
it was forked with: a file that needs more has no table.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import capstone  # noqa: F401 - parsers use it, and cannot open its files
from aiflame.agent.elf.contents import Contents, whole_file
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.errors import AiflameError
from aiflame.agent.inspector.parser import BadMessage, Channel, Parser, Parsers, contents, end_as
from aiflame.agent.limits import limit_self, more_memory
from aiflame.agent.symbols.known import KnownTables, known_directory
from aiflame.agent.symbols.outline import Outline, checked, read_outline
from aiflame.agent.symbols.store import Store
from aiflame.agent.target_files import BadTargetFile, TargetFile
from aiflame.agent.unwind.build import build, identity_of, load, table_name
from aiflame.agent.unwind.records import BadUnwindInfo
from aiflame.agent.unwind.table_builder import BUILT, TOO_LARGE

# libtorch_cpu takes 1 s and 370 MB; a hostile file may end the worker, which is started again.
_MAX_MEMORY_BYTES = 4 << 30
# The table of libtorch_cpu has 15 MB.
_MAX_TABLE_BYTES = 1 << 30
_MAX_WORDS = 200
# What it reads itself: all that the largest file has for a table, twice.
_MAX_FILE_BYTES = 4 << 30
_END = "\n"


def _parse(channel: Channel) -> None:
    """What a parser does: builds the table of each file that it is sent."""
    while True:
        message, (fd, *answers) = channel.receive()
        if not answers:
            found = read_outline(fd, "unwinding")
            os.close(fd)
            channel.send(found)
            continue
        (answer,) = answers
        why = ""
        try:
            file = TargetFile(fd)
            table = build(file, ElfImage.read(file))
            with os.fdopen(answer, "wb", closefd=False) as result:
                for chunk in table.to_chunks(identity_of(str(message["name"]))):
                    result.write(chunk)
        except (BadTargetFile, BadUnwindInfo, OSError) as error:
            why = str(error) or "damaged"
        except MemoryError:
            why = TOO_LARGE
        finally:
            os.close(fd)
            os.close(answer)
        channel.send({"failed": why[:_MAX_WORDS]})


class _Builder:
    """Has tables built.

    Args:
        directory: Of the cache.
    """

    def __init__(self, directory: Path) -> None:
        self._store = Store(directory)
        self._known = KnownTables(known_directory("unwind"))
        self._parsers = Parsers(_parse)

    def build(self, path: str) -> str:
        """Returns the name of a file's table, which is in the cache.

        Raises:
            _NotBuilt: There can be none.
            OSError: The file cannot be opened.
            BadTargetFile: It is damaged.
        """
        with contextlib.ExitStack() as stack:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            before = os.fstat(fd)
            file = TargetFile(fd, max_bytes=_MAX_FILE_BYTES)
            parts, build_id = self._parts(stack, fd, before.st_size)
            name = ""
            # Where nothing begins with its build id, a digest alone would be taken in vain.
            if not parts.is_small and (not build_id or self._store.holds(build_id[:40])):
                name = table_name(build_id, parts.digest(file))
            if not name or load(name, self._store) is None:
                copy, digest = parts.copied(file)
                stack.callback(os.close, copy)
                name = table_name(build_id, digest)
                if load(name, self._store) is None:
                    self._make(name, copy)
            self._known.keep(before, fd, name)
            return name

    def _parts(self, stack: contextlib.ExitStack, fd: int, size_bytes: int) -> tuple[Contents, str]:
        """Returns what of a file its table is called after, and the build id in that name.

        Of a small file that is all of it: programs that make code make many of these.
        """
        whole = whole_file(size_bytes)
        if whole.is_small:
            return whole, ""
        found = _outline(stack.enter_context(self._parsers.of(fd)), fd, size_bytes)
        if found.contents is None:
            raise _NotBuilt("more to read than any real file has")
        return found.contents, found.build_id

    def _make(self, name: str, copy: int) -> None:
        # The table is for whoever has the same bytes, also another user: its parser has seen no
        # others.
        with contextlib.ExitStack() as stack:
            parser = stack.enter_context(Parser(_parse))
            answer = os.memfd_create("table", os.MFD_CLOEXEC)
            stack.callback(os.close, answer)
            message = _asked(parser, {"name": name}, (copy, answer))
            why = str(message.get("failed", "no answer"))
            if why:
                raise _NotBuilt(why)
            # What it holds is checked by whoever uses it (`UnwindTable.from_mapping`).
            if not self._store.write(name, contents(answer, _MAX_TABLE_BYTES)):
                raise _NotBuilt("the cache cannot be written")


def _outline(parser: Parser, fd: int, size_bytes: int) -> Outline:
    """Returns what a parser says of a file.

    Raises:
        BadTargetFile: It is damaged.
    """
    try:
        return checked(_asked(parser, {}, (fd,)), size_bytes)
    except (KeyError, TypeError, ValueError) as error:
        raise _NotBuilt(f"its parser: {error}") from error


def _asked(parser: Parser, question: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
    """Returns a parser's answer; this process ends where that does."""
    try:
        parser.channel.send(question, fds)
        answer, given = parser.channel.receive()
    except (EOFError, BadMessage, ConnectionError):
        end_as(parser.end() or 1)
    for one in given:
        os.close(one)
    return answer


class _NotBuilt(AiflameError):
    """There is no table, and why."""


def main(arguments: Sequence[str]) -> None:
    """Serves until its standard input ends.

    Args:
        arguments: The directory of the cache, and bytes that it may have of its own.
    """
    cache, *limits = arguments
    limit_self(
        (resource.RLIMIT_AS, _MAX_MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        *(more_memory(int(limit)) for limit in limits),
    )
    builder = _Builder(Path(cache))
    gc.freeze()  # forks share what is there, as long as it is not written to
    for line in sys.stdin:
        path = line.rstrip(_END)
        try:
            answer = f"{BUILT}{builder.build(path)}"
        except (_NotBuilt, BadTargetFile, OSError, BadMessage) as error:
            answer = f"failed: {error}".partition(_END)[0]
        except MemoryError:
            answer = f"failed: {TOO_LARGE}"
        sys.stdout.write(f"{answer}{_END}")
        sys.stdout.flush()
