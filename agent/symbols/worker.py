# SPDX-License-Identifier: Apache-2.0
"""The symbol worker: opens files of targets, and has each read by a process without rights.

Started by `service`, in a fork of the fork server or as `python -m aiflame.agent.symbols.worker
CACHE MEMORY_BYTES TIMEOUT_S [DATA_BYTES]`; requests come on standard input, answers go to standard
output (`protocol`). A parser (`inspector.parser`) gets the binary as a descriptor and asks for all
else: candidates for a debug file, and files of the cache, all of whose names hold a digest of the
binary and the candidates. It writes to the cache only what it made of copies, which have the bytes
of that digest and no others (`elf.contents`). This process takes digests and checksums of files,
and makes nothing else of their bytes: even what their headers say a parser tells it (`outline`).

A parser has a limit of its address space, with DATA_BYTES one of memory of its own, and a timer
that ends it when it takes too much CPU time. When one dies, so does the worker, in the same way:
`service` starts another. It ends when its standard input does, or when the recorder dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from aiflame.agent.demangle import Demangler
from aiflame.agent.elf.contents import Contents
from aiflame.agent.inspector.parser import (
    BadMessage,
    Channel,
    Parser,
    Parsers,
    contents,
    end_as,
    group_of,
)
from aiflame.agent.limits import limit_self, more_memory
from aiflame.agent.losses import LossKind
from aiflame.agent.memory_file import memory_file
from aiflame.agent.process_group import leave_signals_to_recorder
from aiflame.agent.symbols.debugfiles import Candidate
from aiflame.agent.symbols.frames import Problem, RawFrame, Resolved, clean_name
from aiflame.agent.symbols.known import KnownTables, file_key, is_settled, known_directory
from aiflame.agent.symbols.outline import Outline, checked, read_outline
from aiflame.agent.symbols.perfmap import BadPerfMap, PerfMap, open_perf_map
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
from aiflame.agent.symbols.resolve import DirectAccess, LoadedTables, Resolver, readable
from aiflame.agent.symbols.store import Store
from aiflame.agent.target_files import BadTargetFile, TargetFile

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# What a parser may ask for.
_CACHE_NAME = re.compile(r"([0-9a-fx-]{1,80})(\.[a-z]{1,16}[0-9]{0,4})")
# Two roots with four locations each.
_MAX_CANDIDATES = 8
# A symbol table is as large as the names in the binary, a line table as 512 MB at most.
_MAX_CACHE_FILE_BYTES = 1 << 30
# Real binaries take four.
_MAX_QUESTIONS = 64

# A mapped table keeps a descriptor, and one that an error refers to stays until it is collected.
# A parser may have 64, and a request takes two or three.
_COLLECT_REQUESTS = 8
# Of binaries whose tables a parser has at hand: each keeps such a descriptor, and all together 2 MB
# of memory and half of the address space. Tables of lines are copies, of up to 500 MB.
_MAX_TABLES, _MAX_OWN_BYTES, _MAX_MAPPED_BYTES = 16, 1 << 17, 1 << 27

_DIGEST_CHARACTERS = 32
# A PyTorch process has some 150 binaries, a host a few thousand. Real ones have a dozen parts: all
# together take 10 MB.
_MAX_OUTLINES, _MAX_KEPT_PARTS = 1 << 12, 32
# What this process reads itself of a file: 1.5 GB for a digest, and the same for a copy.
_MAX_FILE_BYTES = 4 << 30


class _Again(Exception):
    """The files are to be read once more, as copies: what is made of them is not in the cache."""


class _RemoteStore:
    """The cache, as a parser has it: each file is handed over by the other side."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def open(self, name: str) -> mmap.mmap | None:
        """As `Store.open`.

        Raises:
            _Again: It is not there, and could not be stored.
        """
        self._channel.send({"ask": "open", "name": name})
        message, fds = self._channel.receive()
        if "again" in message:
            raise _Again
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
    """All that a parser can reach: one binary, and what it may ask for.

    Args:
        channel: To the other side.
        fd: Of the binary.
        inside: Its path inside the target's root.
        identity: As of `Access`.
    """

    def __init__(self, channel: Channel, fd: int, inside: str, identity: str) -> None:
        self.identity = identity
        self.store = _RemoteStore(channel)
        self._channel = channel
        self._fd: int | None = fd
        self._inside = inside
        self._given: list[Candidate] = []

    def open(self, path: str) -> int:
        """The binary, whatever the path; once, and it is whoever opens it who closes it."""
        fd, self._fd = self._fd, None
        if fd is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return fd

    def close(self) -> None:
        """Closes the binary, if nobody has opened it."""
        if self._fd is not None:
            os.close(self._fd)

    def path_inside(self, path: str) -> str:
        """Its path inside the target's root."""
        return self._inside

    def candidates(
        self, build_id: str, link: str, inside: str, root_path: str
    ) -> Iterator[Candidate]:
        """As `open_candidates`, which the other side has done."""
        self._channel.send({"ask": "debug"})
        message, fds = self._channel.receive()
        self._given = [
            Candidate(path, is_linked, fd)
            for (path, is_linked), fd in zip(message["found"], fds, strict=True)
        ]
        left = deque(self._given)
        try:
            while left:
                yield left.popleft()
        finally:  # the first that is right is the last that is asked for
            for candidate in left:
                os.close(candidate.fd)

    def checksum(self, candidate: Candidate) -> int:
        """CRC-32 of a candidate."""
        self._channel.send({"ask": "checksum", "at": self._given.index(candidate)})
        return int(self._channel.receive()[0]["crc"])


