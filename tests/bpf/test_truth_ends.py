# SPDX-License-Identifier: Apache-2.0
"""A recording of -d seconds ends then, however late the recorder comes to know it."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiflame.agent.model.profile import Profile, SampleClass
from recordings import Recording, Workload, off_cpu_by_thread, rows_of
from support import wait_until

pytestmark = pytest.mark.bpf

_SECOND_NS = 1_000_000_000


def _assert_times_add_up(profile: Profile) -> None:
    off_ns = off_cpu_by_thread(profile)
    for index, thread in enumerate(profile.threads):
        missing_ns = thread.observed_ns - thread.on_cpu_ns - int(off_ns[index])
        assert abs(missing_ns) < 1000, thread
        assert thread.observed_ns <= profile.recording.duration_ns


@pytest.mark.slow
def test_a_stopped_recorder_records_nothing_after_the_end(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    # GIVEN two threads that spin, and a recorder that gets no processor from its start on
    with Workload([workload("crowd"), 2]) as running:
        running.go()
        with Recording(tmp_path, "-p", running.pid, "-d", 1, "-F", 499) as recording:
            begun = time.monotonic()
            os.kill(recording.pid, signal.SIGSTOP)
            # WHEN the program goes on for long after the end, and ends itself
            wait_until(lambda: time.monotonic() > begun + 2.5)
            assert running.process.stdin is not None
            running.process.stdin.close()
            running.process.wait()
            os.kill(recording.pid, signal.SIGCONT)
            ended = recording.wait()
    profile = ended.profile
    # THEN the recording is of one second, in which all were alive
    assert profile.recording.duration_ns == _SECOND_NS
    assert len(profile.threads) == 3
    assert [process.exited_ns for process in profile.processes] == [None]
    _assert_times_add_up(profile)
    cpu_ns = sum(thread.on_cpu_ns for thread in profile.threads)
    assert cpu_ns <= 2 * _SECOND_NS
    samples = rows_of(profile, None, None, SampleClass.ON_CPU)
    assert int(samples["ns"].sum()) == pytest.approx(cpu_ns, rel=0.25)
    with sqlite3.connect(ended.capture) as capture:
        assert capture.execute("SELECT DISTINCT interval FROM samples").fetchall() == [(0,)]
    # AND whoever waited for it is told
    assert "longer to stop than -d says" in ended.stderr


@pytest.mark.slow
@pytest.mark.breadth
def test_a_long_run_queue_does_not_make_it_longer(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    # GIVEN 800 threads that wake 300 times a second: hundreds wait for a processor at a time
    with (
        Workload([workload("crowd"), 800, 3000]) as running,
        Recording(tmp_path, "-p", running.pid, "-d", 3, "--gpu", "none") as recording,
    ):
        begun = time.monotonic()
        running.go()
        wait_until(lambda: _has_stopped(recording.pid), timeout_s=60)
        stopped = time.monotonic()
        running.process.kill()
        ended = recording.wait()
    profile = ended.profile
    assert profile.recording.duration_ns == 3 * _SECOND_NS
    assert len(profile.threads) == 801
    _assert_times_add_up(profile)
    # An ordinary process took five times as long.
    assert stopped - begun < 9


def _has_stopped(recorder: int) -> bool:
    """Whether it has left what it does while it records: its priority is given back by then."""
    return os.getpriority(os.PRIO_PROCESS, recorder) == 0
