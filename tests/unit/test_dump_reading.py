# SPDX-License-Identifier: Apache-2.0
"""How often the threads of a process are read, by a kernel that is stood in for."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest
from aiflame.agent.dumps import reading
from aiflame.agent.dumps.model import Doubt
from aiflame.agent.dumps.reading import ThreadReader
from aiflame.agent.inspector.memory import Answer
from aiflame.agent.processes.threads import ThreadRegisters

_RUNNABLE = 0


class _Kernel:
    """Threads all of which have run between any two readings, but for those that sleep on."""

    def __init__(self, threads: int, asleep: Collection[int] = ()) -> None:
        self.asked: list[int] = []  # for how many threads
        self._threads, self._asleep = threads, asleep

    def registers(
        self, _: int, pids: Collection[int], tids: Collection[int] | None = None
    ) -> list[ThreadRegisters]:
        found = range(1, self._threads + 1) if tids is None else tids
        self.asked.append(len(found))
        ran = len(self.asked)
        return [
            ThreadRegisters(
                *(1, 0 if tid in self._asleep else ran, 0, 0, 0, 0, 0, 0, 0, 1, *pids, tid),
                *(_RUNNABLE, 0, b"name"),
            )
            for tid in found
        ]


def _read(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> dict[int, Doubt | None]:
    monkeypatch.setattr(reading, "thread_registers", kernel.registers)
    monkeypatch.setattr(reading, "kernel_frames", lambda *_: ())
    memory = SimpleNamespace(read=lambda spans: [Answer(b"", 0) for _ in spans])
    reader = ThreadReader(5, SimpleNamespace(), memory)  # type: ignore[arg-type]
    found = reader.read(SimpleNamespace(pid=7), None)  # type: ignore[arg-type]
    return {thread.registers.tid: thread.doubt for thread in found}


def test_threads_that_moved_are_read_again_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _Kernel(3, asleep={2})
    assert _read(kernel, monkeypatch) == {1: Doubt.MOVED, 2: None, 3: Doubt.MOVED}
    # All at once, which tells their ids; all together; and two of them, alone, three times.
    assert kernel.asked == [3, 3, 3] + [1] * 12


def test_many_threads_take_time_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each reading tells of all threads of the process, whichever are asked for.
    few, many = _Kernel(2_000), _Kernel(16_000)
    assert len(_read(few, monkeypatch)) == 2_000
    assert len(_read(many, monkeypatch)) == 16_000
    assert len(many.asked) < 2 * len(few.asked)
