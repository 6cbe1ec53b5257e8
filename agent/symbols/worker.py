# SPDX-License-Identifier: Apache-2.0
"""The symbol worker: opens files of targets, and has each read by a process without rights.

Started by `service` as `python -m aiflame.agent.symbols.worker CACHE MEMORY_BYTES TIMEOUT_S`;
requests come on standard input, answers go to standard output (`protocol`). A parser
(`inspector.parser`) gets the binary as a descriptor and asks for all else: candidates for a debug
file, and files of the cache, which it can only give names that hold its own binary's digest. This
process looks at no byte of a target but for that digest and checksums.

A parser has a limit of its address space, and a timer that ends it when it takes too much CPU time.
When one dies, so does the worker, in the same way: `service` starts another. It ends when its
standard input does, or when the recorder dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import itertools
import json
import mmap
import os
import re
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from aiflame.agent.demangle import Demangler
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.inspector.parser import (
    BadMessage,
    Channel,
    Parser,
    Parsers,
    contents,
    end_as,
)
from aiflame.agent.losses import LossKind
from aiflame.agent.symbols.debugfiles import Candidate, open_candidates
from aiflame.agent.symbols.frames import Problem, clean_name
from aiflame.agent.symbols.protocol import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    decode,
    encode,
    pack_frames,
    pack_problems,
    pack_raw,
    unpack_problems,
    unpack_raw,
)
from aiflame.agent.symbols.resolve import DirectAccess, Resolver, readable
from aiflame.agent.symbols.store import Store

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# What a parser may ask for. A build id is at most 64 bytes, a name in a link a file name.
_BUILD_ID = re.compile(r"[0-9a-f]{0,128}")
_LINK = re.compile(r"(?!\.{1,2}$)[^/\0]{0,255}")
_CACHE_NAME = re.compile(r"([0-9a-fx-]{1,80})(\.[a-z]{1,16})")
# Two roots with four locations each.
_MAX_CANDIDATES = 8
# A symbol table is as large as the names in the binary, a line table as 512 MB at most.
_MAX_CACHE_FILE_BYTES = 1 << 30
# Real binaries take four.
_MAX_QUESTIONS = 64

# A mapped table keeps a descriptor, and one that an error refers to stays until it is collected.
# A parser may have 64, and a request takes two or three.
_COLLECT_REQUESTS = 8

_END_BYTES = 4096
_MAGIC = b"\x7fELF"


class _RemoteStore:
    """The cache, as a parser has it: each file is handed over by the other side."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def open(self, name: str) -> mmap.mmap | None:
        """As `Store.open`."""
        self._channel.send({"ask": "open", "name": name})
        _, fds = self._channel.receive()
        if not fds:
            return None
        try:
            return mmap.mmap(fds[0], 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: the file is empty
            return None
        finally:
            os.close(fds[0])

    def write(self, name: str, chunks: Iterable[bytes | memoryview | mmap.mmap]) -> bool:
        """As `Store.write`."""
        with os.fdopen(os.memfd_create("table"), "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            self._channel.send({"ask": "write", "name": name}, [file.fileno()])
            message, _ = self._channel.receive()
        return message.get("written") is True

    def remove(self, name: str) -> None:
        """As `Store.remove`."""
        self._channel.send({"ask": "remove", "name": name})
        self._channel.receive()


class _RemoteAccess:
    """All that a parser can reach: one binary, and what it may ask for."""

    def __init__(self, channel: Channel, fd: int, inside: str) -> None:
        self.store = _RemoteStore(channel)
        self._channel = channel
        self._fd = fd
        self._inside = inside
        self._given: list[Candidate] = []

    def open(self, path: str) -> int:
        """The binary, whatever the path."""
        return self._fd

    def path_inside(self, path: str) -> str:
        """Its path inside the target's root."""
        return self._inside

    def candidates(self, image: ElfImage, inside: str, root_path: str) -> Iterator[Candidate]:
        """As `open_candidates`, where the other side knows inside what."""
        link = "" if image.debuglink is None else image.debuglink.name
        self._channel.send({"ask": "debug", "build_id": image.build_id, "link": link})
        message, fds = self._channel.receive()
        self._given = [
            Candidate(path, is_linked, fd)
            for (path, is_linked), fd in zip(message["found"], fds, strict=True)
        ]
        yield from self._given

    def checksum(self, candidate: Candidate) -> int:
        """CRC-32 of a candidate."""
        self._channel.send({"ask": "checksum", "at": self._given.index(candidate)})
        return int(self._channel.receive()[0]["crc"])


def _parse(channel: Channel, timeout_s: float) -> None:
    """What a parser does: answers each request that it is sent with a binary."""
    for number in itertools.count(1):
        if number % _COLLECT_REQUESTS == 0:
            gc.collect()
        question, (fd, text) = channel.receive()
        with os.fdopen(text, "rb") as file:
            request = json.loads(file.read())
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        answer = _parsed(_RemoteAccess(channel, fd, str(question["inside"])), request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        with _in_memory(answer) as file:
            channel.send({"ask": "done"}, [file.fileno()])


def _parsed(access: _RemoteAccess, request: dict[str, Any]) -> dict[str, Any]:
    resolver = Resolver(access)
    path, root, plain = request["path"], request["root"], request["plain"]
    answer: dict[str, Any] = {}
    if request["addresses"] is None:
        resolver.prepare(path, root, plain=plain)
    else:
        addresses = np.array(request["addresses"], dtype=np.uint64)
        answer = pack_raw(resolver.resolve(path, root, addresses, plain=plain))
    answer["problems"] = pack_problems(resolver.problems)
    return answer


def _in_memory(message: dict[str, Any]) -> BinaryIO:
    """Returns a file in memory that holds a message, to be read from its beginning."""
    file = os.fdopen(os.memfd_create("message", os.MFD_CLOEXEC), "w+b")
    file.write(json.dumps(message, separators=(",", ":")).encode())
    file.seek(0)  # which writes what is buffered
    return file


class _Opener:
    """Answers the questions of one parser.

    Args:
        access: Opens files.
        fd: Of the binary.
        inside: Its path inside the target's root.
        root_path: Of that root.
    """

    def __init__(self, access: DirectAccess, fd: int, inside: str, root_path: str) -> None:
        self._access = access
        self._store: Store = access.store
        self._inside = inside
        self._root_path = root_path
        self._digest = _digest(fd)
        self._candidates: list[Candidate] = []
        self.problems: list[Problem] = []

    def __enter__(self) -> _Opener:
        return self

    def __exit__(self, *_: object) -> None:
        for candidate in self._candidates:
            os.close(candidate.fd)

    def answer(self, channel: Channel, message: dict[str, Any], fds: list[int]) -> None:
        """Answers one question.

        Raises:
            BadMessage: No sound parser asks that.
        """
        kinds = {
            "debug": self._debug,
            "checksum": self._checksum,
            "open": self._open,
            "write": self._write,
            "remove": self._remove,
        }
        kind = kinds.get(str(message.get("ask")))
        if kind is None:
            raise BadMessage("an unknown question")
        try:
            kind(channel, message, fds)
        except (KeyError, IndexError, TypeError) as error:
            raise BadMessage(f"{type(error).__name__}: {error}") from error

    def _debug(self, channel: Channel, message: dict[str, Any], _: list[int]) -> None:
        build_id, link = str(message["build_id"]), str(message["link"])
        if self._candidates or not (_BUILD_ID.fullmatch(build_id) and _LINK.fullmatch(link)):
            raise BadMessage("not what a binary has")
        for candidate in open_candidates(build_id, link, self._inside, self._root_path):
            # A name in a link may be that of any file beside the binary.
            if os.pread(candidate.fd, len(_MAGIC), 0) == _MAGIC:
                self._candidates.append(candidate)
            else:
                os.close(candidate.fd)
                words = clean_name(f"{candidate.path}: not an ELF file")
                self.problems.append(Problem(LossKind.BAD_DEBUG_FILE, words))
        found = [candidate[:2] for candidate in self._candidates[:_MAX_CANDIDATES]]
        fds = [candidate.fd for candidate in self._candidates[:_MAX_CANDIDATES]]
        channel.send({"found": found}, fds)

    def _checksum(self, channel: Channel, message: dict[str, Any], _: list[int]) -> None:
        candidate = self._candidates[int(message["at"])]
        channel.send({"crc": self._access.checksum(candidate)})

    def _name(self, message: dict[str, Any]) -> str:
        """Returns how a file of the cache is called: no binary can reach another's."""
        found = _CACHE_NAME.fullmatch(str(message["name"]))
        if found is None:
            raise BadMessage("no name of a cache file")
        return f"{found[1]}-{self._digest}{found[2]}"

    def _open(self, channel: Channel, message: dict[str, Any], _: list[int]) -> None:
        fd = self._store.descriptor(self._name(message))
        channel.send({}, [] if fd is None else [fd])
        if fd is not None:
            os.close(fd)

    def _write(self, channel: Channel, message: dict[str, Any], fds: list[int]) -> None:
        chunks = contents(fds[0], _MAX_CACHE_FILE_BYTES)
        channel.send({"written": self._store.write(self._name(message), chunks)})

    def _remove(self, channel: Channel, message: dict[str, Any], _: list[int]) -> None:
        self._store.remove(self._name(message))
        channel.send({})


def _digest(fd: int) -> str:
    """Returns a digest of a file's ends and length."""
    size = os.fstat(fd).st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    for offset in (0, max(0, size - _END_BYTES)):
        digest.update(os.pread(fd, _END_BYTES, offset))
    return digest.hexdigest()[:16]


class Worker:
    """Answers requests.

    Args:
        cache: Directory for finished tables; None for none.
        timeout_s: CPU seconds that one binary may take.
    """

    def __init__(self, cache: Path | None, timeout_s: float) -> None:
        self._access = DirectAccess(cache)
        self._demangler = Demangler()
        self._parsers = Parsers(lambda channel: _parse(channel, timeout_s))
        self._peak_rss_bytes = 0

    def close(self) -> None:
        """Ends its parsers, whose CPU time is then its own."""
        self._parsers.close()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a request; the process ends where its parser does."""
        path = request["path"]
        count = 0 if request["addresses"] is None else len(request["addresses"])
        try:
            fd = self._access.open(path)
        except OSError as error:
            words = clean_name(f"{path}: {error.strerror}")
            problem = Problem(LossKind.UNREADABLE_BINARY, words)
            return self._reply(request, [()] * count, [problem])
        try:
            answer = self._parsed(request, fd)
        except (BadMessage, IndexError, KeyError, TypeError, ValueError) as error:
            sys.exit(f"its parser: {error}")
        finally:
            os.close(fd)
        chains = unpack_raw(answer, count) if count else []
        return self._reply(request, chains, unpack_problems(answer))

    def _parsed(self, request: dict[str, Any], fd: int) -> dict[str, Any]:
        """Has a binary parsed; returns what its parser answers."""
        inside = self._access.path_inside(request["path"])
        with (
            _Opener(self._access, fd, inside, request["root"]) as opener,
            self._parsers.of(fd) as parser,
        ):
            try:
                with _in_memory(request) as text:
                    parser.channel.send({"inside": inside}, [fd, text.fileno()])
                for _ in range(_MAX_QUESTIONS):
                    answer = self._answered(parser, opener)
                    if answer is not None:
                        return answer
            except (EOFError, ConnectionError):
                end_as(parser.end() or 1)
        raise BadMessage("too many questions")

    def _answered(self, parser: Parser, opener: _Opener) -> dict[str, Any] | None:
        """Takes a message; returns what it answers, None for a question."""
        message, fds = parser.channel.receive()
        try:
            if message.get("ask") != "done":
                opener.answer(parser.channel, message, fds)
                return None
            answer = decode(b"".join(contents(fds[0], MAX_MESSAGE_BYTES)))
        finally:
            for fd in fds:
                os.close(fd)
        answer["problems"] += pack_problems(opener.problems)
        self._peak_rss_bytes = max(self._peak_rss_bytes, int(answer["peak_rss_bytes"]))
        return answer

    def _reply(
        self, request: dict[str, Any], chains: Any, problems: list[Problem]
    ) -> dict[str, Any]:
        reply: dict[str, Any] = {}
        if request["addresses"] is not None:
            demangler = None if request["plain"] else self._demangler
            reply = pack_frames(readable(chains, demangler))
            if demangler is not None and demangler.failures:
                path = clean_name(request["path"])
                problems.append(Problem(LossKind.NAMES_NOT_DEMANGLED, path))
        reply["id"] = request["id"]
        reply["problems"] = pack_problems(problems)
        reply["peak_rss_bytes"] = self._peak_rss_bytes
        return reply


def _limit_self(memory_bytes: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C is the recorder's to handle; the timer must end a parser wherever it hangs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def serve(worker: Worker, source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until the source ends."""
    while True:
        header = source.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return
        (length,) = LENGTH.unpack(header)
        if length > MAX_MESSAGE_BYTES:
            return
        request = decode(source.read(length))
        sink.write(encode(worker.answer(request)))
        sink.flush()


def main(arguments: list[str]) -> None:
    """Run with the arguments of the command line: cache, bytes of memory, seconds a request."""
    cache, memory_bytes, timeout_s = arguments
    _limit_self(int(memory_bytes))
    worker = Worker(Path(cache) if cache else None, float(timeout_s))
    gc.freeze()  # forks share what is there, as long as it is not written to
    with contextlib.suppress(BrokenPipeError):
        serve(worker, sys.stdin.buffer, sys.stdout.buffer)
    worker.close()


if __name__ == "__main__":
    main(sys.argv[1:])
