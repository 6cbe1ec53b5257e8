# SPDX-License-Identifier: Apache-2.0
"""Reading memory: of this very process, which lets its child do so."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiflame.agent.inspector import child
from aiflame.agent.inspector import memory as inspector_memory
from aiflame.agent.inspector.memory import Answer, RemoteMemory, Span
from aiflame.agent.inspector.memory_worker import MAX_DATA_BYTES, MAX_SPANS
from aiflame.agent.losses import LossKind
from aiflame.agent.processes import stack_memory
from aiflame.agent.processes.process_memory import ProcessMemory
from aiflame.agent.processes.stack_memory import StackMemory
from aiflame.agent.python.memory import NoMemoryAccess
from recordings import children_of
from support import wait_until

_PAGE = mmap.PAGESIZE
_HERE = (os.getpid(), os.getpid())
_PR_SET_PTRACER, _ANYBODY = 0x59616D61, -1  # linux/prctl.h


@pytest.fixture
def remote() -> Iterator[RemoteMemory]:
    # Where Yama restricts tracing (ptrace_scope 1), a child may not read its parent unasked.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANYBODY % (1 << 64)))
    remote = RemoteMemory()
    yield remote
    remote.close()


@pytest.fixture
def region() -> Iterator[tuple[int, bytes]]:
    """Three pages of known bytes and their address; the page after them is not readable."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    access = mmap.PROT_READ | mmap.PROT_WRITE
    start = libc.mmap(None, ctypes.c_size_t(4 * _PAGE), access, flags, -1, ctypes.c_long(0))
    contents = bytes(range(256)) * (3 * _PAGE // 256)
    ctypes.memmove(start, contents, len(contents))
    assert libc.mprotect(start + 3 * _PAGE, _PAGE, 0) == 0
    yield start, contents
    libc.munmap(start, 4 * _PAGE, 0)


def _word(contents: bytes, at: int) -> int:
    return int.from_bytes(contents[at : at + 8], "little")


def _data(answers: list[Answer]) -> list[bytes]:
    return [answer.data for answer in answers]


def test_a_read_ends_where_memory_does(remote: RemoteMemory, region: tuple[int, bytes]) -> None:
    start, contents = region
    spans = [
        Span(*_HERE, start + 40, 100),
        Span(*_HERE, start + 40, 4 * _PAGE),
        Span(*_HERE, start + 3 * _PAGE, _PAGE),
        Span(*_HERE, start, 0),
        Span(*_HERE, (1 << 64) - 8, 64),
        Span(*_HERE, 0, 64),
        Span(1 << 30, 1 << 30, start, 64),  # no such process
        Span(*_HERE, start + _PAGE - 3, 6),
    ]
    end = contents[_PAGE - 3 : _PAGE + 3]
    wanted = [contents[40:140], contents[40:], b"", b"", b"", b"", b"", end]
    assert _data(remote.read(spans)) == wanted
    assert not any(remote.losses.values())


def test_more_is_read_than_fits_at_once(remote: RemoteMemory, region: tuple[int, bytes]) -> None:
    start, contents = region
    many = [Span(*_HERE, start + index % 64, 8) for index in range(2 * MAX_SPANS + 1)]
    assert _data(remote.read(many)) == [contents[i % 64 : i % 64 + 8] for i in range(len(many))]
    large = [Span(*_HERE, start, 3 * _PAGE)] * (2 * MAX_DATA_BYTES // (3 * _PAGE) + 1)
    assert _data(remote.read(large)) == [contents] * len(large)
    assert _data(remote.read([Span(*_HERE, start, MAX_DATA_BYTES + 1)])) == [b""]


def _shared_bytes() -> int:
    """Returns how much of what this process shares with its child is resident."""
    parts = Path("/proc/self/smaps").read_text().split("memfd:aiflame-memory")[1:]
    return sum(1024 * int(part.split("Rss:", 1)[1].split()[0]) for part in parts)


def test_what_much_was_read_into_is_given_back(
    remote: RemoteMemory, region: tuple[int, bytes]
) -> None:
    start, contents = region
    large = [Span(*_HERE, start, 3 * _PAGE)] * (MAX_DATA_BYTES // (3 * _PAGE))
    # WHEN much is read at once, and little after that
    assert _data(remote.read(large)) == [contents] * len(large)
    assert _data(remote.read([Span(*_HERE, start, 8)])) == [contents[:8]]
    # THEN the pages of what was much are free, and reads go on.
    assert 0 < _shared_bytes() < 1 << 18


def test_pieces_are_exact_or_none(remote: RemoteMemory, region: tuple[int, bytes]) -> None:
    start, contents = region
    memory = ProcessMemory(remote, os.getpid())
    assert memory.read(start + 5, 7) == contents[5:12]
    assert memory.read(start + 3 * _PAGE - 4, 8) is None
    for address, size in ((0, 8), (4096, 8), (start, 1 << 40), (start, 0), (1 << 63, 8)):
        assert memory.read(address, size) is None
    ranges = [(start, 8), (0, 8), (start + 8, 8)]
    assert memory.read_many(ranges) == [contents[:8], None, contents[8:16]]


def test_the_memory_of_an_ended_process_cannot_be_read(remote: RemoteMemory) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(NoMemoryAccess, match=f"process {ended.pid}"):
        ProcessMemory(remote, ended.pid).read(1 << 40, 8)


def test_words_beyond_the_piece_are_read_late(
    remote: RemoteMemory, region: tuple[int, bytes]
) -> None:
    start, contents = region
    memory = StackMemory(Span(*_HERE, start, 64), contents[:64], remote)
    assert memory.read_u64(start + 56) == _word(contents, 56)
    assert memory.late_pages == 0
    assert memory.read_u64(start + 57) == _word(contents, 57)
    assert memory.read_u64(start + 2 * _PAGE) == _word(contents, 2 * _PAGE)
    assert memory.read_u64(start + 3 * _PAGE - 8) == _word(contents, 3 * _PAGE - 8)
    assert memory.late_pages == 2
    # AND what is not there is not made up
    assert memory.read_u64(start + 3 * _PAGE - 7) is None
    assert memory.read_u64(start + 3 * _PAGE) is None
    assert memory.read_u64((1 << 64) - 8) is None


def test_nothing_is_read_late_where_that_would_be_of_another_moment(
    region: tuple[int, bytes],
) -> None:
    start, contents = region
    memory = StackMemory(Span(*_HERE, start, 64), contents[:64], None)
    assert memory.read_u64(start + 8) == _word(contents, 8)
    assert memory.read_u64(start + 64) is None
    assert memory.late_pages == 0


def test_a_walk_reads_a_bounded_number_of_pages(
    monkeypatch: pytest.MonkeyPatch, remote: RemoteMemory, region: tuple[int, bytes]
) -> None:
    monkeypatch.setattr(stack_memory, "_MAX_LATE_PAGES", 2)
    start, contents = region
    memory = StackMemory(Span(*_HERE, start, 0), b"", remote)
    words = [memory.read_u64(start + page * _PAGE) for page in range(3)]
    assert words == [_word(contents, 0), _word(contents, _PAGE), None]


def _reader() -> int:
    """The pid of the one process that reads."""
    # One that was replaced may not be over yet.
    alive = [pid for pid in children_of(os.getpid()) if _state(pid) != "Z"]
    return alive[-1]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]


def test_memory_that_never_comes_costs_its_own_process_only(
    monkeypatch: pytest.MonkeyPatch, remote: RemoteMemory, region: tuple[int, bytes]
) -> None:
    # GIVEN a reader that gets nowhere: stopped, it looks as one that waits for a page
    monkeypatch.setattr(inspector_memory, "_PATIENCE_S", 1.0)
    start, contents = region
    own = Span(*_HERE, start, 8)
    thread = threading.get_native_id()
    other = Span(1 << 29, thread, start + 8, 8)  # as if of another process
    assert _data(remote.read([own])) == [contents[:8]]
    os.kill(_reader(), signal.SIGSTOP)
    # WHEN both processes are read THEN the first is given up, and the other is read by a new one
    assert _data(remote.read([own, other, own])) == [b"", contents[8:16], b""]
    assert {*remote.stuck} == {os.getpid()}
    assert _data(remote.read([own, other])) == [b"", contents[8:16]]
    assert {kind: n for kind, n in remote.losses.items() if n} == {LossKind.STACKS_STUCK: 1}
    assert remote.loss_files[LossKind.STACKS_STUCK] == {f"process {os.getpid()}"}


def test_another_process_with_the_number_of_one_that_was_given_up_is_read(
    monkeypatch: pytest.MonkeyPatch, remote: RemoteMemory, region: tuple[int, bytes]
) -> None:
    monkeypatch.setattr(inspector_memory, "_PATIENCE_S", 1.0)
    start, contents = region
    own = Span(*_HERE, start, 8)
    assert _data(remote.read([own])) == [contents[:8]]
    os.kill(_reader(), signal.SIGSTOP)
    assert _data(remote.read([own])) == [b""]
    # WHEN its number is that of one which has begun at another time THEN that is read
    monkeypatch.setattr(inspector_memory, "began", lambda pid: b"later")
    assert _data(remote.read([own])) == [contents[:8]]
    # AND what was missing stays counted.
    assert remote.losses[LossKind.STACKS_STUCK] == 1


def test_a_reader_that_was_killed_is_replaced_a_few_times(
    remote: RemoteMemory, region: tuple[int, bytes]
) -> None:
    start, contents = region
    span = Span(*_HERE, start, 8)
    for deaths in range(1, child.MAX_DEATHS):
        assert _data(remote.read([span])) == [contents[:8]]
        os.kill(_reader(), signal.SIGKILL)
        assert _data(remote.read([span])) == [contents[:8]]
        assert remote.losses[LossKind.MEMORY_READER_DIED] == deaths
    os.kill(_reader(), signal.SIGKILL)
    assert _data(remote.read([span])) == [b""]
    assert not remote.stuck


def test_what_happened_an_hour_ago_counts_no_more(
    monkeypatch: pytest.MonkeyPatch, remote: RemoteMemory, region: tuple[int, bytes]
) -> None:
    # GIVEN a process of which a read got nowhere, and readers that died too often
    monkeypatch.setattr(inspector_memory, "_PATIENCE_S", 1.0)
    start, contents = region
    span = Span(*_HERE, start, 8)
    assert _data(remote.read([span])) == [contents[:8]]
    os.kill(_reader(), signal.SIGSTOP)
    assert _data(remote.read([span])) == [b""]
    assert {*remote.stuck} == {os.getpid()}
    other = span._replace(pid=1 << 29)
    for _ in range(child.MAX_DEATHS):
        assert _data(remote.read([other])) == [contents[:8]]
        os.kill(_reader(), signal.SIGKILL)
    assert _data(remote.read([other])) == [b""]
    # WHEN an hour has passed THEN both are tried again, and what was lost stays counted
    monkeypatch.setattr(child, "_COUNTS_S", 0.0)
    assert _data(remote.read([span])) == [contents[:8]]
    assert remote.losses[LossKind.STACKS_STUCK] == 1
    assert remote.losses[LossKind.MEMORY_READER_DIED] == child.MAX_DEATHS


def test_the_reader_ends_with_whoever_started_it() -> None:
    remote = RemoteMemory()
    assert remote.start()
    remote.read([Span(*_HERE, id(None), 8)])
    reader = _reader()
    remote.close()
    wait_until(lambda: not Path(f"/proc/{reader}").exists())


def test_the_reader_can_do_nothing_but_read(remote: RemoteMemory) -> None:
    remote.read([Span(*_HERE, id(None), 8)])
    assert remote.failures == ""
    lines = Path(f"/proc/{_reader()}/status").read_text().splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    is_root = os.geteuid() == 0
    tracing = f"{1 << 19 if is_root else 0:016x}"
    assert (status["CapEff"], status["CapPrm"], status["CapInh"]) == (tracing, tracing, "0" * 16)
    if is_root:
        assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"65534"}
        assert (status["CapBnd"], status["CapAmb"], status["Groups"]) == ("0" * 16, "0" * 16, "")