def _parse(channel: Channel, timeout_s: float) -> None:
    """What a parser does: answers each request that it is sent with a binary."""
    tables = LoadedTables(_MAX_TABLES, _MAX_OWN_BYTES, _MAX_MAPPED_BYTES)
    for number in itertools.count(1):
        if number % _COLLECT_REQUESTS == 0:
            gc.collect()
        question, (fd, *texts) = channel.receive()
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        if not texts:
            found = read_outline(fd, "symbols")
            os.close(fd)
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.send(found)
            continue
        with os.fdopen(texts[0], "rb") as file:
            request = json.loads(file.read())
        if request["perf_map_uid"] is None:
            inside, identity = str(question["inside"]), str(question["digest"])
            try:
                with closing(_RemoteAccess(channel, fd, inside, identity)) as access:
                    answer = _parsed(access, request, tables)
            except _Again:
                gc.collect()  # what refers to descriptors
                continue
        else:
            answer = _generated(fd, request)
            os.close(fd)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        with _in_memory(answer) as file:
            channel.send({"ask": "done"}, [file.fileno()])


def _parsed(access: _RemoteAccess, request: dict[str, Any], tables: LoadedTables) -> dict[str, Any]:
    resolver = Resolver(access, tables=tables if access.identity else None)
    path, root, plain = request["path"], request["root"], request["plain"]
    answer: dict[str, Any] = {}
    if request["addresses"] is None:
        resolver.prepare(path, root, plain=plain)
    else:
        addresses = np.array(request["addresses"], dtype=np.uint64)
        answer = pack_raw(resolver.resolve(path, root, addresses, plain=plain))
    answer["problems"] = pack_problems(resolver.problems)
    return answer


def _generated(fd: int, request: dict[str, Any]) -> dict[str, Any]:
    perf_map = PerfMap.read(fd)
    addresses = np.array(request["addresses"], dtype=np.uint64)
    names = perf_map.lookup(addresses)
    found = Resolved.nothing(len(names))
    for at, name in enumerate(names):
        if name is not None:
            found.chains[at] = (RawFrame(name, "", 0),)
    answer = pack_raw(found)
    is_cut = perf_map.malformed_lines or perf_map.skipped_bytes
    problems = [Problem(LossKind.PERF_MAP_CUT, request["path"])] if is_cut else []
    answer["problems"] = pack_problems(problems)
    return answer


