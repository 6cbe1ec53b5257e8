# SPDX-License-Identifier: Apache-2.0
"""CPU shares of Python functions and lines, against what programs measured of themselves.

One recording of workloads/pyshares.py on all interpreters at once, which is also what a machine
with several versions looks like.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from aiflame.agent.model.profile import (
    COMPLETE_REASONS,
    FrameKind,
    GilState,
    Profile,
    SampleClass,
)
from interpreters import chosen, each, executable, find_executable, has_gil
from recordings import PythonLine, Recording, Workload, python_frames_of, rows_of_process
from support import WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.slow]

_SCRIPT = WORKLOADS / "pyshares.py"
_CPU_MS = 1000
_HZ = 499
# As in pyshares.py.
_DEPTH = 12
_BARE_NAMES = ("3.8", "3.9", "3.10")

# Where time is known: what was measured under each name, and the chain that leads to it, as
# functions and the remarks on their lines.
_CHAINS = {
    "first": ["a:first"],
    "second": ["a:second"],
    "in_c": ["b:in_c"],
    "generates": ["Class.c:", "Class.generates:generates"],
    "calls_lambda": ["Class.c:", "Class.calls_lambda:calls_lambda"],
    "sorts": ["Class.c:", "Class.sorts:sorts"],
    "deepest": ["Class.c:", *["Class.recurses:recurses"] * (_DEPTH - 1), "Class.recurses:deepest"],
}
_BELOW = {
    "generates": "Class.numbers:numbers",
    "calls_lambda": "Class.calls_lambda.<locals>.<lambda>:lambda",
    "sorts": "Class.key:key",
}
_FUNCTIONS = {
    "a": ("first", "second"),
    "b": ("in_c",),
    "Class.c": ("generates", "calls_lambda", "sorts", "deepest"),
}


class Run(NamedTuple):
    """The recording of this file."""

    profile: Profile
    pids: dict[str, int]
    truths: dict[str, dict[str, int]]


class One(NamedTuple):
    """Of one interpreter: its chains by samples on CPU, and what it measured."""

    version: str
    chains: Counter[tuple[PythonLine, ...]]
    truth: dict[str, int]
    run: Run

    def name(self, qualified: str) -> str:
        """What a function is called in this version."""
        return qualified.rpartition(".")[2] if self.version.startswith(_BARE_NAMES) else qualified


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    pythons = {version: find_executable(version) for version in chosen(request)}
    with ExitStack() as stack:
        loads = {
            version: stack.enter_context(Workload([python, _SCRIPT, _CPU_MS]))
            for version, python in pythons.items()
            if python is not None
        }
        pids = {version: load.pid for version, load in loads.items()}
        target = ",".join(map(str, pids.values()))
        folder = tmp_path_factory.mktemp("pyshares")
        with Recording(folder, "-p", target, "-F", _HZ) as recording:
            for load in loads.values():
                load.go()
            truths = {version: load.truth() for version, load in loads.items()}
            return Run(recording.stop().profile, pids, truths)


@pytest.fixture(params=each(), scope="module")
def one(request: pytest.FixtureRequest, run: Run) -> One:
    version = str(request.param)
    executable(version)
    chains: Counter[tuple[PythonLine, ...]] = Counter()
    for row in rows_of_process(run.profile, run.pids[version], SampleClass.ON_CPU):
        chain = python_frames_of(run.profile, int(row["stack"]))
        if any(frame.name == "work" for frame in chain):
            chains[chain] += int(row["count"])
    return One(version, chains, run.truths[version], run)


def _lines() -> dict[str, set[int]]:
    """The lines of each remark."""
    found: dict[str, set[int]] = {}
    for number, line in enumerate(_SCRIPT.read_text().splitlines(), 1):
        if remark := re.search(r"# at: (\w+)", line):
            found.setdefault(remark[1], set()).add(number)
    return found


def _is_chain(one: One, chain: tuple[PythonLine, ...], wanted: list[str]) -> bool:
    """Whether a chain begins, below work(), as wanted."""
    if len(chain) < len(wanted):
        return False
    for frame, want in zip(chain, wanted, strict=False):
        name, _, remark = want.rpartition(":")
        if frame.name != one.name(name) or (remark and frame.line not in _lines()[remark]):
            return False
    return True


def _below_work(chain: tuple[PythonLine, ...]) -> tuple[PythonLine, ...]:
    return chain[[frame.name for frame in chain].index("work") + 1 :]


def _samples(one: One, wanted: list[str]) -> int:
    return sum(n for chain, n in one.chains.items() if _is_chain(one, _below_work(chain), wanted))


def _is_plausible(found: int, total: int, share: float) -> bool:
    # The number of samples in a part of the time is binomial at worst: five standard deviations,
    # missed once in two million runs.
    return abs(found - share * total) < 5 * np.sqrt(total * share * (1 - share))


def test_all_samples_are_there(one: One) -> None:
    rows = rows_of_process(one.run.profile, one.run.pids[one.version], SampleClass.ON_CPU)
    # All but those of what it says before and after.
    assert one.chains.total() > 0.97 * int(rows["count"].sum())
    # Where others want the CPU too, whether it runs at a tick is chance: five standard deviations.
    expected = one.truth["all"] * _HZ / 1e9
    assert one.chains.total() == pytest.approx(expected, abs=5 * np.sqrt(expected))


def test_functions_get_their_shares(one: One) -> None:
    parts = {name: sum(one.truth[part] for part in parts) for name, parts in _FUNCTIONS.items()}
    for name, part_ns in parts.items():
        share = part_ns / one.truth["all"]
        assert share > 0.1  # how fast each is depends on the version and the processor
        found = _samples(one, [f"{name}:"])
        assert _is_plausible(found, one.chains.total(), share), (name, found, share)


@pytest.mark.parametrize("part", _CHAINS)
def test_lines_get_their_shares(one: One, part: str) -> None:
    share = one.truth[part] / one.truth["all"]
    found = _samples(one, _CHAINS[part])
    assert _is_plausible(found, one.chains.total(), share), (found, share, one.chains)


@pytest.mark.parametrize("part", _BELOW)
def test_what_c_code_calls_stands_below_its_line(one: One, part: str) -> None:
    # Most of the time goes on below: in a generator, a lambda, a callback of sorted().
    found = _samples(one, [*_CHAINS[part], _BELOW[part]])
    # Some 25 samples: less than two fifths of three quarters is five sigma away.
    assert found > 0.35 * _samples(one, _CHAINS[part]), one.chains


def test_native_frames_stand_around_the_python_ones(one: One) -> None:
    # sum() is below the line that calls it, and what started the interpreter above <module>.
    profile, found = one.run.profile, 0
    rows = rows_of_process(profile, one.run.pids[one.version], SampleClass.ON_CPU)
    for row in rows:
        stack = int(row["stack"])
        if "b" not in [frame.name for frame in python_frames_of(profile, stack)[-1:]]:
            continue
        begin, end = profile.stacks.offsets[stack : stack + 2]
        indexes = profile.frames["function"][profile.stacks.frames[begin:end]]
        functions = [profile.functions[index] for index in indexes]
        kinds = [function.kind for function in functions]
        first, leaf = kinds.index(FrameKind.PYTHON), functions[-1]
        assert functions[0].name == "_start" and kinds[0] is FrameKind.NATIVE
        assert FrameKind.INTERPRETER in kinds[:first]
        assert functions[first].name == "<module>"
        assert profile.stacks.ends[stack] in COMPLETE_REASONS
        gil = GilState.HELD if has_gil(one.version) else GilState.UNKNOWN
        assert profile.stacks.gil[stack] == gil
        # Of a stripped interpreter functions have no names, but are there.
        if leaf.kind in (FrameKind.NATIVE, FrameKind.KERNEL):
            found += int(row["count"])
    assert found > 50


def test_every_frame_is_of_the_program(one: One) -> None:
    names = {"<module>", "main", "work", "note", "a", "b"}
    names |= {want.rpartition(":")[0] for chain in _CHAINS.values() for want in chain}
    names |= {want.rpartition(":")[0] for want in _BELOW.values()}
    own = {one.name(name) for name in names}
    length = len(_SCRIPT.read_text().splitlines())
    for chain in one.chains:
        assert [frame.name for frame in chain[:3]] == ["<module>", "main", "work"]
        for frame in chain:
            if Path(frame.file).name != "random.py":
                assert frame.file == str(_SCRIPT) and 0 < frame.line <= length, chain
                assert frame.name.rpartition(".")[2] == "<listcomp>" or frame.name in own, chain
