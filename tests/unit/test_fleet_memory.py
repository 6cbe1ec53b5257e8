# SPDX-License-Identifier: Apache-2.0
"""How much memory an agent has, by its parts."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Iterator

import pytest
from aiflame.agent.fleet.health import Vitals
from aiflame.agent.fleet.memory import MemoryBudget, MemoryUse, measure

_MB = 1_000_000
# Says that it has so much, and waits.
_HAS = """
import sys
held = bytearray(int(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def children() -> Iterator[list[int]]:
    """Pids of one that has 60 MB, and of one that has 30."""
    found = []
    for size in (60 * _MB, 30 * _MB):
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", _HAS, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        child.stdout.readline()
        found.append(child)
    yield [child.pid for child in found]
    for child in found:
        child.communicate()


def test_each_part_has_its_own(children: list[int]) -> None:
    before = measure(children[0], 5 * _MB)
    assert 60 * _MB < before.naming < 75 * _MB
    assert 30 * _MB < before.helpers < 75 * _MB  # with what other tests have left
    assert before.kernel >= 5 * _MB
    # WHEN this process takes 50 MB more
    with mmap.mmap(-1, 50 * _MB) as held:
        held.write(bytes(50 * _MB))
        after = measure(children[0], 5 * _MB)
    assert 45 * _MB < after.collector - before.collector < 60 * _MB
    assert after.processes == after.collector + after.naming + after.helpers


def test_who_is_gone_has_nothing() -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    assert measure(child.pid, 0).naming == 0
    assert measure(None, 0).naming == 0


def test_a_budget_is_exceeded_after_some_looks_and_kept_at_once() -> None:
    budget, much, little = MemoryBudget(), MemoryUse(100, 50, 1, 10**9), MemoryUse(99, 50, 1, 0)
    looks = [much, much, little, much, much, much, much, little]
    found = [budget.is_over(use, 150) for use in looks]
    assert found == [False, False, False, False, False, True, True, False]


def test_metrics_say_what_there_is_and_what_there_may_be() -> None:
    vitals = Vitals()
    assert not [metric for metric in vitals.collect() if "memory" in metric.name]
    vitals.note_memory(MemoryUse(1, 2, 3, 4), 150)
    found = {
        (sample.name, sample.labels.get("part")): sample.value
        for metric in vitals.collect()
        for sample in metric.samples
        if "memory" in sample.name
    }
    name = "aiflame_memory_bytes"
    assert found == {
        (name, "collector"): 1,
        (name, "naming"): 2,
        (name, "helpers"): 3,
        (name, "kernel"): 4,
        ("aiflame_memory_limit_bytes", None): 150,
    }
