# SPDX-License-Identifier: Apache-2.0
"""What has ended is forgotten, and not before its last word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.model.profile import SampleClass
from aiflame.agent.model.window import Window, check, rows_of
from aiflame.agent.processes.binaries import BinaryFile
from aiflame.agent.processes.elf_images import ElfImages
from aiflame.agent.processes.facts import ProcessFacts
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.recording.ended import Ended
from aiflame.agent.recording.thread_times import ThreadTimes
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from breadth import cases
from support import blind_inspector

_PID = 4_000_000  # beyond every pid (PID_MAX_LIMIT)
_S = 1_000_000_000


class _Threads:
    """The kernel half's table."""

    def __init__(self) -> None:
        self.images: dict[bytes, int] = {}

    def lookup(self, key: bytes) -> Any:
        if key not in self.images:
            return None
        state = np.zeros(1, abi.THREAD_STATE_DTYPE)
        state["image"] = self.images[key]
        return state

    def delete(self, key: bytes) -> None:
        del self.images[key]


class _Recorder:
    """As much of one as forgets."""

    def __init__(self) -> None:
        self.current: dict[int, int] = {}
        self.window = WindowBuilder(Bounds(kept_stacks=100))
        self.table = ProcessTable(0, self.current.get, blind_inspector())
        self.facts = ProcessFacts(self.window, self.table, ElfImages(self.table.binaries))
        self.threads = _Threads()
        programs: Any = SimpleNamespace(threads=self.threads)
        keepers = (self.facts,)
        self.used_images: set[int] = set()
        self.times = ThreadTimes(self.window, self.table)
        self.ended = Ended(
            *(programs, self.table, self.window, self.times, keepers, keepers, set),
            lambda: self.used_images,
        )
        self.end_ns = 0

    def run(self, pid: int, image: int, tid: int) -> None:
        """Has a thread run for 1 ns."""
        thread = self.table.thread(self.table.image(pid, image, 1, "worker"), tid)
        row = (0, thread.index, SampleClass.ON_CPU, 1, 1)
        self.window.add("samples", rows_of("samples", row))

    def close(self, window_ns: int = _S) -> Window:
        self.end_ns += window_ns
        self.facts.tell(1 << 62)
        window = self.window.close(self.end_ns)
        check(window)
        self.ended.forget()
        return window


@pytest.fixture
def recorder() -> _Recorder:
    return _Recorder()


def test_processes_and_threads_that_come_and_go_leave_nothing(recorder: _Recorder) -> None:
    # GIVEN one that stays, and five threads a window in it that do not,
    recorder.current[_PID] = 1
    for number in range(200):
        for tid in range(5):
            recorder.run(_PID, 1, _PID + 10 + tid)
            thread = recorder.table.thread(recorder.table.image(_PID, 1), _PID + 10 + tid)
            recorder.table.thread_ended(thread)
        # and three processes a window that do not,
        for other in range(3):
            pid, image = _PID + 100 + other, 2 + number
            recorder.current[pid] = image
            recorder.run(pid, image, pid)
            recorder.table.exited(pid, image, recorder.end_ns)
            del recorder.current[pid]
        recorder.close()
        assert len(recorder.table.images) <= 1 + 3 * 4
        assert recorder.window.known_rows <= 100
    for _ in range(4):
        recorder.close()
    assert len(recorder.table.images) == 1


def test_what_has_ended_is_forgotten_sooner_where_windows_are_long(recorder: _Recorder) -> None:
    recorder.current[_PID] = 1
    recorder.run(_PID, 1, _PID)
    recorder.table.exited(_PID, 1, 5)
    known = []
    for _ in range(3):
        recorder.close(60 * _S)
        known.append(len(recorder.table.images))
    assert known == [1, 1, 0]


