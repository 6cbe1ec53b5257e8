# SPDX-License-Identifier: Apache-2.0
"""Where Python threads wait, for how long, and what they have to do with the GIL meanwhile.

One recording of workloads/pywaits.py on all interpreters at once; each thread measured itself.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from aiflame.agent.model.profile import FrameKind, GilState, Profile, SampleClass
from interpreters import chosen, each, executable, find_executable, has_gil
from recordings import (
    OFF_CPU,
    Recording,
    Workload,
    python_frames_of,
    rows_of_process,
)
from support import WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.slow]

_SCRIPT = WORKLOADS / "pywaits.py"
_HZ = 999
_WAITS = ("nap", "take_lock", "receive", "take_item")


class Run(NamedTuple):
    """The recording of this file."""

    profile: Profile
    pids: dict[str, int]
    truths: dict[str, dict[str, int]]


class One(NamedTuple):
    """Of one interpreter."""

    version: str
    profile: Profile
    rows: npt.NDArray[np.void]
    truth: dict[str, int]

    def under(self, function: str, *classes: SampleClass) -> npt.NDArray[np.void]:
        """The samples that a Python function is in."""
        rows = self.rows[np.isin(self.rows["klass"], classes or (*SampleClass,))]
        stacks = {*rows["stack"].tolist()}
        has = {s for s in stacks if function in _names(self.profile, s)}
        return rows[[stack in has for stack in rows["stack"].tolist()]]

    def ns_by_gil(self, rows: npt.NDArray[np.void]) -> Counter[GilState]:
        """Nanoseconds by what the threads had to do with the GIL."""
        found: Counter[GilState] = Counter()
        for row in rows:
            found[GilState(self.profile.stacks.gil[row["stack"]])] += int(row["ns"])
        return found


def _names(profile: Profile, stack: int) -> list[str]:
    return [frame.name for frame in python_frames_of(profile, stack)]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    pythons = {version: find_executable(version) for version in chosen(request)}
    with ExitStack() as stack:
        loads = {
            version: stack.enter_context(Workload([python, _SCRIPT]))
            for version, python in pythons.items()
            if python is not None
        }
        pids = {version: load.pid for version, load in loads.items()}
        target = ",".join(map(str, pids.values()))
        folder = tmp_path_factory.mktemp("pywaits")
        with Recording(folder, "-p", target, "-F", _HZ) as recording:
            truths = {}
            # One after the other: waits are to be for what they wait for.
            for version, load in loads.items():
                load.go()
                truths[version] = load.truth()
            return Run(recording.stop().profile, pids, truths)


@pytest.fixture(params=each(), scope="module")
def one(request: pytest.FixtureRequest, run: Run) -> One:
    version = str(request.param)
    executable(version)
    rows = rows_of_process(run.profile, run.pids[version])
    return One(version, run.profile, rows, run.truths[version])


@pytest.mark.parametrize("wait", _WAITS)
def test_waits_last_as_long_as_the_thread_says(one: One, wait: str) -> None:
    truth_ns = one.truth[f"{wait}.wall_ns"] - one.truth[f"{wait}.cpu_ns"]
    rows = one.under(wait, *OFF_CPU)
    assert len(rows), _all_names(one)
    (thread,) = {*rows["thread"].tolist()}
    # Between its two looks at the clock it may also have to wait for the GIL.
    within = one.under("measure", *OFF_CPU)
    within_ns = int(within["ns"][within["thread"] == thread].sum())
    assert within_ns == pytest.approx(truth_ns, rel=0.02), _all_names(one)

    # Nearly all of it in the line that waits, and without the GIL.
    (line,) = _lines_of(wait)
    here = [
        any(frame[::2] == (wait, line) for frame in python_frames_of(one.profile, stack))
        for stack in rows["stack"].tolist()
    ]
    assert int(rows["ns"][here].sum()) > 0.9 * truth_ns
    blocked = one.under(wait, SampleClass.BLOCKED)
    without_gil = GilState.RELEASED if has_gil(one.version) else GilState.UNKNOWN
    assert one.ns_by_gil(blocked)[without_gil] > 0.9 * int(blocked["ns"].sum())


def test_the_kernel_stands_above_the_line_that_waits(one: One) -> None:
    for row in one.under("nap", SampleClass.BLOCKED):
        begin, end = one.profile.stacks.offsets[row["stack"] : row["stack"] + 2]
        functions = one.profile.frames["function"][one.profile.stacks.frames[begin:end]]
        kinds = [one.profile.functions[function].kind for function in functions]
        last = max(at for at, kind in enumerate(kinds) if kind is FrameKind.PYTHON)
        assert FrameKind.KERNEL in kinds[last:] and FrameKind.KERNEL not in kinds[:last]


def _lines_of(remark: str) -> list[int]:
    lines = enumerate(_SCRIPT.read_text().splitlines(), 1)
    return [number for number, line in lines if re.search(rf"# at: {remark}$", line)]


def test_two_busy_threads_share_the_gil(one: One) -> None:
    period_ns = one.profile.recording.period_ns
    held_ns = 0
    for name in ("one", "other"):
        rows = one.under(f"{name}_of_two")
        states = one.ns_by_gil(rows)
        wall_ns, cpu_ns = one.truth[f"{name}.wall_ns"], one.truth[f"{name}.cpu_ns"]
        # Time on CPU is sampled: five standard deviations.
        slack_ns = 5 * np.sqrt(cpu_ns / period_ns) * period_ns + 0.01 * wall_ns
        assert abs(states.total() - wall_ns) < slack_ns, (states, wall_ns, cpu_ns)
        if not has_gil(one.version):
            assert {*states} == {GilState.UNKNOWN}
            continue
        # Released is one that just gave it up, and was preempted before it could wait.
        assert {*states} <= {GilState.HELD, GilState.WAITING, GilState.RELEASED}, states
        assert states[GilState.WAITING] > 0.1 * wall_ns, states
        held_ns += states[GilState.HELD]
    # Never both at once, and nearly always one of them.
    assert not has_gil(one.version) or held_ns == pytest.approx(one.truth["one.wall_ns"], rel=0.1)


def _all_names(one: One) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in one.rows:
        found[" ".join(_names(one.profile, int(row["stack"]))[-3:])] += int(row["ns"])
    return found
