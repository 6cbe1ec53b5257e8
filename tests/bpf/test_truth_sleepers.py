# SPDX-License-Identifier: Apache-2.0
"""Threads that fell asleep before the recording, or before their tables were there: their whole
stacks (workloads/sleepers.c).

The program has no frame pointers, and each of its threads sleeps at the end of a chain of calls
that its name tells.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from aiflame.agent.capture.reader import read_capture
from aiflame.agent.model.profile import FrameKind, Profile, SampleClass, StopReason
from aiflame.agent.model.window import check, check_wall
from aiflame.agent.reports.rows import TRUNCATED_REASONS
from recordings import Recording, Workload, frames_of, rows_of
from support import AIFLAME, wait_until

pytestmark = pytest.mark.bpf

# What a thread waits in, by the first part of its name.
_WAITS = {
    "futex": ["wait_on_futex"],
    "nanosleep": ["wait_in_nanosleep"],
    "read": ["wait_in_read"],
    "poll": ["wait_in_poll"],
    "epoll": ["wait_in_epoll"],
    "large": ["wait_with_large_locals"],
    "libc": ["wait_in_libc", "<libc>"],
    "handler": ["wait_in_handler", "trap_at_entry", "<libc>", "handle_trap"],
}
_DEPTHS = (0, 7, 90)
_THREADS = {f"{way}-{depth}" for way in _WAITS for depth in _DEPTHS}


def _truth(thread: str) -> list[str]:
    """The chain of a thread, root first; threads start in the C library."""
    way, _, depth = thread.partition("-")
    return ["<libc>", "run_sleeper", *["call_deeper"] * int(depth), *_WAITS[way]]


def _chain(profile: Profile, stack: int) -> list[str]:
    """The user frames of a stack, root first; those in the C library together as one."""
    begin, end = profile.stacks.offsets[stack : stack + 2]
    indexes = profile.frames["function"][profile.stacks.frames[begin:end]]
    chain: list[str] = []
    for function in (profile.functions[index] for index in indexes):
        if function.kind != FrameKind.NATIVE:
            continue
        binary = "" if function.binary is None else profile.binaries[function.binary].path
        is_own = Path(binary).name.startswith("sleepers")
        name = function.name if is_own else "<libc>"
        if name != "<libc>" or chain[-1:] != ["<libc>"]:
            chain.append(name)
    return chain


def _program(workload: Callable[..., Path]) -> Path:
    """Builds the program with an identity of its own, so that nothing of it is in any cache."""
    return workload("sleepers", "-fomit-frame-pointer", f"-Wl,--build-id=0x{os.urandom(20).hex()}")


def _record(folder: Path, *options: object) -> Profile:
    with Recording(folder, "--force", *options) as recording:
        return recording.wait().profile


def _pid_of(profile: Profile, row: np.void) -> int:
    return profile.processes[profile.threads[row["thread"]].process].pid


def _assert_asleep_all_the_time(profile: Profile, pid: int) -> None:
    for thread in _THREADS:
        (row,) = (row for row in rows_of(profile, None, thread) if _pid_of(profile, row) == pid)
        assert row["klass"] == SampleClass.BLOCKED, thread
        assert int(row["ns"]) == pytest.approx(profile.recording.duration_ns, rel=0.2)
        assert _chain(profile, row["stack"]) == _truth(thread), thread
        assert profile.stacks.ends[row["stack"]] == StopReason.ROOTED, thread


def test_threads_that_never_wake_up_have_their_whole_stacks(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    with Workload([_program(workload)]) as sleepers:
        # WHEN the tables have to be built, in a recording that is too short for it
        profile = _record(tmp_path, "-p", sleepers.pid, "-d", "50ms")
        _assert_asleep_all_the_time(profile, sleepers.pid)
        assert not profile.losses
        # AND when they are there
        profile = _record(tmp_path, "-p", sleepers.pid, "-d", "1s")
        _assert_asleep_all_the_time(profile, sleepers.pid)
        assert not profile.losses


def test_threads_of_processes_that_nothing_was_seen_of_have_their_whole_stacks(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    with Workload([_program(workload)]) as sleepers:
        profile = _record(tmp_path, "-a", "-d", "2s")
        _assert_asleep_all_the_time(profile, sleepers.pid)


@pytest.mark.parametrize("how", ["first", "second"])
@pytest.mark.breadth
def test_what_threads_slept_in_before_they_woke_up_is_known(
    workload: Callable[..., Path], tmp_path: Path, how: str
) -> None:
    program = _program(workload)
    if how == "second":
        with Workload([program]) as sleepers:
            _record(tmp_path, "-p", sleepers.pid, "-d", "50ms")
    with (
        Workload([program, "wake"]) as sleepers,
        Recording(tmp_path, "-p", sleepers.pid, "--force") as recording,
    ):
        # WHEN all wake up at once, in the first moments of the recording
        sleepers.go()
        assert sleepers.truth()["threads"] == len(_THREADS)
        profile = recording.stop().profile
    for thread in _THREADS:
        whole = (_truth(thread), StopReason.ROOTED)
        # Without tables nobody knew of a handler's other stack while it was there to be read.
        cut = (_truth(thread)[-3:], StopReason.UNREADABLE)
        may_be_cut = how == "first" and thread.startswith("handler")
        before = [
            row
            for row in rows_of(profile, None, thread, SampleClass.BLOCKED)
            if (_chain(profile, row["stack"]), profile.stacks.ends[row["stack"]])
            in ((whole, cut) if may_be_cut else (whole,))
        ]
        assert sum(int(row["count"]) for row in before) == 1, thread
    assert StopReason.NOT_WALKED not in profile.stacks.ends


def test_user_stacks_that_are_not_asked_for_are_not_read(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    with Workload([_program(workload)]) as sleepers:
        profile = _record(tmp_path, "-p", sleepers.pid, "-d", "50ms", "-K")
    assert {profile.functions[index].kind for index in profile.frames["function"]} == {
        FrameKind.KERNEL
    }
    assert set(profile.stacks.ends.tolist()) == {StopReason.EXCLUDED}


def test_ten_thousand_sleeping_threads_have_their_whole_stacks(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    with Workload([_program(workload), "crowd", "10000"]) as crowd:
        for options in (["-d", "2s"], ["-d", "3s"]):
            profile = _record(tmp_path, "-p", crowd.pid, *options)
            rows = rows_of(profile, "wait_on_futex", None, SampleClass.BLOCKED)
            assert len(np.unique(rows["thread"])) >= len(profile.threads) - 1 > 0
            assert set(profile.stacks.ends.tolist()) == {StopReason.ROOTED}
            (chain,) = {tuple(frames_of(profile, int(row["stack"]))) for row in rows}
            assert chain.count("call_deeper") == 5
            # A machine that is too busy to get them all in time says how many are missing.
            missing = {loss.name: loss.count for loss in profile.losses}
            assert len(profile.threads) + missing.pop("threads_not_entered", 0) == 10_001
            assert not missing


@pytest.mark.breadth
def test_threads_that_fall_asleep_before_their_tables_come_have_their_whole_stacks(
    workload: Callable[..., Path], tmp_path: Path
) -> None:
    # GIVEN a program that nobody has seen before, whose threads go to sleep as soon as it starts
    command = f"{_program(workload)}; true"
    with Recording(tmp_path, "--", "sh", "-c", command, stdin=subprocess.PIPE) as recording:
        wait_until(lambda: len(recording.windows()) >= 4, 60)
        windows = recording.windows()
        ended = recording.wait()
    profile = ended.profile
    for thread in _THREADS:
        rows = rows_of(profile, None, thread, SampleClass.BLOCKED)
        # THEN the sleep in which each was all the time has one stack, and that is whole,
        row = rows[np.argmax(rows["ns"])]
        assert int(row["ns"]) > 0.5 * profile.recording.duration_ns, thread
        assert _chain(profile, row["stack"]) == _truth(thread), thread
        assert profile.stacks.ends[row["stack"]] == StopReason.ROOTED, thread
    # AND `record` says so,
    assert "Waits walked late" in ended.stderr
    # AND all windows hold together as they do without.
    for window in windows[1:]:
        check(window)
        check_wall(window)


def _cut_share(profile: Profile) -> float:
    """How much of the time in which threads were blocked has cut stacks."""
    rows = profile.samples[profile.samples["klass"] == SampleClass.BLOCKED]
    is_cut = np.isin(profile.stacks.ends, TRUNCATED_REASONS)[rows["stack"]]
    return float(rows["ns"][is_cut].sum() / rows["ns"].sum())


def _record_first(folder: Path, *command: str) -> Profile:
    """Records a command as on a machine on which nothing was recorded before."""
    empty = 'mount -t tmpfs none /var/cache && mount -t tmpfs none /run && exec "$@"'
    capture = folder / "run.aiflame"
    words = [*AIFLAME, "record", "-o", str(capture), "--", *command]
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", empty, "sh", *words],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=100,
    )
    return read_capture(capture)


@pytest.mark.breadth
def test_pipelines_have_whole_stacks_in_the_first_recording(tmp_path: Path) -> None:
    # GIVEN shells that wait for programs, and programs that wait for each other
    line = "sh -c 'sleep 3 | cat; true'"
    profile = _record_first(tmp_path, "sh", "-c", f"{line} & {line}; wait")
    # THEN what little is cut are waits that were over before there was a table.
    assert _cut_share(profile) < 0.02


_POOL = """
import multiprocessing, time

def nap(s):
    time.sleep(s)

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    with multiprocessing.Pool(2) as pool:
        pool.map(nap, [2.5] * 4, chunksize=1)
"""


def test_spawned_pools_have_whole_stacks_in_the_first_recording(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(_POOL)
    profile = _record_first(tmp_path, sys.executable, "pool.py")
    assert _cut_share(profile) < 0.1
    # Also Python's frames are those of sleeps that began before the interpreter was known.
    naps = rows_of(profile, "nap", None, SampleClass.BLOCKED)
    assert int(naps["ns"].sum()) == pytest.approx(4 * 2_500_000_000, rel=0.05)
