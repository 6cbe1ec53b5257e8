# SPDX-License-Identifier: Apache-2.0
"""Which snapshots of sleeping threads are to be believed, and what is said where there are none.

The kernel's iterator is stood in for: a pipe with records for its file, a list for its answers.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiflame.agent import kernelfs
from aiflame.agent.inspector.memory import RemoteMemory
from aiflame.agent.kernel import abi
from aiflame.agent.losses import LossKind
from aiflame.agent.model.profile import StopReason
from aiflame.agent.processes import procfs, snapshots, threads
from aiflame.agent.processes.snapshots import Snapshot, Snapshots
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.processes.thread_walk import StackWalker, WalkedThread
from aiflame.agent.processes.threads import ThreadRegisters, thread_registers
from aiflame.agent.recording.sleep_walks import SleepWalks
from aiflame.agent.recording.sleepers import Sleepers, give_all_sleepers
from support import blind_inspector

_INTERRUPTIBLE, _RUNNABLE, _WAKING, _DEAD = 0x1, 0x0, 0x200, 0x80
_IDLE_WORKER = 0x402

_NO_PYTHON: Any = SimpleNamespace(
    prepare=list,
    of_thread=lambda image, pointer: None,
    look=lambda image: None,
    poll=lambda: None,
)


def _record(pid: int, tid: int, **fields: Any) -> ThreadRegisters:
    whole = ThreadRegisters(
        1, 2, 3, 4, 0x1000, 0x2000, 0x3000, 0x4000, 5, 6, pid, tid, 1, 0, b"name"
    )
    return whole._replace(**fields)


def _bytes(*records: ThreadRegisters) -> bytes:
    return np.array([tuple(record) for record in records], abi.THREAD_REGISTERS_DTYPE).tobytes()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All tasks of a host; the list gets what the kernel was asked for, None for all tasks."""
    asked: list[Any] = []
    tasks = [_record(10, 10), _record(10, 11), _record(20, 20), _record(30, 30)]

    def open_task_iterator(program_fd: int, pid: int | None) -> int:
        assert program_fd == 5
        asked.append(pid)
        read_fd, write_fd = os.pipe()
        os.write(write_fd, _bytes(*(task for task in tasks if pid in (None, task.pid))))
        os.close(write_fd)
        return read_fd

    monkeypatch.setattr(threads, "open_task_iterator", open_task_iterator)
    return asked


def _ids(records: list[ThreadRegisters]) -> set[tuple[int, int]]:
    return {(record.pid, record.tid) for record in records}


def test_a_few_processes_are_asked_for_by_name(host: list[Any]) -> None:
    found = thread_registers(5, [10, 30, 40])
    assert found[0] == _record(10, 10)
    assert _ids(found) == {(10, 10), (10, 11), (30, 30)}
    assert host == [10, 30, 40]
    assert _ids(thread_registers(5, [10], [11])) == {(10, 11)}


def test_many_processes_are_picked_from_all_tasks(host: list[Any]) -> None:
    assert _ids(thread_registers(5, range(15, 100))) == {(20, 20), (30, 30)}
    assert host == [None]


def test_kernels_that_take_no_process_show_all_tasks(
    monkeypatch: pytest.MonkeyPatch, host: list[Any]
) -> None:
    opened = threads.open_task_iterator

    def refuse(program_fd: int, pid: int | None) -> int:
        if pid is not None:
            raise OSError(errno.E2BIG, "Argument list too long")
        return opened(program_fd, pid)

    monkeypatch.setattr(threads, "open_task_iterator", refuse)
    assert _ids(thread_registers(5, [10])) == {(10, 10), (10, 11)}


@pytest.mark.parametrize(
    ("fields", "is_asleep"),
    [
        ({"state": _INTERRUPTIBLE}, True),
        ({"state": _IDLE_WORKER}, True),
        ({"state": _INTERRUPTIBLE, "is_on_cpu": 1}, False),  # about to sleep, or just woken up
        ({"state": _RUNNABLE}, False),
        ({"state": _WAKING}, False),
        ({"state": _DEAD}, False),
    ],
)
def test_who_is_asleep(fields: dict[str, Any], is_asleep: bool) -> None:
    assert _record(1, 1, **fields).is_asleep is is_asleep


