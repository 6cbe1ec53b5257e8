# SPDX-License-Identifier: Apache-2.0
"""The windows of real recordings: each stands for itself, and its time adds up."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.model.window import Window, check, check_wall
from recordings import Recording, Workload, children_of, frames_of
from support import wait_until

pytestmark = pytest.mark.bpf

_SECONDS = 6


def _windows(recording: Recording) -> list[Window]:
    """Those after the first, in which threads are still being entered."""
    return recording.windows()[1:]


def _ns(window: Window, thread: int, kind: SampleClass) -> int:
    rows = window.samples[(window.samples["thread"] == thread) & (window.samples["kind"] == kind)]
    return int(rows["weight_ns"].sum())


def test_time_adds_up_in_every_window(workload: Callable[..., Path], tmp_path: Path) -> None:
    # GIVEN threads that sleep through many windows, that switch all the time, and that compute
    started = Workload([workload("boundaries")])
    with started, Recording(tmp_path, "-p", started.pid, "-s") as recording:
        started.go()
        wait_until(lambda: len(_windows(recording)) >= _SECONDS, 60)
        windows = _windows(recording)
        recording.stop()
    sleepers = switchers = 0
    for window in windows:
        # THEN each window can be read alone,
        check(window)
        # on and off CPU are all the time that each thread was there,
        check_wall(window)
        whole_ns = window.end_ns - window.start_ns
        for thread, _, _, name in window.threads.tolist():
            if window.texts[name] == "sleeper":
                # and who sleeps is charged in each, under the stack in which it sleeps.
                assert _ns(window, thread, SampleClass.BLOCKED) == pytest.approx(whole_ns, rel=1e-3)
                (stack,) = set(window.samples["stack"][window.samples["thread"] == thread].tolist())
                assert int(window.stacks["user_depth"][window.stacks["stack"] == stack][0]) > 1
                sleepers += 1
            elif window.texts[name] == "switcher":
                assert _ns(window, thread, SampleClass.BLOCKED) > 0
                switchers += 1
    assert sleepers >= 2 * _SECONDS
    assert switchers >= _SECONDS
    # AND they follow each other.
    for one, following in itertools.pairwise(windows):
        assert (following.number, following.start_ns) == (one.number + 1, one.end_ns)
    assert len(np.unique([window.number for window in windows])) == len(windows)


def test_a_flight_recorder_keeps_the_newest(workload: Callable[..., Path], tmp_path: Path) -> None:
    # GIVEN a recording that keeps two seconds, of a program that did more before
    started = Workload([workload("boundaries")])
    recording = Recording(tmp_path, "-p", started.pid, "-s", "--keep", "2s", "-o", "run.aiflame")
    with started, recording:
        started.go()
        wait_until(lambda: len(_windows(recording)) >= _SECONDS, 60)
        # WHEN it is asked for a copy,
        recording.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: len(list(tmp_path.glob("run-*.html"))) == 1, 60)
        whole_ns = _windows(recording)[-1].end_ns
        # Two windows more, or the end may have the same seconds as the copy.
        wait_until(lambda: _windows(recording)[-1].end_ns > whole_ns + 1_000_000_000, 60)
        ended = recording.stop()
    (copy,) = tmp_path.glob("run-*.aiflame")
    # THEN that and what is written in the end have the newest seconds, and all time of these.
    for path in (copy, tmp_path / "run.aiflame"):
        profile = read_capture(path)
        duration_ns = profile.recording.duration_ns
        # Windows are kept whole; on a crowded machine one may last for longer than a second.
        assert 2_000_000_000 <= duration_ns < whole_ns - 1_000_000_000
        for index, thread in enumerate(profile.threads):
            if thread.name == "sleeper":
                rows = profile.samples[profile.samples["thread"] == index]
                assert int(rows["ns"].sum()) == pytest.approx(duration_ns, rel=1e-3)
                assert thread.observed_ns == pytest.approx(duration_ns, rel=1e-3)
                (stack,) = set(rows["stack"].tolist())
                assert "sleeper" in frames_of(profile, stack)
    assert ended.profile.recording.started_unix_ns > read_capture(copy).recording.started_unix_ns


# More waits than are listed one by one, until a line comes; then few.
_CALMS_DOWN = """
import sys, threading, time

is_calm = threading.Event()

def wait():
    while not is_calm.is_set():
        time.sleep(0.001)

for _ in range(40):
    threading.Thread(target=wait).start()
sys.stdin.readline()
is_calm.set()
while True:
    time.sleep(0.2)
"""


def _losses(windows: list[Window]) -> dict[str, int]:
    """Returns when each loss was told last, by name."""
    return {
        window.texts[name]: window.end_ns for window in windows for name in window.losses["name"]
    }


@pytest.mark.breadth
def test_a_flight_recorder_tells_of_losses_in_what_it_keeps(tmp_path: Path) -> None:
    # GIVEN a loss that is over
    arguments = ("--keep", "2s", "--min-wait", "1ms", "--gpu", "none")
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", _CALMS_DOWN], stdin=subprocess.PIPE)
        )
        stack.callback(process.kill)
        recording = stack.enter_context(Recording(tmp_path, "-p", process.pid, *arguments))
        wait_until(lambda: "waits_not_listed" in _losses(recording.windows()), 60)
        assert process.stdin is not None
        process.stdin.close()

        def is_over() -> bool:
            windows = recording.windows()
            return windows[-1].end_ns > _losses(windows)["waits_not_listed"] + 5_000_000_000

        wait_until(is_over, 60)
        recording.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: len(list(tmp_path.glob("run-*.html"))) == 1, 60)
        ended = recording.stop()
    # THEN neither the copy nor the end has it: it lost nothing of what these hold.
    (copy,) = tmp_path.glob("run-*.aiflame")
    for profile in (read_capture(copy), ended.profile):
        assert "waits_not_listed" not in {loss.name for loss in profile.losses}
    assert "waits_not_listed" not in ended.stderr
    # AND what is told of the whole recording is called that.
    facts = dict(ended.profile.recording.facts)
    assert facts["context switches seen"].endswith("since the recording began")
    # The copy is one, and not what is left of a recording that was killed.
    facts = dict(read_capture(copy).recording.facts)
    assert "incomplete" not in facts
    assert facts["copy"] == "of a recording that went on"


def test_a_flight_recorder_of_a_command_ends_with_it(tmp_path: Path) -> None:
    command = ("sh", "-c", "sleep 4; exit 7")
    accounting = Path("/proc/sys/kernel/task_delayacct")
    before = accounting.read_text()
    accounting.write_text("1")
    try:
        with Recording(tmp_path, "--keep", "1s", "--gpu", "none", "--", *command) as recording:
            # Nobody reads what the kernel accounts itself: nobody listens to it.
            children = [Path(f"/proc/{pid}/cmdline") for pid in children_of(recording.pid)]
            assert not any("taskstats" in words.read_text() for words in children)
            ended = recording.wait()
    finally:
        accounting.write_text(before)
    assert ended.returncode == 7
    profile = read_capture(ended.capture)
    assert 1_000_000_000 <= profile.recording.duration_ns < 4_000_000_000
    assert (len(profile.accounts.threads), profile.accounts.delays) == (0, ())
