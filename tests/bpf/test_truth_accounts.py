# SPDX-License-Identifier: Apache-2.0
"""What the kernel accounts itself, of programs of which it is known what they do."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import Profile
from aiflame.agent.processes.taskstats import TaskStats
from aiflame.agent.reports.accounts import compared, disagreement
from aiflame.agent.rights import Capability
from breadth import cases
from recordings import Recording
from support import AIFLAME, wait_until

pytestmark = pytest.mark.bpf

_DELAY_ACCOUNTING = Path("/proc/sys/kernel/task_delayacct")


@pytest.fixture
def rivals() -> Iterator[tuple[int, int]]:
    """Two processes that compute on one CPU."""
    cpu = min(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(cpu), "sh", "-c", "while :; do :; done"]
    with ExitStack() as stack:
        processes = []
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            name = Path(f"/proc/{process.pid}/comm")
            wait_until(lambda name=name: name.read_text() == "sh\n")
        yield (processes[0].pid, processes[1].pid)


def test_rivals_for_a_cpu_wait_for_it_half_of_the_time(
    tmp_path: Path, rivals: tuple[int, int]
) -> None:
    pids = ",".join(map(str, rivals))
    with Recording(tmp_path, "-p", pids, "-d", 2, "--gpu", "none") as recording:
        ended = recording.wait()
    profile = ended.profile
    accounts = profile.accounts.threads
    assert {profile.threads[row["thread"]].tid for row in accounts} == {*rivals}
    found = compared(profile)
    assert found is not None
    # Others may run on that CPU as well.
    assert (accounts["run_queue_ns"] > 0.4 * profile.recording.duration_ns).all()
    assert (accounts["on_cpu_ns"] > 0).all()
    whole_ns = accounts["on_cpu_ns"] + accounts["run_queue_ns"]
    # A wait is accounted when it is over, all of it.
    open_ns = accounts["open_wait_ns"] + accounts["misaligned_ns"]
    assert (whole_ns + open_ns > 0.95 * profile.recording.duration_ns).all()
    assert (whole_ns < 1.05 * profile.recording.duration_ns + open_ns).all()
    for sums in (found.on_cpu, found.waited):
        assert abs(sums.counted_ns - sums.accounted_ns) <= sums.slack_ns + 0.02 * sums.counted_ns
    assert disagreement(profile) == ""
    assert "differs" not in ended.stderr


@contextmanager
def _delay_accounting(setting: str) -> Iterator[None]:
    """Delays are accounted meanwhile, of processes that are made meanwhile, or are not."""
    before = _DELAY_ACCOUNTING.read_text()
    _DELAY_ACCOUNTING.write_text(setting)
    try:
        yield
    finally:
        _DELAY_ACCOUNTING.write_text(before)


_READS = """
import mmap, os, resource, sys, threading

def waits():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

def read():
    fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, 1 << 16) as memory:
        before = waits()
        for i in range(500):
            os.preadv(fd, [memory], i % 16 << 16)
        count = waits() - before
    os.close(fd)
    os.write(3, f"{count}\\n".encode())

if sys.argv[2] == "children":
    for _ in range(2):
        if not os.fork():
            read()
            os._exit(0)
    os.wait()
    os.wait()
elif sys.argv[2] == "threads":
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
else:
    read()
