# SPDX-License-Identifier: Apache-2.0
"""How often the threads of a process are read, by a kernel that is stood in for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import SimpleNamespace

import pytest
from aiflame.agent.dumps import reading
from aiflame.agent.dumps.model import Doubt
from aiflame.agent.dumps.reading import RawThread, ThreadReader
from aiflame.agent.inspector.memory import Answer
from aiflame.agent.kernel.abi import PythonEnd, PythonGil
from aiflame.agent.processes.python_threads import ThreadPython
from aiflame.agent.processes.threads import ThreadRegisters

_RUNNABLE = 0


class _Kernel:
    """Threads all of which have run between any two readings, but for those that sleep on."""

    def __init__(
        self, threads: int, asleep: Collection[int] = (), *, are_on_cpu: bool = False
    ) -> None:
        self.asked: list[int] = []  # for how many threads
        self._threads, self._asleep, self._are_on_cpu = threads, asleep, are_on_cpu

    def registers(
        self, _: int, pids: Collection[int], tids: Collection[int] | None = None
    ) -> list[ThreadRegisters]:
        found = range(1, self._threads + 1) if tids is None else tids
        self.asked.append(len(found))
        ran = len(self.asked)
        return [
            ThreadRegisters(
                *(1, 0 if tid in self._asleep else ran, 0, 0, 0, 0, 0, 0, 0, 1, *pids, tid),
                *(_RUNNABLE, int(self._are_on_cpu), b"name"),
            )
            for tid in found
        ]


class _Python:
    """An interpreter whose threads enter functions while the first stacks are read."""

    def __init__(self, torn: int) -> None:
        self._ends = iter([PythonEnd.UNREADABLE] * torn)

    def refresh(self) -> None: ...
    def refresh_holders(self) -> None: ...
    def prepare(self, thread_pointers: Iterable[int]) -> None: ...

    def read(self, _: int) -> ThreadPython:
        return ThreadPython((), next(self._ends, PythonEnd.COMPLETE), PythonGil.UNKNOWN)


def _threads(
    kernel: _Kernel, monkeypatch: pytest.MonkeyPatch, python: _Python | None = None
) -> list[RawThread]:
    monkeypatch.setattr(reading, "thread_registers", kernel.registers)
    monkeypatch.setattr(reading, "kernel_frames", lambda *_: ())
    memory = SimpleNamespace(read=lambda spans: [Answer(b"", 0) for _ in spans])
    reader = ThreadReader(5, SimpleNamespace(), memory)  # type: ignore[arg-type]
    return reader.read(SimpleNamespace(pid=7), python)  # type: ignore[arg-type]


def _read(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> dict[int, Doubt | None]:
    return {one.registers.tid: one.doubt for one in _threads(kernel, monkeypatch)}


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


@pytest.mark.parametrize(("torn", "is_whole"), [(0, True), (3, True), (4, False)])
def test_python_of_a_thread_that_runs_is_read_again_where_it_was_torn(
    monkeypatch: pytest.MonkeyPatch, torn: int, is_whole: bool
) -> None:
    (thread,) = _threads(_Kernel(1, are_on_cpu=True), monkeypatch, _Python(torn))
    assert thread.python is not None and thread.doubt is Doubt.RUNNING
    assert (thread.python.end is PythonEnd.COMPLETE) == is_whole
