# SPDX-License-Identifier: Apache-2.0
"""Real interpreters for the tests of this folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import support
from aiflame.agent.elf.image import ElfImage
from aiflame.agent.inspector.memory import RemoteMemory
from aiflame.agent.processes.process_memory import ProcessMemory
from aiflame.agent.python.interpreter import LoadedInterpreter, find_interpreter
from aiflame.agent.python.thread_state import find_slot
from aiflame.agent.python.threads import find_key_block
from aiflame.agent.target_files import TargetFile
from interpreters import LINKED, VERSIONS, each, executable

HERE = Path(__file__).parent


@pytest.fixture(params=each((*VERSIONS, LINKED)))
def python(request: pytest.FixtureRequest) -> Path:
    """Each interpreter in turn: its executable."""
    return executable(str(request.param))


@dataclass(frozen=True)
class Target:
    """A process that runs nested.py, and what it said about itself."""

    pid: int
    truth: dict[str, Any]
    memory: ProcessMemory
    interpreter: LoadedInterpreter
    slot: int | None  # from the FS base of a thread to its thread state


def _loaded(pid: int) -> LoadedInterpreter:
    """The interpreter of a process, by its mappings."""
    seen = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/") or fields[5] in seen:
            continue
        seen.add(fields[5])
        path = Path(fields[5])
        if "python" not in path.name:
            continue
        fd = os.open(f"/proc/{pid}/root{path}", os.O_RDONLY)
        try:
            image = ElfImage.from_fd(fd)
            found = find_interpreter(TargetFile(fd), image, path.name)
        finally:
            os.close(fd)
        if found is not None:
            start = int(fields[0].split("-")[0], 16) - int(fields[2], 16)
            return found.loaded_at(0 if image.kind == "exec" else start - image.load_address)
    raise AssertionError(f"no interpreter in process {pid}")


def _key_block(pid: int) -> int:
    """Where the C library of a process keeps key data."""
    maps = Path(f"/proc/{pid}/maps").read_text().split()
    for name in {word for word in maps if re.search(r"/(libc|libpthread)[-.].*so", word)}:
        fd = os.open(f"/proc/{pid}/root{name}", os.O_RDONLY)
        try:
            block = find_key_block(TargetFile(fd), ElfImage.from_fd(fd))
        finally:
            os.close(fd)
        if block is not None:
            return block
    raise AssertionError(f"no pthread_getspecific in process {pid}")


@pytest.fixture
def start(python: Path) -> Iterator[Callable[..., Target]]:
    """`start("--busy")`: runs nested.py until all its threads wait where they said."""
    running: list[subprocess.Popen[bytes]] = []
    remote = RemoteMemory()

    def go(*arguments: str) -> Target:
        # Isolated, but not -S: site-packages of the machine may print or be slow.
        command = [str(python), "-I", str(HERE / "nested.py"), *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        truth = json.loads(process.stdout.readline())
        for who in truth:
            if who != "busy":
                support.wait_until(lambda who=who: _sleeps(process.pid, truth[who]["tid"]))
        memory, loaded = ProcessMemory(remote, process.pid), _loaded(process.pid)
        slot = find_slot(
            memory,
            loaded.layout,
            loaded.runtime_address,
            loaded.state_place,
            lambda: _key_block(process.pid),
        )
        return Target(process.pid, truth, memory, loaded, slot)

    yield go
    remote.close()
    for process in running:
        process.kill()
        process.communicate()


def _sleeps(pid: int, tid: int) -> bool:
    stat = Path(f"/proc/{pid}/task/{tid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"