"""


def _waits(profile: Profile, cause: str) -> int:
    return sum(delay.count for delay in profile.accounts.delays if delay.cause == cause)


@cases("who, readers", [("itself", 1), ("threads", 2), ("children", 2)])
def test_a_program_that_reads_past_the_cache_waits_for_block_io(
    tmp_path: Path, who: str, readers: int
) -> None:
    file, told = tmp_path / "file", tmp_path / "waits"
    file.write_bytes(bytes(1 << 20))
    reads = f'exec 3>> "{told}"; exec "$@"'
    command = ("sh", "-c", reads, "sh", sys.executable, "-c", _READS, file, who)
    with (
        _delay_accounting("1"),
        Recording(tmp_path, "--gpu", "none", "--", *command) as recording,
    ):
        profile = recording.wait().profile
    counts = [int(line) for line in told.read_text().split()]
    assert len(counts) == readers
    # Where the disk is quick, many reads come back before their thread sleeps; a few do while it
    # goes to sleep, which is no delay. Pages of the interpreter may be waited for, too.
    slack = 0.2 * sum(counts) + 20 * readers
    assert sum(counts) - slack < _waits(profile, "blkio") < sum(counts) + slack
    processes = {profile.threads[row["thread"]].process for row in profile.accounts.threads}
    assert {delay.process for delay in profile.accounts.delays} <= processes
    assert all(delay.ns > 0 for delay in profile.accounts.delays if delay.count)


def test_a_recorder_that_inherits_many_descriptors_asks_for_delays(tmp_path: Path) -> None:
    # GIVEN more open files than select() takes, of whoever starts the recorder
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, max(4096, most[1])))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, most)
        stack.enter_context(_delay_accounting("1"))
        for _ in range(1100):
            file = stack.enter_context(Path(os.devnull).open("rb"))
            os.set_inheritable(file.fileno(), True)
        run = tmp_path / "run.aiflame"
        options = ("--gpu", "none", "-o", str(run))
        command = [*AIFLAME, "record", *options, "--", sys.executable, "-c", "pass"]
        subprocess.run(command, check=True, close_fds=False)
    assert len(read_capture(run).accounts.threads) == 1


def test_without_delay_accounting_nobody_is_asked_for_delays(tmp_path: Path) -> None:
    with (
        _delay_accounting("0"),
        Recording(tmp_path, "--gpu", "none", "--", "sleep", "0.5") as recording,
    ):
        profile = recording.wait().profile
    assert profile.accounts.delays == ()
    assert len(profile.accounts.threads) == 1


# What the kernel has of a thread that ends lacks what it ran since the last tick: children that
# compute for several have most of it.
_COMPUTES = """
import os, threading, time

def compute():
    until_s = time.thread_time() + 0.06
    while time.thread_time() < until_s:
        pass

for _ in range(12):
    if not os.fork():
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        os._exit(0)
    os.wait()
"""


def test_children_and_threads_that_end_are_accounted(tmp_path: Path) -> None:
    command = (sys.executable, "-c", _COMPUTES)
    with (
        _delay_accounting("1"),
        Recording(tmp_path, "--gpu", "none", "--", *command) as recording,
    ):
        ended = recording.wait()
    profile = ended.profile
    accounts = profile.accounts.threads
    computed = [row for row in accounts if row["on_cpu_ns"] > 30_000_000 and row["has_ended"]]
    assert len(computed) == 12
    for row in computed:
        thread = profile.threads[row["thread"]]
        assert thread.tid != profile.processes[thread.process].pid
        # It lacks a tick of 10 ms at most; and a hypervisor takes time from one clock alone.
        assert 0.7 * thread.on_cpu_ns < row["on_cpu_ns"] < 1.1 * thread.on_cpu_ns
    assert len(accounts) == len(profile.threads)
    assert disagreement(profile) == ""
    assert "differs" not in ended.stderr


def test_a_storm_of_short_processes_is_accounted_without_an_alarm(tmp_path: Path) -> None:
    script = "i=0; while [ $i -lt 400 ]; do /bin/true; ls / | cat > /dev/null; i=$((i + 1)); done"
    with (
        _delay_accounting("1"),
        Recording(tmp_path, "--gpu", "none", "--", "sh", "-c", script) as recording,
    ):
        ended = recording.wait()
    profile = ended.profile
    processes = {process.pid for process in profile.processes}
    accounted = {profile.threads[row["thread"]].tid for row in profile.accounts.threads}
    assert len(processes) > 1_200
    assert accounted == processes
    found = compared(profile)
    assert found is not None
    whole_ns = sum(thread.on_cpu_ns for thread in profile.threads)
    assert found.on_cpu.counted_ns == whole_ns
    assert found.on_cpu.accounted_ns <= 1.02 * whole_ns
    assert disagreement(profile) == ""
    assert "differs" not in ended.stderr


def test_who_asks_for_accounts_has_one_thread_and_one_right() -> None:
    # A thread that another one's rights are not taken from could do for it what that one may not.
    with _delay_accounting("1"), TaskStats() as stats:
        (pid,) = stats.pids

        def have_one() -> bool:
            threads = [*Path(f"/proc/{pid}").glob("task/*/status")]
            effective = [
                int(line.split()[1], 16)
                for thread in threads
                for line in thread.read_text().splitlines()
                if line.startswith("CapEff:")
            ]
            return effective == [1 << Capability.NET_ADMIN]

        wait_until(have_one)
