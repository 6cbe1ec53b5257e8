# SPDX-License-Identifier: Apache-2.0
"""Memory that processes share with a device family: found, opened, read, given up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiflame.agent.devices.memories import Memories
from aiflame.agent.inspector.inspector import Inspector
from aiflame.agent.losses import LossKind
from aiflame.agent.processes.procfs import MapsLine
from aiflame.agent.processes.table import ProcessImage, ProcessTable

_NAME = "/memfd:aiflame-toy"


class _Shared:
    """Memory of this process."""

    def __init__(self, name: str, size: int = 8192, *, is_shared: bool = True) -> None:
        import mmap

        self.fd = os.memfd_create(name)
        os.ftruncate(self.fd, size)
        kind = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
        self.memory = mmap.mmap(self.fd, size, kind)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


@pytest.fixture
def table() -> Iterator[ProcessTable]:
    """This process is the target."""
    with Inspector() as inspector:
        table = ProcessTable(1, lambda pid: 1, inspector)
        yield table
        table.binaries.close()


@pytest.fixture
def image(table: ProcessTable) -> ProcessImage:
    return table.image(os.getpid(), 1)


def test_memory_is_found_by_its_name_and_read_as_it_is_now(
    table: ProcessTable, image: ProcessImage
) -> None:
    shared, other = _Shared("aiflame-toy-1"), _Shared("something")
    private = _Shared("aiflame-toy-2", is_shared=False)
    memories = Memories(table, _NAME)
    memories.look(image)
    (memory,) = memories.all()
    assert memory.process == image.index
    assert memory.read(4, 4096) == bytes(4)
    shared.memory[4096:4100] = b"data"
    assert memory.read(4, 4096) == b"data"
    # It is the same one, however often it is looked for.
    memories.look(image)
    memories.look_again()
    assert memories.all() == [memory]
    # What is not there is not read; nothing waits, and nobody dies of it.
    assert memory.read(10, 8190) == bytes(2)
    assert memory.read(1, 1 << 40) == b""
    assert memory.read(1, 1 << 70) == b""
    assert memory.read(1 << 20, 0)[:4] == bytes(4)
    os.ftruncate(shared.fd, 0)
    assert memory.read(4, 4096) == b""
    memories.close()
    assert memory.read(4, 0) == b""
    for one in (shared, other, private):
        one.close()
    assert memories.losses == {}


def test_memory_that_comes_later_is_found(table: ProcessTable, image: ProcessImage) -> None:
    memories = Memories(table, _NAME)
    memories.look(image)
    assert memories.all() == []
    shared = _Shared("aiflame-toy")
    for _ in range(40):
        memories.look_again()
    assert len(memories.all()) == 1
    memories.forget_images([image.index])
    assert memories.all() == []
    shared.close()


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_helper_is_told_by_its_pipe_until_it_is_left(
    table: ProcessTable, image: ProcessImage
) -> None:
    shared = _Shared("aiflame-toy")
    reading, writing = os.pipe()
    os.close(writing)  # nobody else wants it on
    memories = Memories(table, _NAME)
    memories.look(image)
    (memory,) = memories.all()
    before = _descriptors()
    assert memory.tell(reading, b"x" * 32)
    assert memory.tell(reading, b"y" * 32)
    assert os.read(reading, 100) == b"x" * 32 + b"y" * 32
    assert _descriptors() == before + 1
    # WHEN it is left, THEN the helper sees that nobody has the other end
    memory.leave()
    assert os.read(reading, 100) == b""
    # AND it can be told again
    assert memory.tell(reading, b"z")
    assert os.read(reading, 100) == b"z"
    assert not memory.is_over()
    memories.forget_images([image.index])
    assert os.read(reading, 100) == b""
    assert not memory.tell(reading, b"z")
    assert _descriptors() == before - 1
    os.close(reading)
    shared.close()


def test_a_pipe_without_a_reader_is_of_a_process_that_is_over(
    table: ProcessTable, image: ProcessImage
) -> None:
    shared = _Shared("aiflame-toy")
    reading, writing = os.pipe()
    os.close(writing)
    memories = Memories(table, _NAME)
    memories.look(image)
    (memory,) = memories.all()
    assert not memory.is_over()
    assert memory.tell(reading, b"x")
    assert not memory.is_over()
    os.close(reading)
    assert memory.is_over()
    memories.close()
    assert not memory.is_over()
    shared.close()


def test_what_is_no_pipe_without_a_name_is_never_opened(
    table: ProcessTable, image: ProcessImage, tmp_path: Path
) -> None:
    # GIVEN a process that says that its pipe is something else
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "file").write_bytes(b"kept")
    descriptors = [
        os.open(fifo, os.O_RDWR),
        os.open(fifo, os.O_PATH),
        os.open(tmp_path / "file", os.O_RDWR),
        os.open("/dev/null", os.O_RDWR),
        os.open(tmp_path, os.O_PATH),
        os.memfd_create("aiflame-toy-pipe"),
    ]
    shared = _Shared("aiflame-toy")
    memories = Memories(table, _NAME)
    memories.look(image)
    (memory,) = memories.all()
    for number in (*descriptors, -1, 1 << 30, 1 << 70):
        assert not memory.tell(number, b"x")
    assert (tmp_path / "file").read_bytes() == b"kept"
    # AND a pipe that is full, or that nobody reads, is not waited for
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    assert not memory.tell(reading, b"x" * 32)
    memories.close()
    for fd in (*descriptors, reading, writing):
        os.close(fd)
    shared.close()


def test_a_process_has_so_many_and_no_more(table: ProcessTable, image: ProcessImage) -> None:
    shared = [_Shared("aiflame-toy") for _ in range(20)]
    memories = Memories(table, _NAME)
    for _ in range(3):
        memories.look(image)
    assert len(memories.all()) == 4
    memories.close()
    for one in shared:
        one.close()


def test_a_family_that_shares_nothing_looks_at_nobody(image: ProcessImage) -> None:
    nothing: Any = SimpleNamespace()
    memories = Memories(nothing, "")
    memories.look(image)
    memories.look_again()
    assert memories.all() == []


def test_what_is_no_memory_is_not_opened_and_counted_once(
    table: ProcessTable, image: ProcessImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN mappings that are gone by the time that they are to be opened
    lines = [MapsLine(4096 * n, 4096 * n + 64, 0, "00:01", 10 + n, _NAME) for n in range(1, 9)]
    monkeypatch.setattr(table, "shared_memory", lambda *_: lines)
    memories = Memories(table, _NAME)
    for _ in range(5):
        memories.look(image)
    assert memories.all() == []
    assert memories.losses == {LossKind.DEVICE_MEMORY_NOT_OPENED: 1}
    # AND one that can be opened later is
    shared = _Shared("aiflame-toy")
    monkeypatch.undo()
    memories.look_again()
    memories.look(image)
    assert [memory.process for memory in memories.all()] == [image.index]
    memories.close()
    shared.close()


def test_a_child_does_not_tell_again_what_its_parent_told(
    table: ProcessTable, image: ProcessImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = _Shared("aiflame-toy")
    lines = table.shared_memory(image, _NAME)
    child = table.image(os.getppid(), 1)
    monkeypatch.setattr(table, "shared_memory", lambda *_: lines)
    memories = Memories(table, _NAME)
    memories.look(image)
    memories.look(child)
    assert [memory.process for memory in memories.all()] == [image.index]
    memories.close()
    shared.close()


def test_a_process_is_not_looked_at_again_and_again(
    table: ProcessTable, image: ProcessImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a process that maps something or rings all the time
    looks: list[int] = []
    monkeypatch.setattr(table, "shared_memory", lambda *_: looks.append(1) or [])
    memories = Memories(table, _NAME)
    for _ in range(100):
        memories.look(image)
        memories.heard(image)
    assert len(looks) == 4
    memories.look_again()
    for _ in range(100):
        memories.heard(image)
    assert len(looks) == 9
