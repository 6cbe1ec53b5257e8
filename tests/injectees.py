# SPDX-License-Identifier: Apache-2.0
"""Programs into which libraries are loaded, and which notice whatever that changes for them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

# Of workloads/injected.c.
LIBRARY_FLAGS = ("-shared", "-fPIC", "-Wl,--build-id=sha1")


class Program:
    """A program that is injected into, and asked in the end whether it noticed."""

    def __init__(self, command: Sequence[object], **keywords: object) -> None:
        self.process = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **keywords,
        )
        assert self._line() == "ready\n"

    @property
    def pid(self) -> int:
        return self.process.pid

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> dict[str, int]:
        """Ends it; returns how often it did what."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None  # for communicate()
        words = self._line()
        assert words.startswith("OK"), words
        assert self.process.wait(10) == 0
        return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", words)}


# What programs do while it happens; the first is what the main thread does.
PROGRAMS = {
    "sleeps": ("nap", "poll", "select", "epoll", "read", "wait", "interrupted"),
    "receives": ("receive", "rest"),
    "changes its ids": ("ids", "rest:2"),
    "guards its memory": ("guard", "rest"),
    "computes": ("registers", "registers:2", "compute"),
    "alone, sleeping": ("alone", "nap"),
    "alone, polling": ("alone", "poll"),
    "alone, selecting": ("alone", "select"),
    "alone, in epoll": ("alone", "epoll"),
    "alone, waiting": ("alone", "wait"),
    "alone, with all registers in use": ("alone", "registers"),
    "alone, interrupted": ("alone", "interrupted"),
    "alone, in malloc": ("alone", "malloc"),
    "alone, in dlopen": ("alone", "load"),
    "alone, forking": ("alone", "fork"),
    "alone, in vfork": ("alone", "vfork"),
    "alone, making threads": ("alone", "thread"),
    "alone, freeing stacks": ("alone", "stacks"),
    "freeing stacks while others map": ("stacks", "map"),
    "in malloc and dlopen": ("malloc", "malloc:2", "load:2"),
    "forks": ("fork", "vfork", "thread", "malloc"),
    "in signal handlers": ("handler", "handler:2", "rest"),
    "200 threads": ("rest", "rest:100", "nap:50", "wait:46", "malloc:2"),
}
