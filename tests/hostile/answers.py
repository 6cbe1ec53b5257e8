# SPDX-License-Identifier: Apache-2.0
"""What files may make of the parsers that read them: each stands for a file that took one over."""

from __future__ import annotations

import errno
import os
import socket
import threading

from aiflame.agent.file_questions import Json
from aiflame.agent.target_files import BadTargetFile, TargetFile


def first_byte(file: TargetFile) -> Json:
    """Answers, as a sound parser does."""
    return file.read(1, 0).decode("latin-1")


def who(file: TargetFile) -> Json:
    """Tells which parser this is."""
    return os.getpid()


def crash(file: TargetFile) -> Json:
    """Ends its parser if the file says so."""
    if file.read(5, 0) == b"crash":
        os._exit(1)
    return "sound"


def spin(file: TargetFile) -> Json:
    """Computes without end, and never looks at the clock."""
    while True:
        pass


def sleep(file: TargetFile) -> Json:
    """Waits for what never comes."""
    lock = threading.Lock()
    while True:
        lock.acquire()


def bloat(file: TargetFile) -> Json:
    """Takes more memory than there is."""
    return len(bytes(1 << 40))


def refuse(file: TargetFile) -> Json:
    """Finds a file damaged."""
    raise BadTargetFile("damaged")


def lie(file: TargetFile, *answer: Json) -> Json:
    """Answers what it is told."""
    return answer[0]


def reach(file: TargetFile) -> Json:
    """Tries what a parser has no business with; tells what it could do."""
    could = []
    for name, attempt in {
        "open": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "fork": os.fork,
        "connect": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "kill": lambda: os.kill(os.getppid(), 0),
    }.items():
        try:
            attempt()
        except OSError as error:
            if error.errno == errno.EPERM:
                continue
        could.append(name)
    return could
