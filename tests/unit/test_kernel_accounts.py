# SPDX-License-Identifier: Apache-2.0
"""What the kernel accounts itself: what /proc and taskstats say, and how that grows."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.kernel.btf import VMLINUX, Btf
from aiflame.agent.losses import LossKind
from aiflame.agent.model.accounts import DELAY_CAUSES, Delay
from aiflame.agent.processes.scheduler_accounts import (
    READING_DTYPE,
    interrupted_ns,
    parse_schedstat,
    read_accounts,
)
from aiflame.agent.processes.taskstats import (
    TASKSTATS_DTYPE,
    ProcessDelay,
    TaskStats,
    Told,
    delays_between,
)
from aiflame.agent.processes.taskstats_worker import End, Layout, delays_of, end_of
from aiflame.agent.recording import kernel_accounts
from aiflame.agent.recording.kernel_accounts import NO_THREAD, KernelAccounts, growth_of
from support import wait_until


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("18281373 10987115 61\n", (18281373, 10987115, 61)),
        ("0 0 0\n", (0, 0, 0)),
        ("", None),
        ("18281373 109871", None),
        ("1 2 3 4\n", None),
        ("-1 2 3\n", None),
        ("1 2 x\n", None),
        ("1 2 ٣\n", None),
        ("1.5 2 3\n", None),
        (f"{1 << 63} 2 3\n", None),
        (f"1 2 {'9' * 5_000}", None),
    ],
)
def test_what_schedstat_may_say(text: str, times: tuple[int, int, int] | None) -> None:
    assert parse_schedstat(text) == times


def test_a_thread_that_computes_is_accounted() -> None:
    pid, stop = os.getpid(), threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()

    def on_cpu_ns() -> int:
        rows, _ = read_accounts([pid])
        return int(rows["on_cpu_ns"][rows["tid"] == thread.native_id].sum())

    try:
        first_ns = on_cpu_ns()
        wait_until(lambda: on_cpu_ns() > first_ns + 20_000_000)
        rows, _ = read_accounts([pid])
        assert set(rows["pid"].tolist()) == {pid}
        assert {pid, thread.native_id} <= set(rows["tid"].tolist())
        assert (rows["read_ns"] <= time.monotonic_ns()).all()
    finally:
        stop.set()
        thread.join()


def test_no_more_threads_are_read_than_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, is_whole = read_accounts([os.getpid()] * 9, most=4)
    assert (len(rows), is_whole) == (4, False)
    # Of those beyond, it is not known which were there when it began.
    monkeypatch.setattr(kernel_accounts, "read_accounts", lambda pids: read_accounts(pids, most=1))
    with subprocess.Popen(["sleep", "60"]) as process:
        accounts = KernelAccounts()
        accounts.begin([os.getpid(), process.pid])
        monkeypatch.setattr(kernel_accounts, "read_accounts", read_accounts)
        accounts.end([], {})
        found = accounts.growth(0, 0, lambda pid, tid: None).threads["tid"].tolist()
        process.kill()
    assert found == [os.getpid()]


def test_a_process_that_is_over_is_accounted_until_it_is_waited_for() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert read_accounts([process.pid])[0]["tid"].tolist() == [process.pid]
    assert len(read_accounts([process.pid])[0]) == 0


def test_cpus_were_in_interrupts() -> None:
    assert interrupted_ns() >= 0


def _readings(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array([*rows], READING_DTYPE)


def test_what_grew_between_two_readings() -> None:
    first = _readings((10, 10, 100, 50, 3, 990), (10, 11, 7, 7, 7, 995), (20, 20, 1, 1, 1, 996))
    last = _readings((10, 10, 160, 55, 9, 2_010), (10, 12, 30, 2, 4, 2_020))
    assert growth_of(first, last, 1_000, 2_000).tolist() == [
        (10, 10, 60, 5, 6, 10 + 10, 0),
        (10, 12, 30, 2, 4, 20, 0),  # it began since
    ]


def test_another_thread_of_the_same_number_begins_at_zero() -> None:
    first, last = _readings((10, 11, 100, 50, 3, 990)), _readings((10, 11, 160, 49, 9, 2_000))
    assert growth_of(first, last, 1_000, 2_000).tolist() == [(10, 11, 160, 49, 9, 0, 0)]


def _told(kind: Told, pid: int, tid: int = 0, *times: int, **waits: tuple[int, int]) -> np.ndarray:
    """Returns a row: ns on a CPU and in a run queue, time slices, when it was read, and waits."""
    row = np.zeros(1, TASKSTATS_DTYPE)
    row["kind"], row["pid"], row["tid"] = kind, pid, tid
    for name, value in zip(
        ("on_cpu_ns", "run_queue_ns", "timeslices", "read_ns"), times, strict=False
    ):
        row[name] = value
    for cause, waited in waits.items():
        row[cause] = waited
    return row


def test_delays_between_two_readings() -> None:
    first = [
        _told(Told.FIRST, 10, blkio=(5, 500), swapin=(1, 9)),
        _told(Told.FIRST, 30, blkio=(9, 900)),
    ]
    last = [
        _told(Told.LAST, 10, blkio=(8, 800), swapin=(1, 9)),
        _told(Told.LAST, 20, thrashing=(2, 70)),
        _told(Told.LAST, 30, blkio=(1, 100)),
        _told(Told.LAST, 10, blkio=(9, 900)),
    ]
    assert delays_between(np.concatenate(first), np.concatenate(last)) == [
        [ProcessDelay(10, "blkio", 3, 300)],
        [ProcessDelay(20, "thrashing", 2, 70)],  # it began since
        [ProcessDelay(30, "blkio", 1, 100)],  # another process of that number
        [ProcessDelay(10, "blkio", 9, 900)],  # and one after the first had ended
    ]
    assert delays_between(np.concatenate(first), last[0][:0]) == []  # nothing was there at the end


class _Stats:
    """Tells what it was given, at once and at the end."""

    pids: tuple[int, ...] = ()

    def __init__(self, *at_once: np.ndarray, at_the_end: tuple[np.ndarray, ...] = ()) -> None:
        self._at_once, self._at_the_end = at_once, at_the_end

    def wait(self) -> None: ...

    def read(self, pids: object) -> None: ...

    def take(self) -> np.ndarray:
        told, self._at_once = self._at_once, ()
        return np.concatenate([np.zeros(0, TASKSTATS_DTYPE), *told])

    def finish(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, TASKSTATS_DTYPE), *self._at_the_end])


def _numbers(pid: int, tid: int) -> tuple[int, int] | None:
    """A recording of the pids 10 to 19: processes 0 to 9, threads 100 to 199 of tids 10 to 109."""
    return (pid - 10, tid + 90) if 10 <= pid < 20 else None


def test_what_ends_within_the_recording_is_accounted() -> None:
    accounts = KernelAccounts(
        _Stats(  # type: ignore[arg-type]
            _told(Told.THREAD_ENDED, 10, 11, 70, 7, 3, 1_500),
            _told(Told.PROCESS_ENDED, 10, 10, 50, 5, 2, 1_600, blkio=(4, 40)),
            _told(Told.PROCESS_ENDED, 30, 30, 9, 9, 9, 1_600, blkio=(9, 9)),  # not recorded
            _told(Told.PROCESS_ENDED, 12, 12, 9, 9, 9, 900, blkio=(9, 9)),  # before it began
            at_the_end=(
                _told(Told.PROCESS_ENDED, 13, 13, 20, 2, 1, 2_005),
                _told(Told.PROCESS_ENDED, 13, 14, 30, 3, 1, 2_006, swapin=(2, 22)),
            ),
        )
    )
    accounts.take(_numbers)
    growth = accounts.growth(1_000, 2_000, _numbers)
    assert growth.ended.tolist() == [
        (100, 50, 5, 2, 0, 0, True),
        (101, 70, 7, 3, 0, 0, True),
        (103, 20, 2, 1, 5, 0, True),
        (104, 30, 3, 1, 6, 0, True),
    ]
    assert growth.ended_delays == (Delay(0, "blkio", 4, 40), Delay(3, "swapin", 2, 22))
    assert accounts.losses.total() == 0


def test_what_ended_had_before_the_recording_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = _readings((10, 10, 100, 50, 3, 990))
    monkeypatch.setattr(kernel_accounts, "read_accounts", lambda pids: (first, True))
    waits = _told(Told.FIRST, 10, blkio=(5, 500))
    ends = (160, 55, 9, 1_500)
    again = (170, 60, 10, 1_900)  # another one, of the same numbers, in the place of the first
    accounts = KernelAccounts(
        _Stats(  # type: ignore[arg-type]
            waits,
            _told(Told.PROCESS_ENDED, 10, 10, *ends, blkio=(8, 800)),
            _told(Told.PROCESS_ENDED, 10, 10, *again, blkio=(9, 900)),
        )
    )
    accounts.begin([10])
    numbers = iter([(0, 0), (1, 1)])
    accounts.take(lambda pid, tid: next(numbers))
    growth = accounts.growth(1_000, 2_000, _numbers)
    assert growth.ended[["thread", "on_cpu_ns", "run_queue_ns", "timeslices"]].tolist() == [
        (0, 60, 5, 6),
        (1, 170, 60, 10),
    ]
    assert growth.ended["misaligned_ns"].tolist() == [10, 0]
    assert growth.ended_delays == (Delay(0, "blkio", 3, 300), Delay(1, "blkio", 9, 900))


def test_a_thread_that_the_recording_does_not_know_ends_with_its_process_alone() -> None:
    stats = _Stats(_told(Told.PROCESS_ENDED, 10, 10, 50, 5, 2, 1_600, blkio=(4, 40)))
    accounts = KernelAccounts(stats)  # type: ignore[arg-type]
    accounts.take(lambda pid, tid: (7, NO_THREAD))
    growth = accounts.growth(1_000, 2_000, lambda pid, tid: (7, NO_THREAD))
    assert (len(growth.ended), growth.ended_delays) == (0, (Delay(7, "blkio", 4, 40),))


def test_what_ends_before_its_events_are_taken_in_is_accounted_the_next_time() -> None:
    # GIVEN ends of a process that nobody knows yet, and of one whose thread nobody does
    stats = _Stats(
        _told(Told.PROCESS_ENDED, 10, 10, 50, 5, 2, 1_600),
        _told(Told.PROCESS_ENDED, 11, 11, 60, 6, 3, 1_700, blkio=(4, 40)),
        _told(Told.PROCESS_ENDED, 30, 30, 9, 9, 9, 1_800),  # not recorded
    )
    accounts = KernelAccounts(stats)  # type: ignore[arg-type]
    accounts.take(lambda pid, tid: (1, NO_THREAD) if pid == 11 else None)
    # WHEN they are known
    accounts.take(_numbers)
    # THEN both have their accounts, once.
    growth = accounts.growth(1_000, 2_000, _numbers)
    assert growth.ended[["thread", "on_cpu_ns"]].tolist() == [(100, 50), (101, 60)]
    assert growth.ended_delays == (Delay(1, "blkio", 4, 40),)


def test_of_a_process_the_end_of_its_last_thread_counts_however_late_it_is_known() -> None:
    # GIVEN a main thread that ends first, and is known last
    stats = _Stats(
        _told(Told.PROCESS_ENDED, 10, 10, 50, 5, 2, 1_600, blkio=(1, 10)),
        _told(Told.PROCESS_ENDED, 10, 11, 60, 6, 3, 1_700, blkio=(9, 90)),
    )
    accounts = KernelAccounts(stats)  # type: ignore[arg-type]
    accounts.take(lambda pid, tid: (0, NO_THREAD) if tid == 10 else (0, 101))
    growth = accounts.growth(1_000, 2_000, _numbers)
    assert growth.ended_delays == (Delay(0, "blkio", 9, 90),)
    assert growth.ended["thread"].tolist() == [100, 101]


def test_what_is_no_targets_is_not_asked_for_again_for_long() -> None:
    second = 1_000_000_000
    ends = [_told(Told.THREAD_ENDED, 30, 30 + at, 1, 1, 1, at * second) for at in range(3)]
    accounts = KernelAccounts(_Stats(*ends))  # type: ignore[arg-type]
    accounts.take(_numbers)
    asked: list[int] = []
    accounts.growth(0, 9 * second, lambda _, tid: asked.append(tid))
    assert asked == [32]


def test_ends_beyond_what_is_kept_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_accounts, "_MOST_ENDED", 2)
    rows = [_told(Told.THREAD_ENDED, 10, 10 + at, 1, 1, 1, 1_500) for at in range(5)]
    rows[-1]["lost"] = 40  # in the kernel, of all programs
    accounts = KernelAccounts(_Stats(*rows))  # type: ignore[arg-type]
    accounts.take(_numbers)
    assert accounts.losses == {LossKind.ENDS_NOT_ACCOUNTED: 43}
    assert len(accounts.growth(1_000, 2_000, _numbers).ended) == 2


@pytest.mark.parametrize(
    "says",
    [
        "cat > /dev/null; printf garbage",
        "cat > /dev/null",
        "exit 1",
        "kill -9 $$",
        f"cat > /dev/null; head -c {TASKSTATS_DTYPE.itemsize - 1} /dev/zero",
    ],
)
def test_a_child_that_does_not_answer_costs_its_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    child = tmp_path / "child"
    child.write_text(f"#!/bin/sh\n{says}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    with TaskStats() as stats:
        stats.wait()
        stats.read(range(1, 50_000))
        stats.read([1])
        assert len(stats.take()) == 0
        assert len(stats.finish()) == 0
        assert stats.pids == []


def test_a_child_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    with TaskStats() as stats:
        stats.wait()
        stats.read([1])
        assert (stats.pids, len(stats.take()), len(stats.finish())) == ([], 0, 0)


class _Kernel:
    """Struct taskstats of processes and of threads, by number."""

    def __init__(self, processes: dict[int, bytes], threads: dict[int, bytes]) -> None:
        self._processes, self._threads = processes, threads

    def of_process(self, pid: int) -> bytes:
        return self._found(self._processes, pid)

    def of_thread(self, tid: int) -> bytes:
        return self._found(self._threads, tid)

    def _found(self, known: dict[int, bytes], number: int) -> bytes:
        if number not in known:
            raise ProcessLookupError(number)
        return known[number]


@pytest.fixture(scope="module")
def btf() -> Btf:
    return Btf.of_kernel(VMLINUX)


def _stats(btf: Btf, **members: int) -> bytes:
    data = bytearray(1_024)
    for name, value in members.items():
        struct.pack_into("<Q", data, btf.member_offset("taskstats", name), value)
    return bytes(data)


def test_what_struct_taskstats_says(btf: Btf) -> None:
    layout = Layout(btf)
    stats = _stats(btf, cpu_count=1, blkio_count=3, blkio_delay_total=300, swapin_count=2)
    kernel = _Kernel({10: stats}, {})
    found = delays_of(10, kernel, layout)
    assert found is not None
    assert (found["blkio"], found["swapin"]) == ((3, 300), (2, 0))
    assert set(found) <= set(DELAY_CAUSES)
    assert delays_of(11, kernel, layout) is None


def test_a_process_that_is_over_is_told_by_its_last_thread(btf: Btf) -> None:
    layout, thread = Layout(btf), _stats(btf, cpu_count=9, blkio_count=4, blkio_delay_total=40)
    found = delays_of(10, _Kernel({10: _stats(btf)}, {10: thread}), layout)
    assert found is not None
    assert found["blkio"] == (4, 40)
    # It may be gone between the two questions.
    assert delays_of(10, _Kernel({10: _stats(btf)}, {}), layout) is None


@pytest.mark.parametrize("length", [0, 1, 7, 40])
def test_a_struct_that_is_cut_says_nothing(btf: Btf, length: int) -> None:
    stats = _stats(btf, cpu_count=1, blkio_count=3, freepages_count=3)[:length]
    found = delays_of(10, _Kernel({10: stats}, {10: stats}), Layout(btf))
    assert found is not None
    assert found["freepages"] == (0, 0)


def _attribute(kind: int, body: bytes) -> bytes:
    return struct.pack("<HH", 4 + len(body), kind) + body + bytes(-len(body) % 4)


def _of_thread(stats: bytes) -> bytes:
    # TASKSTATS_TYPE_AGGR_PID with NLA_F_NESTED: PID, what aligns the rest, STATS.
    return _attribute(0x8004, _attribute(1, bytes(4)) + _attribute(6, b"") + _attribute(3, stats))


def _of_process(pid: int, stats: bytes) -> bytes:
    return _attribute(0x8005, _attribute(2, struct.pack("<I", pid)) + _attribute(3, stats))


def _ended(btf: Btf, pid: int, tid: int, **members: int) -> bytes:
    times = {"cpu_run_virtual_total": 60, "cpu_delay_total": 5, "cpu_count": 9}
    data = bytearray(_stats(btf, **times, **members))
    struct.pack_into("<I", data, btf.member_offset("taskstats", "ac_pid"), tid)
    struct.pack_into("<I", data, btf.member_offset("taskstats", "ac_tgid"), pid)
    return bytes(data)


def test_the_end_of_a_thread_and_of_its_process(btf: Btf) -> None:
    layout, header = Layout(btf), bytes(20)

    def end(*parts: bytes) -> End:
        found = end_of(header + b"".join(parts), layout)
        assert found is not None
        return found

    times = (60, 5, 9)
    thread = end(_of_thread(_ended(btf, 10, 11, blkio_count=1)))
    assert thread == End(10, 11, times, None)
    only = end(_of_thread(_ended(btf, 10, 10, blkio_count=2, blkio_delay_total=20)))
    assert (only.pid, only.tid, only.times) == (10, 10, times)
    assert only.delays is not None and only.delays["blkio"] == (2, 20)
    whole = _stats(btf, blkio_count=3, blkio_delay_total=30)
    last = end(_of_thread(_ended(btf, 10, 11, blkio_count=1)), _of_process(10, whole))
    assert (last.pid, last.tid, last.times) == (10, 11, times)
    assert last.delays is not None and last.delays["blkio"] == (3, 30)


def test_what_is_no_end_of_a_thread_says_nothing(btf: Btf) -> None:
    layout = Layout(btf)
    whole = bytes(20) + _of_thread(_ended(btf, 10, 10))
    assert end_of(whole, layout) is not None
    refused = struct.pack("<IHHII", 36, 2, 0, 1, 0) + struct.pack("<i", -1) + bytes(16)
    for message in (b"", bytes(20), bytes(400), refused, whole[:40]):
        assert end_of(message, layout) is None
    for length in range(len(whole)):
        end_of(whole[:length], layout)