def test_the_last_word_of_a_process_may_come_windows_after_its_end(recorder: _Recorder) -> None:
    recorder.current[_PID] = 1
    recorder.run(_PID, 1, _PID)
    recorder.close()
    recorder.table.exited(_PID, 1, 5)
    for _ in range(3):
        recorder.run(_PID, 1, _PID)
        window = recorder.close()
        assert window.processes["process"].tolist() == [0]
    recorder.close()
    # WHEN there is one more after that, it is another's, and counts
    recorder.run(_PID, 1, _PID)
    window = recorder.close()
    assert window.processes["process"].tolist() == [1]
    assert window.samples["weight_ns"].sum() == 1


def test_a_process_whose_stacks_are_still_walked_is_kept(recorder: _Recorder) -> None:
    recorder.current[_PID] = 1
    recorder.run(_PID, 1, _PID)
    recorder.table.exited(_PID, 1, 5)
    recorder.used_images = {0}
    for _ in range(20):
        recorder.close()
    assert set(recorder.table.images) == {0}
    recorder.used_images = set()
    for _ in range(5):
        recorder.close()
    assert recorder.table.images == {}


def test_a_thread_that_is_there_after_its_end_is_another(recorder: _Recorder) -> None:
    # GIVEN a thread of which an end was told, and whose state stays all the same
    recorder.current[_PID] = 1
    tids = np.array([_PID], np.uint32)
    state = np.zeros(1, abi.THREAD_STATE_DTYPE)
    state["tgid"], state["image"], state["first_seen_ns"] = _PID, 1, 1
    state["switched_ns"] = 1
    recorder.table.thread_ended(recorder.table.thread(recorder.table.image(_PID, 1), _PID))
    # WHEN more windows close than it is known for
    for _ in range(8):
        recorder.times.close(recorder.end_ns + _S, tids, state, {_PID})
        # THEN each has all that its rows refer to (which `close` checks), and the thread's time
        times = recorder.close().thread_times
        assert times["observed_ns"].tolist() == [_S if recorder.end_ns > _S else _S - 1]


@cases("window_ns", [_S // 10, _S, 5 * _S])
def test_ends_that_nobody_told_of_are_found(recorder: _Recorder, window_ns: int) -> None:
    # GIVEN a process that has ended, of which only the kernel half's table knows no more
    recorder.current[_PID] = 1
    recorder.run(_PID, 1, _PID)
    key = _PID.to_bytes(4, "little")
    recorder.threads.images[key] = 1
    recorder.close()
    del recorder.current[_PID]
    # WHEN some time has gone by
    for _ in range(200 * _S // window_ns):
        recorder.close(window_ns)
    # THEN it is forgotten, on both sides; another's thread by the same id is not touched
    assert recorder.table.images == {}
    assert recorder.threads.images == {}
    recorder.threads.images[key] = 2


@pytest.mark.parametrize("window_ns", [_S, 5 * _S])
def test_files_are_closed_two_minutes_after_they_were_mapped_last(
    recorder: _Recorder, monkeypatch: pytest.MonkeyPatch, window_ns: int
) -> None:
    forgotten: list[int] = []
    binaries = recorder.table.binaries
    monkeypatch.setattr(binaries, "files", {7: BinaryFile(7, "libfirst.so", None, "")})
    monkeypatch.setattr(binaries, "forget", forgotten.extend)
    monkeypatch.setattr(recorder.facts, "forget_binaries", lambda gone: None)
    for _ in range(115 * _S // window_ns):
        recorder.close(window_ns)
    assert not forgotten
    for _ in range(10 * _S // window_ns):
        recorder.close(window_ns)
    assert forgotten == [7]


def test_a_process_that_has_called_exec_is_forgotten(recorder: _Recorder) -> None:
    for image in range(1, 50):
        recorder.current[_PID] = image
        recorder.run(_PID, image, _PID)
        recorder.close()
        assert len(recorder.table.images) <= 5
    (latest,) = [image for image in recorder.table.images.values() if not image.is_over]
    assert latest.image == 49
