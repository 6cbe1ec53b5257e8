# SPDX-License-Identifier: Apache-2.0
"""What is known of files of targets: asked of parsers without rights, each question once a boot.

Answers are kept beside the digests of `known`, under the same terms: they belong to a file by its
device, inode, length and times, so that whoever can make them wrong owns that very file. A small
file that several can write to, or that was made just now (the vDSO), is copied, and its answers are
kept under a digest of the copy, which a parser gets that sees nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from aiflame.agent.file_questions import BadAnswer, Json, Question
from aiflame.agent.inspector.file_parsers import FileParsers, NoAnswer, NoParser
from aiflame.agent.inspector.fork_server import ForkRequests, Program
from aiflame.agent.inspector.parser import group_of
from aiflame.agent.inspector.rootfs import is_local
from aiflame.agent.symbols.known import Known, file_key, is_settled, known_directory
from aiflame.agent.target_files import MAX_CPU_S, FileGuard, TargetFile

T = TypeVar("T")

# Goes up whenever a question has another answer for the same bytes.
_FORMAT = 4
# Some 2,500 files: most take a page, a library of CUDA's with all its functions 60,000 bytes.
_MAX_BYTES = 12 << 20
_MAX_FILE_BYTES = 256 << 10
# Files whose answers are at hand: each is asked about three times in a row.
_RECENT_FILES = 16
# Of one file: a kernel may have as many functions that are sampled.
_MAX_KEPT = 1024
# The instructions of a kernel of a thousand lines.
_MAX_ANSWER_CHARACTERS = 128 << 10
# Of files that are told by their contents: a vDSO has 8 KB.
_MAX_COPIED_BYTES = 64 << 10

# The functions that questions name are in these, and what they need: parsers can import nothing.
# By name, since they know this module or are above it.
_MODULES = (
    "aiflame.agent.elf.dynamic",
    "aiflame.agent.elf.headers",
    "aiflame.agent.elf.functions",
    "aiflame.agent.injection.questions",
    "aiflame.agent.python.questions",
    "aiflame.agent.launches.questions",
    "aiflame.agent.unwind.questions",
    "aiflame.gpu.nvidia.cubin",
    "aiflame.gpu.nvidia.fatbin",
    "aiflame.gpu.opencl.disassembly",
    "aiflame.gpu.opencl.kernel_file",
)


class FileFacts:
    """Answers questions about files. Its parsers are started when an answer is not known yet.

    Args:
        server: Forks these; closing it stays the caller's.
        guard: Has the files that must not be read here, and is told of bad ones.
        standard: What is asked about each file once one question about it is.
        directory: Where answers are kept, None for nowhere.
        is_urgent: Whether the recorder waits for answers.

    Attributes:
        guard: Keeps account of the files.
        server: As given.
        unanswered: Descriptors of files about which nobody could be asked for a moment: that there
            was no answer says nothing of them.
    """

    def __init__(
        self,
        server: ForkRequests,
        guard: FileGuard,
        standard: Sequence[Question[Any]] = (),
        directory: Path | None = None,
        *,
        is_urgent: bool = True,
    ) -> None:
        self.guard = guard
        self.server = server
        self._standard = tuple(standard)
        self._parsers = FileParsers(server, _MODULES, is_urgent=is_urgent)
        self._known = Known(directory, _MAX_BYTES, _MAX_FILE_BYTES)
        self._recent: OrderedDict[str, dict[str, Json]] = OrderedDict()
        self.unanswered: set[int] = set()

    @property
    def program(self) -> Program:
        """What parsers run."""
        return self._parsers.program

    @property
    def pids(self) -> tuple[int, ...]:
        """The parsers that there are."""
        return self._parsers.pids

    def ask(self, path: str, fd: int, question: Question[T]) -> T | None:
        """Answers a question about a file; None where that is bad, which the guard is told.

        Args:
            path: What the file is called, for the user.
            fd: Of the file.
            question: The question.
        """
        try:
            return self._answer(path, fd, question)
        except OSError as error:  # of the file, or there is no room for another descriptor
            self.unanswered.add(fd)
            self.guard.blame(path, f"cannot read: {error.strerror}")
        return None

    def _answer(self, path: str, fd: int, question: Question[T]) -> T | None:
        if fd in self.guard.remote:
            return self._asked(path, fd, fd, question, {})
        with contextlib.ExitStack() as stack:
            copy = _copy(fd)
            name = _name(fd) if copy is None else _digest(copy)
            known = self._answers(name) if name else {}
            with contextlib.suppress(BadAnswer, KeyError):
                return question.checked(known[question.key])
            known.pop(question.key, None)  # of another version of this program
            known_before = len(known)
            read_fd = fd
            if copy is not None:
                read_fd = os.memfd_create("copy", os.MFD_CLOEXEC)
                stack.callback(os.close, read_fd)
                os.write(read_fd, copy)
            before = os.fstat(read_fd)
            found = self._asked(path, fd, read_fd, question, known)
            if len(known) > known_before and (copy is not None or is_settled(before, read_fd)):
                # The process that names stacks asks about the same files meanwhile.
                every = {**self._kept(name), **known}
                self._known.keep(name, json.dumps([_FORMAT, every], separators=(",", ":")))
            return found

    def _answers(self, name: str) -> dict[str, Json]:
        """Returns what is known of a file."""
        if name not in self._recent:
            self._recent[name] = self._kept(name)
            if len(self._recent) > _RECENT_FILES:
                self._recent.popitem(last=False)
        self._recent.move_to_end(name)
        return self._recent[name]

    def _kept(self, name: str) -> dict[str, Json]:
        with contextlib.suppress(ValueError, TypeError):
            version, known = json.loads(self._known.text(name))
            if version == _FORMAT and isinstance(known, dict):
                return known
        return {}

    def _asked(
        self, path: str, fd: int, read_fd: int, question: Question[T], known: dict[str, Json]
    ) -> T | None:
        """Has a question answered, and the standard ones with it.

        Args:
            path: What the file is called.
            fd: Of the file.
            read_fd: The same, or of a copy, which is read.
            question: The question.
            known: Is filled in.
        """
        remote = self.guard.remote.get(fd)
        owner = TargetFile(read_fd, remote).owner
        standard = [one for one in self._standard if one.key not in {question.key, *known}]
        questions: list[Question[Any]] = [question, *standard]
        cpu_s = self.guard.allowance_s(owner)
        try:
            answers, used_s = self._parsers.ask(read_fd, remote, questions, cpu_s)
        except NoAnswer as error:
            # Others of its owner may have left it less time than a file has.
            if isinstance(error, NoParser) or cpu_s < MAX_CPU_S:
                self.unanswered.add(fd)
            self.guard.charge(owner, cpu_s)
            self.guard.blame(path, str(error))
            return None
        self.guard.charge(owner, used_s)
        found: T | None = None
        for one, answer in zip(questions, answers, strict=True):
            if "bad" in answer:
                self.guard.blame(path, answer["bad"])
                continue
            try:
                checked = one.checked(answer["answer"])
            except BadAnswer as error:
                self._parsers.distrust(read_fd, remote)
                self.guard.blame(path, str(error))
                continue
            if one is question:
                found = checked
            if one.is_kept and len(known) < _MAX_KEPT and _is_small(answer["answer"]):
                known[one.key] = answer["answer"]
        return found

    def close(self) -> None:
        """Ends the parsers."""
        self._parsers.close()


def facts_for_names(server: ForkRequests) -> FileFacts:
    """Returns who answers a process that names stacks: nobody waits for that."""
    return FileFacts(server, FileGuard(), (), facts_directory(), is_urgent=False)


def facts_directory() -> Path | None:
    """Where answers are kept; None for nowhere."""
    return known_directory("facts")


def _is_small(answer: Json) -> bool:
    return len(json.dumps(answer, separators=(",", ":"))) <= _MAX_ANSWER_CHARACTERS


def _copy(fd: int) -> bytes | None:
    """Returns the bytes of a small file that is not told by its times; None for all others."""
    size = os.fstat(fd).st_size
    if size > _MAX_COPIED_BYTES or not is_local(fd) or group_of(fd) is not None:
        return None
    return os.pread(fd, size, 0)


def _name(fd: int) -> str:
    """Returns what a file is told by; "" for one of another user's file system."""
    return file_key(os.fstat(fd)) if is_local(fd) else ""


def _digest(data: bytes) -> str:
    return f"x-{hashlib.sha256(data).hexdigest()}"
