# SPDX-License-Identifier: Apache-2.0
"""The recorder is urgent while it has to be, within bounds, and nobody else becomes so by it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.processes import procfs
from recordings import Recording, Workload, children_of
from support import AIFLAME, wait_until

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

_TELL = """\
import os, resource
print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0),
      resource.getrlimit(resource.RLIMIT_RTTIME))
"""
_PRIORITY = "from aiflame.agent import priority\n"


def _policy(pid: int) -> int:
    return os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def _helpers(pid: int) -> list[int]:
    """A recorder's children, and what the fork server among them has forked to build tables."""
    found = []
    for child in children_of(pid):
        if any(_FORKS in word for word in _command(child)):
            found += [fork for fork in children_of(child) if procfs.comm(fork) == "unwind.worker"]
        else:
            found.append(child)
    return found


def _nice(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


@pytest.mark.parametrize(
    "chosen", [(), ("nice", "-n", "5"), ("nice", "-n", "-5"), ("chrt", "-b", "0"), ("chrt", "3")]
)
def test_a_command_runs_as_if_it_was_not_recorded(chosen: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-c", _TELL]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "check": True, "text": True}
    alone = subprocess.run([*chosen, *command], **options)  # type: ignore[call-overload]
    recording = [*chosen, *AIFLAME, "record", "-q", "-o", "run.aiflame", "--gpu", "none", "--"]
    recorded = subprocess.run([*recording, *command], **options)  # type: ignore[call-overload]
    assert recorded.stdout == alone.stdout


# What the recorder waits for: they copy memory and look into files. The fork server is as urgent as
# who asked it last.
_WAITED_FOR = ("memory_worker", "opener_worker")
_FORKS = "forking"


def test_the_recorder_is_real_time_and_its_children_are_not(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    with Workload([workload("crowd"), 1, 1000]) as running:
        running.go()
        with Recording(tmp_path, "-p", running.pid) as recording:
            wait_until(lambda: _policy(recording.pid) == os.SCHED_RR)
            assert os.sched_getparam(recording.pid).sched_priority == 1
            # WHEN it has had symbol tables built THEN those who do so are like any other
            wait_until(lambda: children_of(recording.pid))
            for child in _helpers(recording.pid):
                # But for those that the recorder waits for.
                if any(name in word for word in _command(child) for name in _WAITED_FOR):
                    assert _policy(child) == os.SCHED_RR
                    continue
                assert _policy(child) == os.SCHED_OTHER
                assert _nice(child) >= 0
            assert recording.stop().returncode == 0


def test_a_recorder_with_a_chosen_priority_keeps_it(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    with Workload([workload("crowd"), 1, 1000]) as running:
        os.setpriority(os.PRIO_PROCESS, 0, 5)
        try:
            recording = Recording(tmp_path, "-p", running.pid)
        finally:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        with recording:
            assert _policy(recording.pid) == os.SCHED_OTHER
            assert _nice(recording.pid) == 5
            recording.stop()


def test_without_the_capability_it_says_so_and_records(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    drop = ("setpriv", "--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice")
    with Workload([workload("crowd"), 1, 1000]) as running:
        running.go()
        target = ["-p", str(running.pid), "-d", "300ms", "-o", "run.aiflame"]
        done = subprocess.run(
            [*drop, *AIFLAME, "record", *target], cwd=tmp_path, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert "note: no CAP_SYS_NICE" in done.stderr


def _printed(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PRIORITY + script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_work_past_the_budget_is_not_real_time() -> None:
    assert _printed("""
import os, time
def policy():
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
def work(ns):
    end = time.thread_time_ns() + ns
    while time.thread_time_ns() < end:
        pass
assert priority.hurry()
with priority.RealTime(budget_ns=20_000_000, window_ns=10**15) as real_time:
    real_time.check()
    print(policy())
    work(21_000_000)
    real_time.check()
    print(policy(), os.getpriority(os.PRIO_PROCESS, 0))
with priority.RealTime(budget_ns=20_000_000, window_ns=30_000_000) as real_time:
    work(21_000_000)
    real_time.check()
    work(10_000_000)
    real_time.check()  # another window, another budget
    print(policy())
print(policy())
priority.as_started()
print(policy(), os.getpriority(os.PRIO_PROCESS, 0))
""") == [
        *(str(os.SCHED_RR), str(os.SCHED_OTHER), "-20"),
        *(str(os.SCHED_RR), str(os.SCHED_OTHER)),
        *(str(os.SCHED_OTHER), "0"),
    ]


def test_whoever_does_not_end_is_not_real_time_for_long() -> None:
    # GIVEN a thread that is urgent and never looks at the clock
    (seconds,) = _printed("""
import os, time
assert priority.hurry()
while os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR:
    pass
print(time.process_time())
""")
    # THEN the kernel tells it to stop after a second
    assert float(seconds) < 5
