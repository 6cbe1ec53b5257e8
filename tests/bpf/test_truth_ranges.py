# SPDX-License-Identifier: Apache-2.0
"""Time ranges of a real recording, against what the recorded program says it did when."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from aiflame.agent.model.profile import NS_PER_S, Profile, SampleClass, TimeRange
from aiflame.agent.reports.time_range import in_range, recorded_ns
from recordings import Recording, Workload

pytestmark = pytest.mark.bpf

# Work and sleep have 2.2 s each, so that either has a whole second with its margins wherever that
# begins. Those of both are in these five if the program begins within 1.78 s of them.
_SECONDS = 5

# A thread that works and sleeps in turns and says when, and one that only sleeps.
_PROGRAM = """
import threading, time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
input()
print("work", time.time_ns(), flush=True)
until = time.monotonic() + 2.2
while time.monotonic() < until:
    pass
print("sleep", time.time_ns(), flush=True)
time.sleep(2.2)
print("end", time.time_ns(), flush=True)
input()
"""

# Where phases meet, a second has something of both; clocks and drains add some milliseconds.
_MARGIN_NS = 20_000_000


class Run(NamedTuple):
    """A recording, and what the program did from when on, in ns since its start."""

    profile: Profile
    phases: list[tuple[str, int]]
    main: int  # threads, as indexes
    sleeper: int


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("ranges")
    with (
        Workload([sys.executable, "-c", _PROGRAM]) as program,
        Recording(folder, "-p", program.pid, "-d", _SECONDS) as recording,
    ):
        program.go()
        lines = [program.line().split() for _ in range(3)]
        profile = recording.wait().profile
        program.go()
    started_ns = profile.recording.started_unix_ns
    tids = [thread.tid for thread in profile.threads]
    (sleeper,) = (i for i, tid in enumerate(tids) if tid != program.pid)
    phases = [(name, int(at) - started_ns) for name, at in lines]
    yield Run(profile, phases, tids.index(program.pid), sleeper)


def _second(profile: Profile, second: int) -> Profile:
    return in_range(profile, TimeRange(second * NS_PER_S, (second + 1) * NS_PER_S))


def _ns(profile: Profile, thread: int, *classes: SampleClass) -> int:
    rows = profile.samples[profile.samples["thread"] == thread]
    return sum(int(rows["ns"][rows["klass"] == klass].sum()) for klass in classes)


def _seconds_within(phases: list[tuple[str, int]], name: str) -> list[int]:
    """Which seconds lie in a phase of that name as a whole."""
    ends = [*(at for _, at in phases[1:]), phases[-1][1]]
    return [
        second
        for (what, start), end in zip(phases, ends, strict=True)
        for second in range(_SECONDS)
        if what == name
        and start + _MARGIN_NS <= second * NS_PER_S
        and (second + 1) * NS_PER_S + _MARGIN_NS <= end
    ]


def test_one_sleep_is_a_second_in_each_second(run: Run) -> None:
    assert recorded_ns(run.profile) == pytest.approx(_SECONDS * NS_PER_S, rel=0.01)
    for second in range(_SECONDS):
        part = _second(run.profile, second)
        assert _ns(part, run.sleeper, *SampleClass) == pytest.approx(NS_PER_S, rel=0.01), second


def test_a_second_of_sleep_has_nothing_else(run: Run) -> None:
    seconds = _seconds_within(run.phases, "sleep")
    assert seconds
    for second in seconds:
        part = _second(run.profile, second)
        assert _ns(part, run.main, SampleClass.BLOCKED) == pytest.approx(NS_PER_S, rel=0.01)
        assert _ns(part, run.main, SampleClass.ON_CPU) == 0


def test_a_second_of_work_has_no_sleep(run: Run) -> None:
    seconds = _seconds_within(run.phases, "work")
    assert seconds
    for second in seconds:
        part = _second(run.profile, second)
        assert _ns(part, run.main, SampleClass.BLOCKED) < 0.1 * NS_PER_S
        # A crowded machine may have kept it from running for most of that second.
        assert _ns(part, run.main, *SampleClass) == pytest.approx(NS_PER_S, rel=0.3)


def test_all_seconds_together_are_the_recording(run: Run) -> None:
    parts = [_second(run.profile, second) for second in range(_SECONDS + 1)]
    for klass in SampleClass:
        whole = int(run.profile.samples["ns"][run.profile.samples["klass"] == klass].sum())
        found = (int(p.samples["ns"][p.samples["klass"] == klass].sum()) for p in parts)
        assert sum(found) == whole
