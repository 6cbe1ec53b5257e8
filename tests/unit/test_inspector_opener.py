# SPDX-License-Identifier: Apache-2.0
"""Opening files of processes: of this one, and with a child that can be stopped."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import mmap
import os
import signal
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from aiflame.agent.inspector import child
from aiflame.agent.inspector import opener as inspector_opener
from aiflame.agent.inspector.opener import OpenedFile, Opener, RemoteFile
from aiflame.agent.losses import LossKind
from aiflame.agent.processes import procfs
from aiflame.agent.processes.procfs import MapsLine
from aiflame.agent.target_files import BadTargetFile, FileGuard, TargetFile

_PAGE = mmap.PAGESIZE
_HERE = os.getpid()
# A file system that is neither on a disk of this machine nor in its memory.
_REMOTE = "/proc/version"


@pytest.fixture
def opener() -> Iterator[Opener]:
    opener = Opener()
    yield opener
    opener.close()


class _Mapped(NamedTuple):
    path: Path
    contents: bytes
    line: MapsLine


@pytest.fixture
def mapped(tmp_path: Path, opener: Opener) -> Iterator[_Mapped]:
    """A file that this process has mapped executable."""
    path = tmp_path / "library"
    contents = os.urandom(3 * _PAGE)
    path.write_bytes(contents)
    with path.open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    lines = procfs.executable_mappings(opener, _HERE)
    (line,) = (line for line in lines if line.path == str(path))
    yield _Mapped(path, contents, line)
    held.close()


def _open(opener: Opener, line: MapsLine) -> OpenedFile:
    return opener.mapped(_HERE, line.start, line.end, line.device, line.inode, line.path)


def _contents(opened: OpenedFile) -> bytes:
    with os.fdopen(opened.fd, "rb") as file:
        return file.read()


def test_what_is_mapped_is_opened(opener: Opener, mapped: _Mapped) -> None:
    opened = _open(opener, mapped.line)
    facts = mapped.path.stat()
    assert (opened.device, opened.inode) == (facts.st_dev, facts.st_ino)
    assert (opened.size_bytes, opened.owner_uid, opened.links) == (3 * _PAGE, os.getuid(), 1)
    assert opened.is_local
    assert _contents(opened) == mapped.contents
    assert not any(opener.losses.values())


@pytest.mark.skipif(os.geteuid() != 0, reason="links to what is mapped are for root alone")
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_without_its_name_is_opened(
    opener: Opener, mapped: _Mapped, is_replaced: bool
) -> None:
    mapped.path.unlink()
    if is_replaced:
        mapped.path.write_bytes(b"another")
    assert _contents(_open(opener, mapped.line)) == mapped.contents


def test_another_file_than_the_one_that_was_mapped_is_refused(
    opener: Opener, mapped: _Mapped
) -> None:
    # As if the process had mapped another one there, after its mappings were read.
    with pytest.raises(OSError, match="Stale") as caught:
        _open(opener, dataclasses.replace(mapped.line, inode=mapped.line.inode + 1))
    assert caught.value.errno == errno.ESTALE


def test_a_file_of_a_process_that_is_gone_is_found_by_its_path(
    opener: Opener, mapped: _Mapped
) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    line = mapped.line
    where = (process.pid, line.start, line.end, line.device)
    assert _contents(opener.mapped(*where, line.inode, line.path, "/")) == mapped.contents
    for inode, path, root, code in (
        (line.inode + 1, line.path, "/", errno.ESTALE),
        (line.inode, line.path, "", errno.ENOENT),
        (line.inode, "/none", "/", errno.ENOENT),
    ):
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            opener.mapped(*where, inode, path, root)
        assert caught.value.errno == code


def test_one_that_lives_is_asked_for_files_of_its_own_root_alone(
    opener: Opener, mapped: _Mapped
) -> None:
    # Else it would have others look at any path of theirs.
    line, other_root = mapped.line, str(mapped.path.parent)
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        opener.mapped(_HERE, 0x1000, 0x2000, line.device, line.inode, "/library", other_root)


def test_what_is_no_regular_file_is_refused(opener: Opener, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/passwd")
    for path, is_followed, code in (
        ("/fifo", True, errno.EINVAL),
        ("/link", False, errno.EINVAL),
        ("/link", True, errno.ENOENT),
        ("/none", True, errno.ENOENT),
    ):
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            opener.beneath(str(tmp_path), path, follows_last=is_followed)
        assert caught.value.errno == code


def test_a_directory_is_found_and_nothing_else(opener: Opener, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "link").symlink_to("/folder")
    (tmp_path / "outside").symlink_to("/etc")
    for path in ("/folder", "/../folder"):
        found = opener.directory(str(tmp_path), path)
        assert os.listdir(f"/proc/self/fd/{found.fd}") == ["file"]  # noqa: PTH208 - a descriptor
        os.close(found.fd)
    for root, path, code in (
        (str(tmp_path), "/folder/file", errno.ENOTDIR),
        (str(tmp_path), "/link", errno.ENOTDIR),
        (str(tmp_path), "/outside/ssl", errno.ENOENT),
        (str(tmp_path), "/none", errno.ENOENT),
        ("/proc", "/self", errno.ENOTDIR),  # a file system that is not local
    ):
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            opener.directory(root, path)
        assert caught.value.errno == code


def test_what_proc_tells_is_read_whole(opener: Opener) -> None:
    # GIVEN more mappings than one message holds
    regions = [mmap.mmap(-1, _PAGE) for _ in range(3000)]
    for region in regions[::2]:
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        protection = mmap.PROT_READ | mmap.PROT_EXEC
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), _PAGE, protection) == 0
    here = Path("/proc/self/maps").read_bytes()
    assert len(here) > inspector_opener.worker.CHUNK_BYTES
    assert opener.proc(_HERE, "maps", 1 << 25).count(b"\n") == here.count(b"\n")
    assert len(opener.proc(_HERE, "maps", 200_000)) == 200_000
    assert opener.proc(_HERE, "cmdline", 10) == Path("/proc/self/cmdline").read_bytes()[:10]
    assert opener.proc(1 << 30, "maps", 100) == b""


def _stop(opener: Opener) -> None:
    """Has the child wait as for a file that never opens."""
    opener.proc(_HERE, "comm", 1)  # it has begun
    assert opener.pid is not None
    os.kill(opener.pid, signal.SIGSTOP)


def test_what_never_opens_costs_itself(
    monkeypatch: pytest.MonkeyPatch, opener: Opener, mapped: _Mapped
) -> None:
    monkeypatch.setattr(inspector_opener, "_PATIENCE_S", 0.1)
    _stop(opener)
    stopped = opener.pid
    # WHEN a file does not open THEN it is given up, and is not tried again
    for _ in range(2):
        with pytest.raises(TimeoutError):
            _open(opener, mapped.line)
    assert {kind: n for kind, n in opener.losses.items() if n} == {LossKind.FILES_STUCK: 1}
    assert opener.loss_files[LossKind.FILES_STUCK] == {str(mapped.path)}
    # AND another child opens others
    passwd = opener.beneath("/", "/etc/passwd")
    assert opener.pid != stopped
    assert _contents(passwd) == Path("/etc/passwd").read_bytes()
    # AND what /proc tells may not come either
    _stop(opener)
    assert procfs.command_line(opener, _HERE) == ""
    assert f"cmdline of process {_HERE}" in opener.loss_files[LossKind.FILES_STUCK]
    assert procfs.executable_mappings(opener, _HERE) != []


def test_a_process_that_answers_slowly_is_given_up(
    monkeypatch: pytest.MonkeyPatch, opener: Opener
) -> None:
    monkeypatch.setattr(inspector_opener, "_PATIENCE_WITH_PROCESS_S", 1e-9)
    for _ in range(2):
        assert opener.proc(_HERE, "comm", 100) != b""
    assert opener.proc(_HERE, "comm", 100) == b""
    words = opener.loss_files[LossKind.FILES_STUCK]
    assert words == {f"further ones of process {_HERE}"}
    # AND an hour later, when its pid may be another's, it is asked again
    monkeypatch.setattr(child, "_COUNTS_S", 0.0)
    assert opener.proc(_HERE, "comm", 100) != b""
    assert opener.losses[LossKind.FILES_STUCK] == 1


@pytest.mark.parametrize("way", ["slow", "stuck"])
def test_another_process_with_the_number_of_one_that_was_given_up_is_asked(
    monkeypatch: pytest.MonkeyPatch, opener: Opener, mapped: _Mapped, way: str
) -> None:
    # GIVEN a process that was given up, or of which something was, and a file that does not open
    monkeypatch.setattr(inspector_opener, "_PATIENCE_S", 0.1)
    _stop(opener)
    with pytest.raises(TimeoutError):
        _open(opener, mapped.line)
    if way == "stuck":
        _stop(opener)
    else:
        opener.proc(_HERE, "comm", 1)  # it has begun
        monkeypatch.setattr(inspector_opener, "_PATIENCE_WITH_PROCESS_S", 1e-9)
        opener.proc(_HERE, "stat", 1)
    for _ in range(2):
        assert opener.proc(_HERE, "comm", 100) == b""
    monkeypatch.setattr(inspector_opener, "_PATIENCE_WITH_PROCESS_S", 5.0)
    # WHEN its number is that of one which has begun at another time
    monkeypatch.setattr(inspector_opener, "began", lambda pid: b"later")
    # THEN that is asked, and the file is not
    assert opener.proc(_HERE, "comm", 100) != b""
    with pytest.raises(TimeoutError):
        _open(opener, mapped.line)


def test_a_process_is_told_from_another_by_when_it_began() -> None:
    process = subprocess.Popen(["sleep", "600"])
    first = child.began(process.pid)
    assert first and first == child.began(process.pid)
    assert first != child.began(1)
    process.kill()
    process.wait()
    assert child.began(process.pid) == b""


def test_processes_that_come_and_go_all_day_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, opener: Opener
) -> None:
    monkeypatch.setattr(inspector_opener, "_MAX_PROCESSES", 8)
    for pid in range(os.getpid(), os.getpid() + 100):
        opener.proc(pid, "comm", 100)
    assert len(opener._waited_s) == 8


def test_a_child_that_died_is_replaced(opener: Opener) -> None:
    opener.proc(_HERE, "comm", 1)
    assert opener.pid is not None
    os.kill(opener.pid, signal.SIGKILL)
    assert opener.proc(_HERE, "comm", 100) != b""
    assert opener.losses[LossKind.OPENER_DIED] == 1


class _NoProcess(child.Child):
    """What there is once there is room for it."""

    def __init__(self, has_room: bool) -> None:
        if not has_room:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.process = SimpleNamespace(poll=lambda: 0)  # type: ignore[assignment]

    def end(self) -> None:
        pass


def test_where_none_can_be_started_one_is_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: now_s))
    # GIVEN a host without room for a process, now and then
    tries: list[float] = []
    has_room = False

    def make() -> _NoProcess:
        tries.append(now_s)
        return _NoProcess(has_room)

    children = child.Children(make)
    for streak in range(1, 2 * child.MAX_DEATHS):
        # WHEN one is asked for all the time
        has_room, since = False, len(tries)
        begun_s = now_s
        while now_s < begun_s + 300:
            assert children.start() is None
            now_s += 0.05
        # THEN it is tried soon, and then less and less, at least once a minute
        waits = [after - before for before, after in pairwise(tries[since:])]
        assert waits[0] < 0.2 and all(wait < 61 for wait in waits)
        assert len(waits) < 20
        # AND as soon as there is room there is one, also after many such times
        has_room = True
        now_s += 60
        assert children.start() is not None
        assert children.deaths == streak
        children.child = None
    # AND those that die are as many as before
    for _ in range(child.MAX_DEATHS):
        assert children.start() is not None
        children.lose(is_stuck=False)
    assert children.start() is None


def test_what_may_never_be_read_is_read_by_the_child(
    monkeypatch: pytest.MonkeyPatch, opener: Opener
) -> None:
    monkeypatch.setattr(inspector_opener, "_PATIENCE_S", 0.1)
    # GIVEN a file of which this kernel does not know that reads of it end
    opened = opener.beneath("/", _REMOTE)
    assert not opened.is_local
    # THEN it is not open for reading here, but can be read
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.read(opened.fd, 1)
    # (what /proc says of sizes is nothing)
    text = Path(_REMOTE).read_bytes()
    file = RemoteFile(opener, opened._replace(size_bytes=len(text)), _HERE, _REMOTE)
    guard = FileGuard()
    guard.remote[opened.fd] = file
    with guard.each_file(_REMOTE, opened.fd) as guarded:
        assert guarded.read(5, 0) == text[:5]
        assert guarded.read(1 << 20, 3) == text[3:]
        assert guarded.read(5, 1 << 30) == b""
    assert guard.bad == {}
    # AND a read that does not end costs this file
    fresh = TargetFile(opened.fd, RemoteFile(opener, opened._replace(size_bytes=9), 1, _REMOTE))
    _stop(opener)
    with pytest.raises(BadTargetFile, match="timed out"):
        fresh.read(5, 0)
    assert opener.loss_files[LossKind.FILES_STUCK] == {_REMOTE}
    assert file.is_stuck
    os.close(opened.fd)


def test_a_child_that_no_signal_gets_through_to_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "_KILLING_S", 0.1)
    process = subprocess.Popen(["sleep", "600"])
    assert not child.ends(process.pid)
    process.kill()
    monkeypatch.setattr(child, "_KILLING_S", 60.0)
    assert child.ends(process.pid)
    process.wait()
    assert child.ends(process.pid)


@pytest.mark.parametrize("way", ["ends", "close"])
def test_a_killed_child_that_waits_for_a_processor_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    # GIVEN a child whose end is late, since other programs have the processors
    monkeypatch.setattr(child, "_KILLING_S", 0.01)
    looks = []
    process = subprocess.Popen(["sleep", "600"])

    def is_starved(pid: int) -> bool:
        looks.append(pid)
        if len(looks) == 3:
            process.kill()
        return True

    monkeypatch.setattr(child, "waits_for_a_processor", is_starved)

    class Late(child.Child):
        def __init__(self) -> None:
            self.process = process

        def end(self) -> None:
            pass

    # WHEN it is waited for
    try:
        if way == "ends":
            assert child.ends(process.pid)
        else:
            children = child.Children(Late)
            assert children.start() is not None
            children.close()
            # THEN it has ended, and nobody else has to wait for it.
            assert process.returncode == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
    assert {*looks} == {process.pid}


def test_the_child_can_do_nothing_but_open(opener: Opener) -> None:
    opener.proc(_HERE, "comm", 1)
    assert opener.failures == ""
    lines = Path(f"/proc/{opener.pid}/status").read_text().splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    wanted = 1 << 2 | 1 << 19 | 1 << 40 if os.geteuid() == 0 else 0
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == wanted
    assert int(status["CapInh"], 16) == 0
    if os.geteuid() == 0:
        assert (int(status["CapBnd"], 16), int(status["CapAmb"], 16)) == (0, 0)
