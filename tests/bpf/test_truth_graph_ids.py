# SPDX-License-Identifier: Apache-2.0
"""Kernels of graphs in a second recording, by a CUPTI that numbers their launches wrongly.

Driver and CUPTI are stand-ins (tests/standin): in all sessions but the first a kernel of a graph
has the number of the launch of a graph before its own.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from aiflame.agent.model.gpu import NONE
from aiflame.agent.model.profile import Profile
from nvidia_helper import BLOCK_NS, Target, build
from recordings import Recording, frames_of

pytestmark = [pytest.mark.bpf, pytest.mark.breadth]

_SETUP = ("init", "context 0", "module 1000", "function 0 scale", "function 0 fill", "stream")
# Two graphs: of one kernel, and of two.
_GRAPHS = (
    *("capture 1", "launch 0 10 1 1", "end 1", "instantiate"),
    *("capture 1", "launch 0 10 1 1", "launch 1 20 1 1", "end 1", "instantiate"),
)
_ROUNDS = 200
_WORDS = "CUPTI gives launches of CUDA graphs wrong numbers ({}), kernels are told by their order"


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("standin"))


def _site(profile: Profile, stack: int) -> str:
    if stack == NONE:
        return "unknown"
    return "elsewhere" if "replay_elsewhere" in frames_of(profile, stack) else "here"


def _ran(profile: Profile) -> Counter[tuple[str, str]]:
    """Blocks that ran, by call site and kernel."""
    gpu, found = profile.gpu, Counter[tuple[str, str]]()
    for row in gpu.times:
        key = _site(profile, int(row["stack"])), gpu.kernels[row["kernel"]].name
        found[key] += int(row["duration_ns"]) // BLOCK_NS
    return found


def _record_twice(standin: Path, folder: Path, words: str) -> tuple[Profile, str]:
    """Records a program that replays graphs from two places; returns the second recording."""
    for name in ("first", "second"):
        (folder / name).mkdir()
    with Target(standin, words, gpu="") as target:
        target.obey(*_SETUP)
        with Recording(folder / "first", "-p", target.pid) as recording:
            target.read_until(lambda told: any(state.tier for state in told.states))
            target.obey(*_GRAPHS, "replay 0 1", "elsewhere 1 1", "sync")
            target.read_until(lambda told: len(told.kernel_times) == 3)
            recording.stop()
        target.read_until(lambda told: told.states[-1].tier == 0)
        with Recording(folder / "second", "-p", target.pid) as recording:
            target.read_until(lambda told: told.states[-1].tier > 0)
            for _ in range(_ROUNDS):
                target.obey("replay 0 1", "elsewhere 1 1", "sync")
            ended = recording.stop()
    return ended.profile, ended.profile.gpu.devices[0].details


def test_kernels_are_under_the_launch_of_their_graph(standin: Path, tmp_path: Path) -> None:
    # GIVEN a version that is known to number launches wrongly
    words = "other-graphs cupti=130100 driver=13000"
    profile, details = _record_twice(standin, tmp_path, words)
    # THEN each kernel is where it was launched
    assert _ran(profile) == {
        ("here", "scale"): 10 * _ROUNDS,
        ("elsewhere", "scale"): 10 * _ROUNDS,
        ("elsewhere", "fill"): 20 * _ROUNDS,
    }
    # AND the device's line says which version it is, and what helps
    assert "CUPTI 130100 " in details
    assert _WORDS.format("by its version") + ": update it" in details


def test_a_version_of_which_nothing_is_known_is_found_out(standin: Path, tmp_path: Path) -> None:
    profile, details = _record_twice(standin, tmp_path, "other-graphs")
    assert _WORDS.format("of another graph's launch") in details
    # THEN none is under a launch that it is not of; the first ones may be under none
    ran = _ran(profile)
    assert ran["here", "fill"] == 0
    of_unknown = ran["unknown", "scale"] + ran["unknown", "fill"]
    assert sum(ran.values()) == 40 * _ROUNDS and of_unknown <= 40
    assert 10 * _ROUNDS - 20 <= ran["here", "scale"] <= 10 * _ROUNDS
    assert 10 * _ROUNDS - 20 <= ran["elsewhere", "scale"] <= 10 * _ROUNDS
