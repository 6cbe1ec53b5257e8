# SPDX-License-Identifier: Apache-2.0
"""How often names of Python frames are read: seldom where less is to be done, but in time."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiflame.agent.recording import pythons
from aiflame.agent.recording.pythons import PythonProcesses

_MS = 1_000_000
_OLD, _YOUNG = 0, 1


class _Chains:
    """The kernel's store of Python frames: which came, and of which process."""

    def __init__(self) -> None:
        self.came: dict[int, int] = {}
        self.looks = 0

    def chunks(self, *, take: bool) -> list[tuple[Any, list[Any]]]:
        assert take
        self.looks += 1
        came, self.came = self.came, {}
        dtype = np.dtype([("image", np.int64)])
        return [(np.array([*came], np.uint64), [*np.array([(i,) for i in came.values()], dtype)])]


class _Pythons(PythonProcesses):
    """Interpreters of an old and of a young process, whose frames are named at no cost."""

    def __init__(self, chains: _Chains, now_ns: int) -> None:
        anything: Any = SimpleNamespace(binaries=None)
        programs: Any = SimpleNamespace(python_chains=chains)
        window: Any = SimpleNamespace(is_kept=lambda column, number: False)
        super().__init__(programs, anything, anything, window)
        self.by_image = {_OLD: anything, _YOUNG: anything}
        self._started_ns = {_OLD: now_ns - 3600_000 * _MS, _YOUNG: now_ns}
        self._latest_ns = now_ns
        self.named: list[int] = []

    def _image(self, record: Any) -> Any:
        return SimpleNamespace(started_ns=self._started_ns[int(record["image"])])

    def _name_chains(self, chains: Collection[int]) -> None:
        for chain in chains:
            del self._unnamed[chain]
            self.named.append(chain)


@pytest.mark.parametrize(("thrift", "interval_ms"), [(1, 100), (4, 400), (16, 1000)])
def test_frames_of_old_processes_are_named_as_often_as_may_be(
    monkeypatch: pytest.MonkeyPatch, thrift: int, interval_ms: int
) -> None:
    now_ns = 10**15
    clock = SimpleNamespace(monotonic_ns=lambda: now_ns)
    monkeypatch.setattr(pythons, "time", clock)
    chains = _Chains()
    found = _Pythons(chains, now_ns)
    found.thrift = thrift
    found.poll()
    # WHEN frames come, of an old process and of one that may be over soon
    chains.came = {1: _OLD, 2: _YOUNG}
    now_ns += 20 * _MS
    found.poll()
    # THEN those of this one are named at once
    assert found.named == [2]
    # AND the others in time
    now_ns += (interval_ms - 21) * _MS
    found.poll()
    assert found.named == [2]
    now_ns += _MS
    found.poll()
    assert found.named == [2, 1]
    # Nobody looks for frames while there is none but old processes and nothing is due.
    now_ns += 20 * interval_ms * _MS
    found.poll()
    looks = chains.looks
    now_ns += (interval_ms - 1) * _MS
    found.poll()
    assert chains.looks == looks
    assert found.interval_ns == interval_ms * _MS
