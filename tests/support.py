# SPDX-License-Identifier: Apache-2.0
"""What tests share that is not a fixture."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.inspector.memory import RemoteMemory

# Programs that know the truth about themselves.
WORKLOADS = Path(__file__).parent / "workloads"

# The command line as a user runs it, in this interpreter.
AIFLAME = (sys.executable, "-m", "aiflame.agent")

# The only reasons for which CI may skip a test, by their beginnings: things that a fresh machine
# has no (recent enough) package for. Any other skip is a test that could have run.
ABSENT_HERE = (
    "PyTorch is not installed",
    "no pyenv CPython",
    "no CPython 3.14 of Debian's",
    "no CPython 3.15 of Debian's",
    "no release of speedscope",
    "Node.js is older than",
    "no OpenCL loader",
    "no nvcc",
    "no packages to carry",
    "no CUDA runtime",
    "no release of CUPTI",
    "no FUSE in this kernel",
    "podman runs no containers here",
    "chDB is not installed",
    "no systemd-analyze",
)


def are_gone(pids: Collection[int]) -> bool:
    """Whether there are processes, and none of them is there any more."""
    return bool(pids) and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def wait_until(predicate: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Polls with doubling pauses until something holds.

    It is the only place in the tests that sleeps: a fixed sleep is either too short on a loaded
    machine or too long on all others.

    Raises:
        AssertionError: It did not hold within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not predicate():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.25)


# Of workloads/serving.c: longer than any test takes, and 120 ms between two bursts of requests. At
# 15 % of a CPU it has its samples in each second, and leaves the processors to those who look at it
# and to other tests.
SERVING_ARGUMENTS = ("600", "120")


@contextmanager
def serving(program: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs workloads/serving.c, which computes and waits, for longer than any test takes."""
    with subprocess.Popen([program, *SERVING_ARGUMENTS], stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


class _NoFiles:
    """An opener that finds nothing."""

    def proc(self, pid: int, name: str, limit: int) -> bytes:
        return b""

    def root(self, pid: int) -> None:
        raise FileNotFoundError

    def mapped(self, *_: object) -> None:
        raise FileNotFoundError


def blind_inspector() -> Any:
    """Returns an inspector that finds nothing of any process, and starts no child."""
    return SimpleNamespace(opener=_NoFiles(), memory=RemoteMemory(), server=ForkServer())