def _in_memory(message: dict[str, Any]) -> BinaryIO:
    """Returns a file in memory that holds a message, to be read from its beginning."""
    file = memory_file("message")
    file.write(json.dumps(message, separators=(",", ":")).encode())
    file.seek(0)  # which writes what is buffered
    return file


class _Remembered:
    """What was found out of files that stay as they are, the latest: outlines and digests.

    A parser may have been taken over, and names the debug files that it is asked about: it is
    believed for those files alone that it is for.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Hashable, str], tuple[Outline, str]] = OrderedDict()

    def outline(self, of: Hashable, key: str) -> Outline | None:
        """Returns what a parser said of a file.

        Args:
            of: Whose files it is for.
            key: Of the file.
        """
        return self._known[of, key][0] if (of, key) in self._known else None

    def digest(self, of: Hashable, key: str) -> str:
        """Returns the digest of the parts that it named, "" where that was not taken."""
        return self._known[of, key][1] if (of, key) in self._known else ""

    def keep(self, of: Hashable, key: str, outline: Outline, digest: str = "") -> None:
        """Keeps that."""
        parts = () if outline.contents is None else outline.contents.parts
        if len(parts) <= _MAX_KEPT_PARTS:
            self._known[of, key] = outline, digest
            if len(self._known) > _MAX_OUTLINES:
                self._known.popitem(last=False)


class _Files:
    """A binary and what may be its debug files, as their parser gets them.

    Args:
        access: Opens files.
        parser: Reads what they are.
        known: Digests of files that were read before.
        remembered: What was found out of files before.
        copies: Whether the parser gets copies in any case.
        fd: Of the binary.
        inside: Its path inside the target's root.
        root_path: Of that root.

    Attributes:
        handed: What the parser reads of each: the binary, then the candidates.
        candidates: The files themselves.
        digest: Of all of them; "" where one is too large or damaged, and nothing is cached.
        are_copies: Whether the parser's files are copies, so that what it makes may be stored.
        are_tiny: Whether that is not worth it.
        problems: What is no debug file.
    """

    def __init__(
        self,
        access: DirectAccess,
        parser: Parser,
        known: KnownTables,
        remembered: _Remembered,
        copies: bool,
        fd: int,
        inside: str,
        root_path: str,
    ) -> None:
        self._access = access
        self._parser = parser
        self._known = known
        self._remembered = remembered
        self._copies = copies
        self._own_fd = fd
        self._group = group_of(fd)
        # A parser of one file alone is believed of that.
        self._of: Hashable = self._group or file_key(os.fstat(fd))
        self._outlines: dict[int, Outline] = {}
        self.handed = [fd]
        self.candidates: list[Candidate] = []
        self.digest = ""
        self.are_copies = self.are_tiny = False
        self.problems: list[Problem] = []
        self._stack = contextlib.ExitStack()
        try:
            self._find(fd, inside, root_path)
        except (BadTargetFile, OSError):  # its parser will say why
            return
        except BaseException:  # whatever ends it, its descriptors are closed
            self._stack.close()
            raise

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _find(self, fd: int, inside: str, root_path: str) -> None:
        own = self._outline(fd)
        if not own.is_complete:
            found = self._access.candidates(own.build_id, own.debuglink, inside, root_path)
            for candidate in found:
                self._stack.callback(os.close, candidate.fd)
                self._add(candidate)
        fds = [fd, *(candidate.fd for candidate in self.candidates)]
        self.handed = fds
        digest = "" if self._copies else self._held(own.build_id, fds)
        if not digest:
            copies = [self._copied(one) for one in fds]
            digest = _joined(digest for _, digest in copies)
            self.handed = [copy for copy, _ in copies]
            self.are_copies = True
        self.digest = digest
        self.are_tiny = all(self._parts(one)[1].is_tiny for one in fds)

    def _held(self, build_id: str, fds: Sequence[int]) -> str:
        """Returns the digest of files of which there are tables in the cache, else ""."""
        store = self._access.store
        if not store.usable:
            return ""
        known = [self._known_digest(fd) for fd in fds]
        if all(known):  # there were some; where they are gone, their parser asks for them in vain
            return _joined(known)
        if all(self._parts(fd)[1].is_small for fd in fds):
            return ""
        # Where nothing begins with its build id, a digest alone would be taken in vain.
        if build_id and not store.holds(build_id[:40]):
            return ""
        digest = _joined(self._digest(fd) for fd in fds)
        return digest if store.holds(digest) else ""

    def _add(self, candidate: Candidate) -> None:
        # A name in a link may be that of any file beside the binary.
        try:
            self._outline(candidate.fd)
        except BadTargetFile as error:
            words = clean_name(f"{candidate.path}: {error}")
            self.problems.append(Problem(LossKind.BAD_DEBUG_FILE, words))
            return
        if len(self.candidates) < _MAX_CANDIDATES:
            self.candidates.append(candidate)

    def _outline(self, fd: int) -> Outline:
        """Returns what the parser says of a file.

        Raises:
            BadTargetFile: It is damaged.
        """
        if fd not in self._outlines:
            before = os.fstat(fd)
            found = self._remembered.outline(self._of, file_key(before))
            if found is None:
                found = self._asked(fd)
                if is_settled(before, fd):
                    self._remembered.keep(self._of, file_key(before), found)
            self._outlines[fd] = found
        return self._outlines[fd]

    def _is_own(self, fd: int) -> bool:
        """Whether a file is one of those that its parser is for."""
        if fd == self._own_fd:
            return True
        return self._group is not None and group_of(fd) == self._group

    def _known_digest(self, fd: int) -> str:
        return self._known.name(fd) or self._remembered.digest(self._of, file_key(os.fstat(fd)))

    def _keep(self, before: os.stat_result, fd: int, digest: str) -> None:
        if self._is_own(fd):  # else it is of what another's parser says of it
            self._known.keep(before, fd, digest)
        elif is_settled(before, fd):
            self._remembered.keep(self._of, file_key(before), self._outline(fd), digest)

    def _asked(self, fd: int) -> Outline:
        self._parser.channel.send({}, [fd])
        answer, fds = self._parser.channel.receive()
        for one in fds:
            os.close(one)
        return checked(answer, os.fstat(fd).st_size)

    def _parts(self, fd: int) -> tuple[TargetFile, Contents]:
        parts = self._outline(fd).contents
        if parts is None:
            raise BadTargetFile("more to read than any real file has")
        return TargetFile(fd, max_bytes=_MAX_FILE_BYTES), parts

    def _digest(self, fd: int) -> str:
        digest = self._known_digest(fd)
        if not digest:
            before = os.fstat(fd)
            file, parts = self._parts(fd)
            digest = parts.digest(file).hex()
            self._keep(before, fd, digest)
        return digest

    def _copied(self, fd: int) -> tuple[int, str]:
        before = os.fstat(fd)
        file, parts = self._parts(fd)
        copy, digest = parts.copied(file)
        self._stack.callback(os.close, copy)
        if not parts.is_tiny:  # it is copied again as fast as that is looked up
            self._keep(before, fd, digest.hex())
        return copy, digest.hex()


def _joined(digests: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:_DIGEST_CHARACTERS]


class _Opener:
    """Answers the questions of one parser.

    Args:
        access: Has the cache.
        files: What the parser has, and may have.
        may_store: Whether what it makes is stored.

    Attributes:
        is_in_vain: Whether the parser was told to wait for copies of its files.
    """

    def __init__(self, access: DirectAccess, files: _Files, *, may_store: bool) -> None:
        self._access = access
        self._store: Store = access.store
        self._files = files
        self._may_store = may_store
        self.is_in_vain = False

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

    def _debug(self, channel: Channel, _: dict[str, Any], __: list[int]) -> None:
        found = [candidate[:2] for candidate in self._files.candidates]
        channel.send({"found": found}, self._files.handed[1:])

    def _checksum(self, channel: Channel, message: dict[str, Any], _: list[int]) -> None:
        candidate = self._files.candidates[int(message["at"])]
        channel.send({"crc": self._access.checksum(candidate)})

    def _name(self, message: dict[str, Any]) -> str:
        """Returns how a file of the cache is called: no binary can reach another's."""
        found = _CACHE_NAME.fullmatch(str(message["name"]))
        if found is None:
            raise BadMessage("no name of a cache file")
        return f"{found[1]}-{self._files.digest}{found[2]}"

    def _open(self, channel: Channel, message: dict[str, Any], _: list[int]) -> None:
        name = self._name(message)
        fd = self._store.descriptor(name) if self._files.digest else None
        if fd is None and self._files.digest and not self._files.are_copies:
            self.is_in_vain = True  # what it would make could not be stored
            channel.send({"again": True})
            return
        channel.send({}, [] if fd is None else [fd])
        if fd is not None:
            os.close(fd)

    def _write(self, channel: Channel, message: dict[str, Any], fds: list[int]) -> None:
        name, is_written = self._name(message), False
        if self._files.digest and self._may_store:
            is_written = self._store.write(name, contents(fds[0], _MAX_CACHE_FILE_BYTES))
        channel.send({"written": is_written})

    def _remove(self, channel: Channel, message: dict[str, Any], _: list[int]) -> None:
        self._store.remove(self._name(message))
        channel.send({})


