# SPDX-License-Identifier: Apache-2.0
"""How often a recording looks for what Python calls its threads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
from aiflame.agent.processes.table import ProcessTable
from aiflame.agent.recording import python_thread_names
from aiflame.agent.recording.python_thread_names import PythonThreadNames
from aiflame.agent.recording.pythons import PythonProcess

_MS = 1_000_000


@dataclass
class _Machine:
    """Its clocks, and what a look takes of both; counts looks."""

    takes_ns: int
    computes_ns: int
    now_ns: int = 10**12
    cpu_ns: int = 0
    looks: int = 0
    passed_over: int = 0

    def state(self) -> bytes:
        self.looks += 1
        self.now_ns += self.takes_ns
        self.cpu_ns += self.computes_ns
        return b"as before"

    def read(self) -> dict[int, str]:
        return {}


def _looks_in_a_second(machine: _Machine, monkeypatch: pytest.MonkeyPatch) -> int:
    clocks = SimpleNamespace(
        monotonic_ns=lambda: machine.now_ns, thread_time_ns=lambda: machine.cpu_ns
    )
    monkeypatch.setattr(python_thread_names, "time", clocks)
    image = SimpleNamespace(index=0, pid=100, namespaced_pid=0, is_over=False)
    process = cast(PythonProcess, SimpleNamespace(image=image, thread_names=machine))
    table = cast(ProcessTable, SimpleNamespace(name_python_threads=lambda image, names: None))
    names = PythonThreadNames(table)
    until_ns = machine.now_ns + 1_000 * _MS
    while machine.now_ns < until_ns:
        names.poll([process])
        machine.now_ns += 10 * _MS
    return machine.looks


@pytest.mark.parametrize(
    ("machine", "least", "most"),
    [
        (_Machine(takes_ns=_MS // 10, computes_ns=_MS // 10), 9, 10),
        # Most of a look is waiting for a CPU: a thread that lives for half a second is named.
        (_Machine(takes_ns=8 * _MS, computes_ns=_MS // 10), 8, 10),
        # It costs a hundredth of a CPU, whoever has how many threads.
        (_Machine(takes_ns=5 * _MS, computes_ns=5 * _MS), 2, 2),
    ],
)
def test_looks_are_as_often_as_what_they_compute_allows(
    machine: _Machine, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert least <= _looks_in_a_second(machine, monkeypatch) <= most
