# SPDX-License-Identifier: Apache-2.0
"""What the profilers are pointed at."""

from __future__ import annotations

import os
import re
import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from bench.tools import HERE, kill_group

# As the test workloads are built: every frame is there to be seen.
FLAGS = ("-O2", "-g", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls")

# With main and libc's start it is what a service in C++ has; perf bench has 2 to 8 frames.
DEPTH = 30

# The distribution's own, without frame pointers, as users have it.
PYTHON = "/usr/bin/python3"

_PATIENCE_S = 120.0


def last_cpu() -> int:
    """The CPU that loads are pinned to: the one that interrupts and start-up work like least."""
    return max(os.sched_getaffinity(0))


def build(folder: Path) -> Path:
    """Compiles busy.c into a folder; returns the program."""
    program = folder / "busy"
    command = ["gcc", *FLAGS, "-o", str(program), str(HERE / "busy.c")]
    subprocess.run(command, check=True, timeout=_PATIENCE_S)
    return program


def pinned(*command: object) -> tuple[str, ...]:
    """The command on one CPU: its processes then switch to each other, and to nobody else."""
    return ("taskset", "-c", str(last_cpu()), *map(str, command))


def sched_pipe(loops: int) -> tuple[str, ...]:
    """Two processes that pass a byte to and fro: two switches a loop."""
    return pinned("perf", "bench", "sched", "pipe", "-l", loops)


class Load(AbstractContextManager["Load"]):
    """A program that says "ready" and waits for a line before it works.

    Args:
        command: Program and arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.pid = self.process.pid
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], _PATIENCE_S)[0]:
            raise TimeoutError(str(self.process.args))
        return self.process.stdout.readline().decode()

    def go(self) -> None:
        """Lets it work."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def seconds(self) -> float:
        """Waits for the work to be done; returns the seconds that it measured."""
        return self.times()[0]

    def times(self) -> tuple[float, ...]:
        """The same with all that it measured: by the wall clock, then of CPU time if it does."""
        self.go()
        return self.finish()

    def finish(self) -> tuple[float, ...]:
        """Waits until it is done; returns the same."""
        return tuple(map(float, self._line().split()))

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        kill_group(self.process)


def pipe_seconds(loops: int) -> float:
    """Runs `perf bench sched pipe`; returns its seconds for all loops."""
    done = subprocess.run(
        sched_pipe(loops), capture_output=True, text=True, timeout=_PATIENCE_S, check=True
    )
    return total_seconds(done.stdout)


def total_seconds(text: str) -> float:
    """Reads the total of perf bench's output.

    Raises:
        ValueError: There is none.
    """
    found = re.search(r"Total time:\s*([0-9.]+)\s*\[sec\]", text)
    if found is None:
        raise ValueError(f"no total time in: {text!r}")
    return float(found[1])


@contextmanager
def background(*commands: Sequence[str]) -> Iterator[list[int]]:
    """Runs programs for as long as the block lasts; yields their pids."""
    with ExitStack() as stack:
        pids = []
        for command in commands:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(kill_group, process)
            pids.append(process.pid)
        yield pids
