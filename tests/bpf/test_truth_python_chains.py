# SPDX-License-Identifier: Apache-2.0
"""Python stacks, each compared with the one that its leaf can have (tests/pychains.py).

One recording of all interpreters at once, with and without -X perf, which calls each Python
function through a stub that has neither CFI nor a frame pointer. Names, files and lines of all
frames have to be right. What was caught while a call was being made or left, and says that it was
not readable, is counted apart.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from aiflame.agent.model.profile import FrameKind, Profile, SampleClass, StopReason
from interpreters import VERSIONS, chosen, each, executable, find_executable
from pychains import Tree
from recordings import PythonLine, Recording, Workload, python_frames_of, rows_of_process
from support import WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.slow]

_SCRIPT = WORKLOADS / "pychains.py"
_HZ = 4999
# Some 24,000 samples in all.
_CPU_MS = 700
_FUNCTIONS = 200
_BARE_NAMES = ("3.8", "3.9", "3.10")
_BASE = ["<module>", "main", "work"]
_PROTOCOL = ("begin", "end")
_UNREADABLE = "[unreadable Python frame]"
# A version and its options.
_TARGETS = {version: [version] for version in VERSIONS}
_WITH_PERF = ("3.12", "3.13", "3.14", "3.15")
_PERF_TARGETS = {f"{version} -X perf": [version, "-X", "perf"] for version in _WITH_PERF}
_TARGETS |= _PERF_TARGETS
_ROOTED = (StopReason.ROOTED, StopReason.ROOTED_BY_HEURISTIC)


class Run(NamedTuple):
    """The recording of this file."""

    profile: Profile
    pids: dict[str, int]
    tree: Tree


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("pychains")
    tree = Tree(_FUNCTIONS, seed=_FUNCTIONS)
    program = folder / "program.py"
    program.write_text(tree.source)
    with ExitStack() as stack:
        loads = {}
        for target in chosen(request, _TARGETS):
            version, *options = _TARGETS[target]
            python = find_executable(version)
            if python is not None:
                command = [python, *options, _SCRIPT, program, _CPU_MS]
                loads[target] = stack.enter_context(Workload(command))
        pids = {target: load.pid for target, load in loads.items()}
        recorded = ",".join(map(str, pids.values()))
        rest = ("-F", _HZ, "--no-off-cpu", "--stack-storage-size", 65536)
        with Recording(folder, "-p", recorded, *rest) as recording:
            for load in loads.values():
                load.go()
            for load in loads.values():
                load.truth()
            return Run(recording.stop().profile, pids, tree)


def _verdict(tree: Tree, chain: tuple[PythonLine, ...], has_qualified: bool) -> str:
    """What a chain is: "right", "outside" the tree, "unreadable", "empty", or else wrong."""
    if not chain:
        return "empty"
    # Stubs of -X perf have no lines: they stand in for a chain that was not readable.
    if any(frame.name == _UNREADABLE or not frame.line for frame in chain):
        return "unreadable"
    names = [frame.name for frame in chain]
    if names[: len(_BASE)] != _BASE or len(names) == len(_BASE):
        # Before, between and after: main() alone, and what it calls to say so.
        is_outside = names[:2] == _BASE[:2][: len(names)] and {*names[2:3]} <= {"work", *_PROTOCOL}
        return "outside" if is_outside else "wrong base"
    own = chain[len(_BASE) :]
    leaf = own[-1]
    if leaf.name == "finish" and len(own) > 1:
        # It only calls the coroutine that its caller made.
        own = own[:-1]
        leaf = own[-1]
    function = tree.find(leaf.file, leaf.line)
    if function is None:
        return "line of no function"
    wanted = tree.chains(function, leaf.line, has_qualified)
    return "right" if [tuple(frame) for frame in own] in wanted else "wrong chain"


@pytest.mark.parametrize("target", [*each(), *each([*_PERF_TARGETS])])
def test_every_stack_is_the_one_that_its_leaf_can_have(run: Run, target: str) -> None:
    version = _TARGETS[target][0]
    executable(version)
    verdicts: Counter[str] = Counter()
    wrong = []
    has_qualified = not version.startswith(_BARE_NAMES)
    for row in rows_of_process(run.profile, run.pids[target], SampleClass.ON_CPU):
        chain = python_frames_of(run.profile, int(row["stack"]))
        verdict = _verdict(run.tree, chain, has_qualified)
        verdicts[verdict] += int(row["count"])
        if verdict not in ("right", "outside", "unreadable", "empty"):
            wrong.append((verdict, " ".join(f"{name}:{line}" for name, _, line in chain)))
    assert not wrong, (verdicts, wrong[:3])
    samples = verdicts.total() - verdicts["outside"]
    # A sample a period; a machine with other work may be late with some.
    assert samples > 0.8 * _CPU_MS * _HZ / 1000
    assert verdicts["right"] > 0.995 * samples, verdicts
    # One in five thousand, and five standard deviations of so few.
    races = verdicts["unreadable"] + verdicts["empty"]
    assert races < 0.0002 * samples + 5 * (0.0002 * samples) ** 0.5, verdicts


@pytest.mark.parametrize("target", each([*_PERF_TARGETS]))
def test_stubs_of_perf_neither_end_a_stack_nor_show(run: Run, target: str) -> None:
    executable(_TARGETS[target][0])
    profile = run.profile
    ends: Counter[StopReason] = Counter()
    hidden = 0
    for row in rows_of_process(profile, run.pids[target], SampleClass.ON_CPU):
        begin, end = profile.stacks.offsets[row["stack"] : row["stack"] + 2]
        for frame in profile.frames["function"][profile.stacks.frames[begin:end]]:
            function = profile.functions[frame]
            if function.name.startswith("py::"):
                assert function.kind is FrameKind.INTERPRETER
                hidden += 1
        ends[StopReason(profile.stacks.ends[row["stack"]])] += int(row["count"])
    assert hidden > len(profile.stacks) / 10
    # Frames that are kept do not suffice for the deepest: each Python call is five native ones.
    assert ends[StopReason.TOO_DEEP] < 0.2 * ends.total(), ends
    rooted = sum(ends[end] for end in _ROOTED)
    assert rooted > 0.999 * (ends.total() - ends[StopReason.TOO_DEEP]), ends
