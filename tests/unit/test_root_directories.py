# SPDX-License-Identifier: Apache-2.0
"""Root directories of containers: held open while somebody runs there, and no longer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiflame.agent.inspector.fork_server import ForkServer
from aiflame.agent.inspector.memory import RemoteMemory
from aiflame.agent.inspector.opener import OpenedFile
from aiflame.agent.inspector.rootfs import open_beneath, open_root
from aiflame.agent.processes import procfs
from aiflame.agent.processes.identity import CgroupPaths
from aiflame.agent.processes.procfs import MapsLine, Status
from aiflame.agent.processes.table import ProcessImage, ProcessTable
from aiflame.agent.sinks.naming_channel import NamingChannel
from aiflame.agent.sinks.naming_messages import FileGiven

_DRIVER = MapsLine(0x1000, 0x2000, 0, "08:01", 7, "/lib/libdriver.so")
_CONTAINERS = 400


class _Opener:
    """Opens what is below a folder: each process has a root directory of its own there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.opened = 0

    def root(self, pid: int) -> OpenedFile:
        path = self._folder / str(pid)
        path.mkdir(exist_ok=True)
        (path / "who").write_text(str(pid))
        return self._open(path, os.O_PATH | os.O_DIRECTORY)

    def mapped(self, *_: object) -> OpenedFile:
        self.opened += 1
        path = self._folder / "driver"
        path.touch()
        return self._open(path, os.O_RDONLY)

    def _open(self, path: Path, flags: int) -> OpenedFile:
        fd = os.open(path, flags | os.O_CLOEXEC)
        facts = os.fstat(fd)
        return OpenedFile(fd, True, facts.st_dev, facts.st_ino, facts.st_size, 0, 1)

    def proc(self, *_: object) -> bytes:
        return b""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessTable]:
    monkeypatch.setattr(procfs, "cgroups", lambda pid: CgroupPaths(f"/container-{pid}", {}))
    monkeypatch.setattr(procfs, "status", lambda pid: Status(1, 1, 0))
    monkeypatch.setattr(procfs, "executable_mappings", lambda *_: [_DRIVER])
    inspector: Any = SimpleNamespace(
        opener=_Opener(tmp_path), memory=RemoteMemory(), server=ForkServer()
    )
    made = ProcessTable(0, lambda pid: 1, inspector)
    yield made
    made.binaries.close()


def _run(table: ProcessTable, pid: int) -> ProcessImage:
    image = table.seen(pid, 1, 1, "worker", 5)
    assert image.root and _who(image.root) == str(pid)
    return image


def _who(root: str) -> str:
    """Whose root directory a path leads to, "" for nobody's."""
    try:
        directory = open_root(root)
    except NotADirectoryError:
        return ""
    try:
        with os.fdopen(open_beneath(directory, "/who")) as file:
            return file.read()
    finally:
        os.close(directory)


def test_a_container_that_is_gone_is_held_no_longer(table: ProcessTable) -> None:
    gone, stays = _run(table, 10), _run(table, 11)
    table.forget([gone], [])
    # Not at once: one that is just being restarted has the same.
    table.forget_roots()
    assert _who(gone.root) == "10"
    table.forget_roots()
    # Nor is its path another's, for who names what it did.
    assert [_who(image.root) for image in (gone, stays, _run(table, 12))] == ["", "11", "12"]


def test_one_that_is_used_again_is_kept(table: ProcessTable) -> None:
    before = _run(table, 10)
    table.forget([before], [])
    table.forget_roots()
    after = _run(table, 10)
    table.forget_roots()
    table.forget_roots()
    assert after.root == before.root and _who(after.root) == "10"


def test_files_of_several_containers_are_found_in_those_that_are_left(table: ProcessTable) -> None:
    first, second = _run(table, 10), _run(table, 11)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        channel = NamingChannel(table, ours)
        told = [message for message, _ in channel._files()]
        (file,) = table.binaries.files.values()
        assert file.root == first.root
        table.forget([first], [])
        table.forget_roots()
        table.forget_roots()
        (file,) = table.binaries.files.values()
        assert file.root == second.root and _who(first.root) == ""
        # AND whoever names what is in them hears of that
        told += [message for message, _ in channel._files()]
    assert told == [FileGiven(0, image.root) for image in (first, second)]


def test_containers_that_come_and_go_all_day_leave_nothing(
    table: ProcessTable, tmp_path: Path
) -> None:
    stays = _run(table, 10)
    for number in range(_CONTAINERS):
        table.forget([_run(table, 100 + number)], [])
        table.forget_roots()
    table.forget_roots()
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert [link for link in links if link.startswith(f"{tmp_path}/1")] == [str(tmp_path / "10")]
    assert links.count(os.devnull) < _CONTAINERS * 3 / 4
    assert _who(stays.root) == "10"
