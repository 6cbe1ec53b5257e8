# SPDX-License-Identifier: Apache-2.0
"""Has questions about files answered by processes without rights.

The fork server forks them (`file_reader`) when a question is asked. Files that one user can change
anyway share a parser, since one that was taken over may lie about the others; a file that several
can write to has one of its own. A parser that ends, or takes too long, is replaced, and its file
asked about once more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from aiflame.agent import priority
from aiflame.agent.file_questions import Json, Question
from aiflame.agent.inspector.child import waits_for_a_processor
from aiflame.agent.inspector.file_reader import TIMER_MARGIN_S
from aiflame.agent.inspector.fork_server import ForkRequests, Helper, NotForked, Program
from aiflame.agent.inspector.parser import BadMessage, Channel, FileGroup, group_of
from aiflame.agent.memory_file import memory_file
from aiflame.agent.target_files import MAX_BYTES, BadTargetFile, RemoteFile

# The system's files, the user's, and those of two containers.
_MAX_PARSERS = 4
# A function of 200,000 instructions; as many bytes of nothing but brackets take 30 times that.
_MAX_ANSWER_BYTES = 8 << 20
# A file that crashes one parser may have met another one's fate; two are its own doing.
_TRIES = 2
# Past its share of time at real-time priority a parser goes on as any other process.
_URGENT_S = 0.2
# It may still have to import what parsers need, 0.25 s long.
_URGENT_START_S = 1.0
# A parser that is not at work, and does not answer: it was stopped, or waits for a broken disk.
_PATIENCE_S = 2.0
_STARVED_PATIENCE_S = 30.0
_MODULE = "aiflame.agent.inspector.file_reader"
_MAIN = f"{_MODULE}:main"
# The out-of-memory killer may come twice.
_MAX_DEATHS = 4
# An agent tries again: memory may have been short.
_PAUSE_S = 60.0
# Of a file that is read for its parser: a megabyte at a time, but for its headers.
_MAX_READS = 4096

# linux/posix-timers_types.h: MAKE_PROCESS_CPUCLOCK, CPUCLOCK_SCHED
_CPUCLOCK_SCHED = 2


class NoAnswer(BadTargetFile):
    """The parsers of a file came to an end, or cannot be had."""


class NoParser(NoAnswer):
    """There was none for a moment: no room for another process, or something ended them."""


class _Fork(NamedTuple):
    """A parser, which another process has forked."""

    helper: Helper
    channel: Channel

    @property
    def pid(self) -> int:
        """Its pid."""
        return self.helper.pid

    @property
    def cpu_s(self) -> float:
        """CPU time that it has used; 0 where it has ended."""
        with contextlib.suppress(OSError):
            return time.clock_gettime(~self.pid << 3 | _CPUCLOCK_SCHED)
        return 0.0


class FileParsers:
    """The parsers of a recording or a dump. They are started when they are needed.

    Args:
        server: Forks them.
        modules: Which have the functions that questions name.
        is_urgent: Whether somebody who is urgent waits for answers.
    """

    def __init__(
        self, server: ForkRequests, modules: Sequence[str], *, is_urgent: bool = True
    ) -> None:
        self._server = server
        # The functions import capstone when they need it, which parsers cannot: they open no files.
        self._program = Program("file_reader", _MAIN, ("capstone", _MODULE, *modules))
        self._is_urgent = is_urgent
        self._by_group: OrderedDict[FileGroup, _Fork] = OrderedDict()
        self._not_before_s = 0.0

    def ask(
        self, fd: int, remote: RemoteFile | None, questions: Sequence[Question[Any]], cpu_s: float
    ) -> tuple[list[dict[str, Json]], float]:
        """Asks about a file.

        Args:
            fd: Of the file; -1 where it is not to be handed over.
            remote: What reads it then.
            questions: About it.
            cpu_s: CPU time for all.

        Returns:
            For each question either "answer", which is not checked yet, or "bad": why there is
            none. And the CPU time that all took.

        Raises:
            NoParser: Two parsers in turn came to an end, or there can be none.
            NoAnswer: It takes too long, or they got nowhere.
        """
        why = ""
        kind: type[NoAnswer] = NoAnswer
        for _ in range(_TRIES):
            fork = self._parser(None if remote is not None else group_of(fd))
            before_s, is_sound, begun_s = fork.cpu_s, False, time.monotonic()
            try:
                answers = self._asked(fork, fd, remote, questions, cpu_s)
                is_sound = True
                return answers, fork.cpu_s - before_s
            except TimeoutError:
                why, kind = "its parser got nowhere", NoAnswer
            except (EOFError, OSError):
                why, kind = "its parser ended", NoParser
            except (BadMessage, KeyError, TypeError, ValueError) as error:
                why, kind = f"its parser: {error}", NoAnswer
            finally:
                if not is_sound or fork not in self._by_group.values():
                    self._end(fork)
            if time.monotonic() - begun_s > cpu_s:
                raise NoAnswer("takes longer to read than any real file")
        raise kind(why)

    @property
    def program(self) -> Program:
        """What parsers run."""
        return self._program

    @property
    def pids(self) -> tuple[int, ...]:
        """The parsers that there are."""
        forks = self._by_group.values()
        return tuple(fork.pid for fork in forks if not fork.channel.is_readable(0))

    def distrust(self, fd: int, remote: RemoteFile | None) -> None:
        """Ends the parser of a file, which gave an answer that no sound one gives."""
        group = None if remote is not None else group_of(fd)
        if group is not None and group in self._by_group:
            self._end(self._by_group[group])

    def _asked(
        self,
        fork: _Fork,
        fd: int,
        remote: RemoteFile | None,
        questions: Sequence[Question[Any]],
        cpu_s: float,
    ) -> list[dict[str, Json]]:
        message: dict[str, Any] = {
            "cpu_s": cpu_s,
            "questions": [(question.name, question.arguments) for question in questions],
        }
        if remote is not None:
            message["file"] = (remote.size_bytes, remote.owner)
        fork.channel.send(message, () if remote is not None else (fd,))
        for _ in range(_MAX_READS):
            self._wait(fork, cpu_s + TIMER_MARGIN_S)
            answer, fds = fork.channel.receive()
            try:
                if not fds and remote is not None:
                    _read_for(fork.channel, remote, answer["read"])
                    continue
                return _answers(fds[0], len(questions))
            except IndexError:
                raise BadMessage("no answer") from None
            finally:
                for one in fds:
                    os.close(one)
        raise BadMessage("reads without end")

    def _wait(self, fork: _Fork, cpu_s: float) -> None:
        """Waits for a message, as long as the parser is at work or would like to be.

        Raises:
            TimeoutError: It is not, or takes more CPU time than its timer allows.
        """
        begun_s, before_s = time.monotonic(), fork.cpu_s
        if fork.channel.is_readable(_URGENT_S):
            return
        priority.let_wait(fork.pid)
        used_s = -1.0
        while not fork.channel.is_readable(_PATIENCE_S):
            now_s = fork.cpu_s
            is_stuck = now_s == used_s and not waits_for_a_processor(fork.pid)
            is_late = time.monotonic() - begun_s > cpu_s + _STARVED_PATIENCE_S
            if is_stuck or is_late or now_s - before_s > cpu_s:
                raise TimeoutError
            used_s = now_s

    def _parser(self, group: FileGroup | None) -> _Fork:
        """Returns the parser of a group of files; a new one for a file of its own.

        Raises:
            NoParser: There can be none.
        """
        if group is not None and group in self._by_group:
            # One that was not asked for a while has ended, which is all that it says unasked.
            if self._by_group[group].channel.is_readable(0):
                self._end(self._by_group[group])
            else:
                self._by_group.move_to_end(group)
                return self._by_group[group]
        if group is not None and len(self._by_group) == _MAX_PARSERS:
            self._end(next(iter(self._by_group.values())))
        fork = self._forked()
        if group is not None:
            self._by_group[group] = fork
        return fork

    def _forked(self) -> _Fork:
        if time.monotonic() >= self._not_before_s:
            for _ in range(_MAX_DEATHS):
                fork = self._fork()
                if fork is not None:
                    return fork
            self._not_before_s = time.monotonic() + _PAUSE_S
        raise NoParser("no parser could be started")

    def _fork(self) -> _Fork | None:
        """Returns a new parser; None where the process that forks them has ended.

        Raises:
            NoParser: There is no room for one.
        """
        with contextlib.ExitStack() as stack:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.callback(theirs.close)
                channel = Channel(ours)
                stack.callback(channel.close)
                helper = self._begun(theirs.fileno())
            except NotForked as error:
                raise NoParser(f"no parser: {error}") from error
            except OSError:
                return None
            stack.pop_all()
            theirs.close()
        if self._is_urgent:
            priority.hurry_child(helper.pid)
        return _Fork(helper, channel)

    def _begun(self, connection: int) -> Helper:
        """Returns a parser that is there.

        Args:
            connection: Its end of a channel.

        Raises:
            NotForked: There is no room for one.
            OSError: The fork server has ended, or cannot be started.
        """
        helper = self._server.run(self._program, (), (connection,))
        if self._is_urgent:
            self._server.hurry()
        try:
            is_there = helper.begins(_URGENT_START_S)
            if self._is_urgent:
                self._server.let_wait()
            if is_there or helper.begins():
                return helper
        except OSError:
            helper.close()
            raise
        helper.close()
        raise NotForked(errno.ETIMEDOUT, "the fork server does not answer")

    def _end(self, fork: _Fork) -> None:
        for group in [group for group, one in self._by_group.items() if one is fork]:
            del self._by_group[group]
        fork.channel.close()
        fork.helper.close()

    def close(self) -> None:
        """Ends all."""
        for fork in [*self._by_group.values()]:
            self._end(fork)


def _answers(fd: int, count: int) -> list[dict[str, Json]]:
    """Returns what a parser wrote.

    Raises:
        BadMessage: It is nothing of the kind.
    """
    size = os.fstat(fd).st_size
    if size > _MAX_ANSWER_BYTES:
        raise BadMessage(f"an answer of {size} bytes")
    try:
        answers = json.loads(os.pread(fd, size, 0))
    except RecursionError:
        raise BadMessage("an answer in many layers") from None
    if not isinstance(answers, list) or len(answers) != count:
        raise BadMessage("other answers than were asked for")
    for answer in answers:
        if "answer" not in answer:
            answer["bad"] = str(answer["bad"])
    return answers


def _read_for(channel: Channel, remote: RemoteFile, wanted: Sequence[int]) -> None:
    """Reads a part of a file for its parser."""
    size, offset = wanted
    if not 0 <= size <= MAX_BYTES or not 0 <= offset < 1 << 63:
        raise BadMessage("no part of a file")
    try:
        data = remote.read(size, offset)
    except OSError as error:
        channel.send({"error": error.errno or 0})
        return
    with memory_file("part") as file:
        file.write(data)
        file.seek(0)  # which writes what is buffered
        channel.send({}, [file.fileno()])