class Worker:
    """Answers requests.

    Args:
        cache: Directory for finished tables; None for none.
        timeout_s: CPU seconds that one binary may take.
    """

    def __init__(self, cache: Path | None, timeout_s: float) -> None:
        self._access = DirectAccess(cache)
        self._known = KnownTables(known_directory("symbols"))
        self._remembered = _Remembered()
        self._made: OrderedDict[str, None] = OrderedDict()  # digests of what was made
        self._demangler = Demangler(forks=True)
        self._parse = partial(_parse, timeout_s=timeout_s)
        self._parsers = Parsers(self._parse)
        self._peak_rss_bytes = 0

    def close(self) -> None:
        """Ends what it has started, whose CPU time is then its own."""
        self._parsers.close()
        self._demangler.close()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a request; the process ends where its parser does."""
        path = request["path"]
        addresses = request["addresses"] or ()
        try:
            fd = self._opened(request)
        except OSError as error:
            words = clean_name(f"{path}: {error.strerror}")
            problem = Problem(LossKind.UNREADABLE_BINARY, words)
            return self._reply(request, Resolved.nothing(len(addresses)), [problem])
        except BadPerfMap as error:
            problem = Problem(LossKind.PERF_MAP_REFUSED, clean_name(str(error)))
            return self._reply(request, Resolved.nothing(len(addresses)), [problem])
        if fd is None:
            return self._reply(request, Resolved.nothing(len(addresses)), [])
        try:
            answer = self._parsed(request, fd)
        except (BadMessage, IndexError, KeyError, TypeError, ValueError) as error:
            sys.exit(f"its parser: {error}")
        finally:
            os.close(fd)
        resolved = unpack_raw(answer, addresses) if addresses else Resolved.nothing(0)
        return self._reply(request, resolved, unpack_problems(answer))

    def _opened(self, request: dict[str, Any]) -> int | None:
        """Opens a binary, or a perf map; returns None where there is no map."""
        if request["perf_map_uid"] is None:
            return self._access.open(request["path"])
        return open_perf_map(request["root"], request["path"], int(request["perf_map_uid"]))

    def _parsed(self, request: dict[str, Any], fd: int) -> dict[str, Any]:
        """Has a binary parsed; returns what its parser answers."""
        inside, root = self._access.path_inside(request["path"]), str(request["root"])
        with self._parsers.of(fd) as parser:
            try:
                for copies in (False, True):
                    known = self._known, self._remembered
                    with _Files(self._access, parser, *known, copies, fd, inside, root) as files:
                        answer = self._parsed_by(parser, request, files, inside)
                    if answer is not None:
                        answer["problems"] += pack_problems(files.problems)
                        return answer
            except (EOFError, ConnectionError):
                end_as(parser.end() or 1)
        raise BadMessage("copies that are none")

    def _parsed_by(
        self, parser: Parser, request: dict[str, Any], files: _Files, inside: str
    ) -> dict[str, Any] | None:
        """Has files parsed; returns None where their parser waits for copies.

        What is stored is for whoever has the same bytes, also another user: it is made by a parser
        that has seen no others.
        """
        fresh = self._fresh(files)
        if fresh is None:
            return self._answer_of(parser, request, files, inside, may_store=False)
        with fresh:
            try:
                answer = self._answer_of(fresh, request, files, inside, may_store=True)
            except (EOFError, ConnectionError):
                end_as(fresh.end() or 1)
        self._made[files.digest] = None
        if len(self._made) > _MAX_OUTLINES:
            self._made.popitem(last=False)
        return answer

    def _fresh(self, files: _Files) -> Parser | None:
        """Returns a parser whose tables are stored; None where there are to be none, or no room."""
        if not files.are_copies or files.are_tiny or not self._access.store.usable:
            return None
        if files.digest in self._made:
            return None
        with contextlib.suppress(OSError):
            return Parser(self._parse)
        return None

    def _answer_of(
        self,
        parser: Parser,
        request: dict[str, Any],
        files: _Files,
        inside: str,
        *,
        may_store: bool,
    ) -> dict[str, Any] | None:
        """Returns what a parser answers in the end; None where it waits for copies."""
        opener = _Opener(self._access, files, may_store=may_store)
        with _in_memory(request) as text:
            question = {"inside": inside, "digest": files.digest}
            parser.channel.send(question, [files.handed[0], text.fileno()])
        for _ in range(_MAX_QUESTIONS):
            answer = self._answered(parser, opener)
            if answer is not None or opener.is_in_vain:
                return answer
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
        self._peak_rss_bytes = max(self._peak_rss_bytes, int(answer["peak_rss_bytes"]))
        return answer

    def _reply(
        self, request: dict[str, Any], resolved: Resolved, problems: list[Problem]
    ) -> dict[str, Any]:
        reply: dict[str, Any] = {}
        if request["addresses"] is not None:
            is_plain = request["plain"] or request["perf_map_uid"] is not None
            demangler = None if is_plain else self._demangler
            reply = pack_frames(readable(resolved.chains, demangler))
            reply["ranges"] = resolved.ranges
            if demangler is not None and demangler.failures:
                path = clean_name(request["path"])
                problems.append(Problem(LossKind.NAMES_NOT_DEMANGLED, path))
        reply["id"] = request["id"]
        reply["problems"] = pack_problems(problems)
        reply["peak_rss_bytes"] = self._peak_rss_bytes
        return reply


def _limit_self(memory_bytes: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    limit_self((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0))
    leave_signals_to_recorder()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it must end a parser wherever it hangs


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
    cache, memory_bytes, timeout_s, *data_bytes = arguments
    _limit_self(int(memory_bytes))
    limit_self(*(more_memory(int(limit)) for limit in data_bytes))
    worker = Worker(Path(cache) if cache else None, float(timeout_s))
    gc.freeze()  # forks share what is there, as long as it is not written to
    with contextlib.suppress(BrokenPipeError):
        serve(worker, sys.stdin.buffer, sys.stdout.buffer)
    worker.close()


if __name__ == "__main__":
    main(sys.argv[1:])
