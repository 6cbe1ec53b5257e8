# SPDX-License-Identifier: Apache-2.0
"""Threads for work that the kernel does."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from aiflame.agent import priority


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(priority, "hurry", lambda: True)


def test_tasks_run_side_by_side_and_without_signals() -> None:
    both = threading.Barrier(2)

    def task() -> set[int]:
        both.wait(60)
        return signal.pthread_sigmask(signal.SIG_BLOCK, ())

    with priority.urgent_pool(5) as pool:
        masks = [future.result() for future in [pool.submit(task) for _ in range(2)]]
    assert all(signal.SIGINT in mask for mask in masks)


def test_threads_that_cannot_be_started_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN a container that may have one more thread
    start, started = threading.Thread.start, []

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(BlockingIOError, match="can't start"):
        priority.urgent_pool(2)
    # A thread of the pool lives as long as the pool, which is garbage by now.
    started[0].join(60)
    assert not started[0].is_alive()
