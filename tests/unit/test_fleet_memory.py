# SPDX-License-Identifier: Apache-2.0
"""How much memory an agent has, by its parts."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import pytest
from aiflame.agent.fleet.capture_processes import CaptureProcesses
from aiflame.agent.fleet.log import Log
from aiflame.agent.fleet.memory import MemoryBudget, MemoryUse, mapped_maps_bytes, measure
from aiflame.agent.fleet.vitals import Vitals

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
    before = measure(children[0], 5 * _MB, CaptureProcesses())
    assert 60 * _MB < before.naming < 75 * _MB
    assert 30 * _MB < before.helpers < 75 * _MB  # with what other tests have left
    assert before.kernel >= 5 * _MB
    # WHEN this process takes 50 MB more
    with mmap.mmap(-1, 50 * _MB) as held:
        held.write(bytes(50 * _MB))
        after = measure(children[0], 5 * _MB, CaptureProcesses())
    assert 45 * _MB < after.collector - before.collector < 60 * _MB
    assert after.processes == after.collector + after.naming + after.helpers


def test_what_a_capture_has_is_of_no_budget() -> None:
    captures = CaptureProcesses()
    before = measure(None, 0, captures)
    pipe = subprocess.PIPE
    command = [sys.executable, "-S", "-c", _HAS, str(60 * _MB)]
    with captures.begin(lambda: subprocess.Popen(command, stdin=pipe, stdout=pipe)) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        use = measure(None, 0, captures)
        assert 60 * _MB < use.captures < 75 * _MB
        assert use.processes - before.processes < 20 * _MB
        child.stdin.close()
        assert captures.wait(child, 20) is not None
    assert measure(None, 0, captures).captures == 0
    # AND the end of one is waited for once.
    assert captures.wait(child) is None


def test_maps_of_the_kernel_that_are_mapped_are_not_counted_twice() -> None:
    smaps = """\
7f0000000000-7f0000001000 rw-s 00000000 00:0e 12    anon_inode:bpf-map
Size:                  4 kB
Rss:                   4 kB
Pss:                   4 kB
VmFlags: rd wr sh mr mw me ms sd
7f0000001000-7f0000003000 rw-p 00000000 00:00 0
Rss:                   8 kB
Pss:                   8 kB
7f0000003000-7f0000009000 r--s 00001000 00:0e 12    anon_inode:bpf-map
Rss:                  24 kB
Pss:                  12 kB
Pss_Dirty:            12 kB
7f0000009000-7f000000a000 r--p 00000000 fe:00 9     /tmp/bpf-map
Pss:                   4 kB
"""
    assert mapped_maps_bytes(smaps.splitlines()) == 16 * 1024
    # Where it is cut, what was there before counts.
    cut = [mapped_maps_bytes(smaps[:end].split("\n")) for end in range(len(smaps))]
    assert cut == sorted(cut) and {*cut} == {0, 4 * 1024, 16 * 1024}


def test_who_is_gone_has_nothing() -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    assert measure(child.pid, 0, CaptureProcesses()).naming == 0
    assert measure(None, 0, CaptureProcesses()).naming == 0


class _Fake:
    """Keeps 8 of something, halves of that down to 2, and hears what is said."""

    def __init__(self) -> None:
        self.kept = 8
        self.said: list[str] = []

    def keep_less(self) -> None:
        self.kept = max(self.kept // 2, 2)

    def keep_more(self) -> bool:
        is_less = self.kept < 8
        self.kept = min(2 * self.kept, 8)
        return is_less

    def say(self, text: str) -> None:
        self.said.append(text)

    def say_seldom(self, event: str, text: str) -> None:
        assert event == "memory"
        self.said.append(text)


# All have more than 150, and so has the collector of its half; only others; neither.
_MUCH, _OTHERS, _LITTLE = (
    MemoryUse(*use, 10**9) for use in ((100, 50, 1), (50, 99, 2), (50, 9, 2))
)
# Within the budget, and too near to it for more.
_NEAR = MemoryUse(74, 50, 1, 0)


def _looks(budget: MemoryBudget, use: MemoryUse, count: int) -> list[bool]:
    return [budget.look(use, 150) for _ in range(count)]


@pytest.fixture
def fake() -> _Fake:
    return _Fake()


@pytest.fixture
def budget(fake: _Fake) -> MemoryBudget:
    return MemoryBudget(fake, cast(Log, fake))


def test_a_budget_is_exceeded_after_some_looks_and_kept_at_once(
    budget: MemoryBudget, fake: _Fake
) -> None:
    assert _looks(budget, _MUCH, 2) == [False, False]
    assert _looks(budget, _LITTLE, 1) == [False]
    assert (_looks(budget, _MUCH, 2), fake.kept) == ([False, False], 8)
    assert (_looks(budget, _MUCH, 1), fake.kept) == ([True], 4)
    assert (_looks(budget, _MUCH, 3), fake.kept) == ([True] * 3, 2)
    assert _looks(budget, _LITTLE, 1) == [False]
    assert all("fewer stacks are kept" in text for text in fake.said)


def test_where_others_have_the_memory_stacks_are_not_given_up(
    budget: MemoryBudget, fake: _Fake
) -> None:
    assert (_looks(budget, _OTHERS, 3)[-1], fake.kept) == (True, 8)


@pytest.mark.parametrize("use", [_LITTLE, _OTHERS], ids=["all have little", "the collector has"])
def test_what_was_given_up_is_kept_again_step_by_step(
    budget: MemoryBudget, fake: _Fake, use: MemoryUse
) -> None:
    _looks(budget, _MUCH, 4)
    assert fake.kept == 2
    # WHEN there is less than the budget, THEN nothing changes for as long as that is not room
    _looks(budget, _NEAR, 20)
    assert fake.kept == 2
    # AND where there is some, each step takes as long as the first; a burst begins that anew
    _looks(budget, use, 4)
    _looks(budget, _NEAR, 1)
    _looks(budget, use, 4)
    assert fake.kept == 2
    kept = []
    for _ in range(12):
        _looks(budget, use, 1)
        kept.append(fake.kept)
    assert kept == [4] * 5 + [8] * 7
    # AND it is said once, in each of two times
    said = [text for text in fake.said if "as many stacks are kept as before" in text]
    assert len(said) == 1
    _looks(budget, _NEAR, 1)
    _looks(budget, _MUCH, 3)
    assert fake.kept == 4
    _looks(budget, use, 10)
    assert fake.kept == 8
    assert len([text for text in fake.said if "as before" in text]) == 2


def test_where_nothing_was_given_up_nothing_is_said(budget: MemoryBudget, fake: _Fake) -> None:
    assert not any(_looks(budget, _LITTLE, 50))
    assert (fake.kept, fake.said) == (8, [])


def test_metrics_say_what_there_is_and_what_there_may_be() -> None:
    vitals = Vitals()
    assert not [metric for metric in vitals.collect() if "memory" in metric.name]
    vitals.note_memory(MemoryUse(1, 2, 3, 4, 5), 150)
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
        (name, "captures"): 5,
        ("aiflame_memory_limit_bytes", None): 150,
    }