def test_only_threads_that_slept_on_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [_record(1, tid) for tid in range(5)] + [_record(1, 9, state=_RUNNABLE)]
    after = [
        before[0],
        _record(1, 1, ran_ns=2 + 1),  # ran, and sleeps again in the same place
        _record(1, 2, state=_RUNNABLE),
        _record(1, 3, started_ns=77),  # another thread by the same id
        # the fifth has ended
    ]
    answers = iter([before, after])

    def registers(fd: int, pids: Collection[int], tids: Collection[int]) -> list[ThreadRegisters]:
        return next(answers)

    monkeypatch.setattr(snapshots, "thread_registers", registers)
    memory = RemoteMemory()
    assert set(Snapshots(5, memory).take([(1, tid) for tid in range(10)])) == {0}
    memory.close()


def test_an_iterator_that_fails_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def registers(*_: object) -> list[ThreadRegisters]:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(snapshots, "thread_registers", registers)
    taken = Snapshots(5, RemoteMemory())
    assert taken.are_possible
    assert taken.take([(1, 1)]) == {}
    assert not taken.are_possible


def test_an_iterator_for_which_there_is_no_room_now_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def registers(*_: object) -> list[ThreadRegisters]:
        raise OSError(errno.ENFILE, "Too many open files in system")

    monkeypatch.setattr(snapshots, "thread_registers", registers)
    taken = Snapshots(5, RemoteMemory())
    assert taken.take([(1, 1)]) == {}
    assert taken.are_possible


def _no_walks(table: ProcessTable) -> SleepWalks:
    return SleepWalks(table, SimpleNamespace(), None, _NO_PYTHON, lambda: None)  # type: ignore[arg-type]


