# SPDX-License-Identifier: Apache-2.0
"""What there is too little of is shared fairly: who makes up much displaces only what is theirs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from aiflame.agent.model.profile import SampleClass, StopReason
from aiflame.agent.model.window import COLUMNS, NO_STACK, Window, rows_of
from aiflame.agent.processes.owners import max_min_share, owner_of, past_fair_share
from aiflame.agent.recording.window_builder import Bounds, WindowBuilder
from aiflame.agent.sinks.bounded_naming import NAMED_AT_ONCE, by_importance
from hypothesis import given
from hypothesis import strategies as st

_ID, _OTHER = "a" * 64, "b" * 64
_POD = "/kubepods.slice/kubepods-pod0f9cdd5e_8d1c_4d5a_9d5f_6a4b1ad0c9ab.slice"
_NONE = 0xFFFF_FFFF


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        (f"/docker/{_ID}", f"/docker/{_ID}"),
        (f"/docker/{_ID}/made/up", f"/docker/{_ID}"),
        (f"/docker/{_ID}/docker/{_OTHER}", f"/docker/{_ID}"),
        (f"/docker/{_ID}/system.slice/x.service", f"/docker/{_ID}"),
        (f"{_POD}/cri-containerd-{_ID}.scope", f"{_POD}/cri-containerd-{_ID}.scope"),
        ("/system.slice/web.service/worker-7", "/system.slice/web.service"),
        ("/user.slice/user-7.slice/session-3.scope", "/user.slice/user-7.slice"),
        (f"/user.slice/user-7.slice/user@7.service/{_ID}", "/user.slice/user-7.slice"),
        (f"/system.slice/web.service/docker-{_ID}.scope", "/system.slice/web.service"),
        (f"/system.slice/docker.service/x/{_ID}", f"/system.slice/docker.service/x/{_ID}"),
        ("/../../user.slice/user-7.slice/session-3.scope", "/user.slice/user-7.slice"),
        ("/", "/"),
        ("", ""),
    ],
)
def test_what_is_made_inside_of_a_container_is_its_own(path: str, owner: str) -> None:
    assert owner_of(path) == owner


@pytest.mark.parametrize(
    ("demands", "whole", "share"),
    [
        ([], 10, math.inf),
        ([4, 6], 10, math.inf),
        ([9, 9], 10, 5),
        ([100, 1, 3.5], 10, 5.5),
        ([1, 8, 8], 0, 0),
    ],
)
def test_who_wants_little_gets_it_and_leaves_the_rest_to_others(
    demands: list[float], whole: float, share: float
) -> None:
    assert max_min_share(demands, whole) == share


@given(st.lists(st.integers(0, 5), max_size=200), st.integers(0, 100))
def test_a_share_is_fair(owners: list[int], most: int) -> None:
    is_past = past_fair_share(np.array(owners, np.int64), most).tolist()
    kept = [owner for owner, past in zip(owners, is_past, strict=True) if not past]
    # No more are kept than may be, those who lose some have as many as anybody, and of each owner
    # the first ones are kept.
    assert len(kept) <= most
    cut = {owner for owner in owners if kept.count(owner) < owners.count(owner)}
    largest = max((kept.count(owner) for owner in owners), default=0)
    assert all(kept.count(owner) == largest for owner in cut)
    for owner in {*owners}:
        of_owner = [past for each, past in zip(owners, is_past, strict=True) if each == owner]
        assert of_owner == sorted(of_owner)
    if len(owners) <= most:
        assert not any(is_past)


def _recording(bounds: Bounds, *, hostile: int, innocent: int) -> Window:
    """Returns a window of a container with four processes and one in a group that it made.

    These have stacks without end, of 9 ns each on the CPU. Another container has some of 1 ns each,
    and waits in one for as long.
    """
    builder = WindowBuilder(bounds)
    paths = (*[f"/docker/{_ID}"] * 4, f"/docker/{_ID}/x/{_OTHER}", f"/docker/{_OTHER}")
    for number, path in enumerate(paths):
        text = builder.text(path)
        builder.define("cgroups", rows_of("cgroups", (number, 0, text, 0, 0, 0)))
        row = (number, 1 + number, 0, 0, 0, 0, -1, number, 0, 0, 0)
        builder.define("processes", rows_of("processes", row))
        builder.define("threads", rows_of("threads", (number, number, 1 + number, 0)))
    addresses = np.array([11], "<u8").view(COLUMNS["addresses"].dtype)
    samples = []
    for number in range(hostile + innocent):
        process = number % 5 if number < hostile else 5
        row = (1 + number, 0, process, 0, 0, 1, StopReason.ROOTED, 0, False, _NONE, 0)
        builder.define("stacks", rows_of("stacks", row), addresses)
        weight_ns = 9 if process < 5 else 1
        is_wait = number == hostile + innocent - 1
        klass = SampleClass.BLOCKED if is_wait else SampleClass.ON_CPU
        samples.append((1 + number, process, klass, 1, weight_ns))
    builder.add("samples", np.array(samples, COLUMNS["samples"].dtype))
    return builder.close(20)


def test_a_container_with_stacks_without_end_displaces_no_others_in_a_window() -> None:
    window = _recording(Bounds(stacks=300), hostile=2000, innocent=120)
    samples = window.samples
    is_innocent = samples["thread"] == 5
    # THEN all of the other's are there, though they are the lightest
    assert (samples["stack"][is_innocent] != NO_STACK).sum() == 120
    # AND the rest of the room is the first one's, whose time is there, and counted
    hostile = samples[~is_innocent]
    assert (hostile["stack"] != NO_STACK).sum() == 180
    assert hostile["weight_ns"].sum() == 9 * 2000
    assert [int(row["count"]) for row in window.losses] == [2000 - 180]


def test_a_container_with_stacks_without_end_displaces_no_others_where_names_are_few() -> None:
    window = _recording(Bounds(), hostile=2000, innocent=60)
    order = by_importance(window, np.zeros(2060, np.bool_))
    processes = window.stacks["process"]
    # THEN all of the other's are among those that are always named
    assert (processes[order[:NAMED_AT_ONCE]] == 5).sum() == 60
    assert sorted(order.tolist()) == [*range(2060)]
    # AND so are those of a later window, where others of its stacks have names.
    is_named = (processes == 5) & (np.arange(2060) % 2 == 0)
    later = by_importance(window, is_named)
    assert (processes[later[:NAMED_AT_ONCE]] == 5).sum() == 60 - is_named.sum()
    assert sorted(later.tolist()) == np.flatnonzero(~is_named).tolist()
