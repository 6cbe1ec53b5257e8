# SPDX-License-Identifier: Apache-2.0
"""What a recorder and a process that names its windows say to each other, whatever becomes of them.

Files and processes go by their numbers, as in windows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileGiven:
    """A file that processes have mapped; its descriptor comes with it, where there is one.

    Attributes:
        binary: The file.
        root: Openable path of a root directory in which its debug files may be, or "".
    """

    binary: int
    root: str


@dataclass(frozen=True, slots=True)
class FileClosed:
    """A file that nobody maps any more."""

    binary: int


@dataclass(frozen=True, slots=True)
class CodeMaker:
    """A process that makes code.

    Attributes:
        process: The process.
        root: Openable path of its root directory, in which its perf map is.
        uid: Whom it belongs to.
    """

    process: int
    root: str
    uid: int


@dataclass(frozen=True, slots=True)
class CodeMakerGone:
    """A process that made code, and has ended."""

    process: int


@dataclass(frozen=True, slots=True)
class Windows:
    """There are more windows on disk.

    Attributes:
        count: How many more.
    """

    count: int


@dataclass(frozen=True, slots=True)
class NewestWindows:
    """A capture is made of the newest windows on disk alone.

    Attributes:
        keep_ns: Those that end so long before `end_ns` are the oldest in it.
        end_ns: Since the recording's start.
    """

    keep_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class End:
    """Nothing comes after this."""


@dataclass(frozen=True, slots=True)
class FilesMissing:
    """What the process that names has not got, for want of descriptors: it is to be told again."""

    binaries: tuple[int, ...]


OfFiles = FileGiven | FileClosed | CodeMaker | CodeMakerGone
OF_FILES = (FileGiven, FileClosed, CodeMaker, CodeMakerGone)