class _Threads:
    """The kernel's thread table."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}

    def update(self, key: bytes, value: bytes, flags: int) -> bool:
        return self.entries.setdefault(key, value) is value

    def delete(self, key: bytes) -> None:
        del self.entries[key]

    def lookup(self, key: bytes) -> Any:
        value = self.entries.get(key)
        return None if value is None else np.frombuffer(value, abi.THREAD_STATE_DTYPE)


@pytest.fixture
def waiting_tid() -> Iterator[int]:
    """A thread of this process that sleeps."""
    released, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        released.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    assert thread.native_id is not None
    yield thread.native_id
    released.set()
    thread.join()


@pytest.mark.parametrize(
    ("is_walked", "end", "missing"),
    [(True, StopReason.NOT_WALKED, 1), (False, StopReason.EXCLUDED, 0)],
)
def test_kernels_without_the_iterator_are_said_to_be(
    waiting_tid: int,
    wait_until: Any,
    monkeypatch: pytest.MonkeyPatch,
    is_walked: bool,
    end: StopReason,
    missing: int,
) -> None:
    here = os.getpid()
    wait_until(lambda: getattr(procfs.thread_stat(here, waiting_tid), "state", "") == "S")
    monkeypatch.setattr(procfs, "thread_ids", lambda pid: [waiting_tid])
    programs: Any = SimpleNamespace(threads=_Threads())
    tables: Any = SimpleNamespace(wait=lambda binaries, deadline_ns: None)
    table = ProcessTable(1, lambda pid: 1, blind_inspector())
    walker = StackWalker(tables, SimpleNamespace()) if is_walked else None  # type: ignore[arg-type]
    walks = SleepWalks(table, tables, walker, _NO_PYTHON, lambda: None)
    sleepers = Sleepers(programs, table, walks, _NO_PYTHON, kernel_stacks=True)
    for _ in sleepers.enter([here]):
        pass
    made = []
    stacks: Any = SimpleNamespace(add_made=lambda *row: made.append(row))
    give_all_sleepers(sleepers, sleepers.by_stack, stacks, table)
    ((stack, found),) = made
    assert sleepers.by_stack[stack].tid == waiting_tid
    assert (found.image.pid, found.user, found.end) == (here, [], end)
    assert sleepers.losses[LossKind.SLEEPERS_NOT_WALKED] == missing


def test_who_sleeps_in_a_process_in_which_nothing_happens_is_walked_while_recording(
    waiting_tid: int, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a thread that sleeps, of a process that nobody tells of, and one of a process that ends
    here, gone = os.getpid(), 1 << 22  # no pid is as large (PID_MAX_LIMIT)
    wait_until(lambda: getattr(procfs.thread_stat(here, waiting_tid), "state", "") == "S")
    asleep = procfs.ThreadStat("S", 3 + 4)  # switches of `_record`
    stats = {waiting_tid: asleep, gone: asleep}
    monkeypatch.setattr(procfs, "thread_stat", lambda pid, tid: stats.get(tid))
    monkeypatch.setattr(procfs, "thread_ids", lambda pid: [waiting_tid if pid == here else gone])
    table = ProcessTable(1, lambda pid: 1, blind_inspector())
    walked = WalkedThread((0x10,), StopReason.ROOTED, frozenset())

    def read(image: Any) -> bool:
        image.was_read = image.pid == here
        return bool(image.was_read)

    def walk(image: Any, *_: object) -> WalkedThread:
        return walked

    monkeypatch.setattr(table, "read_mappings", read)
    tables: Any = SimpleNamespace()
    walker: Any = SimpleNamespace(walk_thread=walk, forget=lambda: None)
    walks = SleepWalks(table, tables, walker, _NO_PYTHON, lambda: None)
    taken: Any = SimpleNamespace(
        take=lambda asked, piece: {tid: Snapshot(_record(pid, tid), b"") for pid, tid in asked},
        memory_of=lambda snapshot, is_live: SimpleNamespace(late_pages=False),
        still_asleep=lambda found: {each.registers.tid for each in found},
    )
    walks.__dict__["_snapshots"] = taken  # as cached_property keeps it
    programs: Any = SimpleNamespace(threads=_Threads())
    sleepers = Sleepers(programs, table, walks, _NO_PYTHON, kernel_stacks=False)
    for _ in sleepers.enter([here, gone]):
        pass
    # WHEN windows come
    for _ in range(2):
        assert not any(sleeper.walked for sleeper in sleepers.by_stack.values())
        sleepers.walk_again()
    sleepers.walk_again()
    # THEN its stack is known before the recording ends, and the other one is waited for no more
    found = {sleeper.tid: sleeper for sleeper in sleepers.by_stack.values()}
    assert found[waiting_tid].walked is walked
    assert found[gone].walked is None
    assert all(sleeper.is_settled for sleeper in found.values())


def test_threads_that_a_short_recording_missed_are_counted(
    waiting_tid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "thread_ids", lambda pid: [os.getpid(), waiting_tid])
    programs: Any = SimpleNamespace(threads=_Threads())
    table = ProcessTable(1, lambda pid: 1, blind_inspector())
    sleepers = Sleepers(programs, table, _no_walks(table), _NO_PYTHON, False)
    entering = sleepers.enter([os.getpid(), 2])
    next(entering)
    # WHEN the recording ends before the first is entered; one was entered by the kernel half
    programs.threads.update(waiting_tid.to_bytes(4, "little"), b"", 0)
    missed = sleepers.missed()
    # THEN those of both processes that are not in the table are counted
    assert sleepers.losses[LossKind.THREADS_NOT_ENTERED] == 2
    # and those among them that are there still are known to have been there for all of it.
    assert missed == [(os.getpid(), os.getpid())]


def test_a_thread_that_ends_while_it_is_entered_is_taken_out_again(
    waiting_tid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a thread that ends after it was looked at, whose end the kernel half has told before
    here, ended = os.getpid(), 1 << 22
    stats = {waiting_tid: procfs.ThreadStat("S", 7), ended: procfs.ThreadStat("R", 7)}
    monkeypatch.setattr(procfs, "thread_ids", lambda pid: [ended, waiting_tid])
    monkeypatch.setattr(procfs, "thread_stat", lambda pid, tid: stats.get(tid))
    programs: Any = SimpleNamespace(threads=_Threads())
    table = ProcessTable(1, lambda pid: 1, blind_inspector())
    sleepers = Sleepers(programs, table, _no_walks(table), _NO_PYTHON, False)
    for _ in sleepers.enter([here]):
        if len(programs.threads.entries) == 2:
            stats.pop(ended, None)
    # THEN it is not in the table, and the other is
    assert {*programs.threads.entries} == {waiting_tid.to_bytes(4, "little")}


def test_threads_whose_time_is_known_are_not_said_to_miss_it(
    waiting_tid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "thread_ids", lambda pid: [os.getpid(), waiting_tid])
    programs: Any = SimpleNamespace(threads=_Threads())
    table = ProcessTable(1, lambda pid: 1, blind_inspector())
    sleepers = Sleepers(programs, table, _no_walks(table), _NO_PYTHON, False)
    next(sleepers.enter([os.getpid()]))
    # WHEN one that was not entered has ended, and the kernel half has told how long it was there
    table.thread(table.image(os.getpid(), 1), waiting_tid).has_ended = True
    assert sleepers.missed() == [(os.getpid(), os.getpid())]
    assert sleepers.losses[LossKind.THREADS_NOT_ENTERED] == 1


def test_threads_beyond_the_kernels_table_are_counted(
    waiting_tid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> bool:
        raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))

    monkeypatch.setattr(procfs, "thread_ids", lambda pid: [waiting_tid])
    programs: Any = SimpleNamespace(threads=_Threads())
    programs.threads.update = is_full
    table = ProcessTable(1, lambda pid: 1, blind_inspector())
    sleepers = Sleepers(programs, table, _no_walks(table), _NO_PYTHON, False)
    for _ in sleepers.enter([os.getpid()]):
        pass
    assert sleepers.missed() == [(os.getpid(), waiting_tid)]
    assert sleepers.losses[LossKind.THREAD_TABLE_FULL] == 1
    assert sleepers.losses[LossKind.THREADS_NOT_ENTERED] == 0


_KALLSYMS = """\
ffffffff81000010 T schedule
ffffffffc0000020 t wait_for_it\t[first]
ffffffffc0000300 t wait_for_it\t[second]
0000000000000000 t hidden
"""
_STACK = """\
[<0>] wait_for_it+0x14/0x40 [second]
[<0>] hidden+0x8/0x10
[<0>] gone_since+0x8/0x10 [third]
[<0>] schedule+0x2/0x30
"""


@pytest.mark.parametrize(
    ("stack", "wait_channel", "expected", "lost"),
    [
        (_STACK, "", [0xFFFF_FFFF_C000_0314, 0xFFFF_FFFF_8100_0012], 2),
        # That of the wait channel alone: at least one more is missing.
        ("", "wait_for_it", [0xFFFF_FFFF_C000_0021], 1),
        ("", "hidden", [], 2),
        ("", "0", [], 0),
    ],
)
def test_kernel_frames_without_an_address_are_counted(
    waiting_tid: int,
    monkeypatch: pytest.MonkeyPatch,
    stack: str,
    wait_channel: str,
    expected: list[int],
    lost: int,
) -> None:
    texts = {"stack": stack, "wchan": wait_channel}
    monkeypatch.setattr(
        kernelfs, "read_text", lambda path, *_: texts.get(path.rpartition("/")[2], "")
    )
    listed = _KALLSYMS.encode().splitlines(keepends=True)
    monkeypatch.setattr(kernelfs, "lines", lambda path: iter(listed))
    monkeypatch.setattr(procfs, "thread_ids", lambda pid: [waiting_tid])
    stat = procfs.ThreadStat("S", 1)
    monkeypatch.setattr(procfs, "thread_stat", lambda pid, tid: stat)
    programs: Any = SimpleNamespace(threads=_Threads())
    table = ProcessTable(1, lambda pid: None, blind_inspector())
    sleepers = Sleepers(programs, table, _no_walks(table), _NO_PYTHON, kernel_stacks=True)
    for _ in sleepers.enter([os.getpid()]):
        pass
    made: list[Any] = []
    stacks: Any = SimpleNamespace(add_made=lambda *row: made.append(row))
    give_all_sleepers(sleepers, sleepers.by_stack, stacks, table)
    ((_, found),) = made
    assert found.kernel == expected
    assert sleepers.losses[LossKind.SLEEPERS_KERNEL_FRAMES_LOST] == lost
