# SPDX-License-Identifier: Apache-2.0
"""The profilers, each started until it is live and stopped without a trace."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
AIFLAME = str(Path(sys.executable).with_name("aiflame"))
PY_SPY = str(Path(sys.executable).with_name("py-spy"))

# Where a recording goes; the same for all, and left out where commands are shown.
_OUTPUT = " --force -o bench.aiflame"

# Tools compile, load and, at the end, resolve symbols; none takes a tenth of this.
_PATIENCE_S = 60.0


class ToolFailed(Exception):
    """A profiler ended early or never said that it is live."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A profiler to compare.

    `live` is the beginning of the line that it prints once it records; without one it is perf,
    which acknowledges the command to start. `end` is the signal that stops it: bpftrace is killed,
    since it would print and symbolise all of its maps first.
    """

    name: str
    command: tuple[str, ...]
    live: str | None
    end: signal.Signals = signal.SIGINT

    @property
    def words(self) -> str:
        """The command as one types it."""
        bare = [Path(word).name if "/" in word else word for word in self.command]
        text = " ".join(bare).replace("bpftrace -B line ", "bpftrace ").replace(_OUTPUT, "")
        return re.sub(r"(-p|offcpu\.bt) [1-9][0-9]+", r"\1 PID", text)


def aiflame(*arguments: object, name: str = "aiflame") -> Tool:
    """`aiflame record ARGUMENTS`, quiet but for the line that it is attached."""
    command = (AIFLAME, "record", *map(str, arguments), *_OUTPUT.split())
    return Tool(name, command, "attached")


def bpftrace(script: str, *arguments: object, name: str = "bpftrace") -> Tool:
    """One of the scripts beside this file."""
    command = ("bpftrace", "-B", "line", str(HERE / script), *map(str, arguments))
    return Tool(name, command, "live", signal.SIGKILL)


def perf(*arguments: object, name: str = "perf") -> Tool:
    """`perf record ARGUMENTS`."""
    return Tool(name, ("perf", "record", *map(str, arguments)), None)


def py_spy(pid: int, *arguments: object) -> Tool:
    """`py-spy record -p PID ARGUMENTS`."""
    command = (PY_SPY, "record", "-p", str(pid), *map(str, arguments))
    return Tool("py-spy", command, "py-spy> Sampling")


class Running(AbstractContextManager["Running"]):
    """A profiler that is live from entry to exit, in a process group of its own.

    Args:
        tool: What to run.
        folder: Where it leaves its files.

    Raises:
        ToolFailed: With what it printed.
    """

    def __init__(self, tool: Tool, folder: Path) -> None:
        self._tool = tool
        self._said = b""
        # perf stops to record when these are closed.
        self._kept: tuple[int, ...] = ()
        self.started_s = time.monotonic()
        if tool.live is None:
            self._start_perf(folder)
        else:
            self._start(tool.command, folder)
            self._await_line(tool.live.encode())
        self.live_s = time.monotonic()

    def _start(self, command: Sequence[str], folder: Path, fds: Sequence[int] = ()) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=fds,
        )
        self.pid = self.process.pid

    def _start_perf(self, folder: Path) -> None:
        from_us, to_perf = os.pipe()
        from_perf, to_us = os.pipe()
        try:
            control = f"--control=fd:{from_us},{to_us}"
            head, rest = self._tool.command[:2], self._tool.command[2:]
            command = (*head, "--delay=-1", control, "-o", "perf.data", *rest)
            self._start(command, folder, (from_us, to_us))
            os.write(to_perf, b"enable\n")
        finally:
            os.close(from_us)
            os.close(to_us)
        self._kept = (to_perf, from_perf)
        # Its own ends are closed when perf ends early: then there is nothing to read.
        ready = select.select([from_perf], [], [], _PATIENCE_S)[0]
        if not ready or not os.read(from_perf, 64):
            self._fail()

    def _await_line(self, beginning: bytes) -> None:
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + _PATIENCE_S
        fd = self.process.stdout.fileno()
        while not any(line.startswith(beginning) for line in self._said.splitlines()):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                self._fail()
            said = os.read(fd, 65536)
            if not said:
                self._fail()
            self._said += said

    def _fail(self) -> None:
        self._clear_up()
        raise ToolFailed(f"{self._tool.words}: {self.said.strip()}")

    @property
    def said(self) -> str:
        """What it printed as far as it was read: all of it once it has ended."""
        return self._said.decode(errors="replace")

    def await_output(self, ending: str) -> float:
        """Waits for a line that contains a text; returns the monotonic second it was seen."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while ending.encode() not in self._said:
            said = os.read(fd, 65536)
            if not said:
                self._fail()
            self._said += said
        return time.monotonic()

    def wait(self) -> None:
        """Waits until it ends by itself."""
        self._said += self.process.communicate(timeout=_PATIENCE_S)[0] or b""

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(self._tool.end)
        try:
            self.wait()
        finally:
            self._clear_up()

    def _clear_up(self) -> None:
        kill_group(self.process)
        for fd in self._kept:
            os.close(fd)
        self._kept = ()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
