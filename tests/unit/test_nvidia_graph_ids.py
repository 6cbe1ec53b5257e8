# SPDX-License-Identifier: Apache-2.0
"""Numbers of graph launches that CUPTI tells wrongly, in all sessions but the first of a process.

The stand-in does so where it is asked to (tests/standin/standin.h). It numbers calls one by one, so
that a kernel launched before tells which numbers those after it have.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiflame.gpu.protocol import HelperError, HelperLoss, HelperTier
from nvidia_helper import HELPER, STANDIN, Target, Told, build_alone

_SETUP = ("init", "context 0", "module 1000", "function 0 scale", "function 0 fill", "stream")
# Two graphs: of one kernel, and of two.
_GRAPHS = (
    *("capture 1", "launch 0 10 1 1", "end 1", "instantiate"),
    *("capture 1", "launch 0 10 1 1", "launch 1 20 1 1", "end 1", "instantiate"),
)
_KERNELS = {0: ["scale"], 1: ["fill", "scale"]}
# Of a CUPTI that is known to be wrong, and a driver that it goes with.
_KNOWN = "cupti=130100 driver=13000"


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_alone(tmp_path_factory.mktemp("standin"))


def _second_session(target: Target, replays: Sequence[int]) -> list[tuple[int, list[str], int]]:
    """Replays graphs in two sessions.

    Returns:
        Of the second one: which graph was replayed, names of kernels that have the number of that
        launch, and how many kernels have none, or one of before.
    """
    target.obey(*_SETUP, f"load {target.helper}")
    with target.control() as control:
        control.start(tier=1)
        target.read_until(lambda told: told.tier == HelperTier.TIMES)
        target.obey(*_GRAPHS, "replay 0 1", "replay 1 1", "replay 0 1", "sync")
        target.read_until(lambda told: len(told.kernel_times) == 4)
        control.stop()
        target.read_until(lambda told: told.tier == HelperTier.LAUNCHES)
        assert not target.told.losses and not target.told.errors
        target.told.times.clear()
        control.start(tier=1)
        target.read_until(lambda told: told.tier == HelperTier.TIMES)
        # More than threads can have under way.
        target.obey("launch 1 1 100 0", "sync")
        for number in replays:
            target.obey(f"replay {number} 1", "sync")
        kernels = 100 + sum(len(_KERNELS[number]) for number in replays)
        told = target.read_until(lambda told: len(told.kernel_times) == kernels)
    times = told.kernel_times
    of_graphs = times[times["graph"] != 0]
    first = int(times["launch"][times["graph"] == 0].max()) + 1
    found = []
    for at, number in enumerate(replays):
        own = of_graphs[of_graphs["launch"] == first + at]
        found.append((number, sorted(told.names[int(name)] for name in own["name"]), first + at))
    assert len(of_graphs) == kernels - 100
    return found


def _wrong(found: list[tuple[int, list[str], int]]) -> list[tuple[int, list[str]]]:
    """Returns launches with kernels of others; those with none of their own are left out."""
    return [(number, names) for number, names, _ in found if names and names != _KERNELS[number]]


def _right(found: list[tuple[int, list[str], int]]) -> int:
    return sum(names == _KERNELS[number] for number, names, _ in found)


def _errors(told: Told) -> Counter[tuple[int, str]]:
    return Counter(told.failed)


_REPLAYS = (0, 1) * 20


def test_right_numbers_are_believed(standin: Path) -> None:
    with Target(standin) as target:
        found = _second_session(target, _REPLAYS)
    assert _right(found) == len(_REPLAYS)
    assert not target.told.losses and not target.told.errors


# Kernels that were launched before a session are over at once.
_NONE_BEHIND = "-DGRAPHS_BEHIND_NS=1ull"


@pytest.mark.parametrize(
    ("words", "flags", "why"),
    [
        ("old-graphs", [_NONE_BEHIND], "of no launch of a graph"),
        ("other-graphs", [], "of another graph's launch"),
    ],
)
def test_wrong_numbers_are_found_out(
    tmp_path: Path, words: str, flags: list[str], why: str
) -> None:
    # GIVEN a CUPTI of which nothing is known beforehand
    with Target(build_alone(tmp_path, *flags), words) as target:
        found = _second_session(target, _REPLAYS)
    # THEN it is found out, once
    assert _errors(target.told) == {(HelperError.GRAPH_IDS, why): 1}
    # AND no kernel has the number of another launch, and most have that of their own
    assert _wrong(found) == []
    assert _right(found) > len(_REPLAYS) / 2
    assert not target.told.losses


@pytest.mark.parametrize("words", ["old-graphs", "other-graphs"])
@pytest.mark.parametrize("replays", [_REPLAYS, (1,) * 20])
def test_of_a_version_that_is_known_to_be_wrong_no_number_is_believed(
    standin: Path, words: str, replays: Sequence[int]
) -> None:
    with Target(standin, f"{words} {_KNOWN}") as target:
        found = _second_session(target, replays)
    assert _right(found) == len(replays)
    assert _errors(target.told) == {(HelperError.GRAPH_IDS, "by its version"): 1}
    assert target.told.hellos[-1].library.startswith("CUPTI 130100 ")
    assert not target.told.losses


def test_a_later_version_is_believed(standin: Path) -> None:
    with Target(standin, "cupti=130101 driver=13000") as target:
        found = _second_session(target, _REPLAYS)
    assert _right(found) == len(_REPLAYS) and not target.told.errors


def test_what_order_does_not_tell_is_counted(tmp_path: Path) -> None:
    # GIVEN two graphs, and a CUPTI that does not tell which is which
    folder = build_alone(tmp_path, without="cuptiGetGraphExecId")
    with Target(folder, f"old-graphs {_KNOWN}") as target:
        found = _second_session(target, _REPLAYS)
        told = target.read_until(lambda told: told.losses)
    # THEN no kernel has a launch
    assert _right(found) == 0 and _wrong(found) == []
    assert set(told.kernel_times["launch"][told.kernel_times["graph"] != 0].tolist()) == {0}
    assert told.losses == {HelperLoss.GRAPH_IDS: 60}


def test_buffers_of_a_read_out_are_taken_in_the_order_of_time(standin: Path) -> None:
    # GIVEN a CUPTI whose numbers are not believed, and which hands the last buffers out first
    with Target(standin, f"old-graphs reversed {_KNOWN}") as target:
        found = _second_session(target, (0, 1) * 200)
    # THEN each launch has its kernels, by their order
    assert _wrong(found) == [] and _right(found) == 400
    assert not target.told.losses


def test_kernels_that_come_late_cost_themselves_only(tmp_path: Path) -> None:
    program = tmp_path / "order"
    sources = (STANDIN / "graphs_order.c", HELPER / "graphs.c")
    folders = (f"-I{HELPER}", f"-I{HELPER.parents[1] / 'helper'}")
    subprocess.run(["gcc", "-O2", *folders, *sources, "-o", program], check=True)
    told = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout
    # Numbers are believed.
    first, second = told.split(f"error {HelperError.GRAPH_IDS} 0: by its version\n")
    assert first.split() == ["102", "101", "101"]
    # They are not: the third kernel is taken for the second, which is lost; the others are right.
    late = ["loss", f"{HelperLoss.GRAPH_IDS}:", "1", "0"]
    assert second.split() == ["201", "202", *late, "204", "205"]
