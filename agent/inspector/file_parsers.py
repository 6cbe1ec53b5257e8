# SPDX-License-Identifier: Apache-2.0
"""Has questions about files answered by processes without rights.

One process forks them (`file_reader`), and is started when the first question is asked. Files that
one user can change anyway share a parser, since one that was taken over may lie about the others;
a file that several can write to has one of its own. A parser that ends, or takes too long, is
replaced, and its file asked about once more.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from aiflame.agent import priority
from aiflame.agent.file_questions import Json, Question
from aiflame.agent.inspector.child import ends, waits_for_a_processor
from aiflame.agent.inspector.file_reader import TIMER_MARGIN_S
from aiflame.agent.inspector.parser import BadMessage, Channel, FileGroup, group_of
from aiflame.agent.process_group import OWN_PROCESS_GROUP
from aiflame.agent.target_files import MAX_BYTES, BadTargetFile, RemoteFile

# The system's files, the user's, and those of two containers.
_MAX_PARSERS = 4
# A function of 200,000 instructions; as many bytes of nothing but brackets take 30 times that.
_MAX_ANSWER_BYTES = 8 << 20
# A file that crashes one parser may have met another one's fate; two are its own doing.
_TRIES = 2
# It imports 0.2 s long.
_STARTING_S = 30.0
# Past its share of time at real-time priority a parser goes on as any other process.
_URGENT_S = 0.2
# A parser that is not at work, and does not answer: it was stopped, or waits for a broken disk.
_PATIENCE_S = 2.0
_STARVED_PATIENCE_S = 30.0
# The out-of-memory killer may come twice.
_MAX_DEATHS = 4
# Of a file that is read for its parser: a megabyte at a time, but for its headers.
_MAX_READS = 4096

# linux/posix-timers_types.h: MAKE_PROCESS_CPUCLOCK, CPUCLOCK_SCHED
_CPUCLOCK_SCHED = 2


class NoAnswer(BadTargetFile):
    """The parsers of a file came to an end, or cannot be had."""


class _Fork(NamedTuple):
    """A parser, which another process has forked."""

    pid: int
    channel: Channel

    @property
    def cpu_s(self) -> float:
        """CPU time that it has used; 0 where it has ended."""
        with contextlib.suppress(OSError):
            return time.clock_gettime(~self.pid << 3 | _CPUCLOCK_SCHED)
        return 0.0


class FileParsers:
    """The parsers of a recording or a dump. They are started when they are needed.

    Args:
        modules: Which have the functions that questions name.
        is_urgent: Whether somebody who is urgent waits for answers.

    Attributes:
        starts: How often the process that forks them was started.
    """

    def __init__(self, modules: Sequence[str], *, is_urgent: bool = True) -> None:
        self._modules = tuple(modules)
        self._is_urgent = is_urgent
        self._process: subprocess.Popen[bytes] | None = None
        self._forks: Channel | None = None
        self._by_group: OrderedDict[FileGroup, _Fork] = OrderedDict()
        self._deaths = 0
        self.starts = 0

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
            NoAnswer: Two parsers in turn came to an end, or there can be none.
        """
        why = ""
        for _ in range(_TRIES):
            fork = self._parser(None if remote is not None else group_of(fd))
            before_s, is_sound, begun_s = fork.cpu_s, False, time.monotonic()
            try:
                answers = self._asked(fork, fd, remote, questions, cpu_s)
                is_sound = True
                return answers, fork.cpu_s - before_s
            except TimeoutError:
                why = "its parser got nowhere"
            except (EOFError, OSError):
                why = "its parser ended"
            except (BadMessage, KeyError, TypeError, ValueError) as error:
                why = f"its parser: {error}"
            finally:
                if not is_sound or fork not in self._by_group.values():
                    self._end(fork)
            if time.monotonic() - begun_s > cpu_s:
                raise NoAnswer("takes longer to read than any real file")
        raise NoAnswer(why)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that there are: parsers, and the one that forks them."""
        forks = () if self._process is None else (self._process.pid,)
        return (*forks, *(fork.pid for fork in self._by_group.values()))

    def expect(self) -> None:
        """Starts the process that forks parsers, if it is not there; waits for nothing."""
        if self._forks is None:
            with contextlib.suppress(OSError):  # then it is tried again once it is needed
                self._forks = self._start()

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
            NoAnswer: There can be none.
        """
        if group is not None and group in self._by_group:
            self._by_group.move_to_end(group)
            return self._by_group[group]
        if group is not None and len(self._by_group) == _MAX_PARSERS:
            self._end(next(iter(self._by_group.values())))
        fork = self._forked()
        if group is not None:
            self._by_group[group] = fork
        return fork

    def _forked(self) -> _Fork:
        while self._deaths < _MAX_DEATHS:
            fork = self._fork()
            if fork is not None:
                return fork
        raise NoAnswer("no parser could be started")

    def _fork(self) -> _Fork | None:
        """Returns a new parser; None where the process that forks them has ended.

        Raises:
            NoAnswer: There is no room for one.
        """
        try:
            if self._forks is None:
                self._forks = self._start()
            self._forks.send({"start": True})
            if not self._forks.is_readable(_URGENT_S):
                self._let_wait()
                if not self._forks.is_readable(_STARTING_S):
                    raise TimeoutError
            message, fds = self._forks.receive()
        except (OSError, EOFError, BadMessage):
            self._deaths += not self._has_ended_well()
            self._leave()
            return None
        if not fds:
            raise NoAnswer(f"no parser: {message['error']}")
        fork = _Fork(int(message["pid"]), Channel(socket.socket(fileno=fds[0])))
        if self._is_urgent:
            priority.hurry_child(fork.pid)
        return fork

    def _let_wait(self) -> None:
        """Makes the process that forks an ordinary one: on a slow processor its imports take long.

        The limit on being real-time at a stretch, which children have from the recorder, would end
        it. Its parsers are made urgent one by one.
        """
        if self._process is not None and self._is_urgent:
            priority.let_wait(self._process.pid)

    def _start(self) -> Channel:
        self.starts += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            words = ["-m", "aiflame.agent.inspector.file_reader", str(theirs.fileno())]
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, *words, *self._modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd="/",  # `python -m` puts the working directory first on the module path
                # One thread, so that it may fork; numpy would start one per CPU.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                **OWN_PROCESS_GROUP,  # Ctrl-C is for the recorder
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        if self._is_urgent:
            priority.hurry_child(self._process.pid)
        return Channel(ours)

    def _has_ended_well(self) -> bool:
        """Whether the process that forks has ended for want of questions."""
        if self._process is None or not ends(self._process.pid):
            return False
        return self._process.wait() == 0

    def _end(self, fork: _Fork) -> None:
        for group in [group for group, one in self._by_group.items() if one is fork]:
            del self._by_group[group]
        fork.channel.close()
        if self._forks is not None:
            with contextlib.suppress(OSError):
                self._forks.send({"end": fork.pid})

    def _leave(self) -> None:
        """Ends the process that forks, and with it all parsers."""
        for fork in self._by_group.values():
            fork.channel.close()
        self._by_group.clear()
        if self._forks is not None:
            self._forks.close()
            self._forks = None
        if self._process is not None:
            # It ends its parsers, so that their CPU time counts.
            if not ends(self._process.pid):
                self._process.kill()
            if ends(self._process.pid):
                self._process.wait()
            self._process = None

    def close(self) -> None:
        """Ends all."""
        self._leave()


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
    with os.fdopen(os.memfd_create("part", os.MFD_CLOEXEC), "w+b") as file:
        file.write(data)
        file.seek(0)  # which writes what is buffered
        channel.send({}, [file.fileno()])
