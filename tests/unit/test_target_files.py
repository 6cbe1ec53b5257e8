# SPDX-License-Identifier: Apache-2.0
"""A file that a target chose costs itself, whatever it holds: never the recording, nor its time."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiflame.agent.errors import Aborted
from aiflame.agent.python.layouts import UnsupportedPython
from aiflame.agent.target_files import (
    MAX_BYTES,
    MAX_CPU_S,
    BadTargetFile,
    FileGuard,
    TargetFile,
)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[bytes], int]]:
    """`opened(data)`: a descriptor of a file with these bytes."""
    descriptors = []

    def make(data: bytes) -> int:
        path = tmp_path / f"file-{len(descriptors)}"
        path.write_bytes(data)
        descriptors.append(os.open(path, os.O_RDONLY))
        return descriptors[-1]

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


Opened = Callable[[bytes], int]


@pytest.mark.parametrize(
    ("size", "offset"),
    [(1, 1 << 63), (1, (1 << 64) - 256), (1, -1), (-1, 0), (0, 0), (1, 3), (1 << 70, 1 << 70)],
)
def test_what_is_not_in_a_file_is_nothing(opened: Opened, size: int, offset: int) -> None:
    assert TargetFile(opened(b"abc")).read(size, offset) == b""


def test_more_than_a_file_has_is_what_it_has(opened: Opened) -> None:
    assert TargetFile(opened(b"abc")).read(1 << 70, 1) == b"bc"


def test_bytes_are_read_and_scanned_within_a_budget(opened: Opened) -> None:
    file = TargetFile(opened(b"abc"))
    file.spend(MAX_BYTES - 3)
    assert file.read(3, 0) == b"abc"
    with pytest.raises(BadTargetFile, match="more to read"):
        file.read(1, 0)


def test_a_closed_descriptor_is_a_bad_file() -> None:
    assert TargetFile(-1).read(1, 0) == b""


def _spin(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


def test_a_file_that_takes_too_long_is_given_up_and_named(opened: Opened) -> None:
    guard = FileGuard()
    with guard.each_file("/slow", opened(b"abc")) as file:
        while True:
            _spin(0.05)
            file.read(1, 0)
    assert "longer" in guard.bad["/slow"]


def test_a_thousand_files_of_one_owner_do_not_take_a_thousand_times_as_long() -> None:
    guard = FileGuard()
    used_s = 0.0
    for _ in range(1000):
        allowed_s = guard.allowance_s(owner=1000)
        guard.charge(1000, allowed_s)
        used_s += allowed_s
    assert used_s < 100
    assert guard.allowance_s(owner=0) == MAX_CPU_S, "others' files are not theirs to pay for"


@pytest.mark.parametrize(
    "error", [OverflowError("x"), struct.error("x"), AssertionError(), MemoryError(), OSError(5)]
)
def test_any_exception_costs_the_file_that_it_came_from(error: Exception) -> None:
    guard = FileGuard()
    with guard.each_file("/bad"):
        raise error
    assert guard.bad["/bad"].startswith(type(error).__name__)


@pytest.mark.parametrize("error", [Aborted("x"), UnsupportedPython("x"), KeyboardInterrupt()])
def test_answers_and_the_users_wishes_get_through(error: BaseException) -> None:
    guard = FileGuard()
    with pytest.raises(type(error)), guard.each_file("/good"):
        raise error
    assert guard.bad == {}


def test_an_owner_has_time_again_after_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, now_s = FileGuard(), [1_000.0]
    monkeypatch.setattr("aiflame.agent.target_files.time.monotonic", lambda: now_s[0])
    for _ in range(1_000):
        guard.charge(0, 1.0)
    least_s = guard.allowance_s(0)
    assert least_s < MAX_CPU_S / 10
    # What was taken beyond is not held against who has the files for more than another hour.
    now_s[0] += 2 * 3_600
    assert guard.allowance_s(0) == MAX_CPU_S
    guard.charge(0, 19.9)
    assert least_s < guard.allowance_s(0) < MAX_CPU_S


def test_bad_files_are_counted_all_day_and_the_last_ones_named() -> None:
    guard = FileGuard()
    others = FileGuard(guard)
    for number in range(5_000):
        for each in (guard, others):
            each.blame(f"/{number}", "damaged")
    assert guard.bad_count == 5_000 and others.bad == {}
    assert len(guard.bad) < 2_000 and "/4999" in guard.bad
