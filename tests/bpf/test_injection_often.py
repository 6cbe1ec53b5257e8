# SPDX-License-Identifier: Apache-2.0
"""A hundred programs of each kind have a library loaded, and none of them hangs or dies.

Each is a fresh process, for which the first load is the one that may go wrong: its threads may be
anywhere, and the dynamic loader, malloc and the thread library have not been used by us before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import interpreters
import pytest
from aiflame.agent.injection.inject import inject
from aiflame.agent.injection.tracer import InjectionRefused
from aiflame.agent.symbols.store import cache_dir
from injectees import LIBRARY_FLAGS, PROGRAMS, Program
from support import WORKLOADS

# Once into each is what test_injection_live does.
pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

_TIMES = 100
# Of each thread of pyinjectee.py after each round: nor do programs in Python compute all the time.
_REST_S = 0.002
# At once: each waits for the others' processes, and for threads that can be lent.
_AT_ONCE = 2
# Among others that want the processors a thread may be for long where it cannot be lent.
_PATIENCE_S = 60.0

# What injectee.c does. None of them computes all the time: that would be a test of the scheduler.
# A thread that runs is stopped first, and found in malloc or dlopen: the one that rests is lent.
_KINDS = {
    "waits": PROGRAMS["sleeps"],
    "is in malloc": ("malloc", "rest"),
    "is in dlopen": ("load", "rest"),
    "forks": ("alone", "fork"),
    "makes threads and processes": ("rest", "fork", "vfork", "thread", "malloc"),
    "is in signal handlers": ("rest", "handler"),
    "has 200 threads": ("rest", "nap:100", "wait:97", "malloc:2"),
    "has a seccomp filter": ("alone", "kill=reboot", "rest"),
}
_PYTHONS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")


@contextlib.contextmanager
def _running(command: Sequence[object]) -> Iterator[Program]:
    program = Program(command)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.communicate()


def _repeat(act: Callable[[], None]) -> None:
    """Does it a hundred times; once it fails, no more."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            for done in [pool.submit(act) for _ in range(_TIMES)]:
                done.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _load_into_each(command: Sequence[object], library: Path) -> None:
    def act() -> None:
        with _running(command) as program:
            found = inject(program.pid, library, cache_dir(), "injected_entry", _PATIENCE_S)
            assert (found.was_there, found.answer) == (False, 1)
            assert f"/memfd:/{library.name}" in Path(f"/proc/{program.pid}/maps").read_text()
            program.end()

    _repeat(act)


@pytest.fixture
def library(workload: Callable[..., Path]) -> Path:
    return workload("injected", *LIBRARY_FLAGS)


@pytest.mark.parametrize("kind", _KINDS)
def test_programs_in_c(workload: Callable[..., Path], library: Path, kind: str) -> None:
    _load_into_each([workload("injectee"), *_KINDS[kind]], library)


@pytest.mark.parametrize("version", _PYTHONS)
def test_programs_in_python(library: Path, version: str) -> None:
    _load_into_each(
        [interpreters.executable(version), WORKLOADS / "pyinjectee.py", _REST_S], library
    )


def test_programs_in_another_mount_namespace(workload: Callable[..., Path], library: Path) -> None:
    program = workload("injectee")
    script = f"cd {program.parent}; mount -t tmpfs none /tmp; exec ./{program.name} rest nap"
    _load_into_each(["unshare", "--mount", "sh", "-c", script], library)


def test_static_programs_are_refused(workload: Callable[..., Path], library: Path) -> None:
    command = [workload("injectee", "-static"), "rest"]

    def act() -> None:
        with _running(command) as program:
            with pytest.raises(InjectionRefused, match="statically linked"):
                inject(program.pid, library, cache_dir())
            program.end()

    _repeat(act)
