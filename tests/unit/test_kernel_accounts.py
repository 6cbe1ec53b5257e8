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
from aiflame.agent.model.accounts import DELAY_CAUSES
from aiflame.agent.processes.delays import (
    DELAY_READING_DTYPE,
    Delays,
    ProcessDelay,
    delays_between,
)
from aiflame.agent.processes.delays_worker import Layout, delays_of
from aiflame.agent.processes.scheduler_accounts import (
    READING_DTYPE,
    interrupted_ns,
    parse_schedstat,
    read_accounts,
)
from aiflame.agent.recording import kernel_accounts
from aiflame.agent.recording.kernel_accounts import KernelAccounts, growth_of
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
        found = accounts.growth(0, 0).threads["tid"].tolist()
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


def _delays(pid: int, reading: int, **waits: tuple[int, int]) -> np.ndarray:
    row = np.zeros(1, DELAY_READING_DTYPE)
    row["pid"], row["reading"] = pid, reading
    for cause, waited in waits.items():
        row[cause] = waited
    return row


def test_delays_between_two_readings() -> None:
    readings = np.concatenate(
        [
            _delays(10, 0, blkio=(5, 500), swapin=(1, 9)),
            _delays(30, 0, blkio=(9, 900)),
            _delays(10, 1, blkio=(8, 800), swapin=(1, 9)),
            _delays(20, 1, thrashing=(2, 70)),
            _delays(30, 1, blkio=(1, 100)),
        ]
    )
    assert delays_between(readings) == [
        ProcessDelay(10, "blkio", 3, 300),
        ProcessDelay(20, "thrashing", 2, 70),  # it began since
        ProcessDelay(30, "blkio", 1, 100),  # another process of that number
    ]
    assert delays_between(readings[:2]) == []  # nothing was there at the end


@pytest.mark.parametrize(
    "says",
    [
        "cat > /dev/null; printf garbage",
        "cat > /dev/null",
        "exit 1",
        "kill -9 $$",
        f"cat > /dev/null; head -c {DELAY_READING_DTYPE.itemsize - 1} /dev/zero",
    ],
)
def test_a_child_that_does_not_answer_costs_its_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    child = tmp_path / "child"
    child.write_text(f"#!/bin/sh\n{says}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    with Delays() as delays:
        delays.read(range(1, 50_000))
        delays.read([1])
        assert delays.finish() == []
        assert delays.pids == []


def test_a_child_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    with Delays() as delays:
        delays.read([1])
        assert (delays.pids, delays.finish()) == ([], [])


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
