# SPDX-License-Identifier: Apache-2.0
"""Reads what Python calls the threads of recorded processes while they run.

A thread is in Python's list for as long as it runs, and nothing tells of its beginning. So the
list is looked at a few times a second, and read where it has changed; and once a second and at the
end in any case, since threads can be renamed. All of it takes two hundredths of a CPU at most, half
of them here: where processes are many or have many threads, each is looked at less often. On a
crowded machine a look takes long and computes no more, and is as often as elsewhere.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from aiflame.agent.losses import LossKind
from aiflame.agent.processes.python_thread_names import read_thread_names
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.python.memory import NoMemoryAccess
from aiflame.agent.recording.pythons import PythonProcess

# A look takes 0.1 ms, a reading of ten threads 0.5 ms.
_LOOK_INTERVAL_NS = 100_000_000
_READ_INTERVAL_NS = 1_000_000_000
# Of a CPU, of the recorder's thread; the process that reads memory takes about as much.
_SHARE = 100
# How long looks may take at once, in which the recorder does nothing else.
_AT_ONCE_NS = 1_000_000
# What the end of a recording may wait for names; those that were read before are there.
_END_NS = 500_000_000


@dataclass(slots=True)
class _Seen:
    """When a process was last looked at and read, and what it was like. Monotonic."""

    looked_ns: int = 0
    read_ns: int = 0
    state: bytes = b""
    passed_over: int = 0  # of its threads, the most at once


class PythonThreadNames:
    """Names of all Python threads of a recording.

    Args:
        table: Is told of them.

    Attributes:
        losses: Threads whose names were not read.
    """

    def __init__(self, table: ProcessTable) -> None:
        self._table = table
        self.losses: Counter[LossKind] = Counter()
        self._seen: dict[int, _Seen] = {}  # by index of the process image
        self._busy_until_ns = 0  # when what was spent is a hundredth of the time again

    def poll(self, processes: Collection[PythonProcess]) -> None:
        """Looks at those whose turn it is."""
        now_ns = time.monotonic_ns()
        if now_ns < self._busy_until_ns:
            return
        waiting = [(self._of(process), process) for process in processes]
        self._seen = {process.image.index: seen for seen, process in waiting}
        due = [one for one in waiting if now_ns - one[0].looked_ns >= _LOOK_INTERVAL_NS]
        begun_ns, begun_cpu_ns = now_ns, time.thread_time_ns()
        for seen, process in sorted(due, key=lambda one: one[0].looked_ns):
            self._look(seen, process, now_ns)
            now_ns = time.monotonic_ns()
            if now_ns - begun_ns > _AT_ONCE_NS:
                break
        self._busy_until_ns = now_ns + (time.thread_time_ns() - begun_cpu_ns) * _SHARE

    def read_all(self, processes: Collection[PythonProcess]) -> None:
        """Reads all at the end of the recording, or as many as there is time for."""
        until_ns = time.monotonic_ns() + _END_NS
        for process in processes:
            if time.monotonic_ns() > until_ns:
                break
            seen = self._of(process)
            seen.state = b""  # they may have been renamed
            self._look(seen, process, until_ns)

    def _of(self, process: PythonProcess) -> _Seen:
        return self._seen.get(process.image.index, _Seen())

    def _look(self, seen: _Seen, process: PythonProcess, now_ns: int) -> None:
        seen.looked_ns = now_ns
        reader = process.thread_names
        if reader is None or process.image.is_over:
            return
        try:
            state = reader.state()
            if state == seen.state and now_ns - seen.read_ns < _READ_INTERVAL_NS:
                return
            names = read_thread_names(process.image, reader)
        except NoMemoryAccess:
            return
        seen.state, seen.read_ns = state, now_ns
        more = max(reader.passed_over - seen.passed_over, 0)
        self.losses[LossKind.PYTHON_NAMES_NOT_READ] += more
        seen.passed_over += more
        self._table.name_python_threads(process.image, names)
