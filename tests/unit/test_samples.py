# SPDX-License-Identifier: Apache-2.0
"""Sums of thread time and long waits of the kernel half, as windows have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from aiflame.agent.kernel import abi
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import COLUMNS, Window
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.recording.samples import Samples
from aiflame.agent.recording.thread_times import ThreadTimes
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from support import blind_inspector

_WAITED = int(SampleClass.WAITING_TO_RUN)


class _NoSleeps:
    """Knows no better stacks."""

    def take_wait(self, event: np.void) -> int:
        return int(event["stack"])


class _Open:
    """A window that is open, of two processes that one image each has."""

    def __init__(self) -> None:
        self.window = WindowBuilder(Bounds())
        self.table = ProcessTable(1, lambda pid: None, blind_inspector())
        times = ThreadTimes(self.window, self.table)
        self.samples = Samples(self.window, self.table, times, _NoSleeps())
        for pid, tids in ((41, (41, 42)), (50, (50,))):
            image = self.table.image(pid, 10 * pid)
            process = np.zeros(1, COLUMNS["processes"].dtype)
            process["process"], process["pid"] = image.index, pid
            self.window.define("processes", process)
            threads = np.zeros(len(tids), COLUMNS["threads"].dtype)
            threads["thread"] = [self.table.thread(image, tid).index for tid in tids]
            threads["process"], threads["tid"] = image.index, tids
            self.window.define("threads", threads)

    def add(self, pid: int, tid: int, ns: int) -> None:
        keys, values = np.zeros(1, abi.SUM_KEY_DTYPE), np.zeros(1, abi.SUM_VALUE_DTYPE)
        keys["stack"], keys["sample_class"] = abi.NOT_RUN_STACK, _WAITED
        keys["tgid"], keys["tid"], keys["image"] = pid, tid, 10 * pid
        values["count"], values["ns"] = 1, ns
        self.samples.add(keys, values)

    def close(self) -> Window:
        return self.window.close(1_000)


def _ends(window: Window) -> dict[int, tuple[int, StopReason]]:
    """The process and the end of each stack."""
    rows = window.stacks[["stack", "process", "stop_reason"]].tolist()
    return {stack: (process, StopReason(end)) for stack, process, end in rows}


@pytest.fixture
def opened() -> Any:
    made = _Open()
    yield made
    made.table.binaries.close()


def test_threads_that_have_not_run_yet_have_no_stack_of_their_process(opened: _Open) -> None:
    opened.add(41, 41, 5)
    opened.add(41, 42, 6)
    opened.add(50, 50, 7)
    window = opened.close()
    first, again, other = window.samples["stack"].tolist()
    assert window.samples["weight_ns"].tolist() == [5, 6, 7]
    # Threads of one process share a stack without frames, those of others do not.
    assert first == again != other
    image = opened.table.image
    assert _ends(window) == {
        first: (image(41, 410).index, StopReason.NOT_RUN_YET),
        other: (image(50, 500).index, StopReason.NOT_RUN_YET),
    }
    assert len(window.addresses) == 0


def test_long_waits_for_the_first_cpu_have_that_as_well(opened: _Open) -> None:
    event = np.zeros(1, abi.WAIT_EVENT_DTYPE)
    event["tgid"], event["tid"], event["image"] = 41, 41, 410
    event["stack"], event["runnable_ns"] = abi.NOT_RUN_STACK, 30_000_000
    opened.samples.add_waits(event)
    window = opened.close()
    ((_, end),) = _ends(window).values()
    assert window.waits["stack"].tolist() == [*_ends(window)]
    assert end is StopReason.NOT_RUN_YET
    # It is none of those that are still to be walked.
    assert opened.samples.made == set()
