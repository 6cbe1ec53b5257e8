# SPDX-License-Identifier: Apache-2.0
"""A program that damages its own Python frames, and one that names its code objects badly."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from aiflame.agent.model.profile import COMPLETE_REASONS, Profile, SampleClass
from aiflame.agent.symbols.frames import MAX_NAME_CHARS
from interpreters import chosen, each, executable, find_executable
from recordings import (
    Recording,
    Workload,
    frames_of,
    python_frames_of,
    rows_of_process,
)
from support import WORKLOADS

pytestmark = [pytest.mark.bpf, pytest.mark.slow]

_SCRIPT = WORKLOADS / "pyhostile.py"
_HZ = 499
# Of 150 ms, and of a machine with other work.
_FEW = 40
_DAMAGE = {
    "wild": "python_bad_pointer",
    "unmapped": "python_unreadable_stack",
    "looping": "python_loop",
}


class Run(NamedTuple):
    """The recording of this file."""

    profile: Profile
    pids: dict[str, int]


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
        folder = tmp_path_factory.mktemp("pyhostile")
        with Recording(folder, "-p", target, "-F", _HZ, "--no-off-cpu") as recording:
            for load in loads.values():
                load.go()
            for load in loads.values():
                load.truth()
            return Run(recording.stop().profile, pids)


@pytest.fixture(params=each(), scope="module")
def chains(request: pytest.FixtureRequest, run: Run) -> Counter[tuple[str, ...]]:
    """The chains that end in spin(), by samples."""
    version = str(request.param)
    executable(version)
    found: Counter[tuple[str, ...]] = Counter()
    for row in rows_of_process(run.profile, run.pids[version], SampleClass.ON_CPU):
        names = tuple(frame.name for frame in python_frames_of(run.profile, int(row["stack"])))
        if names[-1:] == ("spin",):
            assert run.profile.stacks.ends[row["stack"]] in COMPLETE_REASONS
            assert "_start" in frames_of(run.profile, int(row["stack"]))[:1]
            found[names] += int(row["count"])
    return found


@pytest.mark.parametrize("function", _DAMAGE)
def test_what_was_read_before_the_damage_is_kept(
    chains: Counter[tuple[str, ...]], function: str
) -> None:
    leaf = (function, "overwrite", "spin")
    found = {chain: n for chain, n in chains.items() if chain[-3:] == leaf}
    assert sum(found.values()) > _FEW, chains
    for chain in found:
        assert {*chain} <= {function, "overwrite", "spin"}, chain


def test_what_comes_after_is_whole_again(chains: Counter[tuple[str, ...]]) -> None:
    assert chains["<module>", "main", "spin"] > _FEW, chains


def test_names_are_cut_and_cleaned(chains: Counter[tuple[str, ...]]) -> None:
    found = [chain[2] for chain in chains if chain[:2] == ("<module>", "main") and chain[3:]]
    assert any(name.startswith("xxxx") for name in found)
    assert any(name.startswith("</script><b>") for name in found)
    for name in found:
        assert len(name) <= MAX_NAME_CHARS + 1
        assert name.isprintable(), ascii(name)


@pytest.mark.parametrize("version", each())
def test_lines_that_cannot_be_are_those_of_the_function(run: Run, version: str) -> None:
    executable(version)
    lines = {
        (frame.name, frame.line)
        for row in rows_of_process(run.profile, run.pids[version], SampleClass.ON_CPU)
        for frame in python_frames_of(run.profile, int(row["stack"]))
    }
    assert ("far", 1) in lines
    assert max(line for _, line in lines) < 1000


def test_each_loss_has_its_name(run: Run) -> None:
    losses = {loss.name: loss.count for loss in run.profile.losses}
    assert {*_DAMAGE.values()} <= {*losses}, losses
